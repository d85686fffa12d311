"""The trainer's side of a publish: manifest, checksums, probe log-probs, and the alarm for weights that do not move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from verl.batch import pack
from verl.model_engine.base import ModelEngine
from verl.types import Sample, Segment
from verl.weight_sync.base import Entry, Outlet, Sent, WeightSource, checksum, dtype_name
from verl.weight_sync.canary import Probed, no_model

CHECKED_SHARE = 16  # after the first versions every 16th tensor is checked, others each time
MEASURED_SHARE = 16  # after the first versions the canary's rounding is measured anew with every 16th
MOVED = 0.25  # nats of a likely token, since it was measured
SAMPLED_VALUES = 256  # of a tensor, evenly spread: enough to tell "did not move" from "was not delivered"


class WeightSender:
    """Held by the role whose weights are published. verify_first: every checksum for so many versions, a sample
    after · dtype: what the rollout computes in."""

    def __init__(self, outlet: Outlet, *, verify_first: int = 3, dtype: str = "float32") -> None:
        self._outlet, self._dtype = outlet, dtype
        self._verify_first = verify_first
        self._sent = 0
        self._last: dict[str, tuple[int | None, Tensor]] = {}  # last known checksum, some values
        self._moved_from: tuple[int, dict[str, Tensor]] = (-1, {})  # version and masters when a byte last changed
        self._first: int | None = None  # version
        self._measured: tuple[np.ndarray, np.ndarray] | None = None  # log-probs, and what the own pass was off by

    def send(self, engine: ModelEngine, version: int, probes: Sequence[np.ndarray], *, copy: bool) -> Sent:
        """Read the engine's weights as they are now. copy: they may change before all replicas have them. Raises
        FloatingPointError for weights that are no model any more: that is no fault of the delivery."""
        held: dict[str, Tensor] = {}
        manifest: dict[str, Entry] = {}
        every = self._sent < self._verify_first
        for i, (name, tensor) in enumerate(engine.weights()):
            kept = tensor.detach().clone() if copy else tensor.detach()
            held[name] = kept
            check = every or i % CHECKED_SHARE == self._sent % CHECKED_SHARE
            found = checksum(kept) if check else None
            manifest[name] = Entry(tuple(kept.shape), dtype_name(kept), checksum=found)
        for name, owner in engine.tied.items():
            manifest[name] = Entry(manifest[owner].shape, manifest[owner].dtype, tied_to=owner)
        probe = self._probed(engine, version, probes)
        self._refuse_diverged(version, held, probe)
        address = self._outlet.stage(version, held)
        changed, alarms = self._compare(version, manifest, held, engine.masters)
        self._sent += 1
        num_bytes = sum(t.numel() * t.element_size() for t in held.values())
        source = WeightSource(version, self._outlet.transport, address, manifest)
        return Sent(source, probe, num_bytes, changed, alarms)

    def attend(self, engine: ModelEngine, version: int, probes: Sequence[np.ndarray]) -> None:
        """What the other ranks do meanwhile: gathering weights and a forward pass are the work of all."""
        for _ in engine.weights():
            pass
        self._probed(engine, version, probes)

    def _probed(self, engine: ModelEngine, version: int, probes: Sequence[np.ndarray]) -> Probed | None:
        """The canary's side of the trainer. The model's own pass costs most of it, and what rounding explains changes
        slowly: it is made for the first versions, now and then, and where the model moved. All ranks decide alike, by
        the version and by what was measured before it; virtual ranks share this object."""
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

    def _refuse_diverged(self, version: int, held: Mapping[str, Tensor], probe: Probed | None) -> None:
        bad = [n for n, t in held.items() if t.is_floating_point() and not bool(torch.isfinite(t.sum()))]
        why = f"{len(bad)} of {len(held)} weight tensors hold NaN or infinity, e.g. {bad[0]}" if bad else ""
        if not why and probe is not None and (why := no_model(probe)):
            why += f" (largest weight {max(float(t.abs().max()) for t in held.values() if t.numel()):.3g})"
        if why:
            known = "they came so from the folder or checkpoint that was loaded"
            fix = "training diverged: go on from an earlier checkpoint with a lower optim.lr" if self._sent else known
            raise FloatingPointError(f"version {version}: the trainer's weights are no working model: {why}; {fix}")

    def _compare(
        self, version: int, manifest: Mapping[str, Entry], held: Mapping[str, Tensor], masters: Mapping[str, Tensor]
    ) -> tuple[bool, tuple[str, ...]]:
        """(some byte changed, alarms). Alarm: masters moved by more than rounding since a byte last changed."""
        last, self._last = self._last, {}
        changed = last.keys() != held.keys()
        for name, tensor in held.items():
            known, values = manifest[name].checksum, _some_values(tensor)
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
        floats = [t.dtype for t in held.values() if t.dtype.is_floating_point]
        rounding = max((torch.finfo(dtype).eps for dtype in set(floats)), default=0.0)
        moved = [n for n, now in moving.items() if n in before_moving and _moved(before_moving[n], now, rounding)]
        if not moved:
            return False, ()
        return False, (
            f"weights unchanged since version {since}, though {len(moved)} trained tensors moved, e.g. {moved[0]}",
        )


def _some_values(tensor: Tensor) -> Tensor:
    """A copy of up to `SAMPLED_VALUES` values."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLED_VALUES)][:SAMPLED_VALUES].double().cpu().clone()


def _moved(before: Tensor, now: Tensor, rounding: float) -> bool:
    return before.numel() > 0 and bool((now - before).abs().max() > rounding * before.abs().max())


def probed(
    engine: ModelEngine, probes: Sequence[np.ndarray], dtype: str, off_by: np.ndarray | None = None
) -> Probed | None:
    """The trainer's side of the canary: ids[1:] of each probe, at temperature 1. dtype: what the rollout computes in ·
    off_by: what the model's own pass differed by when it was measured; None: it is made."""
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
