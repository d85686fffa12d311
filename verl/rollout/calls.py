"""Requests that a client has sent to a server, and waits for their ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.rollout.base import GenerateRequest
from verl.rollout.http import ServerGone, ServerLate, ServerRefused


@dataclass(slots=True, eq=False)
class PendingCall:
    """A request that waits for its answer from a server."""

    request: GenerateRequest
    model: str
    """The model's name at the server, or an adapter's."""
    server_id: str = ""
    """The request's id at the server, new for every attempt."""
    asked: bool = False
    """It was sent."""
    routed: bool = False
    """It was sent through a router: any server of the run may have it, and only closing the connection ends it."""
    last_event_s: float = 0.0
    """The time of the last event (monotonic clock)."""
    quiet: bool = False
    """No event arrived for too long."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the call has returned."""
    cut: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is aborted."""
    reading: asyncio.Task[None] | None = None
    """The task that reads its stream, if the answer is a stream."""


async def ended(calls: Sequence[PendingCall], timeout_s: float | None) -> None:
    """Wait for the ends of all calls, at most `timeout_s`."""
    if waits := [asyncio.ensure_future(call.ended.wait()) for call in calls]:
        try:
            await asyncio.wait(waits, timeout=timeout_s)
        finally:
            for wait in waits:
                wait.cancel()


async def first(*awaited: Coroutine[Any, Any, Any]) -> None:
    """Wait until one of them is done, and cancel the others."""
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
