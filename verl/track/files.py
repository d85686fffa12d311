"""Write whole files atomically."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import psutil

_TEMPORARY = re.compile(r"\..+\.(\d+)-[0-9a-f]{8}\.tmp")
_ABANDONED_S = 3600.0  # after so long without a write the writer is dead, also on another machine


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that is renamed to `path` at the end of the block. Readers, also after a crash, find the
    old or the new file, never a part of it: the file is written, synced and renamed, and the folder is synced. After an
    exception the temporary file is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as e:
        temporary.unlink(missing_ok=True)
        if isinstance(e, OSError) and e.filename in (None, str(temporary)):
            e.filename = str(path)
        raise
    sync_folder(path.parent)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of killed writers in a folder and in its subfolders."""
    for path in (*folder.glob(".*.tmp"), *folder.glob("*/.*.tmp")):
        match = _TEMPORARY.fullmatch(path.name)
        with suppress(OSError):  # removed meanwhile, or not ours
            if match is None or path.is_dir():
                continue
            if not psutil.pid_exists(int(match[1])) or time.time() - path.lstat().st_mtime > _ABANDONED_S:
                path.unlink()


def write_atomic(path: Path, content: bytes) -> None:
    with replacing(path) as file:
        file.write(content)


def sync_folder(folder: Path) -> None:
    """Sync `folder`, so that renames and new names in it survive a crash of the machine."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
