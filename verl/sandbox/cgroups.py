"""Bounds on the memory of sandboxes by groups of processes (cgroup v2), on machines where such groups can be made.

A group counts all that the kernel holds for its processes: their pages, their files in memory, what their sockets hold.
The code of a sandbox cannot take more, whatever it is made of. Each sandbox has a group of its own.

Groups are made in the nearest group at or above that of this process in which the user may make them and which gives
the controllers `memory` and `pids` to the groups below it. A group that lacks them gets them if it holds no process
(the kernel refuses others), except the root of the tree: its settings are the machine's. The search does not leave a
group with a limit of memory: a run stays within its own limits. systemd gives a user's programs such a group
(`app.slice`), and a service with `Delegate=yes` and a `DelegateSubgroup=` has one. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from pathlib import Path

PREFIX = "verl-sandbox-"
WANTED = {"memory", "pids"}
OWN_MB = 32  # the interpreter that runs the code, and what the kernel holds for its namespaces
OWN_PROCESSES = 8  # process 1 of a sandbox, bubblewrap
PROBE_S = 10.0  # at most, of the process that is moved to see that it can be
TRIES = 3  # another start may take a new group for one that was left


class Unavailable(Exception):
    """No group can be made on this machine. The text has the reason."""


class GroupTree:
    """The calls that change the tree of groups."""

    def writable(self, path: Path) -> bool:
        return os.access(path, os.W_OK)

    def make(self, path: Path) -> None:
        path.mkdir()

    def remove(self, path: Path) -> None:
        path.rmdir()

    def write(self, path: Path, text: str) -> None:
        fd = os.open(path, os.O_WRONLY)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)


class MemoryGroup:
    """The group of one sandbox. A lock on its folder marks it as used, until this process and its forks have ended."""

    def __init__(self, path: Path, files: GroupTree) -> None:
        self.path, self._files = path, files
        self._lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.forget()
            raise

    def limit(self, memory_mb: int, tmp_mb: int, processes: int) -> None:
        """Bound all of its processes together. The kernel ends all of them when one finds no memory."""
        limits = {"memory.max": (memory_mb + tmp_mb + OWN_MB) << 20, "memory.oom.group": 1}
        limits |= {"pids.max": processes + OWN_PROCESSES}
        if (self.path / "memory.swap.max").exists():  # not on a kernel without swap
            limits["memory.swap.max"] = 0
        for name, value in limits.items():
            self._files.write(self.path / name, str(value))

    def add(self, pid: int) -> None:
        """Move a process, and all that it starts from now on, into the group."""
        self._files.write(self.path / "cgroup.procs", str(pid))

    def memory_taken_mb(self) -> float | None:
        """Return the memory in MB that its processes had when the kernel ended them for exceeding the limit; None if it
        did not."""
        events = dict(line.split() for line in _read(self.path / "memory.events").splitlines())
        if events.get("oom_kill", "0") == "0":
            return None
        return int(_read(self.path / "memory.peak") or _read(self.path / "memory.max")) / 2**20

    def kill(self) -> None:
        """End all of its processes, on kernels that can (5.14)."""
        with contextlib.suppress(OSError):
            self._files.write(self.path / "cgroup.kill", "1")

    def removed(self) -> bool:
        """Remove the group. Return False while the kernel keeps it: a process in it has not ended yet."""
        try:
            self._files.remove(self.path)
        except FileNotFoundError:
            pass
        except OSError:
            return False
        self.forget()
        return True

    def forget(self) -> None:
        """Release the lock without removing the group: the next start of sandboxes removes it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class MemoryGroups:
    """The groups of one launcher of sandboxes. home: the folder in which they are made."""

    def __init__(self, home: Path, files: GroupTree) -> None:
        self.home, self._files = home, files

    @staticmethod
    def found(mounts: str, membership: str, files: GroupTree) -> MemoryGroups:
        """Return the groups of this machine, after testing that one can be made, can contain a process, and can be
        removed. Groups of killed runs are removed. Raise Unavailable if the test fails.

        mounts, membership: the text of /proc/self/mountinfo and .../cgroup
        """
        groups = MemoryGroups(_home(*own_group(mounts, membership), files), files)
        groups._remove_left()
        try:
            group = groups.group(memory_mb=64, tmp_mb=1, processes=1)
        except OSError as e:
            raise Unavailable(f"no group can be made in {groups.home}: {e.strerror}") from e
        if (pid := os.fork()) == 0:
            time.sleep(PROBE_S)
            os._exit(0)
        try:
            group.add(pid)
        except OSError as e:
            raise Unavailable(f"no process can be moved to a group in {groups.home}: {e.strerror}") from e
        finally:
            group.kill()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            group.removed()
        return groups

    def group(self, *, memory_mb: int, tmp_mb: int, processes: int) -> MemoryGroup:
        """Make a group with these limits. Raises OSError."""
        for attempt in range(TRIES):
            path = self.home / f"{PREFIX}{os.getpid()}-{os.urandom(6).hex()}"
            self._files.make(path)
            try:
                group = MemoryGroup(path, self._files)
                group.limit(memory_mb, tmp_mb, processes)
                return group
            except OSError:
                with contextlib.suppress(OSError):
                    self._files.remove(path)
                if attempt == TRIES - 1:
                    raise
        raise AssertionError

    def _remove_left(self) -> None:
        for path in self.home.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):  # it is in use, or just removed
                left = MemoryGroup(path, self._files)
                left.kill()
                left.removed()
                left.forget()


def here() -> tuple[MemoryGroups | None, str]:
    """Return the groups that this process can make, or None, and a description of the memory limit of sandboxes."""
    try:
        mounts, membership = (Path(f"/proc/self/{name}").read_text() for name in ("mountinfo", "cgroup"))
        groups = MemoryGroups.found(mounts, membership, GroupTree())
    except (OSError, Unavailable) as e:
        return None, f"a watch ({e})"
    return groups, f"a cgroup in {groups.home}"


def own_group(mounts: str, membership: str) -> tuple[Path, Path]:
    """Return the root of the tree of groups, and the group of this process in it. Raises Unavailable."""
    path = next((line[3:] for line in membership.splitlines() if line.startswith("0::/")), "")
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        if path and right.startswith("cgroup2 "):
            shown, at = (Path(_unescaped(field)) for field in left.split()[3:5])
            if ".." not in path.split("/") and Path(path).is_relative_to(shown):
                return at, at / Path(path).relative_to(shown)
            raise Unavailable(f"the cgroup of this process, {path}, is outside of {at}")
    raise Unavailable("no cgroup v2 is mounted")


def _unescaped(field: str) -> str:
    """Return a field of mountinfo, in which spaces and the like are written as \\040."""
    return field.encode().decode("unicode_escape") if "\\" in field else field


def _home(root: Path, own: Path, files: GroupTree) -> Path:
    group = own
    while not _holds_groups(group, root, files):
        if group == root or _read(group / "memory.max") not in ("", "max"):
            raise Unavailable(f"no cgroup may be made in {own}, or above it up to {group}")
        group = group.parent
    return group


def _holds_groups(group: Path, root: Path, files: GroupTree) -> bool:
    if not (files.writable(group) and files.writable(group / "cgroup.procs")):
        return False
    if set(_read(group / "cgroup.subtree_control").split()) >= WANTED:
        return True
    if group == root or not set(_read(group / "cgroup.controllers").split()) >= WANTED:
        return False
    try:
        files.write(group / "cgroup.subtree_control", " ".join(f"+{name}" for name in sorted(WANTED)))
    except OSError:  # it holds processes
        return False
    return True


def _read(path: Path) -> str:
    """Return the text of a file of a group, "" where the kernel has none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
