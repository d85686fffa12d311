"""Every wait has a deadline and says who waits, for what, since when (pitfalls 5)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class DeadlineExpired(TimeoutError):
    """A wait was not answered in time. The message says what was waited for and what else was pending."""


@dataclass(frozen=True, slots=True)
class Wait:
    who: str
    what: str
    since_s: float
    timeout_s: float


class Waits:
    """The waits that are pending now; `verl doctor` reads what `dump` wrote."""

    def __init__(self, path: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._pending: dict[int, Wait] = {}
        self._path = path
        self._clock = clock
        self._next = 0

    async def wait(
        self, awaitable: Awaitable[T], *, who: str, what: str | Callable[[], str], timeout_s: float, cancel: bool = False
    ) -> T:
        """Await with a deadline. `what` may be a function, asked when the deadline expires.

        On expiry the awaited future is cancelled only if `cancel`: another wait may hold it.
        """
        self._next += 1
        key, start = self._next, self._clock()
        future = asyncio.ensure_future(awaitable)
        self._pending[key] = Wait(who, what if isinstance(what, str) else what(), start, timeout_s)
        try:
            done, _ = await asyncio.wait({future}, timeout=timeout_s)
            if not done:
                text = what if isinstance(what, str) else what()
                others = [f"{w.who}: {w.what}" for k, w in self._pending.items() if k != key]
                self.dump()
                if cancel:
                    future.cancel()
                raise DeadlineExpired(
                    f"{who} waited {timeout_s:.0f} s for {text}" + (f"; also pending: {'; '.join(others)}" if others else "")
                )
            return future.result()
        except asyncio.CancelledError:
            future.cancel()
            raise
        finally:
            del self._pending[key]

    def pending(self) -> list[dict[str, object]]:
        now = self._clock()
        return [
            {"who": w.who, "what": w.what, "waiting_s": round(now - w.since_s, 1), "timeout_s": w.timeout_s}
            for w in self._pending.values()
        ]

    def dump(self) -> None:
        if self._path is not None:
            self._path.write_text(json.dumps({"at_unix_s": time.time(), "pending": self.pending()}, indent=1))
