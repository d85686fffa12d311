"""Every wait has a deadline and says who waits, for what, since when (pitfalls 5)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from verl.track.files import write_atomic

T = TypeVar("T")
NOTICE_S = 30.0  # a wait that takes longer is written down for `verl doctor`, at most once in this time
GRACE_S = 5.0  # for a cancelled coroutine to end
NAMED = 6  # other waits that an error message names


class DeadlineExpired(TimeoutError):
    """A wait was not answered in time. The message says what was waited for and what else was pending."""


class Abandoned(RuntimeError):
    """What was waited for was cancelled by somebody else; the waiter itself was not."""


class Wait:
    """One that is pending: at `until_s` of the loop's clock it ends `sleep`."""

    __slots__ = ("since_s", "sleep", "timeout_s", "until_s", "what", "who")
    sleep: asyncio.Future[None]
    since_s: float
    until_s: float  # infinity once it has expired

    def __init__(self, who: str, what: str | Callable[[], str], timeout_s: float) -> None:
        self.who, self.what, self.timeout_s = who, what, timeout_s

    @property
    def text(self) -> str:
        return self.what if isinstance(self.what, str) else self.what()

    def expire(self) -> None:
        _wake(self.sleep)


class Waits:
    """The waits that are pending now; `verl doctor` reads what `dump` wrote.

    A run has thousands of them in a step, and hardly any expires: one timer looks after all of them.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._pending: dict[Wait, None] = {}  # in order
        self._timer: asyncio.TimerHandle | None = None
        self._look_s = math.inf  # when it rings
        self._loop: asyncio.AbstractEventLoop | None = None  # of the timer
        self._path = path
        self._noted_s = time.monotonic()

    async def wait(
        self,
        awaitable: Awaitable[T],
        *,
        who: str,
        what: str | Callable[[], str],
        timeout_s: float,
        cancel: bool = False,
    ) -> T:
        """Await with a deadline. `what` may be a function, asked when somebody wants to know.

        A coroutine is this wait's own: when the deadline expires it is cancelled, and it has ended before this returns.
        A future or task may be held by others: it is cancelled on expiry only if `cancel`.
        """
        owned = cancel or not asyncio.isfuture(awaitable)
        wait = Wait(who, what, timeout_s)
        future = asyncio.ensure_future(awaitable)
        wait.sleep = asyncio.get_running_loop().create_future()
        future.add_done_callback(partial(_wake, wait.sleep))
        self._begin(wait)
        try:
            await wait.sleep
            if not future.done():
                error = self._late(wait)
                if owned:
                    await _ended(future)
                raise error
            if future.cancelled():
                raise Abandoned(f"{who} waited for {wait.text}, which was cancelled")
            return future.result()
        except asyncio.CancelledError:
            await _ended(future)
            raise
        finally:
            self._end(wait)

    def limit(self, *, who: str, what: str, timeout_s: float) -> Limit:
        """A deadline for a `with` block, which is cancelled then. Cheaper than `wait`, and for code of ours alone: it must
        end when it is cancelled."""
        return Limit(self, who, what, timeout_s)

    def pending(self) -> list[dict[str, object]]:
        if self._loop is None:
            return []
        now_s = self._loop.time()
        return [
            {"who": w.who, "what": w.text, "waiting_s": round(now_s - w.since_s, 1), "timeout_s": w.timeout_s}
            for w in self._pending
        ]

    def dump(self) -> None:
        """Best effort: a full disk must not hide why somebody waits."""
        self._noted_s = time.monotonic()
        if self._path is not None:
            with contextlib.suppress(OSError):
                found = {"at_unix_s": time.time(), "pending": self.pending()}
                write_atomic(self._path, json.dumps(found, indent=1).encode())

    def _begin(self, wait: Wait) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # an earlier one, and what still waited there, is gone
            self._loop, self._timer, self._look_s = loop, None, math.inf
            self._pending.clear()
        wait.since_s = loop.time()
        wait.until_s = wait.since_s + wait.timeout_s
        self._pending[wait] = None
        if wait.until_s < self._look_s:
            self._look_by(loop, wait.until_s)

    def _end(self, wait: Wait) -> None:
        self._pending.pop(wait, None)
        if not self._pending and self._timer is not None:
            self._timer.cancel()
            self._timer, self._look_s = None, math.inf

    def _look_by(self, loop: asyncio.AbstractEventLoop, until_s: float) -> None:
        """At the first expiry, and now and then in between."""
        if self._timer is not None:
            self._timer.cancel()
        self._look_s = min(until_s, loop.time() + NOTICE_S)
        self._timer = loop.call_at(self._look_s, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer, self._look_s = None, math.inf
        now_s = loop.time()
        for wait in [wait for wait in self._pending if wait.until_s <= now_s]:
            wait.until_s = math.inf
            wait.expire()
        if self._pending:
            self._look_by(loop, min(wait.until_s for wait in self._pending))
        if time.monotonic() - self._noted_s >= NOTICE_S:
            self.dump()

    def _late(self, wait: Wait) -> DeadlineExpired:
        self.dump()
        others = [f"{w.who}: {w.text}" for w in self._pending if w is not wait]
        more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
        also = f"; also pending: {'; '.join(others[:NAMED])}{more}" if others else ""
        return DeadlineExpired(f"{wait.who} waited {wait.timeout_s:g} s for {wait.text}{also}")


class Limit(Wait):
    """See `Waits.limit`. Thousands in a step: a class, since a generator costs three times as much."""

    __slots__ = ("_already", "_expired", "_task", "_waits")

    def __init__(self, waits: Waits, who: str, what: str, timeout_s: float) -> None:
        self.who, self.what, self.timeout_s = who, what, timeout_s
        self._waits, self._expired = waits, False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "a limit is for a task of the event loop"
        self._task, self._already = task, task.cancelling()
        self._waits._begin(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        waits, task = self._waits, self._task
        try:
            if isinstance(error, asyncio.CancelledError):
                if self._expired and task.uncancel() <= self._already:
                    raise waits._late(self) from None
                if task.cancelling() <= self._already:
                    raise Abandoned(f"{self.who} waited for {self.text}, which was cancelled") from None
            elif self._expired:  # the block ended otherwise: nobody asks it to end any more
                task.uncancel()
        finally:
            waits._end(self)

    def expire(self) -> None:
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
