"""`verl show RUN cluster_file=FILE`: the seconds that the planner predicts for a run beside those measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from verl.config.devices import colocated
from verl.config.load import read_config
from verl.config.schema import Config
from verl.errors import Refused
from verl.planner.columns import aligned
from verl.planner.hardware import Nodes, some_devices
from verl.planner.latency import Division
from verl.planner.mapping import stages_of, times_of
from verl.planner.placement import planned_roles, rules_of, work_of

PHASES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "rollout": ("rollout",),
        "experience": ("reward_model", "reference", "old_logprobs", "values"),
        "update": ("update", "update_critic"),
    }
)
"""Stage of the planner -> the phases of a step that it predicts."""
LENGTHS = ("prompt_length/mean", "response_length/mean")
HALVINGS, ROUNDS = 40, 6
AGREES = 0.01
"""The relative error with which a prediction and a measurement agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """The facts of a run that a prediction is compared with: medians over its steps, without the first one."""

    config: Config
    prompt_tokens: float
    response_tokens: float
    seconds: Mapping[str, float]
    """By stage."""
    step_s: float


def measured_run(run: Path) -> MeasuredRun:
    """Return the lengths and times of the steps of a run. Raise Refused for a folder without them, and for a run whose
    roles have devices of their own."""
    from verl.track.metrics import read_metrics

    if not (run / "config.yaml").is_file():
        raise Refused(f"{run}: no config.yaml: not the folder of a run")
    config = read_config(run / "config.yaml")
    check_comparable(config, str(run))
    lines = [line.values for line in read_metrics(run) if {"timing_s/rollout", *LENGTHS} <= {*line.values}]
    if len(lines) < 2:
        raise Refused(f"{run}: {len(lines)} steps with times; two or more are compared, without the first")

    def median(names: Sequence[str]) -> float:
        return statistics.median(sum(values.get(name, 0.0) for name in names) for values in lines[1:])

    prompt_tokens, response_tokens = (median([name]) for name in LENGTHS)
    seconds = {stage: median([f"timing_s/{name}" for name in names]) for stage, names in PHASES.items()}
    shown = ("evaluate", "checkpoint")  # not in every step
    step_s = median(["perf/time_per_step"]) - sum(median([f"timing_s/{name}"]) for name in shown)
    return MeasuredRun(
        config=config,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        seconds={stage: s for stage, s in seconds.items() if s > 0},
        step_s=step_s,
    )


def check_comparable(config: Config, where: str) -> None:
    """Raise Refused for a run of which the planner's seconds do not hold."""
    if config.cluster.pools or not colocated(config):
        raise Refused(f"{where}: its rollout or roles have devices of their own; runs on shared devices are compared")
    if others := [name for name in ("expert", "context", "sequence") if getattr(config.parallel, name) > 1]:
        raise Refused(
            f"{where}: parallel.{others[0]}: the planner's seconds know tensor and pipeline parallelism alone"
        )


def predicted_seconds(run: MeasuredRun, at: Nodes) -> dict[str, float]:
    """Return the predicted seconds of each stage of a run on such nodes, for its lengths. Raise Refused if its models
    do not fit."""
    return seconds_at(run.config, run.prompt_tokens, run.response_tokens, at)


def seconds_at(config: Config, prompt_tokens: float, response_tokens: float, at: Nodes) -> dict[str, float]:
    """Return the predicted seconds of each stage of a step for prompts and answers of these lengths. Raise Refused if
    the models do not fit."""
    c = config.cluster
    devices = c.nodes * c.ranks_per_node
    if devices > at.devices or devices % min(devices, at.devices_per_node):
        raise Refused(f"the run has {devices} ranks, the cluster file {at.devices} x {at.device.name}")
    p = config.parallel
    layout = Division(p.tensor, p.pipeline, devices // (p.tensor * p.pipeline))
    roles, nodes = planned_roles(config), some_devices(at, devices)
    work = replace(work_of(config, response_tokens), prompt_tokens=prompt_tokens)
    found = times_of(roles, [nodes], rules_of(config, work, layout))(tuple(r.name for r in roles), 0, devices)
    if found is None:
        raise Refused(f"the models of the run do not fit {devices} x {at.device.name} by the figures of the file")
    return {stage: s for stage, s in zip(stages_of(roles), found.seconds) if s}


def learned_figures(run: MeasuredRun, at: Nodes) -> dict[str, float]:
    """Return figures with which the planner predicts this run: `compute_share` by its updates; by its rollout `step_ms`
    if it took longer than reading memory does, else `bandwidth_share`. A share above 1 would be needed for a figure
    that is left out: the device is faster than its rates."""
    out = dict[str, float]()
    for _ in range(ROUNDS):  # an update reads memory too, and prompts are products too
        out |= _by_update(run, at, out)
        out |= _by_rollout(run, at, out)
    return out


def _by_update(run: MeasuredRun, at: Nodes, known: Mapping[str, float]) -> dict[str, float]:
    if (wanted := run.seconds.get("update")) is None:
        return {}
    share = _solved(run, at, known, "compute_share", "update", wanted)
    return {} if share is None else {"compute_share": share}


def _by_rollout(run: MeasuredRun, at: Nodes, known: Mapping[str, float]) -> dict[str, float]:
    if (wanted := run.seconds.get("rollout")) is None:
        return {}
    without = {name: value for name, value in known.items() if name == "compute_share"}
    least, more = (predicted_seconds(run, _with(at, without | {"step_ms": ms}))["rollout"] for ms in (0.0, 1.0))
    if wanted >= least:
        return {"step_ms": (wanted - least) / (more - least)}
    share = _solved(run, at, without | {"step_ms": 0.0}, "bandwidth_share", "rollout", wanted)
    return {"step_ms": 0.0} | ({} if share is None else {"bandwidth_share": share})


def _with(at: Nodes, figures: Mapping[str, float]) -> Nodes:
    device = at.device
    return replace(
        at,
        device=replace(
            device,
            compute_share=figures.get("compute_share", device.compute_share),
            bandwidth_share=figures.get("bandwidth_share", device.bandwidth_share),
            step_ms=figures.get("step_ms", device.step_ms),
        ),
    )


def _solved(
    run: MeasuredRun, at: Nodes, known: Mapping[str, float], share: str, stage: str, wanted: float
) -> float | None:
    """Return the value of a share with which the predicted seconds of a stage are those wanted; None if there is none
    up to 1. The seconds fall with the share."""

    def seconds(value: float) -> float:
        return predicted_seconds(run, _with(at, {**known, share: value}))[stage]

    low, high = 1e-9, 1.0
    if not seconds(high) <= wanted <= seconds(low):
        return None
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if seconds(middle) > wanted else (low, middle)
    return high


def beside(run: Path, at: Nodes) -> str:
    """Return a table of the predicted and the measured seconds of a run by stage, and the figures of the device with
    which they agree."""
    found = measured_run(run)
    predicted = predicted_seconds(found, at)
    rows = [("", "predicted, s", "measured, s", "error")]
    for stage, measured in found.seconds.items():
        if (s := predicted.get(stage)) is not None:
            rows.append((stage, f"{s:.3g}", f"{measured:.3g}", f"{s / measured - 1:+.0%}"))
    together, rest = sum(found.seconds.values()), found.step_s - sum(found.seconds.values())
    s = sum(predicted.get(stage, 0.0) for stage in found.seconds)
    rows.append(("together", f"{s:.3g}", f"{together:.3g}", f"{s / together - 1:+.0%}"))
    rows.append(("the rest of a step", "-", f"{max(rest, 0.0):.3g}", ""))
    learned = learned_figures(found, at)
    again = predicted_seconds(found, _with(at, learned))
    figures = ", ".join(f"{name}: {value:.3g}" for name, value in learned.items())
    apart = [stage for stage in ("rollout", "update") if stage in found.seconds]
    apart = [stage for stage in apart if not math.isclose(again[stage], found.seconds[stage], rel_tol=AGREES)]
    agreed = f"with these figures they agree: {figures}"
    if apart:
        agreed = f"no share up to 1 explains the {' and the '.join(apart)}: a rate of {at.device.name} is too low"
        agreed += f" ({figures})" if figures else ""
    lengths = f"answers of {found.response_tokens:.4g} tokens to prompts of {found.prompt_tokens:.4g}, on average"
    return "\n".join([f"{run} on {at.device.name} ({lengths})", *aligned(rows), agreed])
