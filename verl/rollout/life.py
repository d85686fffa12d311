"""Whether a server lives while requests wait for it: `/health` is 200 where its engine is stopped, and a connection
that broke says nothing of the engine behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from verl.rollout.calls import Call
from verl.rollout.http import ServerGone, ServerLate, ServerRefused

QUIET_S = 60.0  # without a word from a server that has requests, until it has to draw a token


class Life:
    """pending: its requests · probe: has it draw a token, and raises where none comes in time · progress: what changes
    as it draws (None: it does not tell) · going: nobody makes it stand still · lost: hears why it is given up."""

    def __init__(
        self,
        pending: Mapping[str, Call],
        probe: Callable[[], Awaitable[None]],
        progress: Callable[[], Awaitable[Any]],
        going: Callable[[], bool],
        lost: Callable[[str], Awaitable[None]],
    ) -> None:
        self._pending, self._probe, self._progress, self._going, self._lost = pending, probe, progress, going, lost
        self.heard = 0  # answers and parts of them, and ends of a stand-still
        self._probing: asyncio.Task[Exception | None] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def failed(self) -> Exception | None:
        """Why it drew no token in time, if it did not. Who asks meanwhile hears the same."""
        if self._probing is None or _over(self._probing):
            self._probing = asyncio.create_task(self._probed())
        return await asyncio.shield(self._probing)

    async def stuck(self) -> bool:
        """It draws no token, and shows no other sign of life meanwhile, as where a long queue stands before it."""
        if not self._going():
            return False
        heard, drawn = self.heard, await self._progress()
        why = await self.failed()
        dead = isinstance(why, ServerGone | ServerLate) or (isinstance(why, ServerRefused) and why.status >= 500)
        return dead and await self._progress() == drawn and self.heard == heard and self._going()

    def watch(self) -> None:
        """From now on, as long as it has requests."""
        if self._watching is None or _over(self._watching):
            self._watching = asyncio.create_task(self._watch(), name="rollout-server-watch")

    def close(self) -> None:
        for task in (self._watching, self._probing):
            if task is not None and not _over(task):
                task.cancel()

    async def _watch(self) -> None:
        while self._pending:
            heard, seen = self.heard, [(call, call.heard) for call in self._pending.values() if call.routed]
            await asyncio.sleep(QUIET_S)
            for call, before in seen if self._going() else ():
                if call.routed and call.heard == before and call.reading is not None:
                    call.quiet = True  # whoever has it may hang
                    call.reading.cancel()
            if self._pending and self.heard == heard and await self.stuck():
                return await self._lost(f"{len(self._pending)} requests wait, and it draws no token")

    async def _probed(self) -> Exception | None:
        try:
            await self._probe()
        except (RuntimeError, TimeoutError, ValueError) as e:
            return e
        return None


def _over(task: asyncio.Task[Any]) -> bool:
    return task.done() or task.get_loop() is not asyncio.get_running_loop()
