"""Requests on their way to a server, and waiting for their ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.rollout.http import ServerGone, ServerLate, ServerRefused


@dataclass(slots=True, eq=False)
class Call:
    """server_id: the name that it has there · model: its name there, or an adapter's · asked: the server has been ·
    cut: it was aborted · routed: another one of the run may have it, and its connection alone ends it · reading: its
    stream, where only the end of the connection ends it · heard_s: when something
    came of it last (monotonic clock) · quiet: nothing did for too long."""

    server_id: str
    model: str
    asked: bool = False
    routed: bool = False
    heard_s: float = 0.0
    quiet: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    cut: asyncio.Event = field(default_factory=asyncio.Event)
    reading: asyncio.Task[None] | None = None


async def ended(calls: Sequence[Call], timeout_s: float | None) -> None:
    """Wait for their ends, so long at most."""
    if waits := [asyncio.ensure_future(call.ended.wait()) for call in calls]:
        try:
            await asyncio.wait(waits, timeout=timeout_s)
        finally:
            for wait in waits:
                wait.cancel()


async def first(*awaited: Coroutine[Any, Any, Any]) -> None:
    """Wait until one of them is done; the others are given up."""
    tasks = [asyncio.ensure_future(one) for one in awaited]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def after(task: asyncio.Future[Any] | None, then: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Do that when the task has ended, in whatever way; what becomes of it is nobody's concern any more."""
    if task is not None:
        await asyncio.gather(task, return_exceptions=True)
    with contextlib.suppress(ServerGone, ServerLate, ServerRefused):
        await then()
