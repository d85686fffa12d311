"""Temporary folders of a process. The process removes them at its end; if it was killed, the next process that makes
such a folder does. A lock marks folders in use: the kernel holds it for a process of any container or name, and
releases it when the process ends. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path


def own_folder(parent: Path, prefix: str) -> tuple[Path, int]:
    """Make a new folder, and remove the folders of this prefix that no process holds. Return the folder and a
    descriptor that holds it until it is closed, here and in all forks. On a file system without locks, nothing is
    removed."""
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
    """A temporary folder like `tempfile.TemporaryDirectory`. `cleanup()`, its own end or the end of the process removes
    it; after a kill, the next folder of this prefix does."""

    def __init__(self, prefix: str) -> None:
        self.path, held = own_folder(Path(tempfile.gettempdir()), prefix)
        self.cleanup = weakref.finalize(self, _remove, self.path, held)


def _remove(folder: Path, held: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(held)
