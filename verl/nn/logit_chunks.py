"""Arithmetic on a chunk of logits [n, V] by torch's operations."""

from __future__ import annotations

import torch
from torch import Tensor

NONE = -1e30
"""The log-prob of probability 0. It is finite, so that p log p is 0 and not NaN."""


def chunk_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor, cap: float) -> Tensor:
    """Return the logits [n, V] of hidden [n, H] in float32 (float64 stays), capped, then divided by each row's
    temperature. Those of half precision are rounded to it once, as a rollout rounds them."""
    z = hidden @ weight.T
    return finished(z.to(torch.promote_types(z.dtype, torch.float32)), bias, temperature, cap)


def finished(z: Tensor, bias: Tensor | None, temperature: Tensor, cap: float) -> Tensor:
    """Return raw logits z [n, m], overwritten, plus bias [m] or [n, m], capped, then divided by each row's
    temperature."""
    if bias is not None:
        z += bias
    if cap:
        z = z.div_(cap).tanh_().mul_(cap)
    return z.div_(temperature[:, None])


def centred(z: Tensor, lse: Tensor) -> Tensor:
    """Replace logits z by log-probs in place, by their log-sum-exp [n]; -inf becomes `NONE`, so that p log p is 0 and
    not NaN."""
    return z.sub_(lse[:, None]).clamp_(min=NONE)


def entropy_of(logp: Tensor) -> Tensor:
    """Return the entropy [n] of log-probs [n, v]."""
    return -(logp.exp().mul_(logp)).sum(-1)


def slope_of(logp: Tensor, d: Tensor, of_entropy: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return the gradient [n, v] to the logits, without the target's own term: -d p, where d [n, 1] is the gradient to
    the log-prob. With of_entropy = (H, dL/dH), each [n, 1], add dL/dH dH/dz, where dH/dz = -p (log p + H). Overwrites
    logp [n, v]."""
    if of_entropy is None:
        return logp.exp_().mul_(-d)
    p = logp.exp()
    return logp.add_(of_entropy[0]).mul_(-of_entropy[1]).sub_(d).mul_(p)


def share_of(logp: Tensor, rest: Tensor) -> Tensor:
    """Return p / p(rest) of two log-probs. It is computed in logs, since p may be 0; 0 if both are."""
    return (logp - rest.clamp(min=NONE / 2)).exp_()


def with_no_id(z: Tensor) -> Tensor:
    """Return logits [n, V] with one more column, -inf: the logit of all ids that are in another slice."""
    return torch.nn.functional.pad(z, (0, 1), value=-torch.inf)


def rest_of(z: Tensor, ids: Tensor) -> Tensor:
    """Return the log-sum-exp [n, 1] of the logits z [n, V] without those of `ids` [n, k], which become -inf in z."""
    return torch.logsumexp(z.scatter_(-1, ids, -torch.inf), -1, keepdim=True).clamp_(min=NONE)


def mixture(parts: Tensor, entropies: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-sum-exp, the entropy and the sum of squared probabilities, each [n], of the mixture of
    distributions over m parts of a vocabulary; those of the parts are [m, n]."""
    lse = torch.logsumexp(parts, 0)
    log_weight = (parts - lse).clamp_(min=NONE)
    weight = log_weight.exp()
    return lse, (weight * (entropies - log_weight)).sum(0), (weight.square() * sums).sum(0)
