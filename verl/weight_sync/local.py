"""Delivery of weights to replicas that this process can call; each delivery is a transaction of its own. Inside one
process nothing is copied if no optimizer step can run during the delivery; otherwise each tensor is copied once."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Literal, TypeVar

import numpy as np
from torch import Tensor

from verl.parameter_set import POLICY_SET, ParameterSet
from verl.rollout.base import PauseMode, RolloutEngine
from verl.weight_sync.base import (
    IN_PROCESS,
    CheckedReader,
    Entry,
    Outlet,
    PublishingWorkers,
    Readers,
    Sent,
    StreamingOutlet,
    SyncContext,
    SyncError,
    SyncReport,
    check_canary,
)

T = TypeVar("T")
Delivered = tuple[float, dict[str, float]]  # the canary's mean |dlogp|, and where the time went

READ_SHARE = 0.5  # the share of the timeout that a sender waits for slow readers; the rest is for the other readers
DROP_S = 60.0  # for a replica to end the requests of a LoRA set and drop it
RELEASE_S = 60.0  # for the trainer's workers to release a version


class LocalOutlet:
    """The `Outlet` of one process: the tensors are not moved, and their address is a handle of this process."""

    transport = IN_PROCESS
    in_place: Literal[True] = True

    def __init__(self) -> None:
        self.version = -1
        self._tensors: Mapping[str, Tensor] = {}
        self._handle = f"local-{id(self)}"
        _OUTLETS[self._handle] = self

    def stage(self, version: int, shapes: Mapping[str, Entry], tensors: Iterable[tuple[str, Tensor]]) -> str:
        self._tensors = {}  # frees their memory before the next tensors are made
        self.version, self._tensors = version, dict(tensors)
        return self._handle

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._tensors.items()

    def segment(self) -> None:
        return

    def release(self, version: int) -> None:
        """Drop the tensors of this version, which all replicas have; they may be copies."""
        if self.version == version:
            self._tensors = {}


_OUTLETS: weakref.WeakValueDictionary[str, LocalOutlet] = weakref.WeakValueDictionary()
"""Handles of this process; an outlet exists as long as the role that owns it."""


def open_weights(address: str) -> LocalOutlet:
    if address not in _OUTLETS:
        raise SyncError(
            f"{address} is not in this process: the local transport serves replicas inside the trainer's process"
        )
    return _OUTLETS[address]


class LocalCheckpointEngine:
    """The `CheckpointEngine` of every transport: it delivers a version to the replicas and verifies it there."""

    def __init__(
        self,
        *,
        probes: Sequence[np.ndarray],
        tolerance: float | None = None,
        outlet: Outlet | None = None,
        copies: bool = False,
    ) -> None:
        """probes, tolerance: as in `SyncContext` · outlet: the outlet of another transport; None: a `LocalOutlet` ·
        copies: True if the outlet copies the tensors that it stages."""
        assert all(len(ids) > 1 for ids in probes), "a probe needs two tokens: the first one has no log-prob"
        self._probes = tuple(probes)
        self._tolerance = tolerance
        self._outlet, self._copies = outlet, copies
        self._turn = 0  # the number of publishes
        self._manifest: Future[tuple[dict[str, Entry], str]] | None = None  # of a streamed version, and its address

    def outlet(self) -> Outlet:
        return self._outlet or LocalOutlet()

    def publish(
        self,
        trainer: PublishingWorkers,
        replicas: Sequence[RolloutEngine],
        *,
        version: int,
        exclusive: bool,
        on_inflight: Sequence[PauseMode],
        timeout_s: float,
    ) -> asyncio.Future[SyncReport]:
        """Deliver one version to all replicas within `timeout_s`. A replica that fails or is late does not delay the
        others."""
        assert replicas, "nobody to publish to"
        deadline_s, began_s = asyncio.get_running_loop().time() + timeout_s, time.perf_counter()
        if isinstance(self._outlet, StreamingOutlet):
            if self._manifest is None or _failed(self._manifest):
                self._manifest = trainer.weights_manifest()
            self._turn += 1
            sent = trainer.stream_weights(
                version, self._probes, Readers(self._turn, len(replicas), READ_SHARE * timeout_s)
            )
        else:
            sent = trainer.send_weights(version, self._probes, copy=not exclusive and not self._copies)
        return asyncio.ensure_future(self._deliver(trainer, sent, version, replicas, on_inflight, deadline_s, began_s))

    async def _deliver(
        self,
        trainer: PublishingWorkers,
        pending: Future[Sent],
        version: int,
        replicas: Sequence[RolloutEngine],
        on_inflight: Sequence[PauseMode],
        deadline_s: float,
        began_s: float,
    ) -> SyncReport:
        late = f"version {version}: the trainer's weights were not ready"
        sending, turn = asyncio.wrap_future(pending), self._turn
        readers = await self._readers(sending, version, turn, len(replicas), deadline_s, late)
        under_way = [
            asyncio.ensure_future(self._to_replica(*one, sending, deadline_s))
            for one in zip(replicas, readers, on_inflight, strict=True)
        ]
        if isinstance(self._outlet, StreamingOutlet):
            for number, delivery in enumerate(under_way):
                delivery.add_done_callback(partial(_release_trainer, trainer, turn, number))
        try:
            sent = await _before_deadline(deadline_s, asyncio.shield(sending), late)
        except BaseException:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
            raise
        results = await asyncio.gather(*under_way, return_exceptions=True)
        whole_s = time.perf_counter() - began_s
        alarms = sent.alarms + await self._released(trainer, version)
        errors = {i: e for i, e in enumerate(results) if isinstance(e, BaseException)}
        failed = {i: f"{type(e).__name__}: {e}" for i, e in errors.items()}
        if len(errors) == len(replicas):
            message = "; ".join(f"replica {i}: {text}" for i, text in failed.items())
            raise SyncError(f"version {version} is live nowhere: {message}") from errors[0]
        took = [one for one in results if not isinstance(one, BaseException)]
        entries, parts = sent.source.delivered.values(), [seconds for _, seconds in took]
        return SyncReport(
            version=sent.source.version,
            num_tensors=len(entries),
            num_bytes=sent.num_bytes,
            verified_tensors=sum(e.proof is not None for e in entries),
            canary_mean_abs=max(canary for canary, _ in took),
            changed=sent.changed,
            failed_replicas=failed,
            alarms=alarms,
            whole_s=whole_s,
            seconds={**sent.seconds, **{name: max(of.get(name, 0.0) for of in parts) for of in parts for name in of}},
        )

    async def _readers(
        self, sending: asyncio.Future[Sent], version: int, turn: int, replicas: int, deadline_s: float, late: str
    ) -> list[CheckedReader]:
        """Return a reader for each replica: at once for a stream, which is read while the trainer sends it, else after
        the version is staged."""
        if not isinstance(self._outlet, StreamingOutlet):
            source = (await _before_deadline(deadline_s, asyncio.shield(sending), late)).source
            return [CheckedReader(source) for _ in range(replicas)]
        assert self._manifest is not None
        manifest, at = await _before_deadline(deadline_s, asyncio.shield(asyncio.wrap_future(self._manifest)), late)
        return [CheckedReader(self._outlet.source(version, turn, i, manifest, at)) for i in range(replicas)]

    async def _released(self, trainer: PublishingWorkers, version: int) -> tuple[str, ...]:
        """Release the version in the process that staged it. Return an alarm if that fails: it costs memory, but the
        version is valid."""
        by_s, found = (
            asyncio.get_running_loop().time() + RELEASE_S,
            asyncio.wrap_future(trainer.release_weights(version)),
        )
        (error,) = await asyncio.gather(_before_deadline(by_s, found, "nobody answered"), return_exceptions=True)
        return () if error is None else (f"what was staged of version {version} was not released: {error}",)

    async def _to_replica(
        self,
        replica: RolloutEngine,
        reader: CheckedReader,
        mode: PauseMode,
        sending: asyncio.Future[Sent],
        deadline_s: float,
    ) -> Delivered:
        """Deliver the version to one replica, verify it, and return (mean |dlogp| of the canary, seconds of each part).
        A replica that fails is given up at once, not after the slowest one has its weights: its answers until then
        would be trained on."""
        at, source = f"version {reader.version}", reader.source
        try:
            live = await _before_deadline(
                deadline_s, replica.load_weights(reader, on_inflight=mode), f"{at} was not loaded"
            )
            if live != source.version:
                raise SyncError(f"the rollout engine says version {live} is live after {at} was sent")
            if missing := sorted(set(source.delivered) - reader.delivered):
                raise SyncError(f"{at}: {len(missing)} tensors were never read, e.g. {missing[:3]}")
            late = f"{at} was loaded, but its canary was not scored"
            sent = await _before_deadline(deadline_s, asyncio.shield(sending), late)
            name = source.parameters.id
            canary = check_canary(at, replica, self._probes, sent.probed, self._tolerance, name)
            found = await _before_deadline(deadline_s, canary, late)
        except Exception as e:
            await _given_up(replica, source.parameters, e)
            raise
        replica.mark_verified()
        return found, reader.seconds


async def _given_up(replica: RolloutEngine, parameters: ParameterSet, why: Exception) -> None:
    """Drop a LoRA set that was not delivered; requests of other sets continue. A replica that cannot drop it is given
    up, and so is one that failed an update of its full set."""
    if parameters.id != POLICY_SET.id:
        with contextlib.suppress(Exception):  # an engine that has failed in some other way
            async with asyncio.timeout(DROP_S):
                return await replica.drop_set(parameters.id)
    if replica.replaceable:
        replica.lose(why)


def _release_trainer(trainer: PublishingWorkers, turn: int, number: int, ended: asyncio.Task[Delivered]) -> None:
    """Stop the trainer's wait for a replica after its delivery failed: it takes no more tensors, and the trainer and
    the other replicas would wait for it."""
    if ended.cancelled() or ended.exception() is not None:
        trainer.lose_reader(turn, number)


def _failed(future: Future[T]) -> bool:
    """Return True if the call has ended without a result."""
    return future.cancelled() or (future.done() and future.exception() is not None)


def engine_of(outlet: Outlet, context: SyncContext, end: Callable[..., object], *of: object) -> LocalCheckpointEngine:
    """Build the engine of another transport's outlet, which copies the tensors that it stages. `end(*of)` is called
    when the engine is garbage collected."""
    engine = LocalCheckpointEngine(probes=context.probes, tolerance=context.tolerance, outlet=outlet, copies=True)
    weakref.finalize(engine, end, *of)
    return engine


def build(options: object, context: SyncContext) -> LocalCheckpointEngine:
    return LocalCheckpointEngine(probes=context.probes, tolerance=context.tolerance)


async def _before_deadline(deadline_s: float, awaitable: Awaitable[T], late: str) -> T:
    """Await until `deadline_s` of the event loop's clock. Raise SyncError with the text `late` after it."""
    try:
        async with asyncio.timeout_at(deadline_s) as scope:
            return await awaitable
    except TimeoutError:
        if not scope.expired():
            raise
        raise SyncError(f"{late} in time") from None  # the deadline is the first cause
