"""A warm interpreter that starts sandboxes: `python -I -S launcher.py [path, scratch]`, a socket on 0.

    caller == one socket per sandbox, a JSON line each way ==> supervisor (a fork of this) == the same ==> cell.py

For each descriptor that comes over the socket it forks a supervisor, which starts a cell in fresh namespaces (its own
fork: `launcher`; or by `bubblewrap`), hands requests and answers through, and kills all of the sandbox at a deadline,
over a limit of memory, or when the caller is gone. Standard library only. It never runs the code of a request itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WARM = (
    *("math", "cmath", "re", "collections", "itertools", "functools", "operator", "random", "string", "heapq"),
    *("bisect", "datetime", "decimal", "fractions", "statistics", "copy", "dataclasses", "enum", "typing", "io"),
    *("array", "struct", "textwrap", "hashlib", "numbers", "queue", "calendar", "time", "encodings.idna"),
    *("gzip", "shutil", "tarfile", "zlib"),
)
LOOK_S = 0.05  # how often memory is summed
GRACE_S = 2.0  # past the limit of a request, for process 1 to say so itself
START_S = 30.0
MAX_LINE_BYTES = 64 << 20


def main() -> None:
    path, scratch = json.loads(sys.argv[1])
    sys.path.insert(0, path)
    for name in (*WARM, "verl.sandbox.namespaces", "verl.sandbox.guardian", "verl.sandbox.cell"):
        importlib.import_module(name)
    channel = socket.socket(fileno=0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a supervisor
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller's Ctrl-C: it closes the socket when it is done
    from verl.sandbox import namespaces

    namespaces.seccomp_program()  # for all forks
    gc.freeze()
    channel.sendall(b"+")
    while True:
        _, fds, _, _ = socket.recv_fds(channel, 1, 1)
        if not fds:
            shutil.rmtree(scratch, ignore_errors=True)  # the caller may have been killed
            return
        if os.fork() == 0:
            channel.close()
            try:
                _supervise(socket.socket(fileno=fds[0]))
            finally:
                os._exit(0)
        os.close(fds[0])


def _supervise(caller: socket.socket) -> None:
    """One sandbox from its first request to its end."""
    from verl.sandbox import namespaces

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    namespaces.adopt_orphans()  # of a bubblewrap that was killed while it started
    requests = caller.makefile("rb")
    job = json.loads(requests.readline())
    ours, theirs = socket.socketpair()
    try:
        start = _start_bubblewrap if job["tier"] == "bubblewrap" else _start_cell
        start(job, theirs, [caller, ours])
        theirs.close()
        cell = _Cell(ours, caller, float(job["memory_mb"]))
        while line := requests.readline():
            request = json.loads(line)
            nonce = os.urandom(16).hex()
            answer = cell.ask(request | {"nonce": nonce}, request["limits"]["wall_s"] + GRACE_S)
            if answer is None:
                return
            gone = answer.pop("gone", False) or answer.pop("nonce", None) != nonce
            if gone and "why" not in answer:
                answer = {"status": "gone", "why": "the sandbox spoke out of turn"}
            caller.sendall(json.dumps(answer | {"gone": gone}).encode() + b"\n")
            if gone:
                return
    except OSError as e:
        caller.sendall(json.dumps({"status": "gone", "why": str(e), "gone": True}).encode() + b"\n")
    finally:
        _end_all()


def _end_all() -> None:
    """Kill and reap everything below this process."""
    from verl.sandbox.guardian import descendants, shoot

    with contextlib.suppress(ChildProcessError):
        while True:
            for pid in descendants(os.getpid()):
                shoot(os.kill, pid)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.001)


def _refuse(theirs: socket.socket, why: OSError) -> None:
    """In the child, as if the cell had said so."""
    theirs.sendall(json.dumps({"status": "gone", "why": f"no sandbox here: {why}", "gone": True}).encode())
    os._exit(1)


def _start_cell(job: dict[str, Any], theirs: socket.socket, close: list[socket.socket]) -> None:
    from verl.sandbox import cell, namespaces

    mapped, go = os.pipe()
    pid = namespaces.clone()
    if pid == 0:
        try:
            os.close(go)
            for one in close:
                one.close()
            if os.read(mapped, 1) != b"+":
                os._exit(1)
            os.close(mapped)
            keep = theirs.fileno()
            try:
                namespaces.enter(job["read_only"], job["tmp_mb"], job["base"] and f"{job['base']}/files")
            except OSError as e:
                _refuse(theirs, e)
            os.closerange(0, keep)
            os.closerange(keep + 1, 1 << 20)
            for fd in range(3):
                os.open("/dev/null", os.O_RDWR) if fd != keep else None
            sys.path[:] = [*sys.path[1:], *job["packages"]]  # what may be written there is nothing to import from
            cell.serve(theirs)
        finally:
            os._exit(0)
    os.close(mapped)
    try:
        namespaces.map_users(pid)
        os.write(go, b"+")
    finally:
        os.close(go)


def _start_bubblewrap(job: dict[str, Any], theirs: socket.socket, close: list[socket.socket]) -> None:
    from verl.sandbox import cell, namespaces

    command = ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    command += ["--die-with-parent", "--new-session", "--as-pid-1", "--clearenv", "--hostname", "sandbox"]
    command += ["--cap-drop", "ALL"]
    if os.geteuid() == 0:  # the cell becomes nobody, outside too: nobody's name for root would still be root
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user", "--uid", str(namespaces.NOBODY), "--gid", str(namespaces.NOBODY)]
    command += ["--dir", "/dev"]
    parents = {str(parent) for path in job["read_only"] for parent in Path(path).parents[:-1]}
    for parent in sorted(parents):  # else with the mode that they have outside
        command += ["--perms", "755", "--dir", parent]
    for path in job["read_only"]:
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            command += ["--ro-bind", path, path]
    for name in namespaces.DEVICES:
        command += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    command += ["--symlink", "/tmp", "/dev/shm", "--ro-bind", cell.__file__, "/cell.py"]
    if job["base"]:
        command += ["--bind", f"{job['base']}/at", "/tmp"]
    else:
        command += ["--size", str(job["tmp_mb"] << 20), "--perms", "1777", "--tmpfs", "/tmp"]
    command += ["--remount-ro", "/", "--chdir", "/tmp"]
    with tempfile.TemporaryFile() as program:
        program.write(namespaces.seccomp_program())
        program.seek(0)
        command += ["--seccomp", str(program.fileno()), "--", job["python"], "-I", "-S", "/cell.py"]
        command += [str(theirs.fileno()), *job["packages"]]
        for fd in (theirs.fileno(), program.fileno()):
            os.set_inheritable(fd, True)
        # Root's bubblewrap makes no user namespace: without one, sandboxes would share nobody's number of processes.
        # And what is laid over a workspace, which bubblewrap 0.8 cannot, is mounted in namespaces around it.
        wanted = namespaces.NEW_USERS | namespaces.NEW_MOUNTS if job["base"] else namespaces.NEW_USERS
        around = os.geteuid() == 0 or bool(job["base"])
        mapped, go = os.pipe()
        if (pid := namespaces.clone(wanted) if around else os.fork()) == 0:
            try:
                os.close(go)
                for one in close:
                    one.close()
                if os.read(mapped, 1) == b"+":
                    if job["base"]:
                        namespaces.keep_mounts()
                        below = os.open(f"{job['base']}/files", os.O_PATH)
                        namespaces.mount_tmp(f"{job['base']}/at", job["tmp_mb"], below)
                    nothing = os.open(os.devnull, os.O_RDWR)
                    for fd in range(3):
                        os.dup2(nothing, fd)
                    os.execvp(command[0], command)
            except OSError as e:
                _refuse(theirs, e)
            finally:
                os._exit(1)
        os.close(mapped)
        if around:
            namespaces.map_users(pid)
        os.write(go, b"+")
        os.close(go)


class _Cell:
    """The supervisor's hand on one cell."""

    def __init__(self, channel: socket.socket, caller: socket.socket, memory_mb: float) -> None:
        self._channel, self._caller, self._memory_mb = channel, caller, memory_mb
        self._got = bytearray()

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any] | None:
        """The answer, or with `gone` why there is none. None: the caller has gone."""
        from verl.sandbox import guardian

        self._channel.settimeout(START_S)
        with contextlib.suppress(OSError):  # it may have said why
            self._channel.sendall(json.dumps(request).encode() + b"\n")
        deadline = time.monotonic() + limit_s
        poller = select.poll()
        for one in (self._channel, self._caller):
            poller.register(one, select.POLLIN)
        while (left_s := deadline - time.monotonic()) > 0:
            ready = {fd for fd, _ in poller.poll(min(LOOK_S, left_s) * 1000)}
            if self._caller.fileno() in ready:
                return None
            if self._channel.fileno() in ready:
                try:
                    got = self._channel.recv(1 << 18)
                except ConnectionResetError:  # it ended before it was asked; what it said comes after that
                    got = self._channel.recv(1 << 18)
                self._got += got
                if self._got.endswith(b"\n") or not got:
                    return self._told()
                if len(self._got) > MAX_LINE_BYTES:
                    return {"status": "output", "gone": True, "why": "its answer has no end"}
            elif (used_mb := guardian.over_limit_mb(self._memory_mb)) is not None:
                return {"status": "memory", "gone": True, "why": f"it used {used_mb:.0f} MB of {self._memory_mb:g}"}
        return {"status": "timeout", "gone": True, "why": f"no answer in {limit_s:g} s"}

    def _told(self) -> dict[str, Any]:
        line, self._got = bytes(self._got), bytearray()
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:
            return {"status": "gone", "gone": True, "why": "the sandbox ended by itself"}
        return found


if __name__ == "__main__":
    main()
