"""Storage for an engine's state while other parts of the run use its device: an accelerator's state is moved to host
memory, the state of a CPU to a file without a name, which ends with the process.

Only the storage below the tensors is moved. The tensors, their views (FSDP gathers from one) and all references stay
valid; the storage has no bytes until it is restored."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from verl.model_engine.base import Part

ALIGN_BYTES = 64


class Offload:
    """Moves parts of a state to and from a device. away: the parts that are on `device` only while they are used ·
    held: a function that returns the current tensors of a part."""

    def __init__(self, device: torch.device, away: Sequence[Part], held: Callable[[Part], Iterable[Tensor]]) -> None:
        self._held = held
        self._places = {part: _Offloaded(device) for part in away}
        self._inside = 0
        self._lock = threading.Lock()  # virtual ranks share an engine

    @contextmanager
    def awake(self, *parts: Part) -> Iterator[None]:
        """Inside the context these parts are on the device; after the outermost context all offloaded parts are moved
        away."""
        with self._lock:
            self._inside += 1
            for part in parts:
                if part in self._places:
                    self._places[part].bring()
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    for part, place in self._places.items():
                        place.put(self._held(part))

    def stream(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights while they are on the device; copies, if the weights are moved away afterwards."""
        with self.awake("weights"):
            yield from ((name, w.clone()) for name, w in weights) if self.moves("weights") else weights

    @contextmanager
    def still(self) -> Iterator[None]:
        """Inside the context no part is moved."""
        with self._lock:
            yield

    def on_host(self, t: Tensor, *, copy: bool) -> Tensor:
        """Return an offloaded tensor as a view of host memory (valid until it is moved back), or a copy of it. Return
        any other tensor as it is, or with `copy` as a copy on the host, since another process may use the device."""
        for place in self._places.values():
            if (found := place.view_of(t)) is not None:
                return found.clone() if copy else found
        return t.to("cpu", copy=True) if copy else t

    def moves(self, part: Part) -> bool:
        return part in self._places

    def is_away(self, part: Part) -> bool:
        return self.moves(part) and bool(self._places[part].sizes)


class _Offloaded:
    """The storage of one offloaded part. sizes: the bytes of the storages in it, in order; in the file each begins at a
    multiple of `ALIGN_BYTES`."""

    def __init__(self, device: torch.device) -> None:
        self.sizes: list[tuple[torch.UntypedStorage, int]] = []
        self._file: Any = tempfile.TemporaryFile() if device.type == "cpu" else None  # noqa: SIM115 - held as long
        self._copies: list[Tensor] = []
        self._mapped: mmap.mmap | None = None

    def put(self, tensors: Iterable[Tensor]) -> None:
        """Move the tensors off the device. Raise OSError if the disk has no space; all of them are then still on the
        device."""
        if self.sizes:
            return
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
        found = [(storage, storage.nbytes()) for storage in storages.values() if storage.nbytes()]
        if self._file is not None and found:
            self._reserve(sum(map(_room, (size for _, size in found))))
        for storage, size in found:
            if self._file is not None:
                self._file.write(_memory_of(storage))
                self._file.seek(_room(size) - size, os.SEEK_CUR)
            else:
                copy = torch.empty(size, dtype=torch.uint8, pin_memory=True)
                self._copies.append(copy.copy_(_bytes_of(storage)))
            storage.resize_(0)
            self.sizes.append((storage, size))

    def bring(self) -> None:
        """Move the tensors back to the device."""
        if self._file is not None:
            self._file.seek(0)
        for i, (storage, size) in enumerate(self.sizes):
            storage.resize_(size)
            if self._file is None:
                _bytes_of(storage).copy_(self._copies[i])
            elif (found := self._file.readinto(_memory_of(storage))) != size:
                raise OSError(f"{found} of {size} bytes of an offloaded tensor came back from {tempfile.gettempdir()}")
            else:
                self._file.seek(_room(size) - size, os.SEEK_CUR)
        self.sizes.clear()
        self._copies.clear()
        self._mapped = None

    def view_of(self, t: Tensor) -> Tensor | None:
        """Return an offloaded tensor as a view of host memory; None if it is on the device or not in this part."""
        at = 0
        for i, (storage, size) in enumerate(self.sizes):
            if storage._cdata == t.untyped_storage()._cdata:
                if self._file is None:
                    flat = self._copies[i].view(t.dtype)
                else:
                    self._file.flush()
                    self._mapped = self._mapped or mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
                    flat = torch.frombuffer(self._mapped, dtype=t.dtype, count=size // t.itemsize, offset=at)
                return flat.as_strided(t.shape, t.stride(), t.storage_offset())
            at += _room(size)
        return None

    def _reserve(self, size: int) -> None:
        self._file.seek(0)
        try:
            os.posix_fallocate(self._file.fileno(), 0, size)
        except OSError as e:
            fix = "set TMPDIR to a folder on a disk with room, or model.engine_options.offload_* to false"
            raise OSError(e.errno, f"{tempfile.gettempdir()} has no room for {size} bytes of a model: {fix}") from e


def _room(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def own_storage(parameters: Iterable[nn.Parameter]) -> None:
    """Give each parameter that shares a storage, or that maps a file, a storage of its own."""
    for p in parameters:
        storage = p.untyped_storage()
        if storage.nbytes() != p.nbytes or not storage.resizable():
            p.data = p.data.clone()


def _memory_of(storage: torch.UntypedStorage) -> Any:
    """Return a storage in host memory as a ctypes array of bytes, without a copy. A numpy array over it would prevent
    later changes of its size."""
    return (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return a storage of an accelerator as a tensor of bytes, without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
