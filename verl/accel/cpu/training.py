"""Differentiable norms, gates and rotations by the compiled kernels, in one pass over memory each way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.accel.cpu.kernels import Kernels, Segments
from verl.accel.trained import low_rank_gradients, trained_rms_norm, trained_rotation, trained_swiglu


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


def compiled_attention(
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
    kernels: Kernels,
) -> Tensor:
    """Return the attention [T, H, D] of each segment, computed in float32 and returned in the dtype of v."""
    of = Segments(starts.contiguous(), key_starts.contiguous(), index, scale, window)
    out: Tensor = _CompiledAttention.apply(*(x.float() for x in (q, k, v)), of, kernels)
    return out.to(v.dtype)


def compiled_low_rank_gradients(
    x: Tensor, dy: Tensor, a: Tensor, b: Tensor, scale: float, *, kernels: Kernels
) -> Tensor:
    """Return the gradients [K + N, rank] of A transposed and of B, as `low_rank_gradients`, float32."""
    lanes, threads, (rank, into), out = kernels.panel_width // 2, torch.get_num_threads(), a.shape, len(b)
    if into % (lanes // 2) or out % (lanes // 2):  # whole blocks of a small product
        return low_rank_gradients(x, dy, a, b, scale)
    assert all(t.dtype == torch.float32 for t in (x, dy, a, b)) and x.shape == (len(dy), into) and dy.shape[1] == out
    factors = torch.zeros(into + out, -(-rank // lanes) * lanes)
    factors[:into, :rank], factors[into:, :rank] = a.t(), b
    sums = factors.new_zeros(threads, *factors.shape)
    sizes = into, out, factors.shape[1]
    room = factors.new_empty(threads * int(kernels.functions["low_rank_room"](*sizes)))
    given = (x.contiguous(), dy.contiguous(), factors, factors[into:], sums, room)
    kernels.functions["low_rank_gradients"](*given, len(x), *sizes, scale, threads)
    return sums.sum(0)[:, :rank]


class _CompiledAttention(torch.autograd.Function):
    """The autograd function of `compiled_attention`, of float32 tensors. Scores are computed again for gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, of: Segments, kernels: Kernels) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        ctx.of, ctx.kernels = of, kernels
        ctx.save_for_backward(q, k, v)
        return kernels.attend_segments(q, k, v, of)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        return *ctx.kernels.attend_segments_backward(*ctx.saved_tensors, d_out.contiguous(), ctx.of), None, None


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
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        flat, frozen = (-1, x.shape[-1]), not ctx.needs_input_grad[1]
        given = x.view(flat), weight, d_out.contiguous().view(flat), ctx.eps
        d_x, d_weight = ctx.kernels.rms_norm_backward(*given, frozen=frozen)
        return d_x.view(x.shape), None if d_weight is None else d_weight.to(weight.dtype), None, None


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
