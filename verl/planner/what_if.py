"""`verl simulate`: the configured run and its neighbours with other staleness under the virtual clock."""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from verl.algorithms.presets import settled
from verl.config.devices import colocated
from verl.config.load import read_config
from verl.config.schema import Config
from verl.driver.scheduler import Scheduler
from verl.errors import Refused
from verl.planner.columns import aligned
from verl.planner.simulate import (
    Decoding,
    Lengths,
    RecordedLengths,
    Simulated,
    SimulatedRun,
    Workload,
    lengths_like,
    lognormal,
    means_of,
    play_until,
)

STALENESS = (0.0, 0.25, 0.5, 1.0, 2.0)
PUBLISHES, WARM = 22, 2
"""Publishes of a simulated run, and those of them that do not count."""
REPLAYS = 4
"""Plays of a configuration, each with other lengths, from which the error of its figures is estimated."""
FEWEST_LENGTHS = 2
FEW_LENGTHS = 50
"""Below this number of recorded answers a line names the number, since the error is mostly that of few lengths."""
DECODING = ("token_s", "sequence_s")
TIMES = (*DECODING, "update_s", "publish_s")
WAITS = ("reward_s", "tool_calls", "tool_s")
"""The waits of an answer beside its decode steps, 0 if they are not given: for its reward, and for calls of tools."""
RESUME = "resume_s"
"""The seconds in which a replica computes the keys and values of a request anew that continues after a publish, 0 if
they are not given (`pipeline.partial_rollout`)."""
PRICED = ("price per step", "per million tokens")
SHAPE = ("mean_tokens", "sigma")
FEWEST_ROLLOUTS, AGREES = 3, 0.1
"""Rollouts that determine a decode step, and the mean relative error with which it agrees with them."""
REWEIGHTED, ERROR_FLOOR = 50, 1e-4
"""Rounds of least squares, each weighted by the errors of the one before, and the least error that weighs."""
LEAST_APART = 0.02
"""The least singular value of the counts of decode steps and tokens, of the largest, at which both times follow."""
RELEASED = tuple(f"groups/{reason}" for reason in ("rejected", "invalid", "failed", "dropped"))
"""Metrics of groups that were decoded and not trained, of which a run has no lengths."""
_NOT_UPDATE = ("timing_s/rollout", "timing_s/publish", "timing_s/evaluate", "timing_s/checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """The facts of a run that a simulation needs."""

    lengths: tuple[int, ...]
    """The tokens of its answers."""
    by_step: Mapping[int, float]
    """Their mean in each step."""
    update_s: float
    """The median time of a step without rollout and publish."""
    publish_s: float
    waits: Mapping[str, float]
    """`WAITS`, without those that the run does not determine."""
    decoding: Decoding | None
    """The decode step with which the seconds of its rollouts agree; None if they do not determine it."""


def measured_by(run: Path, *, decoding: bool = True) -> RecordedRun:
    """Return the answers and times of a run's steps, with the decode step if `decoding`. Raise Refused for a folder
    without them."""
    from verl.track.metrics import read_metrics
    from verl.track.samples import read_scalars, sample_steps

    every = read_metrics(run)
    found = [line for line in every if "timing_s/rollout" in line.values]
    if every and not found:
        why = "it is of another version, or was cut off in its first step"
        raise Refused(f"from={run}: none of {len(every)} steps with metrics has timing_s/rollout: {why}")
    lines, seconds = [line.values for line in found], {line.step: line.values["timing_s/rollout"] for line in found}
    steps = {step: [row["response_tokens"] for row in read_scalars(run, step)] for step in sample_steps(run)}
    steps = {step: [tokens for tokens in rows if tokens > 0] for step, rows in steps.items()}
    lengths = [tokens for rows in steps.values() for tokens in rows]
    if not lines or not lengths:
        raise Refused(f"from={run}: {len(lines)} steps with times and {len(lengths)} answers; a run of `verl train`")
    if len(lengths) < FEWEST_LENGTHS:
        raise Refused(f"from={run}: {len(lengths)} answer; a distribution of lengths has {FEWEST_LENGTHS} or more")
    publish_s = statistics.median(values.get("timing_s/publish", 0.0) for values in lines)
    update_s = statistics.median(
        sum(s for name, s in values.items() if name.startswith("timing_s/") and name not in _NOT_UPDATE)
        for values in lines
    )
    by_step = {step: statistics.mean(rows) for step, rows in steps.items() if rows}
    waits = _waits(lines)
    without_rewards = {step: s - waits["reward_s"] for step, s in seconds.items()}
    whole = waits.get("tool_calls") == 0 and not any(values.get(name) for values in lines for name in RELEASED)
    return RecordedRun(
        lengths=tuple(lengths),
        by_step=by_step,
        update_s=update_s,
        publish_s=publish_s,
        waits=waits,
        decoding=_decoding(run, without_rewards, steps) if decoding and whole else None,
    )


def _waits(lines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return what an answer waits for, by the metrics of steps. Calls of tools are those of all answers, also of groups
    that were released; those of a run that did not count these answers are left out."""
    names = ("tool_calls", "tool_s", "trajectories")
    calls, tool_s, answers = (sum(values.get(f"agent/{name}", 0.0) for values in lines) for name in names)
    graded = [sum(values.get(f"reward/{name}_s/mean", 0.0) for name in ("queue", "call")) for values in lines]
    waits = {"reward_s": statistics.median(graded), "tool_s": tool_s / calls if calls else 0.0}
    return waits | ({"tool_calls": calls / answers if calls else 0.0} if answers or not calls else {})


def _decoding(run: Path, seconds: Mapping[int, float], steps: Mapping[int, Sequence[int]]) -> Decoding | None:
    """Return the decode step of a run with one replica that shares its device with training, by the seconds of its
    rollouts and their answers, if these are all that it decoded; the first step, in which kernels are prepared, does
    not count. None also if its configuration cannot be read."""
    try:
        config = read_config(run / "config.yaml")
    except (OSError, Refused):
        return None
    if config.rollout.replicas > 1 or not colocated(config) or not_counted(config):
        return None
    known = sorted(seconds.keys() & steps.keys())[1:]
    return decoding_of([(seconds[step], steps[step]) for step in known], config.rollout.max_concurrent_sequences)


def decoding_of(
    rollouts: Sequence[tuple[float, Sequence[int]]], sequences: int, within: float = AGREES
) -> Decoding | None:
    """Return the decode step of one replica of so many sequences that agrees best with rollouts of (seconds, tokens of
    each answer): all decode steps take `base_s`, and each token adds `sequence_s`. It is the one with the least mean
    relative error, which a few rollouts that were held up by something else hardly move. Rollouts without tokens or
    without time do not count. None if the lengths are too much alike to tell the two apart, or if that error is more
    than `within`."""
    rollouts = [(s, tokens) for s, tokens in rollouts if s > 0 and any(tokens)]
    if len(rollouts) < FEWEST_ROLLOUTS:
        return None
    counts = np.array([(_decode_steps(tokens, sequences), sum(tokens)) for _, tokens in rollouts], float)
    shares = counts / np.array([[s] for s, _ in rollouts])  # so that errors are relative
    norms = np.linalg.norm(shares, axis=0)
    singular = np.linalg.svd(shares / norms, compute_uv=False)
    weights = np.ones(len(shares))
    for _ in range(REWEIGHTED):  # squares weighted by 1 / error are absolute errors
        found = np.linalg.lstsq(shares / norms * weights[:, None], weights, rcond=None)[0]
        errors = np.abs(shares / norms @ found - 1)
        weights = 1 / np.sqrt(np.maximum(errors, ERROR_FLOOR))
    base_s, sequence_s = found
    if singular[-1] < LEAST_APART * singular[0] or base_s <= 0 or sequence_s < 0 or errors.mean() > within:
        return None
    return Decoding(base_s=float(base_s / norms[0]), sequence_s=float(sequence_s / norms[1]))


def _decode_steps(tokens: Sequence[int], sequences: int) -> int:
    """Return the decode steps until the last of these answers ends, each of which begins when there is a place."""
    ends = [0] * min(sequences, len(tokens))
    for length in tokens:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def grown(found: RecordedRun, steps_ahead: float) -> float:
    """Return the factor by which answers will be longer than those of a run, so many steps after its last one, if their
    mean grows on along a straight line."""
    if len(found.by_step) < 2:
        return 1.0
    slope, start = statistics.linear_regression([*found.by_step], [*found.by_step.values()])
    return max(0.0, start + slope * (max(found.by_step) + steps_ahead)) / statistics.mean(found.lengths)


def lengths_of(
    config: Config, shape: Sequence[float], found: RecordedRun | None, steps_ahead: float | None = None
) -> Lengths:
    """Return the lengths of answers: those of a run, which have grown if `steps_ahead` is given, or a log-normal
    distribution with this mean and sigma."""
    if found is not None:
        factor, most = 1.0 if steps_ahead is None else grown(found, steps_ahead), config.rollout.max_response_tokens
        return lengths_like([max(1, min(round(factor * tokens), most)) for tokens in found.lengths])
    mean, sigma = shape
    return lognormal(mean, sigma, config.rollout.max_response_tokens)


def workload_of(config: Config, times: Mapping[str, float], lengths: Lengths) -> Workload:
    """Return the work of a step. times: `TIMES` in seconds, `RESUME` and those of `WAITS` that are known."""
    return Workload(
        replicas=config.rollout.replicas,
        sequences=config.rollout.max_concurrent_sequences,
        samples_per_prompt=config.step.samples_per_prompt,
        lengths=lengths,
        decoding=Decoding(base_s=times["token_s"], sequence_s=times["sequence_s"]),
        update_s=times["update_s"],
        publish_s=times["publish_s"],
        shared=colocated(config),
        partial_rollout=config.pipeline.partial_rollout,
        resume_s=times.get(RESUME, 0.0),
        **{name: times.get(name, 0.0) for name in WAITS},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The pace of a configuration, and that of replays with other lengths."""

    pace: Simulated
    others: tuple[Simulated, ...]

    def error(self, figure: Callable[[Simulated], float]) -> float:
        """Return two standard deviations of a figure over all plays."""
        return 2 * statistics.stdev([figure(self.pace), *map(figure, self.others)])

    def text(self, figure: Callable[[Simulated], float], form: str, error_form: str = "") -> str:
        """Return a figure with its error in these formats."""
        return f"{figure(self.pace):{form}} ± {self.error(figure):{error_form or form}}"

    def as_data(self) -> dict[str, Any]:
        """Return the means as data for JSON, and the error of each by its name as `errors`."""
        means = {**asdict(self.pace), "tokens_per_s": self.pace.tokens_per_s}
        errors: dict[str, Any] = {name: self.error(attrgetter(name)) for name in means if name != "staleness"}
        errors["staleness"] = {
            age: self.error(lambda pace, age=age: pace.staleness.get(age, 0.0))  # type: ignore[misc]
            for age in self.pace.staleness
        }
        return means | {"errors": errors}


def replayed(config: Config, work: Workload, publishes: int = PUBLISHES) -> Replayed:
    """Return the pace of this configuration in the long run, and of replays of it. Those of recorded lengths draw from
    another sample of them each, so that the error is larger where few are known."""
    others, lengths = list[Simulated](), work.lengths
    for seed in range(1, REPLAYS):
        if isinstance(lengths, RecordedLengths):
            work = replace(work, lengths=lengths.resampled(random.Random(seed)))
        others.append(simulated(config, work, publishes, seed))
    return Replayed(pace=simulated(config, replace(work, lengths=lengths), publishes), others=tuple(others))


def simulated(config: Config, work: Workload, publishes: int = PUBLISHES, seed: int = 0) -> Simulated:
    """Return the pace of this configuration in the long run, per publish. seed: added to `run.seed`."""
    return means_of(simulated_run(config, work, publishes, seed), WARM)


def simulated_run(config: Config, work: Workload, publishes: int = PUBLISHES, seed: int = 0) -> SimulatedRun:
    """Play this configuration until its publish number `publishes`."""
    p = config.pipeline
    scheduler = Scheduler(
        prompts_per_step=config.step.prompts_per_step,
        total_steps=(publishes + 4) * p.sync_every,  # the look-ahead is not cut short
        sync_every=p.sync_every,
        staleness=p.staleness,
        oversample=p.oversample,
    )
    return play_until(scheduler, work, publishes, config.run.seed + seed)


def neighbours(config: Config) -> list[Config]:
    """Return the configuration, and the same with other staleness if rollout and training have devices of their own."""
    if colocated(config):
        return [config]
    ahead = config.step.prompts_per_step * config.pipeline.sync_every
    known = {s for s in STALENESS if s == 0 or s * ahead >= 1}  # a smaller one is less than a group
    others = sorted({*known, config.pipeline.staleness})
    return [replace(config, pipeline=replace(config.pipeline, staleness=s, placement="split")) for s in others]


def not_counted(config: Config) -> str:
    """Return a line about groups and answers of this algorithm that a simulated run does not have, or ""."""
    preset = settled(config.algorithm.name, config.algorithm.given())
    found = []
    if preset.group_filter.filter_groups or preset.group_filter.curriculum:
        found.append("groups that the filter or the curriculum drops")
    if preset.group.baselines:
        found.append("baseline answers")
    return f"not counted: {' and '.join(found)} (algorithm.name={config.algorithm.name})" if found else ""


def few_lengths(found: RecordedRun | None) -> str:
    """Return a line about a run with so few answers that the errors are mostly theirs, or ""."""
    if found is None or len(found.lengths) >= FEW_LENGTHS:
        return ""
    return f"lengths of {len(found.lengths)} answers, fewer than {FEW_LENGTHS}: the errors include what others may be"


def hourly_price(config: Config, prices: tuple[float, float]) -> float:
    """Return the price of an hour of a run. prices: of a replica, and of the trainer."""
    return prices[0] * config.rollout.replicas + prices[1]


def table(config: Config, found: Sequence[tuple[Config, Replayed]], prices: tuple[float, float] = (0.0, 0.0)) -> str:
    """Return a line for each simulated configuration; * marks the given one. prices: as in `hourly_price`."""
    hourly_s = hourly_price(config, prices) / 3600
    head = ("staleness", "s per step", "trainer waits", "rollout idle", "tokens/s", "trained on-policy", "oldest")
    rows = [head + (PRICED if hourly_s else ())]
    for one, got in found:
        given = one.pipeline.staleness == config.pipeline.staleness
        steps = one.pipeline.sync_every
        priced = (
            got.text(lambda pace, steps=steps: hourly_s * pace.period_s / steps, ".4g", ".1g"),  # type: ignore[misc]
            got.text(lambda pace: 1e6 * hourly_s / pace.tokens_per_s, ".4g", ".1g"),
        )
        rows.append(
            (
                f"{'*' if given else ' '} {one.pipeline.staleness:g}",
                got.text(lambda pace, steps=steps: pace.period_s / steps, ".4g", ".1g"),  # type: ignore[misc]
                got.text(lambda pace: pace.wait_s / pace.period_s, ".0%"),
                got.text(lambda pace: pace.idle_share, ".0%"),
                got.text(lambda pace: pace.tokens_per_s, ",.0f"),
                got.text(lambda pace: pace.staleness.get(0, 0.0), ".0%"),
                f"{max(got.pace.staleness)}",
                *(priced if hourly_s else ()),
            )
        )
    about = f"±: two standard deviations over {REPLAYS} plays with other lengths"
    return "\n".join([*aligned(rows, right=True), about])
