"""TransferQueue for many nodes over Ray: each put or write is an object of Ray's store, and the index is a named actor.

The columns of a call are one packed array. Readers on the same node use it in place; readers on other nodes fetch it
once. An object is lost with the process that wrote it. New rows wait while half of the store is in use; columns of
existing rows do not wait, since Ray spills to disk."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl.batch import Ragged
from verl.errors import Refused
from verl.transfer_queue.base import MediaStore
from verl.transfer_queue.index import (
    Commit,
    Drop,
    Find,
    Full,
    Having,
    IndexRequest,
    Names,
    Registry,
    Rejected,
    Room,
    Size,
    encoded,
    pick,
    waited,
)
from verl.transfer_queue.options import Remote
from verl.transfer_queue.packing import Parcel, parcel_of_columns, parcel_of_samples, unpack
from verl.types import Refs, Sample, ref_of
from verl.workers.group import WorkerDied

NAMESPACE = "verl"
RETRY_S = 0.05  # between two attempts of a put to get space
QUEUE_LOST = "the process that holds the queue is gone"
LOST = "the process that wrote these rows or columns is gone, and with it what it wrote"


def build(options: Remote) -> RayQueue:
    """Return a new queue in the Ray cluster of this process, which is connected first if necessary (to RAY_ADDRESS,
    else to a new local cluster). The queue ends with this process."""
    name, keeper = start(options.max_bytes)
    return RayQueue(name, options.timeout_s, keeper)


def start(max_bytes: int | None, cpus: int = 0) -> tuple[str, Any]:
    """Start a new index and return its name and actor. max_bytes: the size of the store; None: that of all object
    stores of the cluster · cpus: the fewest processors of a Ray that is started here."""
    try:
        import ray
    except ImportError:
        raise Refused("queue.engine needs Ray, which is not here: pip install '.[ray]' in verl's folder") from None
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS") or "local"  # else Ray would join any cluster on this machine
        wanted = max(cpus, os.cpu_count() or 1) if address == "local" else None
        ray.init(address=address, namespace=NAMESPACE, include_dashboard=False, num_cpus=wanted)
    name = f"queue-{uuid.uuid4().hex}"
    most = max_bytes or int(ray.cluster_resources()["object_store_memory"])
    node = ray.get_runtime_context().get_node_id()  # the driver's node: an index elsewhere would be lost with its node
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    made = ray.remote(num_cpus=0)(Registry).options(name=name, namespace=NAMESPACE, scheduling_strategy=here)
    return name, made.remote(most)


class RayQueue:
    """A `TransferQueue` over Ray. A read result is a view of the store's memory and must not be written."""

    media: MediaStore | None = None

    def __init__(self, name: str, timeout_s: float, keeper: Any = None) -> None:
        self._name, self._timeout_s, self._actor = name, timeout_s, keeper

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._name, self._timeout_s)

    async def put(self, samples: Sequence[Sample]) -> Refs:
        refs, parcel = Refs(ref_of(s) for s in samples), parcel_of_samples(samples)
        deadline_s = time.monotonic() + self._timeout_s
        while isinstance(found := await self._put(parcel, refs), Full):
            if time.monotonic() > deadline_s:
                raise waited(len(refs), self._timeout_s, found, parcel.nbytes)
            await asyncio.sleep(RETRY_S)
        return refs

    def read(self, refs: Refs, columns: Sequence[str]) -> dict[str, Ragged]:
        request, before = Find(refs.ids, list(columns)), None
        while True:
            found, held = self._ask(request)
            arrays = self._fetch(held)
            if arrays is not None:
                return unpack(columns, found, dict(zip(found.blocks, arrays, strict=True)))
            if found.blocks == before:
                raise WorkerDied(LOST)
            before = found.blocks

    def write(self, refs: Refs, columns: Mapping[str, Ragged]) -> None:
        self._commit(parcel_of_columns(len(refs), columns), refs, new=False)

    def having(self, refs: Refs, column: str) -> Refs:
        return pick(refs, self._ask(Having(refs.ids, column))[0])

    def columns(self, refs: Refs) -> list[str]:
        return self._ask(Names(refs.ids))[0]

    def drop(self, refs: Refs) -> None:
        self._ask(Drop(refs.ids))

    def __len__(self) -> int:
        return self._ask(Size())[0]

    # -- the store -----------------------------------------------------------------------------------------------------

    def _store(self, packed: np.ndarray) -> Any:
        """Store an array and return its handle."""
        import ray

        return ray.put(packed)

    def _fetch(self, held: list[Any]) -> Sequence[np.ndarray] | None:
        """Return the arrays of these handles; None if some of them were freed since the index was read."""
        return [np.asarray(_Bytes(array)) for array in self._get(held, "find")]

    def _release(self, held: list[Any]) -> None:
        """Release freed handles. Do nothing for Ray, which frees an object with its last reference."""

    # -- the keeper ----------------------------------------------------------------------------------------------------

    async def _put(self, parcel: Parcel, refs: Refs) -> Full | None:
        """Put a parcel in a thread and return None, or `Full` if there is no space. The thread cannot be cancelled: if
        the caller is, wait for the thread and drop the rows."""

        def tried() -> Full | None:
            if (found := self._ask(Room(parcel.nbytes))[0]) is None:
                self._commit(parcel, refs, new=True)
            return found

        under_way = asyncio.ensure_future(asyncio.to_thread(tried))
        try:
            return await asyncio.shield(under_way)
        except asyncio.CancelledError:
            await asyncio.wait({under_way})
            if under_way.exception() is None and under_way.result() is None:
                self.drop(refs)
            raise

    def _commit(self, parcel: Parcel, refs: Refs, *, new: bool) -> None:
        try:
            packed = np.empty(parcel.nbytes, np.uint8)
            parcel.fill(packed)
            held = self._store(packed)
        except BaseException:
            if new:
                self._ask(Room(-parcel.nbytes))
            raise
        self._ask(Commit(refs.ids, 0, 0, parcel.columns, new, parcel.nbytes), [held])

    def _ask(self, request: IndexRequest | Room, held: Sequence[Any] = ()) -> tuple[Any, list[Any]]:
        import ray

        if self._actor is None:
            try:
                self._actor = ray.get_actor(self._name, NAMESPACE)
            except ValueError:  # no such actor
                raise WorkerDied(QUEUE_LOST) from None
        future = self._actor.answer.remote(encoded(request), list(held))
        answer, found, freed = self._get(future, type(request).__name__.lower())
        if freed:
            self._release(freed)
        if isinstance(answer, Rejected):
            raise answer.error()
        return answer, found

    def _get(self, awaited: Any, what: str) -> Any:
        import ray

        try:
            return ray.get(awaited, timeout=self._timeout_s)
        except ray.exceptions.GetTimeoutError:
            late = f"{what} was not answered in {self._timeout_s:g} s"
            raise TimeoutError(f"the actor that holds the queue is busy or stopped: {late}") from None
        except ray.exceptions.RayActorError:
            raise WorkerDied(QUEUE_LOST) from None
        except ray.exceptions.ObjectLostError as exc:
            raise WorkerDied(f"{LOST} ({type(exc).__name__})") from None


class _Bytes:
    """An array of the store without its read-only flag, about which torch would warn each time. The array is never
    written."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.__array_interface__ = array.__array_interface__ | {"data": (array.ctypes.data, False)}
