"""The free memory of a machine, within the limit of the container."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

MARGIN = 2.0  # free memory that a copy needs, as a multiple of its size: it is written while the run continues
CGROUPS = Path("/sys/fs/cgroup")
OF_GROUP = {  # by version: limit, use, and the line of memory.stat with the part of the use that is a cache
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory that a rank needs for a copy of its state, and the free memory of its host."""

    host: str
    process: int
    copy_bytes: int
    peak_bytes: int
    """The most memory that its process had in use above its present use, and may need again."""
    free_bytes: int


def rank_memory(copy_bytes: int) -> RankMemory:
    """Return the memory figures of this process for a copy of this size."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak_bytes = max(0, most - psutil.Process().memory_info().rss)
    return RankMemory(socket.gethostname(), os.getpid(), copy_bytes, peak_bytes, free_bytes())


def too_small(rooms: Sequence[RankMemory]) -> str:
    """Explain which host has too little memory for the copies of all its ranks. Return "" if every host has enough."""
    for host in dict.fromkeys(room.host for room in rooms):
        here = [room for room in rooms if room.host == host]
        copies, free = sum(room.copy_bytes for room in here), min(room.free_bytes for room in here)
        peaks = sum({room.process: room.peak_bytes for room in here}.values())
        if free < MARGIN * copies + peaks:
            beside = f" and {peaks / 1e9:.2g} GB are wanted by its processes at their peak" if peaks else ""
            return f"{copies / 1e9:.2g} GB of {host}, which has {free / 1e9:.2g} GB free{beside}"
    return ""


def free_bytes(groups: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the free memory of this machine, or less if a control group of this process has a lower limit."""
    return min([psutil.virtual_memory().available, *(limit - used for limit, used in _groups(groups, own))])


def total_bytes(groups: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the total memory of this machine, or less if a control group of this process has a lower limit."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _groups(groups, own))])


def _groups(groups: Path, own: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, use) in bytes for each control group of this process that has a limit."""
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        limit, use, cache = OF_GROUP[1 if controllers else 2]
        top = groups / "memory" if controllers else groups
        folder = top / path.lstrip("/")
        for one in (folder, *folder.parents):
            with contextlib.suppress(OSError, ValueError, KeyError):  # no limit, or the group of another namespace
                stat = dict(entry.split() for entry in (one / "memory.stat").read_text().splitlines())
                used = int((one / use).read_text()) - int(stat[cache])
                yield int((one / limit).read_text()), used
            if one == top:
                break
