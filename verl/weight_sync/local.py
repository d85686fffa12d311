"""The checkpoint engine inside one process: no copy when rollout is fenced during the update, one copy otherwise."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from verl.rollout.base import PauseMode, RolloutEngine
from verl.weight_sync.base import CheckedSource, Entry, Snapshot, SyncError, SyncReport
from verl.workers.group import WorkerGroup

T = TypeVar("T")


class LocalCheckpointEngine:
    """See `CheckpointEngine`.

    probes: token id arrays for the canary (empty: off) · tolerance: largest |dlogp| of the canary · verify_first: all
    checksums for so many versions, every 16th tensor after.
    """

    def __init__(self, *, probes: Sequence[np.ndarray], tolerance: float, verify_first: int = 3) -> None:
        assert all(len(ids) > 1 for ids in probes), "a probe needs two tokens: the first one has no log-prob"
        self._probes = tuple(probes)
        self._tolerance = tolerance
        self._verify_first = verify_first
        self._last: dict[str, Entry] = {}
        self._moved_from: tuple[int, dict[str, Tensor]] = (-1, {})  # version and masters when a byte last changed
        self._published = 0

    def publish(
        self,
        trainer: WorkerGroup,
        replicas: Sequence[RolloutEngine],
        *,
        version: int,
        fenced: bool,
        on_inflight: PauseMode,
        timeout_s: float,
    ) -> asyncio.Future[SyncReport]:
        """See `CheckpointEngine`. `timeout_s` is for all of it; a replica that fails or is late does not hold the others."""
        assert replicas, "nobody to publish to"
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        snapshot = trainer.submit("snapshot", version, self._probes, not fenced, split="first")
        return asyncio.ensure_future(self._deliver(snapshot, version, replicas, on_inflight, deadline_s))

    async def _deliver(
        self,
        pending: Future[Snapshot],
        version: int,
        replicas: Sequence[RolloutEngine],
        on_inflight: PauseMode,
        deadline_s: float,
    ) -> SyncReport:
        started = time.perf_counter()
        snapshot = await _by(
            deadline_s, asyncio.wrap_future(pending), f"version {version}: the trainer's weights were not ready"
        )
        gathered = time.perf_counter()
        names = list(snapshot.manifest)
        checked = set(names if self._published < self._verify_first else names[self._published % 16 :: 16])
        results = await asyncio.gather(
            *(self._to_replica(r, snapshot, checked, on_inflight, deadline_s) for r in replicas), return_exceptions=True
        )
        errors = {i: e for i, e in enumerate(results) if isinstance(e, BaseException)}
        failed = {i: f"{type(e).__name__}: {e}" for i, e in errors.items()}
        if len(errors) == len(replicas):
            told = "; ".join(f"replica {i}: {text}" for i, text in failed.items())
            raise SyncError(f"version {version} is live nowhere: {told}") from errors[0]
        changed, alarms = self._compare(snapshot)
        self._published += 1
        return SyncReport(
            version=snapshot.version,
            num_tensors=len(names),
            num_bytes=sum(t.numel() * t.element_size() for t in snapshot.held.values()),
            verified_tensors=len(checked),
            canary_max_abs=max(c for c in results if not isinstance(c, BaseException)),
            changed=changed,
            failed_replicas=failed,
            alarms=alarms,
            seconds={"gather": gathered - started, "load": time.perf_counter() - gathered},
        )

    async def _to_replica(
        self, replica: RolloutEngine, snapshot: Snapshot, checked: set[str], on_inflight: PauseMode, deadline_s: float
    ) -> float:
        """Deliver to one replica and verify it; the canary's largest |dlogp|."""
        at = f"version {snapshot.version}"
        source = CheckedSource(snapshot, checked)
        live = await _by(deadline_s, replica.load_weights(source, on_inflight=on_inflight), f"{at} was not loaded")
        if live != snapshot.version:
            raise SyncError(f"the rollout engine says version {live} is live after {at} was sent")
        if missing := sorted(set(snapshot.manifest) - source.delivered):
            raise SyncError(f"{at}: {len(missing)} tensors were never read, e.g. {missing[:3]}")
        worst = 0.0
        for ids, expected in zip(snapshot.probes, snapshot.probe_logprobs, strict=True):
            got = await _by(deadline_s, replica.score(ids), f"{at} was loaded, but its canary was not scored")
            difference = float(np.abs(got - expected).max())
            if not difference <= self._tolerance:  # NaN, too
                raise SyncError(
                    f"{at}: rollout and trainer log-probs of the canary differ by {difference:.3g} "
                    f"(sync.canary_tolerance={self._tolerance:g}); the rollout engine does not run the trainer's weights"
                )
            worst = max(worst, difference)
        return worst

    def _compare(self, snapshot: Snapshot) -> tuple[bool, tuple[str, ...]]:
        """(some byte changed, alarms). Alarm: masters moved by more than rounding since a byte last changed."""
        last, self._last = self._last, snapshot.manifest
        if last.keys() != snapshot.manifest.keys() or any(
            e.checksum != last[n].checksum for n, e in snapshot.manifest.items()
        ):
            self._moved_from = (snapshot.version, snapshot.masters)
            return True, ()
        since, before = self._moved_from
        rounding = max(
            (torch.finfo(e.dtype).eps for e in snapshot.manifest.values() if e.dtype.is_floating_point), default=0.0
        )
        moved = [n for n, now in snapshot.masters.items() if n in before and _moved(before[n], now, rounding)]
        if not moved:
            return False, ()
        return False, (
            f"weights unchanged since version {since}, though {len(moved)} trained tensors moved, e.g. {moved[0]}",
        )


def _moved(before: Tensor, now: Tensor, rounding: float) -> bool:
    return before.numel() > 0 and bool((now - before).abs().max() > rounding * before.abs().max())


async def _by(deadline_s: float, awaitable: Awaitable[T], late: str) -> T:
    """Await until `deadline_s` of the loop's clock; SyncError with `late` after it."""
    try:
        async with asyncio.timeout_at(deadline_s) as scope:
            return await awaitable
    except TimeoutError as e:
        if not scope.expired():
            raise
        raise SyncError(f"{late} in time") from e
