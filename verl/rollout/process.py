"""A server of an engine as a child process, which ends with this process."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl.processes import tree
from verl.processes.child import Child

GRACE_S = 5.0  # from SIGTERM to SIGKILL: a server with a running request would wait for it
STOP_S = 25.0  # for the server and all that it started to end
TAIL_BYTES = 16384
LISTENS = "0A"  # the state of a socket, in the kernel's table
OURS = "verl-"  # prefix of the trainer's segments in shared memory, which a server only reads
FILES = "verl-server-"  # prefix of a server's folder for temporary files, such as vLLM's sockets


class ServerProcess:
    """A server as a child process. The constructor starts it and does not wait. `log` is the file that gets its
    output."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._began = log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            self._child = Child(
                command, stdout=output, stderr=output, env=env, grace_s=GRACE_S, temporary=FILES, shared_memory=OURS
            )

    @property
    def pid(self) -> int:
        """The process id of the server, which leads its session. 0: it could not be started."""
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, or 128 plus the signal's number if a signal ended the process; None while it runs."""
        code = self._child.exit_code
        return 128 - code if code is not None and code < 0 else code

    def listens(self, port: int) -> tuple[bool, bool]:
        """Return (this server listens on the port, another process does). Both are possible on a shared port."""
        found, ours = set[str](), set[str]()
        for table in Path("/proc/net").glob("tcp*"):
            rows = [line.split() for line in table.read_text().splitlines()[1:]]
            found |= {f"socket:[{row[9]}]" for row in rows if row[3] == LISTENS and row[1].endswith(f":{port:04X}")}
        for pid in tree.session_of(self.pid) if self.pid else ():
            with contextlib.suppress(OSError):  # it ends
                ours |= {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
        return bool(found & ours), bool(found - ours)

    def tail(self, lines: int = 12) -> str:
        """Return the last lines of this server in its log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self._began, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                found = file.read().decode(errors="replace").strip().splitlines()
        except OSError:
            found = []
        return "\n".join(found[-lines:]) or "(it said nothing)"

    def stop(self) -> None:
        """Stop the server and all processes that it started, and wait for their end."""
        self._child.stop(STOP_S)


def free_port() -> int:
    """Return a port of the loopback interface that no process listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
