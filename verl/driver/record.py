"""Every trajectory is written to samples/, from step 0. Runs beside the loop, in a worker of its own: the driver hands
it refs, and reads no column."""

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

# queue column -> field of a row; the first one that was written wins
_COLUMNS = {
    "old_logprobs": ("old_logprobs", "train_logprobs"),
    "ref_logprobs": ("ref_logprobs",),
    "advantages": ("advantages",),
    "entropy": ("train_entropy",),
    "values": ("old_values",),
    "returns": ("returns",),
}


# the same of a sample and of its row
SHARED = (
    *("sample_id", "trajectory_id", "group_id", "task_id", "purpose", "teacher"),
    *("reward", "components", "outcome", "stop_reason", "temperature"),
)
MOST_WAITING = 8_000_000  # response tokens; a row holds about 40 bytes of each


def build_recorder(
    queue: TransferQueue, run_dir: Path, tokenizer: Any, groups_per_step: int = 0, *, ranks: Sequence[Ranks]
) -> list[SampleRecorder]:
    """Writes samples with their prompts as the model sees them. tokenizer: for the texts."""
    decode, decode_prompt = decoder(tokenizer), decoder(tokenizer, special_tokens=True)
    return [SampleRecorder(queue, run_dir, decode, decode_prompt, groups_per_step) for _ in ranks]


@dataclass(eq=False)
class SampleRecorder:
    """Worker: writes the rows of a step, then drops them from the queue. While the disk is full or faulty they wait, of
    the newest steps as many as MOST_WAITING tokens allow. Each call returns the lines that a person should read: once
    that samples wait, and what is lost. truths: task id -> ground truth, of the tasks of the call · decode_prompt: of
    prompts, with their special tokens (None: as the rest) · groups_per_step: so many are written, 0: all."""

    queue: TransferQueue
    run_dir: Path
    decode: DecodeFn
    decode_prompt: DecodeFn | None = None
    groups_per_step: int = 0
    _waiting: list[tuple[int, list[SampleRow], Kind]] = field(default_factory=list)

    def record(self, step: int, refs: Refs, truths: Mapping[str, Any]) -> list[str]:
        groups = list(refs.groups().values())[: self.groups_per_step or None]
        rows = self._rows(step, Refs(ref for group in groups for ref in group), truths)
        said = self._write(step, rows, "train")
        self.queue.drop(refs)
        return said

    def record_eval(self, step: int, found: Sequence[Trajectory], truths: Mapping[str, Any]) -> list[str]:
        prompts: dict[bytes, str] = {}
        samples = [s for t in found for s in samples_of(t)]
        return self._write(step, [self._row(step, s, {}, prompts, truths) for s in samples], "eval")

    def finish(self) -> list[str]:
        """The last attempt to write what waits."""
        said = self._drain(stuck=True) if self._waiting else []
        if self._waiting:
            lost = ", ".join(str(step) for step, _, _ in self._waiting)
            said.append(f"warning: the samples of step {lost} are lost: the disk had no room until the end")
        return said

    def _write(self, step: int, rows: list[SampleRow], kind: Kind) -> list[str]:
        stuck = bool(self._waiting)
        self._waiting.append((step, rows, kind))
        return self._drain(stuck)

    def _drain(self, stuck: bool) -> list[str]:
        said = []
        try:
            while self._waiting:
                write_samples(self.run_dir, *self._waiting[0])
                del self._waiting[0]
        except OSError as e:
            if not stuck:
                path = samples_path(self.run_dir, self._waiting[0][0], self._waiting[0][2])
                said.append(f"warning: {path} cannot be written ({e.strerror or e}): samples wait for room")
            while sum(r.response_tokens for _, waiting, _ in self._waiting for r in waiting) > MOST_WAITING:
                said.append(f"warning: the samples of step {self._waiting.pop(0)[0]} are lost: the disk is full")
        else:
            if stuck:
                said.append(f"{self.run_dir / FOLDER} is written again")
        return said

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
        """`prompts`: the texts of prompts so far, each made once for its group."""
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
    """Per-trainable-token values at their places in the response; NaN elsewhere."""
    if len(at) == length:
        return values.astype(np.float32, copy=False)
    out = np.full(length, np.nan, np.float32)
    out[at] = values
    return out
