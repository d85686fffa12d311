"""A process with namespaces of its own (users, mounts, processes, network, IPC, host name), by Linux's own calls.

What it sees: the interpreter and the system's libraries, read-only; a /tmp of its own in memory, with a quota; five
devices. No network, no /proc, no host file beyond these; uid nobody, no capability, no way to a new privilege, Landlock
where the kernel has it, and a filter of system calls. Standard library only: it runs in the warm interpreter.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import socket
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path

NOBODY = 65534
NEW_USERS, NEW_MOUNTS = 0x10000000, 0x00020000
NEW_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 0x1000, 0x4000, 0x40000
DEVICES = ("null", "zero", "full", "random", "urandom")
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER = 38, 22, 36
CLONE, CLONE3, SOCKET, SOCKETPAIR, PIVOT_ROOT, MOUNT_SETATTR = 56, 435, 41, 53, 155, 442  # x86-64's numbers
DENIED = (
    # other processes: ptrace, process_vm_*, kcmp, pidfd_getfd; namespaces, mounts and roots, old and new calls
    *(101, 310, 311, 312, 438, 272, 308, 165, 166, 155, 161, 442, 428, 429, 430, 431, 432, 433),
    # io_uring; keys; bpf, perf_event_open, userfaultfd; handles of files, fanotify, lookup_dcookie; memfd_secret
    *(425, 426, 427, 248, 249, 250, 321, 298, 323, 303, 304, 300, 301, 212, 447),
    # the machine: kexec, modules, ports, swap, reboot, syslog, acct, quotas, clocks, names, personality, modify_ldt
    *(246, 320, 175, 176, 313, 172, 173, 167, 168, 169, 103, 163, 179, 443, 164, 227, 159, 305, 170, 171, 135, 154),
    # memory of the machine: vmsplice, mbind, set_mempolicy, migrate_pages, move_pages, set_mempolicy_home_node
    *(278, 237, 238, 256, 279, 450),
    # memory that is summed as no process's: shmget, shmat, shmctl; memfd_create
    *(29, 30, 31, 319),
)
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
READ_AND_RUN, WRITE_FILE = 0b1101, 0b0010  # Landlock's execute, read file, read folder; write file

_libc = ctypes.CDLL(None, use_errno=True)
_held = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock: for a call that comes back twice
_held.syscall.restype = _libc.syscall.restype = ctypes.c_long


def clone(namespaces: int = NEW_NAMESPACES) -> int:
    """Fork into new namespaces, of every kind unless others are named: 0 in the child, which is process 1 of a new
    namespace of processes. For one thread only."""
    pid: int = _held.syscall(*map(ctypes.c_long, (CLONE, namespaces | signal.SIGCHLD, 0, 0, 0, 0)))
    if pid < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"this kernel or container gives no new namespaces: {os.strerror(number)}")
    return pid


def adopt_orphans() -> None:
    """Whoever below this process loses its parent becomes our child."""
    _call("orphans", _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def map_users(pid: int) -> None:
    """Who the child's users are outside: nobody is nobody, if we may say so; else nobody is who we are."""
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
    """In the child, once its users are mapped: the new root, then no way back. OSError if a step is refused. base: a
    folder whose files stand in /tmp at first; "": none do."""
    _enter_root(read_only, tmp_mb, base)
    for capability in range(64):
        _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    header, none = struct.pack("<Ii", 0x20080522, 0), bytes(24)
    _call("capset", _libc.capset(header, none))
    _call("no new privileges", _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _call("dumpable", _libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _landlock()
    program = seccomp_program()
    words = ctypes.create_string_buffer(program, len(program))
    filter_ = struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(words))
    _call("seccomp", _libc.prctl(PR_SET_SECCOMP, 2, filter_, 0, 0))


def stay_outside(folder: str) -> None:
    """In a child of tier "none": what it starts stays below it and gains no privilege. Nothing else is kept from it."""
    adopt_orphans()
    _call("no new privileges", _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _call("dumpable", _libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    os.chdir(folder)
    os.environ["TMPDIR"] = tempfile.tempdir = folder


def keep_mounts() -> None:
    """What is mounted from here on stays in this namespace."""
    _call("private mounts", _libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))


def mount_tmp(at: str, tmp_mb: int, base: int) -> None:
    """A folder in memory, with a quota. base: an open folder, whose files stand in it and are copied when they are
    written to; -1: none do."""
    quota = f"size={tmp_mb}m,nr_inodes={64 * tmp_mb},mode=1777".encode()
    _call("tmp", _libc.mount(b"tmpfs", at.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, quota))
    if base < 0:
        return
    for name in ("upper", "work"):
        os.mkdir(f"{at}/{name}")
    os.chmod(f"{at}/upper", 0o1777)
    over = os.open(at, os.O_PATH)
    folders = f"upperdir=/proc/self/fd/{over}/upper,workdir=/proc/self/fd/{over}/work"
    options = f"userxattr,lowerdir=/proc/self/fd/{base},{folders}".encode()
    _call("overlayfs", _libc.mount(b"overlay", at.encode(), b"overlay", MS_NOSUID | MS_NODEV, options))
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
    _call("root", _libc.mount(b"tmpfs", root.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, b"size=1m,mode=755"))
    for path, fd in fds.items():
        target = root + path
        if os.path.isdir(f"/proc/self/fd/{sources[path]}"):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        _call(f"bind {path}", _libc.mount(fd, target.encode(), None, MS_BIND | MS_REC, None))
        _freeze(target, nodev=not path.startswith("/dev/"), recursive=True)
        os.close(sources[path])
    for path, to in links.items():
        os.symlink(to, root + path)
    os.mkdir(f"{root}/tmp")
    mount_tmp(f"{root}/tmp", tmp_mb, below)
    os.symlink("/tmp", f"{root}/dev/shm")
    os.chdir(root)
    _call("pivot_root", _libc.syscall(PIVOT_ROOT, b".", b"."))
    _call("the old root", _libc.umount2(b".", 2))  # MNT_DETACH
    _freeze("/", nodev=False, recursive=False)
    _libc.sethostname(b"sandbox", 7)
    os.chdir("/tmp")


def _freeze(path: str, *, nodev: bool, recursive: bool) -> None:
    """Read-only, no set-uid; with everything mounted below, if `recursive`."""
    attributes = struct.pack("<QQQQ", 1 | 2 | (4 if nodev else 0), 0, 0, 0)
    flags = 0x8000 if recursive else 0  # AT_RECURSIVE
    _call(f"read-only {path}", _libc.syscall(MOUNT_SETATTR, -100, path.encode(), flags, attributes, 32))


def landlock_version() -> int:
    """Of this kernel; 0 where it has none."""
    return max(0, int(_libc.syscall(LANDLOCK_CREATE, None, 0, 1)))


def _landlock() -> None:
    """Once more, what the mounts say already: writing under /tmp only; no connecting, no signal to the outside."""
    version = landlock_version()
    if version == 0:
        return
    every = (1 << 13) - 1 | (version >= 2) << 13 | (version >= 3) << 14 | (version >= 5) << 15
    handled = (struct.pack("<Q", every), struct.pack("<QQ", every, 3), struct.pack("<QQQ", every, 3, 3))
    rules = handled[(version >= 4) + (version >= 6)]
    fd = _call("landlock", _libc.syscall(LANDLOCK_CREATE, rules, len(rules), 0))
    for path, allowed in (("/", READ_AND_RUN), ("/dev", READ_AND_RUN | WRITE_FILE), ("/tmp", every)):
        under = os.open(path, os.O_PATH)
        _call("landlock rule", _libc.syscall(LANDLOCK_ADD, fd, 1, struct.pack("<Qi", allowed, under), 0))
        os.close(under)
    _call("landlock", _libc.syscall(LANDLOCK_RESTRICT, fd, 0))
    os.close(fd)


@functools.cache
def seccomp_program() -> bytes:
    """The filter as BPF, made once: what is denied fails with EPERM; another architecture's calls end the process."""
    load, equal, above, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, refuse = 0x7FFF0000, 0x80000000, 0x00050000  # refuse | errno
    number, arch, first = 0, 4, 16  # where they stand in seccomp_data
    lines: list[tuple[int, int, int, int]] = [
        *((load, 0, 0, arch), (equal, 1, 0, 0xC000003E), (give, 0, 0, kill)),
        *((load, 0, 0, number), (above, 0, 1, 0x40000000), (give, 0, 0, refuse | 1)),  # x32
    ]
    for denied in DENIED:
        lines += [(equal, 0, 1, denied), (give, 0, 0, refuse | 1)]
    lines += [(equal, 0, 1, CLONE3), (give, 0, 0, refuse | 38)]  # ENOSYS: its flags cannot be read here; clone's can
    lines += [(equal, 0, 4, CLONE), (load, 0, 0, first), (any_bit, 0, 1, NEW_NAMESPACES), (give, 0, 0, refuse | 1)]
    lines += [(give, 0, 0, allow)]
    for call in (SOCKET, SOCKETPAIR):
        lines += [(equal, 0, 4, call), (load, 0, 0, first), (equal, 1, 0, socket.AF_UNIX), (give, 0, 0, refuse | 97)]
        lines += [(give, 0, 0, allow)]
    return b"".join(struct.pack("<HBBI", *line) for line in [*lines, (give, 0, 0, allow)])


def _call(what: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
