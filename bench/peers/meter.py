"""The measurements of every arm in a step, and their output. Imports psutil alone: it runs in the peers' environments
too."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

DROPPED_FIRST_STEPS = 1  # they include the start, first allocations and first calls of kernels


Clocks = tuple[float, float]


def clocks() -> Clocks:
    """Wall and CPU seconds of this process."""
    return time.perf_counter(), time.process_time()


def elapsed(part: str, began: Clocks, ended: Clocks) -> dict[str, float]:
    """Return the values that `Meter.step` takes for a part of a step."""
    return {f"{part}_s": ended[0] - began[0], f"{part}_cpu_s": ended[1] - began[1]}


class Meter:
    """One record per step: everything between the ends of two steps, of this process and its children.

    meter = Meter()
    ...                                   # a step
    meter.step(rollout_s=0.7, ...)        # at its end
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._me = psutil.Process()
        self._started_s = self._me.create_time()
        self._children_mb = 0.0
        self._mark = self._now()

    def step(self, **measured: float) -> None:
        """The end of a step, with what the arm itself knows of it (rollout_s, update_s, token counts)."""
        now = self._now()
        wall_s, own_s, machine_s = (b - a for a, b in zip(self._mark, now))
        if not self.steps:  # counted from the start of the process, imports included
            wall_s, own_s = time.time() - self._started_s, now[1]
        self._children_mb = max(self._children_mb, sum(_rss_mb(p) for p in self._children()))
        self.steps.append(
            {
                "wall_s": wall_s,
                "cpu_s": own_s,
                "others_cores": max(0.0, machine_s - own_s) / wall_s,
                "load_1min": os.getloadavg()[0],
                **measured,
            }
        )
        self._mark = self._now()

    def write(self, path: Path, *, versions: Mapping[str, str], drop_last_steps: int = 0) -> None:
        own_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)
        found: dict[str, Any] = {
            "first_step_done_s": self.steps[0]["wall_s"],
            "peak_rss_mb": own_mb + self._children_mb,
            "versions": dict(versions),
            "steps": self.steps[DROPPED_FIRST_STEPS : len(self.steps) - drop_last_steps],
        }
        path.write_text(json.dumps(found))

    def _now(self) -> tuple[float, float, float]:
        """Seconds: wall; CPU of this process and its children; CPU that the whole machine was busy."""
        me = self._me.cpu_times()
        own_s = me.user + me.system + me.children_user + me.children_system
        machine = psutil.cpu_times()
        busy_s = sum(machine) - machine.idle - getattr(machine, "iowait", 0.0) - getattr(machine, "guest", 0.0)
        return time.perf_counter(), own_s + sum(_cpu_s(p) for p in self._children()), busy_s

    def _children(self) -> list[psutil.Process]:
        return self._me.children(recursive=True)


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


def _rss_mb(process: psutil.Process) -> float:
    try:
        return process.memory_info().rss / 1e6
    except psutil.NoSuchProcess:
        return 0.0
