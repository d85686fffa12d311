"""Every wait has a deadline and says who waits, for what, since when (pitfalls 5)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from verl.track.files import write_atomic

T = TypeVar("T")
NOTICE_S = 30.0  # a wait that takes longer is written down for `verl doctor`, at most once in this time
GRACE_S = 5.0  # for a cancelled coroutine to end
NAMED = 6  # other waits that an error message names


class DeadlineExpired(TimeoutError):
    """A wait was not answered in time. The message says what was waited for and what else was pending."""


class Abandoned(RuntimeError):
    """What was waited for was cancelled by somebody else; the waiter itself was not."""


class Wait(NamedTuple):
    who: str
    what: str | Callable[[], str]
    since_s: float
    timeout_s: float

    @property
    def text(self) -> str:
        return self.what if isinstance(self.what, str) else self.what()


class Waits:
    """The waits that are pending now; `verl doctor` reads what `dump` wrote.

    A run has thousands of them in a step, and hardly any expires: one timer looks after all of them.
    """

    def __init__(self, path: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._pending: dict[int, Wait] = {}
        self._limits: dict[int, tuple[float, Callable[[], object]]] = {}  # loop time of expiry, what to call then
        self._timer: asyncio.TimerHandle | None = None  # None: there are no limits
        self._loop: asyncio.AbstractEventLoop | None = None  # of the limits and the timer
        self._path = path
        self._clock = clock
        self._next = 0
        self._noted_s = clock()

    async def wait(
        self, awaitable: Awaitable[T], *, who: str, what: str | Callable[[], str], timeout_s: float, cancel: bool = False
    ) -> T:
        """Await with a deadline. `what` may be a function, asked when somebody wants to know.

        A coroutine is this wait's own: when the deadline expires it is cancelled, and it has ended before this returns.
        A future or task may be held by others: it is cancelled on expiry only if `cancel`.
        """
        owned = cancel or not asyncio.isfuture(awaitable)
        key = self._begin(who, what, timeout_s)
        future = asyncio.ensure_future(awaitable)
        try:
            await self._sleep(key, future, timeout_s)
            if not future.done():
                error = self._late(key)
                if owned:
                    await _ended(future)
                raise error
            if future.cancelled():
                raise Abandoned(f"{who} waited for {self._pending[key].text}, which was cancelled")
            return future.result()
        except asyncio.CancelledError:
            await _ended(future)
            raise
        finally:
            del self._pending[key]

    def limit(self, *, who: str, what: str, timeout_s: float) -> Limit:
        """A deadline for a `with` block, which is cancelled then. Cheaper than `wait`, and for code of ours alone: it must
        end when it is cancelled."""
        return Limit(self, who, what, timeout_s)

    def pending(self) -> list[dict[str, object]]:
        now = self._clock()
        return [
            {"who": w.who, "what": w.text, "waiting_s": round(now - w.since_s, 1), "timeout_s": w.timeout_s}
            for w in self._pending.values()
        ]

    def dump(self) -> None:
        """Best effort: a full disk must not hide why somebody waits."""
        self._noted_s = self._clock()
        if self._path is not None:
            with contextlib.suppress(OSError):
                found = {"at_unix_s": time.time(), "pending": self.pending()}
                write_atomic(self._path, json.dumps(found, indent=1).encode())

    async def _sleep(self, key: int, future: asyncio.Future[Any], timeout_s: float) -> None:
        """Until the future is done or the time is up."""
        sleep: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.add_done_callback(partial(_wake, sleep))
        self._set(key, timeout_s, partial(_wake, sleep))
        try:
            await sleep
        finally:
            self._unset(key)

    def _begin(self, who: str, what: str | Callable[[], str], timeout_s: float) -> int:
        self._next += 1
        self._pending[self._next] = Wait(who, what, self._clock(), timeout_s)
        return self._next

    def _set(self, key: int, timeout_s: float, expire: Callable[[], object]) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # an earlier one, and what still waited there, is gone
            self._loop, self._timer = loop, None
            self._limits.clear()
        until_s = loop.time() + timeout_s
        self._limits[key] = until_s, expire
        if self._timer is None or until_s < self._timer.when():
            self._look_by(loop, until_s)

    def _unset(self, key: int) -> None:
        self._limits.pop(key, None)
        if not self._limits and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_by(self, loop: asyncio.AbstractEventLoop, until_s: float) -> None:
        """At the first expiry, and now and then in between."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(min(until_s, loop.time() + NOTICE_S), self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now_s = loop.time()
        for key in [key for key, (until_s, _) in self._limits.items() if until_s <= now_s]:
            self._limits.pop(key)[1]()
        if self._limits:
            self._look_by(loop, min(until_s for until_s, _ in self._limits.values()))
        if self._clock() - self._noted_s >= NOTICE_S:
            self.dump()

    def _late(self, key: int) -> DeadlineExpired:
        self.dump()
        wait = self._pending[key]
        others = [f"{w.who}: {w.text}" for k, w in self._pending.items() if k != key]
        more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
        also = f"; also pending: {'; '.join(others[:NAMED])}{more}" if others else ""
        return DeadlineExpired(f"{wait.who} waited {wait.timeout_s:g} s for {wait.text}{also}")


class Limit:
    """See `Waits.limit`. Thousands in a step: a class, since a generator costs three times as much."""

    __slots__ = ("_already", "_expired", "_key", "_task", "_timeout_s", "_waits", "_what", "_who")

    def __init__(self, waits: Waits, who: str, what: str, timeout_s: float) -> None:
        self._waits, self._who, self._what, self._timeout_s = waits, who, what, timeout_s
        self._expired = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "a limit is for a task of the event loop"
        self._task, self._already = task, task.cancelling()
        self._key = self._waits._begin(self._who, self._what, self._timeout_s)
        self._waits._set(self._key, self._timeout_s, self._expire)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        waits, task = self._waits, self._task
        try:
            if isinstance(error, asyncio.CancelledError):
                if self._expired and task.uncancel() <= self._already:
                    raise waits._late(self._key) from None
                if task.cancelling() <= self._already:
                    raise Abandoned(f"{self._who} waited for {self._what}, which was cancelled") from None
            elif self._expired:  # the block ended otherwise: nobody asks it to end any more
                task.uncancel()
        finally:
            waits._unset(self._key)
            del waits._pending[self._key]

    def _expire(self) -> None:
        self._expired = True
        self._task.cancel()


async def _ended(future: asyncio.Future[Any]) -> None:
    """Cancel, and stay until it has ended: nothing of it runs on behind the caller's back."""
    future.cancel()
    if not future.done():
        await asyncio.wait({future}, timeout=GRACE_S)


def _wake(sleep: asyncio.Future[None], future: asyncio.Future[Any] | None = None) -> None:
    if not sleep.done():
        sleep.set_result(None)
    if future is not None and not future.cancelled():
        future.exception()  # a late one, of something nobody waits for any more, is not a warning on stderr
