"""Run calls that may block in threads, and limit their number. A thread cannot be ended, so a call that hangs keeps its
place."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from verl.tools.function_tool import ToolBroken

Ended = tuple[BaseException | None, Any]  # the error that a call in a thread raised, and its result


class Places(asyncio.Semaphore):
    """A semaphore for the calls of a tool. A call that is no longer awaited keeps its place until its thread ends."""

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self.total, self.overdue = total, 0

    async def take(self, tool: str, limit_s: float) -> None:
        """Wait for a free place and take it. Raise ToolBroken if, after `limit_s`, all places belong to calls that are
        no longer awaited."""
        if not self.locked():
            await self.acquire()
            return
        mine = asyncio.ensure_future(self.acquire())
        try:
            while not (await asyncio.wait([mine], timeout=limit_s))[0]:
                if self.overdue == self.total:
                    fix = "end them in the function, or give the tool processes=N, which are ended with such a call"
                    raise ToolBroken(
                        f"{self.total} calls of {tool} go on after their deadline, and no more may run: {fix}"
                    )
        except BaseException:
            if not mine.cancel():
                self.release()
            raise

    def give_back(self, *threads: asyncio.Future[Ended]) -> None:
        """Return the place of a call after its thread, if it has one, has ended."""
        self.overdue += 1
        for busy in threads:
            busy.add_done_callback(self._ended)
        if not threads:
            self._ended()

    def _ended(self, *_: asyncio.Future[Ended]) -> None:
        self.overdue -= 1
        self.release()


async def in_thread(function: Callable[[], Any], name: str) -> Any:
    """Run a call that may block in a thread of its own, and return its result."""
    return value_of(await start_thread(function, name))


def value_of(ended: Ended) -> Any:
    error, value = ended
    if error is not None:
        raise error
    return value


def start_thread(function: Callable[[], Any], name: str) -> asyncio.Future[Ended]:
    """Start a call in a new daemon thread, and return a future of its result. Each call has its own thread, so a
    hanging call does not delay others and ends with the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Ended] = loop.create_future()

    def settle(ended: Ended) -> None:
        if not done.done():
            done.set_result(ended)

    def run() -> None:
        try:
            ended: Ended = (None, function())
        except BaseException as e:  # a tool is user code, and may call sys.exit
            ended = (e, None)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, ended)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done
