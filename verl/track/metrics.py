"""The metrics of a step, reduced once and written to `metrics.jsonl`; and `TimeLedger`, which divides a step's time
into phases."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from verl.track.files import write_atomic
from verl.track.log import Log, Note, logger, records, redone_from
from verl.types import Metric

METRICS_FILE = "metrics.jsonl"
KEPT_FILE = "metrics_kept.jsonl"  # one line: the metrics of a step that is being saved
UNITS_FILE = "metrics_units.jsonl"
PHASE_COLORS: Mapping[str, str] = {
    "rollout": "#3987e5",
    "data": "#199e70",
    "reward_model": "#86b6ef",
    "reference": "#6fc6a5",
    "old_logprobs": "#3fb58b",
    "values": "#0e7a55",
    "advantages": "#a5dcc7",
    "update_critic": "#e8966f",
    "update": "#d95926",
    "publish": "#c98500",
    "evaluate": "#9085e9",
    "checkpoint": "#d55181",
    "log": "#b0afa9",
    "other": "#6f6e69",
}
"""The phases of a step, in the order in which they are shown. Others may be used; `other` is the time outside of all
phases."""
PHASES = tuple(PHASE_COLORS)

_HEAD = ("step", "attempt", "time_s")
_PHASE = re.compile(r"[a-z][a-z0-9_]*")
_WORDS = {"mean": "mean per {}", "sum": "sum over {}s", "max": "max over {}s", "min": "min over {}s", "last": "last {}"}


def reduce(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the reduced metrics as numbers, after all parts were merged. All metrics are reduced here. The mean of no
    values is NaN."""
    return {name: float(metric.value) for name, metric in metrics.items()}


def units_of(metrics: Mapping[str, Metric]) -> dict[str, str]:
    """Return a text with the unit and reduction of each metric, as `mean per token` or `max over sequences`, for the
    report's captions."""
    return {name: _WORDS[metric.kind].format(metric.unit) for name, metric in metrics.items()}


def held_out_word(steps: Iterable[Mapping[str, float]]) -> str:
    """Return the word for the mean of a run's held-out rewards: `accuracy` if all rewards are 0 or 1, else `score`. For
    records without graded_share this is decided by the means."""
    for values in steps:
        for name, value in values.items():
            mean = name.startswith("eval/") and "/acc/" in name
            if name.startswith("eval/graded_share/") or (mean and (value < 0 or value > 1)):
                return "score"
    return "accuracy"


@dataclass(frozen=True, slots=True)
class MetricLine:
    """The metrics of one step, as the last attempt that ran the step recorded them."""

    step: int
    attempt: int
    time_s: float
    values: Mapping[str, float]


class MetricsLog:
    """Writes one JSON object per call: step, attempt, time_s (epoch), then every metric by its name, null if it is not
    finite. The line is on disk when `log` returns. The unit of a metric is recorded when it first occurs."""

    def __init__(
        self,
        run_dir: Path,
        attempt: int,
        clock: Callable[[], float] = time.time,
        report: Callable[[str], None] = logger.warning,
    ) -> None:
        self._values = Log(run_dir / METRICS_FILE, attempt, clock=clock, report=report)
        self._kept, self._clock = run_dir / KEPT_FILE, clock
        for record in records(self._kept):  # an attempt that ended before it logged the step
            self._values.restore(record)
        self._values.flush(fsync=True)
        self._kept.unlink(missing_ok=True)
        self._units = Log(run_dir / UNITS_FILE, attempt, clock=clock, report=report)
        self._known: dict[str, str] = {}

    def keep(self, step: int, values: Mapping[str, float]) -> None:
        """Write the present metrics of a step to disk as a precaution, until `log` writes the final ones."""
        head = {"step": step, "attempt": self._values.attempt, "time_s": self._clock()}
        with suppress(OSError):  # a full disk: `log` writes them later and reports it
            write_atomic(self._kept, json.dumps({**head, **_strict_values(values)}).encode() + b"\n")

    def log(self, step: int, values: Mapping[str, float], units: Mapping[str, str] = {}) -> None:
        assert not set(values) & set(_HEAD), f"a metric may not be named like one of {_HEAD}"
        self._values.put({"step": step}, _strict_values(values))
        self._values.flush(fsync=True)
        self._kept.unlink(missing_ok=True)
        new = dict(units.items() - self._known.items())
        if new:
            self._known |= new
            self._units.put({"step": step}, {"units": new})
            self._units.flush()

    def close(self) -> None:
        self._values.close()
        self._units.close()


def read_metrics(run_dir: Path, note: Note = logger.warning) -> list[MetricLine]:
    """Return one entry per step, in order. If a step was logged again, the later value of each name counts. Records of
    an earlier attempt after the step where a later one began are left out, so that curves never overlap. `note` is
    called with a line about damaged lines, which are left out."""
    lines, damaged = list[MetricLine](), 0
    for record in (*records(run_dir / METRICS_FILE, note), *records(run_dir / KEPT_FILE, note)):
        try:
            step, attempt, time_s = int(record.pop("step")), int(record.pop("attempt")), float(record.pop("time_s"))
            lines.append(MetricLine(step, attempt, time_s, {name: _number(value) for name, value in record.items()}))
        except (KeyError, ValueError, TypeError, OverflowError):
            damaged += 1
    if damaged:
        note(f"{run_dir / METRICS_FILE}: {damaged} records that are no metrics of a step are left out")
    began: dict[int, int] = {}
    for line in lines:
        began[line.attempt] = min(line.step, began.get(line.attempt, line.step))
    steps: dict[int, MetricLine] = {}
    for line in lines:
        if line.step <= redone_from(began, line.attempt):
            earlier = steps[line.step].values if line.step in steps else {}
            steps[line.step] = replace(line, values={**earlier, **line.values})
    return [steps[step] for step in sorted(steps)]


def read_units(run_dir: Path, note: Note = logger.warning) -> dict[str, str]:
    units = (record.get("units") for record in records(run_dir / UNITS_FILE, note))
    return {name: str(unit) for found in units if isinstance(found, dict) for name, unit in found.items()}


def _strict_values(values: Mapping[str, float]) -> dict[str, float | None]:
    """Return the values that JSON has a number for; null for NaN and the infinities."""
    return {name: float(value) if math.isfinite(value) else None for name, value in values.items()}


def _number(value: float | str | None) -> float:
    """Return a value of the log as a float. NaN is null; earlier versions wrote the texts "NaN" and "Infinity"."""
    return math.nan if value is None else float(value)


def phase_order(names: Iterable[str]) -> list[str]:
    """Return the phases in the order of `PHASES`; unknown phases follow by name, before `other`."""
    rank = {name: float(i) for i, name in enumerate(PHASES)}
    return sorted(names, key=lambda name: (rank.get(name, len(PHASES) - 1.5), name))


class TimeLedger:
    """Assigns every second of a step to exactly one phase (the inner one if they are nested; `other` outside all), so
    that the phases sum to the wall time. Phases close in the reverse order of opening."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = self._mark = clock()
        self._end: float | None = None
        self._open: list[str] = ["other"]
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        assert _PHASE.fullmatch(name), f"a phase is one lower-case word, got {name!r}"
        assert self._end is None, f"phase {name!r} opened after the step's ledger was stopped"
        self._book()
        self._open.append(name)
        depth = len(self._open)
        try:
            yield
        finally:
            assert self._open[depth - 1 :] == [name], f"phase {name!r} closed while {self._open[1:]} are open"
            self._book()
            self._open.pop()

    def stop(self) -> None:
        """End the step. Phases that are still open are closed by their own `with`, with no further time."""
        self._book()
        if self._end is None:
            self._end = self._mark

    @property
    def wall_s(self) -> float:
        return (self._clock() if self._end is None else self._end) - self._start

    def seconds(self) -> dict[str, float]:
        """Return seconds by phase so far, in the order of `PHASES`, including the present phase."""
        self._book()
        return {name: self._seconds[name] for name in phase_order(self._seconds)}

    def metrics(self) -> dict[str, float]:
        seconds = self.seconds()
        wall_s = self._mark - self._start
        out = {f"timing_s/{name}": s for name, s in seconds.items()}
        out |= {f"timing_share/{name}": s / wall_s if wall_s > 0 else 0.0 for name, s in seconds.items()}
        return out | {"perf/time_per_step": wall_s}

    def _book(self) -> None:
        if self._end is None:
            now, name = self._clock(), self._open[-1]
            self._seconds[name] = self._seconds.get(name, 0.0) + (now - self._mark)
            self._mark = now
