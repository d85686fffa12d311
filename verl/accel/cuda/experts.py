"""One product per expert, for pairs of a row and an expert, and the sum of a row's pairs: the number of pairs of each
expert stays on the device.

Needs Triton.
"""

import triton
import triton.language as tl
from torch import Tensor

from verl.wire import FP8_BLOCK

BLOCK_PAIRS, BLOCK_OUT, BLOCK_IN = 16, 64, FP8_BLOCK
BLOCK_SUM = 1024


@triton.jit
def _expert_products(
    x,
    weights,
    order,
    starts,
    scales,
    out,
    N,
    C,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SCALED: tl.constexpr,
):
    """The kernel of `expert_products`: BLOCK pairs of one expert times COLUMNS of its outputs. Programs beyond the last
    block of pairs do nothing. SCALED: the weights are in blocks of DEPTH x DEPTH."""
    b, e = tl.program_id(0), tl.arange(0, PADDED)
    begin = tl.load(starts + e, mask=e < EXPERTS, other=0)
    end = tl.load(starts + e + 1, mask=e < EXPERTS, other=0)
    blocks = (end - begin + BLOCK - 1) // BLOCK
    after = tl.cumsum(blocks, 0)
    expert = tl.sum((after <= b).to(tl.int32), 0)
    if expert < EXPERTS:
        mine = e == expert
        block = b - tl.sum(tl.where(mine, after - blocks, 0), 0)
        i = tl.sum(tl.where(mine, begin, 0), 0) + block * BLOCK + tl.arange(0, BLOCK)
        inside = i < tl.sum(tl.where(mine, end, 0), 0)
        pair = tl.load(order + i, mask=inside, other=0).to(tl.int64)
        n, c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
        rows = x + (pair // EACH)[:, None] * C + c[None, :]
        columns = weights + (expert.to(tl.int64) * N + n)[:, None] * C + c[None, :]
        if SCALED:
            line = expert * tl.cdiv(N, DEPTH) + n // DEPTH
            scale_at = scales + line * tl.cdiv(C, DEPTH)
        product = tl.zeros([BLOCK, COLUMNS], tl.float32)
        for depth in range(0, C, DEPTH):
            left = tl.load(rows + depth, mask=inside[:, None] & (depth + c[None, :] < C), other=0.0)
            right = tl.load(columns + depth, mask=(n[:, None] < N) & (depth + c[None, :] < C), other=0.0)
            part = tl.dot(left, tl.trans(right.to(x.dtype.element_ty)), input_precision="ieee")
            if SCALED:
                part *= tl.load(scale_at + depth // DEPTH, mask=n < N, other=0.0)[None, :]
            product += part
        to = out + pair[:, None] * N + n[None, :]
        tl.store(to, product.to(out.dtype.element_ty), mask=inside[:, None] & (n[None, :] < N))


def expert_products(
    x: Tensor, weights: Tensor, order: Tensor, starts: Tensor, each: int, scales: Tensor | None = None
) -> Tensor:
    """Return [P, N]: for pair p the row p // each of x [P / each, C] times the weights [N, C] of the pair's expert,
    from weights [E, N, C]. `order` [P] has the pairs sorted by expert; those of expert e are order[starts[e] : starts[e
    + 1]], with starts [E + 1]. Weights in blocks of 8 bits have scales [E, ceil(N / 128), ceil(C / 128)]."""
    (experts, width, depth), pairs = weights.shape, len(order)
    out = x.new_empty(pairs, width)
    most = min(pairs, pairs // BLOCK_PAIRS + experts)  # blocks, if every expert has one that is not full
    _expert_products[most, triton.cdiv(width, BLOCK_OUT)](
        x,
        weights,
        order,
        starts,
        scales,
        out,
        width,
        depth,
        EXPERTS=experts,
        PADDED=triton.next_power_of_2(experts),
        EACH=each,
        BLOCK=BLOCK_PAIRS,
        COLUMNS=BLOCK_OUT,
        DEPTH=BLOCK_IN,
        SCALED=scales is not None,
        num_warps=4,
        num_stages=3,
    )
    return out


@triton.jit
def _expert_sum(each, share, out, C, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    """The kernel of `expert_sum`: BLOCK columns of one row per program."""
    n, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in range(CHOSEN):
        pair = n * CHOSEN + k
        total += tl.load(share + pair).to(tl.float32) * tl.load(each + pair * C + c, mask=c < C, other=0.0)
    tl.store(out + n * C + c, total.to(out.dtype.element_ty), mask=c < C)


def expert_sum(each: Tensor, share: Tensor) -> Tensor:
    """Return [n, C]: for each row the sum of its experts' results each [n k, C], weighted by share [n, k]."""
    (n, chosen), width = share.shape, each.shape[1]
    out = each.new_empty(n, width)
    block = min(BLOCK_SUM, triton.next_power_of_2(width))
    _expert_sum[n, triton.cdiv(width, block)](each, share, out, width, CHOSEN=chosen, BLOCK=block, num_warps=4)
    return out
