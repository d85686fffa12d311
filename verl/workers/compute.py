"""The worker without a model. It computes functions of the columns of a whole step: corrections, advantages, and the
weights that turn every loss into a plain sum. They are computed once, over all rows of an optimizer step, and the ranks
read them as columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.corrections import mismatch_metrics
from verl.algorithms.weights import check_finite, term_weights
from verl.batch import Columns, Ragged
from verl.errors import Refused
from verl.model_engine.base import Ranks
from verl.objective import Term
from verl.transfer_queue.base import TransferQueue
from verl.transfer_queue.rows import observed_tokens, read_tokens
from verl.types import Facts, Metric, Metrics, Refs

Computed = Mapping[str, Tensor | Metric]
"""The result of a `compute` function: columns [L] and metrics by name."""


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """All rows of one optimizer step."""

    refs: Refs  # All its rows.
    weights: str = ""  # The suffix of the columns `w/TERM` with its weights.
    recorded: bool = False  # Its outputs are written as columns.
    first: bool = False  # No update happened between the column `old_logprobs` and this step.


class Compute:
    """The worker that needs no model. `ComputeWorker` is its typed interface for the driver."""

    def __init__(self, queue: TransferQueue) -> None:
        self.queue = queue

    def compute(
        self, refs: Refs, fn: Callable[[Columns], Computed], inputs: Sequence[str], outputs: Sequence[str]
    ) -> Metrics:
        """Run a pure function over the training rows' columns of the whole step and write its outputs.

        Baseline rows among `refs` are visible only through the sequence column `baseline`.
        """
        baselines = _baseline_scores(refs)
        refs = refs.of("train")
        # a copy, because `fn` may be user code
        token = {n: c.values.clone() for n, c in read_tokens(self.queue, refs, inputs).items()}
        columns = step_columns(refs, token, baselines)
        check_finite(columns, tuple(inputs))
        found = fn(columns)
        written = {name: _token_column(found, name, len(columns.mask)) for name in outputs}
        offsets = np.cumsum([0, *(r.loss_tokens for r in refs)], dtype=np.int64)
        self.queue.write(refs, {name: Ragged(value, offsets) for name, value in written.items()})
        metrics = {name: value for name, value in found.items() if isinstance(value, Metric)}
        return {**metrics, **_advantage_metrics(columns, found)}

    def weigh(self, steps: Sequence[OptimizerStep], terms: tuple[Term, ...], inputs: Sequence[str]) -> None:
        """Write the columns `w/TERM`, `m/TERM` (defined in `term_weights`) and `loss_mask` for the rows of each
        optimizer step. All denominators are those of the whole step.

        A NaN or infinity in one of `inputs` is refused here, before the first gradient.
        """
        for step in steps:
            refs = step.refs
            optional = [n for n in ("is_weights", "keep") if refs and self.queue.having(refs, n) == refs]
            found = read_tokens(self.queue, refs, tuple(dict.fromkeys([*inputs, *optional])))
            columns = step_columns(refs, {n: c.values for n, c in found.items()})
            check_finite(columns, tuple(n for n, c in found.items() if c.values.is_floating_point()))
            inside, observing = (tuple(t for t in terms if (t.unit == "observation") == o) for o in (False, True))
            weights = term_weights(columns, inside)
            offsets = np.cumsum([0, *(r.loss_tokens for r in refs)], dtype=np.int64)
            written = {"loss_mask": Ragged(columns.mask, offsets)}
            names: dict[str, tuple[int, int]] = {}  # trajectory -> (its number, its first row)
            placed = [names.setdefault(r.trajectory_id, (len(names), i)) for i, r in enumerate(refs)]
            sequence = torch.tensor([number for number, _ in placed])
            first = torch.tensor([row == i for i, (_, row) in enumerate(placed)])
            if observing:
                rows = self.queue.read(refs, ("segments",))["segments"].rows()
                counts = [observed_tokens(row.numpy()) for row in rows]
                of_env, at = term_weights(step_columns(refs, {}, counts=counts), observing), np.cumsum([0, *counts])
                written |= {f"w/{t.name}{step.weights}": Ragged(of_env[f"w/{t.name}"], at) for t in observing}
            for term in inside:
                weight, at = weights[f"w/{term.name}"], offsets
                if term.unit == "sequence":  # the weight of a trajectory is in its first row
                    weight = torch.where(first, weight[sequence], 0.0)
                    at = np.arange(len(refs) + 1, dtype=np.int64)
                else:
                    written[f"m/{term.name}"] = Ragged(weights[f"m/{term.name}"], offsets)
                written[f"w/{term.name}{step.weights}"] = Ragged(weight, at)
            self.queue.write(refs, written)

    def mismatch(self, refs: Refs, column: str) -> Metrics:
        """Compare the trainer's log-probs of the sampled tokens with the sampler's, over the rows with a valid
        reward."""
        found = self.queue.read(refs, (column, "rollout_logprobs"))
        columns = step_columns(refs, {n: c.values for n, c in found.items()})
        return mismatch_metrics(columns[column], columns["rollout_logprobs"], columns.mask)


def build_compute(queue: TransferQueue, *, ranks: Sequence[Ranks]) -> list[Compute]:
    """Build the workers without a model (`group.Build`)."""
    return [Compute(queue) for _ in ranks]


def step_columns(
    refs: Refs,
    token: Mapping[str, Tensor],
    baselines: Mapping[str, float] | None = None,
    *,
    counts: Sequence[int] | None = None,
) -> Columns:
    """Return the columns of these rows as `Columns`. The mask has the tokens of rows with a valid reward, and those of
    stored answers, which have no reward. counts: the number of tokens of each row; None: its loss tokens.

    Sequence columns [S]: `score`, `group`, `valid`, `positive` (a valid score above 0), `truncated` (by the budget),
    `baseline` (mean score of the group's baseline trajectories) if given, and the facts that have a column
    (`fact_columns`): `component/NAME`, `teacher/NAME`, `taught`, `copies`."""
    sequence_names: dict[str, int] = {}
    group_names: dict[str, int] = {}
    sequence = [sequence_names.setdefault(r.trajectory_id, len(sequence_names)) for r in refs]
    s = len(sequence_names)

    def column(values: Iterable[float | bool], dtype: type) -> Tensor:
        out: np.ndarray = np.zeros(s, dtype)
        out[sequence] = list(values)
        return torch.from_numpy(out)

    valid = column((r.outcome == "ok" and (r.stored or r.reward == r.reward) for r in refs), np.bool_)
    score = torch.where(valid, column((r.reward if r.reward == r.reward else 0.0 for r in refs), np.float64), 0.0)
    group = column((group_names.setdefault(r.group_id, len(group_names)) for r in refs), np.int64)
    extra = {"positive": valid & (score > 0), "truncated": column((r.truncated for r in refs), np.bool_)}
    extra |= {name: column(values, dtype) for name, (values, dtype) in fact_columns(refs).items()}
    if baselines:
        extra["baseline"] = column((baselines[r.group_id] for r in refs), np.float64)
    lengths = np.array([r.loss_tokens for r in refs] if counts is None else counts, np.int64)
    sequence_of = torch.from_numpy(np.repeat(np.array(sequence, np.int64), lengths))
    return Columns(
        token=token,
        sequence={"score": score, "group": group, "valid": valid, **extra},
        sequence_of=sequence_of,
        num_sequences=s,
        mask=valid[sequence_of],
    )


def fact_columns(refs: Refs) -> dict[str, tuple[Sequence[float | bool], type]]:
    """Return the columns of the facts that algorithms may read: name -> (one value per row, dtype). A fact that has its
    default in all rows is left out. A text becomes one bool column NAME/TEXT per text, a mapping one column NAME/KEY
    per key (NaN without the key)."""
    out: dict[str, tuple[Sequence[float | bool], type]] = {}
    for fact in fields(Facts):
        values = [getattr(r, fact.name) for r in refs]
        if not (name := fact.metadata.get("column", "")) or all(value == fact.default for value in values):
            continue
        if isinstance(values[0], Mapping):
            for key in sorted({key for value in values for key in value}):
                out[f"{name}/{key}"] = ([value.get(key, float("nan")) for value in values], np.float64)
        elif isinstance(values[0], str):
            for text in sorted({*values} - {fact.default}):
                out[f"{name}/{text}"] = ([value == text for value in values], np.bool_)
        else:
            out[name] = (values, np.bool_ if isinstance(fact.default, bool) else np.float64)
    return out


def _baseline_scores(refs: Refs) -> dict[str, float]:
    """Return the mean score of each group's baseline trajectories. All of them have a score: groups with a failed
    baseline are not selected (play.py)."""
    return {g: sum(r.reward for r in rows) / len(rows) for g, rows in refs.of("baseline").groups().items()}


def _token_column(found: object, name: str, num_tokens: int) -> Tensor:
    """Return one output of a `compute` function, which may be user code. Raise Refused unless it is a tensor with one
    value per trainable token of the step."""
    value = found.get(name) if isinstance(found, Mapping) else None
    if not isinstance(value, Tensor):
        given = sorted(map(str, found)) if isinstance(found, Mapping) else f"a {type(found).__name__}"
        raise Refused(f"the function must return {{{name!r}: tensor [{num_tokens}]}}; it returned {given}")
    if value.dim() == 0 or len(value) != num_tokens:
        raise Refused(
            f"{name} has shape {list(value.shape)}; it needs one value for each of {num_tokens} trainable tokens"
        )
    return value


def _advantage_metrics(columns: Columns, found: Computed) -> Metrics:
    out: Metrics = {}
    for name in ("advantages", "returns", "values"):
        value = columns.token.get("old_values") if name == "values" else found.get(name)
        if isinstance(value, Tensor) and len(value) == len(columns.mask) and columns.mask.any():
            x = value[columns.mask].double()
            out[f"critic/{name}/mean"] = Metric(float(x.sum()), float(len(x)), "token")
            out[f"critic/{name}/max"] = Metric(float(x.max()), 1, "token", "max")
            out[f"critic/{name}/min"] = Metric(float(x.min()), 1, "token", "min")
    return out
