"""The system calls that code in a sandbox may make, as a filter of the kernel (seccomp), for Linux on x86_64.

A call that is not in the list does not exist there (ENOSYS: libraries then do without it, as on an older kernel). So a
call of a future kernel is refused until it is added here. Left out on purpose are access to other processes (ptrace),
namespaces and mounts, calls for administrators, views of the host's activity (inotify, fanotify), and memory that is in
no process's sum: System V objects, memfd, asynchronous I/O, extended attributes, pages of a file in a pipe or a socket
(splice, sendfile). Standard library only.
"""

from __future__ import annotations

import functools
import socket
import struct
from typing import NamedTuple

ALLOWED = """
files:      open=2 openat=257 openat2=437 creat=85 close=3 close_range=436 read=0 write=1 pread64=17 pwrite64=18
            readv=19 writev=20 preadv=295 pwritev=296 preadv2=327 pwritev2=328 lseek=8 stat=4 fstat=5 lstat=6
            newfstatat=262 statx=332 statfs=137 fstatfs=138 access=21 faccessat=269 faccessat2=439 getdents=78
            getdents64=217 getcwd=79 chdir=80 fchdir=81 mkdir=83 mkdirat=258 rmdir=84 rename=82 renameat=264
            renameat2=316 link=86 linkat=265 symlink=88 symlinkat=266 readlink=89 readlinkat=267 unlink=87 unlinkat=263
            mknod=133 mknodat=259 chmod=90 fchmod=91 fchmodat=268 fchmodat2=452 chown=92 fchown=93 lchown=94
            fchownat=260 umask=95 truncate=76 ftruncate=77 fallocate=285 utime=132 utimes=235 futimesat=261
            utimensat=280 fsync=74 fdatasync=75 flock=73 copy_file_range=326 getxattr=191 lgetxattr=192 fgetxattr=193
            listxattr=194 llistxattr=195 flistxattr=196 getxattrat=464 listxattrat=465 dup=32 dup2=33 dup3=292 fcntl=72
            ioctl=16 pipe=22 pipe2=293
waiting:    poll=7 ppoll=271 select=23 pselect6=270 epoll_create=213 epoll_create1=291 epoll_ctl=233 epoll_wait=232
            epoll_pwait=281 epoll_pwait2=441 eventfd=284 eventfd2=290 signalfd=282 signalfd4=289 timerfd_create=283
            timerfd_settime=286 timerfd_gettime=287
sockets:    socket=41 socketpair=53 bind=49 connect=42 listen=50 accept=43 accept4=288 getsockname=51 getpeername=52
            sendto=44 recvfrom=45 sendmsg=46 recvmsg=47 sendmmsg=307 recvmmsg=299 shutdown=48 setsockopt=54
            getsockopt=55
memory:     brk=12 mmap=9 munmap=11 mremap=25 mprotect=10 madvise=28 msync=26 mseal=462 mlock=149 mlock2=325
            munlock=150 mlockall=151 munlockall=152 membarrier=324
processes:  clone=56 fork=57 vfork=58 execve=59 execveat=322 exit=60 exit_group=231 wait4=61 waitid=247 arch_prctl=158
            prctl=157 set_tid_address=218 set_robust_list=273 rseq=334 futex=202 futex_waitv=449 futex_wake=454
            futex_wait=455 futex_requeue=456 getpid=39 getppid=110 gettid=186 getpgid=121 getpgrp=111 setpgid=109
            getsid=124 setsid=112 pidfd_open=434 pidfd_send_signal=424 kill=62 tkill=200 tgkill=234 pause=34
            restart_syscall=219 rt_sigaction=13 rt_sigprocmask=14 rt_sigreturn=15 rt_sigpending=127 rt_sigsuspend=130
            rt_sigtimedwait=128 rt_sigqueueinfo=129 rt_tgsigqueueinfo=297 sigaltstack=131 sched_yield=24
            sched_getaffinity=204 sched_setaffinity=203 sched_getparam=143 sched_setparam=142 sched_getscheduler=145
            sched_setscheduler=144 sched_getattr=315 sched_setattr=314 sched_get_priority_max=146
            sched_get_priority_min=147 sched_rr_get_interval=148 getpriority=140 setpriority=141 ioprio_get=252
            ioprio_set=251 getrlimit=97 setrlimit=160 prlimit64=302 getrusage=98
users:      getuid=102 geteuid=107 getresuid=118 getgid=104 getegid=108 getresgid=120 getgroups=115 setuid=105
            setreuid=113 setresuid=117 setfsuid=122 setgid=106 setregid=114 setresgid=119 setfsgid=123 setgroups=116
            capget=125 capset=126
time:       time=201 gettimeofday=96 clock_gettime=228 clock_getres=229 clock_nanosleep=230 nanosleep=35 times=100
            alarm=37 getitimer=36 setitimer=38 timer_create=222 timer_settime=223 timer_gettime=224
            timer_getoverrun=225 timer_delete=226
machine:    getrandom=318 getcpu=309 sysinfo=99 uname=63
"""
NUMBERS = {
    name: int(number)
    for line in ALLOWED.strip().splitlines()
    for name, _, number in (pair.partition("=") for pair in line.partition(":")[2].split() or line.split())
}
"""The number of each allowed call on x86_64, by name."""
EPERM, EINVAL, ENOTTY, ENOSYS, ENOPROTOOPT, ESOCKTNOSUPPORT, EOPNOTSUPP, EAFNOSUPPORT = 1, 22, 25, 38, 92, 94, 95, 97
NEW_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
WORD, PROCESS_1 = 0xFFFFFFFF, 1


class Check(NamedTuple):
    """A condition of a system call: refuse it if (argument & mask) is one of `values`; with `unless`, if it is none of
    them."""

    argument: int
    values: tuple[int, ...]
    mask: int = WORD
    unless: bool = False
    errno: int = EPERM


def only(argument: int, *values: int, errno: int, mask: int = WORD) -> Check:
    """Refuse a call unless (argument & mask) is one of `values`."""
    return Check(argument, values, mask, unless=True, errno=errno)


NOT_PROCESS_1 = (Check(0, (PROCESS_1,)),)
"""Code may not change the limits, scheduling and priorities of process 1."""
ONE_PROCESS = (only(0, 0, errno=EPERM), Check(1, (PROCESS_1,)))  # PRIO_PROCESS: a group or a user may hold process 1
STREAM = (only(0, socket.AF_UNIX, errno=EAFNOSUPPORT), only(1, socket.SOCK_STREAM, mask=0xF, errno=ESOCKTNOSUPPORT))
CHECKS: dict[str, tuple[Check, ...]] = {
    "clone": tuple(Check(0, (bit,), mask=bit) for bit in (1 << n for n in range(32)) if bit & NEW_NAMESPACES),
    "prlimit64": NOT_PROCESS_1,
    "sched_setaffinity": NOT_PROCESS_1,
    "sched_setparam": NOT_PROCESS_1,
    "sched_setscheduler": NOT_PROCESS_1,
    "sched_setattr": NOT_PROCESS_1,
    "setpriority": ONE_PROCESS,
    "ioprio_set": (only(0, 1, errno=EPERM), Check(1, (PROCESS_1,))),  # IOPRIO_WHO_PROCESS
    # Shared memory without a file stays until its last page is unmapped, in no process's sum; huge pages are in none.
    "mmap": (Check(3, (0x20, 0x21, 0x23, 0x28), mask=0x2F), Check(3, (0x40000,), mask=0x40000)),
    "madvise": (Check(2, (12, 20, 21, 100, 101), errno=EINVAL),),  # MERGEABLE, COLD, PAGEOUT; poisoned pages
    "socket": STREAM,
    "socketpair": STREAM,
    # A socket holds no more than it does by default. SOL_SOCKET: REUSEADDR, RCVBUF, KEEPALIVE, OOBINLINE, LINGER,
    # REUSEPORT, PASSCRED, RCVTIMEO, SNDTIMEO, PEEK_OFF
    "setsockopt": (
        only(1, socket.SOL_SOCKET, errno=EOPNOTSUPP),
        only(2, 2, 8, 9, 10, 13, 15, 16, 20, 21, 42, 66, 67, errno=ENOPROTOOPT),
    ),
    # No leases and no notices (1024 to 1026) of the host's files: DUPFD to GETSIG, OFD locks, DUPFD_CLOEXEC, sizes of
    # pipes, seals
    "fcntl": (only(1, *range(17), 36, 37, 38, 1027, 1030, 1031, 1032, 1033, 1034, errno=EINVAL),),
    # Of terminals: TCGETS, TIOCGWINSZ, TIOCGPGRP; FIONREAD, FIONBIO, FIONCLEX, FIOCLEX; FICLONE
    "ioctl": (only(1, 0x5401, 0x5413, 0x540F, 0x541B, 0x5421, 0x5450, 0x5451, 0x40049409, errno=ENOTTY),),
    # PDEATHSIG, DUMPABLE, KEEPCAPS, NAME, SECCOMP (read), CAPBSET, TIMERSLACK, SUBREAPER, NO_NEW_PRIVS, THP, AMBIENT
    "prctl": (only(0, 1, 2, 3, 4, 7, 8, 15, 16, 21, 23, 24, 27, 29, 30, *range(36, 43), 47, 0x53564D41, errno=EINVAL),),
}
REFUSED = dict.fromkeys((188, 189, 190, 197, 198, 199, 463, 466), EOPNOTSUPP)
"""Calls that are refused with another error than ENOSYS: extended attributes of files cannot be set."""


@functools.cache
def program() -> bytes:
    """Return the filter as BPF. Calls of another architecture end the process; those of x32 do not exist."""
    load, mask_with, jump, equal, above, at_least, give = 0x20, 0x54, 0x05, 0x15, 0x25, 0x35, 0x06
    allow, kill, refuse = 0x7FFF0000, 0x80000000, 0x00050000  # refuse | errno
    number, arch, first = 0, 4, 16  # offsets in seccomp_data
    lines: list[tuple[int, int, int, int]] = [
        *((load, 0, 0, arch), (equal, 1, 0, 0xC000003E), (give, 0, 0, kill)),
        (load, 0, 0, number),
    ]
    for name, checks in CHECKS.items():
        tests: list[tuple[int, int, int, int]] = []
        for check in checks:
            tests += [(load, 0, 0, first + 8 * check.argument), (mask_with, 0, 0, check.mask)]
            for n, value in enumerate(check.values):  # each jumps over the values left: to the refusal, or past it
                tests += [(equal, len(check.values) - n, 0, value)]
            tests += [] if check.unless else [(jump, 0, 0, 1)]
            tests += [(give, 0, 0, refuse | check.errno)]
        tests += [(give, 0, 0, allow)]
        lines += [(equal, 0, len(tests), NUMBERS[name]), *tests]
    for denied, errno in REFUSED.items():
        lines += [(equal, 0, 1, denied), (give, 0, 0, refuse | errno)]
    for low, high in _ranges(sorted(number for name, number in NUMBERS.items() if name not in CHECKS)):
        lines += [(above, 3, 0, high), (at_least, 0, 1, low), (give, 0, 0, allow), (give, 0, 0, refuse | ENOSYS)]
    return b"".join(struct.pack("<HBBI", *line) for line in [*lines, (give, 0, 0, refuse | ENOSYS)])


def _ranges(numbers: list[int]) -> list[tuple[int, int]]:
    """Return the first and last of each run of consecutive numbers."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        found = (
            [*found[:-1], (found[-1][0], number)]
            if found and found[-1][1] + 1 == number
            else [*found, (number, number)]
        )
    return found
