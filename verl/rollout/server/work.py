"""Threads for what a request makes the server compute beside its engine: JSON, templates, tokens, text. The event loop
only carries bytes, so that it answers others meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from verl.rollout.server.requests import ApiError

T = TypeVar("T")
LARGE = 2**16  # bytes, or tokens: what is larger waits for others that are, and nothing small waits for it
MOST_LARGE = 64  # of them that wait, each of which holds its body


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
