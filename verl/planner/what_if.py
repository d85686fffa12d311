"""`verl simulate`: the configured run and its neighbours with other staleness under the virtual clock."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from verl.algorithms.presets import settled
from verl.config.devices import colocated
from verl.config.schema import Config
from verl.driver.scheduler import Scheduler
from verl.errors import Refused
from verl.planner.columns import aligned
from verl.planner.simulate import (
    Decoding,
    Lengths,
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
FEWEST_LENGTHS = 50
TIMES = ("token_s", "sequence_s", "update_s", "publish_s")
SHAPE = ("mean_tokens", "sigma")
_NOT_UPDATE = ("timing_s/rollout", "timing_s/publish", "timing_s/evaluate", "timing_s/checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """The facts of a run that a simulation needs."""

    lengths: tuple[int, ...]
    """The tokens of its answers."""
    update_s: float
    """The median time of a step without rollout and publish."""
    publish_s: float


def measured_by(run: Path) -> RecordedRun:
    """Return the answers and times of a run's steps. Raise Refused for a folder without them."""
    from verl.track.metrics import read_metrics
    from verl.track.samples import read_scalars, sample_steps

    lines = [line.values for line in read_metrics(run) if "timing_s/rollout" in line.values]
    lengths = [row["response_tokens"] for step in sample_steps(run) for row in read_scalars(run, step)]
    lengths = [tokens for tokens in lengths if tokens > 0]
    if not lines or not lengths:
        raise Refused(f"from={run}: {len(lines)} steps with times and {len(lengths)} answers; a run of `verl train`")
    if len(lengths) < FEWEST_LENGTHS:
        raise Refused(f"from={run}: {len(lengths)} answers; their lengths are known from {FEWEST_LENGTHS} on")
    publish_s = statistics.median(values.get("timing_s/publish", 0.0) for values in lines)
    update_s = statistics.median(
        sum(s for name, s in values.items() if name.startswith("timing_s/") and name not in _NOT_UPDATE)
        for values in lines
    )
    return RecordedRun(lengths=tuple(lengths), update_s=update_s, publish_s=publish_s)


def lengths_of(config: Config, shape: Sequence[float], found: RecordedRun | None) -> Lengths:
    """Return the lengths of answers: those of a run, or a log-normal distribution with this mean and sigma."""
    if found is not None:
        return lengths_like([min(tokens, config.rollout.max_response_tokens) for tokens in found.lengths])
    mean, sigma = shape
    return lognormal(mean, sigma, config.rollout.max_response_tokens)


def workload_of(config: Config, times: Mapping[str, float], lengths: Lengths) -> Workload:
    """Return the work of a step. times: `TIMES` in seconds."""
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
    )


def simulated(config: Config, work: Workload, publishes: int = PUBLISHES) -> Simulated:
    """Return the pace of this configuration in the long run, per publish."""
    return means_of(simulated_run(config, work, publishes), WARM)


def simulated_run(config: Config, work: Workload, publishes: int = PUBLISHES) -> SimulatedRun:
    """Play this configuration until its publish number `publishes`."""
    p = config.pipeline
    scheduler = Scheduler(
        prompts_per_step=config.step.prompts_per_step,
        total_steps=(publishes + 4) * p.sync_every,  # the look-ahead is not cut short
        sync_every=p.sync_every,
        staleness=p.staleness,
        oversample=p.oversample,
    )
    return play_until(scheduler, work, publishes, config.run.seed)


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


def table(config: Config, found: Sequence[tuple[Config, Simulated]]) -> str:
    """Return a line for each simulated configuration; * marks the given one."""
    head = ("staleness", "s per step", "trainer waits", "rollout idle", "tokens/s", "trained on-policy", "oldest")
    rows = [head]
    for one, got in found:
        given = one.pipeline.staleness == config.pipeline.staleness
        steps = one.pipeline.sync_every
        rows.append(
            (
                f"{'*' if given else ' '} {one.pipeline.staleness:g}",
                f"{got.period_s / steps:.4g}",
                f"{got.wait_s / got.period_s:.0%}",
                f"{got.idle_share:.0%}",
                f"{got.tokens_per_s:,.0f}",
                f"{got.staleness.get(0, 0.0):.0%}",
                f"{max(got.staleness)}",
            )
        )
    return "\n".join(aligned(rows, right=True))
