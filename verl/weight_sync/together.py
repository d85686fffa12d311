"""A version that all ranks stage together: each rank writes its own slices into a place that all of them see, the
shared memory of their host or a folder of several hosts. Nothing is gathered, and no rank has a whole tensor outside of
that place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor

from verl.model_engine.base import Publishes
from verl.rollout.base import WireFormat
from verl.weight_sync.base import Entry, SyncError, checksum
from verl.weight_sync.record import VersionRecord
from verl.weight_sync.wire_format import converted


@dataclass(frozen=True, slots=True)
class DeliveredSlice:
    """A slice of a tensor that one rank has written."""

    name: str
    index: tuple[slice, ...]
    """Its position in the whole tensor."""
    num_elements: int
    checksum: int | None
    """crc32 of its bytes in the format in which they are sent; None where this version does not check the tensor."""


class PartsFile(Protocol):
    """The tensors of a version that is being staged, as one rank writes and reads them."""

    def write(self, name: str, index: Sequence[slice], tensor: Tensor) -> None:
        """Write a slice of a tensor, which has the dtype of its entry."""
        ...

    def flush(self) -> None:
        """Make all that was written here visible to the other ranks."""
        ...

    def read(self, name: str) -> Tensor:
        """Return a whole tensor, after all ranks have flushed."""
        ...


@runtime_checkable
class PartsOutlet(Protocol):
    """An outlet of versions that several ranks can write."""

    def place(self) -> str:
        """Return the identity of the place in which versions are staged. The first rank calls this."""
        ...

    def sees(self, place: str) -> bool:
        """Return True if this process can write there. Every rank calls this."""
        ...

    def begin(self, version: int, shapes: Mapping[str, Entry]) -> str:
        """Allocate a version, without tensors, and return its path. The first rank calls this."""
        ...

    def opened(self, path: str, version: int, shapes: Mapping[str, Entry]) -> PartsFile:
        """Open the version that has begun. Every rank calls this."""
        ...

    def end(self, version: int) -> str:
        """Mark the version as whole and return the address for its readers. The first rank calls this."""
        ...


def possible(outlet: object) -> bool:
    """Return True if several ranks see the place of the first one, and the outlet takes parts. All ranks call this, and
    agree."""
    if not isinstance(outlet, PartsOutlet) or not (dist.is_available() and dist.is_initialized()):
        return False
    if dist.get_world_size() < 2:
        return False
    from verl.checkpoint.shards import agreed  # it loads torch's checkpoints, which a process without ranks never needs

    place = [""]
    with agreed(None):
        if dist.get_rank() == 0:
            place = [outlet.place()]
    dist.broadcast_object_list(place)
    return all(_gathered(outlet.sees(place[0])))


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

    The record is of the bytes that were staged: each rank reads some of the whole tensors after all slices are written,
    and compares them with the slices that the ranks delivered."""
    from verl.checkpoint.shards import agreed

    rank, world = dist.get_rank(), dist.get_world_size()
    path = [""]
    with agreed(None):
        if rank == 0:
            path = [outlet.begin(version, shapes)]
    dist.broadcast_object_list(path)
    delivered = list[DeliveredSlice]()
    checked = {name for number, name in enumerate(shapes) if checks(number)}
    with agreed(None):
        file = outlet.opened(path[0], version, shapes)
        for part in engine.weight_parts():
            if part.mine is not None:
                kept = converted(form, part.name, part.mine)
                file.write(part.name, part.index, kept)
                crc = checksum(kept) if part.name in checked else None
                delivered.append(DeliveredSlice(part.name, part.index, kept.numel(), crc))
        file.flush()
    slices: dict[str, list[DeliveredSlice]] = {name: [] for name in shapes}
    for one in (one for of_rank in _gathered(delivered) for one in of_rank):
        slices[one.name].append(one)
    mine, fault = VersionRecord(), ""
    with agreed(None):
        for name in list(shapes)[rank::world]:
            tensor = file.read(name)
            fault = fault or difference_of(name, tensor, slices[name])
            mine.note(name, tensor, check=name in checked)
    mine.finish()
    if faults := [found for found in _gathered(fault) if found]:
        raise SyncError(f"version {version}: {faults[0]}")
    every: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object(mine, every)
    whole = VersionRecord()
    if every is None:
        return "", whole
    for of_rank in every:
        whole.add(of_rank)
    whole.manifest = {name: whole.manifest[name] for name in shapes}
    return outlet.end(version), whole


def difference_of(name: str, tensor: Tensor, slices: Sequence[DeliveredSlice]) -> str:
    """Return an error text if the slices do not cover the staged tensor exactly once, or do not read as they were
    written, else ""."""
    if (found := sum(one.num_elements for one in slices)) != tensor.numel():
        return f"{name} has {tensor.numel()} elements, and its ranks delivered {found}"
    changed = [one for one in slices if one.checksum is not None and checksum(tensor[one.index]) != one.checksum]
    if changed:
        fix = "the file system between the ranks does not keep what they write: set sync.engine=tcp, or another folder"
        return f"{name} does not read as it was written, in {len(changed)} of its {len(slices)} slices; {fix}"
    return ""


def _gathered(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
