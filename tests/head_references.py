"""The operations on a chunk of logits by plain torch, in the precision of their inputs, and random inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def _log_probs(z: Tensor, temperature: Tensor, bias: Tensor | None, cap: float) -> tuple[Tensor, Tensor]:
    """The log-probs of raw logits, and the logits after bias, cap and temperature; -inf stays."""
    x = z if bias is None else z + bias
    x = torch.where(x == -torch.inf, x, cap * torch.tanh(x / cap)) if cap else x
    x = x / temperature[:, None]
    return torch.log_softmax(x, -1), x


def _plogp(logp: Tensor) -> Tensor:
    return torch.where(logp == -torch.inf, 0.0, logp.exp() * logp.clamp(min=-1e30))


def logit_sums(z: Tensor, targets: Tensor, temperature: Tensor, bias: Tensor | None = None, cap: float = 0.0) -> Tensor:
    logp, x = _log_probs(z, temperature, bias, cap)
    own = torch.where(targets < 0, 0.0, x.gather(1, targets.clamp(min=0)[:, None])[:, 0])
    return torch.stack([own, x.logsumexp(-1), -_plogp(logp).sum(-1), logp.exp().square().sum(-1)])


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
    """By autograd of `logit_sums`, which finds lse and entropy itself; rows without a gradient may be NaN."""
    with torch.inference_mode(False), torch.enable_grad():
        needed = (d_logprob != 0) if d_entropy is None else (d_logprob != 0) | (d_entropy != 0)
        closed = z == -torch.inf
        leaf = torch.where(needed[:, None] & ~closed, z, 0.0).clone().requires_grad_()
        own, sums, spread, _ = logit_sums(leaf.masked_fill(closed, -torch.inf), targets, temperature, bias, cap)
        out = (d_logprob * (own - sums)).sum()
        out = out if d_entropy is None else out + (d_entropy * spread).sum()
        (found,) = torch.autograd.grad(out, leaf)
    return z.copy_(found)


def logit_sums_inputs(rng: torch.Generator, size: int, dtype: torch.dtype) -> Inputs:
    """Vocabularies below, at and above a block, a row of one likely id, targets elsewhere, ids that are left out."""
    vocab = (3, 67, 4096, 4099)[size % 4]
    z = 4 * torch.randn(5, vocab, generator=rng)
    z[0, 0] += 12
    z[1:3, 1] = -torch.inf
    targets = torch.randint(2, vocab, (5,), generator=rng)
    targets[4] = -1
    bias = torch.randn(vocab, generator=rng).to(dtype) if size // 2 % 2 else None
    temperature = 0.5 + torch.rand(5, generator=rng)
    return (z.to(dtype), targets, temperature, bias), {"cap": (0.0, 5.0)[size % 2]}


def logit_gradients_inputs(rng: torch.Generator, size: int, dtype: torch.dtype) -> Inputs:
    """The same, with rows without a gradient, one of which is NaN."""
    (z, targets, temperature, bias), rest = logit_sums_inputs(rng, size, dtype)
    _, lse, entropy, _ = logit_sums(z.double(), targets, temperature.double(), bias, rest["cap"])
    d_logprob, d_entropy = torch.randn(2, 5, generator=rng)
    d_logprob[3] = 0
    of_entropy = (entropy.float(), d_entropy) if size % 4 else (None, None)
    if size % 2:
        d_entropy[3], z[3] = 0, torch.nan
    elif size % 4:
        d_logprob[0] = 0
    return (z, targets, temperature, lse.float(), d_logprob, *of_entropy, bias), rest
