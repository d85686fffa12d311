"""Storage for an engine's state while other parts of the run use its device: an accelerator's state is moved to pinned
host memory, the state of a CPU to a file (host_places.py).

Only the storage below the tensors is moved. The tensors, their views (FSDP gathers from one) and all references stay
valid; the storage has no bytes until it is restored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from verl.model_engine.base import Part
from verl.model_engine.host_places import Held, Place, place_of
from verl.processes.memory import return_device_memory


class Offload:
    """Moves parts of a state to and from a device. away: the parts that are on `device` only while they are used ·
    held: a function that returns the current tensors of a part."""

    def __init__(self, device: torch.device, away: Sequence[Part], held: Callable[[Part], Iterable[Tensor]]) -> None:
        self._held = held
        self._places = {part: _Offloaded(place_of(device)) for part in away}
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
                    moved = [place.put(self._held(part)) for part, place in self._places.items()]
                    if any(moved):
                        return_device_memory()  # a rollout engine may be another process

    def soon(self, part: Part) -> None:
        """Inside `awake`: begin to bring a part that is about to be used, beside what the device computes now."""
        with self._lock:
            assert self._inside, "only what is moved away afterwards"
            if part in self._places:
                self._places[part].bring(ahead=True)

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
    """The storages of one offloaded part. sizes: those that are away, in the order of their place, and their bytes."""

    def __init__(self, place: Place) -> None:
        self.sizes: list[Held] = []
        self._place, self._coming = place, False

    def put(self, tensors: Iterable[Tensor]) -> bool:
        """Move the tensors off the device, and return whether there were any. Raise OSError if the disk has no space;
        all of them are then still on the device."""
        if self.sizes:
            return False
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
        found = [(storage, storage.nbytes()) for storage in storages.values() if storage.nbytes()]
        self._place.write(found)
        for storage, _ in found:
            storage.resize_(0)
        self.sizes, self._coming = found, False
        return bool(found)

    def bring(self, *, ahead: bool = False) -> None:
        """Move the tensors back to the device. ahead: only start it, if the device can compute meanwhile; a later call
        without `ahead` is before they are used."""
        if ahead and not self._place.ahead:
            return
        if self.sizes:
            for storage, size in self.sizes:
                storage.resize_(size)
            self._place.read(self.sizes)
            self.sizes, self._coming = [], True
        if self._coming and not ahead:
            self._place.before_use()
            self._coming = False

    def view_of(self, t: Tensor) -> Tensor | None:
        """Return an offloaded tensor as a view of host memory; None if it is on the device or not in this part."""
        for number, (storage, _) in enumerate(self.sizes):
            if storage._cdata == t.untyped_storage()._cdata:
                flat = self._place.flat(number, t.dtype)
                return flat.as_strided(t.shape, t.stride(), flat.storage_offset() + t.storage_offset())
        return None


def own_storage(parameters: Iterable[nn.Parameter]) -> None:
    """Give each parameter that shares a storage, or that maps a file, a storage of its own."""
    for p in parameters:
        storage = p.untyped_storage()
        if storage.nbytes() != p.nbytes or not storage.resizable():
            p.data = p.data.clone()
