"""Weights from trainer to rollout as a transaction: begin(version, manifest), tensors, commit, verify.

Tensors go from the trainer's workers to the replicas. What passes through the driver is a `WeightSource`: where the
tensors are and what they must be.
"""

from __future__ import annotations

import asyncio
import importlib
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch import Tensor, uint8
from torch.nn import Module

from verl.rollout.base import PauseMode, RolloutEngine
from verl.weight_sync.canary import Probed, difference, fault

if TYPE_CHECKING:
    from verl.workers.model_workers import ModelWorkers


class SyncError(RuntimeError):
    """A publish did not deliver the weights that the trainer has: names, bytes or log-probs differ."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a manifest. `tied_to`: delivered under that name, not under its own. `checksum`: of the sender's
    bytes; None where this version does not check them."""

    shape: tuple[int, ...]
    dtype: str
    tied_to: str | None = None
    checksum: int | None = None


Parts = Mapping[str, Sequence[tuple[str, tuple[int, ...], int]]]
"""By the name of a tensor of the model what it is in a saved folder; see `saved_as`."""


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The weights of one version: which they are and where to get them. Holds no tensor; can be sent anywhere.

    transport: "module:function" that opens the address, address -> object with `tensors()` · manifest: by HF name, as
    the model in memory has them · names: those that its reader knows · parts: where these are of a saved folder, the
    tensors that are several there, whose bytes are runs of rows of the one that is delivered · passes: it lies nowhere
    as a whole; who reads it holds up its sender, and knows at the end alone whether it was whole.
    """

    version: int
    transport: str
    address: str
    manifest: Mapping[str, Entry]
    names: Literal["model", "saved"] = "model"
    parts: Parts = field(default_factory=dict)
    passes: bool = False

    @property
    def delivered(self) -> dict[str, Entry]:
        """Entries that are delivered under their own name."""
        return {name: entry for name, entry in self.manifest.items() if entry.tied_to is None}

    @property
    def read_as(self) -> set[str]:
        """Their names, as its reader tells of them."""
        return {part for name in self.delivered for part, _, _ in self.parts.get(name, [(name, (), 0)])}


@dataclass(frozen=True, slots=True)
class Sent:
    """The sender's side of a publish. probed: the trainer's side of the canary, None without one · seconds: gather (of
    what the engine delivers), stage (what is done with it)."""

    source: WeightSource
    probed: Probed | None
    num_bytes: int
    changed: bool
    alarms: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SyncReport:
    """seconds: of the trainer (gather, stage) and of the replica that took longest over it (transfer, load, pause), as
    far as they tell · whole_s: from the call until all have it, the canary too."""

    version: int
    num_tensors: int
    num_bytes: int
    verified_tensors: int
    canary_mean_abs: float
    changed: bool
    whole_s: float
    seconds: Mapping[str, float] = field(default_factory=dict)
    failed_replicas: dict[int, str] = field(default_factory=dict)
    alarms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncContext:
    """What every backend is built from. probes: token id arrays for the canary (empty: off) · tolerance: of the
    mean |dlogp| over likely tokens; None: what the precision explains · model: the folder that the policy came from."""

    probes: Sequence[np.ndarray]
    tolerance: float | None = None
    model: str | None = None


class Outlet(Protocol):
    """The trainer's end of a transport: where it keeps the tensors of a version for the replicas."""

    @property
    def transport(self) -> str: ...

    def stage(self, version: int, shapes: Mapping[str, Entry], tensors: Iterable[tuple[str, Tensor]]) -> str:
        """Hold these tensors in place of those of the version before; the address by which they are found. They come
        one at a time, in the order of `shapes`; one that is to be kept is copied before the next one comes, unless the
        engine's own may be read in place."""
        ...


@dataclass(frozen=True, slots=True)
class Readers:
    """Who reads a version as it is sent, and how long those who are behind are waited for. turn: of all publishes, this
    one."""

    turn: int
    count: int
    timeout_s: float


class Passed(NamedTuple):
    """A tensor on its way. checksum: crc32 of its bytes, or None."""

    name: str
    tensor: Tensor
    checksum: int | None


@runtime_checkable
class Streaming(Protocol):
    """An outlet that keeps no version: what it is given is read as it comes, by readers that are known before."""

    def announce(self, shapes: Mapping[str, Entry]) -> str:
        """Of all versions; before a reader looks for one -> where readers find it."""
        ...

    def source(self, version: int, turn: int, reader: int, manifest: Mapping[str, Entry], at: str) -> WeightSource:
        """What that reader is given. at: see `announce`, of which another process may know."""
        ...

    def stream(self, version: int, tensors: Iterable[Passed], readers: Readers) -> None:
        """All tensors of the shapes, in their order, one at a time; each may change once the next one is asked for."""
        ...

    def commit(self, turn: int) -> None:
        """Its sender stands by it: who has read it may draw by it."""
        ...

    def break_off(self, turn: int) -> None:
        """Nobody shall draw by it."""
        ...

    def lose(self, turn: int, reader: int) -> None:
        """Wait for that one no more. From any thread."""
        ...


class CheckpointEngine(Protocol):
    def outlet(self) -> Outlet:
        """A new outlet, for the workers that publish."""
        ...

    def publish(
        self,
        trainer: ModelWorkers,
        replicas: Sequence[RolloutEngine],
        *,
        version: int,
        exclusive: bool,
        on_inflight: Sequence[PauseMode],
        timeout_s: float,
    ) -> asyncio.Future[SyncReport]:
        """Read the trainer's weights NOW (in its order of work), then deliver, verify and report.

        exclusive: no optimizer step can run before the delivery is done, so nothing need be copied · on_inflight: what
        happens to running requests, for each replica."""
        ...


class TensorStream(Protocol):
    """What a transport opens."""

    @property
    def version(self) -> int: ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each is the reader's until it asks for the next one: what it keeps, it copies. Only the end says that all
        were of this version."""
        ...

    def segment(self) -> str | None:
        """Where this host's shared memory holds it (sync.engine=shm), for readers that are told a path; fetched where
        it is not there yet. None: it lies elsewhere."""
        return None

    def release(self, version: int) -> None:
        """All replicas have this version. What is in files stays: they are used again, or make room for later ones."""
        return


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors of a version, its reader's until it asks for the next bucket. path: of the segment of shared memory
    that tells of them · checksums: crc32 by name, None where it is not told."""

    path: str
    checksums: Mapping[str, int | None]
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]


@runtime_checkable
class InBuckets(Protocol):
    """A `TensorStream` of a source that passes."""

    def buckets(self) -> Generator[Bucket, None, None]:
        """To the end, which comes when the sender has said that all was there. Closed before, it is waited for no
        more."""
        ...


def parts_of(model: Module | None, shapes: Mapping[str, Entry]) -> Parts:
    """Of those tensors that have other names in a saved folder. model: without storage; None: of no known class."""
    from verl.checkpoint.hf import saved_as

    if model is None:
        return {}
    found = {name: saved_as(model, name, entry.shape) for name, entry in shapes.items()}
    return {name: parts for name, parts in found.items() if [part for part, _, _ in parts] != [name]}


def opened(source: WeightSource) -> TensorStream:
    module, _, name = source.transport.partition(":")
    stream: TensorStream = vars(importlib.import_module(module))[name](source.address)
    return stream


def checksum(tensor: Tensor) -> int:
    """crc32 of the bytes."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return zlib.crc32(flat.view(uint8).numpy().data) if flat.numel() else 0


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


async def check_canary(
    at: str, replica: RolloutEngine, probes: Sequence[np.ndarray], probed: Probed | None, tolerance: float | None
) -> float:
    """Ask a replica for the log-probs of the probes. Mean |dlogp| over likely tokens; SyncError if it does not compute
    with the trainer's weights. No probes: 0."""
    if probed is None:
        return 0.0
    got = np.concatenate(await asyncio.gather(*(replica.score(ids) for ids in probes)))  # one pass, where it batches
    if why := fault(probed, got, tolerance):
        fix = "serve this model by another one (rollout.engine=native or hf), or have the server load the same model"
        raise SyncError(f"{at}: {why}; the rollout engine does not run the trainer's weights: {fix}")
    return difference(probed, got)


class CheckedReader:
    """What a replica reads: every tensor is compared with the manifest as it is handed over. seconds: see `Timed`."""

    def __init__(self, source: WeightSource) -> None:
        self.source = source
        self.version = source.version
        self.delivered: set[str] = set()
        self.seconds: dict[str, float] = {}

    @property
    def passes(self) -> bool:
        return self.source.passes

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        at, expected, spent_s, began = f"version {self.version}", self.source.delivered, 0.0, time.perf_counter()
        stream = opened(self.source)
        if stream.version != self.version:
            raise SyncError(f"{at}: the sender holds version {stream.version} by now")
        for name, tensor in stream.tensors():
            entry = expected.get(name)
            if entry is None:
                raise SyncError(f"{at}: {name} is not in the manifest")
            if (tuple(tensor.shape), dtype_name(tensor)) != (entry.shape, entry.dtype):
                raise SyncError(
                    f"{at}: {name} is {list(tensor.shape)} {dtype_name(tensor)}, its manifest says "
                    f"{list(entry.shape)} {entry.dtype}"
                )
            if entry.checksum is not None and checksum(tensor) != entry.checksum:
                raise SyncError(
                    f"{at}: {name} changed between its manifest and its delivery; an optimizer step overtook the "
                    "publish"
                )
            self.delivered.add(name)
            spent_s += time.perf_counter() - began
            yield name, tensor
            began = time.perf_counter()
        self.seconds["transfer"] = spent_s + time.perf_counter() - began
        if missing := sorted(set(expected) - self.delivered):
            raise SyncError(f"{at}: the sender did not deliver {len(missing)} tensors, e.g. {missing[:3]}")
