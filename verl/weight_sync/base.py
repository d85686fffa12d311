"""Weights from trainer to rollout as a transaction: begin(version, manifest), tensors, commit, verify (pitfalls 4, 22, 43)."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from verl.batch import pack
from verl.model_engine.base import ModelEngine
from verl.rollout.base import PauseMode, RolloutEngine
from verl.types import Sample, Segment
from verl.workers.group import WorkerGroup


class SyncError(RuntimeError):
    """A publish did not deliver the weights that the trainer has: names, bytes or log-probs differ."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a manifest."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    checksum: int
    tied_to: str | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The policy of one version: manifest, tensors (live or copied) and the trainer's log-probs of the probes.

    `masters`: some values of every trained tensor, by the trainer's own names, to tell 'did not move' from 'was not
    delivered'.
    """

    version: int
    manifest: dict[str, Entry]
    held: dict[str, Tensor]
    probes: tuple[np.ndarray, ...] = ()
    probe_logprobs: tuple[np.ndarray, ...] = ()
    masters: dict[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        return self.held.items()


@dataclass(frozen=True, slots=True)
class SyncReport:
    version: int
    num_tensors: int
    num_bytes: int
    verified_tensors: int
    canary_max_abs: float
    changed: bool
    seconds: dict[str, float] = field(default_factory=dict)
    failed_replicas: dict[int, str] = field(default_factory=dict)
    alarms: tuple[str, ...] = ()


class CheckpointEngine(Protocol):
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
        """Snapshot the trainer NOW (in its order of work), then deliver, verify and report. fenced: no optimizer step
        can run before the delivery is done, so nothing need be copied."""
        ...


def checksum(tensor: Tensor) -> int:
    """crc32 of the bytes."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0


def take_snapshot(engine: ModelEngine, version: int, probes: Sequence[np.ndarray], *, copy: bool) -> Snapshot:
    """Read the engine's weights into a snapshot, with a checksum per tensor and log-probs of the probe sequences."""
    manifest, held = {}, {}
    for name, tensor in engine.weights():
        kept = tensor.detach().clone() if copy else tensor.detach()
        held[name] = kept
        manifest[name] = Entry(tuple(kept.shape), kept.dtype, checksum(kept))
    logprobs = _probe(engine, probes)
    masters = {name: _some_values(tensor) for name, tensor in engine.state()["model"].items()}
    return Snapshot(version, manifest, held, tuple(probes), logprobs, masters)


def _some_values(tensor: Tensor, at_most: int = 256) -> Tensor:
    """A copy of up to `at_most` values, evenly spread."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // at_most)][:at_most].double().cpu().clone()


def _probe(engine: ModelEngine, probes: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Trainer's log-probs [t-1] of ids[1:] of each probe at temperature 1, in one pass."""
    if not probes:
        return ()
    samples = []
    for i, ids in enumerate(probes):
        segments = (
            Segment(ids=ids[:1], source="prompt"),
            Segment(ids=ids[1:], source="sampled", logprobs=np.zeros(len(ids) - 1, np.float32), version=0),
        )
        samples.append(
            Sample(sample_id=str(i), trajectory_id=str(i), group_id=str(i), purpose="eval", segments=segments)
        )
    batch = pack(samples, share_prefix=False)
    found = engine.infer(batch, ("logprobs",))["logprobs"].float().numpy()
    rows = {
        int(sample): found[batch.row_start[row] : batch.row_start[row + 1]] for row, sample in enumerate(batch.sequence)
    }
    return tuple(rows[i] for i in range(len(probes)))


class CheckedSource:
    """What a replica reads: every tensor is checked against the manifest as it is handed over."""

    def __init__(self, snapshot: Snapshot, names_to_check: set[str]) -> None:
        self.version = snapshot.version
        self._snapshot = snapshot
        self._check = names_to_check
        self.delivered: set[str] = set()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._snapshot.tensors():
            entry = self._snapshot.manifest.get(name)
            if entry is None:
                raise SyncError(f"version {self.version}: {name} is not in the manifest")
            if (tuple(tensor.shape), tensor.dtype) != (entry.shape, entry.dtype):
                raise SyncError(
                    f"version {self.version}: {name} is {list(tensor.shape)} {tensor.dtype}, its manifest says "
                    f"{list(entry.shape)} {entry.dtype}"
                )
            if name in self._check and checksum(tensor) != entry.checksum:
                raise SyncError(
                    f"version {self.version}: {name} changed between its manifest and its delivery; an optimizer step "
                    "overtook the publish"
                )
            self.delivered.add(name)
            yield name, tensor
