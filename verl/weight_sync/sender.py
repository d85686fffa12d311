"""The trainer's side of a publish: manifest, checksums, probe log-probs, and the alarm for weights that do not move."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from verl.batch import pack
from verl.model_engine.base import ModelEngine
from verl.types import Sample, Segment
from verl.weight_sync.base import (
    Entry,
    Outlet,
    Passed,
    Readers,
    Sent,
    StreamingOutlet,
    WeightSource,
    checksum,
    dtype_name,
    open_stream,
)
from verl.weight_sync.canary import Probed, no_model

CHECKED_SHARE = 16  # after the first versions every 16th tensor is checked, others each time
MEASURED_SHARE = 16  # after the first versions the canary's rounding is measured anew with every 16th
MOVED = 0.25  # nats of a likely token, since it was measured
SAMPLED_VALUES = 256  # per tensor, evenly spread: enough to separate "did not move" from "was not delivered"


class WeightSender:
    """The sender of the role that publishes."""

    def __init__(self, outlet: Outlet, *, verify_first: int = 3, dtype: str = "float32") -> None:
        """verify_first: so many versions have a checksum for every tensor, later ones for a sample · dtype: the
        precision that the rollout computes in."""
        self._outlet, self._dtype = outlet, dtype
        self._verify_first = verify_first
        self._sent = 0
        self._last: dict[str, tuple[int | None, Tensor]] = {}  # last known checksum, some values
        self._moved_from: tuple[int, dict[str, Tensor]] = (-1, {})  # version and masters when a byte last changed
        self._first: int | None = None  # version
        self._measured: tuple[np.ndarray, np.ndarray] | None = None  # log-probs, and what the own pass was off by
        self._shapes: dict[str, Entry] | None = None  # of the delivered tensors; found by the first call
        self._source: WeightSource | None = None  # the latest

    def manifest(self, engine: ModelEngine) -> dict[str, Entry]:
        """Return the manifest of every version, without checksums, for readers of a stream. All ranks must call it."""
        shapes = self._shapes_of(engine)
        return shapes | {name: replace(shapes[owner], tied_to=owner) for name, owner in engine.tied.items()}

    def announce(self, engine: ModelEngine) -> str:
        """Prepare the stream, on the rank that sends, and return the address for its readers."""
        assert isinstance(self._outlet, StreamingOutlet), "this outlet keeps whole versions"
        return self._outlet.announce(self._shapes_of(engine))

    def stream(self, engine: ModelEngine, version: int, probes: Sequence[np.ndarray], readers: Readers) -> Sent:
        """As `send`, to readers that take the tensors while they are sent; a commit or a break-off follows the last
        tensor."""
        outlet = self._outlet
        assert isinstance(outlet, StreamingOutlet), "this outlet keeps whole versions"

        def stage(passing: _Passing) -> str:
            outlet.stream(version, passing.checked(engine), readers)
            return ""

        try:
            sent = self._sent_by(stage, engine, version, probes, copy=False)
        except BaseException:
            outlet.break_off(readers.turn)
            raise
        self._source = None  # a stream is stored nowhere
        outlet.commit(readers.turn)
        return sent

    def lose(self, turn: int, reader: int) -> None:
        """Stop waiting for that reader of the stream. Can be called from any thread."""
        if isinstance(self._outlet, StreamingOutlet):
            self._outlet.lose(turn, reader)

    def send(self, engine: ModelEngine, version: int, probes: Sequence[np.ndarray], *, copy: bool) -> Sent:
        """Read the engine's weights as they are now, one tensor at a time, and stage them. copy: they may change before
        all replicas have them. Raises FloatingPointError for weights of a diverged model: that is no fault of the
        delivery."""

        def stage(passing: _Passing) -> str:
            return self._outlet.stage(version, self._shapes_of(engine), passing.tensors(engine))

        return self._sent_by(stage, engine, version, probes, copy=copy)

    def _sent_by(
        self,
        stage: Callable[[_Passing], str],
        engine: ModelEngine,
        version: int,
        probes: Sequence[np.ndarray],
        *,
        copy: bool,
    ) -> Sent:
        """Send one version. stage: stores the tensors and returns their address."""
        shapes = self._shapes_of(engine)
        passing = _Passing(self._sent % CHECKED_SHARE if self._sent >= self._verify_first else None, copy)
        began = time.perf_counter()
        address = stage(passing)
        seconds = {"gather": passing.gathered_s, "stage": time.perf_counter() - began - passing.gathered_s}
        manifest = passing.manifest
        assert {n: replace(e, checksum=None) for n, e in manifest.items()} == shapes, (
            "the engine delivers other tensors"
        )
        for name, owner in engine.tied.items():
            manifest[name] = replace(manifest[owner], checksum=None, tied_to=owner)
        probe = self._probed(engine, version, probes)
        self._refuse_diverged(version, passing, probe)
        changed, alarms = self._compare(version, passing, engine.masters)
        self._sent += 1
        self._source = source = WeightSource(version, self._outlet.transport, address, manifest)
        return Sent(source, probe, passing.num_bytes, changed, alarms, seconds)

    def release(self, version: int) -> None:
        """All replicas have this version, or were given up. This runs where the version was staged, since the driver
        may not see that place."""
        if self._source is not None:
            open_stream(self._source).release(version)

    def attend(self, engine: ModelEngine, version: int, probes: Sequence[np.ndarray]) -> None:
        """Take part in the collective work on the other ranks: gathering weights, and a forward pass."""
        self._shapes_of(engine)
        for _ in engine.weights():
            pass
        self._probed(engine, version, probes)

    def _shapes_of(self, engine: ModelEngine) -> dict[str, Entry]:
        """Return the names, shapes and dtypes that the engine delivers. They are found once, by a pass that keeps
        nothing, since an outlet must know the size of a version."""
        if self._shapes is None:
            self._shapes = {name: entry_of(tensor) for name, tensor in engine.weights()}
        return self._shapes

    def _probed(self, engine: ModelEngine, version: int, probes: Sequence[np.ndarray]) -> Probed | None:
        """Return the trainer's side of the canary. The model's own pass is the expensive part, and what rounding
        explains changes slowly: it runs for the first versions, then every `MEASURED_SHARE`-th, and where the model
        moved. All ranks decide alike, by the version and by earlier measurements; virtual ranks share this object."""
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

    def _refuse_diverged(self, version: int, passed: _Passing, probe: Probed | None) -> None:
        """Raise FloatingPointError for weights that are not finite or compute nothing."""
        bad = passed.not_finite
        why = f"{len(bad)} of {len(passed.values)} weight tensors hold NaN or infinity, e.g. {bad[0]}" if bad else ""
        if not why and probe is not None and (why := no_model(probe)):
            why += f" (largest weight {passed.largest:.3g})"
        if why:
            known = "they came so from the folder or checkpoint that was loaded"
            fix = "training diverged: go on from an earlier checkpoint with a lower optim.lr" if self._sent else known
            raise FloatingPointError(f"version {version}: the trainer's weights are no working model: {why}; {fix}")

    def _compare(self, version: int, passed: _Passing, masters: Mapping[str, Tensor]) -> tuple[bool, tuple[str, ...]]:
        """Return (some byte changed, alarms). Alarm: the masters moved by more than rounding since a byte last
        changed."""
        last, self._last = self._last, {}
        changed = last.keys() != passed.values.keys()
        for name, values in passed.values.items():
            known = passed.manifest[name].checksum
            if name in last:
                before, seen = last[name]
                changed |= known is not None and before is not None and known != before
                changed |= not torch.equal(values, seen)
                known = before if known is None else known
            self._last[name] = (known, values)
        moving = {name: _some_values(tensor) for name, tensor in masters.items()}
        if changed:
            self._moved_from = (version, moving)
            return True, ()
        since, before_moving = self._moved_from
        rounding = max((torch.finfo(dtype).eps for dtype in passed.floats), default=0.0)
        moved = [n for n, now in moving.items() if n in before_moving and _moved(before_moving[n], now, rounding)]
        if not moved:
            return False, ()
        return False, (
            f"weights unchanged since version {since}, though {len(moved)} trained tensors moved, e.g. {moved[0]}",
        )


class _Passing:
    """The weights of one version while they are staged, and what is recorded of each; no tensor is kept."""

    def __init__(self, checked: int | None, copy: bool) -> None:
        """checked: None: every tensor has a checksum; else each `CHECKED_SHARE`-th, beginning with this one."""
        self._checked, self._copy = checked, copy
        self.manifest: dict[str, Entry] = {}
        self.values: dict[str, Tensor] = {}  # some of each
        self.floats: set[torch.dtype] = set()
        self.not_finite: list[str] = []
        self.largest = 0.0
        self.num_bytes = 0
        self.gathered_s = 0.0

    def checked(self, engine: ModelEngine) -> Iterator[Passed]:
        """Yield the engine's tensors with their checksums."""
        for name, tensor in self.tensors(engine):
            yield Passed(name, tensor, self.manifest[name].checksum)

    def tensors(self, engine: ModelEngine) -> Iterator[tuple[str, Tensor]]:
        """Yield the engine's tensors, recording the manifest and the statistics of each."""
        began = time.perf_counter()
        for i, (name, tensor) in enumerate(engine.weights()):
            self.gathered_s += time.perf_counter() - began
            kept = tensor.detach().clone() if self._copy else tensor.detach()
            check = self._checked is None or i % CHECKED_SHARE == self._checked
            self.manifest[name] = replace(entry_of(kept), checksum=checksum(kept) if check else None)
            self.values[name] = _some_values(kept)
            self.num_bytes += kept.numel() * kept.element_size()
            if kept.is_floating_point() and kept.numel():
                self.floats.add(kept.dtype)
                low, high = (float(end) for end in kept.aminmax())  # NaN if there is one
                self.largest = max(self.largest, -low, high)
                if not (math.isfinite(low) and math.isfinite(high)):
                    self.not_finite.append(name)
            yield name, kept
            began = time.perf_counter()
        self.gathered_s += time.perf_counter() - began


def entry_of(tensor: Tensor) -> Entry:
    return Entry(tuple(tensor.shape), dtype_name(tensor))


def _some_values(tensor: Tensor) -> Tensor:
    """Return a copy of up to `SAMPLED_VALUES` values."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLED_VALUES)][:SAMPLED_VALUES].double().cpu().clone()


def _moved(before: Tensor, now: Tensor, rounding: float) -> bool:
    return before.numel() > 0 and bool((now - before).abs().max() > rounding * before.abs().max())


def probed(
    engine: ModelEngine, probes: Sequence[np.ndarray], dtype: str, off_by: np.ndarray | None = None
) -> Probed | None:
    """Return the trainer's side of the canary: log-probs of ids[1:] of each probe, at temperature 1. dtype: the
    precision that the rollout computes in · off_by: the measured difference of the model's own pass; None: run that
    pass."""
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
    own = np.concatenate(engine.own_logprobs(probes, dtype)) if off_by is None else logprobs + off_by
    return Probed(ids, logprobs, entropy, own, torch.finfo(getattr(torch, dtype)).eps)
