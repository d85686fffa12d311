"""Queries and keys normed and rotated, keys and values written into their pages: one launch per layer. Needs Triton."""

import triton
import triton.language as tl
from torch import Tensor

HEADS_AT_ONCE = 8


@triton.jit
def _rotate_and_store(
    qkv,
    norm,
    turns,
    positions,
    table,
    queries,
    keys,
    values,
    eps,
    table_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    NORMED: tl.constexpr,
):
    """The kernel of `rotate_and_store`: TILE heads of one row per program. The two numbers that are rotated together
    are neighbours in a head."""
    n = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + n).to(tl.int32)
    if position >= 0:
        h, d = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None], tl.arange(0, 2 * HALF)[None, :]
        x = tl.load(qkv + (n * (H + 2 * K) + h) * D + d, mask=(h < H + 2 * K) & (d < D), other=0.0)
        rotated = h < H + K
        y = x.to(tl.float32)
        if NORMED:
            weight = tl.load(norm + h * D + d, mask=rotated & (d < D), other=0.0).to(tl.float32)
            y = y / tl.sqrt(tl.sum(y * y, 1) / D + eps)[:, None] * weight
            y = y.to(x.dtype).to(tl.float32)
        even, odd = tl.split(tl.reshape(y, [TILE, HALF, 2]))
        at = turns + position.to(tl.int64) * D + d
        cos, sin = tl.split(tl.reshape(tl.load(at, mask=d < D, other=0.0), [1, HALF, 2]))
        turned = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [TILE, 2 * HALF])
        x = tl.where(rotated, turned.to(x.dtype), x)
        page = tl.load(table + n * table_stride + position // PAGE).to(tl.int64)
        place = (page * PAGE + position % PAGE) * K
        tl.store(queries + (n * H + h) * D + d, x, mask=(h < H) & (d < D))
        tl.store(keys + (place + h - H) * D + d, x, mask=(h >= H) & rotated & (d < D))
        tl.store(values + (place + h - H - K) * D + d, x, mask=(h >= H + K) & (h < H + 2 * K) & (d < D))


def rotate_and_store(
    qkv: Tensor,
    norm: Tensor | None,
    turns: Tensor,
    positions: Tensor,
    table: Tensor,
    keys: Tensor,
    values: Tensor,
    eps: float,
) -> Tensor:
    """Return the queries q [n, H, D] of qkv [n, (H + 2K) D], and store the keys and values. Queries and keys are normed
    by `norm` [H + K, D] (None: not), and rotated by `turns` [positions, D/2, 2] float32, the cosine and sine at every
    position. Keys and values are written at `positions` [n] of the pages table [n, W] int32 into [pages, PAGE, K, D]; a
    row with a position below 0 is left out."""
    page, kv_heads, dim = keys.shape[1:]
    n, heads = len(qkv), qkv.shape[1] // dim - 2 * kv_heads
    queries = qkv.new_empty(n, heads, dim)
    tile = min(HEADS_AT_ONCE, triton.next_power_of_2(heads + 2 * kv_heads))
    _rotate_and_store[n, triton.cdiv(heads + 2 * kv_heads, tile)](
        qkv,
        norm,
        turns,
        positions,
        table,
        queries,
        keys,
        values,
        eps,
        table.stride(0),
        H=heads,
        K=kv_heads,
        D=dim,
        HALF=triton.next_power_of_2(dim) // 2,
        PAGE=page,
        TILE=tile,
        NORMED=norm is not None,
        num_warps=4,
    )
    return queries
