"""Waits with deadlines. Every wait names the waiting part, the awaited result and the time since it began."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

from verl.track.files import write_atomic

T = TypeVar("T")
What = str | Callable[[], str]  # a function is called only when the text is needed
NOTICE_S = 30.0  # a longer wait is written to a file for `verl doctor`, at most once per this time
GRACE_S = 5.0  # the time that a cancelled coroutine gets to end
NAMED = 6  # the number of other waits that an error message lists


class DeadlineExpired(TimeoutError):
    """A wait had no result in time. The message names the awaited result and the other pending waits."""


def result_of(future: Future[T], what: str, timeout_s: float) -> T:
    """Return the result of a call; for threads that may block. Raise DeadlineExpired after `timeout_s`. what: the text
    of that error."""
    if wait([future], timeout_s).not_done:
        raise DeadlineExpired(f"{what} within {timeout_s:g} s")
    return future.result()


def from_thread(work: Callable[[], T]) -> Future[T]:
    """Run a function in a new thread, so that the caller does not block, and return a future of its result."""
    found = Future[T]()
    found.set_running_or_notify_cancel()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as e:
            found.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    return found


class Abandoned(RuntimeError):
    """The awaited job was cancelled by another part; the waiter itself was not cancelled."""


class Limit:
    """A deadline for a `with` block, which is cancelled when the deadline expires. It is cheaper than `Waits.wait`, and
    only for verl's own code, since the block must end when it is cancelled. moved_s: returns the time of the last
    progress by the loop's clock, from which the deadline counts again; `float` returns 0: no progress is reported."""

    def __init__(self, waits: Waits, waiter: str, what: What, timeout_s: float, moved_s: Callable[[], float] = float):
        self._waits, self._waiter, self._what, self._timeout_s, self._moved_s = waits, waiter, what, timeout_s, moved_s

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "a limit is for a task of the event loop"
        self._task, self._already, self._expired, self._loop = task, task.cancelling(), False, task.get_loop()
        self._since_s = self._loop.time()
        self._waits.waiting[self] = None
        self._timer = self._loop.call_at(self._since_s + min(self._timeout_s, NOTICE_S), self._look)

    def _look(self) -> None:
        left_s = max(self._since_s, self._moved_s()) + self._timeout_s - self._loop.time()
        self._expired = left_s <= 0
        if self._expired:
            self._task.cancel()
        else:
            self._timer = self._loop.call_later(min(left_s, NOTICE_S), self._look)
        self._waits.dump(older_than_s=0 if self._expired else NOTICE_S)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._timer.cancel()
        del self._waits.waiting[self]
        # cancelled by another part, which wants it to end
        wanted = self._task.uncancel() if self._expired else self._task.cancelling()
        if isinstance(error, asyncio.CancelledError) and wanted <= self._already:
            what, others = self.description()["what"], [f"{w['who']}: {w['what']}" for w in self._waits.pending()]
            if not self._expired:
                raise Abandoned(f"{self._waiter} waited for {what}, which was cancelled") from None
            more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
            also = f"; also pending: {'; '.join(others[:NAMED])}{more}" if others else ""
            raise DeadlineExpired(f"{self._waiter} waited {self._timeout_s:g} s for {what}{also}") from None

    def description(self) -> dict[str, object]:
        """Return the waiting part, the awaited result, and the seconds so far and at most."""
        what, waited_s = self._what if isinstance(self._what, str) else self._what(), self._loop.time() - self._since_s
        return {"who": self._waiter, "what": what, "waiting_s": round(waited_s, 1), "timeout_s": self._timeout_s}


class Waits:
    """The pending waits. `verl doctor` reads the file that `dump` writes."""

    def __init__(self, path: Path | None = None) -> None:
        self._path, self._dumped_s = path, time.monotonic()
        self.waiting: dict[Limit, None] = {}  # in order

    async def wait(
        self, job: Awaitable[T], *, waiter: str, what: What, timeout_s: float, moved_s: Callable[[], float] = float
    ) -> T:
        """Await a job within a `Limit` and return its result. A coroutine is cancelled when the limit expires, and has
        ended before this returns. A future or task, which other parts may use, continues unless the waiter itself is
        cancelled."""
        future = asyncio.ensure_future(job)
        future.add_done_callback(lambda f: f.cancelled() or f.exception())  # a late error is not "never retrieved"
        try:
            with Limit(self, waiter, what, timeout_s, moved_s):
                await asyncio.wait({future})
                return future.result()
        except (DeadlineExpired, asyncio.CancelledError) as error:
            if (future is not job or isinstance(error, asyncio.CancelledError)) and future.cancel():
                await asyncio.wait({future}, timeout=GRACE_S)
            raise

    def pending(self) -> list[dict[str, object]]:
        return [limit.description() for limit in self.waiting]

    def dump(self, *, older_than_s: float) -> None:
        """Write the pending waits to the file, unless it was written less than `older_than_s` ago. A full disk is
        ignored, since it must not hide the error of a wait."""
        if self._path is not None and time.monotonic() - self._dumped_s >= older_than_s:
            self._dumped_s, found = time.monotonic(), {"at_unix_s": time.time(), "pending": self.pending()}
            with contextlib.suppress(OSError):
                write_atomic(self._path, json.dumps(found, indent=1).encode())
