"""Pauses of a server, and the sleep of its memory: when requests may be sent to it, and when they wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import get_args

from verl.rollout.base import PauseMode
from verl.rollout.calls import RunningCalls, after, ended
from verl.rollout.connection import ServerConnection
from verl.rollout.starting import ServerStart

UNDO_S = 10.0  # for undoing a pause that was cancelled
SETTLE_S = 2.0  # for the last answers of a paused server to arrive


class ServerGate:
    """The pauses and the sleep of a server. New requests wait during a pause, an update or a restart."""

    def __init__(self, connection: ServerConnection, calls: RunningCalls, start: ServerStart) -> None:
        self._connection, self._calls, self._start = connection, calls, start
        self.paused = False
        self.asleep = set[str]()  # the parts of its memory that are freed
        self.open = asyncio.Event()  # cleared during a pause, an update or a restart: later requests wait for the end
        self.open.set()
        self._control = asyncio.Lock()  # one pause, update or restart at a time
        self._undoing: set[asyncio.Task[None]] = set()

    @property
    def may_sample(self) -> bool:
        """The server can sample now."""
        return self.open.is_set() and self._connection.fenced is None and not (self.paused or self.asleep)

    async def pause(self, mode: PauseMode) -> None:
        async with self.alone():
            await self.stop_sampling(mode, "pause('wait')")
            self.paused = True

    async def resume(self) -> None:
        async with self._control:
            if (why := self._connection.fenced) is not None:
                raise RuntimeError(f"{self._connection.name} must not go on: {why}")
            if not self._start.found_paused or self._connection.version >= 0:
                await self.end_pause()
            self.paused = False
            self.open.set()

    async def pause_again(self) -> None:
        """Pause the server again after it has resumed by itself, although it is to be paused."""
        await self._connection.api.pause(self._connection.call, "keep")

    async def end_pause(self) -> None:
        """Let the server sample again, and check it if it was paused before this run."""
        await self._connection.api.resume(self._connection.call)
        if self._start.found_paused:
            await self._start.check_answers()
            self._start.found_paused = False

    @asynccontextmanager
    async def alone(self, first: Callable[[], Awaitable[bool]] | None = None) -> AsyncIterator[bool]:
        """Hold back new requests during the block. `first` is awaited before that, while requests still run, and its
        result is given to the block (False without it)."""
        async with self._control:
            if self._undoing:  # a cancelled pause is undone first
                await asyncio.wait(self._undoing)
            done = first is not None and await first()
            self.open.clear()
            try:
                yield done
            finally:
                self._calls.events += 1
                if not self.paused:
                    self.open.set()

    async def stop_sampling(self, mode: PauseMode, what: str) -> None:
        """Pause the server in one of the modes. If the caller is cancelled the pause is undone after its own end, since
        the server does not notice that the caller is cancelled. `what` names the caller in errors."""
        api, call, limits = self._connection.api, self._connection.call, self._connection.limits
        if mode not in get_args(PauseMode):
            raise ValueError(f"mode={mode!r}: it is one of {', '.join(get_args(PauseMode))}")
        if self.paused and mode == "wait" and self._calls.pending:
            count = len(self._calls.pending)
            raise ValueError(f"{what}: {count} requests stand still and cannot finish; resume or abort them")
        calls, modes, pausing = list(self._calls.pending.values()), api.traits.pause_modes, None
        if mode == "keep" and mode not in modes:
            name = self._connection.name
            raise ValueError(f"{what}: {name} cannot make running requests stand still; wait, or abort")
        if self._start.found_paused:
            return
        try:
            if mode in modes:
                limit_s = limits.request_s if mode == "wait" else limits.control_s
                pausing = asyncio.ensure_future(api.pause(partial(call, timeout_s=limit_s), mode))
                await asyncio.shield(pausing)
            if mode == "abort":
                await self._calls.abort_and_wait(calls)
            elif mode == "wait" and mode in modes:  # a request that has not reached the server waits until resume
                await ended(calls, SETTLE_S)
            elif mode == "wait":
                async with self._connection.deadline(limits.request_s, "running requests to end"):
                    await ended([one for one in calls if one.sent], None)
            if mode not in modes and "keep" in modes:
                pausing = asyncio.ensure_future(api.pause(call, "keep"))
                await asyncio.shield(pausing)
        except asyncio.CancelledError:
            if not self.paused:
                undoing = asyncio.create_task(after(pausing, partial(api.resume, call)))
                self._undoing.add(undoing)
                undoing.add_done_callback(self._undoing.discard)
            raise

    async def sleep(self, level: int) -> int:
        """Free memory and return the number of bytes: 0 if the server cannot sleep or does not report it."""
        traits, levels = self._connection.api.traits, self._connection.able.sleep_levels
        if level not in (1, 2):
            raise ValueError(f"sleep level={level}: 1 frees the KV, 2 the weights too")
        if level == 2 and 2 not in levels and traits.sleep_keeps_weights:
            level = 1  # frees the device's memory as well
        if level not in levels:
            return 0
        self.asleep |= {"kv", "weights"} if level == 2 or traits.sleep_keeps_weights else {"kv"}
        return await self._connection.api.sleep(self._connection.call, level)

    async def wake(self, tags: Sequence[str]) -> None:
        if unknown := set(tags) - {"weights", "kv"}:
            raise ValueError(f"wake tags {sorted(unknown)}: known are 'weights' and 'kv'")
        for part in ("weights", "kv"):  # a server with KV can serve, so it needs its weights first
            if part in self.asleep and {part, "kv"} & set(tags):
                await self._connection.api.wake(self._connection.call, part)
                self.asleep.remove(part)
                if self.paused and not self.asleep:  # with all parts awake the server resumes by itself
                    await self.pause_again()

    async def close(self) -> None:
        """Wait until cancelled pauses are undone. A server that was started here is stopped in any state."""
        for undoing in self._undoing if self._connection.launch is not None else ():
            undoing.cancel()
        if self._undoing:
            await asyncio.wait(self._undoing, timeout=UNDO_S)
