"""Weights from trainer to rollout as a transaction: begin(version, manifest), tensors, commit, verify.

Tensors are sent from the trainer's workers to the replicas. Only a `WeightSource` passes through the driver: the
address of the tensors and their expected names, shapes, dtypes and checksums."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch import Tensor
from torch.nn import Module

from verl.nn.fp8 import SCALES
from verl.parameter_set import POLICY_SET, ParameterSet
from verl.rollout.base import PauseMode, RolloutEngine
from verl.weight_sync.canary import Probed, difference, fault
from verl.weight_sync.crc import PendingChecksum, host_checksums, read_checksums, start_checksum
from verl.weight_sync.crc import checksum as checksum  # other components import it from here


class SyncError(RuntimeError):
    """A publish did not deliver the weights that the trainer has: names, bytes or log-probs differ."""


IN_PROCESS = "verl.weight_sync.local:open_weights"
"""The transport inside one process. Its tensors stay as they are until the version is released, so that a reader need
not copy them before it uses them."""
Proof = int | tuple[int, ...] | None
"""A checksum of a tensor or those of its slices; None: it is not checked."""
OVERTAKEN = "changed between its manifest and its delivery; an optimizer step overtook the publish"
Spans = tuple[tuple[int, int], ...]
"""The position of a slice in a tensor: (start, stop) on every axis."""


@dataclass(frozen=True, slots=True)
class SliceEntry:
    """A slice of a tensor in a manifest."""

    rank: int
    """The rank that staged it."""
    spans: Spans
    checksum: int
    """crc32 of its bytes."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a manifest."""

    shape: tuple[int, ...]
    dtype: str
    tied_to: str | None = None
    """The name of the tensor that this one is tied to and is delivered as; None: it is delivered under its own name."""
    checksum: int | None = None
    """crc32 of the bytes that the sender staged; None where this version does not check them, or checks slices."""
    slices: tuple[SliceEntry, ...] = ()
    """The slices of a tensor that no rank had whole, in a version that checks them."""
    lasting: bool = False
    """The reader gets the trainer's own tensor, which never changes: it may keep it without a copy."""

    @property
    def proof(self) -> Proof:
        """The checksum of the tensor, or those of its slices. None: this version does not check it."""
        return self.checksum if not self.slices else tuple(one.checksum for one in self.slices)

    def describes(self, other: Entry) -> bool:
        """Return True if both are of tensors of one shape and dtype."""
        return self.shape == other.shape and self.dtype == other.dtype and self.tied_to == other.tied_to

    def difference(self, name: str, tensor: Tensor) -> str:
        """Return an error text if the bytes of a tensor are not those that were staged, else ""."""
        if self.checksum is not None and checksum(tensor) != self.checksum:
            return f"{name} {OVERTAKEN}"
        for one in self.slices:
            if checksum(slice_at(tensor, one.spans)) != one.checksum:
                place = ", ".join(f"{start}:{stop}" for start, stop in one.spans)
                return f"{name}[{place}], the slice of rank {one.rank}, {OVERTAKEN}"
        return ""


Parts = Mapping[str, Sequence[tuple[str, tuple[int, ...], int]]]
"""Name of a model tensor -> (name, shape, first row) of each tensor that it becomes in a saved folder
(`checkpoint.saved_form.SavedForm.parts`)."""


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The weights of one version: their manifest and the address at which they are read. It holds no tensor and can be
    pickled."""

    version: int
    transport: str
    """`module:function` that opens the address and returns a `TensorStream`."""
    address: str
    manifest: Mapping[str, Entry]
    """By Hugging Face name, as the model in memory has the tensors."""
    names: Literal["model", "saved"] = "model"
    """The names that the reader knows: those of the model in memory, or those of a saved folder."""
    parts: Parts = field(default_factory=dict)
    """The delivered tensors that are several tensors in a saved folder, each of them a run of rows of the delivered
    one."""
    passes: bool = False
    """The version is streamed and never stored whole: a reader delays the sender, and has no proof before the end that
    the version is complete."""
    parameters: ParameterSet = POLICY_SET
    """The parameter set of this version; a LoRA set names the full set under it (`ParameterSet.base`)."""
    identity: str = ""
    """The identity of the weights of a full set. "": unknown, as for a set that is read while it is sent."""

    @property
    def delivered(self) -> dict[str, Entry]:
        """Entries that are delivered under their own name."""
        return {name: entry for name, entry in self.manifest.items() if entry.tied_to is None}

    @property
    def read_as(self) -> set[str]:
        """The names of the delivered tensors as the reader reports them."""
        return {part for name in self.delivered for part, _, _ in self.parts.get(name, [(name, (), 0)])}


@runtime_checkable
class FolderOfTensors(Protocol):
    """A stream of tensors that are in a model folder."""

    def write_some(self, sent: WeightSource, folder: Path) -> None:
        """Write the tensors of the source's manifest as a new model folder, without others that are stored beside them.
        Raise SyncError for a tensor that is missing, or that is not what the manifest says."""
        ...


@dataclass(frozen=True, slots=True)
class Sent:
    """The sender's receipt of a version: the source that replicas read, and the results of the trainer's checks."""

    source: WeightSource
    probed: Probed | None
    """The trainer's side of the canary; None without one."""
    num_bytes: int
    changed: bool
    """Some byte differs from the version before."""
    alarms: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    """`gather`: time in which the engine delivers tensors; `stage`: time to store or send them."""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """The result of a publish, for metrics and alarms."""

    version: int
    num_tensors: int
    num_bytes: int
    verified_tensors: int
    """The number of tensors that were compared by checksum."""
    canary_mean_abs: float
    """The largest mean |dlogp| of a replica's canary, in nats."""
    changed: bool
    whole_s: float
    """From the call until every replica has the version and passed the canary."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """The time of the trainer (gather, stage) and of the slowest replica (transfer, load, pause), as far as they are
    reported."""
    failed_replicas: dict[int, str] = field(default_factory=dict)
    alarms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncContext:
    """The arguments with which every sync backend is built."""

    probes: Sequence[np.ndarray]
    """Token id arrays for the canary; empty: no canary."""
    tolerance: float | None = None
    """The largest mean |dlogp| over likely tokens, in nats; None: derived from the difference that rounding
    explains."""
    model: str | None = None
    """The folder that the policy was loaded from."""


class Outlet(Protocol):
    """The trainer's end of a transport: it stores the tensors of a version for the replicas."""

    @property
    def transport(self) -> str: ...

    def stage(self, version: int, shapes: Mapping[str, Entry], tensors: Iterable[tuple[str, Tensor]]) -> str:
        """Store these tensors in place of the previous version and return the address at which they are read. They are
        yielded one at a time, in the order of `shapes`. Copy a tensor that is stored before the next one is taken,
        unless the engine's own tensor may be read in place."""
        ...


@runtime_checkable
class InPlace(Protocol):
    """An outlet that hands the trainer's own tensors to replicas of its process. Nothing is sent, so nothing is
    converted either."""

    in_place: Literal[True]


@dataclass(frozen=True, slots=True)
class Readers:
    """The replicas that read a version while it is sent."""

    turn: int
    """The number of this publish."""
    count: int
    timeout_s: float
    """How long the sender waits for slow readers."""


class Passed(NamedTuple):
    """A tensor that is being sent, with the crc32 of its bytes; None where this version does not check it."""

    name: str
    tensor: Tensor
    checksum: int | None


@runtime_checkable
class StreamingOutlet(Protocol):
    """An outlet that stores no version: the tensors are read while they are sent, by a known number of readers."""

    def announce(self, shapes: Mapping[str, Entry]) -> str:
        """Allocate the memory of all versions, before the first reader opens it, and return its address."""
        ...

    def source(self, version: int, turn: int, reader: int, manifest: Mapping[str, Entry], at: str) -> WeightSource:
        """Return the source for one reader. at: the address from `announce`, which may have run in another process."""
        ...

    def stream(self, version: int, tensors: Iterable[Passed], readers: Readers) -> None:
        """Send all tensors, in the order of the announced shapes, one at a time. A tensor may change once the next one
        is taken."""
        ...

    def commit(self, turn: int) -> None:
        """Mark the version as valid: replicas that have read it may sample with it."""
        ...

    def break_off(self, turn: int) -> None:
        """Mark the version as invalid: no replica may sample with it."""
        ...

    def lose(self, turn: int, reader: int) -> None:
        """Stop waiting for this reader of that turn. Can be called from any thread."""
        ...


class PublishingWorkers(Protocol):
    """The methods of the trainer's workers that a sync backend calls (`ModelWorkers`). Calls are enqueued when they are
    made; `lose_reader` and `release_weights` run even during other calls."""

    def send_weights(self, version: int, probes: Sequence[np.ndarray], *, copy: bool) -> Future[Sent]: ...

    def weights_manifest(self) -> Future[tuple[dict[str, Entry], str]]: ...

    def stream_weights(self, version: int, probes: Sequence[np.ndarray], readers: Readers) -> Future[Sent]: ...

    def lose_reader(self, turn: int, reader: int) -> Future[None]: ...

    def release_weights(self, version: int) -> Future[None]: ...


class CheckpointEngine(Protocol):
    """A sync backend: it publishes the trainer's weights through an outlet, and the replicas read them from a
    stream."""

    def outlet(self) -> Outlet:
        """Return a new outlet, for the workers that publish."""
        ...

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
        """Enqueue the reading of the trainer's weights at once, then deliver them to the replicas, verify them, and
        return the report.

        exclusive: no optimizer step can run before the delivery ends, so no tensor needs to be copied · on_inflight:
        for each replica, the pause mode of its running requests."""
        ...


class TensorStream(Protocol):
    """The replica's end of a transport."""

    @property
    def version(self) -> int: ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors. Each is valid until the next one is taken: copy it to keep it. Only an iteration that ends
        without an error proves that all tensors were of this version."""
        ...

    def segment(self) -> str | None:
        """Return the path of the version in this host's shared memory, for readers that open a file; fetch the version
        first if this host does not have it. None: it is stored elsewhere."""
        return None

    def release(self, version: int) -> None:
        """Mark this version as one that all replicas have: its files may be reused, or deleted for later versions."""
        return


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors of a version, valid until the next bucket is taken."""

    path: str
    """The segment of shared memory that holds or describes them."""
    checksums: Mapping[str, int | None]
    """crc32 by name; None where the sender gives none."""
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]


@runtime_checkable
class InBuckets(Protocol):
    """A `TensorStream` that is read bucket by bucket."""

    def buckets(self) -> Generator[Bucket, None, None]:
        """Yield all buckets, and end when the sender has confirmed the version. The sender does not wait for a reader
        that closes the generator earlier."""
        ...


def saved_parts(model: Module | None, shapes: Mapping[str, Entry]) -> Parts:
    """Return name -> parts of the tensors that have other names in a saved folder. model: the model, without storage;
    None: its class is unknown, and the result is empty."""
    from verl.checkpoint.block_fp8 import scale_parts
    from verl.checkpoint.saved_form import SavedForm

    if model is None:
        return {}
    form = SavedForm(model)
    found = dict[str, Sequence[tuple[str, tuple[int, ...], int]]]()
    for name, entry in shapes.items():
        weight = shapes.get(of := name.removesuffix(SCALES))
        if of == name or weight is None:
            found[name] = form.parts(name, entry.shape)
        elif parts := scale_parts(weight.shape, form.parts(of, weight.shape)):
            found[name] = parts
    return {name: parts for name, parts in found.items() if [part for part, _, _ in parts] != [name]}


def open_stream(source: WeightSource) -> TensorStream:
    """Open the address of a source with its transport."""
    module, _, name = source.transport.partition(":")
    stream: TensorStream = vars(importlib.import_module(module))[name](source.address)
    return stream


def slice_at(tensor: Tensor, spans: Spans) -> Tensor:
    """Return the slice of a tensor at that position, in place."""
    return tensor[tuple(slice(*span) for span in spans)]


def dtype_name(tensor: Tensor) -> str:
    """Return the dtype's name without the `torch.` prefix."""
    return str(tensor.dtype).removeprefix("torch.")


def with_whole_checksums(sent: WeightSource, stream: TensorStream) -> dict[str, Entry]:
    """Return the manifest of a version for readers that compare whole tensors: an entry with checksums of slices gets
    the checksum of the whole tensor in the stream, after its slices were compared. Raise SyncError if one differs."""
    manifest = dict(sent.manifest)
    if any(entry.slices for entry in manifest.values()):
        for name, tensor in stream.tensors():
            if name in manifest and manifest[name].slices:
                if why := manifest[name].difference(name, tensor):
                    raise SyncError(f"version {sent.version}: {why}")
                manifest[name] = replace(manifest[name], checksum=checksum(tensor), slices=())
    return manifest


async def check_canary(
    at: str,
    replica: RolloutEngine,
    probes: Sequence[np.ndarray],
    probed: Probed | None,
    tolerance: float | None,
    parameters: str = POLICY_SET.id,
) -> float:
    """Score the probes on a replica with a parameter set and compare them with the trainer's log-probs. Return the mean
    |dlogp| over likely tokens in nats, 0 without probes. Raise SyncError if the replica does not compute with the
    trainer's weights."""
    if probed is None:
        return 0.0
    scores = (replica.score(ids, parameters=parameters) for ids in probes)
    got = np.concatenate(await asyncio.gather(*scores))  # one pass, where it batches
    if why := fault(probed, got, tolerance):
        fix = "serve this model by another one (rollout.engine=native or hf), or have the server load the same model"
        raise SyncError(f"{at}: {why}; the rollout engine does not run the trainer's weights: {fix}")
    return difference(probed, got)


class CheckedReader:
    """The stream that a replica reads: every tensor is compared with the manifest when it is handed over. The checksum
    of a tensor on a device is computed there and compared after the last tensor, with one read of the device; those of
    tensors that stay as they are (`stays`) are computed after the last one, in one call. `seconds` is as in
    `WeightReader`."""

    def __init__(self, source: WeightSource) -> None:
        self.source = source
        self.version = source.version
        self.delivered: set[str] = set()
        self.seconds: dict[str, float] = {}

    @property
    def passes(self) -> bool:
        return self.source.passes

    @property
    def parameters(self) -> ParameterSet:
        return self.source.parameters

    @property
    def identity(self) -> str:
        return self.source.identity

    @property
    def stays(self) -> bool:
        return self.source.transport == IN_PROCESS

    @property
    def lasting(self) -> dict[str, bool]:
        return {name: entry.lasting for name, entry in self.source.delivered.items()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        at, expected, spent_s, began = f"version {self.version}", self.source.delivered, 0.0, time.perf_counter()
        on_device, staying = dict[str, int | PendingChecksum](), dict[str, Tensor]()
        stream, stays = open_stream(self.source), self.stays
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
            if entry.checksum is not None and tensor.device.type != "cpu":
                on_device[name] = start_checksum(tensor)
            elif entry.checksum is not None and stays:
                staying[name] = tensor
            elif why := entry.difference(name, tensor):
                raise SyncError(f"{at}: {why}")
            self.delivered.add(name)
            spent_s += time.perf_counter() - began
            yield name, tensor
            began = time.perf_counter()
        sums = read_checksums(on_device) | host_checksums(staying)
        if changed := [name for name, found in sums.items() if found != expected[name].checksum]:
            raise SyncError(f"{at}: {changed[0]} {OVERTAKEN}")
        self.seconds["transfer"] = spent_s + time.perf_counter() - began
        if missing := sorted(set(expected) - self.delivered):
            raise SyncError(f"{at}: the sender did not deliver {len(missing)} tensors, e.g. {missing[:3]}")
