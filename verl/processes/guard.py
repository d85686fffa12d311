"""The guard of a command: a process that ends the command, and all that it starts, when its parent ends.

    parent == control socket ==> guard -- fork --> command -- fork --> any other process

The guard adopts the orphans of the command. It kills all processes below it when the command ends, when the control
socket is closed, and when the parent has ended in any way; without a control socket, also on SIGTERM. Its exit code is
that of the command, or 128 and the number of the signal that ended the command. It executes no code of others, so it
always responds. `child.command_line` returns the command that starts it. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from verl.leftovers import own_folder
from verl.processes import tree
from verl.processes.watch import Input, Look, end_family, watch

LOOK_S = 0.1  # between two looks at the parent
MAPS_S = 5.0  # between two looks at the shared memory of the command
KILL_S = 10.0  # for killed processes to end
NOT_STARTED = 127  # the exit code of a command that cannot be started, as shells have it
SHM = Path("/dev/shm")
END = b"end"  # the line with which a parent orders the end; without it, it was killed


class Order(NamedTuple):
    """The task of a guard: the command that it runs, and when and how it ends the command."""

    command: list[str]
    """The command and its arguments; empty: the guard only ends processes that are named later."""
    parent: int
    """Pid of the process that starts the guard."""
    control: int = -1
    """Descriptor of the control socket. The guard writes the command's pid on it (0: not started), and reads lines: a
    pid and a start time of another process to kill at the end, or END."""
    passed: tuple[int, ...] = ()
    """Descriptors for the command. The guard closes its own copies, so that the other side notices the end of the
    command."""
    grace_s: float = 0.0
    """Time between SIGTERM and SIGKILL; 0: no SIGTERM."""
    temporary: str = ""
    """Prefix of a folder for the command's temporary files, which is removed when the command has ended; "": no such
    folder."""
    left_by_parent: str = ""
    """A folder of the parent to remove if the parent ends without an order to end; "": none."""
    shared_memory: str = ""
    """Remove files in /dev/shm that the command has mapped and that were not there before, except those with this
    prefix; "": remove none."""


def main() -> None:
    """Run a guard by the order in the last argument."""
    sys.exit(_Guard(Order(**json.loads(sys.argv[-1]))).run())


class _Guard:
    def __init__(self, order: Order) -> None:
        self._order = order
        self._pid = 0
        self._code: int | None = None
        self._others: dict[int, str] = {}  # start times of further processes to kill, by pid
        self._text = b""  # the beginning of a line on the control socket
        self._ordered = self._parent_ended = False
        self._before = set(os.listdir(SHM)) if SHM.is_dir() else set[str]()
        self._mapped: set[str] = set()

    def run(self) -> int:
        """Start the command, wait for a reason to end it, and return its exit code once all processes have ended."""
        order = self._order
        wake = tree.wake_by_signals()
        tree.adopt_orphans()
        if os.getppid() != order.parent:
            return 1
        env, folder = dict(os.environ), None
        if order.temporary:
            folder, _ = own_folder(Path(tempfile.gettempdir()), order.temporary)
            env["TMPDIR"] = str(folder)
        try:
            if order.command:
                self._start(env)
            if order.control >= 0:
                with contextlib.suppress(OSError):  # the parent has ended
                    os.write(order.control, b"%d\n" % self._pid)
            for fd in (0, 1, *order.passed):
                os.close(fd)
            self._wait(wake)
            self._end()
        finally:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            if order.left_by_parent and self._parent_ended:
                shutil.rmtree(order.left_by_parent, ignore_errors=True)
        code = self._code or 0
        return 128 - code if code < 0 else code

    def _start(self, env: dict[str, str]) -> None:
        me, (failed, pending) = os.getpid(), os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            tree.die_with(me)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            try:
                os.execvpe(self._order.command[0], self._order.command, env)
            except OSError as e:
                os.write(2, f"{self._order.command[0]}: {e.strerror}\n".encode())
                os.write(pending, b"-")
            os._exit(NOT_STARTED)
        os.close(pending)
        if os.read(failed, 1):  # the end of file is the start of the command
            self._code = NOT_STARTED
        else:
            self._pid = pid
        os.close(failed)

    def _wait(self, wake: int) -> None:
        """Wait until the command has ended or must be ended."""
        control = self._order.control
        inputs = {control: self._control_state} if control >= 0 else {}
        looks = [Look(LOOK_S, self._parent_has_ended), Look(MAPS_S, self._look_at_shared_memory)]
        if self._code is None:
            self._code = watch(self._pid, wake, inputs, looks, ends_on_sigterm=control < 0)

    def _control_state(self) -> Input:
        if self._read_control():
            return "open"
        self._parent_ended = not self._ordered
        return "end"

    def _parent_has_ended(self) -> bool:
        if os.getppid() == self._order.parent:
            return False
        self._parent_ended = not self._ordered
        return True

    def _read_control(self) -> bool:
        """Read pids of other processes. Return False after the order to end, and at the end of the socket."""
        try:
            found = os.read(self._order.control, 1 << 16)
        except ConnectionError:
            return False
        *lines, self._text = (self._text + found).split(b"\n")
        self._ordered = END in lines
        for pid, began in (line.decode().split() for line in lines if line != END):
            self._others[int(pid)] = began
        return bool(found) and not self._ordered

    def _end(self) -> None:
        """End the command and the further processes: with SIGTERM first if the order has a grace time, then with
        SIGKILL."""
        self._look_at_shared_memory()
        if self._code is None and self._pid and self._order.grace_s:
            for pid in tree.descendants(os.getpid()):
                tree.kill(os.kill, pid, signal.SIGTERM)
            until_s = time.monotonic() + self._order.grace_s
            while self._code is None and time.monotonic() < until_s:
                time.sleep(0.02)
                self._code = tree.reap()[0].get(self._pid)
        code = end_family(self._pid, KILL_S, self._others_that_run)
        self._code = self._code if code is None else code
        for name in self._mapped - self._before:
            (SHM / name).unlink(missing_ok=True)

    def _others_that_run(self) -> set[int]:
        """Return the further processes to kill that still run."""
        return {pid for pid, began in self._others.items() if tree.started(pid) == began}

    def _look_at_shared_memory(self) -> bool:
        """Record the files in /dev/shm that the command has mapped. Return False, since they are no reason to end
        it."""
        for pid in tree.descendants(os.getpid()) if self._order.shared_memory else ():
            with contextlib.suppress(OSError):  # it ended
                for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                    _, slash, name = line.partition(f" {SHM}/")
                    if slash and not name.startswith(self._order.shared_memory) and not name.endswith(" (deleted)"):
                        self._mapped.add(name)
        return False
