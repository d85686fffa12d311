"""Bounds on the time and the memory of a rendering: a chat template is a program that came with a model.

A template is byte code of Python once it is compiled, so an exception that another thread sets in the rendering thread
ends any loop or recursion of it. One thread looks ten times a second at what is being rendered, and a rendering itself
only enters and leaves a table. The time is that of the processor in the rendering thread, whatever else the machine
does. What a single operation allocates at once is bounded where rows are read (`bounded_memory`), and a power, which a
single operation may compute for hours, is refused in the text of the template.
"""

from __future__ import annotations

import ctypes
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import jinja2

from verl.errors import Refused

RENDER_BYTES = 8 << 30  # beyond what the process has; a template that repeats a text took 23 GB
RENDER_SECONDS = 10.0  # of the processor; the longest rows take less than one
LOOK_EVERY_S = 0.1


class TemplateOverrun(Refused):
    """No fault of the row: the template takes more time or memory than a rendering may."""


class _Overrun(BaseException):
    """Set from outside in the rendering thread; no `except Exception` on its way holds it."""


@contextmanager
def bounded_memory(more: int = RENDER_BYTES) -> Iterator[None]:
    """Allow at most `more` bytes of address space than now; beyond, operations raise MemoryError. It holds for the
    whole process, so only where it does nothing else. Nothing is bounded where the system does not report the memory of
    a process."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = pages * resource.getpagesize() + more
    ceilings = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(wanted, *ceilings) if ceilings else wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@dataclass(slots=True)
class _Rendering:
    """A rendering in one thread."""

    began: float
    """Seconds of the thread's processor time when it began."""
    held: int
    """Bytes of the process shortly before."""
    why: str = ""  # set once, with the exception


@dataclass(slots=True)
class _Watch:
    """The table of threads that render, and the thread that looks at it. held: bytes of the process when it looked."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    rendering: dict[int, _Rendering] = field(default_factory=dict)
    thread: threading.Thread | None = None
    held: int = field(default_factory=lambda: _held())

    def enter(self, ident: int) -> None:
        with self.lock:
            self.rendering[ident] = _Rendering(_seconds(ident), self.held)
            if self.thread is None or not self.thread.is_alive():  # also of a process that was forked
                self.thread = threading.Thread(target=self._look, name="templates", daemon=True)
                self.thread.start()

    def leave(self, ident: int) -> str:
        """Return why this rendering was to end; "" if it was not. No exception is on its way afterwards."""
        with self.lock:
            found = self.rendering.pop(ident, None)
            if found is None or not found.why:
                return ""
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), None)
            return found.why

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_EVERY_S)
            with self.lock:
                self.held = _held()
                for ident, one in self.rendering.items():
                    if not one.why and (why := self._over(ident, one)):
                        one.why = why
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(_Overrun))

    def _over(self, ident: int, one: _Rendering) -> str:
        if _seconds(ident) - one.began > RENDER_SECONDS:
            return f"more than {RENDER_SECONDS:.0f} s"
        return f"more than {RENDER_BYTES >> 31} GB of memory" if self.held - one.held > RENDER_BYTES // 2 else ""


def _seconds(ident: int) -> float:
    """Return the processor seconds of this thread; those of the clock where the system does not report them (macOS)."""
    clock = getattr(time, "pthread_getcpuclockid", None)
    return time.clock_gettime(clock(ident)) if clock else time.monotonic()


def _held() -> int:
    """Return the bytes of memory that this process has; 0 where the system does not report them."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


@cache
def _watch() -> _Watch:
    return _Watch()


@contextmanager
def bounded_rendering() -> Iterator[None]:
    """TemplateOverrun where what is rendered inside takes more than `RENDER_SECONDS` of this thread, or lets the
    process grow by half of `RENDER_BYTES` meanwhile."""
    watch, ident, why = _watch(), threading.get_ident(), ""
    if ident in watch.rendering:  # of a rendering inside another one
        yield
        return
    try:
        try:
            watch.enter(ident)
            yield
        finally:
            why = watch.leave(ident)
    except _Overrun as e:
        raise overrun(why or watch.leave(ident) or "more than a rendering may") from e
    except MemoryError as e:
        raise overrun("more memory than rendering may") from e


def overrun(what: str) -> TemplateOverrun:
    fix = "see what it repeats, and set another with model.chat_template=FILE"
    return TemplateOverrun(f"the chat template takes {what}: {fix}")


def refuse_powers(template: str) -> None:
    """ValueError for a template that computes a power (`10**10**9`): one operation that nothing can interrupt."""
    before = ""
    try:
        tokens: Sequence[tuple[int, str, str]] = list(jinja2.Environment().lex(template))
    except jinja2.TemplateError:  # has another line where it is rendered
        return
    for line, kind, value in tokens:
        if kind == "operator" and value == "**" and before not in ("(", ","):  # not `**` before arguments
            raise Refused(
                f"the chat template computes a power (`**`, line {line}), which may take any time. Fix: "
                "model.chat_template=FILE with another template"
            )
        before = before if kind == "whitespace" else value
