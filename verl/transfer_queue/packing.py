"""Pack columns into one run of bytes and unpack them, for queues with shared bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from verl.batch import Ragged
from verl.transfer_queue.index import AT, BLOCK, COUNT, KIND, Found, Kind, Numbers, PackedColumn
from verl.transfer_queue.rows import columns_of
from verl.types import Sample

ALIGNED = 64  # bytes; every column begins at a multiple


@dataclass(slots=True)
class Parcel:
    """Columns to be packed into one run of bytes."""

    nbytes: int = 0
    """The size of the run."""
    columns: list[PackedColumn] = field(default_factory=list)
    """The position and the layout of each column."""
    values: list[Tensor | list[np.ndarray]] = field(default_factory=list)
    """The values of each column: a tensor, or one array per row."""

    def add(
        self, name: str, kind: Kind, counts: Numbers, values: Tensor | list[np.ndarray], rows: bytes | None = None
    ) -> None:
        self.columns.append(PackedColumn(name, kind, self.nbytes, counts.tobytes(), rows))
        self.values.append(values)
        self.nbytes += -(-int(counts.sum()) * kind.width // ALIGNED) * ALIGNED

    def fill(self, target: np.ndarray) -> None:
        """Write the columns into [nbytes] uint8, in one copy."""
        for column, values in zip(self.columns, self.values):
            if isinstance(values, Tensor):
                data = values.cpu().contiguous().view(-1).view(torch.uint8).numpy()
                np.copyto(target[column.at : column.at + len(data)], data)  # a copy by torch would start its threads
            else:
                nbytes = sum(part.nbytes for part in values)
                shaped = target[column.at : column.at + nbytes].view(values[0].dtype)
                np.concatenate(values, out=shaped.reshape(-1, *values[0].shape[1:]))


def parcel_of_samples(samples: Sequence[Sample]) -> Parcel:
    """Return the parcel of the columns of new rows."""
    found: dict[tuple[str, np.dtype, tuple[int, ...]], tuple[list[int], list[np.ndarray]]] = {}
    for i, sample in enumerate(samples):
        for name, value in columns_of(sample).items():
            rows, values = found.setdefault((name, value.dtype, value.shape[1:]), ([], []))
            rows.append(i)
            values.append(value)
    parcel = Parcel()
    for (name, dtype, tail), (rows, values) in found.items():
        kind = Kind(dtype.name, tail, dtype.itemsize * int(np.prod(tail, dtype=np.int64)))
        places = None if len(rows) == len(samples) else np.array(rows, np.int64).tobytes()
        parcel.add(name, kind, np.array([len(v) for v in values], np.int64), values, places)
    return parcel


def parcel_of_columns(count: int, columns: Mapping[str, Ragged]) -> Parcel:
    """Return the parcel of columns of `count` rows. Raise ValueError if a column has another number of rows, or its
    values do not match its offsets."""
    parcel = Parcel()
    for name, column in columns.items():
        if len(column) != count:
            raise ValueError(f"column {name!r} has {len(column)} rows for {count} samples")
        if int(column.offsets[-1]) != len(column.values):
            raise ValueError(f"column {name!r} has {len(column.values)} values, its rows {int(column.offsets[-1])}")
        values = column.values.detach()
        tail = tuple(values.shape[1:])
        width = values.element_size() * int(np.prod(tail, dtype=np.int64))
        kind = Kind(str(values.dtype).removeprefix("torch."), tail, width)
        parcel.add(name, kind, np.diff(column.offsets).astype(np.int64, copy=False), values)
    return parcel


def unpack(columns: Sequence[str], found: Found, blocks: Mapping[int, np.ndarray]) -> dict[str, Ragged]:
    """Return columns from the bytes of blocks (number -> [n] uint8). A column with adjacent cells is a view of them,
    else a copy."""
    out = {}
    for name in columns:
        place = found.columns[name]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.frombuffer(place.counts, np.int64))])
        runs = np.frombuffer(place.runs, np.int64).reshape(-1, 4)
        alike = np.split(runs, np.flatnonzero(np.diff(runs[:, KIND])) + 1)  # runs of one kind, usually all
        parts = [_joined(part, found.kinds[int(part[0, KIND])], blocks) for part in alike if len(part)]
        values = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.zeros(0)
        out[name] = Ragged(values, offsets)
    return out


def _joined(runs: Numbers, kind: Kind, blocks: Mapping[int, np.ndarray]) -> Tensor:
    starts, counts = runs[:, AT], runs[:, COUNT]
    ends = starts + counts * kind.width
    pieces = [blocks[b][a:e] for b, a, e in zip(runs[:, BLOCK].tolist(), starts.tolist(), ends.tolist())]
    data = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    dtype: torch.dtype = vars(torch)[kind.dtype]
    return torch.from_numpy(data).view(dtype).view(int(counts.sum()), *kind.tail)
