"""The work of a server besides its engine, which must not block its event loop: JSON, templates, tokens and text are
computed in threads, pieces of streams in turns of the event loop."""

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
LARGE = 2**16  # bytes, or tokens: larger work waits for other large work only, and small work never waits for it
MOST_LARGE = 64  # large requests that wait, each with its body in memory
SWITCH_S = 0.001  # longest time that a thread keeps the interpreter while the event loop waits; Python has 0.005
TURN_S = 0.01  # for encoding pieces of streams before other tasks of the event loop run


class Threads:
    """Two threads for small work and two for large work, so that small work never waits for large work."""

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(2, thread_name_prefix="serve")
        self._large = ThreadPoolExecutor(2, thread_name_prefix="serve-large")
        self._waiting = 0

    async def run(self, size: int, compute: Callable[..., T], *args: object) -> T:
        """Return compute(*args), run in a thread. `size` is the bytes or tokens of its input or result. Raise ApiError
        429 if `MOST_LARGE` large requests are being computed or wait."""
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
        """Close the threads, and drop work that has not begun."""
        for pool in (self._small, self._large):
            pool.shutdown(wait=False, cancel_futures=True)


class Turns:
    """Turns of the event loop for work that may be ready in a thousand pieces at once: one piece is computed at a time,
    and other tasks that are ready run in between."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()

    async def next(self) -> None:
        """Wait for a turn of the event loop that no other caller has."""
        async with self._one:
            await asyncio.sleep(0)

    async def run(self, compute: Callable[[float], T]) -> T:
        """Return compute(end), run in such a turn. It should return soon after time.monotonic() reaches `end`."""
        async with self._one:
            await asyncio.sleep(0)
            return compute(time.monotonic() + TURN_S)


def favour_the_event_loop() -> None:
    """Make threads of this process hand over the interpreter soon, and exclude the present objects from garbage
    collection: a collection of all objects of torch and the tokenizer blocks every thread."""
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
