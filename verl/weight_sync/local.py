"""The checkpoint engine inside one process: no copy when rollout is fenced during the update, one copy otherwise."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch

from verl.rollout.base import PauseMode, RolloutEngine
from verl.weight_sync.base import CheckedSource, Entry, Snapshot, SyncError, SyncReport
from verl.workers.group import WorkerGroup


class LocalCheckpointEngine:
    """See `CheckpointEngine`.

    probes: token id arrays for the canary (empty: off) · tolerance: largest |dlogp| of the canary · verify_first: all
    checksums for so many versions, every 16th tensor after.
    """

    def __init__(self, *, probes: Sequence[np.ndarray], tolerance: float, verify_first: int = 3) -> None:
        self._probes = tuple(probes)
        self._tolerance = tolerance
        self._verify_first = verify_first
        self._last: dict[str, Entry] = {}
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
        started = time.perf_counter()
        snapshot = trainer.submit("snapshot", version, self._probes, not fenced, split="first")
        return asyncio.ensure_future(self._deliver(snapshot, replicas, on_inflight, timeout_s, started))

    async def _deliver(
        self, pending: Future[Snapshot], replicas: Sequence[RolloutEngine], on_inflight: PauseMode, timeout_s: float, started: float
    ) -> SyncReport:
        snapshot = await asyncio.wait_for(asyncio.wrap_future(pending), timeout_s)
        gathered = time.perf_counter()
        names = list(snapshot.manifest)
        checked = set(names if self._published < self._verify_first else names[self._published % 16 :: 16])
        results = await asyncio.gather(
            *(self._to_replica(r, snapshot, checked, on_inflight, timeout_s) for r in replicas), return_exceptions=True
        )
        failed = {i: f"{type(e).__name__}: {e}" for i, e in enumerate(results) if isinstance(e, BaseException)}
        if len(failed) == len(replicas):
            first = next(e for e in results if isinstance(e, BaseException))
            raise first
        canary = max((c for c in results if not isinstance(c, BaseException)), default=0.0)
        changed, alarms = self._compare(snapshot)
        self._last = snapshot.manifest
        self._published += 1
        return SyncReport(
            version=snapshot.version, num_tensors=len(names),
            num_bytes=sum(t.numel() * t.element_size() for t in snapshot.held.values()), verified_tensors=len(checked),
            canary_max_abs=canary, changed=changed, failed_replicas=failed, alarms=alarms,
            seconds={"gather": gathered - started, "load": time.perf_counter() - gathered},
        )  # fmt: skip

    async def _to_replica(
        self, replica: RolloutEngine, snapshot: Snapshot, checked: set[str], on_inflight: PauseMode, timeout_s: float
    ) -> float:
        """Deliver to one replica and verify it; the canary's largest |dlogp|."""
        source = CheckedSource(snapshot, checked)
        live = await asyncio.wait_for(replica.load_weights(source, on_inflight=on_inflight), timeout_s)
        if live != snapshot.version:
            raise SyncError(f"the rollout engine says version {live} is live after version {snapshot.version} was sent")
        if source.delivered != set(snapshot.manifest):
            missing = sorted(set(snapshot.manifest) - source.delivered)
            raise SyncError(f"version {snapshot.version}: {len(missing)} tensors were never read, e.g. {missing[:3]}")
        worst = 0.0
        for ids, expected in zip(snapshot.probes, snapshot.probe_logprobs, strict=True):
            got = await asyncio.wait_for(replica.score(ids), timeout_s)
            worst = max(worst, float(np.abs(got - expected).max()))
        if not worst <= self._tolerance:
            raise SyncError(
                f"version {snapshot.version}: rollout and trainer log-probs of the canary differ by {worst:.3g} "
                f"(sync.canary_tolerance={self._tolerance:g}); the rollout engine does not run the trainer's weights"
            )
        return worst

    def _compare(self, snapshot: Snapshot) -> tuple[bool, tuple[str, ...]]:
        """(some byte changed, alarms). Alarm: masters moved by more than rounding, yet no byte changed."""
        if not self._last:
            return True, ()
        changed = any(e.checksum != self._last[n].checksum for n, e in snapshot.manifest.items() if n in self._last)
        if changed:
            return True, ()
        moved = [
            n for n, e in snapshot.manifest.items()
            if n in self._last and e.sampled is not None and not torch.equal(e.sampled, self._last[n].sampled)  # type: ignore[arg-type]
        ]  # fmt: skip
        alarms = (f"weights unchanged since version {snapshot.version - 1}, though {len(moved)} masters moved",) if moved else ()
        return False, alarms
