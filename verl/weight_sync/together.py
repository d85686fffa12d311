"""A version that all ranks stage together, without gathering: each rank writes its own slices into a place that all of
them see, the shared memory of their host or a folder of several hosts, or stores them where readers fetch them
(slices.py). No rank has a whole tensor outside of that place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor

from verl.model_engine.base import Publishes
from verl.weight_sync.base import Entry, SliceEntry, Spans, SyncError, checksum, slice_at
from verl.weight_sync.record import SAMPLED_VALUES, VersionRecord
from verl.weight_sync.slices import (
    RankSlices,
    SlicedVersion,
    SlicesOutlet,
    coverage_fault,
    held_parts,
    own_slices,
    spans_of,
)
from verl.weight_sync.wire_format import converted
from verl.wire import WireFormat


class Stage(Protocol):
    """Stages one version. Returns (address, record of all tensors) on the first rank; the others get ("", an empty
    record). checks: for the number of a tensor, True if it gets a checksum. All ranks call this."""

    def __call__(
        self,
        engine: Publishes,
        version: int,
        shapes: Mapping[str, Entry],
        form: WireFormat,
        checks: Callable[[int], bool],
    ) -> tuple[str, VersionRecord]: ...


@dataclass(frozen=True, slots=True)
class DeliveredSlice:
    """A slice of a tensor that one rank has written."""

    name: str
    spans: Spans
    """Its position in the whole tensor."""
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


def staging(outlet: object) -> Stage | None:
    """Return how several ranks stage a version in this outlet: in one place if all of them see the place of the first
    one, else each its slices if the outlet takes these. None: there is one rank, or the first one gathers. All ranks
    call this, and agree."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return None
    if isinstance(outlet, PartsOutlet) and _one_place(outlet):
        return partial(stage_parts, outlet)
    return partial(stage_slices, outlet) if isinstance(outlet, SlicesOutlet) and outlet.per_rank else None


def _one_place(outlet: PartsOutlet) -> bool:
    """Return True if all ranks see the place of the first one."""
    place = _path_of_first(outlet.place)
    return all(_gathered(outlet.sees(place)))


def _path_of_first(fn: Callable[[], str]) -> str:
    """Return the path that the function returns on the first rank, which alone calls it. Raise its OSError on all
    ranks."""
    from verl.checkpoint.shards import agreed  # it loads torch's checkpoints, which a process without ranks never needs

    path = [""]
    with agreed(None):
        if dist.get_rank() == 0:
            path = [fn()]
    dist.broadcast_object_list(path)
    return path[0]


def stage_parts(
    outlet: PartsOutlet,
    engine: Publishes,
    version: int,
    shapes: Mapping[str, Entry],
    form: WireFormat,
    checks: Callable[[int], bool],
) -> tuple[str, VersionRecord]:
    """Stage one version in one place, as a `Stage`. The record is of the bytes that were staged: each rank reads some
    of the whole tensors after all slices are written, and compares them with the slices that the ranks delivered."""
    from verl.checkpoint.shards import agreed

    rank, world = dist.get_rank(), dist.get_world_size()
    path = _path_of_first(lambda: outlet.begin(version, shapes))
    delivered = list[DeliveredSlice]()
    checked = {name for number, name in enumerate(shapes) if checks(number)}
    with agreed(None):
        file = outlet.opened(path, version, shapes)
        for part in engine.weight_parts():
            if part.mine is not None:
                kept = converted(form, part.name, part.mine)
                file.write(part.name, part.index, kept)
                crc = checksum(kept) if part.name in checked else None
                delivered.append(DeliveredSlice(part.name, spans_of(part.index, part.shape), crc))
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
    _raise_any(version, fault)
    every: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object(mine, every)
    whole = VersionRecord()
    if every is None:
        return "", whole
    for of_rank in every:
        whole.add(of_rank)
    whole.manifest = {name: whole.manifest[name] for name in shapes}
    return outlet.end(version), whole


def stage_slices(
    outlet: SlicesOutlet,
    engine: Publishes,
    version: int,
    shapes: Mapping[str, Entry],
    form: WireFormat,
    checks: Callable[[int], bool],
) -> tuple[str, VersionRecord]:
    """Stage one version in slices, as a `Stage`. The entries of the manifest have the checksums of slices. Raise
    SyncError on all ranks if one cannot store its slices, or if they do not cover all tensors."""
    rank, world = dist.get_rank(), dist.get_world_size()
    checked = {name for number, name in enumerate(shapes) if checks(number)}
    entries, slices = own_slices(engine, form)
    record, sums = VersionRecord(), list[int | None]()

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for number, (part, mine) in enumerate(held_parts(engine)):
            kept = converted(form, part.name, mine).cpu()
            sums.append(checksum(kept) if part.name in checked else None)
            record.note_slice(part.name, kept, max(1, SAMPLED_VALUES // world))
            yield str(number), kept

    place = _of_first(version, lambda: outlet.begin_slices(version))
    stage = partial(outlet.stage_slices, place, rank, version, entries, tensors())
    address, fault = _tried(stage) if slices else ("", "")
    _raise_any(version, f"rank {rank} could not store its slices: {fault}" if fault else "")
    every: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object((RankSlices(rank, address, slices), sums, record), every)

    def join() -> str:
        of_ranks = [of_rank for of_rank, _, _ in every or () if of_rank.slices]
        table = SlicedVersion(version, {name: (e.dtype, e.shape) for name, e in shapes.items()}, of_ranks)
        if table.fault:
            raise SyncError(table.fault)
        return outlet.join_slices(place, table)

    whole = VersionRecord(dict(shapes))
    for of_rank, of_slices, found in every or ():
        whole.add_slices(found)
        for (name, spans), crc in zip(of_rank.slices, of_slices, strict=True):
            if crc is not None:
                entry = whole.manifest[name]
                whole.manifest[name] = replace(entry, slices=(*entry.slices, SliceEntry(of_rank.rank, spans, crc)))
    address = _of_first(version, join)
    return (address, whole) if rank == 0 else ("", VersionRecord())


def _tried(fn: Callable[[], str]) -> tuple[str, str]:
    """Return (the result, "") or ("", the text of the error)."""
    try:
        return fn(), ""
    except (OSError, SyncError) as e:
        return "", str(e)


def _of_first(version: int, fn: Callable[[], str]) -> str:
    """Return the result of the first rank, which alone calls the function. Raise its error on all ranks."""
    found = [_tried(fn) if dist.get_rank() == 0 else ("", "")]
    dist.broadcast_object_list(found)
    ((result, fault),) = found
    if fault:
        raise SyncError(f"version {version}: {fault}")
    return result


def _raise_any(version: int, fault: str) -> None:
    """Raise the first error text of all ranks, on all of them."""
    if faults := [found for found in _gathered(fault) if found]:
        raise SyncError(f"version {version}: {faults[0]}")


def difference_of(name: str, tensor: Tensor, slices: Sequence[DeliveredSlice]) -> str:
    """Return an error text if the slices do not cover the staged tensor exactly once, or do not read as they were
    written, else ""."""
    if fault := coverage_fault(name, tensor.shape, [one.spans for one in slices]):
        return fault
    checked = [one for one in slices if one.checksum is not None]
    changed = [one for one in checked if checksum(slice_at(tensor, one.spans)) != one.checksum]
    if changed:
        fix = "the file system between the ranks does not keep what they write: set sync.engine=tcp, or another folder"
        return f"{name} does not read as it was written, in {len(changed)} of its {len(slices)} slices; {fix}"
    return ""


def _gathered(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
