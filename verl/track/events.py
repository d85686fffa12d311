"""The events of a run with their times: drawn, dispatched, scored, admitted, trained, published, saved.

Each attempt has one checksummed log, `events/attempt_0000.log`. A line is

    8c736521 {"kind":"trained","step":12,"attempt":0,"time_s":1767225600.25,"data":{"samples":["g3#0"]}}
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.track.log import Hide, Log, Note, cut_torn_line, logger, record_of, records, redone_from, whole_lines
from verl.track.metrics import METRICS_FILE

FOLDER = "events"
FINISHED = "finished"  # the kind of the event that ends a run
_FILE_NAME = re.compile(r"attempt_(\d+)\.log")


@dataclass(frozen=True, slots=True)
class Event:
    """One record. `time_s` is seconds since the epoch."""

    kind: str
    step: int
    attempt: int
    time_s: float
    data: Mapping[str, Any]


class EventLog(Log):
    """The writer of one attempt's events. Call `flush(fsync=True)` before something that depends on the events is
    written elsewhere. The event `resumed` at a step makes earlier attempts' events of this and later steps invalid."""

    def __init__(
        self,
        run_dir: Path,
        attempt: int,
        clock: Callable[[], float] = time.time,
        report: Callable[[str], None] = logger.warning,
        hide: Hide = str,
    ) -> None:
        for _, path in _files(run_dir):
            cut_torn_line(path)
        path = run_dir / FOLDER / f"attempt_{attempt:04d}.log"
        super().__init__(path, attempt, checksums=True, clock=clock, report=report, hide=hide)

    def append(self, kind: str, step: int, data: Mapping[str, Any]) -> None:
        assert kind.islower() and kind.isidentifier(), f"a kind is one lower-case word, got {kind!r}"
        self.put({"kind": kind, "step": step}, {"data": data})


def read_events(run_dir: Path, kinds: Collection[str] | None = None, note: Note = logger.warning) -> Iterator[Event]:
    """Yield the events of a run in the order of writing, also while the run continues, without those that a later
    attempt made invalid. Damaged records are left out, and `note` is called with a line for each."""
    files = _files(run_dir)
    began = {event.attempt: event.step for _, path in files for event in _events(path, {"resumed"}, lambda _: None)}
    for attempt, path in files:
        redone = redone_from(began, attempt)
        yield from (event for event in _events(path, kinds, note) if event.step < redone)


def _events(path: Path, kinds: Collection[str] | None, note: Note) -> Iterator[Event]:
    for line in whole_lines(path, note):
        # The kind is a line's first field: a long log is searched for few records without parsing the others.
        if kinds is None or line.split(b'"', 4)[3].decode() in kinds:
            yield Event(**record_of(line))


def next_attempt(run_dir: Path) -> int:
    """Return the number of the attempt that starts now; 0 in a new run directory."""
    used = [attempt for attempt, _ in _files(run_dir)]
    last = list(deque(records(run_dir / METRICS_FILE, lambda _: None), maxlen=1))  # a supervised run records no events
    by_metrics = [int(record["attempt"]) for record in last if isinstance(record.get("attempt"), int)]
    return max(used + by_metrics, default=-1) + 1


def _files(run_dir: Path) -> list[tuple[int, Path]]:
    """Return (attempt, file) in order of attempts."""
    found = [(_FILE_NAME.fullmatch(path.name), path) for path in (run_dir / FOLDER).glob("*")]
    return sorted((int(match[1]), path) for match, path in found if match)
