"""Bounds on the time and the memory of a rendering, since a chat template is a program that was downloaded with a
model.

A compiled template is Python byte code, so an exception that another thread sets in the rendering thread ends any loop
or recursion. One watching thread checks all present renderings ten times a second; a rendering itself only adds and
removes its entry in a table. The time is the processor time of the rendering thread, so the load of the machine does
not count. Two cases need other bounds, because they are a single operation: the memory of one large allocation is
bounded where rows are read (`bounded_memory`), and templates that compute powers, which may take hours, are refused by
their text.
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
    """A template takes more time or memory than a rendering may. The row is not at fault."""


class _Overrun(BaseException):
    """The exception that the watching thread sets in a rendering thread. It is a BaseException, so that no `except
    Exception` in between catches it."""


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Limit the address space of this process to its present size and `RENDER_BYTES`; operations beyond it raise
    MemoryError. The limit is that of the whole process, so use it only in a process without other work. If the system
    does not report the memory of a process, there is no limit."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = pages * resource.getpagesize() + RENDER_BYTES
    ceilings = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(wanted, *ceilings) if ceilings else wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@dataclass(slots=True)
class _Rendering:
    """A rendering in progress in one thread."""

    began: float
    """Processor time of the thread when the rendering began, in seconds."""
    held: int
    """Memory of the process shortly before the rendering, in bytes."""
    why: str = ""  # set once, with the exception


@dataclass(slots=True)
class _Watch:
    """The table of renderings in progress, by thread, and the thread that checks them.

    held: the memory of the process at the last check, in bytes
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    rendering: dict[int, _Rendering] = field(default_factory=dict)
    thread: threading.Thread | None = None
    held: int = field(default_factory=lambda: _held())

    def enter(self, ident: int) -> None:
        with self.lock:
            self.rendering[ident] = _Rendering(_seconds(ident), self.held)
            if self.thread is None or not self.thread.is_alive():  # a fork has a copy of the object but not the thread
                self.thread = threading.Thread(target=self._look, name="templates", daemon=True)
                self.thread.start()

    def leave(self, ident: int) -> str:
        """Remove the rendering of a thread. Return the reason why it had to end, or "", and cancel an exception that
        was set but not yet raised."""
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
    """Return the processor time of a thread in seconds; wall clock time if the system does not report it (macOS)."""
    clock = getattr(time, "pthread_getcpuclockid", None)
    return time.clock_gettime(clock(ident)) if clock else time.monotonic()


def _held() -> int:
    """Return the resident memory of this process in bytes; 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


@cache
def _watch() -> _Watch:
    return _Watch()


@contextmanager
def bounded_rendering() -> Iterator[None]:
    """Raise TemplateOverrun if the block takes more than `RENDER_SECONDS` of processor time in this thread, or if the
    process grows by more than half of `RENDER_BYTES` meanwhile."""
    watch, ident, why = _watch(), threading.get_ident(), ""
    if ident in watch.rendering:  # a nested rendering: the outer one is bounded already
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
    """Raise ValueError if a template computes a power (`10**10**9`): that is one operation, which cannot be
    interrupted."""
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
