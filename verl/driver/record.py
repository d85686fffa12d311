"""Every trajectory is written to samples/, from step 0 (pitfalls 46). Runs beside the loop, in a worker of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from verl.rollout.base import DecodeFn
from verl.track.samples import SampleRow, write_samples
from verl.transfer_queue.base import TransferQueue
from verl.types import Refs, Sample, Trajectory, samples_of

# queue column -> field of a row; the first one that was written wins
_COLUMNS = {
    "old_logprobs": ("old_logprobs", "train_logprobs"), "ref_logprobs": ("ref_logprobs",), "advantages": ("advantages",),
    "entropy": ("train_entropy",), "values": ("old_values",), "returns": ("returns",),
}  # fmt: skip


class SampleRecorder:
    """Worker: writes the rows of a step, then drops them from the queue."""

    def __init__(self, queue: TransferQueue, run_dir: Path, decode: DecodeFn, *, groups_per_step: int = 0) -> None:
        self._queue = queue
        self._run_dir = run_dir
        self._decode = decode
        self._groups_per_step = groups_per_step

    def record(self, step: int, refs: Refs) -> None:
        kept = list(refs.groups().values())[: self._groups_per_step or None]
        rows = [row for group in kept for row in self._rows(step, group)]
        write_samples(self._run_dir, step, rows)
        self._queue.drop(refs)

    def record_eval(self, step: int, played: Sequence[Trajectory]) -> None:
        rows = [self._row(step, s, {}) for t in played for s in samples_of(t)]
        write_samples(self._run_dir, step, rows, "eval")

    def _rows(self, step: int, refs: Refs) -> list[SampleRow]:
        found: list[dict[str, np.ndarray]] = [{} for _ in refs]  # a baseline or an unchosen row has fewer columns
        for field, columns in _COLUMNS.items():
            left = list(range(len(refs)))
            for column in columns:
                have = left if self._queue.has(refs, column) else [i for i in left if self._queue.has(Refs((refs[i],)), column)]
                if have:
                    values = self._queue.read(Refs(refs[i] for i in have), (column,))[column]
                    for k, i in enumerate(have):
                        found[i][field] = values.row(k).numpy()
                left = [i for i in left if i not in set(have)]
        return [
            self._row(step, sample, columns)
            for sample, columns in zip(self._queue.samples(refs), found, strict=True)
        ]

    def _row(self, step: int, sample: Sample, columns: dict[str, np.ndarray]) -> SampleRow:
        prompt, rest = sample.segments[0], sample.segments[1:]
        ids = np.concatenate([s.ids for s in rest]) if rest else np.zeros(0, np.int64)
        mask = (
            np.concatenate([np.full(len(s.ids), s.source == "sampled", np.uint8) for s in rest])
            if rest
            else np.zeros(0, np.uint8)
        )
        at = np.flatnonzero(mask)
        logprobs = (
            np.concatenate([s.logprobs for s in rest if s.logprobs is not None]) if len(at) else np.zeros(0, np.float32)
        )
        versions = (
            np.concatenate([np.full(len(s.ids), s.version if s.source == "sampled" else -1) for s in rest])
            if rest
            else at
        )
        sampled = [s.version for s in rest if s.source == "sampled"]
        return SampleRow(
            step=step, sample_id=sample.sample_id, trajectory_id=sample.trajectory_id, group_id=sample.group_id,
            task_id=sample.task_id, purpose=sample.purpose,
            prompt_text=self._decode(prompt.ids.tolist()), response_text=self._decode(ids.tolist()),
            prompt_ids=prompt.ids, response_ids=ids, response_mask=mask, rollout_logprobs=_spread(logprobs, at, len(ids)),
            token_versions=versions.astype(np.int32), reward=sample.reward, components=sample.components,
            version_min=min(sampled, default=-1), version_max=max(sampled, default=-1), outcome=sample.outcome,
            stop_reason=sample.stop_reason, temperature=sample.temperature,
            **{field: _spread(column, at, len(ids)) for field, column in columns.items()},
        )  # fmt: skip


def _spread(values: np.ndarray, at: np.ndarray, length: int) -> np.ndarray:
    """Per-trainable-token values at their places in the response; NaN elsewhere."""
    out = np.full(length, np.nan, np.float32)
    out[at] = values
    return out
