"""The sync engines' own keys. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from verl.bounds import Positive, PositiveInt, one_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Shm:
    """The options of sync.engine=shm."""

    bucket_mb: PositiveInt | None = None
    """MiB of each of two buckets (of the largest tensor, if that is larger), through which the weights pass into
    replicas that pause meanwhile. None: a whole version is stored in shared memory, and replicas continue until they
    have read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ipc:
    """The options of sync.engine=ipc."""

    bucket_mb: PositiveInt = 256
    """As `bucket_mb` of shm; the two buckets are on the GPU of the trainer's first rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tcp:
    """The options of sync.engine=tcp."""

    host: str | None = None
    """The address by which replicas reach the trainer's first rank. None: the address of its machine's default route,
    as for ranks on other machines."""
    delta: bool = False
    """Send to hosts that have the version before only the elements that changed: for slow links."""
    bucket_mb: PositiveInt | None = None
    """As `bucket_mb` of shm: two buckets on the trainer's host, and one for each replica on other hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nixl:
    """The options of sync.engine=nixl."""

    host: str | None = None
    """As `host` of tcp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """The options of sync.engine=collective."""

    host: str | None = None
    """As `host` of tcp."""
    backend: Annotated[str, one_of("gloo|nccl")] = "gloo"
    """The backend of torch.distributed."""
    gather_s: Positive = 2.0
    """Seconds that the broadcast of a version waits for all hosts that received the version before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The options of sync.engine=disk."""

    folder: str | None = None
    """The parent of the version folders, each a model folder: a folder that all machines share if the rollout is on
    another one, or the URL of an object store (s3://BUCKET/NAME). None: a folder among this machine's temporary
    files."""
