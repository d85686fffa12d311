"""Losses: pure functions of columns that give one value per token (or sequence), and never sum or divide: the columns
of weights.py do, so that no loss sees how a batch was split. Inputs outside the mask are 0 when it is called."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from verl.algorithms.corrections import LOG_RATIO_BOUND, bounded, importance_ratio
from verl.algorithms.filters import Correction
from verl.batch import Columns
from verl.objective import TermValue
from verl.types import Kind

Metrics = dict[str, tuple[Tensor, Kind]]
SCALED_BY_ADVANTAGE = frozenset(
    ("ppo_clip", "gspo", "gspo_token", "gmpo", "cispo", "sapo", "dppo_tv", "dppo_kl", "vespo", "reinforce")
)
"""Losses that have no gradient at the tokens of a sequence in which all advantages are 0."""
LEAST_LOG_WEIGHT = math.log(1e-8)
"""The least logarithm of a sequence's weight in VESPO."""


SAME = 1e-5
"""Log-probs that differ by less are the same number with other rounding: of another packing, rank or pass."""


def log_ratio(new: Tensor, old: Tensor) -> Tensor:
    """new - old in at least float32, clamped to +-20."""
    return (new - old.to(new.dtype)).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def old_logprobs(columns: Columns) -> Tensor:
    """The proximal policy; without the column the policy has not moved in this step: the current one, detached."""
    return columns["old_logprobs"] if "old_logprobs" in columns else columns["logprobs"].detach()


def distance(d: Tensor) -> Tensor:
    """|d|, without a gradient where |d| <= `SAME`: the sign of rounding must not choose a direction."""
    return torch.where(d.abs() <= SAME, d.detach(), d).abs()


def _ratio(columns: Columns) -> tuple[Tensor, Tensor, Tensor]:
    """(advantages, log-ratio d, ratio r), all [L] in the precision of the log-probs."""
    d = log_ratio(columns["logprobs"], old_logprobs(columns))
    return columns["advantages"].to(d.dtype), d, d.exp()


def _clipped(a: Tensor, r: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """(max(-A r, -A clip(r)), where the clip took effect)."""
    plain, clipped = -a * r, -a * r.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(plain, clipped), clipped > plain


def _clip_metrics(d: Tensor, where: Tensor) -> Metrics:
    return {"pg_clipfrac": (where.to(d.dtype), "mean"), "ppo_kl": (-d.detach(), "mean")}


def _clipped_value(a: Tensor, d: Tensor, r: Tensor, clip_low: float, clip_high: float) -> TermValue:
    loss, where = _clipped(a, r, clip_low, clip_high)
    return TermValue(loss, _clip_metrics(d, where))


def ppo_clip(
    columns: Columns,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float | None = None,
    ratio_max: float | None = None,
) -> TermValue:
    """PPO clip, clip-higher and dual clip (1707.06347, 2503.14476, 1912.09729). max(-A r, -A clip(r, 1-low, 1+high));
    with dual clip c > 1 and A < 0 at most -c A; `ratio_max` caps r itself for both signs of A (INTELLECT-2; TRL's
    delta). The metric of clipping is before the dual clip."""
    a, d, r = _ratio(columns)
    if ratio_max is not None:
        r = r.clamp(max=ratio_max)
    loss, where = _clipped(a, r, clip_low, clip_high)
    metrics = _clip_metrics(d, where)
    if clip_dual is not None:
        bound = -clip_dual * a
        metrics["pg_clipfrac_lower"] = (((loss > bound) & (a < 0)).to(a.dtype), "mean")
        loss = torch.where(a < 0, torch.minimum(loss, bound), loss)
    return TermValue(loss, metrics)


def gspo(columns: Columns, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> TermValue:
    """PPO clip with one ratio per sequence, the geometric mean of its tokens' ratios (GSPO, 2507.18071). Values are per
    token, so seq-mean-token-mean weights give the paper's mean over sequences. A sequence must be whole in its
    micro-batch (make_microbatches keeps it so)."""
    a, d, _ = _ratio(columns)
    return _clipped_value(a, d, columns.mean(d).exp()[columns.sequence_of], clip_low, clip_high)


def gspo_token(columns: Columns, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> TermValue:
    """GSPO-token: the sequence's ratio as the value, each token's own log-prob as the gradient. The same gradient as
    `gspo` where the advantage is one per sequence. A sequence must be whole in its micro-batch."""
    a, d, _ = _ratio(columns)
    lp = columns["logprobs"]
    r = columns.mean(d.detach()).exp()[columns.sequence_of] * (lp - lp.detach()).exp()
    return _clipped_value(a, d, r, clip_low, clip_high)


def cispo(columns: Columns, *, ratio_max: float = 5.0, ratio_min: float | None = None) -> TermValue:
    """-sg(clip(r, ratio_min, ratio_max)) A log pi (CISPO, 2506.13585): a clipped token keeps its gradient. The bounds
    are on r itself (TRL, ScaleRL); verl's and NeMo-RL's are 1 - low and 1 + high."""
    a, d, r = _ratio(columns)
    capped = r.detach().clamp(ratio_min, ratio_max)
    return TermValue(-capped * a * columns["logprobs"], _clip_metrics(d, capped != r))


def sapo(columns: Columns, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> TermValue:
    """-A (4 / tau) sigmoid(tau (r - 1)): a soft gate instead of a clip, slope 1 at r = 1 (SAPO, 2511.20347)."""
    a, d, r = _ratio(columns)
    tau = torch.where(a > 0, tau_positive, tau_negative).to(a.dtype)
    return TermValue(-a * (4 / tau) * torch.sigmoid(tau * (r - 1)), {"ppo_kl": (-d.detach(), "mean")})


def gmpo(columns: Columns, *, clip_low: float = 0.4, clip_high: float = 0.4) -> TermValue:
    """-mean(A) times the geometric mean of ratios, clipped per token in log space (GMPO, 2507.20673). Constant over a
    sequence's tokens, so seq-mean-token-mean weights give the mean over sequences. A sequence must be whole in its
    micro-batch."""
    a, d, _ = _ratio(columns)
    sign = torch.sign(a)
    bounded = sign * torch.minimum(sign * d, sign * d.clamp(-clip_low, clip_high))
    loss = (-columns.mean(a) * columns.mean(bounded).exp())[columns.sequence_of]
    where = bounded != d
    metrics = _clip_metrics(d, where & (a > 0))
    metrics["pg_clipfrac_lower"] = ((where & (a < 0)).to(a.dtype), "mean")
    return TermValue(loss, metrics)


def _covariance(columns: Columns) -> Tensor:
    """[L] (A - mean A)(log pi - mean log pi) over the mask, detached, in multiples of `SAME`: what differs by rounding
    is equal."""
    lp = columns["logprobs"].detach()
    a = columns["advantages"].to(lp.dtype)
    n = columns.mask.sum().clamp(min=1)
    centred = [torch.where(columns.mask, x - torch.where(columns.mask, x, 0.0).sum() / n, 0.0) for x in (a, lp)]
    return (centred[0] * centred[1] / SAME).round() * SAME


def _lottery(columns: Columns) -> Tensor:
    """[L] int64 pseudo-random numbers from stored data: independent of order and split. Hashed are the log-probs that
    the sampler (else the proximal policy) gave to the token and to its whole sequence, and the token's place in it:
    neither repacking nor the rounding of another pass changes them. Without a sampler's log-probs nothing is stored."""
    name = "rollout_logprobs" if "rollout_logprobs" in columns else "old_logprobs"
    lp = columns[name] if name in columns else columns["logprobs"].detach()
    own = _hashed(torch.zeros_like(columns.sequence_of), lp.double().contiguous().view(torch.int64))
    own = _hashed(own, _places(columns)[1])
    whole = torch.zeros(columns.num_sequences, dtype=torch.int64, device=own.device)
    whole = whole.index_add(0, columns.sequence_of, torch.where(columns.mask, own, 0))
    return _hashed(own, whole[columns.sequence_of])


def _hashed(h: Tensor, x: Tensor) -> Tensor:
    """[L] int64: the hashes `h` with the integers `x` mixed in."""
    for multiplier in (-0x61C8864680B583EB, -0x40A7B892E31B1A47):
        h = (h ^ x) * multiplier
        h = h ^ ((h >> 29) & 0x7FFFFFFFF)
    return h


def _places(columns: Columns) -> tuple[Tensor, Tensor]:
    """Two [L] int64: the number of masked-in tokens of each token's sequence, and which of them the token is."""
    order = torch.argsort(columns.sequence_of, stable=True)
    counts, before = columns.counts().long(), columns.mask[order].long().cumsum(0) - 1
    first = (counts.cumsum(0) - counts)[columns.sequence_of[order]]
    places = torch.empty_like(order).index_copy_(0, order, before - first)
    return counts[columns.sequence_of], torch.where(columns.mask, places, 0)


def _highest_share(columns: Columns, among: Tensor, share: float, first: Tensor | None = None) -> Tensor:
    """[L] bool: that share of all tokens (at least one), of those `among`, the highest `first` before the lottery's."""
    at = torch.nonzero(among)[:, 0]
    at = at[torch.argsort(_lottery(columns)[at], stable=True)]
    if first is not None:
        at = at[torch.argsort(first[at], descending=True, stable=True)]
    chosen = torch.zeros_like(among)
    chosen[at[: max(1, int(share * int(columns.mask.sum())))]] = True
    return chosen


def kl_cov(columns: Columns, *, cov_ratio: float = 2e-4, cov_coef: float = 1.0) -> TermValue:
    """-A r, plus cov_coef |d| on the share `cov_ratio` of tokens with the highest covariance (KL-Cov, 2505.22617).
    Statistics are over all tokens given: a two-pass term, which sees the whole optimizer step. At least one token.
    Of equal covariances `_lottery` chooses."""
    a, d, r = _ratio(columns)
    chosen = _highest_share(columns, columns.mask, cov_ratio, first=_covariance(columns))
    loss = torch.where(chosen, -a * r + cov_coef * distance(d), -a * r)
    return TermValue(loss, {"ppo_kl": (-d.detach(), "mean"), "kl_cov_fraction": (chosen.to(d.dtype), "mean")})


def clip_cov(
    columns: Columns,
    *,
    cov_ratio: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> TermValue:
    """PPO clip, without the loss of some tokens of high covariance (Clip-Cov, 2505.22617). A share `cov_ratio` of all
    tokens (at least one) is drawn among those with cov_low < cov < cov_high that the clip left alone; the draw is
    `_lottery`'s. A two-pass term, as `kl_cov`."""
    a, d, r = _ratio(columns)
    loss, where = _clipped(a, r, clip_low, clip_high)
    cov = _covariance(columns)
    chosen = _highest_share(columns, columns.mask & ~where & (cov > cov_low) & (cov < cov_high), cov_ratio)
    return TermValue(torch.where(chosen, 0.0, loss), _clip_metrics(d, chosen))


def dppo_tv(
    columns: Columns, *, clip_low: float = 0.15, clip_high: float = 0.15, ratio_max: float | None = 20.0
) -> TermValue:
    """-A sg(min(r, cap)) log pi where |pi - pi_old| is within bounds, on the side that moves away (2602.04879)."""
    a, d, _ = _ratio(columns)
    p, old = _probabilities(columns)
    return _gated(columns, a, d, torch.where(a > 0, p - old <= clip_high, p - old >= -clip_low), ratio_max)


def dppo_kl(
    columns: Columns, *, clip_low: float = 0.05, clip_high: float = 0.05, ratio_max: float | None = 20.0
) -> TermValue:
    """As `dppo_tv`, by the binary KL of pi_old to pi (token against the rest)."""
    a, d, _ = _ratio(columns)
    p, old = _probabilities(columns)
    rest, old_rest = (1 - p).clamp(min=1e-8), (1 - old).clamp(min=1e-8)
    kl = -old * d.detach() + old_rest * (old_rest / rest).log()
    valid = torch.where(a > 0, (kl <= clip_high) | (p <= old), (kl <= clip_low) | (p >= old))
    return _gated(columns, a, d, valid, ratio_max)


def _probabilities(columns: Columns) -> tuple[Tensor, Tensor]:
    lp = columns["logprobs"].detach()
    return lp.exp(), old_logprobs(columns).to(lp.dtype).exp()


def _gated(columns: Columns, a: Tensor, d: Tensor, valid: Tensor, ratio_max: float | None) -> TermValue:
    ratio = d.detach().exp()
    capped = ratio if ratio_max is None else ratio.clamp(max=ratio_max)
    loss = torch.where(valid, -a * capped * columns["logprobs"], 0.0)
    return TermValue(loss, _clip_metrics(d, ~valid))


def intellect_ipo(
    columns: Columns, *, clip_low: float = 0.2, clip_high: float = 0.2, drift_coef: float = 1e-3
) -> TermValue:
    """-A r where -clip_low <= pi - pi_old <= clip_high, whatever the sign of A, plus drift_coef d^2 everywhere
    (INTELLECT policy optimisation of prime-rl)."""
    a, d, r = _ratio(columns)
    p, old = _probabilities(columns)
    valid = (p - old <= clip_high) & (p - old >= -clip_low)
    return TermValue(torch.where(valid, -a * r, 0.0) + drift_coef * d * d, _clip_metrics(d, ~valid))


def vespo(
    columns: Columns,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
    weighed: str | None = None,
) -> TermValue:
    """-sg(phi(w)) A log pi with phi(w) = w^k exp(lambda (1 - w)), of the product w of the sequence's ratios, and other
    k and lambda where A < 0 (VESPO, 2602.10693). weighed: the level of the importance weights `is_weights` that w holds
    too, token or another, of a whole sequence. A sequence must be whole in its micro-batch."""
    a, d, _ = _ratio(columns)
    logs = columns.sum(d.detach())
    if weighed is not None:
        given = columns["is_weights"].to(d.dtype).log().clamp(min=LEAST_LOG_WEIGHT)
        logs = logs + (columns.sum(given) if weighed == "token" else columns.mean(given))
    logs = logs.clamp(LEAST_LOG_WEIGHT, LOG_RATIO_BOUND)[columns.sequence_of]
    k = torch.where(a < 0, k_negative, k_positive).to(d.dtype)
    rate = torch.where(a < 0, lambda_negative, lambda_positive).to(d.dtype)
    phi = (k * logs + rate * (1 - logs.exp())).exp()
    return TermValue(-phi * a * columns["logprobs"], {"ppo_kl": (-d.detach(), "mean"), "vespo_weight": (phi, "mean")})


def dro(columns: Columns, *, dro_beta: float = 0.1) -> TermValue:
    """-(A log pi - dro_beta / 2 d^2) (DRO, 2405.19107)."""
    a, d, _ = _ratio(columns)
    return TermValue(-(a * columns["logprobs"] - 0.5 * dro_beta * d * d), {"ppo_kl": (-d.detach(), "mean")})


def _quarters(columns: Columns) -> Tensor:
    """[L] int64, 0 to 3: the quarter of its sequence that a masked-in token is in."""
    counts, place = _places(columns)
    return 4 * place // counts.clamp(min=1)


def token_groups(columns: Columns) -> dict[str, Tensor]:
    """Suffix of a figure -> [L] bool, the tokens that it is of: by quarter of the answer, by teacher where there are
    several."""
    quarter = _quarters(columns)
    own = {n.removeprefix("teacher"): of for n, of in columns.sequence.items() if n.startswith("teacher/")}
    by_teacher = {name: of[columns.sequence_of] for name, of in own.items()}
    return {**{f"/quarter_{q + 1}": quarter == q for q in range(4)}, **by_teacher}


def _with_metrics(columns: Columns, value: Tensor, more: Metrics, mixed: bool) -> TermValue:
    """Return a divergence [L] with its metrics: over all tokens, by `token_groups`, and of stored answers, which no
    weights sampled, apart from the policy's."""
    name, parts = "teacher_divergence", token_groups(columns)
    if mixed:
        drawn = columns["versions"] >= 0
        parts |= {"/drawn": drawn, "/stored": ~drawn}
    metrics: Metrics = {name + part: (value.detach(), "mean") for part in ("", *parts)}
    return TermValue(value, {**metrics, **more}, {name + part: at for part, at in parts.items()})


def token_divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """[..., m] log-probs of the same m outcomes -> [...]: beta KL(T || M) + (1 - beta) KL(S || M) with the mixture
    M = beta T + (1 - beta) S; KL(T || S) at beta 0, KL(S || T) at 1 (2306.13649)."""
    if beta == 0:
        return (teacher.exp() * (teacher - student)).sum(-1)
    if beta == 1:
        return (student.exp() * (student - teacher)).sum(-1)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    kl = [(x.exp() * (x - mixture)).sum(-1) for x in (teacher, student)]
    return beta * kl[0] + (1 - beta) * kl[1]


def gkd_topk(
    columns: Columns, *, beta: float = 0.5, mixed: bool = False, clamp: float | None = None, floor: float | None = None
) -> TermValue:
    """The divergence over the teacher's k likeliest ids and one bucket for all others, [L, k + 1] of both. mixed:
    stored answers are among those of the policy · floor: log-probs of both are at least this · clamp: the divergence of
    a token is at most this; what is clamped has no gradient."""
    student = columns["logprobs_at"]
    teacher = columns["teacher_topk"].to(student.dtype)
    sides_of = (student, teacher) if floor is None else (student.clamp(min=floor), teacher.clamp(min=floor))
    value = token_divergence(*sides_of, beta)
    value = value if clamp is None else value.clamp(-clamp, clamp)
    sides = {"teacher": teacher, "student": student.detach()}
    metrics: Metrics = {f"{name}_coverage": (1 - x[:, -1].exp(), "mean") for name, x in sides.items()}
    same = student[:, :-1].argmax(-1) == teacher[:, :-1].argmax(-1)
    metrics["teacher_agreement"] = (same.to(value.dtype), "mean")
    metrics |= {f"{n}_entropy": (-(x.exp() * x).sum(-1).detach(), "mean") for n, x in sides.items()}
    return _with_metrics(columns, value, metrics, mixed)


def gkd(columns: Columns, *, mixed: bool = False) -> TermValue:
    """The divergence over the whole vocabulary, which the engine computes with the column `teacher_hidden`."""
    metrics: Metrics = {n: (columns[n], "mean") for n in ("teacher_agreement", "teacher_entropy")}
    return _with_metrics(columns, columns["divergence"], metrics, mixed)


def off_policy_sequence_mask(columns: Columns, *, inner: Callable[[Columns], TermValue], delta: float) -> TermValue:
    """`inner`, and 0 for a sequence with a negative mean advantage if its mean of log(pi_rollout / pi) exceeds `delta`
    (DeepSeek-V3.2). Needs `rollout_logprobs`. A sequence must be whole in its micro-batch."""
    value = inner(columns)
    lp = columns["logprobs"].detach()
    a = columns.mean(columns["advantages"].to(lp.dtype))
    gap = columns.mean(columns["rollout_logprobs"].to(lp.dtype) - lp)
    dropped = ((a < 0) & (gap > delta))[columns.sequence_of]
    metrics: Metrics = {**value.metrics, "off_policy_fraction": (dropped.to(lp.dtype), "mean")}
    return TermValue(torch.where(dropped, 0.0, value.values), metrics, value.where)


def high_entropy(columns: Columns, *, inner: Callable[[Columns], TermValue], share: float) -> TermValue:
    """`inner`, and 0 for tokens with an entropy below the quantile 1 - `share` of all tokens (2506.01939; TRL's
    top_entropy_quantile). A two-pass term, as `kl_cov`; the tokens that are left out stay in the denominators."""
    value, entropy = inner(columns), columns["entropy"].detach()
    found = entropy[columns.mask].sort().values
    at = (1 - share) * max(0, len(found) - 1)
    low = found[math.floor(at)] if len(found) else entropy.new_zeros(())
    high = found[math.ceil(at)] if len(found) else low
    kept = entropy >= low + (at - math.floor(at)) * (high - low)
    metrics: Metrics = {**value.metrics, "high_entropy_fraction": (kept.to(entropy.dtype), "mean")}
    return TermValue(torch.where(kept, value.values, 0.0), metrics, value.where)


def bypass_reinforce(columns: Columns, *, correction: Correction) -> TermValue:
    """-A w log pi, where w is of the current policy against the sampler. Needs `rollout_logprobs`. Of `correction` the
    level, the form and the bounds count here; its rejections and its mean are of the whole step. The metric `ppo_kl` is
    of the tokens that were kept (column `keep`), as verl's is."""
    a = columns["advantages"].to(columns["logprobs"].dtype)
    q = columns["logprobs"].detach() - columns["rollout_logprobs"].to(a.dtype)
    w = bounded(importance_ratio(columns, q, correction.level), correction) if correction.form else torch.ones_like(a)
    metrics: Metrics = {"ppo_kl": (-q, "mean"), "is_weight": (w, "mean")}
    kept = {"ppo_kl": columns["keep"].bool()} if "keep" in columns else {}
    return TermValue(-a * w * columns["logprobs"], metrics, kept)


def reinforce(columns: Columns) -> TermValue:
    """-A log pi."""
    return TermValue(-columns["advantages"].to(columns["logprobs"].dtype) * columns["logprobs"])


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, form: str) -> Tensor:
    """Per-token KL(pi || ref) from a sample of pi: k1 x · abs |x| · k2 x^2 / 2 · k3 exp(-x) - 1 + x, x = log(pi / ref).
    With a `+` the value is that of the form and the gradient that of k2 (straight-through). The log-ratio of k3 is
    clamped to +-20; the value is not, which would take the pull away from the tokens that drifted most."""
    x = logprobs - ref_logprobs.to(logprobs.dtype)
    base = form.removesuffix("+")
    if base == "k3":
        y = (-x).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        value = y.exp() - y - 1
    else:
        value = x if base == "k1" else distance(x) if base == "abs" else 0.5 * x * x
    if form.endswith("+"):
        gradient = 0.5 * x * x
        return gradient - gradient.detach() + value.detach()
    return value


def kl_loss(columns: Columns, *, form: str = "k3", ratio_corrected: bool = False) -> TermValue:
    """ratio_corrected: times pi / pi_old, gradient included, for an unbiased gradient off-policy (DeepSeek-V3.2)."""
    value = kl_estimate(columns["logprobs"], columns["ref_logprobs"], form)
    metrics: Metrics = {"kl_loss": (value.detach(), "mean")}
    if ratio_corrected:
        value = value * log_ratio(columns["logprobs"], old_logprobs(columns)).exp()
    return TermValue(value, metrics)


def kl_penalty(columns: Columns, *, coef: float, form: str) -> tuple[Tensor, float]:
    """KL in the reward: (coef k(old, ref) [L], mean KL per token, averaged over sequences with a trainable token)."""
    clean = columns.cleaned()
    kl = kl_estimate(clean["old_logprobs"].double(), clean["ref_logprobs"].double(), form)
    present = int((columns.counts() > 0).sum())
    return coef * kl, float(columns.mean(kl).sum()) / max(1, present)


def adapted_coef(coef: float, *, kl: float, target: float, horizon: float, num_sequences: int) -> float:
    """The coefficient after this step (1909.08593): beta (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon)."""
    error = min(0.2, max(-0.2, kl / target - 1))
    return coef * (1 + error * num_sequences / horizon)


def entropy_bonus(columns: Columns) -> TermValue:
    """-H: a positive coefficient raises the entropy."""
    return TermValue(-columns["entropy"])


def nll(columns: Columns) -> TermValue:
    """-log pi: supervised fine-tuning and the positive-example term of VAPO with `over`."""
    return TermValue(-columns["logprobs"])


def observation(columns: Columns) -> TermValue:
    """-log p of what the environment wrote (ECHO), at the temperature of the sample."""
    nll = -columns["logprobs"]
    return TermValue(nll, {"observation_nll": (nll, "mean"), "observed_tokens": (torch.ones_like(nll), "sum")})


def value_clip(columns: Columns, *, clip: float | None = 0.5) -> TermValue:
    """Half the squared error of the value, at least that of the value clipped to old +- clip. None: no clip."""
    v = columns["values"]
    returns = columns["returns"].to(v.dtype)
    error = (v - returns) ** 2
    metrics: Metrics = {"vpred_mean": (v.detach(), "mean")}
    if clip is not None:
        old = columns["old_values"].to(v.dtype)
        bounded_error = (torch.maximum(torch.minimum(v, old + clip), old - clip) - returns) ** 2
        metrics["vf_clipfrac"] = ((bounded_error > error).to(v.dtype), "mean")
        error = torch.maximum(error, bounded_error)
    return TermValue(0.5 * error, metrics)
