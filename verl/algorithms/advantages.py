"""Advantage estimators: pure functions on the trainable tokens of a whole step (algorithms.md section 1), in float64.

Each takes `Columns` with the token column `rewards` [L] (see `token_rewards`), the sequence columns `group` [S] int64 and
`valid` [S] bool (False: no valid reward; in no statistic, advantage 0), and returns {"advantages": [L]} or also "returns".
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.batch import Columns, segment_sum

Advantage = dict[str, Tensor]
FLAT = 1e-6  # a spread within this share of the largest value (or of 1) is rounding (Q18)


def token_rewards(columns: Columns, penalty: Tensor | None = None) -> Tensor:
    """[L] float64 rewards: each sequence's `score` at its last trainable token, minus the per-token `penalty` [L].

    Built on the mask before rejection, so that a rejected last token cannot swallow the score (quirk Q6).
    """
    n = len(columns.sequence_of)
    rewards = torch.zeros(n, dtype=torch.float64)
    last = torch.full((columns.num_sequences,), -1, dtype=torch.int64)
    at = torch.arange(n)[columns.mask]
    last.scatter_reduce_(0, columns.sequence_of[columns.mask], at, "amax")
    has = (last >= 0) & columns.sequence["valid"]
    rewards[last[has]] = columns.sequence["score"].double()[has]
    if penalty is not None:
        rewards = rewards - torch.where(columns.mask, penalty.double(), torch.zeros_like(rewards))
    return rewards


def whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the mask, Bessel variance; 0 outside (section 0.2).

    Values that are equal within rounding give exactly 0: their differences are noise, which 1 / 1e-4 would raise.
    """
    inside = x[mask]
    out = torch.zeros_like(x)
    if len(inside) == 0:
        return out
    mean = inside.mean()
    high, low = inside.max(), inside.min()
    if high - low <= FLAT * torch.maximum(high.abs(), low.abs()).clamp(min=1):
        scaled = torch.zeros_like(inside)
    else:
        scaled = (inside - mean) * torch.rsqrt(inside.var(correction=1) + 1e-8)
    out[mask] = scaled if shift_mean else scaled + mean
    return out


def _scores(columns: Columns) -> tuple[Tensor, Tensor, Tensor, int]:
    """(s [S] float64, group [S], usable [S] bool, number of groups). Usable: valid reward and some trainable token."""
    s = columns.sum(columns["rewards"].double())
    group = columns.sequence["group"]
    usable = columns.sequence["valid"] & (columns.counts() > 0)
    return s, group, usable, int(group.max()) + 1 if len(group) else 0


def _group_stats(s: Tensor, group: Tensor, usable: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """(size, mean, spread) of each sequence's own group, over usable members. Spread is max - min.

    A spread within rounding is exactly 0: scores like 0.1 have a non-zero standard deviation in floats (Q18).
    """
    index = group[usable]
    values = s[usable]
    size = segment_sum(torch.ones_like(values), index, n)
    mean = segment_sum(values, index, n) / size.clamp(min=1)
    high = torch.full((n,), -torch.inf, dtype=s.dtype).scatter_reduce(0, index, values, "amax")
    low = torch.full((n,), torch.inf, dtype=s.dtype).scatter_reduce(0, index, values, "amin")
    flat = (high - low) <= FLAT * torch.maximum(high.abs(), low.abs()).clamp(min=1)
    spread = torch.where(flat | (size < 1), torch.zeros_like(high), high - low)
    return size[group], mean[group], spread[group]


def _broadcast(columns: Columns, a: Tensor) -> Tensor:
    """[S] -> [L], exactly 0 outside the mask."""
    return torch.where(columns.mask, a[columns.sequence_of], torch.zeros((), dtype=a.dtype))


def grpo(columns: Columns, *, normalize_by_std: bool = True, eps: float = 1e-6, singleton: str = "zero") -> Advantage:
    """(s - mean_g) / (std_g + eps), Bessel (1.3; GRPO 2402.03300). Without the division: Dr.GRPO (1.4; 2503.20783).

    singleton: zero (no signal) | raw (verl: the score itself). A group without variance gives exactly 0.
    """
    s, group, usable, n = _scores(columns)
    size, mean, spread = _group_stats(s, group, usable, n)
    centred = torch.where(usable & (spread > 0) & (size > 1), s - mean, torch.zeros_like(s))
    if normalize_by_std:
        var = segment_sum(centred[usable] ** 2, group[usable], n)[group] / (size - 1).clamp(min=1)
        a = centred / (var.sqrt() + eps)
    else:
        a = centred
    if singleton == "raw":
        alone = usable & (size == 1)
        a = torch.where(alone, s / (1 + eps) if normalize_by_std else s, a)
    return {"advantages": _broadcast(columns, a)}


def rloo(columns: Columns, *, singleton: str = "zero") -> Advantage:
    """s - mean of the other members of the group (1.5; 2402.14740). singleton: zero | raw."""
    s, group, usable, n = _scores(columns)
    size, mean, spread = _group_stats(s, group, usable, n)
    a = torch.where(usable & (size > 1) & (spread > 0), size / (size - 1).clamp(min=1) * (s - mean), torch.zeros_like(s))
    if singleton == "raw":
        a = torch.where(usable & (size == 1), s, a)
    return {"advantages": _broadcast(columns, a)}


def to_go(columns: Columns, gamma: float) -> Tensor:
    """[L] discounted sum of the rewards from each trainable token on; holes are skipped without a discount (1.6)."""
    rewards = torch.where(columns.mask, columns["rewards"].double(), 0.0)
    at = torch.nonzero(columns.mask)[:, 0]
    sequence = columns.sequence_of[at]
    out = torch.zeros_like(rewards)
    if len(at) == 0:
        return out
    counts = torch.bincount(sequence, minlength=columns.num_sequences)
    order = torch.argsort(sequence, stable=True)
    at, sequence = at[order], sequence[order]
    start = torch.cumsum(counts, 0) - counts
    place = torch.arange(len(at)) - start[sequence]
    padded = torch.zeros(columns.num_sequences, int(counts.max()), dtype=torch.float64)
    padded[sequence, place] = rewards[at]
    for t in range(padded.shape[1] - 2, -1, -1):
        padded[:, t] += gamma * padded[:, t + 1]
    out[at] = padded[sequence, place]
    return out


def reinforce_plus_plus(columns: Columns, *, gamma: float = 1.0) -> Advantage:
    """Reward to go, whitened over all trainable tokens; returns are unwhitened (1.6; 2501.03262)."""
    returns = to_go(columns, gamma)
    usable = columns.mask & columns.sequence["valid"][columns.sequence_of]
    return {"advantages": whiten(returns, usable), "returns": returns}


def reinforce_plus_plus_baseline(columns: Columns, *, singleton: str = "zero") -> Advantage:
    """s - mean_g, broadcast, whitened over tokens (1.6, -baseline). singleton: zero | raw (verl)."""
    s, group, usable, n = _scores(columns)
    size, mean, spread = _group_stats(s, group, usable, n)
    a = torch.where(usable & (size > 1) & (spread > 0), s - mean, torch.zeros_like(s))
    if singleton == "raw":
        a = torch.where(usable & (size == 1), s, a)
    return {"advantages": whiten(_broadcast(columns, a), columns.mask & usable[columns.sequence_of])}


def reinforce(columns: Columns, *, gamma: float = 1.0) -> Advantage:
    """Plain reward to go, no baseline. A sequence without a valid reward has none, whatever its KL penalty."""
    returns = to_go(columns, gamma)
    usable = columns.mask & columns.sequence["valid"][columns.sequence_of]
    return {"advantages": torch.where(usable, returns, 0.0), "returns": returns}
