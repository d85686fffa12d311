"""Checks that a server makes progress while requests wait for it.

`/health` is 200 even while the engine is stopped, and a broken connection does not show the state of the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from verl.rollout.calls import PendingCall
from verl.rollout.http import ServerGone, ServerLate, ServerRefused

LOOKS = 4  # checks within QUIET_S of requests behind a router
QUIET_S = 60.0  # without an event from a server that has requests, before it must sample a token as a probe


class LivenessWatch:
    """Watches one server as long as it has requests.

    `pending` are its requests. `elsewhere` returns the number of events that other clients received from it. `probe`
    makes it sample one token, and raises if none arrives in time. `progress` returns a value that changes while it
    samples (None: not reported). `may_sample` is false while it is paused or asleep. `lost` is called with the reason
    when it is given up.
    """

    def __init__(
        self,
        pending: Mapping[str, PendingCall],
        elsewhere: Callable[[], int],
        probe: Callable[[], Awaitable[None]],
        progress: Callable[[], Awaitable[Any]],
        may_sample: Callable[[], bool],
        lost: Callable[[str], Awaitable[None]],
    ) -> None:
        self._pending, self._elsewhere, self._probe = pending, elsewhere, probe
        self._progress, self._may_sample, self._lost = progress, may_sample, lost
        self.signs = 0  # answers, parts of answers, and ends of a pause
        self._probing: asyncio.Task[Exception | None] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def failed(self) -> Exception | None:
        """Run the probe and return its error, or None. Concurrent callers share one probe."""
        if self._probing is None or _finished(self._probing):
            self._probing = asyncio.create_task(self._probed())
        return await asyncio.shield(self._probing)

    async def stuck(self) -> bool:
        """Return true if the probe fails and the server makes no other progress meanwhile. With a long queue a probe
        may fail although the server samples."""
        if not self._may_sample():
            return False
        heard, drawn = self._signs(), await self._progress()
        why = await self.failed()
        dead = isinstance(why, ServerGone | ServerLate) or (isinstance(why, ServerRefused) and why.status >= 500)
        return dead and await self._progress() == drawn and self._signs() == heard and self._may_sample()

    def watch(self) -> None:
        """Start to watch the server, as long as it has requests."""
        if self._watching is None or _finished(self._watching):
            self._watching = asyncio.create_task(self._watch(), name="rollout-server-watch")

    def close(self) -> None:
        for task in (self._watching, self._probing):
            if task is not None and not _finished(task):
                task.cancel()

    def _signs(self) -> int:
        return self.signs + self._elsewhere()

    async def _watch(self) -> None:
        while self._pending:
            heard = self._signs()
            for _ in range(LOOKS):
                await asyncio.sleep(QUIET_S / LOOKS)
                self._cancel_silent_calls()
            if self._pending and self._signs() == heard and await self.stuck():
                return await self._lost(f"{len(self._pending)} requests wait, and it draws no token")

    def _cancel_silent_calls(self) -> None:
        """Cancel routed calls that are silent: the server behind the router that has them may hang."""
        now_s, may_sample = time.monotonic(), self._may_sample()
        for call in self._pending.values():
            if call.routed and not may_sample:  # no events are expected now
                call.last_event_s = now_s
            elif call.routed and call.reading is not None and now_s - call.last_event_s > QUIET_S:
                call.quiet = True
                call.reading.cancel()

    async def _probed(self) -> Exception | None:
        try:
            await self._probe()
        except (RuntimeError, TimeoutError, ValueError) as e:
            return e
        return None


def _finished(task: asyncio.Task[Any]) -> bool:
    return task.done() or task.get_loop() is not asyncio.get_running_loop()
