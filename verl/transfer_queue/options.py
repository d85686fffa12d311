"""The settings of the queues. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The options of queue.engine=shared."""

    max_bytes: Annotated[int, Meta(ge=1 << 20)] | None = None
    """Bytes of shared memory. A put waits while more than half of them would be in use; the rest is for columns of
    existing rows. None: half of the free memory at start."""
    timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """The longest wait of new rows for space, and of a call for the process with the queue's index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """The options of queues over Ray."""

    max_bytes: Annotated[int, Meta(ge=1)] | None = None
    """Bytes of the store. A put waits while more than half of them would be in use; the rest is for columns of existing
    rows, which never wait. None: all of Ray's object stores; with queue.engine=package half of this machine's free
    memory."""
    timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """The longest wait of new rows for space, and of a call for the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package(Remote):
    """The options of queue.engine=package."""

    config: str | None = None
    """A YAML file of the TransferQueue package's own configuration. None: its defaults (SimpleStorage, ZeroMQ)."""
