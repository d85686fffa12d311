"""Causal attention of the new tokens of several prompts, each over its own past and itself, in one launch. Needs
Triton."""

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
    out,
    scale,
    window,
    cap,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """The kernel of `attend_prompts`: ROWS tokens of one prompt and one query head per program."""
    first, head, prompt = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2)
    begin, tokens = tl.load(starts + prompt), tl.load(starts + prompt + 1) - tl.load(starts + prompt)
    if first < tokens:
        key_begin = tl.load(key_starts + prompt)
        length = tl.load(key_starts + prompt + 1) - key_begin
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
            place = ((key_begin + t).to(tl.int64) * K + head // (H // K))[:, None] * D + d[None, :]
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
    longest: int,
    *,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
) -> Tensor:
    """Return the attention [T, H, D] of q [T, H, D] over keys and values [U, K, D]. Prompt b has the queries starts[b]
    .. starts[b + 1] - 1, at most `longest`, which are its last positions, and the keys key_starts[b] .. key_starts[b +
    1] - 1; both int32 [prompts + 1]. Each query sees the keys up to its position, the last `window` of them (0: all);
    scores pass through cap tanh(score / cap) (0: no cap). The bits of a prompt do not depend on the others."""
    tokens, heads, dim = q.shape
    out = q.new_empty(tokens, heads, dim)
    width = max(16, triton.next_power_of_2(dim))
    bytes_each = width * q.element_size()
    rows = max(16, min(BLOCK_QUERIES, BLOCK_BYTES // bytes_each))
    _attend_prompts[triton.cdiv(longest, rows), heads, len(starts) - 1](
        q.contiguous(),
        keys.contiguous(),
        values.contiguous(),
        starts,
        key_starts,
        out,
        scale,
        window or ALL_KEYS,
        cap,
        H=heads,
        K=keys.shape[1],
        D=dim,
        WIDTH=width,
        ROWS=rows,
        BLOCK=max(16, min(BLOCK_KEYS, BLOCK_BYTES // bytes_each)),
        CAPPED=cap > 0,
        num_warps=4,
        num_stages=2,
    )
    return out
