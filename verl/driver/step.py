"""One step's experience and update: which columns, in which order, by which role. No tensor is touched here."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial

from verl.algorithms.corrections import correct
from verl.algorithms.estimators import token_rewards
from verl.algorithms.losses import adapted_coef, kl_penalty
from verl.algorithms.specs import KLReward
from verl.algorithms.weights import check_finite
from verl.batch import Columns
from verl.driver.host import StepHost
from verl.driver.run import Run, Step
from verl.types import Metric, Refs, derive_seed
from verl.workers.role import Computed, UpdatePlan


async def experience_and_update(run: Run | StepHost, step: Step, refs: Refs) -> Refs:
    """reward model -> reference -> old log-probs -> values -> correction -> rewards -> advantages -> optimizer steps.

    Returns the refs with the rewards that were trained on."""
    shape, algorithm = run.config.step, run.algorithm
    if run.reward is not None and run.config.reward.stage == "batch":
        with step.clock("reward_model"):
            refs = await run.call(
                run.reward, "score", refs, run.config.reward.model_coef, run.config.reward.path is None
            )
    chosen = _chosen(run, step, refs)
    trained = chosen.of("train")  # baselines are compared with, not trained on
    needs = algorithm.needs(shape.updates_per_step * shape.epochs_per_step)
    for role, clock in _CLOCKS.items():
        columns = {need.output: need.column for need in needs if need.role == role}
        if columns:
            group = {"ref": run.ref, "actor": run.actor, "critic": run.critic}[role]
            assert group is not None, f"an algorithm that needs {columns} is assembled with this role"
            with step.clock(clock):
                step.log(await run.call(group, "infer", trained, columns))
    with step.clock("advantages"):
        await _advantages(run, step, chosen)
    updates = tuple(updates_of(trained, shape.updates_per_step, shape.epochs_per_step, run.config.run.seed, step.index))
    warm = _critic_is_warm(run, step)
    if run.critic is not None:
        with step.clock("update_critic"):
            step.log(await run.call(run.critic, "update", UpdatePlan(updates, algorithm.value_terms, also=("values",))))
    if warm:
        with step.clock("update"):
            step.log(await run.call(run.actor, "update", UpdatePlan(updates, algorithm.terms)))
    await run.trained(step, refs)
    return refs


_CLOCKS = {"ref": "reference", "actor": "old_logprobs", "critic": "values"}


def _chosen(run: Run | StepHost, step: Step, refs: Refs) -> Refs:
    """The rows that an algorithm trains on, of each group by its scores (PF-PPO); all of them without a choice."""
    chosen = run.algorithm.sample_filter
    if chosen is None:
        return refs
    kept: set[str] = set()
    for group_id, rows in refs.of("train").groups().items():
        rng = random.Random(derive_seed(run.config.run.seed, "choose", step.index, group_id))
        kept |= {rows[i].sample_id for i in chosen.choose([r.reward for r in rows], rng)}
    return Refs(r for r in refs if r.purpose != "train" or r.sample_id in kept)


def _critic_is_warm(run: Run | StepHost, step: Step) -> bool:
    """Value pretraining (1.2): the policy waits for the critic, by steps or until it explains enough of the returns."""
    spec = run.algorithm.critic
    if run.critic is None or spec is None or run.critic_warm:
        return True
    if spec.critic_warmup_until is not None:
        run.critic_warm = step.metrics["critic/vf_explained_var"].value >= spec.critic_warmup_until
    run.critic_warm = run.critic_warm or step.index >= spec.critic_warmup_steps
    return run.critic_warm


async def _advantages(run: Run | StepHost, step: Step, refs: Refs) -> None:
    algorithm, trained = run.algorithm, refs.of("train")
    correction, kl = algorithm.correction, algorithm.kl_reward
    if correction is not None:  # on the mask before rejection; the losses see the one after
        weigh, both = partial(correct, spec=correction), ("old_logprobs", "rollout_logprobs")
        step.log(await run.call(run.compute, "compute", trained, weigh, both, ("is_weights", "keep")))
    policies = () if kl is None else ("old_logprobs", "ref_logprobs")
    inputs = tuple(dict.fromkeys((*policies, *algorithm.estimator.inputs)))
    outputs = ("advantages", "returns") if algorithm.critic else ("advantages",)
    fn = partial(rewards_and_advantages, advantage=algorithm.advantage, kl=kl, kl_coef=run.kl_coef)
    metrics = await run.call(run.compute, "compute", refs, fn, inputs, outputs)
    step.log(metrics)
    if kl is not None:
        step.log({"actor/reward_kl_penalty_coeff": Metric(run.kl_coef, 1, "step", "last")})
        if kl.target is not None:
            run.kl_coef = adapted_coef(
                run.kl_coef,
                kl=metrics["actor/reward_kl_penalty"].value,
                target=kl.target,
                horizon=kl.horizon,
                num_sequences=len(trained),
            )
    if algorithm.critic:
        step.log(await run.call(run.compute, "compute", trained, _explained, ("old_values", "returns"), ()))
    if correction is not None and correction.bypass and correction.form is None:
        await run.call(run.compute, "compute", trained, _rollout_is_old, ("rollout_logprobs",), ("old_logprobs",))


def _explained(columns: Columns) -> Computed:
    """Explained variance of the returns by the critic: 1 - Var(returns - values) / Var(returns); 0 where they do not vary."""
    values, returns = (columns[n][columns.mask].double() for n in ("old_values", "returns"))
    if len(returns) < 2 or float(spread := returns.var()) < 1e-12:
        share = 0.0
    else:
        share = float(1 - (returns - values).var() / spread)
    return {"critic/vf_explained_var": Metric(share, 1, "step")}


def _rollout_is_old(columns: Columns) -> Computed:
    """Bypass mode (section 5): the sampler's own policy is the old one."""
    return {"old_logprobs": columns["rollout_logprobs"]}


def rewards_and_advantages(
    columns: Columns, *, advantage: Callable[[Columns], Computed], kl: KLReward | None, kl_coef: float
) -> Computed:
    """Per-token rewards, with the KL penalty if there is one, and what the algorithm makes of them."""
    penalty = None
    metrics: Computed = {}
    if kl is not None:
        penalty, mean = kl_penalty(columns, coef=kl_coef, form=kl.form)
        metrics = {"actor/reward_kl_penalty": Metric(mean, 1, "step")}
    columns = columns.with_token({"rewards": token_rewards(columns, penalty)})
    check_finite(columns, ("rewards",))
    found = advantage(columns)
    return {**found, **metrics} if isinstance(found, Mapping) else found  # a user's own: `compute` says what is wrong


def updates_of(refs: Refs, updates: int, epochs: int, seed: int, index: int) -> list[Refs]:
    """The rows of each optimizer step: groups whole, shares as equal as they can be, a seeded order per epoch."""
    groups = list(refs.groups().values())
    out = []
    for epoch in range(epochs):
        order = list(groups)
        if updates > 1:
            random.Random(derive_seed(seed, "updates", index, epoch)).shuffle(order)
        bounds = [round(i * len(order) / updates) for i in range(updates + 1)]
        out += [Refs(r for g in order[a:b] for r in g) for a, b in zip(bounds, bounds[1:]) if b > a]
    return out
