"""Outputs of a language-model head for distillation: log-probs of a few ids, or the divergence from a teacher over the
whole vocabulary, without a tensor of [tokens, vocab]. As in `linear_logprob.py`, the logits of a chunk are computed,
used and dropped, and computed again for the gradient.

For a teacher over the whole vocabulary its hidden states [n, H] are stored, not its log-probs [n, V]: V is about forty
times H, and the logits of a chunk cost only one more product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.nn.head_kernels import RawLogits, logit_kernels
from verl.nn.linear_logprob import Banned, HeadGradients, Vocabulary, chunks, chunks_of, linear_logprob, raw_logits
from verl.nn.logit_chunks import NONE, centred, chunk_logits, rest_of

FIGURES = ("drawn_by_teacher", "teacher_agreement", "teacher_entropy")
"""Figures of the teacher's whole distribution at each token: the log-prob of the drawn id, 1.0 if teacher and student
have the same likeliest id (else 0), and the entropy in nats."""


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The weights of a language-model head, which maps hidden states [n, H] to logits: weight [V, H], bias [V], cap as
    in `linear_logprob`."""

    weight: Tensor
    bias: Tensor | None = None
    cap: float = 0.0

    def logprobs(
        self, hidden: Tensor, temperature: Tensor, at: slice | Tensor = slice(None), banned: Banned | None = None
    ) -> Tensor:
        """Return the log-probs [c, V] of the rows `at` of hidden [n, H] at `temperature` [n], in float32 at least."""
        z = self.logits(hidden, temperature, at, banned)
        return centred(z, torch.logsumexp(z, -1))

    def logits(self, hidden: Tensor, temperature: Tensor, at: slice | Tensor, banned: Banned | None) -> Tensor:
        """Return the logits [c, V] of the rows `at`, divided by the temperature; -inf for banned ids."""
        z = chunk_logits(hidden[at], self.weight.to(hidden.dtype), self.bias, temperature[at], self.cap)
        if banned is not None:
            banned.close(z, at)
        return z


class _Read(torch.autograd.Function):
    """The autograd function of `divergence`: values and figures per row, computed from a head's log-probs in chunks."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: Tensor,
        cap: float,
        reading: _Divergence,
    ) -> tuple[Tensor, Tensor]:
        cast, parts = weight.to(hidden.dtype), []
        lse = hidden.new_empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for at in chunks(len(hidden), weight) or [slice(0, 0)]:
            z = chunk_logits(hidden[at], cast, bias, temperature[at], cap)
            if reading.banned is not None:
                reading.banned.close(z, at)
            lse[at] = torch.logsumexp(z, -1)
            parts.append(reading.values(centred(z, lse[at]), at))
            del z  # before the product of the next chunk
        ctx.save_for_backward(hidden, weight, bias, temperature, lse)
        ctx.cap, ctx.reading = cap, reading
        values, figures = (torch.cat(x) for x in zip(*parts, strict=True))
        ctx.mark_non_differentiable(figures)
        return values, figures

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_values: Tensor, _: None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, temperature, lse = ctx.saved_tensors
        needed = d_values != 0  # a NaN in the other rows has no effect
        cast = weight.to(hidden.dtype)
        sums = HeadGradients(hidden, weight, bias, lse.dtype, ctx.needs_input_grad[1:3])
        for at in chunks_of(needed, weight):
            h, t = hidden[at], temperature[at, None]
            z = chunk_logits(h, cast, bias, temperature[at], ctx.cap)
            slope = 1 - (z * (t / ctx.cap)) ** 2 if ctx.cap else None  # the derivative of the cap
            if ctx.reading.banned is not None:
                ctx.reading.banned.close(z, at)
            dz = ctx.reading.slope(centred(z, lse[at]), at, d_values[at]) / t
            sums.add(at, dz if slope is None else dz.mul_(slope), h, cast, needed[at])
            del z, dz, slope
        return *sums.found(weight, bias), None, None, None


@dataclass(frozen=True, slots=True)
class _Divergence:
    """The generalised Jensen-Shannon divergence of a student from a teacher, for the rows `at` of a chunk. `values`
    returns the divergences [c] and `FIGURES` [c, 3]; `slope` the gradient of sum(d x divergence) to the student's
    logits after the division by the temperature. The fields `hidden` [n, H'], `head` and `temperature` are the
    teacher's."""

    hidden: Tensor
    head: HeadWeights
    temperature: Tensor
    beta: float
    targets: Tensor
    banned: Banned | None

    def _teacher(self, at: Any) -> Tensor:
        return self.head.logprobs(self.hidden, self.temperature, at, self.banned)

    def _mixture(self, t: Tensor, p: Tensor, q: Tensor) -> Tensor:
        """Return the log-probs of the mixture M, from the teacher's log-probs t and the probabilities p (student) and q
        (teacher); at beta 1 M is the teacher's distribution."""
        if self.beta == 1:
            return t
        return (q * self.beta).add_(p, alpha=1 - self.beta).clamp_(min=torch.finfo(p.dtype).tiny).log_()

    def values(self, logp: Tensor, at: Any) -> tuple[Tensor, Tensor]:
        s, t = logp, self._teacher(at)
        q = t.exp()
        first = t.max(-1, keepdim=True).indices  # on a CPU twice as fast as argmax; amax is eight times as fast
        own, same = t.gather(-1, self.targets[at, None]), s.gather(-1, first) == s.amax(-1, keepdim=True)
        x = q.mul_(t) if self.beta == 1 else q * t  # reuse its memory: allocating a chunk takes as long as computing it
        figures = torch.cat([own, same.to(t.dtype), -x.sum(-1, keepdim=True)], -1)
        if self.beta == 0:
            return q.mul_(torch.sub(t, s, out=x)).sum(-1), figures
        p = torch.exp(s, out=x)
        m = self._mixture(t, p, q)
        kl = p.mul_(d := s - m).sum(-1)
        if self.beta < 1:
            kl = self.beta * q.mul_(torch.sub(t, m, out=d)).sum(-1) + (1 - self.beta) * kl
        return kl, figures

    def slope(self, logp: Tensor, at: Any, d: Tensor) -> Tensor:
        s, t, p = logp, self._teacher(at), logp.exp()
        q = t.exp() if self.beta < 1 else t
        if self.beta == 0:
            return (p - q) * d[:, None]
        x = s - self._mixture(t, p, q)
        x -= (p * x).sum(-1, keepdim=True)
        return x.mul_(p).mul_(d[:, None] if self.beta == 1 else (1 - self.beta) * d[:, None])


def logprobs_at(hidden: Tensor, head: HeadWeights, ids: Tensor, temperature: Tensor) -> Tensor:
    """Return the log-probs [n, k + 1] of `ids` [n, k], and of all other ids together, for hidden [n, H]
    (`linear_logprob`)."""
    found = linear_logprob(hidden, head.weight, ids[:, 0], temperature, ids=ids, bias=head.bias, cap=head.cap)[3]
    assert found is not None
    return found


def divergence(
    hidden: Tensor,
    head: HeadWeights,
    temperature: Tensor,
    teacher: Tensor,
    teacher_head: HeadWeights,
    teacher_temperature: Tensor,
    beta: float,
    targets: Tensor,
    banned: Banned | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the divergence [n] of the student's distribution S, of `hidden` [n, H], from the teacher's T, of hidden
    states `teacher` [n, H'], over the whole vocabulary; and `FIGURES` [n, 3]. It is beta KL(T || M) + (1 - beta) KL(S
    || M) with M = beta T + (1 - beta) S; beta 0: KL(T || S), forward; beta 1: KL(S || T), reverse. The divergence is
    differentiable in the student, the figures are not. banned: ids that have probability 0 in both distributions."""
    assert len(head.weight) == len(teacher_head.weight), "one vocabulary"
    reading = _Divergence(teacher, teacher_head, teacher_temperature, beta, targets, banned)
    out: tuple[Tensor, Tensor] = _Read.apply(hidden, head.weight, head.bias, temperature, head.cap, reading)
    return out


@torch.no_grad()
def top_k(
    hidden: Tensor,
    head: HeadWeights,
    temperature: Tensor,
    k: int,
    targets: Tensor | None = None,
    banned: Banned | None = None,
    vocabulary: Vocabulary | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the k likeliest ids [n, k] int64 for hidden [n, H], their log-probs [n, k + 1] with that of all other ids
    together last, and the log-probs [n] of `targets` [n] if given. vocabulary: this rank's slice if the head is one;
    targets, banned ids and results are of the whole vocabulary, the same on every rank."""
    size = len(head.weight)
    start, gather = (0, _alone) if vocabulary is None else (vocabulary.start, vocabulary.gather)
    if vocabulary is not None and banned is not None:
        banned = banned.within(vocabulary, size)
    inside = torch.full((len(hidden),), -1, device=hidden.device) if targets is None else targets - start
    # the likeliest are those of the raw logits, unless a bias is added to these
    kernels = logit_kernels(hidden.device, hidden.dtype) if head.bias is None else None
    cast = head.weight if kernels is None else head.weight.to(hidden.dtype)
    found, sums = list[tuple[Tensor, Tensor]](), list[Tensor]()
    for at in chunks(len(hidden), head.weight) or [slice(0, 0)]:
        mine = (inside[at, None] >= 0) & (inside[at, None] < size)
        if kernels is None:
            z = head.logits(hidden, temperature, at, banned)
            lse, (values, ids) = torch.logsumexp(z, -1, keepdim=True), z.topk(min(k, size), -1)
            # before the rest is summed, of which the likeliest are taken out
            own = z.gather(-1, inside[at, None].clamp(0, size - 1))
            of_rows = [lse, own.where(mine, -torch.inf), rest_of(z, ids)]
        else:
            z = raw_logits(hidden[at], cast, banned, at)
            ids = z.topk(min(k, size), -1).indices
            raw = RawLogits(z, inside[at], temperature[at], None, head.cap)
            (own, lse, *_), named = kernels.sums_apart(raw, ids)
            values, of_rows = named[:, :-1], [lse[:, None], own[:, None].where(mine, -torch.inf), named[:, -1:]]
            del raw
        del z  # before the product of the next chunk
        found.append((values, ids + start))
        sums.append(torch.cat(of_rows, -1))
    # of every rank, each [n, ranks x k] and [n, ranks]
    values, ids = (gather(torch.cat(x)).movedim(0, 1).flatten(1) for x in zip(*found, strict=True))
    lses, owns, rests = gather(torch.cat(sums)).movedim(0, 1).unbind(-1)
    lse, kept = torch.logsumexp(lses, -1), values.topk(k, -1)
    others = torch.cat([rests, values.scatter(-1, kept.indices, -torch.inf)], -1)
    rest = centred(torch.logsumexp(others, -1, keepdim=True), lse)
    logprobs = kept.values - lse[:, None]
    impossible = logprobs <= NONE  # fewer than k ids are possible: the reader must see that
    logprobs = torch.cat([logprobs.masked_fill(impossible, -torch.inf), rest], -1)
    drawn = None if targets is None else centred(torch.logsumexp(owns, -1, keepdim=True), lse)[:, 0]
    return ids.gather(-1, kept.indices), logprobs, drawn


def _alone(x: Tensor) -> Tensor:
    return x[None]
