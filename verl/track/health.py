"""Named detectors of the ways in which a run goes wrong: pure functions of the metrics so far, no state of their own.

A detector looks at the last record of the history and, where it speaks of a change, at the records before it. Several
causes share one symptom (entropy falls, reward falls), so each message carries the numbers that tell them apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from verl.config.schema import HealthConfig

History = Sequence[Mapping[str, float]]
Level = Literal["warn", "stop"]

WINDOW = 20
"""Steps of the past that a step is compared with."""
MIN_PAST = 5
"""Fewer steps than this are no past to compare with."""
MAX_ABS_DLOGP_NATS = 10.0
ESS_FLOOR = 0.5
RATIO_P99_LIMIT = 2.0
INVALID_SHARE_LIMIT = 0.05
CLIP_FRACTION_LIMIT = 0.5
COMPONENT_PREFIX = "reward/component/"
"""`reward/component/<name>`: the step's mean of one component of the reward."""


@dataclass(frozen=True, slots=True)
class Alarm:
    level: Level
    name: str
    message: str
    metric: str


def check_health(history: History, config: HealthConfig) -> list[Alarm]:
    """The alarms of the last step of `history` (one mapping of reduced metrics per step, oldest first)."""
    if not history:
        return []
    found = (detector(history, config) for detector in DETECTORS)
    return [alarm for alarm in found if alarm is not None]


def scan(history: History, config: HealthConfig) -> Iterator[tuple[int, Alarm]]:
    """(index, alarm) of every step of a finished history, as `check_health` would have raised them on the way."""
    for i in range(len(history)):
        for alarm in check_health(history[max(0, i - 2 * WINDOW) : i + 1], config):
            yield i, alarm


def mismatch(history: History, config: HealthConfig) -> Alarm | None:
    """k3 KL (rollout || trainer) per token: the rollout policy is not the one that is trained."""
    k3 = history[-1].get("mismatch/k3")
    if k3 is None:
        return None
    tail = "; same weights, dtype, temperature and chat template in rollout and trainer?"
    if not math.isfinite(k3) or k3 > config.mismatch_stop:
        text = (
            f"rollout/trainer mismatch: k3 KL is {k3:.3g} nats per token, above the stop limit {config.mismatch_stop:g}"
        )
        return Alarm("stop", "mismatch_stop", text + tail, "mismatch/k3")
    if k3 > config.mismatch_warn:
        text = f"rollout/trainer mismatch: k3 KL is {k3:.3g} nats per token, above {config.mismatch_warn:g}"
        return Alarm("warn", "mismatch_warn", text + tail, "mismatch/k3")
    return None


def max_abs_dlogp(history: History, config: HealthConfig) -> Alarm | None:
    """One token's log-prob differs wildly between rollout and trainer."""
    name = "mismatch/max_abs_dlogp"
    now, past = _now(history, name), _past(history, name)
    if now is None:
        return None
    if now > MAX_ABS_DLOGP_NATS:
        text = (
            f"a token's log-prob differs by {now:.3g} nats between rollout and trainer (limit {MAX_ABS_DLOGP_NATS:g})"
        )
        return Alarm("warn", "max_abs_dlogp", text, name)
    if len(past) >= MIN_PAST and now > max(1.0, 8 * median(past)):
        text = f"a token's log-prob differs by {now:.3g} nats between rollout and trainer; it was {median(past):.3g} before"
        return Alarm("warn", "max_abs_dlogp", text, name)
    return None


def ess_drop(history: History, config: HealthConfig) -> Alarm | None:
    """Effective sample size of the importance weights, as a share of the tokens."""
    name = "mismatch/ess"
    now, past = _now(history, name), _past(history, name)
    if now is None:
        return None
    if now < ESS_FLOOR:
        text = f"effective sample size is {now:.1%} of the tokens (limit {ESS_FLOOR:.0%}): few tokens carry the update"
        return Alarm("warn", "ess_drop", text, name)
    if len(past) >= MIN_PAST and now < 0.75 * median(past):
        text = f"effective sample size fell to {now:.1%} of the tokens from {median(past):.1%}"
        return Alarm("warn", "ess_drop", text, name)
    return None


def ratio_p99(history: History, config: HealthConfig) -> Alarm | None:
    name = "mismatch/ratio_p99"
    now = _now(history, name)
    if now is None or now <= RATIO_P99_LIMIT:
        return None
    text = f"1 token in 100 has an importance ratio above {now:.3g} (limit {RATIO_P99_LIMIT:g}): stale or mismatched rollouts"
    return Alarm("warn", "ratio_p99", text, name)


def entropy_floor(history: History, config: HealthConfig) -> Alarm | None:
    name = "actor/entropy"
    now = _now(history, name)
    if now is None or now >= config.entropy_floor:
        return None
    text = (
        f"entropy is {now:.3g} nats per token, below the floor {config.entropy_floor:g}: the policy no longer explores"
    )
    return Alarm("warn", "entropy_floor", text, name)


def entropy_collapse(history: History, config: HealthConfig) -> Alarm | None:
    """Entropy falls exponentially, so fast that it meets the floor within a window."""
    name = "actor/entropy"
    recent = [v for v in _recent(history, name, 10) if v > 0]
    if len(recent) < MIN_PAST or recent[-1] < config.entropy_floor:
        return None
    slope, fit = _line([math.log(v) for v in recent])
    fall = slope * (len(recent) - 1)
    if fit < 0.5 or fall > math.log(0.35):
        return None
    steps_left = math.log(max(config.entropy_floor, 1e-9) / recent[-1]) / slope
    if steps_left > WINDOW:
        return None
    text = (
        f"entropy collapses: {recent[0]:.3g} -> {recent[-1]:.3g} nats per token in {len(recent) - 1} steps; "
        f"at this rate it is below {config.entropy_floor:g} in {max(1, math.ceil(steps_left))} steps"
    )
    return Alarm("warn", "entropy_collapse", text, name)


def entropy_explosion(history: History, config: HealthConfig) -> Alarm | None:
    name = "actor/entropy"
    now, past = _now(history, name), _past(history, name)
    if now is None or len(past) < MIN_PAST or now < max(1.0, 3 * median(past)):
        return None
    text = f"entropy explodes: {now:.3g} nats per token, {median(past):.3g} before: the policy turns into noise"
    return Alarm("warn", "entropy_explosion", text, name)


def length_explosion(history: History, config: HealthConfig) -> Alarm | None:
    name = "response_length/mean"
    now, past = _now(history, name), _past(history, name)
    if now is None or len(past) < MIN_PAST:
        return None
    usual = median(past)
    if now > 2 * usual:
        text = f"responses are {now:.0f} tokens long, {now / max(usual, 1e-9):.1f} times the {usual:.0f} of before"
        return Alarm("warn", "length_explosion", text, name)
    if now < 0.4 * usual:
        text = f"responses shrank to {now:.0f} tokens from {usual:.0f}"
        return Alarm("warn", "length_collapse", text, name)
    return None


def length_drift(history: History, config: HealthConfig) -> Alarm | None:
    """Responses grow steadily and nothing is gained by it."""
    name = "response_length/mean"
    lengths, scores = _recent(history, name, WINDOW), _recent(history, "critic/score/mean", WINDOW)
    if len(lengths) < 10 or len(scores) != len(lengths):
        return None
    slope, fit = _line(lengths)
    growth = slope * (len(lengths) - 1) / max(fmean(lengths[:3]), 1e-9)
    early, late = fmean(scores[:3]), fmean(scores[-3:])
    if fit < 0.6 or growth < 0.5 or late > early + 0.01 * max(1.0, abs(early)):
        return None
    text = (
        f"responses grew from {fmean(lengths[:3]):.0f} to {fmean(lengths[-3:]):.0f} tokens in {len(lengths) - 1} steps "
        f"while the score went from {early:.3g} to {late:.3g}"
    )
    return Alarm("warn", "length_drift", text, name)


def truncated_share(history: History, config: HealthConfig) -> Alarm | None:
    text = "{:.0%} of the responses were cut at the token limit (limit {:.0%}): raise rollout.max_response_tokens or shape lengths"
    return _share(history, "response_length/clip_ratio", config.truncated_warn, "truncated_share", text)


def zero_variance_share(history: History, config: HealthConfig) -> Alarm | None:
    text = "{:.0%} of the groups have equal rewards and carry no signal (limit {:.0%}): tasks too easy or too hard"
    return _share(history, "groups/zero_variance_share", config.zero_variance_warn, "zero_variance_share", text)


def invalid_share(history: History, config: HealthConfig) -> Alarm | None:
    text = "{:.1%} of the trajectories got no valid reward (limit {:.0%}): time-outs or faults of the grader"
    return _share(history, "reward/invalid_share", INVALID_SHARE_LIMIT, "invalid_share", text)


def component_dominance(history: History, config: HealthConfig) -> Alarm | None:
    """The score rises on one component while another is given up: the classic picture of a hacked reward."""
    scores = _recent(history, "critic/score/mean", WINDOW)
    names = sorted(n for n in history[-1] if n.startswith(COMPONENT_PREFIX))
    if len(scores) < 10 or len(names) < 2:
        return None
    early_score, late_score = fmean(scores[:3]), fmean(scores[-3:])
    if late_score <= early_score + 0.05 * max(1.0, abs(early_score)):
        return None
    change: dict[str, tuple[float, float]] = {}
    for name in names:
        values = _recent(history, name, WINDOW)
        if len(values) == len(scores):
            change[name] = fmean(values[:3]), fmean(values[-3:])
    losers = [n for n, (a, b) in change.items() if a - b > max(0.05, 0.25 * abs(a))]
    gainers = sorted((n for n, (a, b) in change.items() if b > a), key=lambda n: change[n][0] - change[n][1])
    if not losers or not gainers:
        return None
    up, down = gainers[0], min(losers, key=lambda n: change[n][1] - change[n][0])
    text = (
        f"the score rose from {early_score:.3g} to {late_score:.3g} in {len(scores) - 1} steps on "
        f"{up.removeprefix(COMPONENT_PREFIX)} ({change[up][0]:.3g} -> {change[up][1]:.3g}) while "
        f"{down.removeprefix(COMPONENT_PREFIX)} fell ({change[down][0]:.3g} -> {change[down][1]:.3g})"
    )
    return Alarm("warn", "component_dominance", text, up)


def gradient_not_finite(history: History, config: HealthConfig) -> Alarm | None:
    norm, skipped = history[-1].get("actor/grad_norm"), history[-1].get("actor/skipped_updates", 0.0)
    if (norm is None or math.isfinite(norm)) and not skipped > 0:
        return None
    shown = "" if norm is None else f" (norm {norm:.3g})"
    text = f"gradient not finite{shown}: {max(1, int(skipped))} update(s) skipped, weights untouched"
    return Alarm("warn", "gradient_not_finite", text, "actor/grad_norm")


def gradient_spike(history: History, config: HealthConfig) -> Alarm | None:
    name = "actor/grad_norm"
    now, past = _now(history, name), _past(history, name)
    if now is None or len(past) < MIN_PAST or now <= 10 * median(past) or now < 1.0:
        return None
    text = f"gradient norm is {now:.3g}, {now / max(median(past), 1e-9):.0f} times the {median(past):.3g} of before"
    return Alarm("warn", "gradient_spike", text, name)


def clip_fraction(history: History, config: HealthConfig) -> Alarm | None:
    text = "{:.0%} of the tokens are clipped (limit {:.0%}): the update moves too far for its data"
    return _share(history, "actor/pg_clipfrac", CLIP_FRACTION_LIMIT, "clip_fraction", text)


def kl_explosion(history: History, config: HealthConfig) -> Alarm | None:
    """The policy leaves the reference in a few steps."""
    name = "actor/kl_loss"
    now, past = _now(history, name), _past(history, name)
    if now is None or len(past) < MIN_PAST or now <= max(0.5, 5 * median(past)):
        return None
    text = (
        f"KL to the reference is {now:.3g} nats per token, {median(past):.3g} before: the policy leaves the reference"
    )
    return Alarm("warn", "kl_explosion", text, name)


DETECTORS: tuple[Callable[[History, HealthConfig], Alarm | None], ...] = (
    mismatch,
    max_abs_dlogp,
    ess_drop,
    ratio_p99,
    entropy_floor,
    entropy_collapse,
    entropy_explosion,
    length_explosion,
    length_drift,
    truncated_share,
    zero_variance_share,
    invalid_share,
    component_dominance,
    gradient_not_finite,
    gradient_spike,
    clip_fraction,
    kl_explosion,
)


def _share(history: History, metric: str, limit: float, name: str, text: str) -> Alarm | None:
    now = _now(history, metric)
    return Alarm("warn", name, text.format(now, limit), metric) if now is not None and now > limit else None


def _now(history: History, name: str) -> float | None:
    value = history[-1].get(name)
    return value if value is not None and math.isfinite(value) else None


def _past(history: History, name: str) -> list[float]:
    return _recent(history[:-1], name, WINDOW)


def _recent(history: History, name: str, steps: int) -> list[float]:
    values = (record.get(name, math.nan) for record in history[-steps:])
    return [v for v in values if math.isfinite(v)]


def _line(values: Sequence[float]) -> tuple[float, float]:
    """Slope of the least-squares line over the index, and the share of the variance it explains."""
    middle, mean = (len(values) - 1) / 2, fmean(values)
    sxx = sum((i - middle) ** 2 for i in range(len(values)))
    sxy = sum((i - middle) * (v - mean) for i, v in enumerate(values))
    syy = sum((v - mean) ** 2 for v in values)
    return sxy / sxx, sxy * sxy / (sxx * syy) if syy > 0 else 0.0
