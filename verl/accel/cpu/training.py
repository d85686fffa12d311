"""Differentiable norms, gates and rotations by the compiled kernels, in one pass over memory each way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.accel.cpu.kernels import Kernels
from verl.accel.trained import trained_rms_norm, trained_rotation, trained_swiglu


def compiled_rms_norm(x: Tensor, weight: Tensor, eps: float, *, kernels: Kernels) -> Tensor:
    """Return weight * x / rms(x) over the last dimension, float32, differentiable."""
    if weight.dtype != torch.float32:
        return trained_rms_norm(x, weight, eps)
    out: Tensor = _CompiledNorm.apply(x, weight, eps, kernels)
    return out


def compiled_swiglu(gate: Tensor, up: Tensor, *, kernels: Kernels) -> Tensor:
    """Return silu(gate) * up, differentiable."""
    if up.dtype != gate.dtype:
        return trained_swiglu(gate, up)
    out: Tensor = _CompiledGate.apply(gate.contiguous(), up.contiguous(), kernels)
    return out


def compiled_rotation(x: Tensor, cos: Tensor, sin: Tensor, *, kernels: Kernels) -> Tensor:
    """Return x [T, h, D] cos + rotate_half(x) sin for cos and sin [T, 1, D], float32, differentiable in x."""
    if not cos.dtype == sin.dtype == torch.float32:
        return trained_rotation(x, cos, sin)
    out: Tensor = _CompiledRotation.apply(x, cos.contiguous(), sin.contiguous(), kernels)
    return out


class _CompiledNorm(torch.autograd.Function):
    """The autograd function of `compiled_rms_norm`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, kernels: Kernels) -> Tensor:
        x = x.contiguous()
        ctx.eps, ctx.kernels = eps, kernels
        ctx.save_for_backward(x, weight)
        return kernels.rms_norm(x.view(-1, x.shape[-1]), weight.detach(), eps, exact=True).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        flat = (-1, x.shape[-1])
        d_x, d_weight = ctx.kernels.rms_norm_backward(x.view(flat), weight, d_out.contiguous().view(flat), ctx.eps)
        return d_x.view(x.shape), d_weight.to(weight.dtype), None, None


class _CompiledGate(torch.autograd.Function):
    """The autograd function of `compiled_swiglu`."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kernels: Kernels) -> Tensor:
        ctx.kernels = kernels
        ctx.save_for_backward(gate, up)
        return kernels.swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None]:
        return *ctx.kernels.swiglu_backward(*ctx.saved_tensors, d_out.contiguous()), None


class _CompiledRotation(torch.autograd.Function):
    """The autograd function of `compiled_rotation`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, kernels: Kernels) -> Tensor:
        ctx.kernels = kernels
        ctx.save_for_backward(cos, sin)
        return kernels.rotation(x.contiguous(), cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.kernels.rotation(d_out.contiguous(), *ctx.saved_tensors, back=True), None, None, None
