"""SIGTERM, the same for every verb: the step that is under way is finished and saved, then the run stops."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable

PREEMPTED = 75  # exit code after a save on SIGTERM (EX_TEMPFAIL)


class Stopped(RuntimeError):
    """SIGTERM came: the step was finished and saved."""


class StopRequest:
    """Set by SIGTERM from `listen` until `close`. Signals come to the main thread; elsewhere nothing is heard."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.requested = False
        self._note = note
        self._loop: asyncio.AbstractEventLoop | None = None

    def listen(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._loop = asyncio.get_running_loop()
            self._loop.add_signal_handler(signal.SIGTERM, self._hear)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_signal_handler(signal.SIGTERM)  # uvloop would leave it there, for no loop
            self._loop = None

    def check(self, number: int, total: int) -> None:
        """Before step `number`: Stopped if somebody asked."""
        if self.requested:
            raise Stopped(f"SIGTERM: stopped before step {number} of {total}; the run resumes there")

    def _hear(self) -> None:
        self.requested = True
        self._note("SIGTERM: finishing this step, then saving")
