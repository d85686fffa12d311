"""The sync engines' own keys. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from verl.bounds import Positive, PositiveInt, one_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Shm:
    bucket_mb: PositiveInt | None = None
    """Weights pass through two buckets of this size (of the largest tensor, where that is larger), into replicas that
    pause meanwhile. None: a whole version is stored in shared memory, and replicas continue until they have read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ipc:
    bucket_mb: PositiveInt = 256
    """As that of shm; two buckets, on the GPU of the trainer's first rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tcp:
    host: str | None = None
    """The address by which replicas reach the trainer's first rank. None: the address of its machine's default
    route."""
    delta: bool = False
    """Send only the elements that changed to hosts that have the version before: for slow links."""
    bucket_mb: PositiveInt | None = None
    """As that of shm; a host has one of them for each of its replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nixl:
    host: str | None = None
    """As that of tcp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    host: str | None = None
    """As that of tcp."""
    backend: Annotated[str, one_of("gloo|nccl")] = "gloo"
    """The backend of torch.distributed."""
    gather_s: Positive = 2.0
    """How long a version waits for all hosts that had the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    folder: str | None = None
    """The parent of the version folders, each a model folder. It is shared where the rollout is on another machine; or
    the URL of an object store (s3://BUCKET/NAME). None: among this machine's temporary files."""
