"""The figures of a device that agree best with the times of several runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from verl.errors import Refused
from verl.planner.beside import learned_figures, measured_run, predicted_seconds
from verl.planner.hardware import Nodes, read_cluster

ROUNDS, NUDGE = 30, 1e-4
FITTED = ("compute_share", "half_width", "decode_share", "bandwidth_share", "step_ms")
"""The figures that are learned from several runs: two of passes, three of decode steps."""
FEWEST_RUNS = 4
"""Runs of different sizes that determine them."""
LEAST_SHARE = 0.02
"""The least singular value of the errors' slopes, of the largest, at which runs determine all figures: the recorded
runs have 0.1, and four runs of one size 1e-17."""
_START = (2.0, 0.0, 2.0, 2.0, 0.1)


@dataclass(frozen=True, slots=True)
class Observation:
    """The times of a run."""

    predicted: Callable[[Nodes], Mapping[str, float]]
    """The predicted seconds of its stages on such nodes."""
    measured: Mapping[str, float]

    def errors(self, at: Nodes) -> list[float]:
        """Return the relative errors of the stages that are predicted and measured."""
        found = self.predicted(at)
        return [found[stage] / s - 1 for stage, s in self.measured.items() if stage in found]


def fitted_nodes(observations: Sequence[Observation], at: Nodes) -> Nodes:
    """Return the nodes with the figures of least squared relative errors, by Gauss-Newton in the variables in which the
    seconds are almost linear: reciprocals of shares, the width over its share, and milliseconds. Raise Refused if the
    runs are too much alike to determine them."""
    x = np.array(_START)
    least = np.array([1.0, 0.0, 1.0, 1.0, 0.0])  # a share is at most 1

    def errors(values: np.ndarray) -> np.ndarray:
        nodes = _with_figures(at, values)
        return np.array([e for one in observations for e in one.errors(nodes)])

    for _ in range(ROUNDS):
        now = errors(x)
        slopes = [(errors(x + NUDGE * unit) - now) / NUDGE for unit in np.eye(len(x))]
        matrix = np.stack(slopes, axis=1)
        step, *_ = np.linalg.lstsq(matrix, -now, rcond=None)
        x = np.maximum(least, x + step)
    norms = np.linalg.norm(matrix, axis=0)
    singular = np.linalg.svd(matrix / np.where(norms > 0, norms, 1), compute_uv=False)
    if len(singular) < len(x) or singular[-1] < LEAST_SHARE * singular[0]:
        raise Refused(
            f"learn: {len(observations)} runs do not determine {', '.join(FITTED)}, since their sizes are too much "
            f"alike; give runs of other models, answers and batches, or fewer than {FEWEST_RUNS}"
        )
    return _with_figures(at, x)


def _with_figures(at: Nodes, values: np.ndarray) -> Nodes:
    share, width, decode, read, step_ms = map(float, values)
    figures: dict[str, Any] = {
        "compute_share": 1 / share,
        "half_width": width / share,
        "decode_share": 1 / decode,
        "bandwidth_share": 1 / read,
    }
    return replace(at, device=replace(at.device, **figures, step_ms=step_ms))


def learned_file(runs: Sequence[Path], cluster_file: Path) -> str:
    """Return the text of the cluster file of one node group with the figures that agree with these runs: below
    `FEWEST_RUNS` the median of those of each run, else those that fit all. Raise Refused if none is determined."""
    groups = read_cluster(cluster_file)
    if len(groups) != 1:
        raise Refused(f"{cluster_file}: {len(groups)} node groups; the figures of one are learned from runs")
    measured = [measured_run(run) for run in runs]
    if len(runs) >= FEWEST_RUNS:
        seen = [Observation(partial(predicted_seconds, run), run.seconds) for run in measured]
        device = fitted_nodes(seen, groups[0]).device
        figures = {name: float(getattr(device, name)) for name in FITTED}
    else:
        figures = _medians([learned_figures(run, groups[0]) for run in measured])
    if not figures:
        raise Refused(f"{', '.join(map(str, runs))}: no figures agree with the run; the rates of the file are too low")
    entry = yaml.safe_load(cluster_file.read_text())[0]
    learned = entry | {name: float(f"{value:.4g}") for name, value in figures.items()}
    about = f"# {', '.join(figures)}: of {', '.join(map(str, runs))}\n"
    return about + yaml.safe_dump([learned], sort_keys=False)


def _medians(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for one in found for name in one)
    return {name: statistics.median(one[name] for one in found if name in one) for name in names}
