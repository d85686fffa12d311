"""A version that ranks of several hosts stage apart: each rank stores the slices that it holds where replicas can read
them, and the first rank publishes a table of all slices. A host with replicas reads every slice from the rank that
holds it, and puts them together in its own shared memory. No process of the trainer ever has a whole tensor."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np
import torch
from torch import Tensor

from verl.model_engine.base import Publishes, WeightPart
from verl.weight_sync.base import Entry, Spans, SyncError, dtype_name, slice_at
from verl.weight_sync.record import entries_of_part
from verl.weight_sync.shm import FIRST_AT, ShmOutlet, ShmStream, place_tensors
from verl.wire import WireFormat

SLICED = "slices:"
"""The beginning of the address of a version in slices."""


class RankSlices(msgspec.Struct, array_like=True):
    """The slices that one rank has stored."""

    rank: int
    address: str
    """The address at which they are read, as the transport writes it."""
    slices: list[tuple[str, Spans]]
    """The tensor and the position of each slice. The number of a slice in this list is its name in the store."""

    def entries(self, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Entry]:
        """Return the entries of the slices, by their names in the store."""
        dtypes = (tensors[name][0] for name, _ in self.slices)
        shapes = (tuple(stop - start for start, stop in spans) for _, spans in self.slices)
        return {str(n): Entry(shape, dtype) for n, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))}


class SlicedVersion(msgspec.Struct, array_like=True):
    """The table of a version in slices."""

    version: int
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    """Name -> (dtype, shape) of each whole tensor."""
    ranks: list[RankSlices]
    """The ranks that hold slices."""

    @property
    def shapes(self) -> dict[str, Entry]:
        """The entries of the whole tensors."""
        return {name: Entry(shape, dtype) for name, (dtype, shape) in self.tensors.items()}

    @property
    def fault(self) -> str:
        """An error text if the slices do not cover every tensor exactly once, else ""."""
        found: dict[str, list[Spans]] = {name: [] for name in self.tensors}
        for of_rank in self.ranks:
            for name, spans in of_rank.slices:
                found[name].append(spans)
        faults = (coverage_fault(name, self.tensors[name][1], slices) for name, slices in found.items())
        return next(filter(None, faults), "")


@runtime_checkable
class SlicesOutlet(Protocol):
    """An outlet of versions in slices."""

    per_rank: bool
    """True if each rank can store its own slices."""

    def begin_slices(self, version: int) -> str:
        """Return where the ranks store this version, "" if each has a place of its own. The first rank calls this."""
        ...

    def stage_slices(
        self, place: str, rank: int, version: int, shapes: Mapping[str, Entry], tensors: Iterable[tuple[str, Tensor]]
    ) -> str:
        """Store the slices of this rank and return their address, as `Outlet.stage` does. place: from `begin_slices` of
        the first rank."""
        ...

    def join_slices(self, place: str, table: SlicedVersion) -> str:
        """Publish the version after all ranks have stored their slices, and return the address for its readers. The
        first rank calls this."""
        ...

    def release_slices(self, version: int) -> None:
        """Mark the slices of this rank as read by all replicas: their memory may be reused."""
        ...


def coverage_fault(name: str, shape: Sequence[int], slices: Sequence[Spans]) -> str:
    """Return an error text if slices at these positions do not cover a tensor exactly once, else ""."""
    found = sum(prod(stop - start for start, stop in spans) for spans in slices)
    if found != prod(shape):
        return f"{name} has {prod(shape)} elements, and its ranks delivered {found}"
    if len(slices) > 1:
        ends = np.array(slices).reshape(len(slices), len(shape), 2)  # [slices, axes, start and stop]
        starts, stops = ends[:, :, 0], ends[:, :, 1]
        shared = np.minimum(stops[:, None], stops[None]) > np.maximum(starts[:, None], starts[None])
        if np.triu(shared.all(-1), 1).any():
            return f"{name}: two slices that its ranks delivered overlap, and others are missing"
    return ""


def spans_of(index: Sequence[slice], shape: Sequence[int]) -> Spans:
    """Return the (start, stop) of a slice on every axis of a tensor."""
    spans = (one.indices(size) for one, size in zip(index, shape, strict=True))
    return tuple((start, stop) for start, stop, _ in spans)


def own_slices(engine: Publishes, form: WireFormat) -> tuple[dict[str, Entry], list[tuple[str, Spans]]]:
    """Return (the entries of the slices that this rank delivers, by their names in the store; the tensor and the
    position of each)."""
    held = [part for part in engine.weight_parts() if part.mine is not None]
    slices = [(part.name, spans_of(part.index, part.shape)) for part in held]
    entries = {
        str(number): replace(entries_of_part(part, form)[part.name], shape=tuple(b - a for a, b in spans))
        for number, (part, (_, spans)) in enumerate(zip(held, slices, strict=True))
    }
    return entries, slices


def held_parts(engine: Publishes) -> Iterator[tuple[WeightPart, Tensor]]:
    """Yield the parts that this rank delivers, each with its tensor."""
    return ((part, part.mine()) for part in engine.weight_parts() if part.mine is not None)


def put_together(
    table: SlicedVersion,
    outlet: ShmOutlet,
    read: Callable[[RankSlices], Iterable[tuple[str, Tensor]]],
    *,
    at_once: int = 1,
) -> ShmStream:
    """Read the slices of all ranks into one whole version and return its segment. read: yields the slices of a rank by
    their names in the store, each valid until the next one · at_once: the number of ranks to read from at the same
    time. Raise SyncError that names the rank if its slices cannot be read, or are not those of the table."""
    at = f"version {table.version}"
    if table.fault:
        raise SyncError(f"{at}: {table.fault}")
    views = dict(ShmStream(Path(outlet.begin(table.version, table.shapes))).views())
    stopped = threading.Event()

    def fill(of_rank: RankSlices) -> None:
        missing = dict(enumerate(of_rank.slices))
        try:
            with contextlib.closing(iter(read(of_rank))) as slices:  # type: ignore[type-var]
                for number, tensor in slices:
                    if stopped.is_set():
                        return
                    name, spans = missing.pop(int(number))
                    into = slice_at(views[name], spans)
                    if (tensor.shape, tensor.dtype) != (into.shape, into.dtype):
                        found = f"{list(tensor.shape)} {dtype_name(tensor)}, not {list(into.shape)} {dtype_name(into)}"
                        raise SyncError(f"its slice of {name} is {found}")
                    into.copy_(tensor)
            if missing:
                raise SyncError(f"it did not deliver its slice of {next(iter(missing.values()))[0]}")
        except SyncError as e:
            raise SyncError(f"{at}: rank {of_rank.rank}: {e}") from e

    with ThreadPoolExecutor(at_once, "slices") as pool:
        pending = [pool.submit(fill, of_rank) for of_rank in table.ranks]
        ended, _ = wait(pending, return_when=FIRST_EXCEPTION)
        stopped.set()  # the others end at their next slice
        error = next((one.exception() for one in pending if one in ended and one.exception()), None)
        if error is not None:
            pool.shutdown(cancel_futures=True)
            raise error
    return ShmStream(Path(outlet.end(table.version)))


def slices_in(segment: Tensor, entries: Mapping[str, Entry]) -> Iterator[tuple[str, Tensor]]:
    """Yield the slices of a segment's bytes [n] uint8, in place."""
    first = int.from_bytes(segment[FIRST_AT : FIRST_AT + 8].numpy().tobytes(), "little")
    for place in place_tensors(entries)[0]:
        content = segment[first + place.start : first + place.start + place.num_bytes]
        yield place.name, content.view(vars(torch)[place.dtype]).view(place.shape)
