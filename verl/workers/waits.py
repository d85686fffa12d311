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
Moved = Callable[[], float]
What = str | Callable[[], str]  # a function is asked only when somebody wants to know
NOTICE_S = 30.0  # a wait that takes longer is written down for `verl doctor`, at most once in this time
GRACE_S = 5.0  # for a cancelled coroutine to end
NAMED = 6  # other waits that an error message names


class DeadlineExpired(TimeoutError):
    """A wait was not answered in time. The message says what was waited for and what else was pending."""


class Abandoned(RuntimeError):
    """What was waited for was cancelled by somebody else; the waiter itself was not."""


class Waits:
    """The waits that are pending now; `verl doctor` reads what `dump` wrote."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._dumped_s = time.monotonic()
        self.waiting: dict[Limit, None] = {}  # in order

    async def wait(
        self, awaitable: Awaitable[T], *, who: str, what: What, timeout_s: float, moved_s: Moved = lambda: -math.inf
    ) -> T:
        """Await with a deadline. moved_s: when there was progress last by the loop's clock: the deadline begins anew.

        A coroutine belongs to this wait: when the deadline expires it is cancelled, and it has ended before this
        returns. A future or task may be held by others: it goes on, unless the waiter itself is cancelled.
        """
        future = asyncio.ensure_future(awaitable)
        answered = asyncio.get_running_loop().create_future()
        future.add_done_callback(partial(_wake, answered))
        try:
            with Limit(self, who, what, timeout_s, moved_s):
                await answered
                return future.result()
        except (DeadlineExpired, asyncio.CancelledError) as error:
            owned = future is not awaitable or isinstance(error, asyncio.CancelledError)
            if owned and future.cancel():
                await asyncio.wait({future}, timeout=GRACE_S)
            raise

    def limit(self, *, who: str, what: str, timeout_s: float, moved_s: Moved = lambda: -math.inf) -> Limit:
        """A deadline for a `with` block, which is cancelled when it expires. Cheaper than `wait`, and only for our own
        code: the block must end when it is cancelled."""
        return Limit(self, who, what, timeout_s, moved_s)

    def pending(self) -> list[dict[str, object]]:
        return [
            {"who": w.who, "what": w.text, "waiting_s": round(w.waited_s, 1), "timeout_s": w.timeout_s}
            for w in self.waiting
        ]

    def dump(self, *, older_than_s: float = 0.0) -> None:
        """Best effort: a full disk must not hide why somebody waits."""
        if self._path is None or time.monotonic() - self._dumped_s < older_than_s:
            return
        self._dumped_s = time.monotonic()
        with contextlib.suppress(OSError):
            found = {"at_unix_s": time.time(), "pending": self.pending()}
            write_atomic(self._path, json.dumps(found, indent=1).encode())


class Limit:
    """A deadline for a `with` block; see `Waits.limit`. A class, since a generator costs three times as much."""

    __slots__ = (
        *("_already", "_expired", "_loop", "_moved_s", "_task", "_timer", "_waits"),
        *("since_s", "timeout_s", "what", "who"),
    )

    def __init__(self, waits: Waits, who: str, what: What, timeout_s: float, moved_s: Moved) -> None:
        self._waits, self.who, self.what, self.timeout_s, self._moved_s = waits, who, what, timeout_s, moved_s

    @property
    def text(self) -> str:
        return self.what if isinstance(self.what, str) else self.what()

    @property
    def waited_s(self) -> float:
        return self._loop.time() - self.since_s

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "a limit is for a task of the event loop"
        self._task, self._already, self._expired, self._loop = task, task.cancelling(), False, task.get_loop()
        self.since_s = self._loop.time()
        self._waits.waiting[self] = None
        self._timer = self._loop.call_at(self.since_s + min(self.timeout_s, NOTICE_S), self._look)

    def _look(self) -> None:
        left_s = max(self.since_s, self._moved_s()) + self.timeout_s - self._loop.time()
        self._expired = left_s <= 0
        if self._expired:
            self._task.cancel()
        else:
            self._waits.dump(older_than_s=NOTICE_S)
            self._timer = self._loop.call_later(min(left_s, NOTICE_S), self._look)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._timer.cancel()
        try:
            if isinstance(error, asyncio.CancelledError):
                if self._expired and self._task.uncancel() <= self._already:
                    raise self._late() from None
                if self._task.cancelling() <= self._already:
                    raise Abandoned(f"{self.who} waited for {self.text}, which was cancelled") from None
            elif self._expired:  # the block ended otherwise: nobody asks it to end any more
                self._task.uncancel()
        finally:
            del self._waits.waiting[self]

    def _late(self) -> DeadlineExpired:
        self._waits.dump()
        others = [f"{w.who}: {w.text}" for w in self._waits.waiting if w is not self]
        more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
        also = f"; also pending: {'; '.join(others[:NAMED])}{more}" if others else ""
        return DeadlineExpired(f"{self.who} waited {self.timeout_s:g} s for {self.text}{also}")


def _wake(answered: asyncio.Future[None], future: asyncio.Future[Any]) -> None:
    if not answered.done():
        answered.set_result(None)
    if not future.cancelled():
        future.exception()  # an error that comes after the deadline is not reported as never retrieved
