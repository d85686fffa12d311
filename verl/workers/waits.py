"""Every wait has a deadline, and says who waits, for what and since when."""

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
What = str | Callable[[], str]  # a function is asked only when somebody wants to know
NOTICE_S = 30.0  # a wait that takes longer is written down for `verl doctor`, at most once in this time
GRACE_S = 5.0  # for a cancelled coroutine to end
NAMED = 6  # other waits that an error message names


class DeadlineExpired(TimeoutError):
    """A wait was not answered in time. The message says what was waited for and what else was pending."""


def result_of(future: Future[T], what: str, timeout_s: float) -> T:
    """The result of a call, for a thread that may wait; what: is said of one that is not answered in time."""
    if wait([future], timeout_s).not_done:
        raise DeadlineExpired(f"{what} within {timeout_s:g} s")
    return future.result()


def from_thread(work: Callable[[], T]) -> Future[T]:
    """What it returns or raises, from a thread of its own: whoever asks is not held up."""
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
    """What was waited for was cancelled by somebody else; the waiter itself was not."""


class Limit:
    """A deadline for a `with` block, which is cancelled when it expires. Cheaper than `Waits.wait`, and only for our
    own code: the block must end when it is cancelled. moved_s: when there was progress last, by the loop's clock: the
    deadline begins anew (`float`: never)."""

    def __init__(self, waits: Waits, who: str, what: What, timeout_s: float, moved_s: Callable[[], float] = float):
        self._waits, self._who, self._what, self._timeout_s, self._moved_s = waits, who, what, timeout_s, moved_s

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
        asked = self._task.uncancel() if self._expired else self._task.cancelling()  # by others, to end
        if isinstance(error, asyncio.CancelledError) and asked <= self._already:
            what, others = self.told()["what"], [f"{w['who']}: {w['what']}" for w in self._waits.pending()]
            if not self._expired:
                raise Abandoned(f"{self._who} waited for {what}, which was cancelled") from None
            more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
            also = f"; also pending: {'; '.join(others[:NAMED])}{more}" if others else ""
            raise DeadlineExpired(f"{self._who} waited {self._timeout_s:g} s for {what}{also}") from None

    def told(self) -> dict[str, object]:
        what, waited_s = self._what if isinstance(self._what, str) else self._what(), self._loop.time() - self._since_s
        return {"who": self._who, "what": what, "waiting_s": round(waited_s, 1), "timeout_s": self._timeout_s}


class Waits:
    """The waits that are pending now; `verl doctor` reads what `dump` wrote."""

    def __init__(self, path: Path | None = None) -> None:
        self._path, self._dumped_s = path, time.monotonic()
        self.waiting: dict[Limit, None] = {}  # in order

    async def wait(
        self, job: Awaitable[T], *, who: str, what: What, timeout_s: float, moved_s: Callable[[], float] = float
    ) -> T:
        """Await within a `Limit`. A coroutine is cancelled with it and has ended before this returns; a future or task
        that others may hold goes on unless the waiter itself is cancelled."""
        future = asyncio.ensure_future(job)
        future.add_done_callback(lambda f: f.cancelled() or f.exception())  # a late error is not "never retrieved"
        try:
            with Limit(self, who, what, timeout_s, moved_s):
                await asyncio.wait({future})
                return future.result()
        except (DeadlineExpired, asyncio.CancelledError) as error:
            if (future is not job or isinstance(error, asyncio.CancelledError)) and future.cancel():
                await asyncio.wait({future}, timeout=GRACE_S)
            raise

    def pending(self) -> list[dict[str, object]]:
        return [limit.told() for limit in self.waiting]

    def dump(self, *, older_than_s: float) -> None:
        """Best effort: a full disk must not hide why somebody waits."""
        if self._path is not None and time.monotonic() - self._dumped_s >= older_than_s:
            self._dumped_s, found = time.monotonic(), {"at_unix_s": time.time(), "pending": self.pending()}
            with contextlib.suppress(OSError):
                write_atomic(self._path, json.dumps(found, indent=1).encode())
