"""The guardian of one worker: it outlives whatever user code does, and leaves nothing behind.

    pool == control socket ==> guardian -- fork --> worker (user code) --> whatever it forks

It never runs user code, so it always answers. It forks the worker, keeps the tail of its output, sums the memory of it
and all its descendants, and kills and reaps them all when the worker ends, when the sum passes the limit, or at the end
of the control socket (the pool or its process is gone). Then it writes one JSON record there: how the worker died.

Run as a script with the standard library only, so that a replacement is up in tens of ms: `python -P guardian.py
{"channel_fd": 5, "parent_pid": 1, "memory_limit_mb": 2048, "sys_path": [...]}`, the control socket on 0 and 1.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import mmap
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

WATCH_S = 0.2  # how often memory is summed
KILL_S = 5.0  # how long the guardian tries to kill and reap everything
TAIL_BYTES = 4096
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
LISTED = os.path.exists("/proc/thread-self/children")  # not with every kernel (some sandboxes)


def main() -> None:
    spec = json.loads(sys.argv[1])
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the pool's thread may have blocked what we listen to
    wake_read, wake_write = _listen(signal.SIGCHLD, signal.SIGTERM)
    _die_with(spec["parent_pid"], signal.SIGTERM)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the worker come to us, also those that left its session
    output_read, output_write = os.pipe()
    baseline = mmap.mmap(-1, 8)  # MB used by the worker once it has loaded the user's code; 0 before
    me = os.getpid()
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        for fd in (wake_read, wake_write, output_read):
            os.close(fd)
        return _become_worker(me, spec, output_write, baseline)
    os.close(spec["channel_fd"])
    os.close(output_write)
    os.set_blocking(output_read, False)
    record = _Guard(pid, wake_read, output_read, baseline, spec["memory_limit_mb"]).run()
    with contextlib.suppress(OSError):  # the pool's process may be gone
        os.write(1, json.dumps(record).encode())


def _listen(*signals: signal.Signals) -> tuple[int, int]:
    """Turn signals into bytes on a pipe: the poll loop then misses none."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in signals:
        signal.signal(number, lambda *_: None)
    return read, write


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _die_with(parent_pid: int, how: signal.Signals) -> None:
    _prctl(PR_SET_PDEATHSIG, how)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)


def _become_worker(guardian_pid: int, spec: dict[str, Any], output_fd: int, baseline: mmap.mmap) -> None:
    """Own session and group, own output pipe, no way back to the control socket; then serve until told to end."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _die_with(guardian_pid, signal.SIGKILL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, onto in ((nothing, 0), (output_fd, 1), (output_fd, 2)):
        os.dup2(fd, onto)
    channel_fd = os.dup(spec["channel_fd"])  # a low number, whatever its parent has open: who closes all, closes it
    for fd in (nothing, output_fd, spec["channel_fd"]):
        os.close(fd)
    sys.path[:] = spec["sys_path"]
    from verl.sandbox.worker import serve

    def note_baseline(mb: float) -> None:
        baseline[:8] = struct.pack("d", mb)

    serve(socket.socket(fileno=channel_fd), spec["memory_limit_mb"], note_baseline)


class _Guard:
    """The watch over one worker."""

    def __init__(self, pid: int, wake_fd: int, output_fd: int, baseline: mmap.mmap, limit_mb: float) -> None:
        self._pid, self._wake_fd, self._output_fd = pid, wake_fd, output_fd
        self._baseline, self._limit_mb = baseline, limit_mb
        self._tail = b""
        self._code: int | None = None  # exit code of the worker, or minus the signal that killed it
        self._memory_mb: float | None = None

    def run(self) -> dict[str, object]:
        """Watch until the worker ends or has to; then end everything and say how it went."""
        poller = select.poll()
        for fd in (0, self._wake_fd, self._output_fd):
            poller.register(fd, select.POLLIN)
        look_at = 0.0
        while self._code is None and self._memory_mb is None:
            ready = {fd for fd, _ in poller.poll(WATCH_S * 1000)}
            if self._output_fd in ready and not self._drain():
                poller.unregister(self._output_fd)
            if 0 in ready or (self._wake_fd in ready and signal.SIGTERM in os.read(self._wake_fd, 4096)):
                break
            self._reap()
            if time.monotonic() >= look_at:
                self._memory_mb = self._over_limit()
                look_at = time.monotonic() + WATCH_S
        self._end_all()
        while self._drain(at_end=True):
            pass
        return {"code": self._code, "memory_mb": self._memory_mb, "tail": self._tail.decode(errors="replace")}

    def _drain(self, at_end: bool = False) -> bool:
        """Read some output, keep its tail. False at end of file (or when nothing is left, `at_end`)."""
        try:
            got = os.read(self._output_fd, 1 << 18)
        except BlockingIOError:
            return not at_end
        self._tail = (self._tail + got)[-TAIL_BYTES:]
        return bool(got)

    def _reap(self) -> bool:
        """Collect every ended child, adopted ones too. False when there are no children left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._pid:
                self._code = os.waitstatus_to_exitcode(status)

    def _over_limit(self) -> float | None:
        """Megabytes in use by the worker and its descendants if that is too much, else None."""
        (base_mb,) = struct.unpack("d", self._baseline[:8])
        return over_limit_mb(base_mb + self._limit_mb, descendants(os.getpid())) if base_mb else None

    def _end_all(self) -> None:
        """SIGKILL and reap the worker's group and every other descendant."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        deadline = time.monotonic() + KILL_S
        shoot(os.killpg, self._pid)
        while self._reap() and time.monotonic() < deadline:
            for pid in {*descendants(os.getpid()), *([self._pid] if self._code is None else [])}:
                shoot(os.kill, pid)
            time.sleep(0.001)


def shoot(kill: Callable[[int, int], None], pid: int) -> None:
    """SIGKILL by os.kill or os.killpg; it may be gone, or another user's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        kill(pid, signal.SIGKILL)


def descendants(root: int) -> list[int]:
    """Pids of all processes under `root`, without it. Empty where there is no /proc."""
    found: list[int] = []
    todo = [root]
    while todo:
        children = children_of(todo.pop())
        found += children
        todo += children
    return found


def children_of(pid: int) -> list[int]:
    if not LISTED:
        return _children_by_scan(pid)
    found: list[int] = []
    with contextlib.suppress(OSError):  # it ended while we looked
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def _children_by_scan(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name, in parentheses, may itself hold spaces and parentheses.
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def over_limit_mb(limit_mb: float, pids: list[int], beside_mb: float = 0.0) -> float | None:
    """Megabytes in use by all of these if that is too much, else None. beside_mb: what the kernel holds for them."""
    if sum(map(resident_mb, pids)) + beside_mb <= limit_mb:
        return None
    used_mb = sum(map(proportional_mb, pids)) + beside_mb  # slower, but counts once what forks share
    return used_mb if used_mb > limit_mb else None


def sockets_mb(pid: int) -> float:
    """Return what the sockets of its network can hold at most, also those that are closed and not yet read."""
    try:
        used = int(Path(f"/proc/{pid}/net/sockstat").read_text().split()[2])  # "sockets: used 3"
        return used * int(Path("/proc/sys/net/core/wmem_default").read_text()) / 2**20
    except (OSError, ValueError, IndexError):
        return 0.0


def system_s(pids: list[int]) -> float:
    """Return the seconds that the kernel worked for these processes, and for those that they waited for."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # it ended
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[12]) + int(fields[14])
    return ticks / os.sysconf("SC_CLK_TCK")


class Machine(NamedTuple):
    """Megabytes of memory: what programs could still take, all of it, what the kernel holds and cannot give back."""

    free_mb: float = math.inf
    total_mb: float = math.inf
    kernel_mb: float = 0.0


def machine() -> Machine:
    """Return the memory of this machine, without an end where there is no /proc."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = {line.split()[0]: int(line.split()[1]) / 1024 for line in lines}
        return Machine(found["MemAvailable:"], found["MemTotal:"], found["SUnreclaim:"])
    except (OSError, KeyError, ValueError):
        return Machine()


def resident_mb(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES / 2**20
    except OSError:
        return 0.0


def anonymous_mb(pid: int) -> float:
    """Of it alone, without files that it has mapped. 0 for one that is gone."""
    try:
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
        return (resident - shared) * PAGE_BYTES / 2**20
    except (OSError, ValueError):
        return 0.0


def proportional_mb(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return resident_mb(pid)


if __name__ == "__main__":
    main()
