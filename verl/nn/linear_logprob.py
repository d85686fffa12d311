"""Chunked linear log-prob and entropy: the only way from hidden states to log-probs in training.

Never holds [tokens, vocab]: a chunk of logits is made, reduced and dropped in the forward pass and made again in the
backward pass (pitfalls 32; algorithms.md 2.12).
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK_BYTES = 16 << 20  # of one chunk of float32 logits: small enough for the caches, large enough for the GEMM


class _LinearLogprob(torch.autograd.Function):
    """See `linear_logprob`."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, want_entropy, want_sum_pi_squared):
        n, v = hidden.shape[0], weight.shape[0]
        chunk = max(16, _CHUNK_BYTES // (4 * v))
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs = torch.empty(n, dtype=exact, device=hidden.device)
        lse = torch.empty_like(logprobs)
        entropy = torch.empty_like(logprobs) if want_entropy else None
        sum_pi2 = torch.empty_like(logprobs) if want_sum_pi_squared else None
        for s in range(0, n, chunk):
            at = slice(s, s + chunk)
            z = _logits(hidden[at], weight, bias, temperature[at])
            lse[at] = torch.logsumexp(z, -1)
            logprobs[at] = z.gather(-1, targets[at, None])[:, 0] - lse[at]
            if entropy is not None:
                logp = z - lse[at, None]
                entropy[at] = -(logp.exp() * logp).sum(-1)
            if sum_pi2 is not None:
                sum_pi2[at] = torch.exp(torch.logsumexp(2 * z, -1) - 2 * lse[at])
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, lse, entropy)
        ctx.chunk = chunk
        if sum_pi2 is not None:
            ctx.mark_non_differentiable(sum_pi2)
        return logprobs, entropy, sum_pi2

    @staticmethod
    def backward(ctx, d_logprob, d_entropy, _):
        hidden, weight, bias, targets, temperature, lse, entropy = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros(weight.shape, dtype=lse.dtype, device=weight.device)
        d_bias = torch.zeros(bias.shape, dtype=lse.dtype, device=bias.device) if bias is not None else None
        for s in range(0, hidden.shape[0], ctx.chunk):
            at = slice(s, s + ctx.chunk)
            logp = _logits(hidden[at], weight, bias, temperature[at]).sub_(lse[at, None])
            p = logp.exp()
            dz = p * -d_logprob[at, None]
            dz.scatter_add_(-1, targets[at, None], d_logprob[at, None])
            if entropy is not None and d_entropy is not None:  # dH/dz = -p (log p + H)
                dz -= d_entropy[at, None] * p * (logp + entropy[at, None])
            dz /= temperature[at, None]
            if d_bias is not None:
                d_bias += dz.sum(0)
            dz = dz.to(hidden.dtype)
            d_hidden[at] = dz @ weight.to(hidden.dtype)
            d_weight += (dz.T @ hidden[at]).to(lse.dtype)
        return d_hidden, d_weight.to(weight.dtype), None if d_bias is None else d_bias.to(bias.dtype), None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor) -> Tensor:
    """[n, H] -> [n, V] float32 (float64 stays), divided by each row's own temperature."""
    z = hidden @ weight.to(hidden.dtype).T
    z = z if z.dtype == torch.float64 else z.float()
    if bias is not None:
        z = z + bias
    return z / temperature[:, None].to(z.dtype)


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    *,
    bias: Tensor | None = None,
    entropy: bool = False,
    sum_pi_squared: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-prob [n] of `targets` [n] under softmax(hidden [n, H] @ weight [V, H]^T / temperature [n]), float32.

    Also the entropy [n] in nats (differentiable) and sum_v pi_v^2 [n] (not differentiable) when asked for.
    """
    return _LinearLogprob.apply(hidden, weight, bias, targets, temperature, entropy, sum_pi_squared)
