"""Linear layers with factors of LoRA that multiply the same rows, as one function with one gradient of these rows.

For many rows the product of the factors is added to the weight, which is small, and not to the output. The gradients of
both factors are then one pass over the rows (the operation `low_rank_gradients`), and those of the rows one sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from verl.accel.operations import Call
from verl.nn.lora import AddsFactors

_DTYPES = (torch.float32, torch.float64)  # 16 bits would round the sums of gradients, and of weights and factors
_WORTH = 4
"""Times that the values which go in and out of a layer are more than those of its weight: with fewer rows its factors
are added to the outputs. What is merged is therefore never more than a quarter of a layer's activations."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """The tensors of a linear layer: its weight [out, in], and maybe a bias [out] and factors [rank, in] and [out,
    rank] of LoRA."""

    weight: Tensor
    bias: Tensor | None
    a: Tensor | None
    b: Tensor | None

    def merged(self, scale: float) -> Tensor:
        """Return the weight with the product of the factors added."""
        if self.a is None or self.b is None:
            return self.weight
        return torch.addmm(self.weight, self.b, self.a, alpha=scale)


def joint_products(x: Tensor, layers: Sequence[nn.Module], gradients: Mapping[torch.dtype, Call]) -> Sequence[Tensor]:
    """Return the outputs [..., out] of linear layers for the same x [..., in]. They are called one by one if none has
    factors, if one is of another kind or has hooks of others, in 16 bits, and for few rows. gradients: the operation
    `low_rank_gradients` by dtype"""
    given = [_tensors_of(layer, x) for layer in layers]
    known = [each for each in given if each is not None]
    scales = {scale for _, scale in known if scale is not None}
    if len(known) < len(layers) or len(scales) != 1 or not _computes_in(x):
        return [layer(x) for layer in layers]
    flat = [t for each, _ in known for t in (each.weight, each.bias, each.a, each.b)]
    found: tuple[Tensor, ...] = _Joint.apply(x, *scales, gradients[x.dtype], *flat)
    return found


def _computes_in(x: Tensor) -> bool:
    usual = type(x) is Tensor and x.dtype in _DTYPES and not torch.compiler.is_compiling()
    return usual and not torch.is_autocast_enabled(x.device.type)


def _tensors_of(layer: Any, x: Tensor) -> tuple[_Layer, float | None] | None:
    """Return the tensors of a layer and the scale of its factors, None without any; None if it has to be called."""
    hooked = type(layer) is nn.Linear and (
        layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks or "forward" in vars(layer)
    )
    if type(layer) is not nn.Linear or hooked:
        return None
    found, scale, hooks = _Layer(layer.weight, layer.bias, None, None), None, [*layer._forward_hooks.values()]
    (out, into), adds = layer.weight.shape, hooks[0] if len(hooks) == 1 and isinstance(hooks[0], AddsFactors) else None
    if hooks and adds is None:
        return None
    factors = None if adds is None else adds.factors(layer, x)
    if adds is not None and factors is not None:
        if x.numel() // into * (into + out) < _WORTH * into * out:
            return None
        found, scale = _Layer(layer.weight, layer.bias, factors.a, factors.b), adds.scale
    tensors = [t for t in (found.weight, found.bias, found.a, found.b) if t is not None]
    usual = all(type(t) in (Tensor, nn.Parameter) and t.dtype == x.dtype for t in tensors)
    return (found, scale) if usual else None


class _Joint(torch.autograd.Function):
    """The autograd function of `joint_products`. of_factors: `low_rank_gradients` · flat: the tensors of each `_Layer`,
    one after the other"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, of_factors: Call, *flat: Tensor | None) -> tuple[Tensor, ...]:
        rows = x.reshape(-1, x.shape[-1])
        ctx.scale, ctx.of_factors, ctx.shape = scale, of_factors, x.shape
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows, *flat)
        each = _layers(flat)
        return tuple(linear(rows, one.merged(scale), one.bias).view(*x.shape[:-1], -1) for one in each)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, *flat = ctx.saved_tensors
        (of_x, _, _, *needed), dx = ctx.needs_input_grad, None
        found: list[Tensor | None] = [None] * len(flat)
        for i, (one, dy) in enumerate(zip(_layers(flat), gradients, strict=True)):
            if dy is None:
                continue
            dy, at = dy.reshape(-1, len(one.weight)), 4 * i
            if of_x:
                weight = one.merged(ctx.scale)
                dx = dy @ weight if dx is None else dx.addmm_(dy, weight)
            if needed[at]:
                found[at] = dy.t() @ rows
            if needed[at + 1]:
                found[at + 1] = dy.sum(0)
            if needed[at + 2] or needed[at + 3]:
                both = ctx.of_factors(rows, dy, one.a, one.b, ctx.scale)
                found[at + 2], found[at + 3] = both[: rows.shape[1]].t(), both[rows.shape[1] :]
        return None if dx is None else dx.view(ctx.shape), None, None, *found


def _layers(flat: Sequence[Tensor | None]) -> list[_Layer]:
    return [_Layer(*flat[at : at + 4]) for at in range(0, len(flat), 4)]  # type: ignore[arg-type]
