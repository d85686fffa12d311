"""The append-only log of a run: what was drawn, dispatched, scored, admitted, trained, published and saved, and when.

`runs/<name>/events/attempt_0000.log` holds one file per attempt (one process that ran or resumed the run). A line is

    8c736521 {"kind":"trained","step":12,"attempt":0,"time_s":1767225600.25,"data":{"samples":["g3#0"]}}

the CRC-32 of the JSON text, a space, the text: `cut -c10- attempt_*.log | jq` reads it. Non-finite numbers are the
tokens NaN, Infinity and -Infinity, as Python writes them.
"""

from __future__ import annotations

import json
import re
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl.track.files import cut_torn_tail, open_log, whole_lines

FOLDER = "events"
FLOW_KINDS = frozenset({"drawn", "dispatched", "turn", "scored", "admitted", "rejected", "dropped", "trained"})
"""Kinds that exist because a step was worked on: the first step with one of them is where an attempt began."""

MOST_WAITING = 256  # records that a killed process may lose

_HEAD = b'01234567 {"kind":"'
_FILE_NAME = re.compile(r"attempt_(\d+)\.log")
_KIND = re.compile(r"[a-z][a-z_]*")


@dataclass(frozen=True, slots=True)
class Event:
    """One record. `time_s` is seconds since the epoch."""

    kind: str
    step: int
    attempt: int
    time_s: float
    data: Mapping[str, Any]


def next_attempt(run_dir: Path) -> int:
    """The number of the attempt that starts now: 0 in a new run directory."""
    return max((number for number, _ in _files(run_dir)), default=-1) + 1


class EventLog:
    """The writer of one attempt. Safe to append to from several threads; `flush(fsync=True)` at the end of each step.

    Opening cuts the torn tail that a crash left, here and in the files of earlier attempts.
    """

    def __init__(self, run_dir: Path, attempt: int, clock: Callable[[], float] = time.time) -> None:
        assert attempt >= 0, f"attempts count from 0, got {attempt}"
        for number, path in _files(run_dir):
            if number != attempt:
                cut_torn_tail(path, _is_whole)
        self.attempt = attempt
        self._clock = clock
        self._writing = threading.Lock()
        self._waiting: deque[dict[str, Any]] = deque()  # for their text: made at the next flush, beside the loop
        self._log = open_log(run_dir / FOLDER / f"attempt_{attempt:04d}.log", _is_whole)

    def append(self, kind: str, step: int, data: Mapping[str, Any]) -> None:
        """Record that `kind` happened in `step`. `data`: anything JSON holds, numpy scalars and arrays too; not changed
        any more, since the text is made when it is written."""
        assert _KIND.fullmatch(kind), f"a kind is one lower-case word, got {kind!r}"
        record = {"kind": kind, "step": step, "attempt": self.attempt, "time_s": self._clock(), "data": data}
        self._waiting.append(record)
        if len(self._waiting) >= MOST_WAITING:
            self.flush()

    def resume_at(self, step: int) -> None:
        """This attempt continues with `step`: whatever earlier attempts recorded of it and of later steps is void.

        Without this record the first step with a flow event (drawn ... trained) counts as the place.
        """
        self.append("resumed", step, {})

    def flush(self, fsync: bool = False) -> None:
        with self._writing:
            try:
                self._write()
            finally:
                self._log.flush(fsync)

    def close(self) -> None:
        with self._writing:
            try:
                self._write()
            finally:
                self._log.close()

    def _write(self) -> None:
        """All that wait; one that is no JSON is an error of ours, raised when the others are written."""
        wrong: TypeError | None = None
        while self._waiting:
            try:
                body = _ENCODER.encode(self._waiting.popleft()).encode("utf-8", "backslashreplace")
            except TypeError as e:
                wrong = wrong or e
                continue
            self._log.append(b"%08x %s" % (zlib.crc32(body), body))
        if wrong is not None:
            raise wrong


def read_events(run_dir: Path, kinds: Collection[str] | None = None, *, every_attempt: bool = False) -> Iterator[Event]:
    """The records of a run in order of writing, also while the run goes on.

    What a later attempt did again is left out: the records of an attempt at or after the step where a later attempt
    began, and those of the same kind and step as a record of a later attempt. `every_attempt` gives all.
    """
    files = _files(run_dir)
    standing = None if every_attempt else _Standing.of(files)
    for _, path in files:
        for line in whole_lines(path, _is_whole):
            if kinds is not None and _kind_of(line) not in kinds:
                continue
            event = _decode(line)
            if standing is None or standing.holds(event):
                yield event


@dataclass(frozen=True, slots=True)
class _Standing:
    """Where each attempt began, and the last attempt of each (kind, step)."""

    began: Mapping[int, int]
    last: Mapping[tuple[str, int], int]

    @classmethod
    def of(cls, files: list[tuple[int, Path]]) -> _Standing:
        began: dict[int, int] = {}
        resumed: dict[int, int] = {}
        last: dict[tuple[str, int], int] = {}
        if len(files) > 1:
            for number, path in files:
                for line in whole_lines(path, _is_whole):
                    event = _decode(line)
                    last[event.kind, event.step] = number
                    if event.kind == "resumed":
                        resumed[number] = event.step
                    elif event.kind in FLOW_KINDS:
                        began[number] = min(event.step, began.get(number, event.step))
        return cls(began | resumed, last)

    def holds(self, event: Event) -> bool:
        if self.last.get((event.kind, event.step), event.attempt) > event.attempt:
            return False
        return all(event.step < step for attempt, step in self.began.items() if attempt > event.attempt)


def _files(run_dir: Path) -> list[tuple[int, Path]]:
    folder = run_dir / FOLDER
    if not folder.is_dir():
        return []
    found = [(_FILE_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    return sorted((int(match[1]), path) for match, path in found if match)


def _is_whole(line: bytes) -> bool:
    return line[8:9] == b" " and line[:8] == b"%08x" % zlib.crc32(line[9:])


def _kind_of(line: bytes) -> str:
    """Without parsing the record: the kind is its first field, and a long log is searched for few records."""
    return line[len(_HEAD) : line.index(b'"', len(_HEAD))].decode()


def _decode(line: bytes) -> Event:
    return Event(**json.loads(line[9:]))


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"an event holds JSON and numpy values, not {type(value).__name__}: {value!r:.80}")


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_plain)
