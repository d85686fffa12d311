"""A warm interpreter that starts sandboxes (`main`): a channel on 0, its last argument a folder that ends with it.

    caller == a job, two sockets per sandbox ==> this -- fork, fresh namespaces --> cell.py
         ============ one of the two, a JSON line each way: what is asked =========>

It starts a cell in fresh namespaces (a fork of its own: `launcher`; or by `bubblewrap`), gives it the one socket and
keeps the other: at its end it kills all of the sandbox, and over a limit of memory, while it is told to watch, or where
it is a session. What is asked and answered never comes here: a sandbox, which is a fork of this, cannot hold what
another one was asked. Standard library only. It never runs the code of a request itself.
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
from verl.sandbox import cell, cgroups, guardian, kept, namespaces, syscalls
from verl.sandbox.cgroups import Group, Groups
from verl.sandbox.workspace import PREFIX

WARM = (
    *("math", "cmath", "re", "collections", "itertools", "functools", "operator", "random", "string", "heapq"),
    *("bisect", "datetime", "decimal", "fractions", "statistics", "copy", "dataclasses", "enum", "typing", "io"),
    *("array", "struct", "textwrap", "hashlib", "numbers", "queue", "calendar", "time", "encodings.idna"),
    *("gzip", "shutil", "tarfile", "zlib", "ast", "threading", "traceback"),
)
LOOK_S = 0.05  # how often memory is summed, of what takes longer than that
REST_S = 0.5  # and of a session between its cells, where what they left behind goes on
GRACE_S = 2.0  # past the limit of a request, for process 1 to say so itself
START_S = 30.0
KERNEL_MB_S = 1024.0  # what the kernel can be made to hold in a second of its work
MIN_FREE_MB = 1024.0  # or 1/32 of the machine's memory, if that is less: below, sandboxes are ended
WATCH, REST = b"+", b"-"


def main() -> None:
    for name in WARM:
        importlib.import_module(name)
    channel = socket.socket(fileno=os.dup(0))
    os.dup2(1, 0)  # nowhere
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller's Ctrl-C: it closes the channel when it is done
    syscalls.program()  # for all forks
    gc.freeze()
    groups, bounds = cgroups.here()
    channel.sendall(b"+" + bounds.encode())
    _Sandboxes(channel, groups=groups).run()
    shutil.rmtree(sys.argv[-1], ignore_errors=True)  # the caller may have been killed


class _Box:
    """One sandbox. guard: at its end it ends · pid: on which all of it hangs; 0: it has ended · folder: of tier "none",
    whose network is the machine's · outer: pid is that of bubblewrap itself, outside of the sandbox."""

    def __init__(
        self, guard: socket.socket, memory_mb: float, folder: str, outer: bool = False, group: Group | None = None
    ) -> None:
        self.guard, self.memory_mb, self.folder, self.pid, self.watched = guard, memory_mb, folder, 0, False
        self.group = group
        self.outer, self.told = outer, False
        self._began: tuple[guardian.Machine, float] | None = None  # at the first look at what runs now

    def begin(self) -> None:
        """A request: what the machine and this sandbox did before it is not its doing."""
        self._began = None

    def look(self, now: guardian.Machine) -> None:
        """End it if it is over its memory. What the kernel holds for it is in no sum of processes: its sockets are
        counted; of the rest, as much as the kernel grew is its own if the kernel worked as long for it."""
        pids = [self.pid, *guardian.descendants(self.pid)] if self.pid else []
        inside = [] if self.folder else pids[self.outer :]
        sockets_mb = guardian.sockets_mb(inside[0]) if inside else 0.0
        used_mb = guardian.over_limit_mb(self.memory_mb, pids, sockets_mb)
        began, began_s = self._began = self._began or (now, guardian.system_s(pids))
        grown_mb = now.kernel_mb - began.kernel_mb
        if used_mb is None and self.group is None and grown_mb > self.memory_mb:
            used_mb = grown_mb if guardian.system_s(pids) - began_s > grown_mb / KERNEL_MB_S else None
        if used_mb is not None:
            self._tell_memory(used_mb)
            self.end()

    def _tell_memory(self, used_mb: float) -> None:
        self.tell("memory", f"it used {used_mb:.0f} MB of {self.memory_mb:g}")

    def ended(self) -> None:
        """Its process has ended: report why, unless that was done."""
        self.pid = 0
        if self.group is not None and (used_mb := self.group.memory_taken_mb()) is not None:
            self._tell_memory(used_mb)
        self.tell("killed", "it ended the process that ran it")
        if self.group is not None:
            self.group.kill()

    def lost_mb(self, now: guardian.Machine) -> float:
        """Return how much less is free on the machine since the first look."""
        return self._began[0].free_mb - now.free_mb if self._began else 0.0

    def tell(self, status: str, why: str) -> None:
        """Once: one that is ended for its memory may be seen with it again before it is gone."""
        if self.told:
            return
        self.told = True
        with contextlib.suppress(OSError):  # nobody listens
            self.guard.send(json.dumps({"status": status, "why": why}).encode(), socket.MSG_DONTWAIT)

    def end(self) -> None:
        if self.group is not None:
            self.group.kill()
        if self.pid and self.folder:  # no namespace ends the rest; who waits for the cell finds nothing that it ran
            os.kill(self.pid, signal.SIGSTOP)
            for pid in guardian.descendants(self.pid):
                guardian.shoot(os.kill, pid)
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)  # nobody waited for it yet: it is no one else


def end_for_want(boxes: list[_Box], now: guardian.Machine) -> None:
    """Where the machine is about to run out of memory, end the sandbox that ran while most of it went."""
    left = [box for box in boxes if box.pid and not box.told]
    if left and now.free_mb < min(MIN_FREE_MB, now.total_mb / 32):
        box = max(left, key=lambda box: box.lost_mb(now))
        box.tell("memory", f"the machine had {now.free_mb:.0f} MB left while it ran")
        box.end()


class _Sandboxes:
    """Those that this process started, and one loop over their sockets and their ends."""

    def __init__(self, channel: socket.socket | None, folder: Path | None = None, groups: Groups | None = None) -> None:
        namespaces.adopt_orphans()  # of a bubblewrap that was killed while it started
        self._channel = channel
        self._boxes: list[_Box] = []
        self._poller, self._children, self._orphans = select.poll(), set[int](), set[int]()
        self._then: dict[int, Callable[[], None]] = {}
        self._folder, self._first = folder, channel is not None
        self._groups, self._old = groups, list[Group]()
        if channel is not None:
            self._hear(channel.fileno(), self._begin)

    def _scratch(self) -> Path:
        """Return the folder of those of tier "none". Sessions, which are forks, hold it too."""
        if self._folder is None:
            self._folder, _ = own_folder(Path(tempfile.gettempdir()), PREFIX)
        return self._folder

    def run(self) -> None:
        """Until the channel and all sandboxes have ended."""
        looked_s = 0.0
        while self._channel is not None or self._boxes or self._orphans:
            watched = [box for box in self._boxes if box.watched or self._channel is None]
            look_s = LOOK_S if any(box.watched for box in watched) else REST_S
            for fd, _ in self._poller.poll(look_s * 1000 if watched else None):
                self._then[fd]()
            if watched and time.monotonic() - looked_s >= look_s:
                looked_s = time.monotonic()
                now = guardian.machine()
                for box in watched:
                    box.look(now)
                end_for_want(watched, now)
            self._boxes = [box for box in self._boxes if box.pid or box.guard.fileno() >= 0]
            self._old = [group for group in self._old if not group.removed()]
        if self._folder is not None and self._first:
            with contextlib.suppress(OSError):  # a session lives, and the next launcher removes it
                self._folder.rmdir()

    def _hear(self, fd: int, then: Callable[[], None]) -> None:
        self._then[fd] = then
        self._poller.register(fd, select.POLLIN)

    def _leave(self, fd: int) -> None:
        self._poller.unregister(fd)
        del self._then[fd]

    def _begin(self) -> None:
        assert self._channel is not None
        said, fds, _, _ = socket.recv_fds(self._channel, 1 << 16, 2)
        if not fds:
            self._leave(self._channel.fileno())
            self._channel = None
            return
        job, (guard, theirs) = json.loads(said), [socket.socket(fileno=fd) for fd in fds]
        if job["tier"] == "none":
            self._scratch()  # one for all
        if not job["stays"]:
            return self.start(job, guard, theirs)
        if (pid := os.fork()) == 0:  # it outlives this process
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
        folder = f"{self._scratch()}/none-{os.urandom(8).hex()}" if job["tier"] == "none" else ""
        box = _Box(guard, float(job["memory_mb"]), folder, outer=job["tier"] == "bubblewrap")
        self._boxes.append(box)
        self._hear(guard.fileno(), lambda: self._listen(box))
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
            box.tell("gone", str(e))
            self._old += [box.group] if box.group else []
        theirs.close()

    def _listen(self, box: _Box) -> None:
        said = b""
        with contextlib.suppress(ConnectionResetError):  # it did not hear what it was told
            said = box.guard.recv(64)
        box.watched = said.endswith(WATCH)
        if WATCH in said:
            box.begin()
        if not said:
            self._leave(box.guard.fileno())
            box.guard.close()
            box.end()

    def _wait_for(self, pid: int, box: _Box | None) -> None:
        fd = os.pidfd_open(pid)
        self._children.add(pid)
        self._hear(fd, lambda: self._ended(fd, pid, box))

    def _ended(self, fd: int, pid: int, box: _Box | None) -> None:
        self._leave(fd)
        os.close(fd)
        os.waitpid(pid, 0)
        self._children.remove(pid)
        self._orphans.discard(pid)
        for orphan in set(guardian.children_of(os.getpid())) - self._children:
            guardian.shoot(os.kill, orphan)
            self._orphans.add(orphan)
            self._wait_for(orphan, box)  # without namespaces it may have been the box's, and still write there
        if box is not None:
            if pid == box.pid:
                box.ended()
                self._old += [box.group] if box.group else []
            if box.folder and not box.pid:
                shutil.rmtree(box.folder, ignore_errors=True)


def _forked(wanted: int, theirs: socket.socket, group: Group | None, begin: Callable[[], None]) -> int:
    """Return the process of a child in new namespaces (0: in ours), which does `begin` once it is in its group and its
    users are mapped."""
    mapped, go = os.pipe()
    pid = namespaces.clone(wanted) if wanted else os.fork()
    if pid == 0:
        try:
            os.close(go)
            with contextlib.suppress(OSError):  # if the machine runs out of memory, the kernel takes this, not the run
                Path("/proc/self/oom_score_adj").write_text("1000")
            if os.read(mapped, 1) == b"+":
                os.close(mapped)
                begin()
        except OSError as e:  # as if the cell had said so
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


def _start_cell(job: dict[str, Any], theirs: socket.socket, folder: str, group: Group | None) -> int:
    """folder: of one without namespaces."""
    files = job["base"] and f"{job['base']}/files"

    def begin() -> None:
        if not folder:
            namespaces.enter(job["read_only"], job["tmp_mb"], files)
            return serve()

        def leave(*told: object) -> None:  # at its end, or when who started it is gone, be it in the middle of this
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            cell.end_all()
            shutil.rmtree(folder, ignore_errors=True)
            if told:
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
        sys.path[:] = [*sys.path[1:], *job["packages"]]  # what may be written there is nothing to import from
        cell.serve(theirs)

    return _forked(0 if folder else syscalls.NEW_NAMESPACES, theirs, group, begin)


def _start_bubblewrap(job: dict[str, Any], theirs: socket.socket, group: Group | None) -> int:
    command = ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    command += ["--die-with-parent", "--new-session", "--as-pid-1", "--clearenv", "--hostname", "sandbox"]
    command += ["--cap-drop", "ALL", "--perms", "755", "--size", str(1 << 16), "--tmpfs", "/dev"]
    command += ["--cap-add", "CAP_SYS_ADMIN"]  # the cell mounts its /tmp itself: bubblewrap's has any number of files
    if os.geteuid() == 0:  # the cell becomes nobody, outside too: nobody's name for root would still be root
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user", "--uid", str(namespaces.NOBODY), "--gid", str(namespaces.NOBODY)]
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
    found = [path for path in (importlib.util.cache_from_source(cell.__file__), cell.__file__) if os.path.exists(path)]
    newest = max(found, key=os.path.getmtime)  # compiled code, or its source: an interpreter runs either
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

        # Root's bubblewrap makes no user namespace: without one, sandboxes would share nobody's number of processes.
        # And what is laid over a workspace, which bubblewrap 0.8 cannot, is mounted in namespaces around it.
        wanted = namespaces.NEW_USERS if os.geteuid() == 0 or job["base"] else 0
        return _forked(wanted | (namespaces.NEW_MOUNTS if job["base"] else 0), theirs, group, begin)
