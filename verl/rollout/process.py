"""A server as a child process, in its own session. A guardian process stops it when this process ends in any way.

Run as a script (`python -I -S process.py ORDER`) this file is the guardian, so it imports the standard library alone.
The guardian starts the server and writes its process id. It kills the rest of the session when the server ends, when
the guardian's standard input is closed, or when the guardian gets another parent process.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

GRACE_S = 5.0  # from SIGTERM to SIGKILL: a server with a running request would wait for it
LOOK_S = 0.5  # between two checks of the parent
MAPS_S = 5.0  # between two checks of the server's shared memory
DIES_S = 10.0  # for killed processes to disappear
TAIL_BYTES = 16384
PR_SET_PDEATHSIG = 1
LISTENS = "0A"  # the state of a socket, in the kernel's table
SHM = Path("/dev/shm")
OURS = "verl-"  # prefix of the trainer's own names: segments that a server only reads, its folder for files


class ServerProcess:
    """A server process. The constructor starts it and does not wait. `what` is its name in errors, `log` gets its
    output."""

    def __init__(self, what: str, command: Sequence[str], *, env: Mapping[str, str], log: Path) -> None:
        self.what, self.log = what, log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._began = log.stat().st_size if log.exists() else 0
        order = json.dumps({"command": list(command), "log": str(log), "grace_s": GRACE_S})
        with log.open("ab") as said:
            self._guardian = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, order],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                env=dict(env),
                start_new_session=True,  # signals to this process must not reach it
            )
        self._ended = weakref.finalize(self, _close, self._guardian)
        self._pid = 0

    @property
    def pid(self) -> int:
        """The process id of the server, which leads its session. 0: it could not be started."""
        if not self._pid and self._guardian.stdout is not None and not self._guardian.stdout.closed:
            self._pid = int(self._guardian.stdout.readline() or 0)
            self._guardian.stdout.close()
        return self._pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs. 128 plus the signal's number if a signal ended it."""
        return self._guardian.poll()

    def listens(self, port: int) -> tuple[bool, bool]:
        """Return (this server listens on the port, another process does). Both are possible on a shared port."""
        found, ours = set[str](), set[str]()
        for table in Path("/proc/net").glob("tcp*"):
            rows = [line.split() for line in table.read_text().splitlines()[1:]]
            found |= {f"socket:[{row[9]}]" for row in rows if row[3] == LISTENS and row[1].endswith(f":{port:04X}")}
        for pid in _session(self.pid) if self.pid else ():
            with contextlib.suppress(OSError):  # it ends
                ours |= {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
        return bool(found & ours), bool(found - ours)

    def tail(self, lines: int = 12) -> str:
        """The last lines of this server in its log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self._began, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                said = file.read().decode(errors="replace").strip().splitlines()
        except OSError:
            said = []
        return "\n".join(said[-lines:]) or "(it said nothing)"

    def stop(self) -> None:
        """Stop the server and all processes that it started, and wait for their end."""
        pid = self.pid
        self._ended()
        self._guardian.wait(GRACE_S + 2 * DIES_S)
        if pid and self._guardian.returncode < 0:  # the guardian was killed and could not clean up
            _signal(pid, signal.SIGKILL)


def _close(guardian: subprocess.Popen[bytes]) -> None:
    assert guardian.stdin is not None
    guardian.stdin.close()


def free_port() -> int:
    """Return a port of the loopback interface that no process listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def output_of(command: Sequence[str], *, timeout_s: float) -> tuple[int, str]:
    """Run a short program of an installation (no user code) and return (exit code, output). Raise OSError if it cannot
    be started."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return -1, f"no answer in {timeout_s:g} s"
    return done.returncode, done.stdout.decode(errors="replace").strip()


# -- the guardian ------------------------------------------------------------------------------------------------------


def guard(order: dict[str, Any]) -> int:
    """Run the server and return its exit code. Its temporary files, such as vLLM's sockets, are deleted at its end."""
    with tempfile.TemporaryDirectory(prefix=OURS, ignore_cleanup_errors=True) as scratch:
        return _guarded(order, os.environ | {"TMPDIR": scratch})


def _guarded(order: dict[str, Any], env: Mapping[str, str]) -> int:
    parent, before = os.getppid(), set(os.listdir(SHM)) if SHM.is_dir() else set()
    with open(order["log"], "ab") as log:
        server = subprocess.Popen(
            order["command"],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_die_with_parent,  # this process has one thread
        )
    os.write(1, f"{server.pid}\n".encode())
    held: set[str] = set()
    looked_s = -MAPS_S
    while server.poll() is None and os.getppid() == parent:
        if time.monotonic() - looked_s > MAPS_S:
            held, looked_s = held | _shared(server.pid), time.monotonic()
        if select.select([0], [], [], LOOK_S)[0]:
            break  # nothing is ever written to it: it was closed
    held |= _shared(server.pid)
    if server.poll() is None:
        _signal(server.pid, signal.SIGTERM)
        until_s = time.monotonic() + float(order["grace_s"])
        while server.poll() is None and time.monotonic() < until_s:
            time.sleep(0.02)
    _kill_session(server)
    for name in held - before:
        (SHM / name).unlink(missing_ok=True)
    code = server.returncode
    return 255 if code is None else 128 - code if code < 0 else code


def _kill_session(server: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + DIES_S
    while time.monotonic() < until_s:
        _signal(server.pid, signal.SIGKILL)
        if server.poll() is not None and not _session(server.pid):
            return
        time.sleep(0.02)


def _signal(session: int, number: signal.Signals) -> None:
    for pid in _session(session):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _session(leader: int) -> list[int]:
    """Return the processes of a session, without zombies."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == leader and fields[0] != "Z":
                found.append(int(name))
    return found


def _shared(leader: int) -> set[str]:
    """Return the names in /dev/shm that the session has mapped, except ours."""
    found = set()
    for pid in _session(leader):
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        found |= {line.rpartition(f"{SHM}/")[2] for line in lines if f" {SHM}/" in line}
    return {name for name in found if not name.startswith(OURS) and not name.endswith(" (deleted)")}


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(guard(json.loads(sys.argv[1])))
