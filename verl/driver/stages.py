"""The data of a supervised run: SFT rows, reward-model pairs, preference pairs. Rows become samples, token columns and
terms."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.losses import nll
from verl.algorithms.preference import CHOSEN, MISMATCHED, REJECTED
from verl.chat import NO_TURN_END, Rendered, TurnEnd
from verl.data.cache import cache_path, load_cached, store_cached
from verl.data.preference import Pair, PairTable
from verl.data.source import ConversationTable
from verl.objective import Term
from verl.types import Medium, Sample, Segment, TaskImage
from verl.workers.group import Drivers

ROWS_AT_ONCE = 64  # rows of which the log-probs of the start weights are computed in one call
SFT_TERMS = (Term(name="loss", fn=nll, aggregate="token-mean"),)
StageColumns = dict[str, Tensor]
StoreImage = Callable[[TaskImage], str]
"""Stores the content of an image, and returns its reference."""
LogprobsOf = Callable[[Callable[[StoreImage], list[Sample]]], Awaitable[list[np.ndarray]]]
"""Computes the log-probs of the samples that the given function makes."""


@dataclass(slots=True)
class SftStage:
    """Conversations, with the loss of SFT."""

    table: ConversationTable
    terms: tuple[Term, ...] = SFT_TERMS

    def rows(
        self, indices: Sequence[int], names: Sequence[str], store: StoreImage
    ) -> tuple[list[Sample], StageColumns]:
        return [sample_of(self.table[i], name, store) for i, name in zip(indices, names, strict=True)], {}


@dataclass(slots=True)
class PreferenceStage:
    """Preference pairs; or unpaired answers, each with one mismatched answer as KTO's reference point: the answer of
    the next row."""

    table: PairTable
    terms: tuple[Term, ...]
    paired: bool = True
    reference: Reference | None = None

    def entries(self, i: int) -> list[tuple[float, Rendered]]:
        pair = self.table[i]
        if self.paired:
            assert pair.rejected is not None
            return [(CHOSEN, pair.chosen), (REJECTED, pair.rejected)]
        other = self.table[(i + 1) % len(self.table)]
        return [(CHOSEN if pair.desirable else REJECTED, pair.chosen), (MISMATCHED, _mismatched(pair, other))]

    def rows(
        self, indices: Sequence[int], names: Sequence[str], store: StoreImage
    ) -> tuple[list[Sample], StageColumns]:
        samples: list[Sample] = []
        facts: list[dict[str, float]] = []
        ref: list[np.ndarray] = []
        for j, (i, name) in enumerate(zip(indices, names, strict=True)):
            for k, (side, row) in enumerate(self.entries(i)):
                samples.append(self.sample(row, f"{name}{k}", name, store))
                facts.append({"side": side, "pair": float(j), "gap": self.table[i].gap or 0.0})
                if self.reference is not None:
                    ref.append(self.reference.of(i, k))
        columns = _constant(samples, facts)
        if self.reference is not None:
            columns["ref_logprobs"] = torch.from_numpy(np.concatenate(ref))
        return samples, columns

    def sample(self, row: Rendered, name: str, group: str, store: StoreImage) -> Sample:
        return sample_of(row, name, store, group)


@dataclass(slots=True)
class RewardStage(PreferenceStage):
    """Pairs for a Bradley-Terry reward model. Each answer ends in one trainable token without text; its value is the
    score."""

    end: TurnEnd = NO_TURN_END

    def sample(self, row: Rendered, name: str, group: str, store: StoreImage) -> Sample:
        return scored_sample(row, name, group, self.end, store)


Stage = SftStage | PreferenceStage
"""A data set and its objective. `rows(indices, names, store)` returns the samples of these entries, whose images it
stores, and their columns [L] in the order of the rows."""


@dataclass(slots=True)
class Reference:
    """Log-probs of the frozen start policy for every entry of every row: [sum of trainable tokens] float32, row by
    row."""

    values: np.ndarray
    starts: np.ndarray
    per_row: int

    def of(self, i: int, k: int) -> np.ndarray:
        at = i * self.per_row + k
        return self.values[int(self.starts[at]) : int(self.starts[at + 1])]


async def reference_logprobs(
    stage: PreferenceStage,
    logprobs_of: LogprobsOf,
    *,
    model_dir: Path,
    dtype: str,
    cache_dir: str | None,
    note: Callable[[str], None],
    drivers: Drivers | None = None,
    start: str = "",
) -> Reference:
    """Compute the log-probs of the start weights once and keep them on disk, by the content of rows and weights; no
    reference model is needed later. start: what the start weights are made of, beside those of the folder · drivers:
    the drivers that compute them together if one of them has no copy."""
    path = cache_path(cache_dir, f"reference_{_key(stage, model_dir, dtype, start)}")
    found = load_cached(path)
    everywhere = drivers.gather(found is not None).result() if drivers else ()
    if found is not None and all(everywhere):
        note(f"reference log-probs: from {path}")
        return Reference(found[1]["values"], found[1]["starts"], int(found[0]["per_row"]))
    parts: list[np.ndarray] = []
    count = len(stage.table)
    for at in range(0, count, ROWS_AT_ONCE):
        rows = [(i, entry) for i in range(at, min(at + ROWS_AT_ONCE, count)) for entry in stage.entries(i)]
        parts += await logprobs_of(partial(_samples, rows))
    per_row = len(stage.entries(0))
    arrays = {
        "values": np.concatenate(parts).astype(np.float32),
        "starts": np.concatenate([[0], np.cumsum([len(p) for p in parts])]),
    }
    store_cached(path, {"per_row": per_row}, arrays)
    note(f"reference log-probs: computed for {len(parts)} answers, kept in {path}")
    return Reference(arrays["values"], arrays["starts"], per_row)


def _samples(rows: Sequence[tuple[int, tuple[float, Rendered]]], store: StoreImage) -> list[Sample]:
    return [sample_of(row, f"{i}/{k}", store, f"{i}") for k, (i, (_, row)) in enumerate(rows)]


def _key(stage: PreferenceStage, model_dir: Path, dtype: str, start: str) -> str:
    digest = hashlib.blake2b(f"{stage.table.key} {stage.paired} {dtype}{start}".encode(), digest_size=16)
    for image in (image for pair in stage.table.pairs for image in pair.chosen.images):
        digest.update(repr(image).encode())
    for file in sorted([*model_dir.glob("*.safetensors"), *model_dir.glob("*.bin"), model_dir / "config.json"]):
        with open(file, "rb") as stream:
            digest.update(file.name.encode() + hashlib.file_digest(stream, "blake2b").digest())
    return digest.hexdigest()


def sample_of(row: Rendered, name: str, store: StoreImage, group: str | None = None) -> Sample:
    """Return a conversation as a sample: supervised tokens are trainable, the others are context, with the images."""
    edges = np.flatnonzero(np.diff(row.mask.astype(np.int8))) + 1
    segments = []
    for a, b in zip([0, *edges], [*edges, len(row.ids)]):
        if row.mask[a]:
            segments.append(
                Segment(ids=row.ids[a:b], source="sampled", logprobs=np.zeros(b - a, np.float32), version=0)
            )
        else:
            media = tuple(Medium(store(i), i.start - int(a), i.tokens) for i in row.images if a <= i.start < b)
            segments.append(Segment(ids=row.ids[a:b], source="env" if a else "prompt", media=media))
    return Sample(
        sample_id=name,
        trajectory_id=name,
        group_id=group or name,
        purpose="train",
        segments=tuple(segments),
        reward=0.0,
    )


def scored_sample(row: Rendered, name: str, group: str, end: TurnEnd, store: StoreImage) -> Sample:
    """Return a row as context up to the position at which a reward model is read in RL too, and one more token for the
    score, since a value is computed from the token before its own. Its images are in the prompt."""
    first, behind = int(np.argmax(row.mask)), int(np.flatnonzero(row.mask)[-1]) + 1
    media = tuple(Medium(store(image), image.start, image.tokens) for image in row.images)
    prompt = Segment(ids=row.ids[:first], source="prompt", media=media)
    context = Sample(
        sample_id=name,
        trajectory_id=name,
        group_id=group,
        purpose="train",
        segments=(prompt, Segment(ids=row.ids[first:behind], source="env")),
        reward=0.0,
    )
    probe = Segment(ids=row.ids[-1:], source="sampled", logprobs=np.zeros(1, np.float32), version=0)
    return replace(context, segments=(*end.closed(context).segments, probe))


def _mismatched(pair: Pair, other: Pair) -> Rendered:
    """Return the prompt of one row with the answer of another row."""
    a, b = int(np.argmax(pair.chosen.mask)), int(np.argmax(other.chosen.mask))
    return Rendered(
        np.concatenate([pair.chosen.ids[:a], other.chosen.ids[b:]]),
        np.concatenate([pair.chosen.mask[:a], other.chosen.mask[b:]]),
        images=pair.chosen.images,
    )


def _constant(samples: Sequence[Sample], facts: Sequence[Mapping[str, Any]]) -> StageColumns:
    counts = torch.tensor([s.loss_tokens for s in samples])
    return (
        {n: torch.tensor([f[n] for f in facts], dtype=torch.float64).repeat_interleave(counts) for n in facts[0]}
        if facts
        else {}
    )
