"""Write every trajectory to samples/, from step 0. The recorder is a worker beside the loop: it gets refs from the
driver and reads the columns itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from verl.columns import Column, recorded
from verl.driver.setup import decoder
from verl.model_engine.base import Ranks
from verl.rollout.base import DecodeFn
from verl.track.packed import packed_segments
from verl.track.samples import FOLDER, Kind, SampleRow, samples_path, write_samples
from verl.transfer_queue.base import MediaStore, TransferQueue, copy_media
from verl.transfer_queue.rows import queued_samples
from verl.types import LEARNED, Refs, Sample, Segment, Trajectory, facts_of, response_ids_of, samples_of, versions_of

MOST_WAITING = 8_000_000  # response tokens; a row holds about 40 bytes of each


def build_recorder(
    queue: TransferQueue,
    run_dir: Path,
    tokenizer: Any,
    groups_per_step: int = 0,
    media: MediaStore | None = None,
    *,
    ranks: Sequence[Ranks],
) -> list[SampleRecorder]:
    """Build the worker that writes samples. The tokenizer makes the texts; prompts keep their special tokens. media:
    the run's store of recorded media."""
    decode, decode_prompt = decoder(tokenizer), decoder(tokenizer, special_tokens=True)
    return [SampleRecorder(queue, run_dir, decode, decode_prompt, groups_per_step, media) for _ in ranks]


@dataclass(eq=False)
class SampleRecorder:
    """A worker that writes the rows of a step to samples/. If they cannot be written (disk full), the rows of the
    newest steps, up to MOST_WAITING tokens, are kept until they can. Each call returns lines for the user: one when
    samples begin to wait, and one for each lost step. `truths` in the calls is task id -> ground truth."""

    queue: TransferQueue
    """The queue with the columns."""
    run_dir: Path
    """The run directory."""
    decode: DecodeFn
    """Converts the ids of a response to text."""
    decode_prompt: DecodeFn | None = None
    """Converts the ids of a prompt to text with its special tokens; None: `decode`."""
    groups_per_step: int = 0
    """Groups of a step that are written; 0: all."""
    media: MediaStore | None = None
    """The store for the media of recorded rows; None: they are not kept beyond their rows in the queue."""
    _waiting: list[tuple[int, list[SampleRow], Kind]] = field(default_factory=list)

    def record(self, step: int, refs: Refs, truths: Mapping[str, Any]) -> list[str]:
        groups = list(refs.groups().values())[: self.groups_per_step or None]
        refs = Refs(ref for group in groups for ref in group)
        samples = queued_samples(self.queue, refs)
        lines = self._keep_media(step, samples)
        return lines + self._write(step, self._rows(step, refs, samples, truths), "train")

    def _keep_media(self, step: int, samples: Sequence[Sample]) -> list[str]:
        """Copy the media of these rows into the run's store, which replay reads. Return a line for the user if it is
        full."""
        references = {m for sample in samples for m in sample.media}
        if not references or self.media is None or self.queue.media is None:
            return []
        try:
            copy_media(self.queue.media, self.media, references, f"step {step}")
        except OSError as e:
            return [f"warning: the media of step {step} are not recorded ({e.strerror or e}): it cannot be replayed"]
        return []

    def record_eval(self, step: int, found: Sequence[Trajectory], truths: Mapping[str, Any]) -> list[str]:
        prompts: dict[bytes, str] = {}
        samples = [s for t in found for s in samples_of(t)]
        return self._write(step, [self._row(step, s, {}, prompts, truths) for s in samples], "eval")

    def finish(self) -> list[str]:
        """Write the rows that wait, if that is possible now; return lines for the user about those that are lost."""
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

    def _rows(self, step: int, refs: Refs, samples: Sequence[Sample], truths: Mapping[str, Any]) -> list[SampleRow]:
        found: dict[str, dict[str, np.ndarray]] = {i: {} for i in refs.ids}  # a baseline has fewer columns
        for column in (c for c in recorded() if not c.sampled):
            left = refs
            for name in filter(None, (column.name, column.instead)):
                have = self.queue.having(left, name)
                if have:
                    for sample_id, part in zip(have.ids, self.queue.read(have, (name,))[name].rows(), strict=True):
                        found[sample_id][column.recorded] = part.numpy()
                    left = Refs(ref for ref in left if column.recorded not in found[ref.sample_id])
        prompts: dict[bytes, str] = {}
        return [self._row(step, sample, found[sample.sample_id], prompts, truths) for sample in samples]

    def _row(
        self,
        step: int,
        sample: Sample,
        outputs: dict[str, np.ndarray],
        prompts: dict[bytes, str],
        truths: Mapping[str, Any],
    ) -> SampleRow:
        """Build the recorded row of a sample. outputs: recorded name -> values of its loss tokens · prompts: texts of
        prompts so far, one for each group."""
        prompt, rest = sample.segments[0], sample.segments[1:]
        ids = response_ids_of(sample.segments)
        mask = np.repeat(np.asarray([s.source in LEARNED for s in rest], np.uint8), [len(s.ids) for s in rest])
        if (key := prompt.ids.tobytes()) not in prompts:
            prompts[key] = (self.decode_prompt or self.decode)(prompt.ids.tolist())
        truth = truths.get(sample.task_id)
        oldest, newest = versions_of(sample.segments)
        has_more = sample.adapter or any(s.media or s.side for s in sample.segments)
        return SampleRow(
            **facts_of(sample),
            step=step,
            prompt_text=prompts[key],
            response_text=self.decode(ids.tolist()),
            prompt_ids=prompt.ids,
            response_ids=ids,
            response_mask=mask,
            tokens=_tokens(rest, outputs, mask),
            version_min=oldest,
            version_max=newest,
            ground_truth="" if truth is None else truth if isinstance(truth, str) else json.dumps(truth, default=str),
            context=np.zeros(0, np.int64) if sample.context is None else sample.context,
            segments=packed_segments(sample) if has_more else b"",
        )


def _tokens(response: Sequence[Segment], outputs: Mapping[str, np.ndarray], mask: np.ndarray) -> dict[str, np.ndarray]:
    """Return every recorded column of a response, [R] each, with its default where a token has no value."""
    tokens: dict[str, np.ndarray] = {}
    for column in recorded():
        if not column.sampled:
            if column.recorded in outputs:
                tokens[column.recorded] = _spread(outputs[column.recorded], np.flatnonzero(mask), column, len(mask))
            continue
        parts = [column.of_segment(s) for s in response]
        if column.optional and all(part is None for part in parts):
            continue
        filled = [column.fill(len(s.ids)) if part is None else column.typed(part) for s, part in zip(response, parts)]
        tokens[column.recorded] = np.concatenate([column.fill(0), *filled])
    return tokens


def _spread(values: np.ndarray, at: np.ndarray, column: Column, length: int) -> np.ndarray:
    """Return the values of loss tokens at their positions in the response, the column's default elsewhere."""
    if len(at) == length:
        return column.typed(values)
    out = column.fill(length)
    out[at] = values
    return out
