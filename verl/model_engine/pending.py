"""Metrics of micro-batches that stay on the device until all are read in one transfer, since each read waits for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.accel.devices import device_facts
from verl.types import Kind, Metric, Metrics, Unit, merge_metrics


@dataclass(frozen=True, slots=True)
class PendingMetric:
    """A `Metric` with numbers that are still on the device."""

    total: Tensor
    """A 0-d tensor; float64 is exact for its number."""
    count: Tensor | float
    unit: Unit
    kind: Kind


Pending = Mapping[str, PendingMetric]


def reduced(values: Tensor, mask: Tensor, kind: Kind, unit: Unit) -> PendingMetric:
    """Reduce the values where the bool mask of the same shape is True, without a decision on the host."""
    values, count = values.detach(), mask.sum()
    if not values.numel():
        return PendingMetric(count, count, unit, kind)
    if kind == "max":
        most = torch.where(mask, values, -torch.inf).amax()
        return PendingMetric(torch.where(count > 0, most, 0.0), count, unit, kind)
    # the same numbers; a sum without the zeros keeps its bits
    inside = values[mask] if device_facts(values.device.type).compacts_rows else torch.where(mask, values, 0)
    return PendingMetric(inside.double().sum(), count, unit, kind)


def read_pending(parts: Sequence[Pending]) -> Metrics:
    """Return the metrics of all parts, merged. All numbers are read in one transfer."""
    numbers = [n for part in parts for m in part.values() for n in (m.total, m.count) if isinstance(n, Tensor)]
    read = iter(torch.stack([n.double() for n in numbers]).tolist() if numbers else ())

    def known(number: Tensor | float) -> float:
        return next(read) if isinstance(number, Tensor) else number

    return merge_metrics(
        {name: Metric(known(m.total), known(m.count), m.unit, m.kind) for name, m in part.items()} for part in parts
    )
