"""The two ways a run directory is written: whole files atomically, and logs of lines whose torn tail is detected."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path


def write_atomic(path: Path, content: bytes) -> None:
    """Write `content` so that a reader, or a crash at any moment, sees the old file or the new one and never a part.

    Temporary file in the same folder, fsync, rename, fsync of the folder. The temporary file does not survive a fault.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def whole_lines(path: Path, is_whole: Callable[[bytes], bool]) -> Iterator[bytes]:
    """The lines of a log without their newline; a torn last line (being written, or cut by a crash) is left out.

    Only the last line can be torn, since `open_log` cuts before anything is appended: a broken line elsewhere means
    that the file was damaged or edited, which is an error and not something to skip.
    """
    with path.open("rb") as file:
        number, broken = 0, 0
        for raw in file:
            if broken:
                raise ValueError(f"{path}:{broken}: damaged record (it is not the last one; was the file edited?)")
            number += 1
            line = raw[:-1]
            if not raw.endswith(b"\n") or not is_whole(line):
                broken = number
                continue
            yield line


def cut_torn_tail(path: Path, is_whole: Callable[[bytes], bool]) -> int:
    """Cut the torn last record of a log, if there is one; returns the number of bytes cut."""
    size = path.stat().st_size
    kept = sum(len(line) + 1 for line in whole_lines(path, is_whole))
    if kept < size:
        os.truncate(path, kept)
    return size - kept


def open_log(path: Path, is_whole: Callable[[bytes], bool]) -> LineLog:
    """Open a log for appending: its folder is made and a torn tail of an earlier process is cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        cut_torn_tail(path, is_whole)
    return LineLog(path)


class LineLog:
    """An append-only file of lines: buffered until `flush`, durable after `flush(fsync=True)`."""

    def __init__(self, path: Path) -> None:
        fresh = not path.exists()
        self.path = path
        self._file = path.open("ab", buffering=1 << 16)
        if fresh:
            sync_folder(path.parent)

    def append(self, line: bytes) -> None:
        assert b"\n" not in line, f"one record is one line: {line[:80]!r}"
        self._file.write(line + b"\n")

    def flush(self, fsync: bool = False) -> None:
        self._file.flush()
        if fsync:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if not self._file.closed:
            self.flush(fsync=True)
            self._file.close()
