"""Differentiable norms and gates for the training engine, in one pass over memory each way, on the compiled kernels.
Same mathematics as transformers' own, never less precise. Without kernels torch's operations compute them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.accel.cpu.kernels import Kernels, load_kernels


def has_kernels() -> bool:
    return isinstance(load_kernels(torch.float32), Kernels)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / rms(x) over the last dimension, in at least float32."""
    out: Tensor = _RMSNorm.apply(x, weight, eps)
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    kernels = load_kernels(torch.float32)
    if gate.dtype != torch.float32 or not isinstance(kernels, Kernels):
        return torch.nn.functional.silu(gate) * up
    out: Tensor = _SwiGLU.apply(gate.contiguous(), up.contiguous(), kernels)
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        found = load_kernels(torch.float32) if x.dtype == weight.dtype == torch.float32 else None
        ctx.kernels = found if isinstance(found, Kernels) else None
        if ctx.kernels is not None:
            x = x.contiguous()
            ctx.eps = eps
            ctx.save_for_backward(x, weight)
            return ctx.kernels.rms_norm(x.view(-1, x.shape[-1]), weight.detach(), eps).view(x.shape)
        rows = _exact(x.reshape(-1, x.shape[-1]))
        inverse = ((rows * rows).mean(-1, keepdim=True) + eps).rsqrt_()  # [n, 1]
        ctx.save_for_backward(x, weight, inverse)
        out = (rows * inverse).mul_(weight)
        return out.view(x.shape).to(torch.promote_types(x.dtype, weight.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None]:
        if ctx.kernels is not None:
            x, weight = ctx.saved_tensors
            flat = (-1, x.shape[-1])
            d_x, d_weight = ctx.kernels.rms_norm_backward(x.view(flat), weight, d_out.contiguous().view(flat), ctx.eps)
            return d_x.view(x.shape), d_weight.to(weight.dtype), None
        x, weight, inverse = ctx.saved_tensors
        n = x.shape[-1]
        normed = _exact(x.reshape(-1, n)) * inverse
        d_rows = d_out.reshape(-1, n).to(normed.dtype)
        product = d_rows * normed
        exact_weight = weight.to(normed.dtype)
        along = torch.mv(product, exact_weight).div_(n)[:, None]  # the part of each row's gradient that scales the row
        d_x = (d_rows * exact_weight).addcmul_(normed, along, value=-1).mul_(inverse)
        return d_x.view(x.shape).to(x.dtype), product.sum(0).to(weight.dtype), None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kernels: Kernels) -> Tensor:
        ctx.kernels = kernels
        ctx.save_for_backward(gate, up)
        return kernels.swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None]:
        return *ctx.kernels.swiglu_backward(*ctx.saved_tensors, d_out.contiguous()), None


def _exact(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
