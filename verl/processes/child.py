"""Start a command that ends with this process, however this process ends: `Child`.

this process == control socket ==> guard.py -- fork --> the command
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from verl.processes import tree
from verl.processes.guard import END, KILL_S, Order

START_S = 30.0  # for a guard to start the command
NOTHING, SAME = subprocess.DEVNULL, None
"""Values for stdin, stdout and stderr: /dev/null, and the stream of this process."""
Stream = int | IO[bytes] | None


def command_line(order: Order) -> list[str]:
    """Return the command that runs a guard, for libraries that start a command themselves."""
    return [*interpreter_line("verl.processes.guard", "-I", "-S"), json.dumps(order._asdict())]


def interpreter_line(module: str, *options: str, python: str = sys.executable) -> list[str]:
    """Return the command, without arguments, that calls `main` of a module of verl in a new interpreter with these
    options. verl's folder is the last entry of its path, so that it does not hide modules of the standard library."""
    begin = f"import sys; sys.path.append(sys.argv[1]); import {module} as module; module.main()"
    return [python, *options, "-c", begin, str(Path(__file__).parents[2])]


class Child:
    """A command that runs under a guard process. The command and all processes that it starts are ended by `end`, at
    the end of this object, and at the end of this process.

    command: the command and its arguments; empty: only the processes of `also_end` are ended
    pass_fds: descriptors that the command gets, under the same numbers
    grace_s, temporary, left_by_parent, shared_memory: as in guard.Order
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: Stream = NOTHING,
        stdout: Stream = NOTHING,
        stderr: Stream = SAME,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        grace_s: float = 0.0,
        temporary: str = "",
        left_by_parent: str = "",
        shared_memory: str = "",
    ) -> None:
        self._control, theirs = socket.socketpair()
        parts: dict[str, Any] = {"command": list(command), "passed": tuple(pass_fds), "grace_s": grace_s}
        parts |= {"temporary": temporary, "left_by_parent": left_by_parent, "shared_memory": shared_memory}
        order = Order(parent=os.getpid(), control=theirs.fileno(), **parts)
        with theirs:
            try:
                self._guard = subprocess.Popen(
                    command_line(order),
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    env=None if env is None else dict(env),
                    pass_fds=(theirs.fileno(), *pass_fds),
                    start_new_session=True,  # a signal to the group of this process is not for the command
                )
            except BaseException:
                self._control.close()
                raise
        self.end = weakref.finalize(self, _order_end, self._control)
        """Order the guard to end everything, without waiting for it. Idempotent."""
        self._pid: int | None = None

    @property
    def guard_pid(self) -> int:
        """Pid of the guard."""
        return self._guard.pid

    @property
    def pid(self) -> int:
        """Pid of the command, which leads a session of its own; 0 if it could not be started. Waits for its start."""
        if self._pid is None:
            try:
                self._control.settimeout(START_S)
                self._pid = int(self._control.recv(32) or 0)
            except OSError:  # the guard ended or `end` was called
                self._pid = 0
        return self._pid

    @property
    def exit_code(self) -> int | None:
        """Exit code of the command, or minus the signal that ended it; None while it runs. If the guard was killed, it
        is minus the signal that killed the guard; the kernel then kills the command too."""
        code = self._guard.poll()
        return 128 - code if code is not None and code > 128 else code

    def also_end(self, pids: Sequence[int]) -> None:
        """Kill these processes too when the command is ended. The guard's own pid is ignored."""
        lines = [f"{pid} {began}\n" for pid in pids if pid != self.guard_pid and (began := tree.started(pid))]
        self._control.sendall("".join(lines).encode())

    def wait(self, timeout_s: float) -> int | None:
        """Wait until the command and all that it started have ended. Return its exit code, or None after
        `timeout_s`."""
        try:
            self._guard.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        return self.exit_code

    def stop(self, timeout_s: float = 2 * KILL_S) -> int | None:
        """End the command and all that it started, and wait for that. Return its exit code, or None if a process does
        not end in time because it is in an uninterruptible system call."""
        pid = self.pid
        self.end()
        if self.wait(timeout_s) is None:  # the guard does not answer: a user may have stopped it
            for one in tree.descendants(self.guard_pid):
                tree.kill(os.kill, one)
            self._guard.kill()
            self.wait(KILL_S)
        if self._guard.returncode is not None and self._guard.returncode < 0:  # it was killed, and could not clean up
            for one in tree.session_of(pid) if pid else ():
                tree.kill(os.kill, one)
        return self.exit_code


def _order_end(control: socket.socket) -> None:
    """Order the guard to end everything. This needs a message, because closing the socket has no effect while forks of
    this process have it open."""
    with contextlib.suppress(OSError):  # the guard has ended
        control.sendall(END + b"\n")
    control.close()


def output_of(command: Sequence[str], *, timeout_s: float) -> tuple[int, str]:
    """Run a short command and return its exit code and output; after `timeout_s`, -1 and the reason. Raise OSError if
    it cannot be started."""
    try:
        done = subprocess.run(
            command, stdin=NOTHING, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return -1, f"no answer in {timeout_s:g} s"
    return done.returncode, done.stdout.decode(errors="replace").strip()
