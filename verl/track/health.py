"""Alarms for the ways in which a run can fail, as a table of conditions on the metrics so far. There is no further
state.

An alarm reads the last step of the history and, if it detects a change, the steps before. Different causes have the
same symptom (entropy falls, reward falls), so each message has the numbers that distinguish them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta

History = Sequence[Mapping[str, float]]
Level = Literal["warn", "stop"]

WINDOW = 20  # steps of the past that a step is compared with
MIN_PAST = 5  # fewer steps than this are no past to compare with
COMPONENT_PREFIX = "reward/component/"  # followed by a component of the reward: its mean in the step


@dataclass(frozen=True)
class HealthLimits:
    """The thresholds of the alarms: keys health.* of the configuration. With inf an alarm is off."""

    mismatch_stop: Annotated[float, Meta(ge=0)] = 0.5  # k3 KL (rollout || trainer) per token above which the run stops.
    mismatch_warn: Annotated[float, Meta(ge=0)] = 0.05
    entropy_floor: float = 0.001  # Warn below, in nats per token.
    zero_variance_warn: Annotated[float, Meta(ge=0, le=1)] = 0.9
    truncated_warn: Annotated[float, Meta(ge=0, le=1)] = 0.5


@dataclass(frozen=True, slots=True)
class Alarm:
    level: Level
    name: str
    message: str
    metric: str


class Seen(NamedTuple):
    """The input of an alarm's condition. Every comparison with NaN is false."""

    history: History
    limits: HealthLimits
    value: float | None  # of the metric in the last step
    now: float  # the same; NaN where it is missing or not finite
    usual: float  # median of its finite values in the WINDOW steps before; NaN if there are fewer than MIN_PAST

    def recent(self, metric: str, steps: int = WINDOW) -> list[float]:
        return _finite(self.history[-steps:], metric)


class Row(NamedTuple):
    """One alarm: its metric, its condition and its message."""

    name: str
    metric: str
    wrong: Callable[[Seen], bool | Mapping[str, Any] | None]
    """Returns whether the alarm is raised, or the values that its message shows."""
    level: Level = "warn"
    message: str = ""
    """The key of its message; "": the name of the alarm."""


def check_health(history: History, config: HealthLimits) -> list[Alarm]:
    """Return the alarms of the last step of `history` (one mapping of reduced metrics per step, oldest first)."""
    found = []
    for name, metric, wrong, level, message in TABLE if history else ():
        value, past = history[-1].get(metric), _finite(history[-WINDOW - 1 : -1], metric)
        now = value if value is not None and math.isfinite(value) else math.nan
        usual = median(past) if len(past) >= MIN_PAST else math.nan
        if shown := wrong(Seen(history, config, value, now, usual)):
            more: Mapping[str, Any] = shown if isinstance(shown, Mapping) else {}
            numbers = {"value": value, "now": now, "usual": usual, "times": now / max(usual, 1e-9), "limits": config}
            message = MESSAGES[message or name].format(**numbers, **more)
            found.append(Alarm(level, name, message, more.get("metric", metric)))
    return found


def scan(history: History, config: HealthLimits) -> Iterator[tuple[int, Alarm]]:
    """Yield (index, alarm) for every step of a finished history: the alarms that `check_health` raised during the
    run."""
    for i in range(len(history)):
        for alarm in check_health(history[max(0, i - 2 * WINDOW) : i + 1], config):
            yield i, alarm


def entropy_collapses(s: Seen) -> Mapping[str, Any] | None:
    """Return values for the message if entropy falls exponentially, so fast that it reaches the floor within a window;
    else None."""
    recent = [v for v in s.recent("actor/entropy", 10) if v > 0]
    if len(recent) < MIN_PAST or recent[-1] < s.limits.entropy_floor:
        return None
    slope, fit = _line([math.log(v) for v in recent])
    if fit < 0.5 or slope * (len(recent) - 1) > math.log(0.35):
        return None
    left = math.log(max(s.limits.entropy_floor, 1e-9) / recent[-1]) / slope
    if left > WINDOW:
        return None
    return {"first": recent[0], "last": recent[-1], "steps": len(recent) - 1, "left": max(1, math.ceil(left))}


def length_drifts(s: Seen) -> Mapping[str, Any] | None:
    """Return values for the message if responses grow steadily without a gain in score; else None."""
    lengths, scores = s.recent("response_length/mean"), s.recent("critic/score/mean")
    if len(lengths) < 10 or len(scores) != len(lengths):
        return None
    slope, fit = _line(lengths)
    (first, last), (early, late) = _ends(lengths), _ends(scores)
    growth = slope * (len(lengths) - 1) / max(first, 1e-9)
    if fit < 0.6 or growth < 0.5 or late > early + 0.01 * max(1.0, abs(early)):
        return None
    return {"ends": (first, last, early, late), "steps": len(lengths) - 1}


def component_dominates(s: Seen) -> Mapping[str, Any] | None:
    """Return values for the message if the score rises by one component of the reward while another falls, which is
    typical of reward hacking; else None."""
    scores = s.recent("critic/score/mean")
    names = sorted(n for n in s.history[-1] if n.startswith(COMPONENT_PREFIX))
    if len(scores) < 10 or len(names) < 2:
        return None
    early, late = _ends(scores)
    if late <= early + 0.05 * max(1.0, abs(early)):
        return None
    values = {name: s.recent(name) for name in names}
    change = {name: _ends(found) for name, found in values.items() if len(found) == len(scores)}
    losers = [n for n, (a, b) in change.items() if a - b > max(0.05, 0.25 * abs(a))]
    gainers = [n for n, (a, b) in change.items() if b > a]
    if not losers or not gainers:
        return None
    rise = lambda name: change[name][1] - change[name][0]  # noqa: E731
    up, down = max(gainers, key=rise), min(losers, key=rise)
    return {
        "metric": up,
        "ends": (early, late, *change[up], *change[down]),
        "names": [name.removeprefix(COMPONENT_PREFIX) for name in (up, down)],
        "steps": len(scores) - 1,
    }


def gradient_not_finite(s: Seen) -> Mapping[str, Any] | None:
    skipped = s.history[-1].get("actor/skipped_updates", 0.0)
    if (s.value is None or math.isfinite(s.value)) and not skipped > 0:
        return None
    return {"norm": "" if s.value is None else f" (norm {s.value:.3g})", "skipped": max(1, int(skipped))}


def teacher_disagrees(s: Seen) -> Mapping[str, Any] | None:
    """Return values for the message if the teacher's signal lowers the score over the last steps; else None."""
    recent = s.recent("teacher/likes_right", MIN_PAST)
    return {"gap": -fmean(recent), "steps": MIN_PAST} if len(recent) == MIN_PAST and max(recent) < 0 else None


def teacher_fails(s: Seen) -> Mapping[str, Any] | None:
    """Return values for the message if a teacher fails; of several, those of the one that fails most often. Else
    None."""
    shares = {n: v for n, v in s.history[-1].items() if n.split("/")[:2] == ["teacher", "invalid"] and v > 0.05}
    if not shares:
        return None
    worst = max(shares, key=lambda n: (n != "teacher/invalid", shares[n]))
    return {"metric": worst, "share": shares[worst], "who": "".join(f" {name}" for name in worst.split("/")[2:])}


def mismatch_stops(s: Seen) -> bool:
    return s.value is not None and not s.value <= s.limits.mismatch_stop


TABLE = (
    Row("mismatch_stop", "mismatch/k3", mismatch_stops, "stop"),
    Row("noise_stop", "noise/k3", mismatch_stops, "stop"),
    Row("noise_ess", "noise/ess", lambda s: s.now < 0.5),
    Row("mismatch_warn", "mismatch/k3", lambda s: s.limits.mismatch_warn < s.now <= s.limits.mismatch_stop),
    Row("max_abs_dlogp", "mismatch/max_abs_dlogp", lambda s: s.now > 10),
    Row(
        "max_abs_dlogp",
        "mismatch/max_abs_dlogp",
        lambda s: 8 * s.usual < s.now <= 10 and s.now > 1,
        message="dlogp_rose",
    ),
    Row("ess_drop", "mismatch/ess", lambda s: s.now < 0.5),
    Row("ess_drop", "mismatch/ess", lambda s: 0.5 <= s.now < 0.75 * s.usual, message="ess_fell"),
    Row("ratio_p99", "mismatch/ratio_p99", lambda s: s.now > 2),
    Row("entropy_floor", "actor/entropy", lambda s: s.now < s.limits.entropy_floor),
    Row("entropy_collapse", "actor/entropy", entropy_collapses),
    Row("entropy_explosion", "actor/entropy", lambda s: s.now >= 1 and s.now >= 3 * s.usual),
    Row("length_explosion", "response_length/mean", lambda s: s.now > 2 * s.usual),
    Row("length_collapse", "response_length/mean", lambda s: s.now < 0.4 * s.usual),
    Row("length_drift", "response_length/mean", length_drifts),
    Row("truncated_share", "response_length/clip_ratio", lambda s: s.now > s.limits.truncated_warn),
    Row("zero_variance_share", "groups/zero_variance_share", lambda s: s.now > s.limits.zero_variance_warn),
    Row("invalid_share", "reward/invalid_share", lambda s: s.now > 0.05),
    Row("component_dominance", "critic/score/mean", component_dominates),
    Row("gradient_not_finite", "actor/grad_norm", gradient_not_finite),
    Row("gradient_spike", "actor/grad_norm", lambda s: s.now >= 1 and s.now > 10 * s.usual),
    Row("clip_fraction", "actor/pg_clipfrac", lambda s: s.now > 0.5),
    Row("kl_explosion", "actor/kl_loss", lambda s: s.now > 0.5 and s.now > 5 * s.usual),
    Row("teacher_coverage", "actor/teacher_coverage", lambda s: s.now < 0.9),
    Row("teacher_disagrees", "teacher/likes_right", teacher_disagrees),
    Row("teacher_silent", "teacher/untaught", lambda s: s.now >= 1),
    Row("teacher_invalid", "teacher/invalid", teacher_fails),
    Row("unread_tokens", "rollout/unread_share", lambda s: s.now > 0.001),
    Row("tool_errors", "agent/tool_error_share", lambda s: s.now > 0.5),
    Row("malformed_calls", "agent/malformed_share", lambda s: s.now > 0.3),
    Row("no_progress", "agent/no_progress_share", lambda s: s.now > 0.3),
    Row("turn_limit", "agent/turn_limit_share", lambda s: s.now >= 0.95),
    Row("slow_rewards", "reward/workers_needed", lambda s: s.now > 0),
)
MESSAGES: Mapping[str, str] = {
    "mismatch_stop": "rollout/trainer mismatch: k3 KL is {value:.3g} nats per token, above the stop limit "
    "{limits.mismatch_stop:g}; same weights, dtype, temperature and chat template in rollout and trainer?",
    "noise_stop": "samples under exploration noise: k3 KL is {value:.3g} nats per token, above the stop limit "
    "{limits.mismatch_stop:g}; lower rollout.engine_options.noise_sigma_start, or rollout and trainer differ",
    "noise_ess": "exploration noise: the effective sample size is {now:.1%} of the tokens (limit 50%); lower "
    "rollout.engine_options.noise_sigma_start",
    "mismatch_warn": "rollout/trainer mismatch: k3 KL is {now:.3g} nats per token, above {limits.mismatch_warn:g}; "
    "same weights, dtype, temperature and chat template in rollout and trainer?",
    "max_abs_dlogp": "a token's log-prob differs by {now:.3g} nats between rollout and trainer (limit 10)",
    "dlogp_rose": "a token's log-prob differs by {now:.3g} nats between rollout and trainer; it was {usual:.3g} before",
    "ess_drop": "effective sample size is {now:.1%} of the tokens (limit 50%): few tokens carry the update",
    "ess_fell": "effective sample size fell to {now:.1%} of the tokens from {usual:.1%}",
    "ratio_p99": "1 token in 100 has an importance ratio above {now:.3g} (limit 2): stale or mismatched rollouts",
    "entropy_floor": "entropy is {now:.3g} nats per token, below the floor {limits.entropy_floor:g}: the policy no "
    "longer explores",
    "entropy_collapse": "entropy collapses: {first:.3g} -> {last:.3g} nats per token in {steps} steps; at this rate it "
    "is below {limits.entropy_floor:g} in {left} steps",
    "entropy_explosion": "entropy explodes: {now:.3g} nats per token, {usual:.3g} before: the policy turns into noise",
    "length_explosion": "responses are {now:.0f} tokens long, {times:.1f} times the {usual:.0f} of before",
    "length_collapse": "responses shrank to {now:.0f} tokens from {usual:.0f}",
    "length_drift": "responses grew from {ends[0]:.0f} to {ends[1]:.0f} tokens in {steps} steps while the score went "
    "from {ends[2]:.3g} to {ends[3]:.3g}",
    "unread_tokens": "{now:.1%} of the sampled tokens are no text (ids beyond the vocabulary, reserved tokens): "
    "they are trained, and no reward function reads them; see whether rollout and trainer have the same weights",
    "truncated_share": "{now:.0%} of the responses were cut at the token limit (limit {limits.truncated_warn:.0%}): "
    "raise rollout.max_response_tokens or shape lengths",
    "zero_variance_share": "{now:.0%} of the groups have equal rewards and carry no signal "
    "(limit {limits.zero_variance_warn:.0%}): tasks too easy or too hard",
    "invalid_share": "{now:.1%} of the trajectories got no valid reward (limit 5%): time-outs or faults of the grader",
    "component_dominance": "the score rose from {ends[0]:.3g} to {ends[1]:.3g} in {steps} steps on {names[0]} "
    "({ends[2]:.3g} -> {ends[3]:.3g}) while {names[1]} fell ({ends[4]:.3g} -> {ends[5]:.3g})",
    "gradient_not_finite": "gradient not finite{norm}: {skipped} update(s) skipped, weights untouched",
    "gradient_spike": "gradient norm is {now:.3g}, {times:.0f} times the {usual:.3g} of before",
    "clip_fraction": "{now:.0%} of the tokens are clipped (limit 50%): the update moves too far for its data",
    "kl_explosion": "KL to the reference is {now:.3g} nats per token, {usual:.3g} before: the policy leaves the "
    "reference",
    "teacher_coverage": "the teacher's likeliest tokens hold {now:.0%} of its probability (limit 90%): raise "
    "teacher.top_k, or algorithm.name=gkd",
    "teacher_disagrees": "the teacher likes answers with a low score better than those with a high one, by {gap:.3g} "
    "nats per token over {steps} steps: on these tasks it is no better than the policy",
    "teacher_silent": "no attempt of this step came with feedback (or all was longer than data.max_prompt_tokens): the "
    "teacher of teacher.hint_key=attempt.feedback taught nothing",
    "teacher_invalid": "the teacher{who} gave no finite number for {share:.1%} of its samples (limit 5%): none is "
    "trained on",
    "tool_errors": "{now:.0%} of the calls of tools fail (limit 50%): wrong arguments, or a tool that is down? "
    "`verl show RUN trajectory=ID` has each",
    "malformed_calls": "{now:.0%} of the calls cannot be read (limit 30%): is agent.format what this model writes?",
    "no_progress": "{now:.0%} of the trajectories end in the same calls with the same results (limit 30%)",
    "turn_limit": "{now:.0%} of the trajectories end at agent.max_turns (limit 95%): raise it, or nobody ever answers",
    "slow_rewards": "answers wait long for a grader (reward/queue_s/mean): reward.num_workers={now:.0f} would do",
}


def _finite(history: History, metric: str) -> list[float]:
    values = (record.get(metric, math.nan) for record in history)
    return [v for v in values if math.isfinite(v)]


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the means of the first and of the last three values."""
    return fmean(values[:3]), fmean(values[-3:])


def _line(values: Sequence[float]) -> tuple[float, float]:
    """Return the slope of the least-squares line over the index, and the explained share of the variance."""
    middle, mean = (len(values) - 1) / 2, fmean(values)
    sxx = sum((i - middle) ** 2 for i in range(len(values)))
    sxy = sum((i - middle) * (v - mean) for i, v in enumerate(values))
    syy = sum((v - mean) ** 2 for v in values)
    return sxy / sxx, sxy * sxy / (sxx * syy) if syy > 0 else 0.0
