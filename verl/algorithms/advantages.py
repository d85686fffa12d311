"""Advantage estimators: pure functions on the trainable tokens of a whole step (algorithms.md section 1), in float64.

Each takes `Columns` with the token column `rewards` [L] (see `token_rewards`), the sequence columns `group` [S] int64 and
`valid` [S] bool (False: no valid reward; in no statistic, advantage 0), and returns {"advantages": [L]} or also "returns".
"""

from __future__ import annotations

from collections.abc import Sequence

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
    if _flat(high, low):
        scaled = torch.zeros_like(inside)
    else:
        scaled = (inside - mean) * torch.rsqrt(inside.var(correction=1) + 1e-8)
    out[mask] = scaled if shift_mean else scaled + mean
    return out


def _flat(high: Tensor, low: Tensor) -> Tensor:
    return high - low <= FLAT * torch.maximum(high.abs(), low.abs()).clamp(min=1)


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
    spread = torch.where(_flat(high, low) | (size < 1), torch.zeros_like(high), high - low)
    return size[group], mean[group], spread[group]


def _broadcast(columns: Columns, a: Tensor) -> Tensor:
    """[S] -> [L], exactly 0 outside the mask."""
    return torch.where(columns.mask, a[columns.sequence_of], torch.zeros((), dtype=a.dtype))


def grpo(
    columns: Columns,
    *,
    normalize_by_std: bool = True,
    eps: float = 1e-6,
    singleton: str = "zero",
    leave_one_out: bool = False,
    scale: str = "group",
) -> Advantage:
    """(s - mean_g) / (std_g + eps), Bessel (1.3; GRPO 2402.03300). Without the division: Dr.GRPO (1.4; 2503.20783).

    leave_one_out: mean and deviation of the other members, undivided where that is 0 (NeMo-RL) · scale: group | batch
    (the deviation of all scores, TRL) | none · singleton: zero (no signal) | raw (verl: the score itself).
    A group without variance gives exactly 0.
    """
    assert scale in ("group", "batch", "none"), f"scale={scale!r}: group | batch | none"
    s, group, usable, n = _scores(columns)
    a = normalized_in_groups(
        s, group, usable, n, scale=scale if normalize_by_std else "none", eps=eps, leave_one_out=leave_one_out
    )
    if singleton == "raw":
        size = _group_stats(s, group, usable, n)[0]
        a = torch.where(usable & (size == 1), s / (1 + eps) if normalize_by_std and scale != "none" else s, a)
    return {"advantages": _broadcast(columns, a)}


def normalized_in_groups(
    s: Tensor, group: Tensor, usable: Tensor, n: int, *, scale: str, eps: float, leave_one_out: bool = False
) -> Tensor:
    """[S] GRPO's centred and scaled scores; 0 for the unusable, for groups of one and for groups without variance."""
    size, mean, spread = _group_stats(s, group, usable, n)
    centred = torch.where(usable & (spread > 0) & (size > 1), s - mean, torch.zeros_like(s))
    if leave_one_out:
        centred = centred * size / (size - 1).clamp(min=1)
    if scale == "none":
        return centred
    if scale == "batch":
        inside = s[usable]
        if len(inside) < 2 or _flat(inside.max(), inside.min()):
            return torch.zeros_like(s)
        return centred / (inside.std(correction=1) + eps)
    if not leave_one_out:
        var = segment_sum(centred[usable] ** 2, group[usable], n)[group] / (size - 1).clamp(min=1)
        return centred / (var.sqrt() + eps)
    around = torch.where(usable, s - mean, torch.zeros_like(s))
    rest = segment_sum(around[usable] ** 2, group[usable], n)[group] - around**2 * (size / (size - 1).clamp(min=1))
    std = (rest.clamp(min=0) / (size - 2).clamp(min=1)).sqrt()
    varied = (size > 2) & (std > FLAT * torch.maximum(mean.abs(), spread).clamp(min=1))
    return torch.where(varied, centred / (std + eps), centred)


def rloo(columns: Columns, *, singleton: str = "zero") -> Advantage:
    """s - mean of the other members of the group (1.5; 2402.14740). singleton: zero | raw."""
    s, group, usable, n = _scores(columns)
    size, mean, spread = _group_stats(s, group, usable, n)
    a = torch.where(
        usable & (size > 1) & (spread > 0), size / (size - 1).clamp(min=1) * (s - mean), torch.zeros_like(s)
    )
    if singleton == "raw":
        a = torch.where(usable & (size == 1), s, a)
    return {"advantages": _broadcast(columns, a)}


class _Grid:
    """The trainable tokens as [S, T]: place t is the t-th trainable token of its sequence, holes are skipped."""

    def __init__(self, columns: Columns) -> None:
        at = torch.nonzero(columns.mask)[:, 0]
        sequence = columns.sequence_of[at]
        order = torch.argsort(sequence, stable=True)
        self.at, self.sequence = at[order], sequence[order]
        self.counts = torch.bincount(sequence, minlength=columns.num_sequences)
        start = torch.cumsum(self.counts, 0) - self.counts
        self.place = torch.arange(len(at)) - start[self.sequence]
        self.width = int(self.counts.max()) if len(at) else 0

    def pad(self, x: Tensor) -> Tensor:
        """[L] -> [S, T] float64, 0 after the last trainable token."""
        padded = torch.zeros(len(self.counts), self.width, dtype=torch.float64)
        padded[self.sequence, self.place] = x[self.at].double()
        return padded

    def flat(self, padded: Tensor, n: int) -> Tensor:
        """[S, T] -> [L], 0 outside the mask."""
        out = torch.zeros(n, dtype=torch.float64)
        out[self.at] = padded[self.sequence, self.place]
        return out


def _discounted(padded: Tensor, factor: Tensor | float) -> Tensor:
    """[S, T] discounted sums from each place on; factor: a number or one per sequence [S]."""
    out = padded.T.clone(memory_format=torch.contiguous_format)  # one place of all sequences is one run of memory
    for t in range(len(out) - 2, -1, -1):
        out[t] += factor * out[t + 1]
    return out.T


def to_go(columns: Columns, gamma: float) -> Tensor:
    """[L] discounted sum of the rewards from each trainable token on; holes are skipped without a discount (1.6)."""
    grid = _Grid(columns)
    return grid.flat(_discounted(grid.pad(columns["rewards"]), gamma), len(columns.mask))


def gae(
    columns: Columns,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    lam_critic: float | None = None,
    length_adaptive_alpha: float | None = None,
    whitened: bool = True,
) -> Advantage:
    """Generalised advantages from `old_values` [L] (1.1; 1506.02438), decoupled and length-adaptive (1.2; 2504.05118).

    returns: advantages of `lam_critic` (None: `lam`) + values, before whitening. `length_adaptive_alpha`: the policy's
    lambda of a sequence of l tokens is max(0, 1 - 1 / (alpha l)). Holes are skipped; no bootstrap after the last token.
    """
    n, grid = len(columns.mask), _Grid(columns)
    values = grid.pad(columns["old_values"])
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    delta = grid.pad(columns["rewards"]) + gamma * following - values
    lam_policy: Tensor | float = lam
    if length_adaptive_alpha is not None:
        lam_policy = (1 - 1 / (length_adaptive_alpha * grid.counts.double().clamp(min=1))).clamp(min=0)
    critic = _discounted(delta, gamma * (lam if lam_critic is None else lam_critic))
    policy = _discounted(delta, gamma * lam_policy)
    usable = columns.mask & columns.sequence["valid"][columns.sequence_of]
    advantages = torch.where(usable, grid.flat(policy, n), 0.0)
    if whitened:
        advantages = whiten(advantages, usable)
    return {"advantages": advantages, "returns": grid.flat(critic + values, n)}


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


def remax(columns: Columns) -> Advantage:
    """Reward to go minus `baseline` [S], the score of the greedy answer to the same prompt (1.7; 2310.10505)."""
    returns = to_go(columns, 1.0)
    usable = columns.mask & columns.sequence["valid"][columns.sequence_of]
    baseline = columns.sequence["baseline"].double()[columns.sequence_of]
    return {"advantages": torch.where(usable, returns - baseline, 0.0), "returns": returns}


def opo(columns: Columns, *, singleton: str = "zero") -> Advantage:
    """s - the length-weighted mean of the group (1.8; 2505.23585). singleton: zero | raw (verl)."""
    s, group, usable, n = _scores(columns)
    size, _, spread = _group_stats(s, group, usable, n)
    length = torch.where(usable, columns.counts(), 0.0)
    mean = segment_sum(length * torch.where(usable, s, 0.0), group, n) / segment_sum(length, group, n).clamp(min=1)
    a = torch.where(usable & (size > 1) & (spread > 0), s - mean[group], torch.zeros_like(s))
    if singleton == "raw":
        a = torch.where(usable & (size == 1), s, a)
    return {"advantages": _broadcast(columns, a)}


def gpg(columns: Columns, *, f_norm: float = 1.0, alpha: str = "paper") -> Advantage:
    """alpha (s - mean_g) / f_norm (1.9; 2504.02546).

    alpha: paper B / (B - M), with M sequences in groups without variance · verl B / the number of scores that are not 0
    (quirk Q5).
    """
    s, group, usable, n = _scores(columns)
    size, mean, spread = _group_stats(s, group, usable, n)
    informative = usable & (size > 1) & (spread > 0)
    if alpha == "paper":
        factor = float(usable.sum()) / max(1.0, float(informative.sum()))
    else:
        assert alpha == "verl", f"alpha={alpha!r}: paper | verl"
        factor = columns.num_sequences / max(1.0, float((s != 0).sum()))
    a = torch.where(informative, factor * (s - mean) / f_norm, torch.zeros_like(s))
    return {"advantages": _broadcast(columns, a)}


def pass_at_k(columns: Columns, *, normalize_by_std: bool = True, eps: float = 1e-6) -> Advantage:
    """Only the best answer of a group learns: s_max - s_second, over std + eps if normalised (1.10; 2503.19595).

    A tie for the best, and a group of one: 0.
    """
    s, group, usable, n = _scores(columns)
    size, mean, spread = _group_stats(s, group, usable, n)
    index, values = group[usable], s[usable]
    lowest = torch.full((n,), -torch.inf, dtype=s.dtype)
    best = lowest.scatter_reduce(0, index, values, "amax")
    is_best = usable & (s == best[group])
    others = torch.where(is_best, torch.full_like(s, -torch.inf), s)
    second = lowest.scatter_reduce(0, index, others[usable], "amax")
    alone = segment_sum(is_best.double(), group, n)[group] == 1
    wins = is_best & alone & (size > 1) & (spread > 0)
    a = torch.where(wins, s - second[group], torch.zeros_like(s))
    if normalize_by_std:
        around = torch.where(usable, s - mean, torch.zeros_like(s))
        var = segment_sum(around**2, group, n)[group] / (size - 1).clamp(min=1)
        a = a / (var.sqrt() + eps)
    return {"advantages": _broadcast(columns, a)}


def gdpo(
    columns: Columns,
    *,
    weights: Sequence[float] | None = None,
    whiten_over: str = "sequence",
    normalize_by_std: bool = True,
    eps: float = 1e-6,
) -> Advantage:
    """Each reward component of `components` [S, K] normalised in its group, their weighted sum whitened (1.11; 2601.05242).

    whiten_over: sequence (NeMo-RL, TRL) | token (verl: long answers weigh more). A NaN component is in no statistic of
    that component and adds 0. Sequences without any signal get exactly 0 with `sequence`.
    """
    assert whiten_over in ("sequence", "token"), f"whiten_over={whiten_over!r}: sequence | token"
    components = columns.sequence["components"].double()
    group = columns.sequence["group"]
    usable = columns.sequence["valid"] & (columns.counts() > 0)
    n = int(group.max()) + 1 if len(group) else 0
    total = torch.zeros(columns.num_sequences, dtype=torch.float64)
    for k, weight in enumerate(weights or [1.0] * components.shape[1]):
        finite = usable & torch.isfinite(components[:, k])
        s = torch.where(finite, components[:, k], 0.0)
        scale = "group" if normalize_by_std else "none"
        total += weight * normalized_in_groups(s, group, finite, n, scale=scale, eps=eps)
    if whiten_over == "token":
        return {"advantages": whiten(_broadcast(columns, total), columns.mask & usable[columns.sequence_of])}
    return {"advantages": _broadcast(columns, torch.where(total == 0, total, whiten(total, usable)))}


def otb(columns: Columns, *, singleton: str = "zero", eps: float = 1e-8) -> Advantage:
    """Optimal token baseline: reward to go minus a per-place baseline of the group (1.12).

    w = 1 - 2 pi + sum_v pi_v^2 (the squared norm of the score; times `is_weights`^2 if present), W its running sum, and
    b_t = sum_j G_jt W_jt / sum_j W_jt over the members that reach place t. Places count trainable tokens, so that holes do
    not shift them (verl's TIR variant). Where one member alone is left, b = 0. Needs `sum_pi_squared` and `old_logprobs`
    (or `logprobs`). Groups without variance give exactly 0; singleton: zero | raw (b = 0).
    """
    grid, n = _Grid(columns), len(columns.mask)
    s, group, usable, num_groups = _scores(columns)
    size, _, spread = _group_stats(s, group, usable, num_groups)
    name = "old_logprobs" if "old_logprobs" in columns else "logprobs"
    returns = _discounted(grid.pad(columns["rewards"]), 1.0)
    cost = 1 - 2 * grid.pad(columns[name]).exp() + grid.pad(columns["sum_pi_squared"])
    if "is_weights" in columns:
        cost = cost * grid.pad(columns["is_weights"]) ** 2
    there = (torch.arange(grid.width) < grid.counts[:, None]) & usable[:, None]
    cumulative = torch.where(there, cost, 0.0).cumsum(1)
    w = torch.where(there, cumulative, 0.0)
    baseline = segment_sum(w * returns, group, num_groups) / (segment_sum(w, group, num_groups) + eps)
    several = segment_sum(there.double(), group, num_groups) > 1
    a = returns - torch.where(several, baseline, 0.0)[group]
    signal = usable & ((spread > 0) if singleton == "zero" else (spread > 0) | (size == 1))
    a = torch.where(signal[:, None], a, 0.0)
    return {"advantages": grid.flat(a, n), "returns": grid.flat(returns, n)}
