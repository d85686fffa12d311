"""The settings of the queues. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    max_bytes: Annotated[int, Meta(ge=1 << 20)] | None = None
    """Bytes of shared memory. New rows wait once half of it is in use; the rest is for columns of existing rows. None:
    half of the free memory at start."""
    timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Limit for space for new rows, and for an answer of the process that holds the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    max_bytes: Annotated[int, Meta(ge=1)] | None = None
    """Bytes of the store. New rows wait once half of it is in use; the rest is for columns of existing rows, which
    never wait. None: Ray's object stores together, with queue.engine=package half of this machine's free memory."""
    timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Limit for space for new rows, and for an answer of the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package(Remote):
    config: str | None = None
    """A YAML file of the TransferQueue package's own configuration. None: its defaults (SimpleStorage, ZeroMQ)."""
