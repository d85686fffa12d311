"""SIGTERM, Ctrl-C and a lost terminal, the same for every verb.

After the first SIGTERM or Ctrl-C the present step is finished and saved if it ends within `run.grace_s`; else it is
abandoned, and the state at its beginning is saved. An update that has begun is abandoned too if that state is on disk
or a copy of it is kept (`Checkpointer.hold`); if not, it is finished, however long that takes, and the printed lines
give the reason. A further Ctrl-C ends the process at once. After SIGHUP nothing is written to the console any more."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from verl.track.console import LiveProgress

T = TypeVar("T")
PREEMPTED, INTERRUPTED = 75, 130  # exit codes after SIGTERM (EX_TEMPFAIL) and after Ctrl-C
RESERVE_S = 2.0  # seconds of the grace that are left for work besides the save


class Stopped(RuntimeError):
    """A signal ended the run; finished steps are saved."""

    code = PREEMPTED


class StopRequest:
    """The request to stop a run, set by a signal between `listen` and `close`. Signals are handled in the main thread
    only. save_s: returns the duration of a save."""

    def __init__(self, progress: LiveProgress, grace_s: float, save_s: Callable[[], float]) -> None:
        self.requested = ""  # the name of the signal
        self.abandoned = False  # an abandoned update is still being computed
        self._progress, self._grace_s, self._save_s = progress, grace_s, save_s
        self._given_up = False
        self._handled: list[signal.Signals] = []
        self._works: list[tuple[asyncio.Task[None], str, Callable[[], str]]] = []  # the innermost is the last

    @property
    def left_s(self) -> float:
        """The seconds of the grace in which a step can still end: without the time for a save."""
        return max(0.0, self._grace_s - self._save_s() - RESERVE_S)

    def listen(self) -> None:
        """Handle the signals that are not ignored (they are under nohup, or in a shell's background)."""
        if threading.current_thread() is threading.main_thread():
            for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if signal.getsignal(one) is not signal.SIG_IGN:
                    asyncio.get_running_loop().add_signal_handler(one, self._on_signal, one)
                    self._handled.append(one)

    def close(self, *, deaf: bool = False) -> None:
        """Stop handling signals. deaf: ignore them from now on, so that this process can still print why it ends. After
        an abandoned update the process ends without Python's own finalization, which would stop a thread inside a
        kernel and abort."""
        if self.abandoned:
            atexit.register(_leave, self._code)
        while self._handled:  # uvloop would leave the handler installed
            asyncio.get_running_loop().remove_signal_handler(one := self._handled.pop())
            if deaf:
                signal.signal(one, signal.SIG_IGN)

    async def unless_given_up(
        self, work: Coroutine[Any, Any, None], then: str, why_not: Callable[[], str] = lambda: ""
    ) -> bool:
        """Await work as `abandonable` does. Return False if it was cancelled."""
        with self.abandonable(work, then, why_not) as task:
            await task
        return not task.cancelled()

    @contextlib.contextmanager
    def abandonable(
        self, work: Coroutine[Any, Any, None], then: str, why_not: Callable[[], str]
    ) -> Iterator[asyncio.Task[None]]:
        """Start work as a task, which the block awaits. After a signal the task is cancelled at the end of the grace if
        it may be abandoned then; the block then ends without an error. then: the consequence, as the end of a printed
        sentence · why_not: returns why the work may not be abandoned now; "" if it may."""
        task = asyncio.ensure_future(work)
        self._works.append((task, then, why_not))
        if self._given_up:
            self._give_up()
        try:
            yield task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if not self._given_up or (current is not None and current.cancelling()):
                raise
        finally:
            self._works.pop()

    def stopped(self, number: int, total: int, saved: int) -> Stopped:
        """Return the error for a stop before step `number`, when the state after step `saved` is the newest on disk."""
        where = "the run resumes there" if saved == number - 1 else f"only step {saved} is saved, the run resumes there"
        error = Stopped(f"{self.requested}: stopped before step {number} of {total}; {where}")
        error.code = self._code
        return error

    @property
    def _code(self) -> int:
        return INTERRUPTED if self.requested == "SIGINT" else PREEMPTED

    def _on_signal(self, which: signal.Signals) -> None:
        if which == signal.SIGHUP:
            return self._progress.close_output(which.name, hung_up=True)
        if self.requested:
            if which == signal.SIGINT:
                self._progress.message("Ctrl-C again: out now, nothing more is saved")
                self._progress.close()
                os._exit(INTERRUPTED)  # the workers die with this process
            return None
        self.requested = which.name
        left_s, why = self.left_s, self._why_not()
        grace = f"{left_s:.0f} s (run.grace_s={self._grace_s:g} less a save)"
        how = f"however long it takes ({why}), then saving"
        if not why:
            how = f"then saving; if it takes longer than {grace}{self._works[-1][1]}"
        self._progress.message(f"{which.name}: finishing this step, {how}. Ctrl-C: out now")
        asyncio.get_running_loop().call_later(left_s, self._give_up)

    def _why_not(self) -> str:
        return self._works[-1][2]() if self._works else "it is about to end"

    def _give_up(self) -> None:
        self._given_up = True
        if why := self._why_not():
            over = f"run.grace_s={self._grace_s:g} is over"
            self._progress.message(f"{over}: the step is finished and saved first ({why})")
        else:
            self._works[-1][0].cancel()


async def unless_stopped(work: Coroutine[Any, Any, T]) -> T:
    """Await the work of a verb that saves nothing. SIGTERM and Ctrl-C cancel it; raise Stopped when the cancelled work
    has ended."""
    task, received, loop = asyncio.ensure_future(work), list[signal.Signals](), asyncio.get_running_loop()

    def on_signal(one: signal.Signals) -> None:
        if received and one == signal.SIGINT:
            os._exit(INTERRUPTED)
        if not received:
            received.append(one)
            task.cancel()

    listening = threading.current_thread() is threading.main_thread()
    signals = [s for s in (signal.SIGTERM, signal.SIGINT) if listening and signal.getsignal(s) is not signal.SIG_IGN]
    for one in signals:
        loop.add_signal_handler(one, on_signal, one)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        error = Stopped(f"{received[0].name}: stopped before the end; nothing is saved, start it again")
        error.code = INTERRUPTED if received[0] == signal.SIGINT else PREEMPTED
        raise error from None
    finally:
        for one in signals:
            loop.remove_signal_handler(one)


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the console is closed
            stream.flush()
    os._exit(code)
