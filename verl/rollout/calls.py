"""The requests that a client has sent to a server: waiting for their ends, and aborting them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.rollout.base import GenerateRequest
from verl.rollout.connection import ServerConnection
from verl.rollout.embedded.images import RequestImages
from verl.rollout.http import ServerGone, ServerLate, ServerRefused

AGAIN_S = 0.05  # between two aborts of a request that may not have reached the server yet


@dataclass(slots=True, eq=False)
class PendingCall:
    """A request that waits for its answer from a server."""

    request: GenerateRequest
    model: str
    """The model's name at the server, or that of a LoRA set."""
    images: RequestImages | None = None
    """The images of its prompt."""
    version: int = -1
    """The version of the parameter set when it was sent."""
    server_id: str = ""
    """The request's id at the server, new for every attempt."""
    sent: bool = False
    """True after it was sent."""
    routed: bool = False
    """True if it was sent through a router: any server of the run may have it, and only closing the connection ends
    it."""
    last_event_s: float = 0.0
    """The time of the last event (monotonic clock)."""
    quiet: bool = False
    """True if it was cancelled because no event arrived for too long (liveness.py)."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the call has returned."""
    cut: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is aborted."""
    reading: asyncio.Task[None] | None = None
    """The task that reads its stream, if the answer is a stream."""


class RunningCalls:
    """All requests that a server has not answered yet."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection
        self.pending: dict[str, PendingCall] = {}
        """The calls by the id of their request."""
        self.scoring = Counter[str]()
        """The number of running scores, by the name of model or adapter at the server."""
        self.events = 0
        """The number of signs that the server runs: answers, parts of answers, and ends of a pause."""

    def busy(self, model: str) -> int:
        """Return how many requests of this model or adapter at the server run."""
        return sum(call.model == model for call in self.pending.values()) + self.scoring[model]

    async def abort(self, request_ids: Sequence[str] | None) -> int:
        """Make requests (None: all) return with their partial tokens, and return how many did."""
        names = self.pending.keys() if request_ids is None else self.pending.keys() & set(request_ids)
        calls = [self.pending[name] for name in names]
        await self.abort_and_wait(calls)
        return len(calls)

    async def abort_and_wait(self, calls: Sequence[PendingCall]) -> None:
        """Repeat the abort until the calls have returned: a request may reach the server after its abort."""
        limit_s = self._connection.limits.control_s
        async with self._connection.deadline(limit_s, f"{len(calls)} aborted requests to return"):
            while waiting := [call for call in calls if not call.ended.is_set()]:
                await self.send_abort(waiting)
                await ended(waiting, AGAIN_S)

    async def send_abort(self, calls: Sequence[PendingCall]) -> None:
        """Abort the calls at the server, or by closing their connections. Their ends are not waited for."""
        connection, aborts = self._connection, self._connection.api.traits.aborts_requests
        for call in calls:
            call.cut.set()
            if call.reading is not None and (call.routed or not aborts):
                call.reading.cancel()
        if aborts and (here := [call.server_id for call in calls if not call.routed]):
            await connection.api.abort(connection.call, here)


async def ended(calls: Sequence[PendingCall], timeout_s: float | None) -> None:
    """Wait for the ends of all calls, at most `timeout_s`."""
    if waits := [asyncio.ensure_future(call.ended.wait()) for call in calls]:
        try:
            await asyncio.wait(waits, timeout=timeout_s)
        finally:
            for wait in waits:
                wait.cancel()


async def first(*awaited: Coroutine[Any, Any, Any]) -> None:
    """Run the coroutines until one of them is done, and cancel the others."""
    tasks = [asyncio.ensure_future(one) for one in awaited]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def after(task: asyncio.Future[Any] | None, then: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Run `then` after the task has ended in any way. Errors of both are ignored."""
    if task is not None:
        await asyncio.gather(task, return_exceptions=True)
    with contextlib.suppress(ServerGone, ServerLate, ServerRefused):
        await then()
