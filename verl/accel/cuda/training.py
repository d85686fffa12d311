"""Differentiable norms, gates and rotations for training, one launch each way. Needs Triton.

The arithmetic is in float32, and results are rounded once; an activation also before it is multiplied, as in a
rollout and in transformers. Sums over rows have a fixed order, so that a gradient is the same in every run."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE = 1024
"""Numbers that one program of a norm or a rotation has at once, if a row is not longer."""
GATE_BLOCK = 1024
MAX_PROGRAMS = 512
"""Programs of a norm's backward pass: each sums the gradient of the weight over its own rows."""


@triton.jit
def _norm(x, weight, out, inverse, n, eps, C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The kernel of `fused_rms_norm`: ROWS rows per program."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    inside = (r[:, None] < n) & (c[None, :] < C)
    at = r[:, None] * C + c[None, :]
    y = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(y * y, 1) / C + eps)
    w = tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(out + at, (y * scale[:, None] * w[None, :]).to(out.dtype.element_ty), mask=inside)
    tl.store(inverse + r, scale, mask=r < n)


@triton.jit
def _norm_backward(
    x, weight, inverse, d_out, d_x, d_weight, n, steps, C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """The kernel of the backward pass of `fused_rms_norm`: a program computes `steps` neighbouring tiles of ROWS rows,
    and sums the gradient of the weight over them."""
    c = tl.arange(0, BLOCK)
    w = tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64) * steps
    for step in range(0, steps):
        r = (first + step) * ROWS + tl.arange(0, ROWS)
        inside = (r[:, None] < n) & (c[None, :] < C)
        at = r[:, None] * C + c[None, :]
        scale = tl.load(inverse + r, mask=r < n, other=0.0)[:, None]
        normed = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
        g = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(g * normed, 0)
        g = g * w[None, :]
        along = tl.sum(g * normed, 1) / C  # the part of each row's gradient that scales the row
        tl.store(d_x + at, ((g - normed * along[:, None]) * scale).to(d_x.dtype.element_ty), mask=inside)
    tl.store(d_weight + tl.program_id(0).to(tl.int64) * C + c, total, mask=c < C)


@triton.jit
def _swiglu(gate, up, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < n, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < n, other=0.0).to(tl.float32)
    active = (g / (1.0 + tl.exp(-g))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + at, (active * u).to(out.dtype.element_ty), mask=at < n)


@triton.jit
def _swiglu_backward(gate, up, d_out, d_gate, d_up, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < n, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < n, other=0.0).to(tl.float32)
    d = tl.load(d_out + at, mask=at < n, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-g))
    tl.store(d_gate + at, (d * u * share * (1.0 + g * (1.0 - share))).to(d_gate.dtype.element_ty), mask=at < n)
    tl.store(d_up + at, (d * g * share).to(d_up.dtype.element_ty), mask=at < n)


@triton.jit
def _rotate(
    x, cos, sin, out, n, heads, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, BACKWARD: tl.constexpr
):
    """The kernel of `fused_rotation`: ROWS heads per program. BACKWARD: the transposed matrix, which maps the gradient
    of the result to that of x."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK)
    inside = (r[:, None] < n) & (d[None, :] < HALF)
    at = r[:, None] * 2 * HALF + d[None, :]
    turn = (r // heads)[:, None] * 2 * HALF + d[None, :]
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + at + HALF, mask=inside, other=0.0).to(tl.float32)
    cos_a = tl.load(cos + turn, mask=inside, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + turn + HALF, mask=inside, other=0.0).to(tl.float32)
    sin_a = tl.load(sin + turn, mask=inside, other=0.0).to(tl.float32)
    sin_b = tl.load(sin + turn + HALF, mask=inside, other=0.0).to(tl.float32)
    if BACKWARD:
        first, second = a * cos_a + b * sin_b, b * cos_b - a * sin_a
    else:
        first, second = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    tl.store(out + at, first.to(out.dtype.element_ty), mask=inside)
    tl.store(out + at + HALF, second.to(out.dtype.element_ty), mask=inside)


def fused_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return weight * x / rms(x) over the last dimension, differentiable in both."""
    out: Tensor = _RMSNorm.apply(x, weight, eps)
    return out


def fused_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, differentiable in both. Only these two tensors are saved for the backward pass."""
    out: Tensor = _SwiGLU.apply(gate, up)
    return out


def fused_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [T, h, D] rotated by cos and sin [T, 1, D], in the dtype of x, differentiable in x."""
    out: Tensor = _Rotation.apply(x, cos, sin)
    return out


def _tile(width: int) -> tuple[int, int]:
    """Return the power of two that holds a row, and the number of rows of one program."""
    block = triton.next_power_of_2(width)
    return block, max(1, TILE // block)


def _warps(block: int) -> int:
    return min(16, max(4, block // 256))


class _RMSNorm(torch.autograd.Function):
    """The autograd function of `fused_rms_norm`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, width = x.contiguous(), x.shape[-1]
        n = x.numel() // width
        out = torch.empty_like(x, dtype=torch.promote_types(x.dtype, weight.dtype))
        inverse = torch.empty(n, dtype=torch.float32, device=x.device)
        block, rows = _tile(width)
        if n:
            _norm[triton.cdiv(n, rows),](
                x, weight, out, inverse, n, eps, C=width, BLOCK=block, ROWS=rows, num_warps=_warps(block)
            )
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        width, n = x.shape[-1], len(inverse)
        block, rows = _tile(width)
        steps = max(1, triton.cdiv(triton.cdiv(n, rows), MAX_PROGRAMS))
        programs = triton.cdiv(n, rows * steps)
        d_x = torch.empty_like(x)
        d_weight = torch.empty(programs, width, dtype=torch.float32, device=x.device)
        if n:
            _norm_backward[programs,](
                x,
                weight,
                inverse,
                d_out.contiguous(),
                d_x,
                d_weight,
                n,
                steps,
                C=width,
                BLOCK=block,
                ROWS=rows,
                num_warps=_warps(block),
            )
        return d_x, d_weight.sum(0).to(weight.dtype), None


class _SwiGLU(torch.autograd.Function):
    """The autograd function of `fused_swiglu`."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        if n := gate.numel():
            _swiglu[triton.cdiv(n, GATE_BLOCK),](gate, up, out, n, BLOCK=GATE_BLOCK)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        if n := gate.numel():
            _swiglu_backward[triton.cdiv(n, GATE_BLOCK),](
                gate, up, d_out.contiguous(), d_gate, d_up, n, BLOCK=GATE_BLOCK
            )
        return d_gate, d_up


class _Rotation(torch.autograd.Function):
    """The autograd function of `fused_rotation`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None, None]:
        return _rotated(d_out, *ctx.saved_tensors, backward=True), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, *, backward: bool) -> Tensor:
    x = x.contiguous()
    out, (tokens, heads, width) = torch.empty_like(x), x.shape
    block, rows = _tile(width // 2)
    if n := tokens * heads:
        _rotate[triton.cdiv(n, rows),](
            x, cos, sin, out, n, heads, HALF=width // 2, BLOCK=block, ROWS=rows, BACKWARD=backward
        )
    return out
