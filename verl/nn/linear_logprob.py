"""Linear log-prob and entropy, the only way from hidden states to log-probs in training, without [tokens, vocab]: a
chunk of logits is made, reduced and dropped in the forward pass and made again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.accel.devices import device_facts
from verl.accel.operations import Call, Use
from verl.accel.plain import PLAIN
from verl.accel.table import choose
from verl.nn.head_kernels import LogitKernels, RawLogits, logit_kernels
from verl.nn.logit_chunks import centred, chunk_logits, entropy_of, mixture, rest_of, share_of, slope_of, with_no_id


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """One rank's slice of a vocabulary that is divided over a process group: every rank has a slice of the head."""

    start: int
    """The first id of this rank's slice."""
    enter: Callable[[Tensor], Tensor]
    """The identity, with a gradient that is summed over the group."""
    gather: Callable[[Tensor], Tensor]
    """Gathers a tensor [...] of every rank as [ranks, ...]."""

    def local(self, ids: Tensor, size: int) -> Tensor:
        """Return ids [...] counted from the start of this slice of `size` ids; those of other slices are `size`."""
        mine = ids - self.start
        return mine.where((mine >= 0) & (mine < size), size)


@dataclass(frozen=True, slots=True)
class Banned:
    """Ids that have probability 0 in some rows, as the sampler of these rows had it."""

    ids: Tensor
    """[k] int64."""
    rows: Tensor
    """[n] bool: True for the rows that these ids are banned from."""

    def close(self, z: Tensor, at: Tensor | slice, value: float = -torch.inf) -> None:
        """Overwrite z [c, V] at the ids of the chunk `at` of the rows."""
        z.index_copy_(1, self.ids, z.index_select(1, self.ids).masked_fill_(self.rows[at, None], value))

    def within(self, vocabulary: Vocabulary, size: int) -> Banned:
        """Return the ids that are in a rank's slice of this size."""
        ids = self.ids - vocabulary.start
        return Banned(ids[(ids >= 0) & (ids < size)], self.rows)


class _LinearLogprob(torch.autograd.Function):
    """The autograd function of `linear_logprob`. Its backward pass computes the logits of each chunk again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor,
        cap: float,
        want_entropy: bool,
        want_sum_pi_squared: bool,
        vocabulary: Vocabulary | None,
        ids: Tensor | None,
        banned: Banned | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        here = None  # [n] targets in this rank's slice of the vocabulary
        if vocabulary is not None:
            targets = targets - vocabulary.start
            here = (targets >= 0) & (targets < len(weight))
            targets = targets.clamp(0, len(weight) - 1)
            ids = None if ids is None else vocabulary.local(ids, len(weight))
        n = hidden.shape[0]
        kernels = logit_kernels(hidden.device, hidden.dtype)
        exact = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(n, dtype=exact, device=hidden.device)
        lse = torch.empty_like(logprobs)
        entropy = torch.empty_like(logprobs) if want_entropy else None
        sum_pi2 = torch.empty_like(logprobs) if want_sum_pi_squared else None
        apart = None if ids is None else logprobs.new_empty(n, ids.shape[1] + 1)
        others = None  # [n], by the kernels: the log-sum-exp of the ids that are neither named nor targets
        cast = weight.to(hidden.dtype)  # once instead of once per chunk
        if kernels is not None:
            of_rows = of_slice(targets, here), temperature, bias, cap, banned, ids, apart
            logprobs, lse, *more, others = _by_kernels(kernels, hidden, cast, *of_rows)
            entropy, sum_pi2 = (x if wanted else None for x, wanted in zip(more, (want_entropy, want_sum_pi_squared)))
        for at in chunks(n, weight) if kernels is None else ():
            z = chunk_logits(hidden[at], cast, bias, temperature[at], cap)
            if banned is not None:
                banned.close(z, at)
            if apart is None or ids is None:
                lse[at] = torch.logsumexp(z, -1)
            else:  # sum the other ids directly: 1 - (sum of the named) would lose digits
                z = z if here is None else with_no_id(z)
                apart[at] = torch.cat([z.gather(-1, ids[at]), rest_of(z, ids[at])], -1)
                lse[at] = torch.logsumexp(apart[at], -1)
                z.scatter_(-1, ids[at], apart[at, :-1])
            logprobs[at] = z.gather(-1, targets[at, None])[:, 0]
            if sum_pi2 is not None:
                sum_pi2[at] = torch.exp(torch.logsumexp(2 * z, -1) - 2 * lse[at])
            if entropy is not None:
                entropy[at] = entropy_of(centred(z, lse[at]))
            del z  # before the product of the next chunk
        if vocabulary is not None and here is not None:
            own = logprobs.masked_fill(~here, 0)  # not a product: another slice's target may be -inf here
            logprobs, lse, entropy, sum_pi2 = _over_slices(vocabulary, own, lse, entropy, sum_pi2)
            apart = None if apart is None else torch.logsumexp(vocabulary.gather(apart), 0)  # an id is in one slice
        logprobs -= lse
        apart = None if apart is None else centred(apart, lse)
        rest = None if apart is None else apart[:, -1].clone()  # a view of what is returned would keep itself alive
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, lse, entropy, here, ids, rest, others)
        ctx.cap, ctx.banned, ctx.kernels = cap, banned, kernels
        ctx.set_materialize_grads(False)  # no gradient is computed for an output that no loss uses
        if sum_pi2 is not None:
            ctx.mark_non_differentiable(sum_pi2)
        return logprobs, entropy, sum_pi2, apart

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_logprob: Tensor | None, d_entropy: Tensor | None, _: None, d_apart: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, lse, entropy, here, ids, rest, others = ctx.saved_tensors
        d_logprob = torch.zeros_like(lse) if d_logprob is None else d_logprob
        # rows that nothing depends on are left out: groups without signal cost nothing, a NaN in them reaches nothing
        needed = d_logprob != 0 if d_entropy is None else (d_logprob != 0) | (d_entropy != 0)
        if d_apart is not None:
            needed |= (d_apart != 0).any(-1)
        cast = weight.to(hidden.dtype)
        sums = HeadGradients(hidden, weight, bias, lse.dtype, ctx.needs_input_grad[1:3])
        for at in chunks_of(needed, weight):
            h, d = hidden[at], d_logprob[at, None]
            of_entropy = None if d_entropy is None else (entropy[at, None], d_entropy[at, None])
            if ctx.kernels is not None:
                z, own = raw_logits(h, cast, ctx.banned, at), of_slice(targets, here)[at]
                raw = RawLogits(z, own, temperature[at], bias, ctx.cap)
                if d_apart is None:
                    of_rows = (None if x is None else x[at] for x in (lse, d_logprob, entropy, d_entropy))
                    dz = ctx.kernels.gradients(z, own, raw.temperature, *of_rows, bias, ctx.cap)
                else:
                    of_rows = (x[at] for x in (ids, needed, lse, others, rest, d_logprob, d_apart))
                    dz = ctx.kernels.gradients_apart(raw, *of_rows, of_entropy)
                sums.add(at, dz, h, cast, needed[at], zeroed=True)
                del z, dz, raw  # before the product of the next chunk
                continue
            z = chunk_logits(h, cast, bias, temperature[at], ctx.cap)
            slope = 1 - (z * (temperature[at, None] / ctx.cap)) ** 2 if ctx.cap else None  # the derivative of the cap
            z = z if d_apart is None or here is None else with_no_id(z)
            if ctx.banned is not None:
                ctx.banned.close(z, at)
            logp = centred(z, lse[at])
            if d_apart is None:
                dz = slope_of(logp, d, of_entropy)
            else:  # each id that is not named gets the share p / rest of the gradient of the rest
                named, of_rest = d_apart[at, :-1], d_apart[at, -1:]
                every = d + d_apart[at].sum(-1, keepdim=True)
                theirs = slope_of(logp.gather(-1, ids[at]), every, of_entropy) + named
                of_shares = share_of(logp, rest[at, None]).mul_(of_rest)
                dz = slope_of(logp, every, of_entropy).add_(of_shares).scatter_(-1, ids[at], theirs)
            dz.scatter_add_(-1, targets[at, None], d if here is None else d * here[at, None])
            if ctx.banned is not None:
                ctx.banned.close(dz, at, 0.0)  # of one that is named or the target too
            dz /= temperature[at, None]
            if d_apart is not None and here is not None:
                dz = dz[:, :-1]
            sums.add(at, dz if slope is None else dz.mul_(slope), h, cast, needed[at])
            del z, logp, dz, slope
        return *sums.found(weight, bias), *[None] * 8


def _by_kernels(
    kernels: LogitKernels,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    bias: Tensor | None,
    cap: float,
    banned: Banned | None,
    ids: Tensor | None,
    apart: Tensor | None,
) -> list[Tensor]:
    """Return the target's logit, the log-sum-exp, the entropy, the sum of squared probabilities and the last row of
    `LogitKernels.sums_apart`, each [n], of hidden [n, H] and a weight [V, H] of its dtype. Given ids [n, k], overwrite
    `apart` [n, k + 1] with their logits and the rest; without, the last row is undefined."""
    found = torch.empty(5, len(hidden), device=hidden.device)
    for at in chunks(len(hidden), weight):
        raw = RawLogits(raw_logits(hidden[at], weight, banned, at), targets[at], temperature[at], bias, cap)
        if ids is None or apart is None:
            found[:4, at] = kernels.sums(raw.z, raw.targets, raw.temperature, bias, cap)
        else:
            found[:, at], apart[at] = kernels.sums_apart(raw, ids[at])
        del raw  # before the product of the next chunk
    return [row.clone() for row in found]  # results that are views of each other could not be changed in place


class HeadGradients:
    """The gradients of hidden states [n, H], weight [V, H] and bias [V], accumulated over chunks of rows; those of
    weight and bias are summed in `dtype`, if they are trained. trained: of weight and bias"""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, trained: Sequence[bool]
    ) -> None:
        self._hidden = torch.zeros_like(hidden)
        self._weight, self._bias = (
            torch.zeros(of.shape, dtype=dtype, device=of.device) if of is not None and needed else None
            for of, needed in zip((weight, bias), trained, strict=True)
        )

    def add(
        self, at: Tensor | slice, dz: Tensor, h: Tensor, cast: Tensor, needed: Tensor, *, zeroed: bool = False
    ) -> None:
        """Add the gradients of a chunk of rows. at: the rows · dz: gradients [c, V] of their logits · h: their hidden
        states [c, H] · cast: the weight in the dtype of the product. Rows that are not `needed` [c] add nothing, even
        if they are NaN. zeroed: the gradients of their logits are 0 already"""
        if isinstance(at, slice):  # otherwise all are needed
            h = h.masked_fill(~needed[:, None], 0)
            dz = dz if zeroed else dz.masked_fill_(~needed[:, None], 0)
        if self._bias is not None:
            self._bias += dz.sum(0, dtype=self._bias.dtype)
        dz = dz.to(h.dtype)
        self._hidden[at] = dz @ cast
        if self._weight is None:
            return
        if dz.dtype == self._weight.dtype:
            self._weight.addmm_(dz.T, h)
        else:
            self._weight += head_product(dz.T, h)

    def found(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return (d_hidden, d_weight, d_bias), each in the dtype of its tensor; None for what is not trained."""
        d_weight = None if self._weight is None else self._weight.to(weight.dtype)
        d_bias = None if self._bias is None or bias is None else self._bias.to(bias.dtype)
        return self._hidden, d_weight, d_bias


def _over_slices(
    vocabulary: Vocabulary, z: Tensor, lse: Tensor, entropy: Tensor | None, sum_pi2: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Combine values [n] over each rank's slice of the vocabulary into those over the whole vocabulary: the target's
    logit (0 if the target is in another slice), log-sum-exp, entropy, sum of squared probabilities. The distribution
    over the whole vocabulary is a mixture of those over the slices."""
    known = [x for x in (z, lse, entropy, sum_pi2) if x is not None]
    of_ranks = iter(vocabulary.gather(torch.stack(known)).unbind(1))  # each [ranks, n]
    z, parts = next(of_ranks).sum(0), next(of_ranks)
    entropies, sums = (None if x is None else next(of_ranks) for x in (entropy, sum_pi2))
    none = torch.zeros_like(parts)
    lse, *mixed = mixture(parts, none if entropies is None else entropies, none if sums is None else sums)
    entropy, sum_pi2 = (None if x is None else found for x, found in zip((entropies, sums), mixed, strict=True))
    return z, lse, entropy, sum_pi2


def chunks(n: int, weight: Tensor) -> list[slice]:
    """Divide n rows into chunks of which the logits, by a head [V, H], fit into memory at once. Return them as
    slices."""
    rows = device_facts(weight.device.type).chunk_rows(len(weight))
    return [slice(start, min(n, start + rows)) for start in range(0, n, rows)]


def chunks_of(needed: Tensor, weight: Tensor) -> list[Tensor] | list[slice]:
    """Divide the `needed` [n] rows into chunks of indices. On a device where the host would have to wait for their
    number, return slices of all rows instead."""
    if not device_facts(weight.device.type).compacts_rows:
        return chunks(len(needed), weight)
    rows = needed.nonzero()[:, 0]
    return [rows[chunk] for chunk in chunks(len(rows), weight)]


def raw_logits(hidden: Tensor, weight: Tensor, banned: Banned | None, at: Tensor | slice) -> Tensor:
    """Return the logits [n, V] of hidden [n, H], the rows `at`, before their cap and temperature: -inf for banned
    ids."""
    z = hidden @ weight.T
    if banned is not None:
        banned.close(z, at)
    return z


def of_slice(targets: Tensor, here: Tensor | None) -> Tensor:
    """Return targets [n] with -1 in place of those in another slice of the vocabulary."""
    return targets if here is None else targets.where(here, -1)


def head_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a [m, k] b [k, n]: in float32 where the device sums half precision in it at no cost, else in their
    dtype."""
    kernel = wide_kernel(a.device, a.dtype)
    product: Tensor = a @ b if kernel is None or not a.shape[1] else kernel(a, b)
    return product


@cache
def wide_kernel(device: torch.device, dtype: torch.dtype) -> Call | None:
    """Return the kernel of the operation `wide_product`; None: its result costs a conversion of both factors."""
    found = choose("wide_product", Use(device, dtype), without=(PLAIN,))
    return None if found is None else found.call


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    *,
    bias: Tensor | None = None,
    cap: float = 0.0,
    entropy: bool = False,
    sum_pi_squared: bool = False,
    vocabulary: Vocabulary | None = None,
    ids: Tensor | None = None,
    banned: Banned | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the log-prob [n], float32, of `targets` [n] under softmax(hidden [n, H] @ weight [V, H]^T / temperature
    [n]). With cap > 0 the logits are replaced by cap tanh(logits / cap) before the division (Gemma 2). On request
    return also the entropy [n] in nats (differentiable), sum_v pi_v^2 [n] (not differentiable), and the log-probs [n, k
    + 1] of distinct `ids` [n, k], with that of all other ids together in the last place (-1e30 if there are none;
    differentiable).

    vocabulary: this rank's slice if `weight` and `bias` are slices; `targets` and results are of the whole vocabulary.
    banned: ids of the whole vocabulary that are left out of the softmax of some
    rows: their log-prob is -inf (-1e30 in `ids`), and their logits have no gradient."""
    hidden = hidden if vocabulary is None else vocabulary.enter(hidden)
    if banned is not None and vocabulary is not None:
        banned = banned.within(vocabulary, len(weight))
    wanted = (temperature, cap, entropy, sum_pi_squared, vocabulary, ids, banned)
    found: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
    found = _LinearLogprob.apply(hidden, weight, bias, targets, *wanted)
    return found
