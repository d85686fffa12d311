"""Top-k, top-p and min-p without a sort: a row finds the least logit that it keeps by bisection over the bits of a
float. A row without any of them ends at once, so every captured step contains the kernel.

Needs Triton."""

import triton
import triton.language as tl
from torch import Tensor

from verl.accel.cuda.sampling import _scaled

VOCAB_BLOCK = 4096
KEYS = tl.constexpr(2**31)


@triton.jit
def _keys(x):
    """Return int64 from 0 to 2^32 - 1 in the order of the floats x; -0 is 0."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + KEYS


@triton.jit
def _from(logits, temperature, row, least, highest, V, BLOCK: tl.constexpr):
    """Return how many ids of a row have a key of at least `least`, and the sum of their exponentials, float64."""
    count, mass = tl.zeros((), tl.int64), tl.zeros((), tl.float64)
    for lo in range(0, V, BLOCK):
        c = lo + tl.arange(0, BLOCK)
        x = _scaled(logits, temperature, row * V + c, c < V)
        here = (_keys(x) >= least) & (c < V)
        count += tl.sum(here.to(tl.int64), 0)
        mass += tl.sum(tl.where(here, tl.exp(x - highest), 0.0).to(tl.float64), 0)
    return count, mass


@triton.jit
def _truncate(logits, temperatures, top_ks, top_ps, min_ps, V, BLOCK: tl.constexpr):
    """The kernel of `truncate`, for one row."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row).to(tl.float32)
    k, p, floor = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row).to(tl.float32)
    if (temperature > 0) & ((k > 0) | (p < 1) | (floor > 0)):
        highest = tl.full((), float("-inf"), tl.float32)
        for lo in range(0, V, BLOCK):
            c = lo + tl.arange(0, BLOCK)
            highest = tl.maximum(highest, tl.max(_scaled(logits, temperature, row * V + c, c < V), 0))
        # the k-th largest key, and how many of the ids that have it are kept
        least, ties = tl.zeros((), tl.int64), tl.zeros((), tl.int64) + V
        if k > 0:
            for bit in range(32):
                tried = least | (tl.full((), 1, tl.int64) << (31 - bit))
                count, _ = _from(logits, temperature, row, tried, highest, V, BLOCK)
                least = tl.where(count >= k, tried, least)
            above, _ = _from(logits, temperature, row, least + 1, highest, V, BLOCK)
            ties = k - above
        if p < 1:
            above, over = _from(logits, temperature, row, least + 1, highest, V, BLOCK)
            every, total = _from(logits, temperature, row, least, highest, V, BLOCK)
            share = tl.where(every > above, (total - over) / (every - above), 0.0)
            total = over + tl.minimum(ties, every - above).to(tl.float64) * share
            # the largest key from which on the mass is at least the share p
            low, high = least, tl.zeros((), tl.int64) + 2 * KEYS
            for _ in range(33):
                middle = (low + high) // 2
                _, mass = _from(logits, temperature, row, middle, highest, V, BLOCK)
                low, high = tl.where(mass >= p * total, middle, low), tl.where(mass >= p * total, high, middle)
            above, over = _from(logits, temperature, row, low + 1, highest, V, BLOCK)
            every, mass = _from(logits, temperature, row, low, highest, V, BLOCK)
            same = tl.maximum(every - above, 1)
            each = (mass - over) / same.to(tl.float64)
            wanted = tl.ceil((p * total - over) / each).to(tl.int64)
            ties = tl.where(low > least, wanted, tl.minimum(ties, wanted))
            least = low
        bound = tl.where(floor > 0, highest + tl.log(tl.maximum(floor, 1e-37)), float("-inf"))
        seen = tl.zeros((), tl.int64)
        for lo in range(0, V, BLOCK):
            c = lo + tl.arange(0, BLOCK)
            x = _scaled(logits, temperature, row * V + c, c < V)
            key = _keys(x)
            tied = ((key == least) & (c < V)).to(tl.int64)
            rank = seen + tl.cumsum(tied, 0) - tied
            kept = ((key > least) | ((tied > 0) & (rank < ties))) & (x >= bound)
            tl.store(logits + row * V + c, float("-inf"), mask=(c < V) & ~kept)
            seen += tl.sum(tied, 0)


def truncate(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Write -inf into logits [n, V] for the ids that a row does not draw from, and return them. temperature [n], 0 is
    greedy and drops none; top_k int64 [n], 0 is off; top_p and min_p float64 [n], 1 and 0 are off. Of equal logits
    those with lower ids are kept."""
    n, vocab = logits.shape
    block = min(VOCAB_BLOCK, triton.next_power_of_2(vocab))
    _truncate[n,](logits, temperature, top_k, top_p, min_p, vocab, BLOCK=block, num_warps=8)
    return logits
