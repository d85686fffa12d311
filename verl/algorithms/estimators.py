"""Advantage estimators: pure functions on the trainable tokens of a whole step in float64. Each takes `Columns` with
the token column `rewards` [L] (see `token_rewards`), the sequence columns `group` [S] int64 and `valid` [S] bool
(False: no valid reward; in no statistic, advantage 0), and returns {"advantages": [L]}, some also "returns"."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.losses import token_groups
from verl.batch import Columns, segment_sum
from verl.errors import Refused
from verl.types import Metric

Advantage = dict[str, Tensor]
EPS = 1e-6  # beside a deviation that divides
FLAT = 1e-6  # a spread within this share of the largest value (or of 1) is rounding


def token_rewards(columns: Columns, penalty: Tensor | None = None) -> Tensor:
    """[L] float64 rewards: each sequence's `score` at its last trainable token, minus the per-token `penalty` [L].
    Built on the mask before rejection, so that a rejected last token cannot swallow the score."""
    n = len(columns.sequence_of)
    rewards = torch.zeros(n, dtype=torch.float64)
    last = torch.full((columns.num_sequences,), -1, dtype=torch.int64)
    at = torch.arange(n)[columns.mask]
    last.scatter_reduce_(0, columns.sequence_of[columns.mask], at, "amax")
    has = (last >= 0) & columns.sequence["valid"]
    rewards[last[has]] = columns.sequence["score"].double()[has]
    if penalty is not None:
        rewards = rewards - torch.where(columns.mask, penalty.double(), 0.0)
    return rewards


def whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True, epsilon: float | None = None) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the mask, Bessel variance; 0 outside. Values that are equal within rounding
    give exactly 0: their differences are noise, which 1 / 1e-4 would raise. shift_mean false: the mean is added to the
    result · epsilon: the divisor is the deviation plus this."""
    inside, out = x[mask], torch.zeros_like(x)
    if not len(inside):
        return out
    mean = inside.mean()
    if not _flat(inside.max(), inside.min()):
        var = inside.var(correction=1)
        out[mask] = (inside - mean) * (torch.rsqrt(var + 1e-8) if epsilon is None else 1 / (var.sqrt() + epsilon))
    return out if shift_mean else torch.where(mask, out + mean, 0.0)


def _flat(high: Tensor, low: Tensor) -> Tensor:
    return high - low <= FLAT * torch.maximum(high.abs(), low.abs()).clamp(min=1)


class _Groups:
    """Scores of a step, and of each sequence its group's size, mean, highest score and spread (max - min) over usable
    members: those with a valid score and some trainable token. A spread within rounding is exactly 0: scores like 0.1
    have a non-zero standard deviation. `varied` [S]: usable, in a group with a spread; `centred`: s - mean there."""

    def __init__(self, columns: Columns, scores: Tensor | None = None) -> None:
        self.index = columns.sequence["group"]
        self.num = n = int(self.index.max()) + 1 if len(self.index) else 0
        self.usable = columns.sequence["valid"] & (columns.counts() > 0)
        self.s = columns.sum(columns["rewards"].double()) if scores is None else scores
        if scores is not None:
            self.usable = self.usable & torch.isfinite(scores)
            self.s = torch.where(self.usable, scores, 0.0)
        index, values = self.index[self.usable], self.s[self.usable]
        size = segment_sum(torch.ones_like(values), index, n)
        mean = segment_sum(values, index, n) / size.clamp(min=1)
        high, low = self.highest(self.s), -self.highest(-self.s)
        spread = torch.where(_flat(high, low) | (size < 1), 0.0, high - low)
        self.size, self.mean, self.high, self.spread = (x[self.index] for x in (size, mean, high, spread))
        self.varied = self.usable & (self.size > 1) & (self.spread > 0)
        self.centred = torch.where(self.varied, self.s - self.mean, 0.0)

    def highest(self, x: Tensor) -> Tensor:
        """[groups] of x [S]; -inf in a group without a usable member."""
        lowest = torch.full((self.num,), -torch.inf, dtype=x.dtype)
        return lowest.scatter_reduce(0, self.index[self.usable], x[self.usable], "amax")

    def with_singletons(self, a: Tensor, singleton: str, divided_by: float = 1.0) -> Tensor:
        """[S] advantages `a`; with singleton=raw those of usable answers that are alone are their scores, divided."""
        return torch.where(self.usable & (self.size == 1) & (singleton == "raw"), self.s / divided_by, a)

    def total(self, x: Tensor) -> Tensor:
        """[S] the sum of x [S] over each sequence's group; x is 0 for the unusable."""
        return segment_sum(x, self.index, self.num)[self.index]


def _broadcast(columns: Columns, a: Tensor) -> Tensor:
    """[S] -> [L], exactly 0 outside the mask."""
    return torch.where(columns.mask, a[columns.sequence_of], 0.0)


def grpo(
    columns: Columns,
    *,
    normalize_by_std: bool = True,
    epsilon: float = EPS,
    leave_one_out: bool = False,
    scale_rewards: str = "group",
    singleton: str = "zero",
) -> Advantage:
    """(s - mean_g) / (std_g + epsilon), Bessel (GRPO, 2402.03300). Without the division: Dr.GRPO (2503.20783).
    leave_one_out: mean and deviation of the other members, undivided where that is 0 (NeMo-RL) · scale_rewards: group |
    batch (the deviation of all scores, TRL) | none. A group without variance gives exactly 0, and so does one of a
    single answer; singleton=raw: its score, divided by 1 + epsilon where deviations of groups divide (verl)."""
    g, scale = _Groups(columns), scale_rewards if normalize_by_std else "none"
    by_group = scale == "group" and not leave_one_out
    a = _normalized(g, scale, leave_one_out, epsilon)
    return {"advantages": _broadcast(columns, g.with_singletons(a, singleton, 1 + epsilon if by_group else 1.0))}


def _normalized(g: _Groups, scale: str = "group", leave_one_out: bool = False, eps: float = EPS) -> Tensor:
    """[S] GRPO's centred and scaled scores; 0 for the unusable, for groups of one and for groups without variance."""
    others = (g.size - 1).clamp(min=1)
    centred = g.centred * g.size / others if leave_one_out else g.centred
    if scale == "none":
        return centred
    if scale == "batch":
        inside = g.s[g.usable]
        if len(inside) < 2 or _flat(inside.max(), inside.min()):
            return torch.zeros_like(g.s)
        return centred / (inside.std(correction=1) + eps)
    around = torch.where(g.usable, g.s - g.mean, 0.0) if leave_one_out else centred
    square = g.total(around**2)
    if not leave_one_out:
        return centred / ((square / others).sqrt() + eps)
    rest = square - around**2 * (g.size / others)
    std = (rest.clamp(min=0) / (g.size - 2).clamp(min=1)).sqrt()
    varied = (g.size > 2) & (std > FLAT * torch.maximum(g.mean.abs(), g.spread).clamp(min=1))
    return torch.where(varied, centred / (std + eps), centred)


def rloo(
    columns: Columns,
    *,
    reward_clip: Sequence[float] = (),
    normalize_advantages: bool = False,
    singleton: str = "zero",
    whiten_epsilon: float | None = None,
) -> Advantage:
    """s - mean of the other members of the group (2402.14740). reward_clip: (low, high) of the score, before any KL in
    the reward · normalize_advantages: whitened over sequences (both as in TRL) · singleton=raw: an answer that is alone
    has its score (verl)."""
    s = columns.sum(columns["rewards"].double())
    if reward_clip:
        score = columns.sequence["score"].double()
        s = s + score.clamp(reward_clip[0], reward_clip[1]) - score
    g = _Groups(columns, s)
    a = g.with_singletons(g.size / (g.size - 1).clamp(min=1) * g.centred, singleton)
    if normalize_advantages:
        a = whiten(a, g.usable, epsilon=whiten_epsilon)
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
    """[L] discounted sum of the rewards from each trainable token on; holes are skipped without a discount."""
    grid = _Grid(columns)
    return grid.flat(_discounted(grid.pad(columns["rewards"]), gamma), len(columns.mask))


def gae(
    columns: Columns,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    lam_critic: float | None = None,
    length_adaptive_alpha: float | None = None,
    shift_mean: bool = True,
    whiten_epsilon: float | None = None,
) -> Advantage:
    """Generalised advantages from `old_values` [L] (1506.02438), whitened; decoupled and length-adaptive (2504.05118).
    returns: advantages of `lam_critic` (None: `lam`) + values, before whitening. `length_adaptive_alpha`: the policy's
    lambda of a sequence of l tokens is max(0, 1 - 1 / (alpha l)). Holes are skipped; no bootstrap after the last
    token."""
    found = raw_gae(columns, gamma, lam, lam_critic, length_adaptive_alpha)
    usable = _usable_tokens(columns)
    return {**found, "advantages": whiten(found["advantages"], usable, shift_mean=shift_mean, epsilon=whiten_epsilon)}


def raw_gae(
    columns: Columns, gamma: float, lam: float, lam_critic: float | None, length_adaptive_alpha: float | None
) -> Advantage:
    """`gae` before whitening."""
    n, grid = len(columns.mask), _Grid(columns)
    values = grid.pad(columns["old_values"])
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    delta = grid.pad(columns["rewards"]) + gamma * following - values
    lam_policy: Tensor | float = lam
    if length_adaptive_alpha is not None:
        lam_policy = (1 - 1 / (length_adaptive_alpha * grid.counts.double().clamp(min=1))).clamp(min=0)
    critic = _discounted(delta, gamma * (lam if lam_critic is None else lam_critic))
    advantages = grid.flat(_discounted(delta, gamma * lam_policy), n)
    advantages = torch.where(_usable_tokens(columns), advantages, 0.0)
    return {"advantages": advantages, "returns": grid.flat(critic + values, n)}


def _usable_tokens(columns: Columns) -> Tensor:
    """[L] trainable tokens of sequences with a valid reward."""
    return columns.mask & columns.sequence["valid"][columns.sequence_of]


def reinforce_plus_plus(
    columns: Columns, *, gamma: float = 1.0, shift_mean: bool = True, whiten_epsilon: float | None = None
) -> Advantage:
    """Reward to go, whitened over all trainable tokens; returns are unwhitened (2501.03262)."""
    returns = to_go(columns, gamma)
    advantages = whiten(returns, _usable_tokens(columns), shift_mean=shift_mean, epsilon=whiten_epsilon)
    return {"advantages": advantages, "returns": returns}


def reinforce_plus_plus_baseline(
    columns: Columns, *, singleton: str = "zero", shift_mean: bool = True, whiten_epsilon: float | None = None
) -> Advantage:
    """s - mean_g (singleton=raw: s of an answer that is alone), broadcast, whitened over tokens (2501.03262)."""
    g = _Groups(columns)
    a = _broadcast(columns, g.with_singletons(g.centred, singleton))
    usable = columns.mask & g.usable[columns.sequence_of]
    return {"advantages": whiten(a, usable, shift_mean=shift_mean, epsilon=whiten_epsilon)}


def reward_to_go(columns: Columns, *, gamma: float = 1.0) -> Advantage:
    """Plain reward to go, no baseline. A sequence without a valid reward has none, whatever its KL penalty."""
    returns = to_go(columns, gamma)
    return {"advantages": torch.where(_usable_tokens(columns), returns, 0.0), "returns": returns}


def opd(
    columns: Columns,
    *,
    gamma: float = 0.0,
    teacher_coef: float = 1.0,
    reward_coef: float = 0.0,
    agree_only: bool = False,
    prefix_gain: float = 0.0,
    teacher_clamp: float | None = None,
    teacher_floor: float | None = None,
) -> dict[str, Tensor | Metric]:
    """teacher_coef x the discounted sum of log(teacher / student) over this token and those after it, which the student
    sampled: at gamma 0 the policy gradient of the reverse KL token by token, at 1 that of whole answers (2306.08543).
    Plus reward_coef x GRPO's advantage; agree_only: only of tokens that the teacher moves in the same direction.
    prefix_gain: the signal of a token is multiplied by 1 + prefix_gain x (1 - the share of the answer's sum of
    |log(teacher / student)| that is before it), so that tokens after a drift count less (IW-OPD, 2606.22600).
    teacher_floor: both log-probs are raised to at least this, teacher_clamp: then |log(teacher / student)| is at most
    this, as verl clamps its k1 loss."""
    (likes, taught), usable = _likes(columns, "teacher_logprobs", teacher_floor), _usable_tokens(columns)
    if teacher_clamp is not None:
        likes = likes.clamp(-teacher_clamp, teacher_clamp)
    signal = likes * (1 + prefix_gain * (1 - _drift(columns, likes))) if prefix_gain else likes
    total = teacher_coef * to_go(columns.with_token({"rewards": signal}), gamma)
    made: dict[str, Tensor | Metric] = {}
    if reward_coef:
        rewarded = grpo(columns)["advantages"]
        agree, judged = rewarded * likes > 0, usable & taught & (rewarded != 0)
        total = total + reward_coef * (torch.where(agree | ~taught, rewarded, 0.0) if agree_only else rewarded)
        made["teacher/agrees"] = Metric(float((agree & judged).sum()), float(judged.sum()), "token")
    return {"advantages": torch.where(usable, total, 0.0), **of_teacher(columns), **made}


def _drift(columns: Columns, likes: Tensor) -> Tensor:
    """[L] the sum of |likes| over the tokens of the answer before this one, as a share of what it is at the last."""
    grid = _Grid(columns)
    gaps = grid.pad(likes).abs()
    before = gaps.cumsum(1) - gaps
    last = before.gather(1, (grid.counts - 1).clamp(min=0)[:, None]) if grid.width else before
    return grid.flat(before / last.clamp(min=1e-8), len(likes))


def with_teacher(columns: Columns, *, inner: Callable[[Columns], Any]) -> Any:
    """Return the advantages of another estimator, with the teacher's metrics."""
    found = inner(columns)
    return {**found, **of_teacher(columns)} if isinstance(found, Mapping) else found


def _likes(columns: Columns, name: str, floor: float | None = None) -> tuple[Tensor, Tensor]:
    """Return [L] log(teacher / sampler) of the sampled tokens, the teacher's in the column `name`, both at least
    `floor`; and [L] bool, whether the teacher has a log-prob there: elsewhere the ratio is 0."""
    clean = columns.cleaned()
    taught = columns.sequence.get("taught", columns.sequence["valid"])[columns.sequence_of]
    theirs, ours = (clean[key].double() for key in (name, "rollout_logprobs"))
    if floor is not None:
        theirs, ours = theirs.clamp(min=floor), ours.clamp(min=floor)
    return taught * (theirs - ours), taught


def of_teacher(columns: Columns, *, name: str = "teacher_logprobs") -> dict[str, Metric]:
    """Return metrics of the teacher's log-probs of the sampled tokens: the reverse KL per token, by quarter of the
    answer and by teacher. `teacher/overlap`: the mean of min(1, teacher / sampler), which is the probability that both
    have in common. `teacher/likes_right`: by how much answers above the mean score are liked more, per token, than the
    others."""
    likes, taught = _likes(columns, name)
    usable, columns = _usable_tokens(columns) & taught, replace(columns, mask=columns.mask & taught)
    parts = {"": usable, **{part: usable & at for part, at in token_groups(columns).items()}}
    out = {f"teacher/kl{part}": Metric(-float(likes[at].sum()), float(at.sum()), "token") for part, at in parts.items()}
    out["teacher/overlap"] = Metric(float(likes[usable].clamp(max=0).exp().sum()), float(usable.sum()), "token")
    score, there = columns.sequence["score"].double(), columns.sequence["valid"] & (columns.counts() > 0)
    right = there & (score > score[there].mean()) if there.any() else there
    if right.any() and (there & ~right).any():
        liked = columns.mean(likes)
        out["teacher/likes_right"] = Metric(float(liked[right].mean() - liked[there & ~right].mean()), 1, "step")
    return out


def remax(columns: Columns) -> Advantage:
    """Reward to go minus `baseline` [S], the score of the greedy answer to the same prompt (2310.10505)."""
    returns = to_go(columns, 1.0)
    baseline = columns.sequence["baseline"].double()[columns.sequence_of]
    return {"advantages": torch.where(_usable_tokens(columns), returns - baseline, 0.0), "returns": returns}


def opo(columns: Columns, *, singleton: str = "zero") -> Advantage:
    """s - the length-weighted mean of the group (2505.23585); singleton=raw: s of an answer that is alone."""
    g = _Groups(columns)
    length = torch.where(g.usable, columns.counts(), 0.0)
    mean = g.total(length * torch.where(g.usable, g.s, 0.0)) / g.total(length).clamp(min=1)
    return {"advantages": _broadcast(columns, g.with_singletons(torch.where(g.varied, g.s - mean, 0.0), singleton))}


def max_rl(columns: Columns) -> Advantage:
    """(s - mean_g) / mean_g, for scores of at least 0: the gradient of the maximum likelihood of a right answer, to the
    order of the group's size (MaxRL, 2602.02710). 0 in a group if its mean is not above 0."""
    g = _Groups(columns)
    return {"advantages": _broadcast(columns, torch.where(g.mean > 0, g.centred / g.mean.clamp(min=EPS), 0.0))}


def gpg(columns: Columns, *, alpha_counts: str = "varied", f_norm: float = 1.0, singleton: str = "zero") -> Advantage:
    """B / (B - M) (s - mean_g) / f_norm, with M of the B sequences in groups without variance (2504.02546).
    alpha_counts=nonzero: B - M counts the scores that are not 0 (verl) · singleton=raw: an answer that is alone has its
    score in place of the difference."""
    g = _Groups(columns)
    counted = g.varied if alpha_counts == "varied" else g.usable & (g.s != 0)
    factor = float(g.usable.sum()) / max(1.0, float(counted.sum()))
    return {"advantages": _broadcast(columns, factor * g.with_singletons(g.centred, singleton) / f_norm)}


def pass_at_k(columns: Columns, *, normalize_by_std: bool = True, epsilon: float = EPS) -> Advantage:
    """Only the best answer of a group learns: s_max - s_second, over std + epsilon if normalised (2503.19595). A tie
    for the best, and a group of one: 0."""
    g = _Groups(columns)
    is_best = g.usable & (g.s == g.high)
    second = g.highest(torch.where(is_best, -torch.inf, g.s))[g.index]
    a = torch.where(is_best & g.varied & (g.total(is_best.double()) == 1), g.s - second, 0.0)
    if normalize_by_std:
        around = torch.where(g.usable, g.s - g.mean, 0.0)
        a = a / ((g.total(around**2) / (g.size - 1).clamp(min=1)).sqrt() + epsilon)
    return {"advantages": _broadcast(columns, a)}


def gdpo(
    columns: Columns,
    *,
    reward_components: Sequence[str],
    reward_weights: Sequence[float] | None = None,
    epsilon: float = EPS,
    whiten_epsilon: float | None = None,
) -> Advantage:
    """Each named reward component normalised in its group (`epsilon` beside its deviation), their weighted sum whitened
    over sequences (2601.05242). A NaN component is in no statistic of that component and adds 0. Sequences without any
    signal get exactly 0."""
    total, usable = summed_components(columns, reward_components, reward_weights, epsilon)
    white = whiten(total, usable, epsilon=whiten_epsilon)
    return {"advantages": _broadcast(columns, torch.where(total == 0, total, white))}


def summed_components(
    columns: Columns, names: Sequence[str], weights: Sequence[float] | None, epsilon: float = EPS
) -> tuple[Tensor, Tensor]:
    """([S] weighted sum of the normalised components, [S] which sequences are usable)."""
    have = sorted(n.removeprefix("component/") for n in columns.sequence if n.startswith("component/"))
    if missing := [n for n in names if n not in have]:
        prefix = f"the reward gave no {missing}; its components: {', '.join(have) or 'none'}"
        raise Refused(f"algorithm.options.reward_components: {prefix}")
    total = torch.zeros(columns.num_sequences, dtype=torch.float64)
    for name, weight in zip(names, weights or [1.0] * len(names), strict=True):
        one = _Groups(columns, columns.sequence[f"component/{name}"].double())
        total += weight * _normalized(one, eps=epsilon)
    return total, columns.sequence["valid"] & (columns.counts() > 0)


def otb(columns: Columns) -> Advantage:
    """Optimal token baseline: reward to go minus a per-place baseline of the group. w = 1 - 2 pi + sum_v pi_v^2 (the
    squared norm of the score; times `is_weights`^2 if present), W its running sum, and b_t = sum_j G_jt W_jt / sum_j
    W_jt over the members that reach place t. Places count trainable tokens, so that holes do not shift them. Where one
    member alone is left, b = 0. Groups of one or without variance give exactly 0."""
    grid, n, g = _Grid(columns), len(columns.mask), _Groups(columns)
    returns = _discounted(grid.pad(columns["rewards"]), 1.0)
    cost = 1 - 2 * grid.pad(columns["old_logprobs"]).exp() + grid.pad(columns["sum_pi_squared"])
    if "is_weights" in columns:
        cost = cost * grid.pad(columns["is_weights"]) ** 2
    there = (torch.arange(grid.width) < grid.counts[:, None]) & g.usable[:, None]
    w = torch.where(there, torch.where(there, cost, 0.0).cumsum(1), 0.0)
    baseline = g.total(w * returns) / (g.total(w) + 1e-8)
    a = returns - torch.where(g.total(there.double()) > 1, baseline, 0.0)
    a = torch.where((g.usable & (g.spread > 0))[:, None], a, 0.0)
    return {"advantages": grid.flat(a, n), "returns": grid.flat(returns, n)}
