"""Experience and update of one step: the columns, their order and the role that computes each. No tensor is touched
here."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from verl.algorithms.corrections import correct
from verl.algorithms.estimators import token_rewards
from verl.algorithms.filters import Correction
from verl.algorithms.losses import adapted_coef, kl_penalty
from verl.algorithms.resolve import Algorithm
from verl.algorithms.specs import KLReward
from verl.algorithms.weights import check_finite
from verl.batch import Columns
from verl.driver.roles import Learner
from verl.errors import Refused
from verl.objective import Term
from verl.track.metrics import TimeLedger
from verl.types import Metric, Metrics, Refs, derive_seed, merge_metrics
from verl.workers.compute import Computed
from verl.workers.model_workers import OptimizerStep

RECORDED = ("logprobs", "entropy")  # outputs of the policy's first pass over a row, beside those of the terms


@dataclass(slots=True)
class Step:
    """One step of the driver: its number, times, metrics and trained rows."""

    index: int
    """Counts from 0; `number` = index + 1 names the step in logs and checkpoints."""
    ledger: TimeLedger = field(default_factory=TimeLedger)
    """The time of each phase."""
    metrics: Metrics = field(default_factory=dict)
    """The metrics so far."""
    trained: Refs = field(default_factory=Refs)
    """The rows that were trained on, with their final rewards."""
    truths: Mapping[str, Any] = field(default_factory=dict)
    """Task id -> ground truth of its groups."""
    updating: bool = False
    """Optimizer steps were enqueued: the models may differ from those at the beginning of the step."""
    updated: bool = False
    """The optimizer steps are done and their metrics are logged."""

    @property
    def number(self) -> int:
        return self.index + 1

    def clock(self, phase: str) -> AbstractContextManager[Any]:
        return self.ledger.phase(phase)

    def log(self, metrics: Metrics) -> None:
        self.metrics = merge_metrics([self.metrics, metrics])


async def experience_and_update(learner: Learner, step: Step, refs: Refs) -> None:
    """Compute the rewards of a model, the outputs of the other roles, corrections, advantages and weights of a step,
    and do its optimizer steps."""
    shape = learner.config.step
    assert learner.algorithm is not None
    algorithm, scheduled = learner.algorithm.at(step.number)
    step.log({f"algorithm/{key}": Metric(value, 1, "step", "last") for key, value in scheduled.items()})
    step.trained = refs = await _rewarded(learner, step, refs)
    chosen = _selected(learner, step, refs)
    rows = chosen.of("train")  # baselines are not trained on
    updates = shape.updates_per_step * shape.epochs_per_step
    inferred, failed = await _experience(learner, step, algorithm, rows, updates)
    if failed:
        step.trained, chosen = _mark_invalid(failed, step.trained), _mark_invalid(failed, chosen)
        rows = chosen.of("train")
    with step.clock("advantages"):
        replaced = await _advantages(learner, step, algorithm, chosen)
    rows = _with_copies(learner, step, rows)
    step.trained = _selected_times(step.trained, rows)
    steps = optimizer_steps(rows, shape.updates_per_step, shape.epochs_per_step, learner.config.run.seed, step.index)
    optional = tuple(name for name in ("old_logprobs",) if name in (*inferred, *replaced))
    step.updating = True
    if "critic" in learner.models:
        inputs = inputs_of(algorithm.value_terms, optional)
        with step.clock("update_critic"):
            await learner.done(learner.compute.weigh(steps, algorithm.value_terms, inputs), "compute.weigh")
            update = learner.models["critic"].update(steps, algorithm.value_terms, inputs, prefix="critic/")
            step.log(await learner.done(update, "critic.update"))
    if _critic_is_warm(learner, step, algorithm):
        inputs = inputs_of(algorithm.terms, optional)
        with step.clock("update"):
            await learner.done(learner.compute.weigh(steps, algorithm.terms, inputs), "compute.weigh")
            recorded = (*RECORDED, *algorithm.loss.recorded)
            at_start = "old_logprobs" in inferred and "old_logprobs" not in replaced
            first = [replace(one, first=at_start) for one in steps[:1]]
            update = learner.models["actor"].update([*first, *steps[1:]], algorithm.terms, inputs, recorded)
            step.log(await learner.done(update, "actor.update"))
            if algorithm.figures is not None and (drawn := rows.sampled()):
                read = (*(f"train_{name}" for name in algorithm.loss.recorded), "rollout_logprobs")
                step.log(await learner.done(learner.compute.compute(drawn, algorithm.figures, read, ()), "figures"))
            if "old_logprobs" not in inferred:  # the first pass has the trainer's log-probs before any update
                step.log(await _mismatch(learner, rows, "train_logprobs"))
                if algorithm.correction is not None:
                    measure, both = partial(measured, spec=algorithm.correction), ("train_logprobs", "rollout_logprobs")
                    step.log(await learner.done(learner.compute.compute(rows, measure, both, ()), "compute.measured"))


def inputs_of(terms: tuple[Term, ...], optional: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the stored columns that these terms read. Optional columns are read where they exist."""
    return tuple(dict.fromkeys([*(name for term in terms for name in term.inputs), *optional]))


def reads_sampler(algorithm: Algorithm) -> bool:
    """Return whether an algorithm reads the log-probs with which a response was sampled."""
    inputs = (*inputs_of(algorithm.terms), *inputs_of(algorithm.value_terms), *algorithm.estimator.inputs)
    return algorithm.correction is not None or "rollout_logprobs" in inputs


async def _rewarded(learner: Learner, step: Step, refs: Refs) -> Refs:
    """Return the refs with the score of a reward model that works in batches."""
    reward = learner.config.reward
    model, drawn = learner.models.get("reward_model"), refs.sampled()
    if model is None or reward.stage != "batch" or not drawn:
        return refs
    with step.clock("reward_model"):
        found = await learner.done(model.score(drawn, reward.model_coef, reward.path is None), "reward_model.score")
    scored = [replace(r, reward=value, components=parts) for r, (value, parts) in zip(drawn, found, strict=True)]
    of = {r.sample_id: r for r in scored}
    return Refs(of.get(r.sample_id, r) for r in refs)


def _selected(learner: Learner, step: Step, refs: Refs) -> Refs:
    """Return the trajectories of each group that the algorithm selects by their scores (PF-PPO); all if it selects
    none."""
    assert learner.algorithm is not None
    chosen = learner.algorithm.sample_filter
    if chosen is None or chosen.draws:
        return refs
    kept: set[str] = set()
    for group_id, rows in refs.of("train").groups().items():
        rng = random.Random(derive_seed(learner.config.run.seed, "choose", step.index, group_id))
        scores = {r.trajectory_id: r.reward for r in rows}  # a trajectory may have several rows
        names = list(scores)
        kept |= {names[i] for i in chosen.choose(list(scores.values()), rng)}
    return Refs(r for r in refs if r.purpose != "train" or r.trajectory_id in kept)


def _with_copies(learner: Learner, step: Step, rows: Refs) -> Refs:
    """Set how often each row counts: as many draws with replacement as there are answers (verl's PF-PPO), and a stored
    answer counts like all the answers that the policy would have given."""
    assert learner.algorithm is not None
    chosen, n = learner.algorithm.sample_filter, learner.config.step.samples_per_prompt
    if learner.algorithm.stored_share():
        groups = rows.groups()
        stored = sum(own[0].stored for own in groups.values())
        step.log({"groups/stored_share": Metric(float(stored), float(len(groups)), "group")})
        return Refs(replace(r, copies=n) if r.stored else r for r in rows)
    if chosen is None or not chosen.draws:
        return rows
    scores = {r.trajectory_id: r.reward for r in rows}
    rng = random.Random(derive_seed(learner.config.run.seed, "draw", step.index))
    drawn = dict(zip(scores, chosen.draw(list(scores.values()), rng)))
    return Refs(replace(r, copies=drawn[r.trajectory_id]) for r in rows if drawn[r.trajectory_id])


def _selected_times(trained: Refs, rows: Refs) -> Refs:
    """Return the refs with the number of times that each row is trained on, for the record."""
    times = {r.sample_id: r.copies for r in rows}
    if all(r.purpose != "train" or times.get(r.sample_id, 0) == r.copies for r in trained):
        return trained
    return Refs(replace(r, copies=times.get(r.sample_id, 0)) if r.purpose == "train" else r for r in trained)


def _mark_invalid(failed: set[str], refs: Refs) -> Refs:
    """Return the refs with the trajectories of these samples marked Invalid, so that they are in no advantage,
    statistic or loss."""
    missing = {r.trajectory_id for r in refs if r.sample_id in failed}
    return Refs(replace(r, outcome="invalid") if r.trajectory_id in missing else r for r in refs)


async def _experience(
    learner: Learner, step: Step, algorithm: Algorithm, rows: Refs, updates: int
) -> tuple[list[str], set[str]]:
    """Compute the model outputs that the algorithm needs: one pass per role, one after the other where roles share a
    place. Return the columns that were written, and the samples without an output of a role that may fail."""
    needs, by_role, failed = algorithm.needs(updates), algorithm.outputs_by_role(updates), set[str]()
    may_fail = {need.role for need in needs if need.may_fail}
    wanted: dict[str, Future[frozenset[str]]] = {}

    async def answered(role: str) -> None:
        with step.clock(_PHASES.get(role, role)):
            broken = await learner.done(wanted.pop(role), f"{role}.infer")
            if "old_logprobs" in by_role[role].values():
                step.log(await _mismatch(learner, rows, "old_logprobs"))
        if role in may_fail:
            failed.update(broken)
            await _log_failed(learner, step, role, rows, broken)

    for role, outputs in by_role.items():
        assert role in learner.models, f"{algorithm.name} needs {sorted(outputs.values())}: assembled with a {role}"
        for other in [o for o in wanted if learner.models[o].places & learner.models[role].places]:
            await answered(other)
        with step.clock(_PHASES.get(role, role)):
            wanted[role] = learner.models[role].infer(rows, outputs)
    for role in [*wanted]:
        await answered(role)
    return [need.column for need in needs], failed


async def _log_failed(learner: Learner, step: Step, role: str, rows: Refs, broken: frozenset[str]) -> None:
    """Log the counts of a role that may fail, and its samples without an output. Raise ValueError if there are too
    many."""
    counted = await learner.done(learner.models[role].take_metrics(), f"{role}.take_metrics")
    step.log({f"{role}/{name}": metric for name, metric in counted.items()})
    if not all(r.taught for r in rows):
        without = float(sum(not r.taught for r in rows))
        step.log({f"{role}/untaught": Metric(without, float(len(rows)), "sequence")})
    step.log({f"{role}/invalid": Metric(float(len(broken)), float(len(rows)), "sequence")})
    most = learner.config.pipeline.max_invalid_share
    if len(broken) > min(most * len(rows), len(rows) - 1):  # with none left, a step would be momentum alone
        message = f"{role}: {len(broken)} of {len(rows)} samples have no finite number from it, e.g. {min(broken)}"
        raise Refused(f"{message}; pipeline.max_invalid_share={most:g} of a step may have none, never all of it")


async def _mismatch(learner: Learner, rows: Refs, column: str) -> Metrics:
    """Compare the sampler's log-probs with a column (`Compute.mismatch`), over the rows that the policy sampled. Those
    that were sampled under exploration noise are apart, as `noise/`: their difference is wanted."""
    drawn: Refs = rows.sampled()
    found: Metrics = {}
    under_noise = Refs(r for r in drawn if r.noise_sigma > 0)
    plain = Refs(r for r in drawn if not r.noise_sigma > 0) if under_noise else drawn
    if plain:
        found = await learner.done(learner.compute.mismatch(plain, column), "compute.mismatch")
    if under_noise:
        found["noise/sigma"] = Metric(sum(r.noise_sigma for r in under_noise), len(under_noise), "sequence")
        measured = await learner.done(learner.compute.mismatch(under_noise, column), "compute.mismatch")
        found |= {f"noise/{name.removeprefix('mismatch/')}": value for name, value in measured.items()}
    return found


_PHASES = {"ref": "reference", "actor": "old_logprobs", "critic": "values"}  # verl's names of these phases


def _critic_is_warm(learner: Learner, step: Step, algorithm: Algorithm) -> bool:
    """Return whether the policy is trained in this step. In value pretraining it is not for a number of steps, or until
    the critic explains enough of the returns."""
    controllers, spec = learner.controllers, algorithm.critic
    if "critic" not in learner.models or spec is None or controllers.critic_warm:
        return True
    if spec.critic_warmup_until is not None:
        explained = step.metrics["critic/vf_explained_var"].value
        controllers.critic_warm = explained >= spec.critic_warmup_until
    if spec.critic_warmup_steps or spec.critic_warmup_until is None:  # without steps only the threshold counts
        controllers.critic_warm = controllers.critic_warm or step.index >= spec.critic_warmup_steps
    return controllers.critic_warm


async def _advantages(learner: Learner, step: Step, algorithm: Algorithm, refs: Refs) -> list[str]:
    """Compute corrections, rewards and advantages of the whole step. Return the columns that replace an output of a
    model."""
    rows, compute, controllers = refs.of("train"), learner.compute, learner.controllers
    correction, kl = algorithm.correction, algorithm.kl_reward
    corrects = correction is not None and correction.of_step
    if correction is not None and corrects:  # uses the mask before rejection; the losses use the mask after it
        weigh, both = partial(correct, spec=correction), ("old_logprobs", "rollout_logprobs")
        found = compute.compute(rows, weigh, both, ("is_weights", "keep"))
        step.log(await learner.done(found, "compute.correct"))
    policies = () if kl is None else ("old_logprobs", "ref_logprobs")
    optional = algorithm.estimator.optional if corrects else ()
    inputs = tuple(dict.fromkeys((*policies, *algorithm.estimator.inputs, *optional)))
    outputs = ("advantages", "returns") if algorithm.critic else ("advantages",)
    fn = partial(rewards_and_advantages, advantage=algorithm.advantage, kl=kl, kl_coef=controllers.kl_coef)
    metrics: Metrics = {}
    if rewarded := refs.rewarded():
        metrics = await learner.done(compute.compute(rewarded, fn, inputs, outputs), "compute.advantages")
    step.log(metrics)
    if kl is not None:
        step.log({"actor/reward_kl_penalty_coeff": Metric(controllers.kl_coef, 1, "step", "last")})
        if kl.target is not None:
            controllers.kl_coef = adapted_coef(
                controllers.kl_coef,
                kl=metrics["actor/reward_kl_penalty"].value,
                target=kl.target,
                horizon=kl.horizon,
                num_sequences=len(rows),
            )
    if algorithm.critic:
        found = compute.compute(rows, explained_variance, ("old_values", "returns"), ())
        step.log(await learner.done(found, "compute.explained_variance"))
    if algorithm.truncation is not None and algorithm.truncation.mask_truncated:
        found = compute.compute(rows, without_truncated, ("keep",) if corrects else (), ("keep",))
        step.log(await learner.done(found, "compute.without_truncated"))
    if correction is not None and correction.bypass:
        found = compute.compute(rows, rollout_is_old, ("rollout_logprobs",), ("old_logprobs",))
        await learner.done(found, "compute.bypass")
        return ["old_logprobs"]
    return []


def explained_variance(columns: Columns) -> Computed:
    """Compute how well the critic explains the returns: 1 - Var(returns - values) / Var(returns); 0 if they do not
    vary."""
    values, returns = (columns[n][columns.mask].double() for n in ("old_values", "returns"))
    if len(returns) < 2 or float(spread := returns.var()) < 1e-12:
        share = 0.0
    else:
        share = float(1 - (returns - values).var() / spread)
    return {"critic/vf_explained_var": Metric(share, 1, "step")}


def without_truncated(columns: Columns) -> Computed:
    """Compute `keep` without the tokens of answers that the length limit cut (DAPO's overlong filtering)."""
    cut = columns.sequence["truncated"]
    keep = columns.mask & ~cut[columns.sequence_of]
    share = Metric(float(cut.sum()), float(len(cut)), "sequence")
    return {"keep": keep & columns["keep"] if "keep" in columns else keep, "actor/truncated_masked": share}


def measured(columns: Columns, *, spec: Correction) -> Computed:
    """Compute the metrics of a correction with weights inside the loss (bypass), from the first pass of the update."""
    found = correct(columns.with_token({"old_logprobs": columns["train_logprobs"]}), spec)
    return {name: value for name, value in found.items() if isinstance(value, Metric)}


def rollout_is_old(columns: Columns) -> Computed:
    """Use the log-probs of the sampler as the old ones (bypass mode)."""
    return {"old_logprobs": columns["rollout_logprobs"]}


def rewards_and_advantages(
    columns: Columns, *, advantage: Callable[[Columns], Computed], kl: KLReward | None, kl_coef: float
) -> Computed:
    """Compute per-token rewards, with the KL penalty if there is one, and the algorithm's advantages."""
    penalty = None
    metrics: Computed = {}
    if kl is not None:
        penalty, mean = kl_penalty(columns, coef=kl_coef, form=kl.form)
        metrics = {"actor/reward_kl_penalty": Metric(mean, 1, "step")}
    columns = columns.with_token({"rewards": token_rewards(columns, penalty)})
    check_finite(columns, ("rewards",))
    found = advantage(columns)
    return {**found, **metrics} if isinstance(found, Mapping) else found  # `compute` checks the result of user code


def optimizer_steps(refs: Refs, updates: int, epochs: int, seed: int, index: int) -> list[OptimizerStep]:
    """Return the rows of each optimizer step: whole groups, sizes as equal as possible, a seeded order per epoch.

    A row is in one step of each epoch, with that step's denominators: its weights are columns of that epoch."""
    groups = list(refs.groups().values())
    out = []
    for epoch in range(epochs):
        order = list(groups)
        if updates > 1:
            random.Random(derive_seed(seed, "updates", index, epoch)).shuffle(order)
        bounds = [round(i * len(order) / updates) for i in range(updates + 1)]
        suffix = f"/{epoch}" if epoch else ""
        for a, b in zip(bounds, bounds[1:]):
            if b > a:
                out.append(OptimizerStep(Refs(r for g in order[a:b] for r in g), suffix, recorded=epoch == 0))
    return out
