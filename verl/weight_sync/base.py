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
    dtype: str
    checksum: int
    tied_to: str | None = None
    sampled: Tensor | None = None  # up to 256 values of the master, to tell 'did not move' from 'was not delivered'


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The policy of one version: manifest, tensors (live or copied) and the trainer's log-probs of the probes."""

    version: int
    manifest: dict[str, Entry]
    held: dict[str, Tensor]
    probes: tuple[np.ndarray, ...] = ()
    probe_logprobs: tuple[np.ndarray, ...] = ()

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
        stride = max(1, kept.numel() // 256)
        sampled = kept.reshape(-1)[::stride][:256].float().cpu().clone()
        manifest[name] = Entry(tuple(kept.shape), str(kept.dtype), checksum(kept), sampled=sampled)
    logprobs = tuple(_probe(engine, ids) for ids in probes)
    return Snapshot(version, manifest, held, tuple(probes), logprobs)


def _probe(engine: ModelEngine, ids: np.ndarray) -> np.ndarray:
    """Trainer's log-probs [t-1] of ids[1:] at temperature 1."""
    segments = (
        Segment(ids=ids[:1], source="prompt"),
        Segment(ids=ids[1:], source="sampled", logprobs=np.zeros(len(ids) - 1, np.float32), version=0),
    )
    sample = Sample(sample_id="probe", trajectory_id="probe", group_id="probe", purpose="eval", segments=segments)
    return engine.infer(pack([sample]), ("logprobs",))["logprobs"].float().numpy()


class CheckedSource:
    """What a replica reads: every tensor is checked against the manifest as it is handed over."""

    def __init__(self, snapshot: Snapshot, names_to_check: set[str]) -> None:
        self.version = snapshot.version
        self._snapshot = snapshot
        self._check = names_to_check
        self.delivered: set[str] = set()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._snapshot.tensors():
            if name in self._check and checksum(tensor) != self._snapshot.manifest[name].checksum:
                raise SyncError(
                    f"version {self.version}: {name} changed between its manifest and its delivery; an optimizer step "
                    "overtook the publish"
                )
            self.delivered.add(name)
            yield name, tensor
