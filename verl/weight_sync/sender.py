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

CHECKED_SHARE = 16  # after the first versions every 16th tensor is checked, others each time
SAMPLED_VALUES = 256  # of a tensor, evenly spread: enough to tell "did not move" from "was not delivered"


class WeightSender:
    """Held by the role whose weights are published. verify_first: every checksum for so many versions, a sample
    after."""

    def __init__(self, outlet: Outlet, *, verify_first: int = 3) -> None:
        self._outlet = outlet
        self._verify_first = verify_first
        self._sent = 0
        self._last: dict[str, tuple[int | None, Tensor]] = {}  # last known checksum, some values
        self._moved_from: tuple[int, dict[str, Tensor]] = (-1, {})  # version and masters when a byte last changed

    def send(self, engine: ModelEngine, version: int, probes: Sequence[np.ndarray], *, copy: bool) -> Sent:
        """Read the engine's weights as they are now. copy: they may change before all replicas have them."""
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
        probe_logprobs = probed(engine, probes)
        address = self._outlet.stage(version, held)
        changed, alarms = self._compare(version, manifest, held, engine.masters)
        self._sent += 1
        num_bytes = sum(t.numel() * t.element_size() for t in held.values())
        source = WeightSource(version, self._outlet.transport, address, manifest)
        return Sent(source, probe_logprobs, num_bytes, changed, alarms)

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


def attend(engine: ModelEngine, probes: Sequence[np.ndarray]) -> None:
    """What the other ranks do meanwhile: gathering weights and a forward pass are the work of all."""
    for _ in engine.weights():
        pass
    probed(engine, probes)


def _some_values(tensor: Tensor) -> Tensor:
    """A copy of up to `SAMPLED_VALUES` values."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLED_VALUES)][:SAMPLED_VALUES].double().cpu().clone()


def _moved(before: Tensor, now: Tensor, rounding: float) -> bool:
    return before.numel() > 0 and bool((now - before).abs().max() > rounding * before.abs().max())


def probed(engine: ModelEngine, probes: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
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
    rows = {int(s): found[batch.row_start[row] : batch.row_start[row + 1]] for row, s in enumerate(batch.sequence)}
    return tuple(rows[i] for i in range(len(probes)))
