"""A version that all ranks of a host stage together: each writes the parts that it holds into one segment of shared
memory. Nothing is gathered, and no rank holds a whole tensor beside the segment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist

from verl.model_engine.base import Publishes
from verl.rollout.base import WireFormat
from verl.weight_sync.base import Entry
from verl.weight_sync.record import VersionRecord
from verl.weight_sync.shm import ShmStream, this_host
from verl.weight_sync.wire_format import converted


@runtime_checkable
class PartsOutlet(Protocol):
    """An outlet with a segment of shared memory that every process of its host can write."""

    def begin(self, version: int, shapes: Mapping[str, Entry]) -> str:
        """Allocate the segment of a version, without tensors, and return its path. The first rank calls this."""
        ...

    def end(self, version: int) -> str:
        """Mark the version as whole and return the address for its readers. The first rank calls this."""
        ...


def possible(outlet: object) -> bool:
    """Return True if several ranks share one host, and the outlet takes parts. All ranks call this, and agree."""
    if not isinstance(outlet, PartsOutlet) or not (dist.is_available() and dist.is_initialized()):
        return False
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, this_host())
    return len(hosts) > 1 and len(set(hosts)) == 1


def stage_parts(
    outlet: PartsOutlet,
    engine: Publishes,
    version: int,
    shapes: Mapping[str, Entry],
    form: WireFormat,
    checks: Callable[[int], bool],
) -> tuple[str, VersionRecord]:
    """Stage one version. Returns (address, record of all tensors) on the first rank; the others get ("", an empty
    record). checks: for the number of a tensor, True if it gets a checksum. All ranks call this.

    The record is of the bytes in the segment: each rank reads some of the whole tensors after all parts are written."""
    from verl.checkpoint.shards import agreed  # it loads torch's checkpoints, which a process without ranks never needs

    rank, world = dist.get_rank(), dist.get_world_size()
    path = [""]
    with agreed(None):
        if rank == 0:
            path = [outlet.begin(version, shapes)]
    dist.broadcast_object_list(path)
    segment = ShmStream(Path(path[0]))
    tensors = dict(segment.views())
    for part in engine.weight_parts():
        if part.mine is not None:
            tensors[part.name][part.index].copy_(converted(form, part.name, part.mine))
    dist.barrier()
    mine = VersionRecord()
    for number, (name, tensor) in enumerate(tensors.items()):
        if number % world == rank:
            mine.note(name, tensor, check=checks(number))
    mine.finish()
    every: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object(mine, every)
    whole = VersionRecord()
    if every is None:
        return "", whole
    for one in every:
        whole.add(one)
    whole.manifest = {name: whole.manifest[name] for name in shapes}
    return outlet.end(version), whole
