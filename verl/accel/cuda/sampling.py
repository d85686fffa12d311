"""Sampling from logits in one pass. The draws are those of verl.rollout.embedded.sampler, a pure function of uniform
and logits.

The first kernel reduces blocks of the vocabulary, the second chooses a block by the inverse CDF of their masses and
reads only that block again. The blocks depend on the vocabulary alone, so no other row changes a draw. Needs Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.accel.uniforms import GAMMA, MIX_1, MIX_2

VOCAB_BLOCK = 4096
UNIFORMS = 128  # numbers of one program
ROWS_AT_ONCE = 1  # rows of one program: one fills a card soonest, many suit the interpreter


@triton.jit
def _scaled(logits, temperature, at, inside):
    """Return the logits in float32 divided by the temperature, or undivided where it is 0; -inf outside the
    vocabulary."""
    x = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.div_rn(x, tl.where(temperature == 0, 1.0, temperature))


@triton.jit(do_not_specialize=["N"])
def _reduce_block(
    logits, temperatures, most, best, mass, V, N, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Write the largest logit of a block of ROWS rows, its id, and the sum of the exponentials relative to it."""
    n, b = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    c = b * BLOCK + tl.arange(0, BLOCK)[None, :]
    temperature = tl.load(temperatures + n, mask=n < N, other=1.0).to(tl.float32)[:, None]
    x = _scaled(logits, temperature, n[:, None] * V + c, (c < V) & (n[:, None] < N))
    highest = tl.max(x, 1)
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    at, inside = n * BLOCKS + b, n < N
    tl.store(most + at, highest, mask=inside)
    tl.store(best + at, b * BLOCK + tl.argmax(x, 1), mask=inside)
    tl.store(mass + at, tl.sum(tl.exp(x - finite[:, None]), 1), mask=inside)


@triton.jit
def _first_above(mass, target, M: tl.constexpr):
    """Return, for each row, the first index at which the cumulative mass [rows, M] float64 is above the target [rows],
    and the target minus the mass before that index. The index has positive mass; a target at or beyond the total is
    brought below it."""
    i = tl.arange(0, M)[None, :]
    cumulative = tl.cumsum(mass, 1)
    total = tl.max(tl.where(mass > 0, cumulative, 0.0), 1)
    below_total = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)  # the next float64
    target = tl.where(target < total, target, below_total)
    index = tl.min(tl.where((cumulative > target[:, None]) & (mass > 0), i, M - 1), 1)
    return index, target - tl.max(tl.where(i == index[:, None] - 1, cumulative, 0.0), 1)


@triton.jit(do_not_specialize=["N"])
def _draw(
    logits,
    temperatures,
    uniforms,
    most,
    best,
    mass,
    out,
    V,
    N,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Draw the ids of ROWS rows and their log-probs."""
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, b, inside = n[:, None], tl.arange(0, PADDED)[None, :], n < N
    temperature = tl.load(temperatures + n, mask=inside, other=1.0).to(tl.float32)
    here = (b < BLOCKS) & inside[:, None]
    tops = tl.load(most + row * BLOCKS + b, mask=here, other=float("-inf"))
    highest = tl.max(tops, 1)
    masses = tl.load(mass + row * BLOCKS + b, mask=here, other=0.0).to(tl.float64) * tl.exp(tops - highest[:, None])
    total = tl.sum(masses, 1)
    block, rest = _first_above(masses, tl.load(uniforms + n, mask=inside, other=0.0) * total, PADDED)
    block = tl.minimum(block, BLOCKS - 1)
    c = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = _scaled(logits, temperature[:, None], row * V + c, (c < V) & inside[:, None])
    index, _ = _first_above(tl.exp(x - highest[:, None]).to(tl.float64), rest, BLOCK)
    drawn = tl.minimum(block * BLOCK + index, V - 1)
    first_best = tl.min(tl.where(tops == highest[:, None], b, BLOCKS - 1), 1)
    greedy = tl.load(best + n * BLOCKS + first_best, mask=inside, other=0)
    chosen = tl.where(temperature == 0, greedy, drawn)
    logit = _scaled(logits, temperature, n * V + chosen, inside)
    tl.store(out + n, chosen.to(tl.float64), mask=inside)
    tl.store(out + N + n, (logit - highest).to(tl.float64) - tl.log(total), mask=inside)


@triton.jit
def _draw_uniforms(
    streams, positions, out, N, GAMMA: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr, BLOCK: tl.constexpr
):
    """The kernel of `draw_uniforms`, for BLOCK rows."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    z = tl.load(streams + n, mask=inside, other=0).to(tl.uint64, bitcast=True)
    z += (tl.load(positions + n, mask=inside, other=0) + 1).to(tl.uint64, bitcast=True) * GAMMA
    z = (z ^ (z >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    z = (z ^ (z >> 31)) >> 11
    tl.store(out + n, z.to(tl.float64) * (1.0 / 9007199254740992), mask=inside)  # 2^53


def draw_uniforms(streams: Tensor, positions: Tensor) -> Tensor:
    """Return the uniform number of each draw, float64 [n], from streams and positions int64 [n], bit for bit those of
    verl.accel.uniforms."""
    out = streams.new_empty(len(streams), dtype=torch.float64)
    programs = triton.cdiv(len(streams), UNIFORMS)
    _draw_uniforms[programs,](streams, positions, out, len(streams), GAMMA, MIX_1, MIX_2, BLOCK=UNIFORMS)
    return out


def draw_tokens(logits: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    """Draw from logits [n, V] with temperature [n] (0 is greedy) and uniform [n] float64 in [0, 1). Return float64 [2,
    n]: ids (exact in float64) and their log-probs in the distribution that they were drawn from (greedy: at temperature
    1)."""
    n, vocab = logits.shape
    logits, temperature, uniform = logits.contiguous(), temperature.contiguous(), uniform.contiguous()
    block = min(VOCAB_BLOCK, triton.next_power_of_2(vocab))
    blocks, programs = triton.cdiv(vocab, block), triton.cdiv(n, ROWS_AT_ONCE)
    most, mass = logits.new_empty(2, n, blocks, dtype=torch.float32)
    best, out = most.new_empty(n, blocks, dtype=torch.int32), most.new_empty(2, n, dtype=torch.float64)
    sizes = {"BLOCKS": blocks, "BLOCK": block, "ROWS": ROWS_AT_ONCE, "num_warps": 8}
    _reduce_block[programs, blocks](logits, temperature, most, best, mass, vocab, n, **sizes)
    padded = triton.next_power_of_2(blocks)
    _draw[programs,](logits, temperature, uniform, most, best, mass, out, vocab, n, PADDED=padded, **sizes)
    return out
