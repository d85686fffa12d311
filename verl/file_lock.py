"""A lock of a file that processes and threads share, with a deadline."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

LOOK_S = 0.002


@contextlib.contextmanager
def file_lock(path: Path, limit_s: float, late: Exception) -> Iterator[None]:
    """Lock the file `path` (created if it does not exist) inside the context, against all other users of the function.
    Raise `late` if another one keeps the lock for `limit_s`."""
    until_s = time.monotonic() + limit_s
    with path.open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise late from None
                time.sleep(LOOK_S)
        yield
