"""The worker of a model: one per rank, with the rank's engine and the queue. It turns refs into batches and model
outputs into columns. Publishing (role_publishing.py) and saving (role_saving.py) are parts of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from verl.batch import Batch, Ragged, concat, make_microbatches, pack
from verl.chat import NO_TURN_END, TurnEnd
from verl.checkpoint.hf import HfExport
from verl.config.backends import import_object
from verl.errors import Refused
from verl.model_engine.base import EngineCapabilities, EngineContext, ModelEngine, OneRank, Ranks
from verl.model_engine.objective import before_moving, evaluate_terms, first_pass
from verl.objective import Term
from verl.observed import OBSERVED
from verl.parameter_set import POLICY_SET, Delivery
from verl.transfer_queue.base import TransferQueue
from verl.transfer_queue.rows import facts_column, queued_samples
from verl.types import ROUTES, Metric, Metrics, Refs, Sample, Segment, merge_metrics
from verl.weight_sync.base import Entry, Outlet, Readers, Sent
from verl.weight_sync.sender import WeightSender
from verl.wire import AS_HELD, WireFormat
from verl.workers.host import RankMemory, rank_memory
from verl.workers.inproc import SharedEngine, VirtualRank
from verl.workers.rank_batch import RankStep, batch_of_step, informed
from verl.workers.role_publishing import RolePublishing, is_first
from verl.workers.role_saving import RoleSaving

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """The optimizer steps of a turn."""

    steps: tuple[RankStep, ...]
    terms: tuple[Term, ...]
    inputs: tuple[str, ...]  # Stored columns that the terms read.
    recorded: tuple[str, ...] = ()  # Model outputs that are written as columns `train_NAME` in steps with `record`.
    prefix: str = "actor/"  # The prefix of the names of metrics.


@dataclass(frozen=True, slots=True)
class View:
    """How a model reads rows for `infer`."""

    temperature: float | None = None  # The temperature of the logits. None: each sample's own.
    informed: bool = False
    """True if the row's context (`Sample.context`) replaces its prompt. A row without context gets no finite output."""
    average: bool = False  # Uses the moving average of its weights.
    start: bool = False  # Uses the weights that training started from, which LoRA keeps.


AS_SAMPLED = View()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """The build arguments of a model's workers, which are built in their own processes."""

    name: str
    queue: TransferQueue
    engine: str  # "module:build" of its backend, called with (options, context).
    options: Any
    context: EngineContext
    proven: bool = False  # The forward pass is compared with the model's own at start.
    behind_server: bool = False  # One worker sends requests to a server, whatever the layout.
    share_prefix: bool = True  # A prompt is computed once per group, if the engine can.
    outlet: Outlet | None = None  # The sender of its weights, in `sync_dtype`.
    sync_dtype: str = "float32"
    hf_export: HfExport | None = None
    turn_end: TurnEnd = NO_TURN_END  # The end of a turn in a reward model's template.


def build_roles(spec: RoleSpec, *, ranks: Sequence[Ranks]) -> list[Role]:
    """Build the workers of these ranks. Raise ValueError if the engine's forward pass does not agree with the model's
    own."""
    engine = import_object(spec.engine)(spec.options, replace(spec.context, media=spec.queue.media))
    if spec.context.lora is not None and engine.exported_set.whole:
        raise Refused(f"model.lora: {spec.engine} trains all weights; use model.engine=torch, or leave model.lora out")
    with engine.awake():
        if spec.proven:
            engine.check_packing(share_prefix=spec.share_prefix and engine.capabilities.shares_prefix)
    return roles_of(engine, spec, ranks=ranks)


def roles_of(engine: ModelEngine, spec: RoleSpec, *, ranks: Sequence[Ranks]) -> list[Role]:
    """Return one worker for each of these ranks, all with the given engine, which virtual ranks share."""
    sender = WeightSender(spec.outlet, dtype=spec.sync_dtype) if spec.outlet is not None else None

    def role(rank: Ranks) -> Role:
        shared = isinstance(rank, VirtualRank) and rank.world_size > 1
        return Role(
            spec.name,
            spec.queue,
            SharedEngine(engine, rank) if shared else engine,  # type: ignore[arg-type]
            share_prefix=spec.share_prefix and engine.capabilities.shares_prefix,
            ranks=rank,
            sender=sender,
            hf_export=spec.hf_export,
            turn_end=spec.turn_end,
        )

    return [role(rank) for rank in ranks]


class Role:
    """One rank of a policy, reference, teacher, critic or reward model. `ModelWorkers` is its typed interface for the
    driver.

    sender: None for a role that publishes nothing · hf_export: None for a role that is not exported · turn_end: the end
    of a turn in a reward model's template, behind which the score is read."""

    def __init__(
        self,
        name: str,
        queue: TransferQueue,
        engine: ModelEngine,
        *,
        share_prefix: bool = True,
        ranks: Ranks | None = None,
        sender: WeightSender | None = None,
        hf_export: HfExport | None = None,
        turn_end: TurnEnd = NO_TURN_END,
    ) -> None:
        self.queue, self.engine, self.ranks = queue, engine, ranks or OneRank()
        self.share_prefix, self._turn_end = share_prefix, turn_end
        self.publishing = RolePublishing(name, engine, sender, self.ranks)
        self.saving = RoleSaving(name, engine, hf_export, self.ranks)

        self._siblings: dict[str, Role] = {}

    # -- a second role on the same base --------------------------------------------------------------------------------

    def open_sibling(self, spec: RoleSpec) -> None:
        """Build a second role in this worker, by the function `engine` of the spec: its model shares the frozen base of
        this one's."""
        built: Any = None
        shared = self.engine if isinstance(self.engine, SharedEngine) else None
        if shared is None or self.ranks.rank == 0:
            first = self.engine if shared is None else shared.whole
            built = import_object(spec.engine)(first, spec.options, spec.context)
            if spec.proven:
                with built.awake():
                    built.check_packing(share_prefix=spec.share_prefix and built.capabilities.shares_prefix)
        engine = built if shared is None else self.ranks.all_gather(built)[0]
        (self._siblings[spec.name],) = roles_of(engine, spec, ranks=[self.ranks])

    def as_sibling(self, name: str, method: Callable[..., T], args: tuple[Any, ...]) -> T:
        """Call a method of the second role with this name."""
        return method(self._siblings[name], *args)

    # -- rows in, columns out ------------------------------------------------------------------------------------------

    def infer(self, step: RankStep, outputs: Mapping[str, str], view: View = AS_SAMPLED) -> frozenset[str]:
        """Compute model outputs of the rows and write them as columns, {output: column}, e.g. {"logprobs":
        "old_logprobs"}. Return the sample ids of the rows with an output that is not finite."""
        unread = (ROUTES,) if view.average or view.start else self._unread  # weights that no rollout had
        samples, alone = queued_samples(self.queue, step.refs, unread), list[str]()
        if view.informed:
            alone = [s.sample_id for s in samples if s.context is None and s.taught]
            samples = [informed(s) for s in samples]
        batch = pack(samples, share_prefix=self.share_prefix)
        if view.temperature is not None:
            same = torch.full_like(batch.row_columns["temperature"], view.temperature)
            batch = batch.with_row_columns({"temperature": same})
        found = self.engine.infer(batch, tuple(outputs), view.average, view.start)
        if step.idle or not self.ranks.primary:
            return frozenset()
        per_row = np.arange(batch.num_rows + 1, dtype=np.int64)  # scores are [R]; all other outputs are per loss token
        starts = {name: per_row if name == "scores" else batch.row_start for name in outputs}
        self.queue.write(step.refs, {column: Ragged(found[name], starts[name]) for name, column in outputs.items()})
        broken: set[int] = set()
        for name in outputs:
            row_of = np.repeat(np.arange(batch.num_rows), np.diff(starts[name]))
            finite = torch.isfinite(found[name]).view(len(row_of), -1).all(-1)
            broken |= {*row_of[~finite.numpy()].tolist()}
        return frozenset((*alone, *(step.refs[row].sample_id for row in broken)))

    def take_metrics(self) -> Metrics:
        """Return the metrics that the engine counted since the last call."""
        return self.engine.take_metrics()

    def blank(self, refs: Refs, outputs: Mapping[str, str]) -> None:
        """Write columns in the shapes of `infer`, filled with NaN (ids: with arbitrary distinct ones), for rows that no
        model can compute."""
        batch = self._pack(Refs(refs[:1]))
        batch = batch.with_row_columns({"temperature": torch.ones(1)})
        shaped = self.engine.infer(batch, tuple(outputs))
        if not self._first:
            return
        at = np.cumsum([0, *(r.loss_tokens for r in refs)])
        for name, column in outputs.items():
            like, tokens = shaped[name], int(at[-1])
            if like.is_floating_point():
                empty = torch.full((tokens, *like.shape[1:]), torch.nan, dtype=like.dtype)
            else:  # ids of tokens, which differ from each other
                empty = torch.arange(like.shape[1], dtype=like.dtype).repeat(tokens, 1)
            self.queue.write(refs, {column: Ragged(empty, at)})

    def merge(self, refs: Refs, outputs: Mapping[str, str], names: Sequence[str], shares: Sequence[float]) -> None:
        """Merge the columns COLUMN/NAME [L, ...], which several teachers have written, into one column COLUMN.

        shares: the weights of the teachers in a mixture of their log-probs; without them, each trajectory gets the
        columns of the teacher that gives it the highest likelihood."""
        if not self._first:
            return
        found = self.queue.read(refs, [f"{column}/{name}" for column in outputs.values() for name in names])
        result = {c: torch.stack([found[f"{c}/{name}"].values for name in names]) for c in outputs.values()}
        drawn, offsets = result[outputs["logprobs"]], found[f"{outputs['logprobs']}/{names[0]}"].offsets
        if shares:
            assert len(result) == 1, "the configuration refuses mixtures of the likeliest tokens"
            logs = torch.tensor(shares, dtype=drawn.dtype).log()
            merged = {outputs["logprobs"]: torch.logsumexp(drawn + logs[:, None], 0)}
        else:
            known: dict[str, int] = {}
            numbers = [known.setdefault(r.trajectory_id, len(known)) for r in refs]
            of = torch.from_numpy(np.repeat(np.array(numbers, np.int64), np.diff(offsets)))
            sums = torch.zeros(len(names), len(known), dtype=torch.float64).index_add_(1, of, drawn.double())
            best, at = sums.argmax(0)[of], torch.arange(len(of))
            merged = {column: values[best, at] for column, values in result.items()}
        self.queue.write(refs, {column: Ragged(values, offsets) for column, values in merged.items()})

    def logprobs(self, step: RankStep) -> list[np.ndarray]:
        """Return the log-probs of the trainable tokens of each row, float32."""
        batch = self._pack(step.refs)
        found = self.engine.infer(batch, ("logprobs",))["logprobs"]
        return [row.float().numpy() for row in Ragged(found, batch.row_start).rows()]

    def update(self, plan: UpdatePlan) -> Metrics:
        """Make the optimizer steps of a turn and return their metrics: those of the terms are this rank's share;
        metrics that all ranks have in common (norm, rate) are returned by the first rank only."""
        parts: list[Metrics] = []
        with self.engine.awake("weights"):
            for step in plan.steps:
                terms: Sequence[Term] = plan.terms
                if step.first:
                    terms = [before_moving(term) for term in terms]
                batch = self._batch_of(step, terms, plan.inputs)
                batch, terms, metrics = self._two_passes(batch, terms)
                result = self.engine.forward_backward(batch, terms, step.num_microbatches, plan.recorded)
                parts += [_prefixed(metrics, plan.prefix), _prefixed(result.metrics, plan.prefix)]
                optim = self.engine.optim_step()
                if self.ranks.rank == 0:
                    parts.append(_prefixed(optim, plan.prefix))
                if step.record and not step.idle:
                    parts.append(self._record(step, plan, batch, result.columns))
        return merge_metrics(parts)

    def _record(self, step: RankStep, plan: UpdatePlan, batch: Batch, found: Mapping[str, Tensor]) -> Metrics:
        drawn, at = batch.columns["versions"] != OBSERVED, np.cumsum([0, *(r.loss_tokens for r in step.refs)])
        if self.ranks.primary:
            self.queue.write(step.refs, {f"train_{n}": Ragged(found[n][drawn], at) for n in plan.recorded})
        if "entropy" not in plan.recorded:
            return {}
        inside = found["entropy"][batch.columns["mask"]].double()
        return {f"{plan.prefix}entropy": Metric(float(inside.sum()), float(len(inside)), "token")}

    def measure(self, step: RankStep, terms: tuple[Term, ...], inputs: tuple[str, ...]) -> Metrics:
        """Return loss and metrics of the terms over these rows of all ranks, without an optimizer step; the first rank
        only, the others return {}."""
        batch = self._batch_of(step, terms, inputs)
        wanted = tuple(dict.fromkeys(n for t in terms for n in t.outputs))
        found = {f"out/{n}": v.double() for n, v in self.engine.infer(batch, wanted).items()}
        parts = self.ranks.all_gather(None if step.idle else batch.with_columns(found))
        if self.ranks.rank:
            return {}
        whole = concat([part for part in parts if part is not None])
        with torch.no_grad():
            _, metrics = evaluate_terms(terms, whole, {n: whole.columns[f"out/{n}"] for n in wanted})
        tokens = all(t.unit == "token" for t in terms)
        count = whole.num_loss_tokens if tokens else whole.num_sequences
        unit = "token" if tokens else "sequence"
        losses = {t.name: Metric(metrics[t.name].total * count, float(count), unit) for t in terms}  # type: ignore[arg-type]
        return {**metrics, **losses}

    def score(self, step: RankStep, coef: float, alone: bool) -> list[tuple[float, dict[str, float]]]:
        """Return (reward, components) of these rows with the reward model's score. `coef` x score is added to the row's
        reward, which a function has computed, or which with `alone` is only the shaping. Both are also written to the
        facts of the rows in the queue; an invalid reward stays invalid."""
        samples = queued_samples(self.queue, step.refs, self._unread)
        values = self._scores(samples)
        out = []
        for sample, value in zip(samples, values, strict=True):
            parts = {**sample.components, "reward_model": value}
            if "score" in parts:  # before the shaping, which stays in the reward
                parts["score"] += coef * value
            if not alone:
                parts = {"function": sample.components.get("score", sample.reward), **parts}
            out.append((coef * value + sample.reward, parts))
        if not step.idle and self.ranks.primary:
            scored = [replace(s, reward=reward, components=parts) for s, (reward, parts) in zip(samples, out)]
            self.queue.write(step.refs, {"facts": facts_column(scored)})
        return out

    def score_rows(self, rows: Sequence[tuple[Segment, ...]]) -> list[float]:
        """Return the reward model's score of each row."""
        samples = [
            Sample(sample_id=str(i), trajectory_id=str(i), group_id=str(i), purpose="train", segments=segments)
            for i, segments in enumerate(rows)
        ]
        return self._scores(samples)

    def capabilities(self) -> EngineCapabilities:
        """Return the engine's capabilities, as this role uses them."""
        can = self.engine.capabilities
        return replace(can, shares_prefix=can.shares_prefix and self.share_prefix)

    # -- weights and state ---------------------------------------------------------------------------------------------

    def open_set(self, name: str, folder: Path, base: Path, outlet: Outlet) -> None:
        """Open an adapter as a LoRA set on top of the present weights, to be published through its own outlet."""
        self.publishing.open_set(name, folder, base, outlet)

    def close_set(self, name: str) -> None:
        self.publishing.lora_sets.close(name)

    def send_weights(
        self,
        version: int,
        probes: Sequence[np.ndarray],
        copy: bool,
        form: WireFormat = AS_HELD,
        parameters: str = POLICY_SET.id,
        delivery: Delivery = "merged",
    ) -> Sent | None:
        """Send the present weights of a set to the rollout engines in the format that they read. The first rank returns
        the receipt."""
        return self.publishing.send(version, probes, copy, form, parameters, delivery)

    def weights_manifest(self, form: WireFormat = AS_HELD) -> tuple[dict[str, Entry], str] | None:
        """Return the manifest that all versions of `stream_weights` have, and the address at which they are read."""
        return self.publishing.manifest(form)

    def stream_weights(
        self, version: int, probes: Sequence[np.ndarray], readers: Readers, form: WireFormat = AS_HELD
    ) -> Sent | None:
        """Send the weights as `send_weights` does, to readers that read during the call."""
        return self.publishing.stream(version, probes, readers, form)

    def lose_reader(self, turn: int, reader: int) -> None:
        self.publishing.lose_reader(turn, reader)

    def published(self, version: int) -> None:
        self.engine.published(version)

    def release_weights(self, version: int, parameters: str = POLICY_SET.id) -> None:
        """Release a version of a set that all living replicas have."""
        self.publishing.release(version, parameters)

    def save(self, path: Path) -> None:
        self.engine.save(path)

    def room(self) -> RankMemory:
        """Return the free memory of this rank for a snapshot."""
        return rank_memory(self.engine.snapshot_bytes)

    def snapshot(self) -> None:
        """Copy the present state to host memory, for `write`."""
        self.saving.snapshot()

    def forget(self) -> None:
        """Delete a snapshot that was not written."""
        self.saving.kept = None

    def write(self, path: Path, hf_path: Path | None) -> None:
        """Start to write the snapshot in a thread: the state to `path`, the weights to `hf_path`."""
        self.saving.write(path, hf_path)

    def written(self) -> bool:
        """Return True once the snapshot is on disk. Raise the error of a failed write."""
        return self.saving.written()

    def load(self, path: Path) -> None:
        self.engine.load(path)

    def export(self, path: Path) -> None:
        """Write a complete Hugging Face folder of the present weights."""
        self.saving.export(path, self.engine.exported())
        self.ranks.all_gather(None)

    # -- private -------------------------------------------------------------------------------------------------------

    @property
    def _first(self) -> bool:
        return is_first(self.ranks)

    def _scores(self, samples: Sequence[Sample]) -> list[float]:
        """Return the reward model's score of each row, read where its template ends a turn."""
        batch = pack([self._turn_end.closed(s) for s in samples], share_prefix=self.share_prefix)
        return self.engine.infer(batch, ("scores",))["scores"].double().tolist()

    @property
    def _unread(self) -> tuple[str, ...]:
        """The side channels that the model does not read. Routes that differ would keep rows from sharing a prompt."""
        return () if self.engine.capabilities.replays_routes else (ROUTES,)

    def _pack(self, refs: Refs) -> Batch:
        return pack(queued_samples(self.queue, refs, self._unread), share_prefix=self.share_prefix)

    def _batch_of(self, step: RankStep, terms: Sequence[Term], inputs: Sequence[str]) -> Batch:
        return batch_of_step(self.queue, step, terms, inputs, share_prefix=self.share_prefix, without=self._unread)

    def _two_passes(self, batch: Batch, terms: Sequence[Term]) -> tuple[Batch, Sequence[Term], Metrics]:
        whole = [t for t in terms if t.two_pass]
        if not whole:
            return batch, terms, {}
        can = self.engine.capabilities
        if (
            self.ranks.world_size == 1
            and can.one_pass
            and len(make_microbatches(batch, can.max_tokens_per_microbatch)) == 1
        ):
            return batch, terms, {}
        outputs = self.engine.infer(batch, tuple(dict.fromkeys(n for t in whole for n in t.outputs)))
        return first_pass(batch, terms, outputs, self.ranks)


def _prefixed(metrics: Metrics, prefix: str) -> Metrics:
    return {prefix + name: metric for name, metric in metrics.items()}
