"""Where the server computes what a request needs beside its engine: JSON, templates, tokens and text in threads, the
pieces of streams in turns of the event loop. The event loop has time for others meanwhile."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from verl.rollout.server.requests import ApiError

T = TypeVar("T")
LARGE = 2**16  # bytes, or tokens: what is larger waits for others that are, and nothing small waits for it
MOST_LARGE = 64  # of them that wait, each of which holds its body
SWITCH_S = 0.001  # that a thread may hold the interpreter while the event loop waits for it; Python's own is 0.005
TURN_S = 0.01  # in which pieces of streams are written, before everything else has its turn


class Threads:
    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(2, thread_name_prefix="serve")
        self._large = ThreadPoolExecutor(2, thread_name_prefix="serve-large")
        self._waiting = 0

    async def run(self, size: int, compute: Callable[..., T], *args: object) -> T:
        """The result of compute(*args) in a thread. size: of its input or its result. ApiError 429: too many wait."""
        loop, run = asyncio.get_running_loop(), partial(compute, *args)
        if size <= LARGE:
            return await loop.run_in_executor(self._small, run)
        if self._waiting >= MOST_LARGE:
            raise ApiError(429, f"{self._waiting} large requests are being read or answered; try again")
        self._waiting += 1
        try:
            return await loop.run_in_executor(self._large, run)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """What has not begun is dropped."""
        for pool in (self._small, self._large):
            pool.shutdown(wait=False, cancel_futures=True)


class Turns:
    """The event loop's time for what there may be a thousand of at one moment: one at a time, and all else that is
    ready between two."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()

    async def next(self) -> None:
        """Wait for a turn of the event loop that no other caller has."""
        async with self._one:
            await asyncio.sleep(0)

    async def run(self, compute: Callable[[float], T]) -> T:
        """The result of compute(end) in such a turn; it ends soon after time.monotonic() reaches `end`."""
        async with self._one:
            await asyncio.sleep(0)
            return compute(time.monotonic() + TURN_S)


def favour_the_event_loop() -> None:
    """Make threads of this process hand the interpreter over soon, and leave out of garbage collections what is there
    by now: one that looks at all of torch's and the tokenizer's objects stops every thread."""
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
