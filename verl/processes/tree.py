"""Find and kill processes: children, descendants, sessions. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LISTS_CHILDREN = os.path.exists("/proc/thread-self/children")  # not on every kernel (some sandboxes)
PAUSE_S = 0.001  # between two rounds of killing


def die_with(parent: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send this process a signal when `parent`, which forked it, ends. The fork must have been made by
    the parent's main thread: the kernel counts the end of the forking thread as that of the parent."""
    _prctl(PR_SET_PDEATHSIG, how)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def adopt_orphans() -> None:
    """Make this process the parent of descendants that lose their own parent, including those that left its session."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux") and ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) < 0:
        raise OSError(number := ctypes.get_errno(), f"prctl {option}: {os.strerror(number)}")


def wake_by_signals() -> int:
    """Return a descriptor on which SIGCHLD and SIGTERM arrive as bytes, so that a poll misses none."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the thread that started this process may have blocked some
    read, write = os.pipe()
    for fd in (read, write):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    return read


def kill(send: Callable[[int, int], None], pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal by os.kill or os.killpg. It is not an error if the process has ended or belongs to another user."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(pid, number)


def reap() -> tuple[dict[int, int], bool]:
    """Reap all children that have ended. Return their exit codes by pid (minus the signal that ended one), and True if
    this process still has children."""
    found: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return found, True
            found[pid] = os.waitstatus_to_exitcode(status)
    return found, False


def end_all(within_s: float, others: Callable[[], set[int]] = set) -> dict[int, int]:
    """Kill and reap all descendants of this process, and kill the processes that `others` returns, until none is left
    or `within_s` is over. Return the exit codes of children by pid."""
    found: dict[int, int] = {}
    until_s = time.monotonic() + within_s
    while True:
        left = {*descendants(os.getpid()), *others()}
        for pid in left:
            kill(os.kill, pid)
        ended, waiting = reap()
        found |= ended
        if not (left or waiting) or time.monotonic() >= until_s:
            return found
        time.sleep(PAUSE_S)


def descendants(root: int) -> list[int]:
    """Return the pids of all processes below `root`; an empty list where there is no /proc."""
    found: list[int] = []
    todo = [root]
    while todo:
        children = children_of(todo.pop())
        found += children
        todo += children
    return found


def children_of(pid: int) -> list[int]:
    """Return the pids of the children of a process."""
    if not LISTS_CHILDREN:
        return [child for child, fields in _all() if int(fields[1]) == pid]
    found: list[int] = []
    with contextlib.suppress(OSError):  # it ended meanwhile
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def session_of(leader: int) -> set[int]:
    """Return the pids of all processes in the session of this leader that are not zombies."""
    return {pid for pid, fields in _all() if int(fields[3]) == leader and fields[0] != "Z"}


def started(pid: int) -> str:
    """Return the start time of a process in ticks since boot; "" if it does not exist or is a zombie. Pid and start
    time together identify a process, since pids are reused."""
    with contextlib.suppress(OSError):
        fields = _fields(pid)
        return "" if fields[0] == "Z" else fields[19]
    return ""


def _all() -> list[tuple[int, list[str]]]:
    """Return the pid and the fields of each process: state, parent, group, session ..."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            with contextlib.suppress(OSError):
                found.append((int(name), _fields(int(name))))
    return found


def _fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the process name, which is in parentheses and may contain spaces and
    parentheses."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
