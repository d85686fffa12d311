"""Temporary folders that are removed at the end of their process, or, if it was killed, by the next process that makes
such a folder.

A file lock marks folders in use. The kernel keeps it for a process of any container or name, and releases it when the
process ends. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path


def own_folder(parent: Path, prefix: str) -> tuple[Path, int]:
    """Make a new folder, and remove those with this prefix that no process has locked. Return the folder and a
    descriptor with its lock, which lasts until the descriptor is closed in this process and all forks. On a file system
    without locks, nothing is removed."""
    for left in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another user's folder, or held, or just removed
            fd = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
            finally:
                os.close(fd)
    made = Path(tempfile.mkdtemp(prefix=f".{prefix}{os.getpid()}-", dir=parent))
    fd = os.open(made, os.O_RDONLY)
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX)
    # with this name, other processes find the folder and see that it is held
    return made.rename(made.with_name(made.name[1:])), fd


class OwnFolder:
    """A temporary folder like `tempfile.TemporaryDirectory`. It is removed by `cleanup()`, by the end of this object or
    of the process, and after a kill by the next process that makes a folder with this prefix."""

    def __init__(self, prefix: str) -> None:
        self.path, held = own_folder(Path(tempfile.gettempdir()), prefix)
        self.cleanup = weakref.finalize(self, _remove, self.path, held)


def _remove(folder: Path, held: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(held)
