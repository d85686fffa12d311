"""The thread in which an engine reads new weights while its steps run in another one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class LoadThread:
    """One thread that reads weights. `waits` has a future of each running call: an error that the engine sets on it
    ends the call."""

    def __init__(self, enter: Callable[[], None]) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout-load", initializer=enter)
        self.waits = set[asyncio.Future[Any]]()

    async def run(self, call: Callable[[], T]) -> T:
        """Run `call` in the thread and return its result. If the engine fails or is closed meanwhile, raise that error
        at once."""
        loop = asyncio.get_running_loop()
        job, stopped = loop.run_in_executor(self._thread, call), loop.create_future()
        self.waits.add(stopped)
        try:
            await asyncio.wait({job, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return await (stopped if stopped.done() else job)
        finally:
            self.waits.discard(stopped)
            job.cancel()  # no effect if it has ended

    def close(self) -> None:
        self._thread.shutdown(wait=False)
