"""Checks that a server makes progress while requests wait for it.

`/health` is 200 even while the engine is stopped, and a broken connection does not show the state of the engine.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from verl.rollout.calls import RunningCalls
from verl.rollout.connection import PROBE_S, ServerConnection
from verl.rollout.gate import ServerGate
from verl.rollout.http import ServerGone, ServerLate, ServerRefused

LOOKS = 4  # how many times within QUIET_S the requests that were sent through a router are checked
QUIET_S = 60.0  # without an event from a server that has requests, before it must sample a token as a probe


class LivenessWatch:
    """Watches one server as long as it has requests, and gives it up if it does not answer them.

    If no event of a request arrives in `QUIET_S` it must sample one token as a probe. While it is paused or asleep, as
    `gate` records, no events are expected.
    """

    def __init__(self, connection: ServerConnection, calls: RunningCalls, gate: ServerGate) -> None:
        self._connection, self._calls, self._gate = connection, calls, gate
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
        if not self._gate.may_sample:
            return False
        events, progress = self._events(), await self._connection.progress()
        why = await self.failed()
        dead = isinstance(why, ServerGone | ServerLate) or (isinstance(why, ServerRefused) and why.status >= 500)
        if not dead or await self._connection.progress() != progress:
            return False
        return self._events() == events and self._gate.may_sample

    def watch(self) -> None:
        """Start to watch the server, as long as it has requests."""
        if self._watching is None or _finished(self._watching):
            self._watching = asyncio.create_task(self._watch(), name="rollout-server-watch")

    def close(self) -> None:
        for task in (self._watching, self._probing):
            if task is not None and not _finished(task):
                task.cancel()

    def _events(self) -> int:
        """Return the number of events of the server until now, at any client of the run."""
        return self._calls.events + self._connection.routed_events

    async def _watch(self) -> None:
        while pending := self._calls.pending:
            events = self._events()
            for _ in range(LOOKS):
                await asyncio.sleep(QUIET_S / LOOKS)
                self._cancel_silent_calls()
            if pending and self._events() == events and await self.stuck():
                return await self._connection.give_up(f"{len(pending)} requests wait, and it draws no token")

    def _cancel_silent_calls(self) -> None:
        """Cancel routed calls that are silent: the server behind the router that has them may hang."""
        now_s, may_sample = time.monotonic(), self._gate.may_sample
        for call in self._calls.pending.values():
            if call.routed and not may_sample:  # no events are expected now
                call.last_event_s = now_s
            elif call.routed and call.reading is not None and now_s - call.last_event_s > QUIET_S:
                call.quiet = True
                call.reading.cancel()

    async def _probed(self) -> Exception | None:
        try:
            await self._check_health()
        except (RuntimeError, TimeoutError, ValueError) as e:
            return e
        return None

    async def _check_health(self) -> None:
        """Check that the server samples. A probe needs a free row. If more requests than rows are pending and the
        server reports no progress, the check is a request to `/health`."""
        connection, rows = self._connection, self._connection.context.max_concurrent_sequences
        if len(self._calls.pending) > rows and await connection.progress() is None:
            await connection.http.get("/health", timeout_s=PROBE_S)
        else:
            await connection.probe(PROBE_S)


def _finished(task: asyncio.Task[Any]) -> bool:
    return task.done() or task.get_loop() is not asyncio.get_running_loop()
