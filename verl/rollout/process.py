"""A server as a child: in a session of its own, watched by a guardian that ends it with this process, however that
ends.

Run as a script (`python -I -S process.py ORDER`) this file is the guardian, so it imports the standard library alone.
It starts the server, tells its process id, and ends what is left of the session when the server ends, when its standard
input is closed, or when its parent is another process than before.
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
LOOK_S = 0.5  # between two looks at the parent
MAPS_S = 5.0  # between two looks at what of the shared memory the server holds
DIES_S = 10.0  # for killed processes to be gone
TAIL_BYTES = 16384
PR_SET_PDEATHSIG = 1
LISTENS = "0A"  # the state of a socket, in the kernel's table
SHM = Path("/dev/shm")
OURS = "verl-"  # what is named so is the trainer's: segments that a server only reads, its folder for files


class ServerProcess:
    """Started by its constructor, which does not wait for it. what: its name in errors · log: gets what it prints."""

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
                start_new_session=True,  # what stops this process is not for it
            )
        self._ended = weakref.finalize(self, _close, self._guardian)
        self._pid = 0

    @property
    def pid(self) -> int:
        """Of the server, which leads its session; 0: it could not be started."""
        if not self._pid and self._guardian.stdout is not None and not self._guardian.stdout.closed:
            self._pid = int(self._guardian.stdout.readline() or 0)
            self._guardian.stdout.close()
        return self._pid

    @property
    def exit_code(self) -> int | None:
        """None: it runs. 128 and the signal's number, where one ended it."""
        return self._guardian.poll()

    def listens(self, port: int) -> tuple[bool, bool]:
        """Whether it listens on this port, and whether others do: both can be, where both let the port be shared."""
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
        """End it and everything it started; returns once they are gone."""
        pid = self.pid
        self._ended()
        self._guardian.wait(GRACE_S + 2 * DIES_S)
        if pid and self._guardian.returncode < 0:  # the guardian was shot: it could not clean up
            _signal(pid, signal.SIGKILL)


def _close(guardian: subprocess.Popen[bytes]) -> None:
    assert guardian.stdin is not None
    guardian.stdin.close()


def free_port() -> int:
    """One that nobody listens on now, of the loopback interface."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def said_by(command: Sequence[str], *, timeout_s: float) -> tuple[int, str]:
    """(exit code, output) of a short program of an installation: no user's code. OSError: it cannot be started."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return -1, f"no answer in {timeout_s:g} s"
    return done.returncode, done.stdout.decode(errors="replace").strip()


# -- the guardian ------------------------------------------------------------------------------------------------------


def guard(order: dict[str, Any]) -> int:
    """Exit code of the server, whose temporary files (vLLM's sockets among them) go when it does."""
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
            break  # nobody ever writes: it was closed
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
    """Processes of its session that are no zombies."""
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
    """Names in /dev/shm that its session has mapped, but for ours."""
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
