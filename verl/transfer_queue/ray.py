"""TransferQueue of many nodes over Ray: an object of its store per put or write, the index in a named actor.

The columns of a call are one packed array, which a reader on the same node sees where it lies and others fetch once.
An object lives as long as the process that wrote it. Where the store is full, Ray spills to disk: nothing waits here.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from verl.batch import Ragged
from verl.transfer_queue.index import (
    Answer,
    Asked,
    Commit,
    Drop,
    Find,
    Found,
    Having,
    Index,
    Names,
    Refused,
    Size,
    encoded,
    pick,
)
from verl.transfer_queue.options import Remote
from verl.transfer_queue.packing import Parcel, parcel_of_columns, parcel_of_samples, unpack
from verl.types import Refs, Sample, ref_of

NAMESPACE = "verl"


def build(options: Remote) -> RayQueue:
    """A new queue in the cluster that this process is connected to, or connects to now (RAY_ADDRESS; else here). It
    ends with this process."""
    import ray

    if not ray.is_initialized():
        ray.init(namespace=NAMESPACE)
    name = f"queue-{uuid.uuid4().hex}"
    keeper = ray.remote(num_cpus=0)(_Keeper).options(name=name, namespace=NAMESPACE).remote()
    return RayQueue(name, options.timeout_s, keeper)


class _Keeper:
    """The actor: the index, and the objects that it says hold something."""

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}
        self._index = Index(free=self._objects.pop)
        self._made = 0

    def commit(self, message: bytes, held: list[Any]) -> Answer:
        """held: the object, in a list: by itself it would be fetched to here."""
        asked = msgspec.msgpack.decode(message, type=Commit)
        self._made += 1
        asked.block, self._objects[self._made] = self._made, held[0]
        answer = self._index.answer(asked)
        if not self._index.holds(asked.block):  # refused, or without a row
            del self._objects[asked.block]
        return answer

    def ask(self, message: bytes) -> tuple[Answer, dict[int, Any]]:
        answer = self._index.answer(msgspec.msgpack.decode(message, type=Asked))
        return answer, {b: self._objects[b] for b in answer.blocks} if isinstance(answer, Found) else {}


class RayQueue:
    """See `TransferQueue`. What was read is a read-only view of the store's memory."""

    def __init__(self, name: str, timeout_s: float, keeper: Any = None) -> None:
        self._name, self._timeout_s, self._actor = name, timeout_s, keeper

    def __reduce__(self) -> tuple[Any, ...]:
        return RayQueue, (self._name, self._timeout_s)

    @property
    def _keeper(self) -> Any:
        if self._actor is None:
            import ray

            self._actor = ray.get_actor(self._name, NAMESPACE)
        return self._actor

    async def put(self, samples: Sequence[Sample]) -> Refs:
        refs = Refs(ref_of(s) for s in samples)
        sent = self._send(parcel_of_samples(samples), refs, new=True)
        _checked(await asyncio.to_thread(self._get, sent, "commit"))
        return refs

    def read(self, refs: Refs, columns: Sequence[str]) -> dict[str, Ragged]:
        found, objects = self._ask(Find(refs.ids, list(columns)))
        assert isinstance(found, Found)
        arrays = self._get(list(objects.values()), "find")
        return unpack(columns, found, {b: np.asarray(_Bytes(a)) for b, a in zip(objects, arrays, strict=True)})

    def write(self, refs: Refs, columns: Mapping[str, Ragged]) -> None:
        sent = self._send(parcel_of_columns(len(refs), columns), refs, new=False)
        _checked(self._get(sent, "commit"))

    def having(self, refs: Refs, column: str) -> Refs:
        return pick(refs, self._ask(Having(refs.ids, column))[0])

    def columns(self, refs: Refs) -> list[str]:
        return self._ask(Names(refs.ids))[0]

    def drop(self, refs: Refs) -> None:
        self._ask(Drop(refs.ids))

    def __len__(self) -> int:
        return self._ask(Size())[0]

    def _send(self, parcel: Parcel, refs: Refs, *, new: bool) -> Any:
        """Into the store of this node. -> the keeper's answer, a future."""
        import ray

        packed = np.empty(parcel.nbytes, np.uint8)
        parcel.fill(packed)
        return self._keeper.commit.remote(encoded(Commit(refs.ids, 0, 0, parcel.columns, new)), [ray.put(packed)])

    def _ask(self, asked: Asked) -> tuple[Any, dict[int, Any]]:
        answer, objects = self._get(self._keeper.ask.remote(encoded(asked)), type(asked).__name__.lower())
        return _checked(answer), objects

    def _get(self, awaited: Any, what: str) -> Any:
        import ray

        try:
            return ray.get(awaited, timeout=self._timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(self._late(what)) from None
        except ray.exceptions.RayActorError:
            raise ConnectionError("the process that holds the queue is gone") from None
        except ray.exceptions.ObjectLostError as exc:
            lost = "the process that wrote these rows or columns is gone, and with it what it wrote"
            raise ConnectionError(f"{lost} ({type(exc).__name__})") from None

    def _late(self, what: str) -> str:
        return f"the actor that holds the queue is busy or stopped: {what} was not answered in {self._timeout_s:g} s"


class _Bytes:
    """An array of the store with a word less: torch warns of each that is not writable, and none is written to."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.__array_interface__ = array.__array_interface__ | {"data": (array.ctypes.data, False)}


def _checked(answer: Any) -> Any:
    if isinstance(answer, Refused):
        raise ValueError(answer.reason)
    return answer
