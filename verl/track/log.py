"""The append-only log of a run: JSON records, one per line, each with the attempt that wrote it.

`events/attempt_0000.log`, `metrics.jsonl` and `metrics_units.jsonl` are such logs. An attempt is one process that ran
or resumed the run. A crash can damage only the last line: readers leave it out, the next writer cuts it off. In a
checksummed log each line begins with the CRC-32 of its JSON text and a space (`cut -c10- attempt_*.log | jq` reads it).
Non-finite numbers are the tokens NaN, Infinity and -Infinity, as Python writes them."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from verl.track.files import sync_folder

logger = logging.getLogger(__name__)
Note = Callable[[str], None]  # called with a line for the user
MOST_WAITING = 256  # records that a killed process may lose
MOST_BYTES = 64 << 20  # bytes of text kept while the disk is full; further records are lost, and counted


Hide = Callable[[str], str]


class Log:
    """The writer of one attempt's log, for several threads. `put` only stores the record in memory; the next `flush`
    encodes and writes it, and `flush(fsync=True)` makes all records durable.

    If the last line was cut by a crash, opening the log removes it. While the disk is full or faulty, the text is kept
    in order for the next flush; `report` is called when this begins and when it ends.
    """

    def __init__(
        self,
        path: Path,
        attempt: int,
        *,
        checksums: bool = False,
        clock: Callable[[], float] = time.time,
        report: Callable[[str], None] = logger.warning,
        hide: Hide = str,
    ) -> None:
        """hide: removes secrets from a record's text."""
        assert attempt >= 0, f"attempts count from 0, got {attempt}"
        self.attempt, self._path, self._report, self._hide = attempt, path, report, hide
        self._text, self._stuck, self._lost = bytearray(), False, 0
        self._checksums, self._clock, self._writing = checksums, clock, threading.Lock()
        self._waiting: deque[dict[str, Any]] = deque()
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = not path.exists()
        self._file = path.open("ab", buffering=0)
        if fresh:
            sync_folder(path.parent)
        else:
            cut_torn_line(path)

    def put(self, head: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
        """Record `head`, attempt, time and `rest`, in this order. The values are anything that JSON has, numpy values
        too, and must not change later."""
        self._waiting.append({**head, "attempt": self.attempt, "time_s": self._clock(), **rest})
        if len(self._waiting) >= MOST_WAITING:
            self.flush()

    def restore(self, record: Mapping[str, Any]) -> None:
        """Append a record of an earlier attempt unchanged."""
        self._waiting.append(dict(record))

    def flush(self, fsync: bool = False) -> None:
        with self._writing:
            try:
                self._encode()
            finally:
                self._write(fsync)

    def close(self) -> None:
        """Flush and close. May be called again."""
        if not self._file.closed:
            try:
                self.flush(fsync=True)
            finally:
                self._file.close()
                if self._text or self._lost:
                    self._report(f"warning: {self._path}: {self._lost} records and {len(self._text)} bytes were lost")

    def _write(self, fsync: bool) -> None:
        """Write the text and remove the written part; a line that was written in part continues at the next call."""
        try:
            while self._text:
                del self._text[: self._file.write(self._text)]
            if fsync:
                os.fsync(self._file.fileno())
        except OSError as e:
            if not self._stuck:
                self._report(f"warning: {self._path} cannot be written ({e.strerror}): what is recorded waits for room")
            self._stuck = True
        else:
            if self._stuck:
                self._report(f"{self._path} is written again; {self._lost} records were lost")
            self._stuck, self._lost = False, 0

    def _encode(self) -> None:
        """Encode all waiting records. If one cannot be encoded, raise its error after the others are encoded."""
        wrong: TypeError | None = None
        while self._waiting:
            try:
                text = self._hide(_ENCODER.encode(self._waiting.popleft())).encode("utf-8", "backslashreplace")
            except TypeError as e:
                wrong = wrong or e
                continue
            if len(self._text) > MOST_BYTES:
                self._lost += 1
            else:
                self._text += b"%08x %s\n" % (zlib.crc32(text), text) if self._checksums else text + b"\n"
        if wrong is not None:
            raise wrong


def whole_lines(path: Path, note: Note = logger.warning) -> Iterator[bytes]:
    """Yield the complete lines of a log without their newlines, also while it is being written. An incomplete last line
    is left out.

    Damaged lines before others are left out too, and `note` is called with a line about them: since a writer removes an
    incomplete line before it appends, another program must have changed them.
    """
    yield from (raw[:-1] for _, raw in _whole(path, note))


def _whole(path: Path, note: Note) -> Iterator[tuple[int, bytes]]:
    """Yield each complete line of a log with the offset of its end in bytes."""
    if not path.is_file():
        return
    damaged: list[int] = []
    end = last = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            end += len(raw)
            if raw.endswith(b"\n") and _is_whole(raw[:-1]):
                last = number
                yield end, raw
            else:
                damaged.append(number)
    if inside := [number for number in damaged if number < last]:
        note(f"{path}: {len(inside)} damaged records are left out, the first is line {inside[0]}")


def records(path: Path, note: Note = logger.warning) -> Iterator[dict[str, Any]]:
    """Yield the records of a log; `note` is called with a line about those left out."""
    wrong = 0
    for line in whole_lines(path, note):
        try:
            yield record_of(line)
        except (ValueError, RecursionError):
            wrong += 1
    if wrong:
        note(f"{path}: {wrong} records that are no JSON are left out")


def record_of(line: bytes) -> dict[str, Any]:
    return json.loads(line[line.index(b"{") :])


def cut_torn_line(path: Path) -> None:
    """Remove the incomplete line at the end of a log."""
    kept = max((end for end, _ in _whole(path, lambda _: None)), default=0)
    if kept < path.stat().st_size:
        os.truncate(path, kept)


def redone_from(began: Mapping[int, int], attempt: int) -> float:
    """Return the first step of `attempt` that a later attempt repeated; infinity if none did.

    began: attempt -> its first step
    """
    return min((step for later, step in began.items() if later > attempt), default=math.inf)


def _is_whole(line: bytes) -> bool:
    if line.startswith(b"{"):
        return line.endswith(b"}")
    return line[8:9] == b" " and line[:8] == b"%08x" % zlib.crc32(line[9:])


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a record holds JSON and numpy values, not {type(value).__name__}: {value!r:.80}")


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_plain)
