"""A role per rank: engine (or none) + queue + algorithm functions. The only one that turns Refs into Batches and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.corrections import mismatch_metrics
from verl.algorithms.weights import check_finite, term_weights
from verl.batch import Batch, Columns, Ragged, pack
from verl.model_engine.base import ModelEngine
from verl.model_engine.objective import evaluate_terms
from verl.objective import Term
from verl.transfer_queue.base import TransferQueue
from verl.types import Metric, Metrics, Refs, Sample, Segment, merge_metrics, ref_of
from verl.weight_sync.base import Snapshot, take_snapshot

Computed = Mapping[str, Tensor | Metric]
"""What a `compute` function returns: columns [L] by name, and metrics by theirs."""


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """The optimizer steps of one step: rows of each, the terms, stored columns that terms may use if present, and model
    outputs to record beside those of the terms."""

    updates: tuple[Refs, ...]
    terms: tuple[Term, ...]
    optional: tuple[str, ...] = ("old_logprobs", "is_weights", "keep")
    also: tuple[str, ...] = ("logprobs", "entropy")


class Role:
    """One model's worker: policy, reference, critic or (engine None) the CPU role of advantages."""

    def __init__(
        self, name: str, queue: TransferQueue, engine: ModelEngine | None = None, *, share_prefix: bool = True
    ) -> None:
        self.name = name
        self.queue = queue
        self.engine = engine
        self.share_prefix = share_prefix

    def infer(self, refs: Refs, outputs: Mapping[str, str]) -> Metrics:
        """Compute model outputs of the rows and write them: {output: column}, e.g. {"logprobs": "old_logprobs"}."""
        assert self.engine is not None
        batch = pack(self.queue.samples(refs), share_prefix=self.share_prefix)
        found = self.engine.infer(batch, tuple(outputs))
        per_row = np.arange(batch.num_rows + 1, dtype=np.int64)  # scores [R]; everything else is per loss token
        starts = {name: per_row if name == "scores" else batch.row_start for name in outputs}
        self.queue.write(refs, {column: Ragged(found[name], starts[name]) for name, column in outputs.items()})
        if outputs.get("logprobs") == "old_logprobs":
            return mismatch_metrics(found["logprobs"], batch.columns["rollout_logprobs"], _valid(refs, batch))
        return {}

    def compute(
        self, refs: Refs, fn: Callable[[Columns], Computed], inputs: Sequence[str], outputs: Sequence[str]
    ) -> Metrics:
        """Run a pure function over the training rows' columns of the whole step and write its outputs.

        Baseline rows among `refs` are seen through the sequence column `baseline` only."""
        baselines = _baseline_scores(refs)
        refs = refs.of("train")
        stored = [n for n in inputs if n != "rollout_logprobs"]
        token = {n: c.values for n, c in self.queue.read(refs, stored).items()} if stored else {}
        if "rollout_logprobs" in inputs:
            token["rollout_logprobs"] = pack(self.queue.samples(refs)).columns["rollout_logprobs"]
        columns = columns_of(refs, token, baselines)
        check_finite(columns, tuple(inputs))
        found = fn(columns)
        written = {name: _token_column(found, name, len(columns.mask)) for name in outputs}
        offsets = np.concatenate([[0], np.cumsum([r.loss_tokens for r in refs])]).astype(np.int64)
        self.queue.write(refs, {name: Ragged(value, offsets) for name, value in written.items()})
        metrics = {name: value for name, value in found.items() if isinstance(value, Metric)}
        return {**metrics, **_advantage_metrics(columns, found)}

    def update(self, plan: UpdatePlan) -> Metrics:
        """The optimizer steps of one step. The first pass's log-probs and entropies are written as `train_*` columns."""
        assert self.engine is not None
        needed = tuple(dict.fromkeys(n for t in plan.terms for n in t.inputs if n != "rollout_logprobs"))
        prefix = f"{self.name}/"
        parts: list[Metrics] = []
        seen: set[str] = set()
        for refs in plan.updates:
            samples = self.queue.samples(refs)
            found = self.queue.read(refs, [*needed, *(n for n in plan.optional if self.queue.having(refs, n) == refs)])
            batch = self._batch(refs, samples, {n: c.values for n, c in found.items()}, plan.terms)
            result = self.engine.forward_backward(batch, plan.terms, plan.also)
            parts += [_prefixed(result.metrics, prefix), _prefixed(self.engine.optim_step(), prefix)]
            if "logprobs" in plan.also and not seen & set(refs.ids):
                parts.append(self._record(refs, batch, result.columns, first="old_logprobs" not in found))
                seen |= set(refs.ids)
        return merge_metrics(parts)

    def fit(self, samples: list[Sample], columns: Mapping[str, Tensor], terms: tuple[Term, ...]) -> Metrics:
        """One supervised optimizer step on these rows with their columns [L]; no queue in between."""
        assert self.engine is not None
        batch = self._batch(Refs(ref_of(s) for s in samples), samples, columns, terms)
        result = self.engine.forward_backward(batch, terms)
        return {**_prefixed(result.metrics, "train/"), **_prefixed(self.engine.optim_step(), "train/")}

    def score(self, refs: Refs, coef: float, alone: bool) -> Refs:
        """The refs with the reward model's score: coef x it, added to the reward unless it is `alone` the reward.

        The queue's samples change with them; a sample whose own reward is invalid stays so."""
        assert self.engine is not None
        samples = self.queue.samples(refs)
        found = (
            self.engine.infer(pack(samples, share_prefix=self.share_prefix), ("scores",))["scores"].double().tolist()
        )
        scored = []
        for sample, value in zip(samples, found, strict=True):
            parts = (
                {"reward_model": value}
                if alone
                else {"function": sample.reward, **sample.components, "reward_model": value}
            )
            scored.append(replace(sample, reward=coef * value + (0.0 if alone else sample.reward), components=parts))
        self.queue.drop(refs)
        return self.queue.put(scored)

    def score_rows(self, rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[float]:
        """The reward model's score of each (prompt ids, response ids)."""
        assert self.engine is not None
        samples = [
            Sample(
                sample_id=str(i),
                trajectory_id=str(i),
                group_id=str(i),
                purpose="train",
                segments=(Segment(ids=prompt, source="prompt"), Segment(ids=response, source="env")),
            )
            for i, (prompt, response) in enumerate(rows)
        ]
        return self.engine.infer(pack(samples, share_prefix=self.share_prefix), ("scores",))["scores"].double().tolist()

    def measure(self, samples: list[Sample], columns: Mapping[str, Tensor], terms: tuple[Term, ...]) -> Metrics:
        """Loss and metrics of the terms on these rows, without a step."""
        assert self.engine is not None
        batch = self._batch(Refs(ref_of(s) for s in samples), samples, columns, terms)
        outputs = self.engine.infer(batch, tuple(dict.fromkeys(n for t in terms for n in t.outputs)))
        with torch.no_grad():
            _, found = evaluate_terms(terms, batch, {n: v.double() for n, v in outputs.items()})
        unit, count = (
            ("token", batch.num_loss_tokens)
            if all(t.unit == "token" for t in terms)
            else ("sequence", batch.num_sequences)
        )
        losses = {t.name: Metric(found[t.name].total * count, float(count), unit) for t in terms}  # type: ignore[arg-type]
        return {**found, **losses}

    def logprobs(self, samples: list[Sample]) -> list[np.ndarray]:
        """Log-probs of the trainable tokens of each row, float32."""
        assert self.engine is not None
        batch = pack(samples, share_prefix=self.share_prefix)
        found = self.engine.infer(batch, ("logprobs",))["logprobs"].float().numpy()
        return [found[int(a) : int(b)] for a, b in zip(batch.row_start[:-1], batch.row_start[1:])]

    def snapshot(self, version: int, probes: Sequence[np.ndarray], copy: bool) -> Snapshot:
        """The weights as of now, with manifest and probe log-probs, for the checkpoint engine."""
        assert self.engine is not None
        return take_snapshot(self.engine, version, probes, copy=copy)

    def state(self) -> dict[str, Any]:
        assert self.engine is not None
        return self.engine.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        assert self.engine is not None
        self.engine.load_state(state)

    def call(self, fn: Callable[[ModelEngine], Any]) -> Any:
        """Run `fn` on the engine in this worker's order (export, inspection)."""
        assert self.engine is not None
        return fn(self.engine)

    # -- private -----------------------------------------------------------------------------------------------------

    def _batch(
        self, refs: Refs, samples: list[Sample], columns: Mapping[str, Tensor], terms: tuple[Term, ...]
    ) -> Batch:
        batch = pack(samples, share_prefix=self.share_prefix).with_columns(columns)
        layout = columns_of(refs, columns)
        check_finite(layout, tuple(n for n in columns if columns[n].is_floating_point()))
        weights = term_weights(layout, terms)
        token = {f"w/{t.name}": weights[f"w/{t.name}"] for t in terms if t.unit == "token"}
        first = {int(s): r for r, s in reversed(list(enumerate(batch.sequence)))}
        rows = {}
        for term in terms:
            if term.unit == "sequence":
                per_row = torch.zeros(batch.num_rows, dtype=torch.float64)
                per_row[list(first.values())] = weights[f"w/{term.name}"][list(first)]
                rows[f"w/{term.name}"] = per_row
        return batch.with_columns({**token, "mask": layout.mask}).with_row_columns(rows)

    def _record(self, refs: Refs, batch: Batch, columns: Mapping[str, Tensor], *, first: bool) -> Metrics:
        mask = batch.columns["mask"].bool()
        kept = {f"train_{n}": Ragged(c, batch.row_start) for n, c in columns.items() if n in ("logprobs", "entropy")}
        self.queue.write(refs, kept)
        entropy = columns["entropy"][mask].double()
        out: Metrics = {"actor/entropy": Metric(float(entropy.sum()), float(len(entropy)), "token")}
        if first:  # no old_logprobs pass: this is the trainer's view of the tokens before any update
            out |= mismatch_metrics(columns["logprobs"], batch.columns["rollout_logprobs"], mask)
        return out


def columns_of(refs: Refs, token: Mapping[str, Tensor], baselines: Mapping[str, float] | None = None) -> Columns:
    """The layout of these rows; mask = tokens of rows with a valid reward.

    Sequence columns [S]: `score`, `group`, `valid`, `positive` (a valid score above 0), `component/NAME` of dict rewards
    (NaN where a reward had none), and `baseline` (mean score of the group's baseline trajectories) where given.
    """
    sequence_names: dict[str, int] = {}
    group_names: dict[str, int] = {}
    sequence = [sequence_names.setdefault(r.trajectory_id, len(sequence_names)) for r in refs]
    s = len(sequence_names)

    def column(values: Iterable[float | bool], dtype: type) -> Tensor:
        out: np.ndarray = np.zeros(s, dtype)
        out[sequence] = list(values)
        return torch.from_numpy(out)

    valid = column((r.outcome == "ok" and r.reward == r.reward for r in refs), np.bool_)
    score = torch.where(valid, column((r.reward for r in refs), np.float64), 0.0)
    group = column((group_names.setdefault(r.group_id, len(group_names)) for r in refs), np.int64)
    extra = {"positive": valid & (score > 0)}
    for name in sorted({name for r in refs for name in r.components}):
        extra[f"component/{name}"] = column((r.components.get(name, float("nan")) for r in refs), np.float64)
    if baselines:
        extra["baseline"] = column((baselines[r.group_id] for r in refs), np.float64)
    counts = np.array([r.loss_tokens for r in refs], np.int64)
    sequence_of = torch.from_numpy(np.repeat(np.array(sequence, np.int64), counts))
    return Columns(
        token=token,
        sequence={"score": score, "group": group, "valid": valid, **extra},
        sequence_of=sequence_of,
        num_sequences=s,
        mask=valid[sequence_of],
    )


def _baseline_scores(refs: Refs) -> dict[str, float]:
    """Mean score of each group's baseline trajectories; a group with a broken baseline was never selected (play.py)."""
    return {g: sum(r.reward for r in rows) / len(rows) for g, rows in refs.of("baseline").groups().items()}


def _valid(refs: Refs, batch: Batch) -> Tensor:
    ok = torch.tensor([r.outcome == "ok" and r.reward == r.reward for r in refs])
    return ok[batch.row_of]


def _token_column(found: object, name: str, num_tokens: int) -> Tensor:
    """The output of a `compute` function, which may be a user's own: one value per trainable token of the step."""
    value = found.get(name) if isinstance(found, Mapping) else None
    if not isinstance(value, Tensor):
        given = sorted(map(str, found)) if isinstance(found, Mapping) else f"a {type(found).__name__}"
        raise ValueError(f"the function must return {{{name!r}: tensor [{num_tokens}]}}; it returned {given}")
    if value.dim() == 0 or len(value) != num_tokens:
        raise ValueError(
            f"{name} has shape {list(value.shape)}; it needs one value for each of {num_tokens} trainable tokens"
        )
    return value


def _prefixed(metrics: Metrics, prefix: str) -> Metrics:
    return {prefix + name: metric for name, metric in metrics.items()}


def _advantage_metrics(columns: Columns, found: Computed) -> Metrics:
    out: Metrics = {}
    for name in ("advantages", "returns"):
        value = found.get(name)
        if isinstance(value, Tensor) and len(value) == len(columns.mask) and columns.mask.any():
            x = value[columns.mask].double()
            out[f"critic/{name}/mean"] = Metric(float(x.sum()), float(len(x)), "token")
            out[f"critic/{name}/max"] = Metric(float(x.max()), 1, "token", "max")
            out[f"critic/{name}/min"] = Metric(float(x.min()), 1, "token", "min")
    return out
