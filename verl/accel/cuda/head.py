"""The sums that a loss reads of a chunk of logits, and their gradients, each in one pass over the chunk. Needs Triton.

The products with the head stay torch's. Logits are read as they were rounded by the product, and computed in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.accel.cuda.attention import _tanh

VOCAB_BLOCK = 4096  # logits of a row that a program has at once


@triton.jit
def _logits(z, bias, at, inside, temperature, cap, CAPPED: tl.constexpr, BIASED: tl.constexpr):
    """Return the raw logits of a row z at the ids `at` in float32, with their bias, capped, then divided by the
    temperature. -inf stays what it is: an id that is left out, or outside the vocabulary."""
    x = tl.load(z + at, mask=inside, other=float("-inf")).to(tl.float32)
    if BIASED:
        x += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    if CAPPED:
        x = tl.where(x == float("-inf"), x, cap * _tanh(x / cap))
    return tl.div_rn(x, temperature)


@triton.jit(do_not_specialize=["N"])
def _sum_logits(
    z, targets, temperatures, bias, out, cap, N, V, BLOCK: tl.constexpr, CAPPED: tl.constexpr, BIASED: tl.constexpr
):
    """The kernel of `logit_sums`, for one row."""
    n = tl.program_id(0).to(tl.int64)
    target, temperature = tl.load(targets + n), tl.load(temperatures + n).to(tl.float32)
    c = tl.arange(0, BLOCK)
    # relative to the largest logit so far: the sum of exponentials, of them times their logits, and of their squares
    most = tl.full([], float("-inf"), tl.float32)
    total, drawn, squares = tl.zeros([], tl.float32), tl.zeros([], tl.float32), tl.zeros([], tl.float32)
    own = tl.zeros([], tl.float32)
    for first in range(0, V, BLOCK):
        at = first + c
        x = _logits(z + n * V, bias, at, at < V, temperature, cap, CAPPED, BIASED)
        own += tl.sum(tl.where(at == target, x, 0.0), 0)
        highest = tl.maximum(most, tl.max(x, 0))
        finite = tl.where(highest == float("-inf"), 0.0, highest)
        moved = tl.where(most == float("-inf"), 0.0, most - finite)  # nothing was summed before
        kept, off = tl.exp(moved), x - finite
        share = tl.exp(off)
        drawn = kept * (drawn + moved * total) + tl.sum(tl.where(share > 0, share * off, 0.0), 0)
        total = kept * total + tl.sum(share, 0)
        squares = kept * kept * squares + tl.sum(share * share, 0)
        most = highest
    rest = tl.log(total)
    tl.store(out + n, own)
    tl.store(out + N + n, most + rest)
    tl.store(out + 2 * N + n, rest - drawn / total)
    tl.store(out + 3 * N + n, squares / (total * total))


@triton.jit
def _logit_gradients(
    z,
    targets,
    temperatures,
    lses,
    entropies,
    d_logprobs,
    d_entropies,
    bias,
    cap,
    V,
    BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
    BIASED: tl.constexpr,
    OF_ENTROPY: tl.constexpr,
):
    """The kernel of `logit_gradients`, for BLOCK logits of one row."""
    n, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d, row, inside = tl.load(d_logprobs + n), z + n * V, at < V
    needed = d != 0
    if OF_ENTROPY:
        d_entropy = tl.load(d_entropies + n)
        needed = needed | (d_entropy != 0)
    if needed:
        temperature = tl.load(temperatures + n).to(tl.float32)
        x = _logits(row, bias, at, inside, temperature, cap, CAPPED, BIASED)
        logp = x - tl.load(lses + n)
        slope = -d
        if OF_ENTROPY:
            slope -= d_entropy * (tl.where(x == float("-inf"), 0.0, logp) + tl.load(entropies + n))
        dz = tl.exp(logp) * slope + tl.where(at == tl.load(targets + n), d, 0.0)
        if CAPPED:
            bent = x * temperature / cap
            dz *= 1.0 - bent * bent
        dz = tl.where(x == float("-inf"), 0.0, tl.div_rn(dz, temperature))
        tl.store(row + at, dz.to(z.dtype.element_ty), mask=inside)
    else:
        tl.store(row + at, tl.zeros([BLOCK], z.dtype.element_ty), mask=inside)


def logit_sums(z: Tensor, targets: Tensor, temperature: Tensor, bias: Tensor | None = None, cap: float = 0.0) -> Tensor:
    """Return float32 [4, n] of raw logits z [n, V] plus bias [V]: the target's logit (0 for a target below 0), the
    log-sum-exp, the entropy, and the sum of squared probabilities, after cap tanh(z / cap) (0: no cap) and the division
    by the temperature [n]. A logit of -inf has probability 0."""
    rows, vocab = z.shape
    out = torch.empty(4, rows, dtype=torch.float32, device=z.device)
    if rows:
        given = z.contiguous(), targets.contiguous(), temperature.contiguous()
        _sum_logits[rows,](*given, bias, out, cap, rows, vocab, **_sizes(vocab, bias, cap))
    return out


def logit_gradients(
    z: Tensor,
    targets: Tensor,
    temperature: Tensor,
    lse: Tensor,
    d_logprob: Tensor,
    entropy: Tensor | None = None,
    d_entropy: Tensor | None = None,
    bias: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    """Overwrite raw logits z [n, V] with their gradients, and return them: those of the targets' log-probs, given
    d_logprob [n], and of the entropies [n], given d_entropy [n] (None: no loss depends on it). lse [n] is the
    log-sum-exp. Rows with gradients of 0 become 0, whatever they are; so do logits of -inf. The other arguments are as
    in `logit_sums`."""
    assert z.is_contiguous(), "gradients are written where the logits are"
    rows, vocab = z.shape
    if rows:
        given = (targets, temperature, lse, entropy, d_logprob, d_entropy)
        of_rows = (None if x is None else x.contiguous() for x in given)
        sizes = _sizes(vocab, bias, cap)
        grid = rows, triton.cdiv(vocab, sizes["BLOCK"])
        _logit_gradients[grid](z, *of_rows, bias, cap, vocab, OF_ENTROPY=d_entropy is not None, **sizes)
    return z


def _sizes(vocab: int, bias: Tensor | None, cap: float) -> dict[str, int]:
    """Return the constants of a launch."""
    block = min(VOCAB_BLOCK, triton.next_power_of_2(vocab))
    return {"BLOCK": block, "CAPPED": cap > 0, "BIASED": bias is not None, "num_warps": 8}
