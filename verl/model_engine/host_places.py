"""Places in host memory, or in a file, for storages that are moved off a device, and the stream of copies to and from
them."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

ALIGN_BYTES = 64
SLAB_BYTES = 256 << 20  # a power of 2, to which torch rounds pinned memory up

Held = tuple[torch.UntypedStorage, int]
"""A storage on the device and its size in bytes."""


class Place(Protocol):
    """The place of the storages of one part of a state while they are off the device."""

    ahead: bool
    """True if the device computes while storages are copied back, so that the copies may begin before they are used."""

    def write(self, held: Sequence[Held]) -> None:
        """Copy the storages here. When this returns their memory may be freed. Raise OSError if there is no room; the
        storages are unchanged then."""
        ...

    def read(self, held: Sequence[Held]) -> None:
        """Copy all of them back, in the order of `write`, into memory of the same sizes. Computations that are enqueued
        after `before_use` read their numbers."""
        ...

    def before_use(self) -> None:
        """Make computations that are enqueued from now on wait for `read`."""
        ...

    def flat(self, number: int, dtype: torch.dtype) -> Tensor:
        """Return the storage of this number as a vector in host memory, without a copy."""
        ...


class Copies(Protocol):
    """Copies between a device and pinned host memory."""

    def begin(self) -> None:
        """Make later copies wait for the computations that are enqueued until now."""
        ...

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Enqueue a copy."""
        ...

    def before_use(self) -> None:
        """Make computations that are enqueued from now on wait for the copies."""
        ...

    def wait(self) -> None:
        """Wait for the copies."""
        ...


class SideStream:
    """The copies of a GPU on a stream of their own, beside its computations."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, to: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)

    def before_use(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def wait(self) -> None:
        self._stream.synchronize()


class PinnedPlace:
    """Pinned memory, which is kept for the next time: to pin it takes longer than a copy."""

    ahead = True

    def __init__(self, copies: Copies, *, pin: bool) -> None:
        self._copies, self._pin = copies, pin
        self._sizes: list[int] = []
        self._places: list[Tensor] = []

    def write(self, held: Sequence[Held]) -> None:
        if (sizes := [size for _, size in held]) != self._sizes:
            self._sizes, self._places = sizes, []  # frees what was pinned before
            self._places = self._pinned(sizes)
        self._copies.begin()
        for (storage, _), place in zip(held, self._places, strict=True):
            self._copies.copy(place, bytes_of(storage))
        self._copies.wait()

    def read(self, held: Sequence[Held]) -> None:
        self._copies.begin()  # the device may have read this memory until now
        for (storage, _), place in zip(held, self._places, strict=True):
            self._copies.copy(bytes_of(storage), place)

    def before_use(self) -> None:
        self._copies.before_use()

    def flat(self, number: int, dtype: torch.dtype) -> Tensor:
        return self._places[number].view(dtype)

    def _pinned(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return pinned memory of these sizes, several of them in one slab."""
        found, slab, at, left = list[Tensor](), torch.empty(0, dtype=torch.uint8), 0, sum(map(room, sizes))
        for size in sizes:
            if at + size > len(slab):
                slab = torch.empty(max(size, min(SLAB_BYTES, left)), dtype=torch.uint8, pin_memory=self._pin)
                at = 0
            found.append(slab[at : at + size])
            at, left = at + room(size), left - room(size)
        return found


class FilePlace:
    """A file without a name, which ends with the process. Each storage in it begins at a multiple of `ALIGN_BYTES`."""

    ahead = False

    def __init__(self) -> None:
        self._file: Any = tempfile.TemporaryFile()  # noqa: SIM115 - held as long as the place
        self._mapped: mmap.mmap | None = None
        self._sizes: list[int] = []

    def write(self, held: Sequence[Held]) -> None:
        self._sizes = [size for _, size in held]
        if held:
            self._reserve(sum(map(room, self._sizes)))
        for storage, size in held:
            self._file.write(storage_memory(storage))
            self._file.seek(room(size) - size, os.SEEK_CUR)

    def read(self, held: Sequence[Held]) -> None:
        self._file.seek(0)
        for storage, size in held:
            if (found := self._file.readinto(storage_memory(storage))) != size:
                raise OSError(f"{found} of {size} bytes of an offloaded tensor came back from {tempfile.gettempdir()}")
            self._file.seek(room(size) - size, os.SEEK_CUR)
        self._mapped = None

    def before_use(self) -> None:
        return

    def flat(self, number: int, dtype: torch.dtype) -> Tensor:
        self._file.flush()
        self._mapped = self._mapped or mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
        at = sum(map(room, self._sizes[:number]))
        return torch.frombuffer(self._mapped, dtype=dtype, count=self._sizes[number] // dtype.itemsize, offset=at)

    def _reserve(self, size: int) -> None:
        self._file.seek(0)
        try:
            os.posix_fallocate(self._file.fileno(), 0, size)
        except OSError as e:
            fix = "set TMPDIR to a folder on a disk with room, or model.engine_options.offload_* to false"
            raise OSError(e.errno, f"{tempfile.gettempdir()} has no room for {size} bytes of a model: {fix}") from e


def place_of(device: torch.device) -> Place:
    """Return a place for storages that are moved off this device. The place of a CPU's storages is on a disk."""
    return FilePlace() if device.type == "cpu" else PinnedPlace(SideStream(device), pin=True)


def room(size: int) -> int:
    """Return a size in bytes, rounded up to `ALIGN_BYTES`."""
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def storage_memory(storage: torch.UntypedStorage) -> Any:
    """Return a storage in host memory as a ctypes array of bytes, without a copy. A numpy array over it would prevent
    later changes of its size."""
    return (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return a storage as a tensor of bytes on its device, without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
