"""One step's experience and update: which columns, in which order, by which role. No tensor is touched here."""

from __future__ import annotations

import random
from functools import partial

from verl.algorithms.advantages import token_rewards
from verl.algorithms.kl_reward import adapted_coef, kl_penalty
from verl.batch import Columns
from verl.driver.host import StepHost
from verl.driver.run import Run, Step
from verl.types import Metric, Refs, derive_seed
from verl.workers.role import Computed, UpdatePlan


async def experience_and_update(run: Run | StepHost, step: Step, refs: Refs) -> None:
    """reference -> old log-probs -> rewards -> advantages -> optimizer steps."""
    shape = run.config.step
    needs = run.algorithm.needs(shape.updates_per_step * shape.epochs_per_step)
    if "ref_logprobs" in needs:
        assert run.ref is not None, "an algorithm that needs ref_logprobs is assembled with a reference role"
        with step.clock("reference"):
            step.log(await run.call(run.ref, "infer", refs, {"logprobs": "ref_logprobs"}))
    if "old_logprobs" in needs:
        with step.clock("old_logprobs"):
            step.log(await run.call(run.actor, "infer", refs, {"logprobs": "old_logprobs"}))
    with step.clock("advantages"):
        await _advantages(run, step, refs)
    with step.clock("update"):
        plan = UpdatePlan(tuple(updates_of(refs, shape.updates_per_step, shape.epochs_per_step, run.config.run.seed, step.index)),
                          run.algorithm.terms)  # fmt: skip
        step.log(await run.call(run.actor, "update", plan))
    await run.trained(step, refs)


async def _advantages(run: Run | StepHost, step: Step, refs: Refs) -> None:
    kl = run.algorithm.kl_reward
    if kl is None:
        await run.call(run.compute, "compute", refs, _plain_rewards, (), ("rewards",))
    else:
        fn = partial(_rewards_with_kl, coef=run.kl_coef, form=kl.form)
        metrics = await run.call(run.compute, "compute", refs, fn, ("old_logprobs", "ref_logprobs"), ("rewards",))
        mean = metrics["actor/reward_kl_penalty"].value
        step.log({**metrics, "actor/reward_kl_penalty_coeff": Metric(run.kl_coef, 1, "step", "last")})
        if kl.target is not None:
            run.kl_coef = adapted_coef(
                run.kl_coef, kl=mean, target=kl.target, horizon=kl.horizon, num_sequences=len(refs)
            )
    outputs = ("advantages",)
    step.log(await run.call(run.compute, "compute", refs, run.algorithm.advantage, ("rewards",), outputs))


def _plain_rewards(columns: Columns) -> Computed:
    return {"rewards": token_rewards(columns)}


def _rewards_with_kl(columns: Columns, *, coef: float, form: str) -> Computed:
    penalty, mean = kl_penalty(columns, coef=coef, form=form)
    return {"rewards": token_rewards(columns, penalty), "actor/reward_kl_penalty": Metric(mean, 1, "step")}


def updates_of(refs: Refs, updates: int, epochs: int, seed: int, index: int) -> list[Refs]:
    """The rows of each optimizer step: groups whole, shares as equal as they can be, a seeded order per epoch."""
    groups = list(refs.of("train").groups().values())  # baselines are compared with, not trained on
    out = []
    for epoch in range(epochs):
        order = list(groups)
        if updates > 1:
            random.Random(derive_seed(seed, "updates", index, epoch)).shuffle(order)
        bounds = [round(i * len(order) / updates) for i in range(updates + 1)]
        out += [Refs(r for g in order[a:b] for r in g) for a, b in zip(bounds, bounds[1:]) if b > a]
    return out
