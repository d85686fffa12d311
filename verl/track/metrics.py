"""Metrics of a step: reduced once from (total, count, unit), and the ledger of where the step's time went."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from verl.track.files import write_atomic
from verl.types import Metric

UNITS_FILE = "metrics_units.json"
PHASES = (
    "rollout",
    "reward_wait",
    "experience",
    "ref",
    "old_logprobs",
    "values",
    "advantages",
    "update",
    "publish",
    "evaluate",
    "checkpoint",
    "log",
    "other",
)
"""The phases of a step in the order in which they are shown. Others may be used; `other` is what no phase covers."""

_PHASE = re.compile(r"[a-z][a-z0-9_]*")


def reduce(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The one place where a metric becomes a number, after all its parts were merged. A mean of nothing is NaN."""
    return {name: float(metric.value) for name, metric in metrics.items()}


def units_of(metrics: Mapping[str, Metric]) -> dict[str, str]:
    """What each number is taken over, in words: `mean per token`, `max over sequences`."""
    words = {
        "mean": "mean per {}",
        "sum": "sum over {}s",
        "max": "max over {}s",
        "min": "min over {}s",
        "last": "last {}",
    }
    return {name: words[metric.kind].format(metric.unit) for name, metric in metrics.items()}


def write_units(run_dir: Path, metrics: Mapping[str, Metric]) -> None:
    """Keep the units of all metrics seen in `metrics_units.json`, which captions the charts of the report."""
    known = read_units(run_dir)
    merged = known | units_of(metrics)
    if merged != known:
        write_atomic(run_dir / UNITS_FILE, json.dumps(merged, indent=1, sort_keys=True).encode())


def read_units(run_dir: Path) -> dict[str, str]:
    path = run_dir / UNITS_FILE
    return json.loads(path.read_bytes()) if path.exists() else {}


def phase_order(names: Iterable[str]) -> list[str]:
    """As in `PHASES`; unknown phases by name, before `other`."""
    rank = {name: float(i) for i, name in enumerate(PHASES)}
    return sorted(names, key=lambda name: (rank.get(name, len(PHASES) - 1.5), name))


class TimeLedger:
    """Books every second of a step to exactly one phase, so that the phases sum to the wall time.

        ledger = TimeLedger()
        with ledger.phase("experience"):
            with ledger.phase("ref"):           # booked to ref, not to experience
                ...
        ledger.stop()
        ledger.metrics()                        # timing_s/ref, timing_s/experience, timing_s/other, shares, step time

    Time outside every phase is `other`. It follows one line of control: phases close in the reverse order of opening,
    also when an exception passes. Work that runs beside the step (a background publish) has its own clock.
    """

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
        """End the step. Phases that are still open are closed by their own `with`, at no cost."""
        self._book()
        if self._end is None:
            self._end = self._mark

    @property
    def wall_s(self) -> float:
        return (self._clock() if self._end is None else self._end) - self._start

    @property
    def current(self) -> str:
        return self._open[-1]

    def seconds(self) -> dict[str, float]:
        """Seconds by phase so far, in the order of `PHASES`, the phase in progress included."""
        self._book()
        return {name: self._seconds[name] for name in phase_order(self._seconds)}

    def metrics(self) -> dict[str, float]:
        seconds = self.seconds()
        wall_s = self._mark - self._start
        out = {f"timing_s/{name}": s for name, s in seconds.items()}
        out |= {f"timing_share/{name}": s / wall_s if wall_s > 0 else 0.0 for name, s in seconds.items()}
        return out | {"perf/time_per_step": wall_s}

    def _book(self) -> None:
        if self._end is not None:
            return
        now = self._clock()
        name = self._open[-1]
        self._seconds[name] = self._seconds.get(name, 0.0) + (now - self._mark)
        self._mark = now
