"""A version that all ranks stage together, without gathering: each rank writes its own slices into a place that all of
them see, the shared memory of their host or a folder of several hosts, or stores them where readers fetch them
(slices.py). No rank has a whole tensor outside of that place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor

from verl.model_engine.base import Publishes
from verl.weight_sync.base import Entry, SliceEntry, Spans, SyncError, checksum, slice_at
from verl.weight_sync.crc import PendingChecksum, read_checksums, start_checksum
from verl.weight_sync.meeting import meet, of_first, several_ranks
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


@dataclass(frozen=True, slots=True)
class StoredSlices:
    """The slices of a version that one rank has stored, for the first rank."""

    rank_slices: RankSlices
    checksums: list[int | None]
    """crc32 of each slice; None where this version does not check its tensor."""
    record: VersionRecord


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
    if not several_ranks():
        return None
    if isinstance(outlet, PartsOutlet) and _one_place(outlet):
        return partial(stage_parts, outlet)
    return partial(stage_slices, outlet) if isinstance(outlet, SlicesOutlet) and outlet.per_rank else None


def _one_place(outlet: PartsOutlet) -> bool:
    """Return True if all ranks see the place of the first one."""
    at, what = "the weights cannot be published", "find a place for them"
    place = of_first(at, what, outlet.place)
    return meet(at, what, lambda: outlet.sees(place), lambda seen: [all(seen)] * len(seen))


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
    at = f"version {version}"
    path = of_first(at, "begin the version", lambda: outlet.begin(version, shapes))
    checked = {name for number, name in enumerate(shapes) if checks(number)}
    files = list[PartsFile]()

    def write() -> list[DeliveredSlice]:
        files.append(file := outlet.opened(path, version, shapes))
        delivered, sums = list[DeliveredSlice](), dict[str, int | PendingChecksum]()
        for number, (part, mine) in enumerate(held_parts(engine)):
            kept = converted(form, part.name, mine)
            if part.name in checked:
                sums[str(number)] = start_checksum(kept)  # on its device, which is waited for once
            file.write(part.name, part.index, kept)
            delivered.append(DeliveredSlice(part.name, spans_of(part.index, part.shape), None))
        file.flush()
        found = read_checksums(sums)
        return [replace(one, checksum=found.get(str(number))) for number, one in enumerate(delivered)]

    def shares(delivered: list[list[DeliveredSlice]]) -> list[dict[str, list[DeliveredSlice]]]:
        """Return the tensors that each rank compares, with their slices."""
        slices: dict[str, list[DeliveredSlice]] = {name: [] for name in shapes}
        for one in (one for of_rank in delivered for one in of_rank):
            slices[one.name].append(one)
        world = len(delivered)
        return [{name: slices[name] for name in list(shapes)[rank::world]} for rank in range(world)]

    share = meet(at, "write its slices", write, shares)

    def compare() -> tuple[str, VersionRecord]:
        mine, fault = VersionRecord(), ""
        for name, slices in share.items():
            tensor = files[0].read(name)
            fault = fault or difference_of(name, tensor, slices)
            mine.note(name, tensor, check=name in checked)
        mine.finish()
        return fault, mine

    def end(compared: list[tuple[str, VersionRecord]]) -> list[tuple[str, VersionRecord]]:
        if faults := [fault for fault, _ in compared if fault]:
            raise SyncError(faults[0])
        whole = VersionRecord()
        for _, of_rank in compared:
            whole.add(of_rank)
        whole.manifest = {name: whole.manifest[name] for name in shapes}
        return [(outlet.end(version), whole), *(("", VersionRecord()) for _ in compared[1:])]

    return meet(at, "read the version that was written", compare, end)


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
    at, rank, world = f"version {version}", dist.get_rank(), dist.get_world_size()
    checked = {name for number, name in enumerate(shapes) if checks(number)}
    place = of_first(at, "begin the version", lambda: outlet.begin_slices(version))

    def store() -> StoredSlices:
        entries, slices = own_slices(engine, form)
        record, sums = VersionRecord(), list[int | None]()

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for number, (part, mine) in enumerate(held_parts(engine)):
                kept = part.flat(converted(form, part.name, mine).cpu())
                sums.append(checksum(kept) if part.name in checked else None)
                record.note_slice(part.name, kept, max(1, SAMPLED_VALUES // world))
                yield str(number), kept

        address = outlet.stage_slices(place, rank, version, entries, tensors()) if slices else ""
        return StoredSlices(RankSlices(rank, address, slices), sums, record)

    def join(stored: list[StoredSlices]) -> list[tuple[str, VersionRecord]]:
        table = SlicedVersion(
            version,
            {name: (e.dtype, e.shape) for name, e in shapes.items()},
            [one.rank_slices for one in stored if one.rank_slices.slices],
        )
        if table.fault:
            raise SyncError(table.fault)
        whole = VersionRecord(dict(shapes))
        for one in stored:
            whole.add_slices(one.record)
            for (name, spans), crc in zip(one.rank_slices.slices, one.checksums, strict=True):
                if crc is not None:
                    entry, found = whole.manifest[name], SliceEntry(one.rank_slices.rank, spans, crc)
                    whole.manifest[name] = replace(entry, slices=(*entry.slices, found))
        return [(outlet.join_slices(place, table), whole), *(("", VersionRecord()) for _ in stored[1:])]

    return meet(at, "store its slices", store, join)


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
