"""A process with namespaces of its own (users, mounts, processes, network, IPC, host name), by Linux's own calls.

It has the interpreter and the system's libraries, read-only; a /tmp of its own in memory, with a quota; four devices
and a file of zeros. It has no network, no /proc and no other file of the host. It runs as the user 65534 without
capabilities, cannot get new privileges, and is held by Landlock (where the kernel has it) and a filter of system calls.
Standard library only: this runs in the warm interpreter.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path

from verl.processes import tree
from verl.sandbox import cell, syscalls
from verl.sandbox.cell import MS_NODEV, MS_NOSUID, NOBODY, called, libc
from verl.sandbox.syscalls import NEW_NAMESPACES

NEW_USERS, NEW_MOUNTS = 0x10000000, 0x00020000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
DEVICES = ("null", "full", "random", "urandom")  # /dev/zero is a file, which `cell.make_zeros` makes
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_NO_NEW_PRIVS = 38
CLONE, PIVOT_ROOT, MOUNT_SETATTR = 56, 155, 442  # x86-64's numbers
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
READ_AND_RUN, WRITE_FILE = 0b1101, 0b0010  # Landlock's execute, read file, read folder; write file

_held = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock during a call that returns twice
_held.syscall.restype = libc.syscall.restype = ctypes.c_long


def clone(namespaces: int = NEW_NAMESPACES) -> int:
    """Fork into new namespaces, of every kind by default. Return 0 in the child, which is process 1 of a new namespace
    of processes. The caller may have one thread only."""
    pid: int = _held.syscall(*map(ctypes.c_long, (CLONE, namespaces | signal.SIGCHLD, 0, 0, 0, 0)))
    if pid < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"this kernel or container gives no new namespaces: {os.strerror(number)}")
    return pid


def map_users(pid: int) -> None:
    """Map the child's users to users outside: 65534 to itself if we have the right to do so, otherwise to our own
    user."""
    uid, gid, proc = os.geteuid(), os.getegid(), Path(f"/proc/{pid}")
    if uid == 0:
        with contextlib.suppress(PermissionError):
            for name in ("uid_map", "gid_map"):
                (proc / name).write_text(f"0 0 1\n{NOBODY} {NOBODY} 1\n")
            return
    (proc / "setgroups").write_text("deny")
    (proc / "uid_map").write_text(f"{NOBODY} {uid} 1\n")
    (proc / "gid_map").write_text(f"{NOBODY} {gid} 1\n")


def enter(read_only: Sequence[str], tmp_mb: int, base: str) -> None:
    """Change to the new root for good, in the child, once its users are mapped. Raises OSError if a step is refused.
    base: the folder with the files that are in /tmp at first; "": none."""
    _enter_root(read_only, tmp_mb, base)
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    cell.drop_privileges()
    called("no new privileges", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _landlock()
    cell.filter_calls(syscalls.program())


def stay_outside(folder: str) -> None:
    """Prepare a child of tier "none": its descendants stay below it and cannot get new privileges. Nothing is
    isolated."""
    tree.adopt_orphans()
    called("no new privileges", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    called("dumpable", libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    os.chdir(folder)
    os.environ["TMPDIR"] = tempfile.tempdir = folder


def keep_mounts() -> None:
    """Make later mounts visible in this namespace only."""
    called("private mounts", libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))


def quota_of(tmp_mb: int) -> str:
    """Return the mount options of a folder in memory. They limit the number of files too, since each file takes
    memory."""
    return f"size={tmp_mb}m,nr_inodes={64 * tmp_mb},mode=1777"


def mount_tmp(at: str, tmp_mb: int, base: int) -> None:
    """Mount a folder in memory, with a quota. base: an open folder with its first files; a file is copied when it is
    written to; -1: none."""
    cell.mount("tmpfs", at, quota_of(tmp_mb))
    if base < 0:
        return
    for name in ("upper", "work"):
        os.mkdir(f"{at}/{name}")
    os.chmod(f"{at}/upper", 0o1777)
    over = os.open(at, os.O_PATH)
    folders = f"upperdir=/proc/self/fd/{over}/upper,workdir=/proc/self/fd/{over}/work"
    options = f"userxattr,lowerdir=/proc/self/fd/{base},{folders}".encode()
    called("overlayfs", libc.mount(b"overlay", at.encode(), b"overlay", MS_NOSUID | MS_NODEV, options))
    os.close(over)
    os.close(base)


def _enter_root(read_only: Sequence[str], tmp_mb: int, base: str) -> None:
    keep_mounts()
    below = os.open(base, os.O_PATH) if base else -1  # before the new root hides it
    links = {path: os.readlink(path) for path in read_only if os.path.islink(path)}
    binds = [path for path in read_only if path not in links and os.path.exists(path)]
    binds += [f"/dev/{name}" for name in DEVICES]
    sources = {path: os.open(path, os.O_PATH) for path in binds}  # the new root may hide them
    fds = {path: f"/proc/self/fd/{fd}".encode() for path, fd in sources.items()}
    root = "/tmp"
    called("root", libc.mount(b"tmpfs", root.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, b"size=1m,mode=755"))
    for path, fd in fds.items():
        target = root + path
        if os.path.isdir(f"/proc/self/fd/{sources[path]}"):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        called(f"bind {path}", libc.mount(fd, target.encode(), None, MS_BIND | MS_REC, None))
        _freeze(target, nodev=not path.startswith("/dev/"), recursive=True)
        os.close(sources[path])
    for path, to in links.items():
        os.symlink(to, root + path)
    cell.make_zeros(f"{root}/dev/zero")
    os.mkdir(f"{root}/tmp")
    mount_tmp(f"{root}/tmp", tmp_mb, below)
    os.symlink("/tmp", f"{root}/dev/shm")
    os.chdir(root)
    called("pivot_root", libc.syscall(PIVOT_ROOT, b".", b"."))
    called("the old root", libc.umount2(b".", 2))  # MNT_DETACH
    _freeze("/", nodev=False, recursive=False)
    libc.sethostname(b"sandbox", 7)
    os.chdir("/tmp")


def _freeze(path: str, *, nodev: bool, recursive: bool) -> None:
    """Make a mount read-only and without set-uid, and with `recursive` everything mounted below it."""
    attributes = struct.pack("<QQQQ", 1 | 2 | (4 if nodev else 0), 0, 0, 0)
    flags = 0x8000 if recursive else 0  # AT_RECURSIVE
    called(f"read-only {path}", libc.syscall(MOUNT_SETATTR, -100, path.encode(), flags, attributes, 32))


def landlock_version() -> int:
    """Return the version of the kernel's Landlock; 0 without it."""
    return max(0, int(libc.syscall(LANDLOCK_CREATE, None, 0, 1)))


def _landlock() -> None:
    """Allow writing only below /tmp, and no connection or signal to the outside. The mounts enforce most of this
    too."""
    version = landlock_version()
    if version == 0:
        return
    every = (1 << 13) - 1 | (version >= 2) << 13 | (version >= 3) << 14 | (version >= 5) << 15
    handled = (struct.pack("<Q", every), struct.pack("<QQ", every, 3), struct.pack("<QQQ", every, 3, 3))
    rules = handled[(version >= 4) + (version >= 6)]
    fd = called("landlock", libc.syscall(LANDLOCK_CREATE, rules, len(rules), 0))
    for path, allowed in (("/", READ_AND_RUN), ("/dev", READ_AND_RUN | WRITE_FILE), ("/tmp", every)):
        under = os.open(path, os.O_PATH)
        called("landlock rule", libc.syscall(LANDLOCK_ADD, fd, 1, struct.pack("<Qi", allowed, under), 0))
        os.close(under)
    called("landlock", libc.syscall(LANDLOCK_RESTRICT, fd, 0))
    os.close(fd)
