"""The guardian of one worker of a pool: it limits the worker's memory, and ends all that user code starts.

    pool == control socket ==> guardian -- fork --> worker (user code) -- fork --> any other process

It never runs user code, so it always answers. It forks the worker, keeps the end of its output, and sums the memory of
the worker and all of its descendants. It kills and reaps them all when the worker ends, when the sum is above the
limit, or when the control socket is closed (by the pool, or by the end of its process). Then it writes one JSON record
to the socket: how the worker ended.

The worker is a fork of the interpreter of its guardian, which has only the standard library loaded: so a replacement is
ready in tens of milliseconds. The last argument is {"channel_fd", "parent_pid", "memory_limit_mb", "sys_path"}; the
control socket is on 0 and 1.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import socket
import struct
import sys
from typing import Any

from verl.processes import memory, tree
from verl.processes.watch import Input, Look, end_family, watch

WATCH_S = 0.2  # between two sums of memory
KILL_S = 5.0  # for killed processes to end
TAIL_BYTES = 4096


def main() -> None:
    """Start the worker of the last argument, guard it, and report its end."""
    spec = json.loads(sys.argv[-1])
    wake = tree.wake_by_signals()
    tree.die_with(spec["parent_pid"], signal.SIGTERM)
    tree.adopt_orphans()
    output_read, output_write = os.pipe()
    baseline = mmap.mmap(-1, 8)  # MB used by the worker once it has loaded the user's code; 0 before that
    me = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(wake)
        os.close(signal.set_wakeup_fd(-1))
        os.close(output_read)
        return _become_worker(me, spec, output_write, baseline)
    os.close(spec["channel_fd"])
    os.close(output_write)
    os.set_blocking(output_read, False)
    record = _Guardian(pid, wake, output_read, baseline, spec["memory_limit_mb"]).run()
    with contextlib.suppress(OSError):  # the pool's process has ended
        os.write(1, json.dumps(record).encode())


def _become_worker(guardian_pid: int, spec: dict[str, Any], output_fd: int, baseline: mmap.mmap) -> None:
    """Serve calls, in a session of its own, with its own output pipe and without the control socket."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    tree.die_with(guardian_pid)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, onto in ((nothing, 0), (output_fd, 1), (output_fd, 2)):
        os.dup2(fd, onto)
    channel_fd = os.dup(spec["channel_fd"])  # a low number, so that user code that closes all descriptors closes it too
    for fd in (nothing, output_fd, spec["channel_fd"]):
        os.close(fd)
    sys.path[:] = spec["sys_path"]
    from verl.sandbox.worker import serve_calls

    def note_baseline(mb: float) -> None:
        baseline[:8] = struct.pack("d", mb)

    serve_calls(socket.socket(fileno=channel_fd), spec["memory_limit_mb"], note_baseline)


class _Guardian:
    """Watches one worker."""

    def __init__(self, pid: int, wake_fd: int, output_fd: int, baseline: mmap.mmap, limit_mb: float) -> None:
        self._pid, self._wake_fd, self._output_fd = pid, wake_fd, output_fd
        self._baseline, self._limit_mb = baseline, limit_mb
        self._tail = b""
        self._code: int | None = None  # exit code of the worker, or minus the signal that killed it
        self._memory_mb: float | None = None

    def run(self) -> dict[str, object]:
        """Watch until the worker ends or has to be ended. End everything and return how the worker ended."""
        inputs = {self._output_fd: self._output_state, 0: self._control_state}
        looks = [Look(WATCH_S, self._memory_is_over)]
        self._code = watch(self._pid, self._wake_fd, inputs, looks, ends_on_sigterm=True)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        code = end_family(self._pid, KILL_S)
        self._code = self._code if code is None else code
        while self._drain(at_end=True):
            pass
        return {"code": self._code, "memory_mb": self._memory_mb, "tail": self._tail.decode(errors="replace")}

    def _output_state(self) -> Input:
        return "open" if self._drain() else "closed"

    def _control_state(self) -> Input:
        """Return "end": the pool sends nothing, so a readable control socket has been closed."""
        return "end"

    def _memory_is_over(self) -> bool:
        self._memory_mb = self._over_limit()
        return self._memory_mb is not None

    def _drain(self, at_end: bool = False) -> bool:
        """Read some output of the worker and keep the last part of it. Return False at end of file; with `at_end`, also
        if there is no more at present."""
        try:
            got = os.read(self._output_fd, 1 << 18)
        except BlockingIOError:
            return not at_end
        self._tail = (self._tail + got)[-TAIL_BYTES:]
        return bool(got)

    def _over_limit(self) -> float | None:
        """Return the memory of the worker and its descendants in MB if it is above the limit, otherwise None."""
        (base_mb,) = struct.unpack("d", self._baseline[:8])
        limit_mb = base_mb + self._limit_mb
        return memory.over_limit_mb(limit_mb, tree.descendants(os.getpid())) if base_mb else None
