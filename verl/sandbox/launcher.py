"""A warm interpreter that starts sandboxes. Its standard input is a channel; its last argument is a folder to remove.

    caller == a job, two sockets per sandbox ==> launcher -- fork, fresh namespaces --> cell.py
         ============ first socket: requests and answers, a JSON line each way ========>

The launcher starts a cell in fresh namespaces (tier `launcher`: a fork of its own; tier `bubblewrap`: the program) and
gives it the first socket. It keeps the second: when the caller closes it, the launcher kills the whole sandbox. It also
kills a sandbox over its limit of memory, while the caller wants it watched, and at any time if it is a session.
Requests and answers do not pass through this process. A sandbox is a fork of it, and cannot hold requests of others.
It never runs the code of a request itself. Standard library only.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl.leftovers import own_folder
from verl.processes import memory, tree
from verl.sandbox import cell, cgroups, kept, namespaces, syscalls
from verl.sandbox.cgroups import MemoryGroup, MemoryGroups
from verl.sandbox.workspace import PREFIX

WARM = (
    *("math", "cmath", "re", "collections", "itertools", "functools", "operator", "random", "string", "heapq"),
    *("bisect", "datetime", "decimal", "fractions", "statistics", "copy", "dataclasses", "enum", "typing", "io"),
    *("array", "struct", "textwrap", "hashlib", "numbers", "queue", "calendar", "time", "encodings.idna"),
    *("gzip", "shutil", "tarfile", "zlib", "ast", "threading", "traceback"),
)
LOOK_S = 0.05  # between two sums of memory while code runs
REST_S = 0.5  # between two sums of a session's memory between its cells, when processes that they left may run
GRACE_S = 2.0  # past the limit of a request, for process 1 to report it
START_S = 30.0
KERNEL_MB_S = 1024.0  # the most memory that the kernel can be made to hold in a second of its work
MIN_FREE_MB = 1024.0  # or 1/32 of the machine's memory, if that is less: below it, sandboxes are ended
WATCH, REST = b"+", b"-"


def main() -> None:
    for name in WARM:
        importlib.import_module(name)
    channel = socket.socket(fileno=os.dup(0))
    os.dup2(1, 0)  # /dev/null
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the caller closes the channel when it is done
    syscalls.program()  # compiled once for all forks
    gc.freeze()
    groups, bounds = cgroups.here()
    channel.sendall(b"+" + bounds.encode())
    _Sandboxes(channel, groups=groups).run()
    shutil.rmtree(sys.argv[-1], ignore_errors=True)  # the caller may have been killed


class _Box:
    """One sandbox, as the launcher manages it.

    guard: our end of the second socket; when the caller closes its own end, the sandbox is ended
    memory_mb: the limit for all of its processes together
    folder: its files in tier "none", which shares the machine's network; "" in the other tiers
    outer: True if `pid` is bubblewrap itself, which is outside of the sandbox
    group: the cgroup that limits its memory, or None
    pid: the process with which the sandbox ends; 0 after that
    """

    def __init__(
        self, guard: socket.socket, memory_mb: float, folder: str, outer: bool = False, group: MemoryGroup | None = None
    ) -> None:
        self.guard, self.memory_mb, self.folder, self.pid, self.watched = guard, memory_mb, folder, 0, False
        self.group = group
        self.outer, self.reported = outer, False
        self._began: tuple[memory.Machine, float] | None = None  # the first measurement during this request

    def begin(self) -> None:
        """Begin a request: growth of memory before it does not count."""
        self._began = None

    def check_memory(self, now: memory.Machine) -> None:
        """End the sandbox if it uses more memory than its limit.

        Memory that the kernel uses for it is in no process: that of its sockets is added, and other growth of the
        kernel's memory counts as its own if the kernel has worked for it long enough to cause that growth.
        """
        pids = [self.pid, *tree.descendants(self.pid)] if self.pid else []
        inside = [] if self.folder else pids[self.outer :]
        sockets_mb = memory.sockets_mb(inside[0]) if inside else 0.0
        used_mb = memory.over_limit_mb(self.memory_mb, pids, sockets_mb)
        began, began_s = self._began = self._began or (now, memory.system_s(pids))
        grown_mb = now.kernel_mb - began.kernel_mb
        if used_mb is None and self.group is None and grown_mb > self.memory_mb:
            used_mb = grown_mb if memory.system_s(pids) - began_s > grown_mb / KERNEL_MB_S else None
        if used_mb is not None:
            self._report_memory(used_mb)
            self.end()

    def _report_memory(self, used_mb: float) -> None:
        self.report("memory", f"it used {used_mb:.0f} MB of {self.memory_mb:g}")

    def ended(self) -> None:
        """Report why the process has ended, unless a reason was reported before."""
        self.pid = 0
        if self.group is not None and (used_mb := self.group.memory_taken_mb()) is not None:
            self._report_memory(used_mb)
        self.report("killed", "it ended the process that ran it")
        if self.group is not None:
            self.group.kill()

    def lost_mb(self, now: memory.Machine) -> float:
        """Return by how many MB the free memory of the machine has shrunk since the first measurement of this
        request."""
        return self._began[0].free_mb - now.free_mb if self._began else 0.0

    def report(self, status: str, why: str) -> None:
        """Send the caller the reason of the sandbox's end. Only the first reason is sent."""
        if self.reported:
            return
        self.reported = True
        with contextlib.suppress(OSError):  # the caller does not read any more
            self.guard.send(json.dumps({"status": status, "why": why}).encode(), socket.MSG_DONTWAIT)

    def end(self) -> None:
        """Kill all of its processes."""
        if self.group is not None:
            self.group.kill()
        if self.pid and self.folder:  # no namespace ends the others; stopped, the cell starts no new ones meanwhile
            os.kill(self.pid, signal.SIGSTOP)
            for pid in tree.descendants(self.pid):
                tree.kill(os.kill, pid)
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)  # it was not waited for yet, so the number is still its own


def free_memory(boxes: list[_Box], now: memory.Machine) -> None:
    """If the machine is about to run out of memory, end the sandbox with the request during which
    the free memory of the machine fell most."""
    left = [box for box in boxes if box.pid and not box.reported]
    if left and now.free_mb < min(MIN_FREE_MB, now.total_mb / 32):
        box = max(left, key=lambda box: box.lost_mb(now))
        box.report("memory", f"the machine had {now.free_mb:.0f} MB left while it ran")
        box.end()


class _Sandboxes:
    """The sandboxes that this process started, with one loop that waits for their sockets and their ends."""

    def __init__(
        self, channel: socket.socket | None, folder: Path | None = None, groups: MemoryGroups | None = None
    ) -> None:
        tree.adopt_orphans()  # children of a bubblewrap that was killed while it started
        self._channel = channel
        self._boxes: list[_Box] = []
        self._poller, self._children, self._orphans = select.poll(), set[int](), set[int]()
        self._when_readable: dict[int, Callable[[], None]] = {}
        self._folder, self._first = folder, channel is not None
        self._groups, self._old = groups, list[MemoryGroup]()
        if channel is not None:
            self._watch(channel.fileno(), self._take_job)

    def _scratch(self) -> Path:
        """Return the folder of all sandboxes of tier "none". Sessions, which are forks, keep its lock too."""
        if self._folder is None:
            self._folder, _ = own_folder(Path(tempfile.gettempdir()), PREFIX)
        return self._folder

    def run(self) -> None:
        """Serve until the channel and all sandboxes have ended."""
        checked_s = 0.0
        while self._channel is not None or self._boxes or self._orphans:
            watched = [box for box in self._boxes if box.watched or self._channel is None]
            look_s = LOOK_S if any(box.watched for box in watched) else REST_S
            for fd, _ in self._poller.poll(look_s * 1000 if watched else None):
                self._when_readable[fd]()
            if watched and time.monotonic() - checked_s >= look_s:
                checked_s = time.monotonic()
                now = memory.machine()
                for box in watched:
                    box.check_memory(now)
                free_memory(watched, now)
            self._boxes = [box for box in self._boxes if box.pid or box.guard.fileno() >= 0]
            self._old = [group for group in self._old if not group.removed()]
        if self._folder is not None and self._first:
            with contextlib.suppress(OSError):  # a session still uses it; a later launcher removes it
                self._folder.rmdir()

    def _watch(self, fd: int, when_readable: Callable[[], None]) -> None:
        self._when_readable[fd] = when_readable
        self._poller.register(fd, select.POLLIN)

    def _unwatch(self, fd: int) -> None:
        self._poller.unregister(fd)
        del self._when_readable[fd]

    def _take_job(self) -> None:
        """Read a job from the channel and start its sandbox; a session gets a fork of this process for itself."""
        assert self._channel is not None
        text, fds, _, _ = socket.recv_fds(self._channel, 1 << 16, 2)
        if not fds:
            self._unwatch(self._channel.fileno())
            self._channel = None
            return
        job, (guard, theirs) = json.loads(text), [socket.socket(fileno=fd) for fd in fds]
        if job["tier"] == "none":
            self._scratch()  # one folder for all, made before any fork
        if not job["stays"]:
            return self.start(job, guard, theirs)
        if (pid := os.fork()) == 0:  # the session outlives this process
            try:
                for one in (self._channel, *(box.guard for box in self._boxes)):
                    one.close()
                for group in (*self._old, *(box.group for box in self._boxes if box.group)):
                    group.forget()
                alone = _Sandboxes(None, self._folder, self._groups)
                alone.start(job, guard, theirs)
                alone.run()
            finally:
                os._exit(0)
        self._wait_for(pid, None)
        guard.close()
        theirs.close()

    def start(self, job: dict[str, Any], guard: socket.socket, theirs: socket.socket) -> None:
        """Start the sandbox of a job. theirs: the first socket, for its process 1."""
        folder = f"{self._scratch()}/none-{os.urandom(8).hex()}" if job["tier"] == "none" else ""
        box = _Box(guard, float(job["memory_mb"]), folder, outer=job["tier"] == "bubblewrap")
        self._boxes.append(box)
        self._watch(guard.fileno(), lambda: self._take_order(box))
        try:
            if self._groups is not None:
                limits = {name: int(job[name]) for name in ("memory_mb", "tmp_mb", "processes")}
                box.group = self._groups.group(**limits)
            if job["tier"] == "bubblewrap":
                box.pid = _start_bubblewrap(job, theirs, box.group)
            else:
                box.pid = _start_cell(job, theirs, folder, box.group)
            self._wait_for(box.pid, box)
        except OSError as e:
            box.report("gone", str(e))
            self._old += [box.group] if box.group else []
        theirs.close()

    def _take_order(self, box: _Box) -> None:
        """Execute an order of the caller: watch the sandbox, stop watching it, or end it (a closed socket)."""
        orders = b""
        with contextlib.suppress(ConnectionResetError):  # the caller closed it with a report unread
            orders = box.guard.recv(64)
        box.watched = orders.endswith(WATCH)
        if WATCH in orders:
            box.begin()
        if not orders:
            self._unwatch(box.guard.fileno())
            box.guard.close()
            box.end()

    def _wait_for(self, pid: int, box: _Box | None) -> None:
        fd = os.pidfd_open(pid)
        self._children.add(pid)
        self._watch(fd, lambda: self._reap(fd, pid, box))

    def _reap(self, fd: int, pid: int, box: _Box | None) -> None:
        """Reap a process that has ended, and kill the processes that it left behind."""
        self._unwatch(fd)
        os.close(fd)
        os.waitpid(pid, 0)
        self._children.remove(pid)
        self._orphans.discard(pid)
        for orphan in set(tree.children_of(os.getpid())) - self._children:
            tree.kill(os.kill, orphan)
            self._orphans.add(orphan)
            self._wait_for(orphan, box)  # in tier "none" it may still write into the sandbox's folder
        if box is not None:
            if pid == box.pid:
                box.ended()
                self._old += [box.group] if box.group else []
            if box.folder and not box.pid:
                shutil.rmtree(box.folder, ignore_errors=True)


def _forked(wanted: int, theirs: socket.socket, group: MemoryGroup | None, begin: Callable[[], None]) -> int:
    """Fork into new namespaces (into none if `wanted` is 0) and return the child's pid. The child calls `begin` when it
    is in its group and its users are mapped."""
    mapped, go = os.pipe()
    pid = namespaces.clone(wanted) if wanted else os.fork()
    if pid == 0:
        try:
            os.close(go)
            with contextlib.suppress(OSError):  # if memory runs out, the kernel ends this process and not the run
                Path("/proc/self/oom_score_adj").write_text("1000")
            if os.read(mapped, 1) == b"+":
                os.close(mapped)
                begin()
        except OSError as e:  # reported in the place of the cell
            theirs.sendall(json.dumps({"status": "gone", "why": f"no sandbox here: {e}"}).encode() + b"\n")
        finally:
            os._exit(1)
    os.close(mapped)
    try:
        if group is not None:
            group.add(pid)
        if wanted:
            namespaces.map_users(pid)
        os.write(go, b"+")
    finally:
        os.close(go)
    return pid


def _start_cell(job: dict[str, Any], theirs: socket.socket, folder: str, group: MemoryGroup | None) -> int:
    """Start a cell in a fork of this process, and return its pid. folder: its files in tier "none", which has no
    namespaces."""
    files = job["base"] and f"{job['base']}/files"

    def begin() -> None:
        if not folder:
            namespaces.enter(job["read_only"], job["tmp_mb"], files)
            return serve()

        def leave(*of_signal: object) -> None:
            """Remove all that it made, at its end or when the process that started it has ended."""
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            cell.end_others()
            shutil.rmtree(folder, ignore_errors=True)
            if of_signal:
                os._exit(0)

        signal.signal(signal.SIGTERM, leave)
        try:
            os.mkdir(folder, 0o700)
            if files:
                shutil.copytree(files, folder, symlinks=True, dirs_exist_ok=True)
            namespaces.stay_outside(folder)
            serve()
        finally:
            leave()

    def serve() -> None:
        keep = theirs.fileno()
        os.closerange(0, keep)
        os.closerange(keep + 1, 1 << 20)
        for fd in range(3):
            os.open("/dev/null", os.O_RDWR) if fd != keep else None
        sys.path[:] = [*sys.path[:-1], *job["packages"]]  # without verl's folder: the code could make one in its place
        cell.serve_cell(theirs)

    return _forked(0 if folder else syscalls.NEW_NAMESPACES, theirs, group, begin)


def _start_bubblewrap(job: dict[str, Any], theirs: socket.socket, group: MemoryGroup | None) -> int:
    """Start a cell by the program bubblewrap, and return the pid of that."""
    command = ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    command += ["--die-with-parent", "--new-session", "--as-pid-1", "--clearenv", "--hostname", "sandbox"]
    command += ["--cap-drop", "ALL", "--perms", "755", "--size", str(1 << 16), "--tmpfs", "/dev"]
    command += ["--cap-add", "CAP_SYS_ADMIN"]  # the cell mounts /tmp itself: bubblewrap's has no limit on files
    if os.geteuid() == 0:  # the cell becomes the user 65534 outside too: a mere name for root would still be root
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user", "--uid", str(namespaces.NOBODY), "--gid", str(namespaces.NOBODY)]
    parents = {str(parent) for path in job["read_only"] for parent in Path(path).parents[:-1]}
    for parent in sorted(parents):  # otherwise bubblewrap gives them the mode that they have outside
        command += ["--perms", "755", "--dir", parent]
    for path in job["read_only"]:
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            command += ["--ro-bind", path, path]
    for name in namespaces.DEVICES:
        command += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    found = [path for path in (importlib.util.cache_from_source(cell.__file__), cell.__file__) if os.path.exists(path)]
    newest = max(found, key=os.path.getmtime)  # compiled or source: an interpreter runs either
    command += ["--symlink", "/tmp", "/dev/shm", "--ro-bind", newest, "/cell.py"]
    command += ["--ro-bind", kept.__file__, "/kept.py"]
    if job["base"]:
        command += ["--bind", f"{job['base']}/at", "/tmp"]
    else:
        command += ["--dir", "/tmp"]
    command += ["--remount-ro", "/", "--chdir", "/tmp"]
    with tempfile.TemporaryFile() as program:
        program.write(syscalls.program())
        program.seek(0)
        quota = "" if job["base"] else namespaces.quota_of(job["tmp_mb"])
        command += ["--", job["python"], "-I", "-S", "/cell.py", str(theirs.fileno()), str(program.fileno())]
        command += [quota, *job["packages"]]

        def begin() -> None:
            for fd in (theirs.fileno(), program.fileno()):
                os.set_inheritable(fd, True)
            if job["base"]:
                namespaces.keep_mounts()
                below = os.open(f"{job['base']}/files", os.O_PATH)
                namespaces.mount_tmp(f"{job['base']}/at", job["tmp_mb"], below)
            nothing = os.open(os.devnull, os.O_RDWR)
            for fd in range(3):
                os.dup2(nothing, fd)
            os.execvp(command[0], command)

        # Root's bubblewrap makes no user namespace: without one, sandboxes would share one limit of processes.
        # bubblewrap 0.8 has no overlay mounts: the copy of a workspace is mounted in a namespace around it.
        wanted = namespaces.NEW_USERS if os.geteuid() == 0 or job["base"] else 0
        return _forked(wanted | (namespaces.NEW_MOUNTS if job["base"] else 0), theirs, group, begin)
