"""The memory of processes and of the machine, as the kernel reports it, and how it is allocated. Standard library
only."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from pathlib import Path
from typing import NamedTuple

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
LARGE_BYTES = 1 << 20
"""The least size of a block of memory that `return_large_blocks` is about."""
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h


def over_limit_mb(limit_mb: float, pids: list[int], kernel_mb: float = 0.0) -> float | None:
    """Return the memory of these processes in MB if it is above the limit, otherwise None.

    kernel_mb: memory that the kernel uses for them, which is added
    """
    if sum(map(resident_mb, pids)) + kernel_mb <= limit_mb:
        return None
    used_mb = sum(map(proportional_mb, pids)) + kernel_mb  # slower, but counts memory that forks share once
    return used_mb if used_mb > limit_mb else None


def sockets_mb(pid: int) -> float:
    """Return the most memory in MB that the sockets in a process's network namespace can use, including closed sockets
    with unread data."""
    try:
        used = int(Path(f"/proc/{pid}/net/sockstat").read_text().split()[2])  # "sockets: used 3"
        return used * int(Path("/proc/sys/net/core/wmem_default").read_text()) / 2**20
    except (OSError, ValueError, IndexError):
        return 0.0


def system_s(pids: list[int]) -> float:
    """Return the processor time in seconds that the kernel used for these processes, and for children that they waited
    for."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # it ended
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[12]) + int(fields[14])
    return ticks / os.sysconf("SC_CLK_TCK")


class Machine(NamedTuple):
    """The memory of the machine in megabytes."""

    free_mb: float = math.inf
    """Memory that programs can still allocate."""
    total_mb: float = math.inf
    """All memory."""
    kernel_mb: float = 0.0
    """Memory that the kernel uses and cannot release."""


def machine() -> Machine:
    """Return the memory of this machine; infinite values if there is no /proc."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = {line.split()[0]: int(line.split()[1]) / 1024 for line in lines}
        return Machine(found["MemAvailable:"], found["MemTotal:"], found["SUnreclaim:"])
    except (OSError, KeyError, ValueError):
        return Machine()


def resident_mb(pid: int) -> float:
    """Return the resident memory of a process in MB; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES / 2**20
    except OSError:
        return 0.0


def anonymous_mb(pid: int) -> float:
    """Return the resident memory of a process in MB, without mapped files; 0 if it has ended."""
    try:
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
        return (resident - shared) * PAGE_BYTES / 2**20
    except (OSError, ValueError):
        return 0.0


def proportional_mb(pid: int) -> float:
    """Return the memory of a process in MB, in which a page that is shared by n processes counts as 1/n."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return resident_mb(pid)


def return_large_blocks() -> None:
    """Let the C library return the memory of each large block to the system when it is freed. By default glibc keeps
    blocks of up to 32 MiB, and the few tensors that a pass keeps lie among those that it frees: the gaps between them
    fit nothing else. Another C library is left as it is."""
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGE_BYTES)


def return_device_memory() -> None:
    """Return the memory of GPUs that torch keeps for later tensors of this process, so that others can use it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def use_huge_pages() -> None:
    """Let torch, which must not be loaded yet, place tensors of 2 MiB and more in huge pages where the system has them:
    new memory is then several times cheaper."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
