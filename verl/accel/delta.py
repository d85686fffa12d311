"""One token of gated delta nets, in torch: the row of the table for every device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def unit(x: Tensor) -> Tensor:
    """Return x with vectors of length 1; one of zeros stays."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def gated_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """Return x [..., V] over its root mean square, times weight [V] and silu(gate [..., V]), in the dtype of gate."""
    exact = torch.promote_types(gate.dtype, torch.float32)
    normed = F.rms_norm(x.to(gate.dtype).to(exact), x.shape[-1:], None, eps).to(gate.dtype)
    return (weight.to(gate.dtype) * normed * F.silu(gate.to(exact))).to(gate.dtype)


def plain_delta_step(
    given: Tensor,
    taps: Tensor,
    decays: Tensor,
    steps: Tensor,
    norm: Tensor,
    windows: Tensor,
    states: Tensor,
    *,
    key_heads: int,
    eps: float,
) -> Tensor:
    """Compute one token of each row of a gated delta net, and update windows and states.

    given: [n, C + H V + 2 H]: queries and keys of all key heads and values (C channels), gates, the inputs of rates and
    of decays · taps: [w + 1, C] the weights of the convolution, the token's own last · decays and steps: [H], A_log and
    dt_bias · norm: [V] · windows: [n, w, C] the channels of the tokens before · states: [n, H, K, V]
    """
    (n, heads, inner, width), channels = states.shape, windows.shape[2]
    keys = key_heads * inner
    mixed, gate, rate, decay = given.split((channels, heads * width, heads, heads), 1)
    seen = torch.cat([windows, mixed[:, None]], 1)
    windows.copy_(seen[:, 1:])
    mixed = F.silu((seen * taps).sum(1)).to(given.dtype).to(states.dtype)
    q, k, v = mixed.split((keys, keys, heads * width), 1)
    q, k = (unit(x.view(n, key_heads, inner)).repeat_interleave(heads // key_heads, 1) for x in (q, k))
    fade = (-decays.to(states.dtype).exp() * F.softplus(decay.to(states.dtype) + steps)).exp()
    states.mul_(fade[..., None, None])
    predicted = (states * k[..., None]).sum(2)
    states.add_(
        k[..., None] * (rate.to(states.dtype).sigmoid()[..., None] * (v.view(n, heads, width) - predicted))[:, :, None]
    )
    found = (states * (q * inner**-0.5)[..., None]).sum(2)
    return gated_norm(found, norm, gate.view(n, heads, width), eps).flatten(1)
