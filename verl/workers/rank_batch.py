"""Batches of a rank: the rows of its part of an optimizer step, and rows that a teacher reads with another prompt."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from verl.batch import Batch, pack, without_weight
from verl.objective import Term
from verl.observed import OBSERVED, around, observed
from verl.transfer_queue.base import TransferQueue
from verl.transfer_queue.rows import queued_samples
from verl.types import LEARNED, ROUTES, Refs, Sample, Segment


@dataclass(frozen=True, slots=True)
class RankStep:
    """One rank's part of one optimizer step."""

    refs: Refs  # The rank's rows.
    num_microbatches: int = 0
    weights: str = ""  # The suffix of the columns `w/TERM` of this step.
    record: bool = False  # The outputs of this pass are written as columns.
    first: bool = False  # No update happened before this step (`OptimizerStep.first`).
    idle: bool = False  # The rank has no rows: its one row is a placeholder with weight 0.


def batch_of_step(
    queue: TransferQueue,
    step: RankStep,
    terms: Sequence[Term],
    inputs: Sequence[str],
    *,
    share_prefix: bool,
    without: Collection[str] = (),
) -> Batch:
    """Return the rows of a rank's part of an optimizer step, packed, with the columns that the terms read: the stored
    `inputs`, the weights and the masks of each term. without: the side channels that are not read."""
    samples, of = queued_samples(queue, step.refs, without), {t.name: t.unit for t in terms}
    watching = [name for name, unit in of.items() if unit == "observation"]
    if watching:
        samples = [observed(s) for s in samples]
    batch = pack(samples, share_prefix=share_prefix)
    weights = {t.name: f"w/{t.name}{step.weights}" for t in terms}
    stored = [name for name in inputs if name not in batch.columns]
    masks = [f"m/{t.name}" for t in terms if t.unit == "token"]
    found = queue.read(step.refs, [*stored, *weights.values(), *masks, "loss_mask"])
    token = {name: found[name].values for name in stored} | {"mask": found["loss_mask"].values}
    token |= {f"w/{n}": found[column].values for n, column in weights.items() if of[n] == "token"}
    token |= {name: found[name].values for name in masks}
    if watching:
        seen = batch.columns["versions"] == OBSERVED
        token = {name: around(column, ~seen) for name, column in token.items()}
        token |= {f"w/{name}": around(found[weights[name]].values, seen) for name in watching}
    rows = {f"w/{t.name}": found[weights[t.name]].values for t in terms if t.unit == "sequence"}
    # a two-pass batch concatenates the rows of all ranks, which have different teachers
    if not any(t.two_pass for t in terms):
        for name in sorted({s.teacher for s in samples} - {""}):
            rows[f"teacher/{name}"] = torch.tensor([s.teacher == name for s in samples])
    batch = batch.with_columns(token).with_row_columns(rows)
    return without_weight(batch) if step.idle else batch


def informed(sample: Sample) -> Sample:
    """Return the row with its context in place of its prompt. All later tokens stay the same."""
    if sample.context is None:
        return sample
    left, rest = int(sample.context[0]), list(sample.segments)
    while left:  # a prompt that begins a longer history ends inside of a segment
        first = rest.pop(0)
        assert first.source not in LEARNED, "a context stands for a prompt"
        if len(first.ids) > left:
            rest.insert(0, Segment(ids=first.ids[left:], source="env"))
        left -= min(left, len(first.ids))
    # routes are of the tokens before
    rest = [replace(s, side={name: s.side[name] for name in s.side if name != ROUTES}) for s in rest]
    found = replace(sample, segments=(Segment(ids=sample.context[1:], source="prompt"), *rest))
    before, after = (np.concatenate([s.ids for s in x.segments if s.source in LEARNED]) for x in (sample, found))
    assert np.array_equal(before, after) and found.loss_tokens == sample.loss_tokens
    return found
