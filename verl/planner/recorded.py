"""The seconds that the planner predicts for a run at its start (`track.cluster_file`), and the page that shows them
beside those measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.config.schema import Config
from verl.errors import Refused
from verl.planner.beside import check_comparable, measured_run, predicted_seconds, seconds_at
from verl.planner.columns import aligned
from verl.planner.hardware import Device, Nodes, read_cluster

EVENT = "predicted"
"""The kind of the event that records a prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted seconds of a step, with all that they are computed from beside the configuration."""

    at: Nodes
    """The devices, with their figures as they were at the start."""
    prompt_tokens: float
    response_tokens: float
    """The lengths for which it is made: the limits of the run."""
    seconds: dict[str, float]
    """By stage."""

    def text(self) -> str:
        """Return the prediction as a part of a line."""
        each = ", ".join(f"{stage} {s:.3g} s" for stage, s in self.seconds.items())
        error = f"each up to {self.at.device.spread:g} times longer or shorter"
        return f"{each} per step on {self.at.device.name} ({error}), with prompts and answers at their limits"


def prediction_of(config: Config) -> Prediction | None:
    """Return the prediction for a run; None if it names no cluster file. Raise Refused if the file has not one node
    group, or the planner cannot predict the seconds of such a run."""
    if config.track.cluster_file is None:
        return None
    where = f"track.cluster_file={config.track.cluster_file}"
    groups = read_cluster(Path(config.track.cluster_file).expanduser())
    if len(groups) != 1:
        raise Refused(f"{where}: {len(groups)} node groups; a run is predicted on one: leave the others out")
    check_comparable(config, where)
    prompt_tokens, response_tokens = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    seconds = seconds_at(config, prompt_tokens, response_tokens, groups[0])
    return Prediction(at=groups[0], prompt_tokens=prompt_tokens, response_tokens=response_tokens, seconds=seconds)


def recorded_prediction(run: Path) -> Prediction | None:
    """Return the prediction that a run recorded at its last start; None if it has none."""
    from verl.track.events import read_events

    found = [event.data for event in read_events(run, {EVENT}, note=lambda _: None)]
    return _read(found[-1]) if found else None


def _read(data: Any) -> Prediction:
    at = {**data["at"], "device": Device(**data["at"]["device"])}
    return Prediction(**{**data, "at": Nodes(**at)})


def recorded_page(run: Path) -> str:
    """Return a table of the predicted seconds of a run beside those measured: as predicted at the start, and by the
    same figures for the lengths that its prompts and answers had; "" for a run without a prediction."""
    if (found := recorded_prediction(run)) is None:
        return ""
    try:
        measured = measured_run(run)
    except Refused as e:
        return f"predicted at the start: {found.text()}; nothing is measured yet ({e})"
    by_length, rows = (
        predicted_seconds(measured, found.at),
        [("", "at the start, s", "by length, s", "measured, s", "error")],
    )
    for stage, s in measured.seconds.items():
        if stage in by_length:
            error = f"{by_length[stage] / s - 1:+.0%}"
            rows.append((stage, f"{found.seconds[stage]:.3g}", f"{by_length[stage]:.3g}", f"{s:.3g}", error))
    spent, wanted = sum(measured.seconds.values()), sum(by_length.get(stage, 0.0) for stage in measured.seconds)
    start = sum(found.seconds.get(stage, 0.0) for stage in measured.seconds)
    rows.append(("together", f"{start:.3g}", f"{wanted:.3g}", f"{spent:.3g}", f"{wanted / spent - 1:+.0%}"))
    limit, mean = f"{found.response_tokens:.4g} tokens, the limit", f"{measured.response_tokens:.4g}, the mean"
    about = f"predicted for {found.at.device.name}: at the start for answers of {limit}; by length for those of {mean}"
    return "\n".join([about, *aligned(rows)])
