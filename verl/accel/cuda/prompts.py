"""Causal attention of the new tokens of several prompts, each over its own past and itself, in one launch. Keys and
values are packed or in pages. Needs Triton."""

import triton
import triton.language as tl
from torch import Tensor

from verl.accel.cuda.attention import ALL_KEYS, _tanh

BLOCK_QUERIES, BLOCK_KEYS = 64, 64  # the largest block: tokens with queries, tokens with keys
BLOCK_BYTES = 16384  # at most, of either


@triton.jit
def _attend_prompts(
    q,
    keys,
    values,
    starts,
    key_starts,
    table,
    out,
    scale,
    window,
    cap,
    table_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """The kernel of `attend_prompts`: ROWS tokens of one prompt and one query head per program. With a PAGE above 0
    keys and values are in pages of the table, and `key_starts` are the numbers of keys."""
    first, head, prompt = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(starts + prompt).to(tl.int32), tl.load(starts + prompt + 1).to(tl.int32)
    tokens = end - begin
    if first < tokens:
        key_begin = tl.load(key_starts + prompt).to(tl.int32)
        length = key_begin if PAGE else tl.load(key_starts + prompt + 1).to(tl.int32) - key_begin
        i, d, j = first + tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, BLOCK)
        position = length - tokens + i
        rows = ((begin + i).to(tl.int64) * H + head)[:, None] * D + d[None, :]
        inside = (i[:, None] < tokens) & (d[None, :] < D)
        query = tl.load(q + rows, mask=inside, other=0.0)
        most = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, WIDTH], tl.float32)
        lowest = length - tokens + first
        start = tl.maximum(lowest - window + 1, 0) // BLOCK * BLOCK
        for token in range(start, tl.minimum(lowest + ROWS, length), BLOCK):
            t = token + j
            if PAGE:
                page = tl.load(table + prompt * table_stride + token // PAGE).to(tl.int64)
                line = page * PAGE + token % PAGE + j
            else:
                line = (key_begin + t).to(tl.int64)
            place = (line * K + head // (H // K))[:, None] * D + d[None, :]
            present = (t[:, None] < length) & (d[None, :] < D)
            key = tl.load(keys + place, mask=present, other=0.0)
            value = tl.load(values + place, mask=present, other=0.0)
            score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            if CAPPED:
                score = cap * _tanh(score / cap)
            seen = (t[None, :] <= position[:, None]) & (t[None, :] > position[:, None] - window)
            score = tl.where(seen, score, float("-inf"))
            highest = tl.maximum(most, tl.max(score, 1))
            finite = tl.where(highest == float("-inf"), 0.0, highest)  # a row that sees no key of this block
            share, kept = tl.exp(score - finite[:, None]), tl.exp(most - finite)
            mixed = mixed * kept[:, None] + tl.dot(share.to(value.dtype), value, input_precision="ieee")
            most, total = highest, total * kept + tl.sum(share, 1)
        tl.store(out + rows, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)


def attend_prompts(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: tuple[int, int],
    *,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
) -> Tensor:
    """Return the attention [T, H, D] of q [T, H, D] over keys and values [U, K, D]. Prompt b has the queries starts[b]
    .. starts[b + 1] - 1, which are its last positions, and the keys key_starts[b] .. key_starts[b + 1] - 1, at most
    `longest` of each; both int32 [prompts + 1]. Each query sees the keys up to its position, the last `window` of them
    (0: all); scores pass through cap tanh(score / cap) (0: no cap). The bits of a prompt do not depend on the
    others."""
    lines = keys.contiguous(), values.contiguous()
    return _launch(q, lines, (starts, key_starts), None, longest[0], scale, window, cap)


def attend_prompts_in_pages(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    starts: Tensor,
    lengths: Tensor,
    longest: int,
    *,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
) -> Tensor:
    """Do the same as `attend_prompts` over keys and values [pages, PAGE, K, D]: prompt b has `lengths`[b] keys, in the
    pages table[b]. `lengths` and the first dimension of `table` may be longer than the prompts. Queries from starts[-1]
    on belong to no prompt; their results have no meaning."""
    assert keys.is_contiguous() and values.is_contiguous(), "pages are read where they are"
    return _launch(q, (keys, values), (starts, lengths), table, longest, scale, window, cap)


def _launch(
    q: Tensor,
    lines: tuple[Tensor, Tensor],
    spans: tuple[Tensor, Tensor],
    table: Tensor | None,
    longest: int,
    scale: float,
    window: int,
    cap: float,
) -> Tensor:
    """Launch the kernel over keys and values `lines`, with the starts of queries and the starts or numbers of keys in
    `spans`."""
    tokens, heads, dim = q.shape
    out = q.new_empty(tokens, heads, dim)
    width = max(16, triton.next_power_of_2(dim))
    bytes_each = width * q.element_size()
    rows = max(16, min(BLOCK_QUERIES, BLOCK_BYTES // bytes_each))
    block = max(16, min(BLOCK_KEYS, BLOCK_BYTES // bytes_each))
    page = 0 if table is None else lines[0].shape[1]
    if page:
        block = min(block, page)
        assert page % block == 0, f"pages of {page} tokens"
    _attend_prompts[triton.cdiv(longest, rows), heads, len(spans[0]) - 1](
        q.contiguous(),
        *lines,
        *spans,
        table,
        out,
        scale,
        window or ALL_KEYS,
        cap,
        0 if table is None else table.stride(0),
        H=heads,
        K=lines[0].shape[-2],
        D=dim,
        WIDTH=width,
        ROWS=rows,
        BLOCK=block,
        PAGE=page,
        CAPPED=cap > 0,
        num_warps=4,
        num_stages=2,
    )
    return out
