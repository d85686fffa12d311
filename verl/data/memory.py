"""A bound on what the templates of strangers may allocate while rows are rendered."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RENDER_BYTES = 8 << 30  # beyond what the process has; a template that repeats a text took 23 GB


@contextmanager
def bounded_memory(more: int = RENDER_BYTES) -> Iterator[None]:
    """At most `more` bytes of address space than now; what goes beyond raises MemoryError. Of the whole process, so
    only where it does nothing else. Nothing is bounded where the system does not say what a process has."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = pages * resource.getpagesize() + more
    ceilings = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(wanted, *ceilings) if ceilings else wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
