"""LoRA in the experts of a mixture that transformers keeps in two tensors: each expert has factors of its own.

The forward pass of the module is replaced: transformers' reads the two tensors alone. The rows of an expert are
multiplied with its weight and with its factors, so no product of factors is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, linear

from verl.model_engine.options import EXPERT_FACTORS
from verl.parameter_set import DOWN, GATE_UP

ReadFactors = Callable[[str], tuple[Tensor, Tensor] | None]
"""Returns the factors A [experts, rank, in] and B [experts, out, rank] of a tensor by its name in the module of
experts; None if it has none now."""
_GROUPED = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNED_BYTES = 16


class ExpertsWithFactors:
    """The forward pass of a module of experts with factors. scale: the factor of their product"""

    def __init__(self, module: Any, factors: ReadFactors, scale: float) -> None:
        self._module, self._factors, self._scale = module, factors, scale

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the experts' outputs [t, H] for hidden_states [t, H], summed with the weights [t, k] of the chosen
        experts [t, k]."""
        module, chosen = self._module, top_k_index.shape[1]
        expert, order = torch.sort(top_k_index.flatten())
        ends = torch.searchsorted(expert, torch.arange(module.num_experts, device=expert.device), right=True)
        ends = ends.to(torch.int32)
        inner = module._apply_gate(self._product(GATE_UP, hidden_states[order // chosen], ends))
        weighted = self._product(DOWN, inner, ends) * top_k_weights.flatten()[order, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return weighted[back].view(len(hidden_states), chosen, -1).sum(1).to(hidden_states.dtype)

    def _product(self, name: str, x: Tensor, ends: Tensor) -> Tensor:
        """Return the products of rows x, sorted by expert, with a tensor of the module and its factors."""
        out, factors = by_expert(x, getattr(self._module, name), ends), self._factors(name)
        if factors is None:
            return out
        a, b = (factor.to(x) for factor in factors)
        return out + by_expert(by_expert(x, a, ends) * self._scale, b, ends)


def by_expert(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return the rows x [n, in], sorted by expert, times the weight of each row's expert, [n, out].

    weights: [experts, out, in] · ends: for each expert the place after its last row, int32"""
    x = x.to(weights.dtype)
    if _can_group(weights):
        return grouped_mm(x, weights.transpose(-2, -1), offs=ends)
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([linear(rows, one) for rows, one in zip(x.split(counts), weights.unbind(), strict=True)])


def _can_group(weights: Tensor) -> bool:
    """Return True if torch multiplies all experts in one call: its rows are aligned, and its dtypes and devices few."""
    aligned = all(size * weights.itemsize % _ALIGNED_BYTES == 0 for size in weights.shape[1:])
    if weights.dtype not in _GROUPED or not aligned or weights.device.type not in ("cpu", "cuda"):
        return False
    return weights.device.type == "cpu" or torch.cuda.get_device_capability(weights.device) >= (8, 0)


def experts_of(model: nn.Module) -> list[str]:
    """Return the names of the tensors of experts that can have factors."""
    if model.config.get_text_config().model_type not in EXPERT_FACTORS:  # type: ignore[union-attr, operator]
        return []
    found = (name for name, module in model.named_modules() if {GATE_UP, DOWN} <= module._parameters.keys())
    return [f"{name}.{tensor}" for name in found for tensor in (GATE_UP, DOWN)]


def from_peft(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return factors as they are computed with, from those of a file of PEFT's (`as_peft`). experts: of a tensor of
    experts their number, else 0."""
    if not experts:
        return a, b
    return a.view(experts, -1, a.shape[1]), b.view(len(b), -1, experts).permute(2, 0, 1).contiguous()


def add_to_experts(module: nn.Module, factors: ReadFactors, scale: float) -> None:
    """Let a module of experts compute with factors from now on."""
    module.forward = ExpertsWithFactors(module, factors, scale)


def has_factors(module: nn.Module) -> bool:
    """Return True if a module is one of experts that computes with factors."""
    return isinstance(module.__dict__.get("forward"), ExpertsWithFactors)


def without_factors(module: nn.Module) -> None:
    """Let a module of experts compute by its class's own forward pass again."""
    if has_factors(module):
        del module.__dict__["forward"]
