"""The placements of a run as `verl plan` prints them: a table with ranges, and data for JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

from verl.bounds import size_text
from verl.config.model_files import describe_model
from verl.config.schema import Config
from verl.planner.columns import aligned
from verl.planner.disk import checkpoint_bytes, checkpoints_kept
from verl.planner.latency import StepWork
from verl.planner.mapping import stages_of
from verl.planner.memory import bytes_range, error_text
from verl.planner.placement import (
    OTHERS,
    PlacedRun,
    SetMemory,
    corners,
    overrides,
    planned_roles,
    seconds_on,
    set_seconds_on,
)
from verl.planner.simulate import Simulated
from verl.planner.what_if import Replayed

BAR = 8
"""The characters of a bar of memory."""


def render(config: Config, found: Sequence[PlacedRun], work: StepWork) -> str:
    """Return the best placement as a table, with the range of its seconds, the overrides that configure it, and why the
    next ones are slower."""
    best = found[0]
    one, stages, ends = best.placement, stages_of(planned_roles(config)), corners(best)
    low_s, high_s = (seconds_on(config, best, end, work) for end in ends)
    low, high = (one.price * s / one.step_s for s in (low_s, high_s))
    price = f", {one.price:.2f} per step ({low:.2f} to {high:.2f})" if one.price else ""
    used = {best.cluster[placed.group].device: None for placed in one.sets}
    spreads = " and ".join(f"{spread:g}" for spread in sorted({device.spread for device in used}))
    lines = [
        f"placement about {one.step_s:.3g} s per step ({low_s:.3g} to {high_s:.3g}){price} on "
        + " and ".join(f"{device.name} ({device.source})" for device in used),
        *_pace_lines(config, best),
        f"          range: if its devices reach {spreads} times the shares of the cluster file, or less by this factor;"
        " the seconds of its stages too",
    ]
    rows: list[tuple[str, ...]] = [("devices", "roles", "GiB held at most", *(f"{stage}, s" for stage in stages))]
    for placed, memory, of_stages in zip(one.sets, best.memory, _stage_ranges(config, best, work), strict=True):
        each = zip(placed.times.seconds, of_stages, strict=True)
        seconds = [f"{s:.3g} ({low:.3g} to {high:.3g})" if s else "-" for s, (low, high) in each]
        kind = f" {best.cluster[placed.group].device.name}" if best.mixed else ""
        held = f"{memory.peak_bytes / 2**30:.1f} of {memory.room_bytes / 2**30:.1f} ({memory.phase})"
        rows.append((f"{placed.times.devices}{kind}", " + ".join(placed.roles), held, *seconds))
    lines += [f"          {row}" for row in aligned(rows)]
    lines += _memory_lines(best)
    lines += [f"configure {' '.join(overrides(config, best))}", *beside_devices(config, best)]
    lines += [f"no room   {line}" for line in best.without_room]
    of_best = _by_stage(config, best, work)
    for other in found[1 : OTHERS + 1]:
        gaps = [seconds_on(config, other, end, work) / s - 1 for end, s in zip(ends, (low_s, high_s))]
        why = f"{other.placement.step_s / one.step_s - 1:+.0%} ({min(gaps):+.0%} to {max(gaps):+.0%})"
        if other.simulated is not None and best.simulated is not None:
            why += f", simulated {_ratio_text(other.simulated, best.simulated)}"
        more_s = zip(*(_longer(a, b) for a, b in zip(_by_stage(config, other, work), of_best)))
        stage, (mean_s, *between) = max(zip(stages, more_s), key=lambda at: at[1][0])
        why += f", {mean_s:+.3g} s in {stage} ({min(between):+.3g} to {max(between):+.3g})"
        lines.append(f"slower    {_sets_text(other)}: {why}")
    return "\n".join(lines)


def as_data(config: Config, found: Sequence[PlacedRun], work: StepWork) -> list[dict[str, object]]:
    """Return the placements as data for JSON, best first: the seconds and bytes with their ranges, the devices of each
    set, and the arguments that configure them."""
    stages, kept = stages_of(planned_roles(config)), found[: OTHERS + 1]
    ranges = [[seconds_on(config, placed, end, work) for end in corners(placed)] for placed in kept]
    return [
        {
            "device": placed.at.device.name,
            "step_s": placed.placement.step_s,
            "step_s_range": between,
            "price": placed.placement.price,
            "price_range": [placed.placement.price * s / placed.placement.step_s for s in between],
            "simulated": None if placed.simulated is None else placed.simulated.as_data(),
            "layout": asdict(placed.layout),
            "warnings": beside_devices(config, placed),
            "sets": [
                {
                    "roles": one.roles,
                    "devices": one.times.devices,
                    "device": placed.cluster[one.group].device.name,
                    "peak_bytes": memory.peak_bytes,
                    "peak_bytes_range": bytes_range(memory.peak_bytes),
                    "peak_phase": memory.phase,
                    "phase_bytes": memory.phases,
                    "room_bytes": memory.room_bytes,
                    "seconds": dict(zip(stages, one.times.seconds)),
                    "seconds_range": dict(zip(stages, of_stages)),
                }
                for one, memory, of_stages in zip(
                    placed.placement.sets, placed.memory, _stage_ranges(config, placed, work), strict=True
                )
            ],
            "configure": overrides(config, placed),
        }
        for placed, between in zip(kept, ranges, strict=True)
    ]


def _stage_ranges(config: Config, placed: PlacedRun, work: StepWork) -> list[list[tuple[float, float]]]:
    """Return the range of the seconds of each set by stage."""
    fast, slow = (set_seconds_on(config, placed, end, work) for end in corners(placed))
    return [list(zip(*both, strict=True)) for both in zip(fast, slow, strict=True)]


def _memory_lines(best: PlacedRun) -> list[str]:
    """Return a table with a bar for each phase of a step and each set, in which the room of its devices is the whole
    bar, and a line with the error of the bytes."""
    phases = list(dict.fromkeys(phase for memory in best.memory for phase in memory.phases))
    rows: list[tuple[str, ...]] = [("roles", *phases)]
    for placed, memory in zip(best.placement.sets, best.memory, strict=True):
        rows.append((" + ".join(placed.roles), *(_bar(memory, phase) for phase in phases)))
    head, *others = aligned(rows)
    error = f"          GiB of a rank, a full bar is what it has for a run; {error_text()}"
    return [f"memory    {head}", *(f"          {row}" for row in others), error]


def _bar(memory: SetMemory, phase: str) -> str:
    """Return the GiB of a phase as a bar and a number; - if the set has no such phase."""
    if phase not in memory.phases:
        return "-"
    held = memory.phases[phase]
    full = min(BAR, max(1, round(BAR * held / memory.room_bytes)))
    return f"{'█' * full}{'░' * (BAR - full)} {held / 2**30:.1f}"


def _pace_lines(config: Config, placed: PlacedRun) -> list[str]:
    """Return a line with the simulated pace of a placement, if it has one."""
    if (pace := placed.simulated) is None:
        return []
    steps, ahead = config.pipeline.sync_every, f"pipeline.staleness={config.pipeline.staleness:g}"
    step_s = pace.text(lambda one: one.period_s / steps, ".3g", ".1g")
    waits = pace.text(lambda one: one.wait_s / one.period_s, ".0%")
    idle = pace.text(lambda one: one.idle_share, ".0%")
    return [
        f"          simulated with {ahead}: {step_s} s per step, in which the trainer waits {waits} and the rollout"
        f" {idle} of the time"
    ]


def _sets_text(one: PlacedRun) -> str:
    kinds = [f" {one.cluster[placed.group].device.name}" if one.mixed else "" for placed in one.placement.sets]
    every = zip(one.placement.sets, kinds)
    return " | ".join(f"{' + '.join(placed.roles)} on {placed.times.devices}{kind}" for placed, kind in every)


def _by_stage(config: Config, placed: PlacedRun, work: StepWork) -> list[list[float]]:
    """Return the seconds of each stage, of the set that takes longest: as planned, and at both ends of the range."""
    each = [[one.times.seconds for one in placed.placement.sets]]
    each += [set_seconds_on(config, placed, end, work) for end in corners(placed)]
    return [[max(column) for column in zip(*sets)] for sets in each]


def _longer(these: Sequence[float], those: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(these, those, strict=True)]


def _ratio_text(one: Replayed, best: Replayed) -> str:
    """Return how much longer a simulated step takes than the best one's, with two standard deviations."""
    ratio = one.pace.period_s / best.pace.period_s
    error = ratio * math.hypot(*(each.error(_period_s) / each.pace.period_s for each in (one, best)))
    return f"{ratio - 1:+.0%} ± {error:.0%}"


def _period_s(pace: Simulated) -> float:
    return pace.period_s


def beside_devices(config: Config, placed: PlacedRun) -> list[str]:
    """Return a line for the disk and for the host memory of the policy's nodes if a run needs more of it than the
    cluster file gives: for its checkpoints, and for the weights that a node publishes."""
    kept = checkpoint_bytes(config) * checkpoints_kept(config, config.run.total_steps)
    ranks = next(one.times.devices for one in placed.placement.sets if "actor" in one.roles)
    here = min(ranks, placed.at.devices_per_node) / ranks  # the share of the shards that one node writes
    staged = here * placed.at.device.item_bytes * describe_model(config.model.path).parameters
    wants = {"disk_gb": ("checkpoints", kept), "host_memory_gb": ("the weights that a node publishes", staged)}
    return [
        f"warning   {key}={given:g} of {placed.at.device.name} is less than {size_text(int(size))} for {what}"
        for key, (what, size) in wants.items()
        if (given := getattr(placed.at, key)) and given * 1e9 < size
    ]
