"""Whether a server lives while requests wait for it: `/health` is 200 where its engine is stopped, and a connection
that broke says nothing of the engine behind it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from verl.rollout.calls import Call
from verl.rollout.http import ServerGone, ServerLate, ServerRefused

LOOKS = 4  # in that time, at requests that others may have
QUIET_S = 60.0  # without a word from a server that has requests, until it has to draw a token


class Life:
    """pending: its requests · elsewhere: counts what others hear of it · probe: has it draw a token, and raises where
    none comes in time · progress: what changes as it draws (None: it does not tell) · going: nobody makes it stand
    still · lost: hears why it is given up."""

    def __init__(
        self,
        pending: Mapping[str, Call],
        elsewhere: Callable[[], int],
        probe: Callable[[], Awaitable[None]],
        progress: Callable[[], Awaitable[Any]],
        going: Callable[[], bool],
        lost: Callable[[str], Awaitable[None]],
    ) -> None:
        self._pending, self._elsewhere, self._probe = pending, elsewhere, probe
        self._progress, self._going, self._lost = progress, going, lost
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
        heard, drawn = self._signs(), await self._progress()
        why = await self.failed()
        dead = isinstance(why, ServerGone | ServerLate) or (isinstance(why, ServerRefused) and why.status >= 500)
        return dead and await self._progress() == drawn and self._signs() == heard and self._going()

    def watch(self) -> None:
        """From now on, as long as it has requests."""
        if self._watching is None or _over(self._watching):
            self._watching = asyncio.create_task(self._watch(), name="rollout-server-watch")

    def close(self) -> None:
        for task in (self._watching, self._probing):
            if task is not None and not _over(task):
                task.cancel()

    def _signs(self) -> int:
        return self.heard + self._elsewhere()

    async def _watch(self) -> None:
        while self._pending:
            heard = self._signs()
            for _ in range(LOOKS):
                await asyncio.sleep(QUIET_S / LOOKS)
                self._give_up_the_quiet()
            if self._pending and self._signs() == heard and await self.stuck():
                return await self._lost(f"{len(self._pending)} requests wait, and it draws no token")

    def _give_up_the_quiet(self) -> None:
        """Whoever has one that went through a router may hang: that is not this server's affair."""
        now_s, going = time.monotonic(), self._going()
        for call in self._pending.values():
            if call.routed and not going:  # nor may it draw now
                call.heard_s = now_s
            elif call.routed and call.reading is not None and now_s - call.heard_s > QUIET_S:
                call.quiet = True
                call.reading.cancel()

    async def _probed(self) -> Exception | None:
        try:
            await self._probe()
        except (RuntimeError, TimeoutError, ValueError) as e:
            return e
        return None


def _over(task: asyncio.Task[Any]) -> bool:
    return task.done() or task.get_loop() is not asyncio.get_running_loop()
