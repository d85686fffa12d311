"""The small operations between the products of a layer: residual and norm, activation and gate. Needs Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

GATE_BLOCK = 1024
GELU = 1.5957691216057308  # 2 sqrt(2 / pi): gelu_tanh(x) = x sigmoid(GELU (x + 0.044715 x^3))


@triton.jit
def _normed(x, weight, eps, C: tl.constexpr):
    """Return the row x [BLOCK] float32, which is 0 beyond C, divided by its root mean square and multiplied by a
    weight."""
    return x / tl.sqrt(tl.sum(x * x, 0) / C + eps) * weight


@triton.jit
def _add_norm(
    residual,
    delta,
    delta_weight,
    weight,
    out,
    eps,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDED: tl.constexpr,
    DELTA_NORMED: tl.constexpr,
):
    """The kernel of `add_norm`: one row per program."""
    n, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(residual + n * C + c, mask=c < C, other=0.0)
    if ADDED:
        y = tl.load(delta + n * C + c, mask=c < C, other=0.0).to(tl.float32)
        if DELTA_NORMED:
            y = _normed(y, tl.load(delta_weight + c, mask=c < C, other=0.0).to(tl.float32), eps, C)
            y = y.to(x.dtype).to(tl.float32)
        x = (x.to(tl.float32) + y).to(x.dtype)
        tl.store(residual + n * C + c, x, mask=c < C)
    y = _normed(x.to(tl.float32), tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32), eps, C)
    tl.store(out + n * C + c, y.to(x.dtype), mask=c < C)


@triton.jit
def _gated(both, out, F, GELU: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr):
    """The kernel of `gated`: BLOCK columns of one row per program."""
    n, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(both + n * 2 * F + c, mask=c < F, other=0.0).to(tl.float32)
    up = tl.load(both + n * 2 * F + F + c, mask=c < F, other=0.0)
    slope = gate if SILU else GELU * (gate + 0.044715 * gate * gate * gate)
    active = gate / (1.0 + tl.exp(-slope))
    product = active.to(up.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out + n * F + c, product.to(up.dtype), mask=c < F)


def add_norm(residual: Tensor, delta: Tensor | None, delta_weight: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add delta [n, C] (None: nothing) to residual [n, C] in place; with `delta_weight`, delta is first divided by its
    root mean square and multiplied by that weight. Return the residual, divided by its root mean square, times
    `weight`, [n, C]."""
    n, width = residual.shape
    out = torch.empty_like(residual)
    _add_norm[n,](
        residual,
        delta,
        delta_weight,
        weight,
        out,
        eps,
        C=width,
        BLOCK=triton.next_power_of_2(width),
        ADDED=delta is not None,
        DELTA_NORMED=delta_weight is not None,
        num_warps=4 if width <= 2048 else 8,
    )
    return out


def gated(both: Tensor, activation: str) -> Tensor:
    """Return activation(gate) up [n, F] for both [n, 2 F] = (gate, up); the activation is silu or gelu_tanh."""
    n, width = both.shape[0], both.shape[1] // 2
    out = both.new_empty(n, width)
    block = min(GATE_BLOCK, triton.next_power_of_2(width))
    _gated[n, triton.cdiv(width, block)](
        both, out, width, GELU=GELU, SILU=activation == "silu", BLOCK=block, num_warps=4
    )
    return out
