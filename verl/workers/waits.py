"""Every wait has a deadline, and says who waits, for what and since when."""

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
What = str | Callable[[], str]  # a function is asked only when somebody wants to know
NOTICE_S = 30.0  # a wait that takes longer is written down for `verl doctor`, at most once in this time
GRACE_S = 5.0  # for a cancelled coroutine to end
NAMED = 6  # other waits that an error message names


class DeadlineExpired(TimeoutError):
    """A wait was not answered in time. The message says what was waited for and what else was pending."""


class Abandoned(RuntimeError):
    """What was waited for was cancelled by somebody else; the waiter itself was not."""


class Limit:
    """A deadline for a `with` block; see `Waits.limit`. A class, since a generator costs three times as much."""

    __slots__ = ("_already", "_waits", "since_s", "task", "timeout_s", "until_s", "what", "who")
    since_s: float
    until_s: float  # infinity once it has expired

    def __init__(self, waits: Waits, who: str, what: What, timeout_s: float) -> None:
        self._waits, self.who, self.what, self.timeout_s = waits, who, what, timeout_s

    @property
    def text(self) -> str:
        return self.what if isinstance(self.what, str) else self.what()

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "a limit is for a task of the event loop"
        self.task, self._already = task, task.cancelling()
        self._waits._begin(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        expired = self.until_s == math.inf
        try:
            if isinstance(error, asyncio.CancelledError):
                if expired and self.task.uncancel() <= self._already:
                    raise self._waits._late(self) from None
                if self.task.cancelling() <= self._already:
                    raise Abandoned(f"{self.who} waited for {self.text}, which was cancelled") from None
            elif expired:  # the block ended otherwise: nobody asks it to end any more
                self.task.uncancel()
        finally:
            self._waits._pending.pop(self, None)


class Waits:
    """The waits that are pending now; `verl doctor` reads what `dump` wrote.

    A run has thousands of them in a step, and hardly any expires: one timer looks after all of them.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._pending: dict[Limit, None] = {}  # in order
        self._loop: asyncio.AbstractEventLoop | None = None  # of the timer
        self._timer: asyncio.TimerHandle | None = None
        self._look_s = math.inf  # when the timer rings
        self._dumped_s = time.monotonic()

    async def wait(self, awaitable: Awaitable[T], *, who: str, what: What, timeout_s: float) -> T:
        """Await with a deadline.

        A coroutine belongs to this wait: when the deadline expires it is cancelled, and it has ended before this
        returns. A future or task may be held by others: it goes on, unless the waiter itself is cancelled.
        """
        future = asyncio.ensure_future(awaitable)
        answered = asyncio.get_running_loop().create_future()
        future.add_done_callback(partial(_wake, answered))
        try:
            with Limit(self, who, what, timeout_s):
                await answered
                return future.result()
        except (DeadlineExpired, asyncio.CancelledError) as error:
            owned = future is not awaitable or isinstance(error, asyncio.CancelledError)
            if owned and future.cancel():
                await asyncio.wait({future}, timeout=GRACE_S)
            raise

    def limit(self, *, who: str, what: str, timeout_s: float) -> Limit:
        """A deadline for a `with` block, which is cancelled when it expires. Cheaper than `wait`, and only for our own
        code: the block must end when it is cancelled."""
        return Limit(self, who, what, timeout_s)

    def pending(self) -> list[dict[str, object]]:
        now_s = self._loop.time() if self._loop else 0.0
        return [
            {"who": w.who, "what": w.text, "waiting_s": round(now_s - w.since_s, 1), "timeout_s": w.timeout_s}
            for w in self._pending
        ]

    def dump(self) -> None:
        """Best effort: a full disk must not hide why somebody waits."""
        self._dumped_s = time.monotonic()
        if self._path is not None:
            with contextlib.suppress(OSError):
                found = {"at_unix_s": time.time(), "pending": self.pending()}
                write_atomic(self._path, json.dumps(found, indent=1).encode())

    def _begin(self, limit: Limit) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # an earlier loop is gone, and with it what still waited there
            self._loop, self._timer, self._look_s = loop, None, math.inf
            self._pending.clear()
        limit.since_s = loop.time()
        limit.until_s = limit.since_s + limit.timeout_s
        self._pending[limit] = None
        if limit.until_s < self._look_s:
            self._look_by(loop, limit.until_s)

    def _look_by(self, loop: asyncio.AbstractEventLoop, until_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._look_s = min(until_s, loop.time() + NOTICE_S)
        self._timer = loop.call_at(self._look_s, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Rings at the first expiry and now and then in between; ends once nothing is pending."""
        self._timer, self._look_s, now_s = None, math.inf, loop.time()
        for limit in self._pending:
            if limit.until_s <= now_s:
                limit.until_s = math.inf
                limit.task.cancel()
        if self._pending:
            self._look_by(loop, min(limit.until_s for limit in self._pending))
            if time.monotonic() - self._dumped_s >= NOTICE_S:
                self.dump()

    def _late(self, limit: Limit) -> DeadlineExpired:
        self.dump()
        others = [f"{w.who}: {w.text}" for w in self._pending if w is not limit]
        more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
        also = f"; also pending: {'; '.join(others[:NAMED])}{more}" if others else ""
        return DeadlineExpired(f"{limit.who} waited {limit.timeout_s:g} s for {limit.text}{also}")


def _wake(answered: asyncio.Future[None], future: asyncio.Future[Any]) -> None:
    if not answered.done():
        answered.set_result(None)
    if not future.cancelled():
        future.exception()  # an error that comes after the deadline is not reported as never retrieved
