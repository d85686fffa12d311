"""The engine's only reduction: sum over terms of sum(w * value), per micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from verl.accel.transfer import to_device
from verl.batch import Batch, Columns, concat, roots_of
from verl.model_engine.base import Ranks
from verl.model_engine.pending import Pending, PendingMetric, read_pending, reduced
from verl.objective import Term, TermValue
from verl.types import Metrics, Unit


def surrogate(output: str) -> Term:
    """Return the term that takes the place of a two-pass term in the second pass: sum(dL/doutput * output), with
    dL/doutput as its weights."""
    return Term(name=f"two_pass/{output}", fn=partial(_output, name=output), outputs=(output,), silent=True)


def _output(columns: Columns, *, name: str) -> TermValue:
    return TermValue(columns[name])


def before_moving(term: Term) -> Term:
    """Return the term for the first update after the pass that computed `old_logprobs`: the policy is still the same,
    so its own log-probs replace `old_logprobs`. The ratio is then exactly 1, whatever the rounding of the two
    passes."""
    return replace(term, fn=partial(_before_moving, fn=term.fn))


def _before_moving(columns: Columns, *, fn: Callable[[Columns], TermValue]) -> TermValue:
    if "old_logprobs" in columns and "logprobs" in columns:
        columns = columns.with_token({"old_logprobs": columns["logprobs"].detach()})
    return fn(columns)


def evaluate_terms(terms: Sequence[Term], batch: Batch, outputs: Mapping[str, Tensor]) -> tuple[Tensor, Metrics]:
    """Return the sum over terms of sum(w * value), and the metrics of the terms, which are read from the device."""
    loss, pending = reduce_terms(terms, batch, outputs)
    return loss, read_pending([pending])


def reduce_terms(terms: Sequence[Term], batch: Batch, outputs: Mapping[str, Tensor]) -> tuple[Tensor, Pending]:
    """Return the sum over terms of sum(w * value), and the metrics of the terms. This is the engine's only reduction,
    and it never waits for the device.

    The mask of a term is its column `m/TERM`; without that column it is True where the weight is not 0. Inputs outside
    the mask are replaced before any arithmetic."""
    device = next(iter(outputs.values())).device
    sequence_of = to_device(batch.sequence_of, device)
    total = next(iter(outputs.values()))[:0].sum()  # 0, with a graph for the backward pass even if no term has a token
    metrics: dict[str, PendingMetric] = {}
    sent = {name: to_device(column, device) for name, column in batch.columns.items()}
    for term in terms:
        if term.unit != "sequence":
            weight, seen = sent[f"w/{term.name}"], sent.get(f"m/{term.name}")
            mask = weight != 0 if seen is None else seen.bool()
        else:
            weight, mask = _sequence_weight(batch, term.name, device)
        columns = Columns(
            token={**sent, **outputs},
            sequence=_teachers(batch, device),
            sequence_of=sequence_of,
            num_sequences=batch.num_sequences,
            mask=mask,
        )
        value = term.fn(columns.cleaned())
        if term.unit != "sequence":
            inside, present = torch.where(mask, value.values, 0.0), mask
        else:
            present = weight != 0
            inside = torch.where(present, value.values, 0.0)
        loss = (weight * inside.to(weight.dtype)).sum()
        total = total + loss
        if not term.silent:
            metrics[term.name] = PendingMetric(loss.detach(), 1.0, "update", "sum")
        metrics |= _term_metrics(value, present, "sequence" if term.unit == "sequence" else "token")
    return total, metrics


def trained_rows(batch: Batch, terms: Sequence[Term]) -> np.ndarray:
    """Return [R] bool: False for the rows on whose outputs the loss does not depend, as those of groups in which all
    advantages are 0. Rows that share their first segment have the same value, since they are computed together. Where
    the loss depends on no row at all, all are True: the gradient is then 0, and not missing."""
    sequences = np.zeros(batch.num_sequences, bool)
    for term in terms:
        if term.unit == "sequence":
            weighed = _sequence_weight(batch, term.name, torch.device("cpu"))[1]
        else:
            weighed = batch.columns[f"w/{term.name}"] != 0
        if term.scaled_by is not None:
            weighed = weighed & (batch.columns[term.scaled_by] != 0)
        sequences[batch.sequence_of[weighed].numpy()] = True
    roots = roots_of(batch)
    shared = np.zeros(len(batch.parent), bool)
    shared[roots[sequences[batch.sequence]]] = True
    return shared[roots] if shared.any() else np.ones(batch.num_rows, bool)


def first_pass(
    batch: Batch, terms: Sequence[Term], outputs: Mapping[str, Tensor], ranks: Ranks
) -> tuple[Batch, list[Term], Metrics]:
    """Evaluate the two-pass terms, which have statistics over the whole optimizer step, under the current policy on the
    rows of all ranks, and use dL/doutput as the weights of the second pass. Exact on every layout.

    outputs: the outputs that these terms name, for this rank's rows. Return the batch with the weights, the terms of
    the second pass, and the metrics of the whole step (from the first rank only, so that they are counted once)."""
    parts = ranks.all_gather(batch.with_columns({f"out/{n}": v.double() for n, v in outputs.items()}))
    step = concat(parts)
    leaves = {n: step.columns[f"out/{n}"].requires_grad_() for n in outputs}
    loss, metrics = evaluate_terms([t for t in terms if t.two_pass], step, leaves)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    start = sum(p.num_loss_tokens for p in parts[: ranks.rank])
    second: list[Term] = []
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        term = surrogate(name)
        weight = torch.zeros_like(leaf) if grad is None else grad
        batch = batch.with_columns({f"w/{term.name}": weight[start : start + batch.num_loss_tokens].detach()})
        second.append(term)
    return batch, [t for t in terms if not t.two_pass] + second, metrics if ranks.rank == 0 else {}


def _teachers(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """Return {row column of a teacher: [S] bool, True for the sequences of this teacher}; empty without several
    teachers."""
    index, out = to_device(batch.sequence, device), {}
    for name, rows in batch.row_columns.items():
        if name.startswith("teacher/"):
            out[name] = torch.zeros(batch.num_sequences, dtype=torch.bool, device=device)
            out[name][index] = to_device(rows, device)
    return out


def _sequence_weight(batch: Batch, name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (weight [S], mask [L]) of a sequence-unit term; the row column has the weight at each trajectory's first
    row."""
    per_row = to_device(batch.row_columns[f"w/{name}"], device)
    index = to_device(batch.sequence, device)
    weight = torch.zeros(batch.num_sequences, dtype=per_row.dtype, device=device).index_add(0, index, per_row)
    mask = (weight != 0)[to_device(batch.sequence_of, device)]
    if "mask" in batch.columns:
        mask = mask & to_device(batch.columns["mask"], device).bool()
    return weight, mask


def _term_metrics(found: TermValue, present: Tensor, unit: Unit) -> Pending:
    out: dict[str, PendingMetric] = {}
    for name, (values, kind) in found.metrics.items():
        mask = present & found.where[name] if name in found.where else present
        out[name] = reduced(values, mask, kind, unit)
    return out
