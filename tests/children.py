"""The processes that this one has started."""

from __future__ import annotations

import contextlib

import psutil


def children(*, recursive: bool = True) -> list[psutil.Process]:
    """But for the server of `started`, which stays as long as the tests do, and what tracks its memory."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if not any("from multiprocessing." in word for word in child.cmdline()):
                found += [child, *(child.children(recursive=True) if recursive else ())]
    return found
