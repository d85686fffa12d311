"""A command on our standard input and output that ends with whoever started it, and everything it started with it.

Run as a script with the standard library only: `python -I -S attended.py PARENT_PID COMMAND ARGUMENT...`. It outlives
what it starts, adopts what that leaves behind, and kills it all when the command ends, when it gets SIGTERM, or when
its parent is gone, however that went.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType

LOOK_S = 0.1  # between two looks at the command and the parent
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main(parent: int, command: list[str]) -> int:
    """parent: who started this; it may be gone by now."""
    me = os.getpid()
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:
        return 1
    pid = os.fork()
    if pid == 0:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            if os.getppid() == me:
                os.execvp(command[0], command)
        except OSError as e:
            os.write(2, f"{command[0]}: {e.strerror}\n".encode())
        os._exit(127)
    for fd in (0, 1):
        os.close(fd)  # the end of either side is seen by the other
    status: int | None = None
    while status is None and not stopped and os.getppid() == parent:
        ended, found = os.waitpid(pid, os.WNOHANG)
        status = found if ended else None
        time.sleep(0 if ended else LOOK_S)
    guardian = _beside("guardian")
    until_s = time.monotonic() + guardian.KILL_S
    while (left := guardian.descendants(me)) and time.monotonic() < until_s:
        for one in left:
            guardian.shoot(os.kill, one)
        while _reaped():
            pass
        time.sleep(0.001)
    return 1 if status is None else abs(os.waitstatus_to_exitcode(status))


def _reaped() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _beside(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
