"""Writes the batch of a gradient that was not finite, for debugging."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from verl.batch import Batch


def dump_batch(path: Path, batch: Batch, terms: Sequence[str], norm: float) -> str:
    """Write the batch to `path`; return the path, or the reason why it was not written."""
    seen: dict[str, Any] = {"ids": batch.ids, "targets": batch.targets}
    seen |= {"seg_start": batch.seg_start, "row_start": batch.row_start}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"terms": terms, **seen, "columns": dict(batch.columns), "grad_norm": norm}, path)
    except (OSError, RuntimeError) as e:  # raised by torch's writer where the disk is full
        return f"nowhere ({e})"
    return str(path)
