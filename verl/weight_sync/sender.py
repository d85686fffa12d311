"""The trainer's side of a publish: manifest, checksums, probe log-probs, and the alarm for weights that do not move."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from verl.batch import pack
from verl.errors import Refused
from verl.model_engine.base import Publishes, WeightPart
from verl.nn.fp8 import in_blocks
from verl.parameter_set import POLICY_SET, ParameterSet
from verl.types import Sample, Segment
from verl.weight_sync.base import (
    Entry,
    InPlace,
    Outlet,
    Passed,
    Proof,
    Readers,
    Sent,
    StreamingOutlet,
    WeightSource,
    open_stream,
)
from verl.weight_sync.canary import Probed, no_model
from verl.weight_sync.meeting import by_all
from verl.weight_sync.record import VersionRecord, entries_of_part, sampled_values, weights_identity
from verl.weight_sync.slices import SlicesOutlet
from verl.weight_sync.together import Stage, staging
from verl.weight_sync.wire_format import wire_tensors
from verl.wire import AS_HELD, FP8, FP8_INPUTS, WireFormat

CHECKED_SHARE = 16  # after the first versions every 16th tensor gets a checksum, different ones in each version
MEASURED_SHARE = 16  # after the first versions every 16th version measures the canary's rounding again
MOVED = 0.25  # nats; a mean change of likely log-probs since the last measurement that requires another one


class HasMasters(Protocol):
    """Weights under a LoRA set."""

    @property
    def masters(self) -> Mapping[str, Tensor]:
        """The tensors by their own names; in a sharded engine the parts of this rank."""
        ...


@runtime_checkable
class Frozen(HasMasters, Protocol):
    """Weights under a LoRA set that no step writes but for those that are trained whole."""

    frozen: Literal[True]


@runtime_checkable
class HasFrozen(Protocol):
    """A weight source some of whose tensors never change."""

    def never_changes(self, name: str) -> bool:
        """Return True for such a tensor, which a replica in this process may keep without a copy."""
        ...


class WeightSender:
    """The sender of one parameter set, used by the role that publishes it."""

    def __init__(
        self,
        outlet: Outlet,
        *,
        verify_first: int = 3,
        dtype: str = "float32",
        parameters: ParameterSet = POLICY_SET,
        base: HasMasters | None = None,
        with_base: bool = False,
    ) -> None:
        """verify_first: the number of versions with a checksum for every tensor; later ones have checksums for a sample
        · dtype: that of rollout.dtype · base: the full set under a LoRA set · with_base: the full set is among the
        weights that are sent."""
        assert parameters.whole == (base is None), "a LoRA set is published on top of a full set"
        self._outlet, self._dtype, self._format = outlet, dtype, AS_HELD
        self._parameters, self._base, self._with_base = parameters, base, with_base
        self._verify_first = verify_first
        self._sent = 0
        self._last: dict[str, tuple[Proof, Tensor]] = {}  # last known checksum, some values
        self._moved_from: tuple[int, dict[str, Tensor]] = (-1, {})  # version and masters when a byte last changed
        self._first: int | None = None  # the first version that was sent
        self._measured: tuple[np.ndarray, np.ndarray] | None = None  # log-probs, and those of the own pass minus them
        self._parts: list[WeightPart] | None = None  # names, shapes and dtypes that the engine delivers, no tensors
        self._together: Stage | None = None  # how all ranks stage their parts
        self._lasts: Callable[[str], bool] = lambda name: False  # tensors that replicas of this process may keep
        self._decided = False  # by the first version
        self._announced: WireFormat | None = None  # the format that a stream is laid out for
        self._source: WeightSource | None = None  # the version that was staged last
        self._shapes: tuple[WireFormat, dict[str, Entry]] | None = None  # of the last format
        self._base_state, self._base_identity = list[tuple[int, int]](), ""  # of frozen weights under a LoRA set

    def for_set(self, outlet: Outlet, parameters: ParameterSet, base: Publishes) -> WeightSender:
        """Return a sender of a LoRA set on top of this sender's full set. outlet: an outlet of its own. Raise Refused
        for an outlet of buckets."""
        if isinstance(outlet, StreamingOutlet):
            fix = "leave bucket_mb out of the options of its sync.engine"
            raise Refused(f"{parameters.id!r}: a LoRA set is published whole, not in buckets; {fix}")
        first, dtype = self._verify_first, self._dtype
        return WeightSender(outlet, verify_first=first, dtype=dtype, parameters=parameters, base=base)

    def for_factors(self, parameters: ParameterSet, base: HasMasters, *, with_base: bool) -> WeightSender:
        """Return a sender of the policy's LoRA factors through the same outlet."""
        first, dtype = self._verify_first, self._dtype
        return type(self)(
            self._outlet, verify_first=first, dtype=dtype, parameters=parameters, base=base, with_base=with_base
        )

    def set_format(self, form: WireFormat) -> None:
        """Send all later versions in this format. Raise Refused if a stream is laid out for another one."""
        if self._announced not in (None, form):
            fix = "leave sync.engine_options.bucket_mb out, or set one rollout.dtype for all replicas"
            raise Refused(f"the buckets of weights are for replicas that read {self._announced}, not {form}: {fix}")
        sent = self._parameters.replaced  # factors are not quantised
        blocks = self._parameters.whole or self._with_base or any(in_blocks(name, (1, 1)) for name in sent)
        self._format = form if blocks else replace(form, fp8=False)
        self._dtype = FP8_INPUTS if form.fp8_inputs else self._dtype

    def manifest(self, engine: Publishes) -> dict[str, Entry]:
        """Return the manifest that every version of a stream has, without checksums."""
        shapes = self._shapes_of(engine, self._format)
        return shapes | {name: replace(shapes[owner], tied_to=owner) for name, owner in engine.tied.items()}

    def announce(self, engine: Publishes) -> str:
        """Prepare the stream, on the rank that sends, and return the address for its readers."""
        assert isinstance(self._outlet, StreamingOutlet), "this outlet keeps whole versions"
        self._announced = self._format
        return self._outlet.announce(self._shapes_of(engine, self._format))

    def stream(self, engine: Publishes, version: int, probes: Sequence[np.ndarray], readers: Readers) -> Sent:
        """Send the engine's weights to readers that read them during the call, and return the receipt. Then mark the
        version as valid, or as invalid if an error is raised."""
        outlet = self._outlet
        assert isinstance(outlet, StreamingOutlet), "this outlet keeps whole versions"

        def stage(tensors: Iterator[tuple[str, Tensor]], record: VersionRecord) -> str:
            outlet.stream(version, (Passed(n, t, record.checksum_of(n)) for n, t in tensors), readers)
            return ""

        try:
            sent = self._sent_by(stage, engine, version, probes, self._format, copy=False)
        except BaseException:
            outlet.break_off(readers.turn)
            raise
        self._source = None  # a stream is stored nowhere
        outlet.commit(readers.turn)
        return sent

    def lose(self, turn: int, reader: int) -> None:
        """Stop waiting for this reader of the stream. Can be called from any thread."""
        if isinstance(self._outlet, StreamingOutlet):
            self._outlet.lose(turn, reader)

    def send(
        self, engine: Publishes, version: int, probes: Sequence[np.ndarray], *, copy: bool, first: bool = True
    ) -> Sent | None:
        """Read the engine's present weights, stage them, and return the receipt on the first rank. All ranks call this.
        copy: the weights may change before all replicas have them. Raise FloatingPointError for weights of a diverged
        model, which is not a fault of the delivery."""
        given = isinstance(self._outlet, InPlace) and not copy and not self._format.fp8
        form = AS_HELD if given else self._format
        if isinstance(self._outlet, InPlace) and isinstance(engine, HasFrozen):
            self._lasts = engine.never_changes
        if not self._decided:
            self._together, self._decided = staging(self._outlet), True
        if self._together is not None and not form.fp8:  # slices of ranks would cut the blocks of FP8
            began, shapes = time.perf_counter(), self._shapes_of(engine, form)
            address, record = self._together(engine, version, shapes, form, self._checks)
            seconds = {"gather": 0.0, "stage": time.perf_counter() - began}
            if first:
                return self._sent_of(engine, version, probes, form, record, address, seconds)
            self._probed(engine, version, probes)
            self._sent += 1
            return None
        if not first:
            self.attend(engine, version, probes)
            return None

        def stage(tensors: Iterator[tuple[str, Tensor]], record: VersionRecord) -> str:
            return self._outlet.stage(version, self._shapes_of(engine, form), tensors)

        return self._sent_by(stage, engine, version, probes, form, copy=copy)

    def _sent_by(
        self,
        stage: Callable[[Iterator[tuple[str, Tensor]], VersionRecord], str],
        engine: Publishes,
        version: int,
        probes: Sequence[np.ndarray],
        form: WireFormat,
        *,
        copy: bool,
    ) -> Sent:
        """Send one version from this rank. stage: stores the tensors, which it records, and returns their address."""
        record, began, gathered = VersionRecord(), time.perf_counter(), iter(engine.weights())

        def staged() -> str:
            try:
                return stage(self._tensors(gathered, form, record, copy=copy), record)
            except Exception:  # of any outlet: the other ranks take part in the gathering of the rest
                _take_part(gathered)
                raise

        address = by_all(f"version {version}", "send it", staged)
        record.finish()
        seconds = {"gather": record.gathered_s, "stage": time.perf_counter() - began - record.gathered_s}
        return self._sent_of(engine, version, probes, form, record, address, seconds)

    def _sent_of(
        self,
        engine: Publishes,
        version: int,
        probes: Sequence[np.ndarray],
        form: WireFormat,
        record: VersionRecord,
        address: str,
        seconds: Mapping[str, float],
    ) -> Sent:
        """Check a staged version on the trainer's side and return its receipt."""
        manifest = record.manifest
        shapes = self._shapes_of(engine, form)
        same = manifest.keys() == shapes.keys() and all(e.describes(shapes[n]) for n, e in manifest.items())
        assert same, "the engine delivers other tensors"
        manifest |= {name: replace(manifest[name], lasting=True) for name in filter(self._lasts, shapes)}
        for name, owner in engine.tied.items():
            manifest[name] = replace(manifest[owner], checksum=None, slices=(), tied_to=owner)
        probe = self._probed(engine, version, probes)
        self._refuse_diverged(version, record, probe)
        masters = record.sampled(engine.masters)
        changed, alarms = self._compare(version, record, masters)
        self._sent += 1
        parameters, identity = self._parameters, ""
        if self._base is None:
            identity = weights_identity(masters)
        else:
            parameters = replace(parameters, base=self._identity_of(self._base))
            identity = parameters.base or "" if self._with_base else ""
        source = WeightSource(
            version, self._outlet.transport, address, manifest, parameters=parameters, identity=identity
        )
        self._source = source
        return Sent(source, probe, record.num_bytes, changed, alarms, seconds)

    def _identity_of(self, base: HasMasters) -> str:
        """Return the identity of the weights under a LoRA set. That of frozen ones is computed again if one was
        written, and in every `CHECKED_SHARE`-th version."""
        masters = base.masters
        if not isinstance(base, Frozen):
            return weights_identity(sampled_values(masters))
        state = [(tensor.data_ptr(), tensor._version) for tensor in masters.values()]
        if state != self._base_state or self._sent % CHECKED_SHARE == 0:
            self._base_state, self._base_identity = state, weights_identity(sampled_values(masters))
        return self._base_identity

    def _tensors(
        self, gathered: Iterator[tuple[str, Tensor]], form: WireFormat, record: VersionRecord, *, copy: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the engine's tensors in the format, and record each."""
        began, stays = time.perf_counter(), isinstance(self._outlet, InPlace)
        for number, (name, tensor) in enumerate(gathered):
            record.gathered_s += time.perf_counter() - began
            for sent, made in wire_tensors(form, name, tensor):
                own = made.data_ptr() == tensor.data_ptr()
                kept = made.clone() if copy and own and not self._lasts(name) else made
                record.note(sent, kept, check=self._checks(number), stays=stays)
                if own:
                    record.places[tensor.data_ptr()] = sent
                yield sent, kept
            began = time.perf_counter()
        record.gathered_s += time.perf_counter() - began

    def _checks(self, number: int) -> bool:
        """Return True if this tensor gets a checksum: all do in the first versions, each `CHECKED_SHARE`-th later."""
        return self._sent < self._verify_first or number % CHECKED_SHARE == self._sent % CHECKED_SHARE

    def release(self, version: int) -> None:
        """Release what was staged last: all replicas have this version, or were given up. This runs in the processes
        that staged it, since the driver may not see that memory or folder."""
        if isinstance(self._outlet, SlicesOutlet) and self._outlet.per_rank:
            self._outlet.release_slices(version)
        if self._source is not None:
            open_stream(self._source).release(version)

    def attend(self, engine: Publishes, version: int, probes: Sequence[np.ndarray]) -> None:
        """Take part, on a rank that is not the first, in the collective work of a publish: gathering weights, and the
        forward pass of the canary."""
        self._shapes_of(engine, self._format)
        by_all(f"version {version}", "deliver its parts", lambda: _take_part(engine.weights()))
        self._probed(engine, version, probes)

    def _shapes_of(self, engine: Publishes, form: WireFormat) -> dict[str, Entry]:
        """Return {name: manifest entry without checksum} of all published tensors, as converted to the wire format."""
        if self._parts is None:
            self._parts = [replace(part, mine=None) for part in engine.weight_parts()]
        if form.fp8 and not any(in_blocks(part.name, part.shape) for part in self._parts):
            why = "no tensor of this model is called a projection (NAME_proj), which are the ones that are quantised"
            raise Refused(f"rollout.dtype=fp8: {why}; set rollout.dtype=bfloat16")
        if self._shapes is None or self._shapes[0] != form:
            found = (entries_of_part(part, form) for part in self._parts)
            self._shapes = form, {name: entry for entries in found for name, entry in entries.items()}
        return self._shapes[1]

    def _probed(self, engine: Publishes, version: int, probes: Sequence[np.ndarray]) -> Probed | None:
        """Return the trainer's side of the canary. The model's own pass is expensive, and the difference that rounding
        explains changes slowly. So that pass runs for the first versions, then for every `MEASURED_SHARE`-th, and when
        the log-probs have moved by more than `MOVED`. All ranks decide alike, by the version and by earlier
        measurements; virtual ranks share this object."""
        self._first = version if self._first is None else self._first
        number, measured = version - self._first, self._measured
        if measured is not None and number >= self._verify_first and number % MEASURED_SHARE:
            logprobs, off_by = measured
            probe = probed(engine, probes, self._dtype, off_by)
            assert probe is not None
            if float((np.abs(probe.logprobs - logprobs) * probe.likely).sum()) <= MOVED:
                return probe
        if (probe := probed(engine, probes, self._dtype)) is not None:
            self._measured = (probe.logprobs, probe.own - probe.logprobs)
        return probe

    def _refuse_diverged(self, version: int, record: VersionRecord, probe: Probed | None) -> None:
        """Raise FloatingPointError for weights that are not finite or compute nothing."""
        bad = record.not_finite
        why = f"{len(bad)} of {len(record.values)} weight tensors hold NaN or infinity, e.g. {bad[0]}" if bad else ""
        if not why and probe is not None and (why := no_model(probe)):
            why += f" (largest weight {record.largest:.3g})"
        if why:
            known = "they came so from the folder or checkpoint that was loaded"
            fix = "training diverged: go on from an earlier checkpoint with a lower optim.lr" if self._sent else known
            raise FloatingPointError(f"version {version}: the trainer's weights are no working model: {why}; {fix}")

    def _compare(self, version: int, record: VersionRecord, moving: dict[str, Tensor]) -> tuple[bool, tuple[str, ...]]:
        """Compare a version with the one before and return (True if some byte changed, alarms). moving: some values of
        the masters. If no byte changed, but the masters moved by more than rounding since one did, that is an alarm."""
        last, self._last = self._last, {}
        changed = last.keys() != record.values.keys()
        for name, values in record.values.items():
            known = record.manifest[name].proof
            if name in last:
                before, seen = last[name]
                changed |= known is not None and before is not None and known != before
                changed = changed or not torch.equal(values, seen)
                known = before if known is None else known
            self._last[name] = (known, values)
        if changed:
            self._moved_from = (version, moving)
            return True, ()
        since, before_moving = self._moved_from
        rounding = max((torch.finfo(dtype).eps for dtype in record.floats), default=0.0)
        moved = [n for n, now in moving.items() if n in before_moving and _moved(before_moving[n], now, rounding)]
        if not moved:
            return False, ()
        return False, (
            f"weights unchanged since version {since}, though {len(moved)} trained tensors moved, e.g. {moved[0]}",
        )


def _take_part(gathered: Iterator[tuple[str, Tensor]]) -> None:
    """Take part in the gathering of the tensors, which another rank sends."""
    for _ in gathered:
        pass


def _moved(before: Tensor, now: Tensor, rounding: float) -> bool:
    return before.numel() > 0 and bool((now - before).abs().max() > rounding * before.abs().max())


def probed(
    engine: Publishes, probes: Sequence[np.ndarray], dtype: str, off_by: np.ndarray | None = None
) -> Probed | None:
    """Compute the trainer's side of the canary: log-probs of ids[1:] of each probe, at temperature 1; None without
    probes. dtype: that of rollout.dtype, or `FP8_INPUTS` · off_by: the measured difference of the model's own
    pass; None: run that pass."""
    if not probes:
        return None
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
    found = engine.infer(batch, ("logprobs", "entropy"))
    rows = {int(s): slice(*batch.row_start[row : row + 2]) for row, s in enumerate(batch.sequence)}
    logprobs, entropy = (
        np.concatenate([found[name].float().numpy()[rows[i]] for i in range(len(probes))])
        for name in ("logprobs", "entropy")
    )
    ids = np.concatenate([ids[1:] for ids in probes])
    computed = "bfloat16" if dtype in (FP8, FP8_INPUTS) else dtype
    own = np.concatenate(engine.own_logprobs(probes, dtype)) if off_by is None else logprobs + off_by
    return Probed(ids, logprobs, entropy, own, torch.finfo(vars(torch)[computed]).eps)
