"""Log-probs and entropies of raw logits, and their gradients, by the kernels that read a chunk of logits once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from verl.accel.operations import Call, Use
from verl.accel.table import choose
from verl.nn.logit_chunks import NONE, centred, finished, mixture, share_of, slope_of


@dataclass(frozen=True, slots=True)
class RawLogits:
    """A product of hidden states and a head, and what turns it into logits. The kernels overwrite it."""

    z: Tensor
    """[c, V], contiguous, -inf for ids that are left out."""
    targets: Tensor
    """[c] int64; an id that is not in 0 ... V - 1 is in another slice of the vocabulary."""
    temperature: Tensor
    """[c]"""
    bias: Tensor | None
    """[V]"""
    cap: float

    def without_targets(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first arguments of both kernels for rows whose target is taken out."""
        return self.z, torch.full_like(self.targets, -1), self.temperature


@dataclass(frozen=True, slots=True)
class TakenOut:
    """The logits of k named ids and of the target that were taken out of each row of a chunk, where -inf is in their
    place. In the fields [c, k + 1] the target is last."""

    at: Tensor
    """Their places, int64."""
    own: Tensor
    """True for the target, which may be a named id too."""
    logits: Tensor
    """Float32, with their bias, capped, divided by the temperature; -inf for what has probability 0 or is in another
    slice, and in the last place for a target that is named too."""

    @classmethod
    def of(cls, raw: RawLogits, ids: Tensor) -> TakenOut:
        """Take the targets and the ids [c, k] out of raw logits."""
        wanted = torch.cat([ids, raw.targets[:, None]], 1)
        own, vocab = wanted == raw.targets[:, None], raw.z.shape[1]
        here = (wanted >= 0) & (wanted < vocab)
        here[:, -1] &= ~own[:, :-1].any(1)
        at = wanted.clamp(0, vocab - 1)
        z = raw.z.gather(1, at)
        raw.z.scatter_add_(1, at, torch.zeros_like(z).masked_fill_(here, -torch.inf))  # two ids may have one place
        closed = ~here | (z == -torch.inf)
        logits = finished(z.float(), None if raw.bias is None else raw.bias[at], raw.temperature, raw.cap)
        return cls(at, own & here, logits.masked_fill_(closed, -torch.inf))

    def put_back(self, dz: Tensor, gradients: Tensor) -> Tensor:
        """Write their gradients [c, k + 1] to their places in dz [c, V], where 0 is."""
        gradients = gradients.masked_fill(self.logits == -torch.inf, 0)
        return dz.scatter_add_(1, self.at, gradients.to(dz.dtype))


@dataclass(frozen=True, slots=True)
class LogitKernels:
    """The kernels of the operations `logit_sums` and `logit_gradients`, each of which reads a chunk of logits once.

    Named ids are taken out first, with the target. The kernels then see the distribution of the other ids, and the
    whole is a mixture of it and of the k + 1 single ids, of which there are few. The sum over the others keeps its
    digits, as 1 - (the sum of the named) would not, and each gradient is rounded once."""

    sums: Call
    gradients: Call

    def sums_apart(self, raw: RawLogits, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return [5, c]: the target's logit, the log-sum-exp, the entropy, the sum of squared probabilities, and the
        log-sum-exp of the others; and [c, k + 1]: the logits of `ids` [c, k] with the log-sum-exp of all but them.
        Takes ids and targets out of the logits."""
        taken = TakenOut.of(raw, ids)
        _, lse, entropy, squares = self.sums(*raw.without_targets(), raw.bias, raw.cap)
        others, none = lse.clamp(min=NONE), lse == -torch.inf
        parts = torch.cat([others[None], taken.logits.T])
        entropies, sums = torch.zeros_like(parts), torch.ones_like(parts)  # of single ids
        entropies[0], sums[0] = entropy.masked_fill(none, 0), squares.masked_fill(none, 0)
        own = taken.logits.where(taken.own, 0).sum(1)
        rest = torch.logaddexp(others, taken.logits[:, -1])
        named = torch.cat([taken.logits[:, :-1], rest[:, None]], 1)
        return torch.stack([own, *mixture(parts, entropies, sums), others]), named

    def gradients_apart(
        self,
        raw: RawLogits,
        ids: Tensor,
        needed: Tensor,
        lse: Tensor,
        others: Tensor,
        rest: Tensor,
        d_logprob: Tensor,
        d_apart: Tensor,
        of_entropy: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Overwrite the logits with their gradients, and return them. needed [c]: False for rows without a gradient,
        which become 0 · lse [c]: of the whole vocabulary · others [c]: as in `sums_apart` · rest [c]: the log-prob of
        all ids but `ids` [c, k] · d_logprob [c], d_apart [c, k + 1]: the gradients to the log-probs of the targets, and
        to those of `ids` with the rest · of_entropy: the entropy and the gradient to it, each [c, 1].

        With q the probability of one of the others among them, and P that of them all, the gradient to its logit is
        q (d_rest P / p(rest) - P (d_logprob + the sum of d_apart)), and that of the entropy -P dH q (log q + log P +
        H): what the kernel computes for a distribution q from other factors."""
        taken = TakenOut.of(raw, ids)
        every, of_rest = d_logprob + d_apart.sum(-1), d_apart[:, -1]
        logp = centred(taken.logits.clone(), lse)
        theirs = torch.cat([d_apart[:, :-1], (of_rest * share_of(logp[:, -1], rest))[:, None]], 1)
        theirs += d_logprob[:, None].where(taken.own, 0)
        theirs += slope_of(logp, every[:, None], of_entropy)
        if raw.cap:
            theirs *= 1 - (taken.logits * (raw.temperature[:, None] / raw.cap)) ** 2
        theirs = (theirs / raw.temperature[:, None]).where(needed[:, None], 0)
        log_p = others - lse
        p = log_p.exp()
        d = (p * every - of_rest * share_of(log_p, rest)).where(needed, 0)
        entropy, d_entropy = None, None
        if of_entropy is not None:
            entropy, d_entropy = of_entropy[0][:, 0] + log_p, (p * of_entropy[1][:, 0]).where(needed, 0)
        of_rows = others, d, entropy, d_entropy
        return taken.put_back(self.gradients(*raw.without_targets(), *of_rows, raw.bias, raw.cap), theirs)


@cache
def logit_kernels(device: torch.device, dtype: torch.dtype) -> LogitKernels | None:
    """Return the kernels for hidden states of a dtype; None: torch's operations compute their logits."""
    found = [choose(name, Use(device, dtype)) for name in ("logit_sums", "logit_gradients")]
    calls = [choice.call for choice in found if choice is not None]
    return LogitKernels(*calls) if len(calls) == len(found) else None
