"""Write every trajectory to samples/, from step 0. The recorder is a worker beside the loop: it gets refs from the
driver and reads the columns itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from verl.driver.setup import decoder
from verl.driver.state import packed_segments
from verl.model_engine.base import Ranks
from verl.rollout.base import DecodeFn
from verl.track.samples import FOLDER, Kind, SampleRow, samples_path, write_samples
from verl.transfer_queue.base import TransferQueue
from verl.transfer_queue.rows import read_samples
from verl.types import LEARNED, Refs, Sample, Trajectory, response_ids_of, samples_of, versions_of

# field of a row -> queue columns; the first one that exists is recorded
_COLUMNS = {
    "old_logprobs": ("old_logprobs", "train_logprobs"),
    "ref_logprobs": ("ref_logprobs",),
    "advantages": ("advantages",),
    "entropy": ("train_entropy",),
    "values": ("old_values",),
    "returns": ("returns",),
}


# fields with the same name in a sample and in its row
SHARED = (
    *("sample_id", "trajectory_id", "group_id", "task_id", "purpose", "teacher"),
    *("reward", "components", "outcome", "stop_reason", "temperature"),
)
MOST_WAITING = 8_000_000  # response tokens; a row holds about 40 bytes of each


def build_recorder(
    queue: TransferQueue, run_dir: Path, tokenizer: Any, groups_per_step: int = 0, *, ranks: Sequence[Ranks]
) -> list[SampleRecorder]:
    """Build the worker that writes samples. The tokenizer makes the texts; prompts keep their special tokens."""
    decode, decode_prompt = decoder(tokenizer), decoder(tokenizer, special_tokens=True)
    return [SampleRecorder(queue, run_dir, decode, decode_prompt, groups_per_step) for _ in ranks]


@dataclass(eq=False)
class SampleRecorder:
    """Worker: writes the rows of a step, then drops them from the queue. While the disk is full or faulty rows wait,
    the newest steps up to MOST_WAITING tokens. Each call returns lines for the user: one when samples begin to wait,
    and one for each lost step. The calls get `truths`: task id -> ground truth of the tasks."""

    queue: TransferQueue
    """The queue with the columns."""
    run_dir: Path
    """The run directory."""
    decode: DecodeFn
    """Text of a response."""
    decode_prompt: DecodeFn | None = None
    """Text of a prompt with its special tokens; None: `decode`."""
    groups_per_step: int = 0
    """Groups of a step that are written; 0: all."""
    _waiting: list[tuple[int, list[SampleRow], Kind]] = field(default_factory=list)

    def record(self, step: int, refs: Refs, truths: Mapping[str, Any]) -> list[str]:
        groups = list(refs.groups().values())[: self.groups_per_step or None]
        rows = self._rows(step, Refs(ref for group in groups for ref in group), truths)
        lines = self._write(step, rows, "train")
        self.queue.drop(refs)
        return lines

    def record_eval(self, step: int, found: Sequence[Trajectory], truths: Mapping[str, Any]) -> list[str]:
        prompts: dict[bytes, str] = {}
        samples = [s for t in found for s in samples_of(t)]
        return self._write(step, [self._row(step, s, {}, prompts, truths) for s in samples], "eval")

    def finish(self) -> list[str]:
        """Try for the last time to write the rows that wait."""
        lines = self._drain(stuck=True) if self._waiting else []
        if self._waiting:
            lost = ", ".join(str(step) for step, _, _ in self._waiting)
            lines.append(f"warning: the samples of step {lost} are lost: the disk had no room until the end")
        return lines

    def _write(self, step: int, rows: list[SampleRow], kind: Kind) -> list[str]:
        stuck = bool(self._waiting)
        self._waiting.append((step, rows, kind))
        return self._drain(stuck)

    def _drain(self, stuck: bool) -> list[str]:
        lines = []
        try:
            while self._waiting:
                write_samples(self.run_dir, *self._waiting[0])
                del self._waiting[0]
        except OSError as e:
            if not stuck:
                path = samples_path(self.run_dir, self._waiting[0][0], self._waiting[0][2])
                lines.append(f"warning: {path} cannot be written ({e.strerror or e}): samples wait for room")
            while sum(r.response_tokens for _, waiting, _ in self._waiting for r in waiting) > MOST_WAITING:
                lines.append(f"warning: the samples of step {self._waiting.pop(0)[0]} are lost: the disk is full")
        else:
            if stuck:
                lines.append(f"{self.run_dir / FOLDER} is written again")
        return lines

    def _rows(self, step: int, refs: Refs, truths: Mapping[str, Any]) -> list[SampleRow]:
        found: dict[str, dict[str, np.ndarray]] = {
            i: {} for i in refs.ids
        }  # a baseline or an unchosen row has fewer columns
        for name, columns in _COLUMNS.items():
            left = refs
            for column in columns:
                have = self.queue.having(left, column)
                if have:
                    for sample_id, part in zip(have.ids, self.queue.read(have, (column,))[column].rows(), strict=True):
                        found[sample_id][name] = part.numpy()
                    left = Refs(ref for ref in left if name not in found[ref.sample_id])
        prompts: dict[bytes, str] = {}
        samples = read_samples(self.queue, refs)
        return [self._row(step, sample, found[sample.sample_id], prompts, truths) for sample in samples]

    def _row(
        self,
        step: int,
        sample: Sample,
        columns: dict[str, np.ndarray],
        prompts: dict[bytes, str],
        truths: Mapping[str, Any],
    ) -> SampleRow:
        """Build the recorded row of a sample. prompts: texts of prompts so far, one for each group."""
        prompt, rest = sample.segments[0], sample.segments[1:]
        lengths = [len(s.ids) for s in rest]
        ids = response_ids_of(sample.segments)
        mask = np.repeat(np.asarray([s.source in LEARNED for s in rest], np.uint8), lengths)
        versions = np.repeat(np.asarray([s.version if s.source == "sampled" else -1 for s in rest], np.int32), lengths)
        at = np.flatnonzero(mask)
        drawn = [s for s in rest if s.source in LEARNED]
        logprobs = [np.full(len(s.ids), np.nan, np.float32) if s.logprobs is None else s.logprobs for s in drawn]
        if (key := prompt.ids.tobytes()) not in prompts:
            prompts[key] = (self.decode_prompt or self.decode)(prompt.ids.tolist())
        truth = truths.get(sample.task_id)
        oldest, newest = versions_of(sample.segments)
        found: dict[str, Any] = {name: getattr(sample, name) for name in SHARED}
        found |= {name: _spread(column, at, len(ids)) for name, column in columns.items()}
        if sample.adapter or any(s.media or s.side for s in sample.segments):
            found["segments"] = packed_segments(sample)
        return SampleRow(
            **found,
            step=step,
            prompt_text=prompts[key],
            response_text=self.decode(ids.tolist()),
            prompt_ids=prompt.ids,
            response_ids=ids,
            response_mask=mask,
            rollout_logprobs=_spread(np.concatenate([np.zeros(0, np.float32), *logprobs]), at, len(ids)),
            token_versions=versions,
            version_min=oldest,
            version_max=newest,
            ground_truth="" if truth is None else truth if isinstance(truth, str) else json.dumps(truth, default=str),
            context=np.zeros(0, np.int64) if sample.context is None else sample.context,
        )


def _spread(values: np.ndarray, at: np.ndarray, length: int) -> np.ndarray:
    """Return the values of trainable tokens at their positions in the response, NaN elsewhere."""
    if len(at) == length:
        return values.astype(np.float32, copy=False)
    out = np.full(length, np.nan, np.float32)
    out[at] = values
    return out
