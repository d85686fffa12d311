"""One division: masks become weight columns before the first micro-batch of an optimizer step. After it the engine only
sums weight x value, so micro-batches, packing, order and layout change nothing but rounding."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from verl.algorithms.specs import AGGREGATIONS
from verl.batch import Columns, segment_sum
from verl.errors import Refused
from verl.objective import Term


def weight_column(
    columns: Columns,
    aggregate: str,
    *,
    unit: str = "token",
    horizon_tokens: int | None = None,
    denominator_mask: Tensor | None = None,
) -> Tensor:
    """Weights [L] (unit token) or [S] (unit sequence), float64, 0 outside the mask. N counts valid tokens, S the
    sequences with at least one, of the same mask as the numerator; `denominator_mask` [L] counts them on another mask
    (denominator=before_rejection). No valid token: all weights 0. A sequence with k `copies` counts as k sequences."""
    if aggregate not in AGGREGATIONS:
        raise Refused(f"aggregation {aggregate!r} is unknown; known: {', '.join(AGGREGATIONS)}")
    counted = columns.mask if denominator_mask is None else denominator_mask
    copies = columns.sequence.get("copies", torch.ones(columns.num_sequences, dtype=torch.float64))  # [S]
    mask = columns.mask * copies[columns.sequence_of]
    n = segment_sum(counted.double(), columns.sequence_of, columns.num_sequences)  # [S], of one copy
    sequences = (copies * (n > 0)).sum().clamp(min=1)
    if unit == "sequence":
        present = (columns.counts() > 0) * copies
        return present / (sequences if aggregate.startswith("seq-mean") or aggregate == "token-mean" else 1)
    if aggregate == "token-mean":
        return mask / (copies * n).sum().clamp(min=1)
    if aggregate == "token-sum":
        return mask
    if aggregate == "seq-mean-token-sum":
        return mask / sequences
    if aggregate == "seq-mean-token-mean":
        return mask / (sequences * n.clamp(min=1)[columns.sequence_of])
    if horizon_tokens is None:
        fix = "set algorithm.horizon_tokens (Dr.GRPO: the maximum response length)"
        raise Refused(f"{aggregate} needs a constant horizon, which no micro-batch's padded width is: {fix}")
    return mask / (sequences * horizon_tokens)


def term_weights(columns: Columns, terms: tuple[Term, ...]) -> dict[str, Tensor]:
    """`w/TERM` of every term, its coefficient included: [L] for unit token, [S] for unit sequence. And `m/TERM`, the
    mask that a term of unit token sees [L]: a token that weighs 0 (IcePop) is still part of its sequence's ratio."""
    out, kept = {}, columns
    if "keep" in columns:  # tokens that an off-policy correction rejected are in no loss
        kept = replace(columns, mask=columns.mask & columns["keep"].bool())
    for term in terms:
        over = None if term.over is None else columns.sequence[term.over].bool()[columns.sequence_of]
        seen, every = kept, columns.mask
        if over is not None:
            seen, every = replace(kept, mask=kept.mask & over), every & over
        if "taught" in columns.sequence and any(name.startswith("teacher_") for name in term.inputs):
            taught = columns.sequence["taught"][columns.sequence_of]
            seen, every = replace(seen, mask=seen.mask & taught), every & taught
        counted = every if term.denominator == "before_rejection" else None
        weight = weight_column(
            seen, term.aggregate, unit=term.unit, horizon_tokens=term.horizon_tokens, denominator_mask=counted
        )
        if term.corrected != "no" and "is_weights" in columns:  # importance weights of a rollout correction
            assert term.unit == "token"
            weight = weight * _importance(seen, geometric=term.corrected == "geometric")
        out[f"w/{term.name}"] = term.coef * weight
        if term.unit == "token":
            out[f"m/{term.name}"] = every if term.sees_rejected else seen.mask
    return out


def _importance(columns: Columns, *, geometric: bool) -> Tensor:
    """[L] the column `is_weights` in the mask; geometric: their geometric mean in the sequence (0 with a 0)."""
    weight = torch.where(columns.mask, columns["is_weights"].double(), 0.0)
    if not geometric:
        return weight
    logs = columns.mean(torch.where(columns.mask, weight, 1.0).log())
    return torch.where(columns.mask, logs.exp()[columns.sequence_of], 0.0)


def check_finite(columns: Columns, names: tuple[str, ...]) -> None:
    """Raise a ValueError naming the first sequence with a NaN or infinity inside the mask."""
    for name in names:
        bad = columns.mask & ~torch.isfinite(columns[name].reshape(len(columns.mask), -1)).all(-1)
        if bad.any():
            at = int(torch.nonzero(bad)[0, 0])
            where = f"at trainable token {at} of sequence {int(columns.sequence_of[at])} ({int(bad.sum())} such tokens)"
            prefix = "the model or the sampler produced a non-finite number"
            raise ValueError(f"{name} is {columns[name][at].tolist()} {where}: {prefix}")
