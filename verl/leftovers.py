"""Folders of a process, which are removed after it: by itself, or, if it was killed, by the next one that makes such a
folder. A lock says which of them live: the kernel holds it for a process of any container or name, and ends it with
that. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path


def own_folder(parent: Path, prefix: str) -> tuple[Path, int]:
    """Make a new folder, and remove those of this prefix that nothing holds -> the folder, and a descriptor that holds
    it until it is closed, here and in all forks. Where a file system knows no locks, nothing is removed."""
    for left in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another user's, held, or just gone
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
    return made.rename(made.with_name(made.name[1:])), fd  # others look for it from here on, and find it held


class OwnFolder:
    """A temporary folder, as `tempfile.TemporaryDirectory`: `cleanup()`, its own end or that of the process removes it,
    and after a kill the next one of this prefix does."""

    def __init__(self, prefix: str) -> None:
        self.path, held = own_folder(Path(tempfile.gettempdir()), prefix)
        self.cleanup = weakref.finalize(self, _remove, self.path, held)


def _remove(folder: Path, held: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(held)
