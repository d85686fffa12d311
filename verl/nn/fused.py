"""Norms, gates and rotary attention of Llama-like models in few passes over memory, by the table of operations.

Transformers spells them in a dozen elementwise operations, which cost as much as the matmuls of a small model.
Same mathematics, never less precision; the engine's start-up check compares the whole model with its own forward pass,
but for factors of LoRA, which it finds without effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from verl.accel.devices import device_facts
from verl.accel.families import FUSED_TYPES
from verl.accel.operations import Call, Use
from verl.accel.table import choose
from verl.nn.attention import attend, window_of
from verl.nn.expert_lora import has_factors
from verl.nn.joint import joint_products
from verl.nn.recompute import can_recompute, without_saving

_DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class TrainedOps:
    """The differentiable operations of the table, by the dtype of their first argument."""

    rms_norm: Mapping[torch.dtype, Call]
    swiglu: Mapping[torch.dtype, Call]
    rotation: Mapping[torch.dtype, Call]
    recomputes: bool
    """Norms and gates are computed again in the backward pass."""
    low_rank_gradients: Mapping[torch.dtype, Call]
    """For layers with factors of LoRA that multiply the same rows, as one function; empty: each is called by itself."""


def trained_ops(device: torch.device, hidden: int, *, recomputes: bool, joint: bool) -> TrainedOps:
    """Choose the kernels for a device and rows of `hidden` numbers, in every dtype that a model may compute in."""

    def of(operation: str) -> Mapping[torch.dtype, Call]:
        found = {dtype: choose(operation, Use(device, dtype, {"hidden": hidden})) for dtype in _DTYPES}
        return {dtype: choice.call for dtype, choice in found.items() if choice is not None}

    low_rank = of("low_rank_gradients") if joint else {}
    return TrainedOps(of("trained_rms_norm"), of("trained_swiglu"), of("trained_rotation"), recomputes, low_rank)


def fuse(model: nn.Module, *, packed: bool, checkpointed: bool = False) -> bool:
    """Replace the norms and gates of `model` by fused ones, and its attention if it runs on packed batches. Return
    False if its type is unknown. checkpointed: its layers are computed again as a whole."""
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    if config.model_type not in FUSED_TYPES:
        return False
    device = next(model.parameters()).device
    recomputes = device_facts(device.type).recomputes and not checkpointed
    joint = not recomputes and not checkpointed
    ops = trained_ops(device, config.hidden_size, recomputes=recomputes, joint=joint)
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = MethodType(partial(_norm_forward, ops), module)
        elif config.hidden_act == "silu" and hasattr(module, "gate_proj"):
            module.forward = MethodType(partial(_mlp_forward, ops), module)
        elif packed and hasattr(module, "q_proj") and hasattr(module, "head_dim"):
            module.forward = MethodType(partial(_attention_forward, ops), module)
        elif packed and hasattr(module, "inv_freq"):
            module.forward = partial(_exact_tables, module.forward)
    return True


def unfuse(model: nn.Module) -> None:
    """Let all modules compute by their class's own forward pass again, but for experts with factors of LoRA."""
    for module in model.modules():
        if not has_factors(module):
            module.__dict__.pop("forward", None)


def _norm_forward(ops: TrainedOps, self: Any, hidden_states: Tensor) -> Tensor:
    norm, eps = ops.rms_norm[hidden_states.dtype], self.variance_epsilon
    out: Tensor = norm(hidden_states, self.weight, eps)
    return can_recompute(out, lambda x, weight: norm(x, weight, eps), 2) if ops.recomputes else out


def _mlp_forward(ops: TrainedOps, self: Any, x: Tensor) -> Tensor:
    with without_saving(x):
        gate, up = _products(ops, x, self.gate_proj, self.up_proj)
    swiglu = ops.swiglu[gate.dtype]
    product: Tensor = swiglu(gate, up)
    if ops.recomputes:
        can_recompute(product, swiglu, 2)
    with without_saving(product):
        (out,) = _products(ops, product, self.down_proj)
    return out


def _products(ops: TrainedOps, x: Tensor, *layers: nn.Module) -> Sequence[Tensor]:
    """Return the outputs of linear layers for the same x."""
    gradients = ops.low_rank_gradients
    return joint_products(x, layers, gradients) if gradients else [layer(x) for layer in layers]


def _exact_tables(of_model: Callable[..., tuple[Tensor, Tensor]], x: Tensor, position_ids: Tensor) -> Any:
    """Return the cosines and sines of the positions in at least float32. The model's module rounds them to the dtype of
    x, of which it reads nothing else."""
    return of_model(x.new_empty((), dtype=torch.promote_types(x.dtype, torch.float32)), position_ids)


def _attention_forward(
    ops: TrainedOps,
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute an attention module's output [1, T, hidden] from hidden_states [1, T, hidden], cos and sin [1, T, D]. The
    arguments are those of transformers' modules."""
    assert kwargs.get("past_key_values") is None, "packed attention is driven by a plan alone"
    window, rows = window_of(attention_mask), (hidden_states.shape[1], -1, self.head_dim)
    with without_saving(hidden_states):
        projected = _products(ops, hidden_states, self.q_proj, self.k_proj, self.v_proj)
    q, k, v = (x.view(rows) for x in projected)
    if hasattr(self, "q_norm"):
        q, k = self.q_norm(q), self.k_norm(k)
    cos, sin = (x[0, :, None] for x in position_embeddings)  # [T, 1, D]
    kind = torch.promote_types(hidden_states.dtype, q.dtype)  # under autocast hidden states are float32, q may not be
    q, k = (ops.rotation[kind](x.to(kind), cos, sin) for x in (q, k))
    out = attend(kwargs["verl_plan"], q, k, v, self.scaling, window)  # [T, H, D]
    (out,) = _products(ops, out.reshape(1, len(out), -1), self.o_proj)
    return out, None
