"""TransferQueue in this process: columns are not moved, and reading the rows of an update is one concatenation. Columns
of `put` remain numpy arrays: splitting and joining small arrays takes a third of the time of tensors."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from verl.batch import Ragged
from verl.transfer_queue.media import MemoryMedia
from verl.transfer_queue.rows import columns_of
from verl.types import Refs, Sample, ref_of

_Columns = dict[str, np.ndarray | Tensor]


def build(options: object) -> MemoryQueue:
    return MemoryQueue()


class MemoryQueue:
    """A `TransferQueue` in a dictionary. The threads of in-process worker groups may use it."""

    def __init__(self) -> None:
        self.media = MemoryMedia()
        self._rows: dict[str, _Columns] = {}
        self._lock = threading.Lock()

    async def put(self, samples: Sequence[Sample]) -> Refs:
        refs = Refs(ref_of(s) for s in samples)
        times = Counter(refs.ids)
        rows: list[_Columns] = [{**columns_of(s)} for s in samples]
        with self._lock:
            doubled = [i for i, n in times.items() if n > 1 or i in self._rows]
            if doubled:
                raise ValueError(f"samples are already in the queue: {doubled[:3]}; every id is put once")
            self._rows.update(zip(refs.ids, rows))
        return refs

    def read(self, refs: Refs, columns: Sequence[str]) -> dict[str, Ragged]:
        rows = self._find(refs)
        out = {}
        for name in columns:
            missing = [ref.sample_id for ref, row in zip(refs, rows) if name not in row]
            if missing:
                raise ValueError(
                    f"column {name!r} was not written for {len(missing)} of {len(rows)} samples, e.g. {missing[0]}"
                )
            parts = [row[name] for row in rows]
            offsets = np.cumsum([0, *(part.shape[0] for part in parts)], dtype=np.int64)
            out[name] = Ragged(_joined(parts), offsets)
        return out

    def write(self, refs: Refs, columns: Mapping[str, Ragged]) -> None:
        rows = self._find(refs)
        for name, column in columns.items():
            if len(column) != len(rows):
                raise ValueError(f"column {name!r} has {len(column)} rows for {len(rows)} samples")
            if int(column.offsets[-1]) != len(column.values):
                raise ValueError(f"column {name!r} has {len(column.values)} values, its rows {int(column.offsets[-1])}")
        for name, column in columns.items():
            kept = Ragged(column.values.detach().clone(), column.offsets)  # later changes by the writer have no effect
            for row, part in zip(rows, kept.rows(), strict=True):
                row[name] = part

    def having(self, refs: Refs, column: str) -> Refs:
        return Refs(ref for ref, row in zip(refs, self._find(refs)) if column in row)

    def columns(self, refs: Refs) -> list[str]:
        return list(dict.fromkeys(name for row in self._find(refs) for name in row))

    def drop(self, refs: Refs) -> None:
        with self._lock:
            self._check(refs)
            for sample_id in set(refs.ids):
                del self._rows[sample_id]

    def __len__(self) -> int:
        return len(self._rows)

    def _find(self, refs: Refs) -> list[_Columns]:
        with self._lock:
            self._check(refs)
            return [self._rows[r.sample_id] for r in refs]

    def _check(self, refs: Refs) -> None:
        missing = [r.sample_id for r in refs if r.sample_id not in self._rows]
        if missing:
            raise ValueError(f"{len(missing)} samples are not in the queue (never put, or dropped), e.g. {missing[0]}")


def _joined(parts: Sequence[np.ndarray | Tensor]) -> Tensor:
    if not parts:
        return torch.zeros(0)
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if len(arrays) == len(parts):
        return torch.from_numpy(np.concatenate(arrays))
    return torch.cat([torch.as_tensor(part) for part in parts])
