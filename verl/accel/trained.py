"""Differentiable norms, gates, rotations and attention by torch's operations, in few passes over memory and with few
saved tensors. The results are those of transformers' own modules, never less precise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def trained_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return weight * x / rms(x) over the last dimension, computed in at least float32."""
    out: Tensor = _RMSNorm.apply(x, weight, eps)
    return out


def trained_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up. Only these two tensors are saved for the backward pass."""
    out: Tensor = _SwiGLU.apply(gate, up)
    return out


def trained_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [T, h, D] rotated by cos and sin [T, 1, D], in the dtype of x: x cos + rotate_half(x) sin."""
    out: Tensor = _Rotation.apply(x, cos, sin)
    return out


def trained_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: tuple[int, int],
    *,
    scale: float,
    window: int = 0,
    index: Tensor | None = None,
) -> Tensor:
    """Return the attention of each segment, one after the other. The host reads the lengths."""
    if index is not None:
        k, v = k.index_select(0, index), v.index_select(0, index)
    each, found = q.shape[1] // k.shape[1], []
    ends = zip(starts.tolist()[1:], key_starts.tolist()[:-1], key_starts.tolist()[1:], strict=True)
    begin = 0
    for end, first, last in ends:
        k_i, v_i = (x[first:last].repeat_interleave(each, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", _exact(q[begin:end]), _exact(k_i)) * scale
        at = torch.arange(last - first - (end - begin), last - first, device=q.device)[:, None]
        key = torch.arange(last - first, device=q.device)
        hidden = (key > at) | (key <= at - (window or last - first))
        shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        found.append(torch.einsum("hqk,khd->qhd", shares, _exact(v_i)).to(q.dtype))
        begin = end
    return torch.cat(found)


def low_rank_gradients(x: Tensor, dy: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return the gradients [K + N, rank] of A transposed and, below them, of B, for x [n, K], A [rank, K], B [N, rank]
    and the gradient dy [n, N] of scale (x A^T) B^T."""
    low, d_low = (torch.mm(rows, factor).mul_(scale) for rows, factor in ((x, a.t()), (dy, b)))
    return torch.cat([torch.mm(x.t(), d_low), torch.mm(dy.t(), low)])


class _RMSNorm(torch.autograd.Function):
    """The autograd function of `trained_rms_norm`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = _exact(x.reshape(-1, x.shape[-1]))
        inverse = ((rows * rows).mean(-1, keepdim=True) + eps).rsqrt_()  # [n, 1]
        ctx.save_for_backward(x, weight, inverse)
        out = (rows * inverse).mul_(weight)
        return out.view(x.shape).to(torch.promote_types(x.dtype, weight.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        n = x.shape[-1]
        normed = _exact(x.reshape(-1, n)) * inverse
        d_rows = d_out.reshape(-1, n).to(normed.dtype)
        product = d_rows * normed
        exact_weight = weight.to(normed.dtype)
        along = torch.mv(product, exact_weight).div_(n)[:, None]  # the part of each row's gradient that scales the row
        d_x = (d_rows * exact_weight).addcmul_(normed, along, value=-1).mul_(inverse)
        d_weight = product.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return d_x.view(x.shape).to(x.dtype), d_weight, None


class _SwiGLU(torch.autograd.Function):
    """The autograd function of `trained_swiglu`."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(d_out * up, gate), d_out * torch.nn.functional.silu(gate)


class _Rotation(torch.autograd.Function):
    """The autograd function of `trained_rotation`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        half = x.shape[-1] // 2
        out = x * cos
        out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
        out[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        half = d_out.shape[-1] // 2
        d_x = d_out * cos
        d_x[..., :half].addcmul_(d_out[..., half:], sin[..., half:])
        d_x[..., half:].addcmul_(d_out[..., :half], sin[..., :half], value=-1)
        return d_x.to(ctx.dtype), None, None


def _exact(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
