"""Attention of one new token per row over keys and values in pages: split over the keys, then merged.

Each row chooses on the device, from its own length, into how many parts its keys are split, so the grid and with it a
CUDA graph depend on the number of rows alone. This module needs Triton, and is imported where that was found.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

KEYS_PER_SPLIT = 256  # the fewest keys per part of a row with several: with fewer, merging costs more than they save
MAX_SPLITS = 64
BLOCK_KEYS, BLOCK_BYTES = 64, 32768  # at most: keys that are read at once, from one page, and their bytes
MERGED_AT_ONCE = 8  # partial results that are read at once
INTERPRETED_PROCESSORS = 16
ALL_KEYS = 1 << 30  # the window of a layer without one


@triton.jit
def _tanh(x):
    """Return tanh in float32's precision, also near 0, where the form with exp loses digits."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    y = x * x
    near = x * (1.0 + y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315 + y * (62.0 / 2835 - y * 1382.0 / 155925)))))
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -far, far))


@triton.jit
def _split_of_row(length, window, BLOCK: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr):
    """Return the first key that is read, a multiple of BLOCK, the blocks of keys, and the number of parts, each of at
    least KEYS keys unless it is the only one."""
    first = tl.maximum(length - window, 0) // BLOCK * BLOCK
    keys = length - first
    parts = tl.minimum(tl.maximum(keys // KEYS, 1), SPLITS)
    return first, (keys + BLOCK - 1) // BLOCK, parts


@triton.jit
def _first_of_part(first, blocks, parts, part, BLOCK: tl.constexpr):
    """Return the first key of a part: the blocks of two parts differ by one at most."""
    return first + part * blocks // parts * BLOCK


@triton.jit
def _with_sink(most, total, sinks, head, inside):
    """Add a learned logit per head to the denominator; it has no value vector."""
    sink = tl.load(sinks + head, mask=inside, other=0.0).to(tl.float32)
    highest = tl.maximum(most, sink)
    kept = tl.exp(most - highest)
    return kept, total * kept + tl.exp(sink - highest)


@triton.jit
def _add_block(score, value, most, total, mixed):
    """Add a block of keys, at least one of which is visible, to the running maximum of the scores, the sum of
    exponentials relative to it, and the values weighted by these."""
    highest = tl.maximum(most, tl.max(score, 1))
    share, kept = tl.exp(score - highest[:, None]), tl.exp(most - highest)
    mixed = mixed * kept[:, None] + tl.dot(share.to(value.dtype), value, input_precision="ieee")
    return highest, total * kept + tl.sum(share, 1), mixed


@triton.jit
def _attend_part(
    q,
    keys,
    values,
    table,
    positions,
    sinks,
    out,
    partial,
    stats,
    scale,
    window,
    cap,
    table_stride,
    K: tl.constexpr,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Compute attention over one part of a row's keys, for the G query heads of one key head. If the row has one part
    only, this is the final result."""
    n, k, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(positions + n).to(tl.int32) + 1
    first, blocks, parts = _split_of_row(length, window, BLOCK, KEYS, SPLITS)
    if part < parts:
        g, d, j = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, BLOCK)
        heads = (g[:, None] < G) & (d[None, :] < D)
        query = tl.load(q + (n * K * G + k * G + g[:, None]) * D + d[None, :], mask=heads, other=0.0)
        most = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, WIDTH], tl.float32)
        start = _first_of_part(first, blocks, parts, part, BLOCK)
        end = tl.minimum(_first_of_part(first, blocks, parts, part + 1, BLOCK), length)
        for token in range(start, end, BLOCK):
            page = tl.load(table + n * table_stride + token // PAGE).to(tl.int64)
            seen = (token + j < length) & (token + j >= length - window)
            place = ((page * PAGE + token % PAGE + j) * K + k)[:, None] * D + d[None, :]
            key = tl.load(keys + place, mask=seen[:, None] & (d[None, :] < D), other=0.0)
            value = tl.load(values + place, mask=seen[:, None] & (d[None, :] < D), other=0.0)
            score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            if CAPPED:
                score = cap * _tanh(score / cap)
            score = tl.where(seen[None, :], score, float("-inf"))
            most, total, mixed = _add_block(score, value, most, total, mixed)
        head = k * G + g
        if SPLITS == 1:
            if SINKS:
                kept, total = _with_sink(most, total, sinks, head, g < G)
                mixed = mixed * kept[:, None]
            mixed = tl.where(total[:, None] > 0, mixed / total[:, None], 0.0)
            tl.store(out + (n * K * G + head[:, None]) * D + d[None, :], mixed.to(out.dtype.element_ty), mask=heads)
        else:
            at = (n * K * G + head) * SPLITS + part
            tl.store(partial + at[:, None] * D + d[None, :], mixed, mask=heads)
            tl.store(stats + at * 2, most, mask=g < G)
            tl.store(stats + at * 2 + 1, total, mask=g < G)


@triton.jit
def _merge_parts(
    positions,
    sinks,
    out,
    partial,
    stats,
    window,
    H: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Merge the parts of one row and one query head into the final result."""
    n, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(positions + n).to(tl.int32) + 1
    _, _, parts = _split_of_row(length, window, BLOCK, KEYS, SPLITS)
    at, p, d = (n * H + head) * SPLITS, tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    most = tl.load(stats + (at + p) * 2, mask=p < parts, other=float("-inf"))
    highest = tl.max(most, 0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)  # an empty row
    total = tl.sum(tl.load(stats + (at + p) * 2 + 1, mask=p < parts, other=0.0) * tl.exp(most - highest), 0)
    mixed = tl.zeros([WIDTH], tl.float32)
    for begin in range(0, parts, AT_ONCE):
        b = begin + tl.arange(0, AT_ONCE)
        weight = tl.exp(tl.load(stats + (at + b) * 2, mask=b < parts, other=float("-inf")) - highest)
        inside = (b[:, None] < parts) & (d[None, :] < D)
        mixed += tl.sum(
            tl.load(partial + (at + b)[:, None] * D + d[None, :], mask=inside, other=0.0) * weight[:, None], 0
        )
    if SINKS:
        kept, total = _with_sink(highest, total, sinks, head, head >= 0)
        mixed = mixed * kept
    mixed = tl.where(total > 0, mixed / total, 0.0)
    tl.store(out + (n * H + head) * D + d, mixed.to(out.dtype.element_ty), mask=d < D)


def splits_of(rows: int, kv_heads: int, max_tokens: int, processors: int) -> int:
    """Return the most parts into which a row's keys are split, a power of two: enough to fill the card's `processors`
    twice with `rows` rows, and no more than the longest row has."""
    wanted = -(-2 * processors // (rows * kv_heads))
    return min(triton.next_power_of_2(max(1, wanted)), exact_splits_of(max_tokens))


def exact_splits_of(max_tokens: int) -> int:
    """Return the most parts into which a row's keys are split if this must not depend on the number of rows."""
    return triton.next_power_of_2(max(1, min(max_tokens // KEYS_PER_SPLIT, MAX_SPLITS)))


def processors_of(device: torch.device) -> int:
    """Return the multiprocessors of a card, or a number in their place for the interpreter."""
    if device.type == "cpu":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def attend_pages(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
    sinks: Tensor | None = None,
    splits: int | None = None,
    exact_rows: bool = False,
) -> Tensor:
    """Attend with q [n, H, D] to keys and values [pages, PAGE, K, D] of the pages table [n, W] int32, up to and with
    `positions` [n] (below 0: an empty row, the result is 0) -> [n, H, D]. A row sees its last `window` tokens (0: all);
    scores pass through cap tanh(score / cap) (0: no cap); `sinks` [H] are logits without a value. A row is split into
    at most `splits` parts, a power of two (None: as `splits_of` chooses, or with `exact_rows` `exact_splits_of`, with
    which the bits of a row do not depend on the number of rows)."""
    n, heads, dim = q.shape
    page, kv_heads = keys.shape[1:3]
    if splits is None:
        longest = table.shape[1] * page
        card = processors_of(q.device)
        splits = exact_splits_of(longest) if exact_rows else splits_of(n, kv_heads, longest, card)
    out = torch.empty_like(q)
    partial = q.new_empty(n, heads, splits if splits > 1 else 0, dim, dtype=torch.float32)
    stats = q.new_empty(n, heads, splits if splits > 1 else 0, 2, dtype=torch.float32)
    width = max(16, triton.next_power_of_2(dim))
    block = min(BLOCK_KEYS, BLOCK_BYTES // (width * q.element_size()), page)
    window = window or ALL_KEYS
    assert page % block == 0 and KEYS_PER_SPLIT % block == 0, f"pages of {page} tokens"
    sizes = {"D": dim, "WIDTH": width, "BLOCK": block, "KEYS": KEYS_PER_SPLIT, "SPLITS": splits}
    sizes["SINKS"] = sinks is not None
    grouped = heads // kv_heads
    _attend_part[n, kv_heads, splits](
        q,
        keys,
        values,
        table,
        positions,
        sinks,
        out,
        partial,
        stats,
        scale,
        window,
        cap,
        table.stride(0),
        K=kv_heads,
        G=grouped,
        ROWS=max(16, triton.next_power_of_2(grouped)),
        PAGE=page,
        CAPPED=cap > 0,
        **sizes,
        num_warps=4,
        num_stages=3,
    )
    if splits > 1:
        merged = {"H": heads, "AT_ONCE": min(splits, MERGED_AT_ONCE), **sizes}
        _merge_parts[n, heads](positions, sinks, out, partial, stats, window, **merged, num_warps=2)
    return out
