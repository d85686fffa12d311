"""The sizes of a step, of the rollout and of a whole run, derived from the configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from verl.algorithms.presets import find, settled
from verl.algorithms.sections import CriticConfig
from verl.config.adapter import teacher_models
from verl.config.backends import options_of, rollout_caches
from verl.config.devices import rollout_dtype
from verl.config.model_files import ModelFacts, describe_model, read_model_config, text_config
from verl.config.routes import CHOSEN, EXPERTS
from verl.config.schema import Config, OptimConfig
from verl.driver.dispatch import count_microbatches
from verl.driver.scheduler import Scheduler
from verl.planner.memory import kv_bytes_per_token, state_bytes_per_row
from verl.planner.rows import count_rows
from verl.types import Ref, Refs


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """The sizes of one step."""

    prompts: int
    samples_per_prompt: int
    rows: int
    """Trajectories."""
    updates: int
    rows_per_update: int
    epochs: int
    optimizer_steps: int
    longest_row_tokens: int
    max_tokens: int
    max_tokens_per_microbatch: int
    microbatches: int
    """Micro-batches of all optimizer steps if every row had the largest length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLength:
    """The length of a run; None: unknown before the data is read."""

    rows: int | None
    """Rows before over-long prompts are filtered out."""
    eval_rows: int | None
    epochs: float | None
    steps: int | None
    optimizer_steps: int | None
    warmup_steps: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSizes:
    """Sizes of the rollout."""

    engine: str
    slots: int
    """Groups that may be admitted and not yet published."""
    surplus: int
    """Over-sampled groups."""
    trajectories_in_flight: int
    concurrent_sequences: int
    kv_bytes_per_token: int
    kv_tokens: int
    prefix_cache_tokens: int
    state_bytes_per_row: int
    """Bytes of the states that layers keep in place of keys and values."""


def step_sizes(config: Config) -> StepSizes:
    s, longest = config.step, config.data.max_prompt_tokens + config.rollout.max_response_tokens
    rows, optimizer_steps = s.prompts_per_step * s.samples_per_prompt, s.updates_per_step * s.epochs_per_step
    return StepSizes(
        prompts=s.prompts_per_step,
        samples_per_prompt=s.samples_per_prompt,
        rows=rows,
        updates=s.updates_per_step,
        rows_per_update=rows // s.updates_per_step,
        epochs=s.epochs_per_step,
        optimizer_steps=optimizer_steps,
        longest_row_tokens=longest,
        max_tokens=rows * longest,
        max_tokens_per_microbatch=s.max_tokens_per_microbatch,
        microbatches=_microbatches(config, longest) * optimizer_steps,
    )


def _microbatches(config: Config, longest: int) -> int:
    """Return the micro-batches of one update if all rows have the largest length."""
    prompt = longest - config.rollout.max_response_tokens
    rows = Refs(
        Ref(
            sample_id="",
            trajectory_id=f"{group}/{i}",
            group_id=str(group),
            purpose="train",
            prompt_tokens=prompt,
            total_tokens=longest,
            loss_tokens=longest - prompt,
            version_min=0,
            version_max=0,
            reward=0.0,
        )
        for group in range(config.step.prompts_per_step // config.step.updates_per_step)
        for i in range(config.step.samples_per_prompt)
    )
    shares = options_of(config, "model").share_prefix and not describe_model(config.model.path).crossed
    return count_microbatches(rows, config.step.max_tokens_per_microbatch, shares_prefix=shares)


def rollout_sizes(config: Config, model: ModelFacts) -> RolloutSizes:
    p, step, caches = config.pipeline, config.step, rollout_caches(config, bytes_per_token=1)
    scheduler = Scheduler(
        prompts_per_step=step.prompts_per_step,
        total_steps=1,
        sync_every=p.sync_every,
        staleness=p.staleness,
        oversample=p.oversample,
    )
    per_group = step.samples_per_prompt + find(config.algorithm.name).group.baselines
    flying = (scheduler.slots + scheduler.extra) * per_group
    return RolloutSizes(
        engine=config.rollout.engine,
        slots=scheduler.slots,
        surplus=scheduler.extra,
        trajectories_in_flight=flying,
        concurrent_sequences=min(config.rollout.max_concurrent_sequences, flying),
        kv_bytes_per_token=kv_bytes_per_token(model, rollout_dtype(config)),
        kv_tokens=caches["KV cache"],
        prefix_cache_tokens=caches.get("prefix cache", 0),
        state_bytes_per_row=state_bytes_per_row(model, rollout_dtype(config)),
    )


def total_steps(config: Config, rows: int, rows_per_step: int) -> int:
    """Return the steps of the loop on `rows` training rows, without a gap between epochs or a smaller last step."""
    given = config.run.total_steps
    return rows * config.run.total_epochs // rows_per_step if given is None else given


def policy_updates(config: Config, steps: int) -> int:
    """Return the optimizer steps of the policy, which waits while a critic warms up alone."""
    critic, s = settled(config.algorithm.name, config.algorithm.given()).critic, config.step
    waits = critic.critic_warmup_steps if critic and critic.critic_warmup_until is None else 0
    return max(0, steps - waits) * s.updates_per_step * s.epochs_per_step


def warmup_steps(optim: OptimConfig | CriticConfig, optimizer_steps: int) -> int:
    """Return the optimizer steps of the warm-up: `warmup_steps`, else the share `warmup_ratio` of all."""
    return optim.warmup_steps or math.floor(Fraction(str(optim.warmup_ratio)) * optimizer_steps)


def run_length(config: Config, step: StepSizes) -> RunLength:
    d = config.data
    counted = [None if d.dataset_class else count_rows(files) for files in (d.train_files, d.eval_files)]
    limits = zip((d.max_rows, d.max_eval_rows), counted)
    rows, eval_rows = (found if found is None or limit is None else min(found, limit) for limit, found in limits)
    steps = config.run.total_steps if rows is None else total_steps(config, rows, step.prompts)
    optimizer_steps = None if steps is None else steps * step.optimizer_steps
    epochs = None if steps is None or not rows else round(steps * step.prompts / rows, 2)
    warmup = config.optim.warmup_steps if steps is None else warmup_steps(config.optim, policy_updates(config, steps))
    return RunLength(
        rows=rows, eval_rows=eval_rows, epochs=epochs, steps=steps, optimizer_steps=optimizer_steps, warmup_steps=warmup
    )


def teacher_share(config: Config) -> float | None:
    """Return the floating-point operations of the teachers that are computed in this run, per token of a step, as a
    share of those of the policy's update (2 per parameter in a forward pass, 6 in forward and backward). None without a
    teacher. Attention is left out on both sides; with pick=task, where each row has one teacher, the largest counts."""
    preset, t = settled(config.algorithm.name, config.algorithm.given()), config.teacher
    if "teacher" not in preset.roles() or (t.path is None and not t.paths):
        return None
    policy, models = parameters_used(describe_model(config.model.path)), teacher_models(config)
    passes = [parameters_used(describe_model(path)) for path in models.values()] or ([] if t.roles() else [policy])
    update = (8 if config.model.gradient_checkpointing == "full" else 6) * config.step.epochs_per_step * policy
    return 2 * (max(passes, default=0) if t.pick == "task" else sum(passes)) / update


def parameters_used(model: ModelFacts) -> int:
    """Return the parameters that a token is multiplied with: of the experts only the active ones, no lookup tables."""
    tables = 0 if model.tied else model.embedding_parameters
    return model.parameters - model.expert_parameters + expert_parameters_used(model) - tables


def expert_parameters_used(model: ModelFacts) -> int:
    """Return the parameters of the routed experts that a token passes through; by the width of the active ones where
    config.json does not have their number."""
    if not model.expert_parameters:
        return 0
    config = text_config(read_model_config(Path(model.folder)))
    chosen, experts = config.get(CHOSEN), next(filter(None, map(config.get, EXPERTS)), None)
    if chosen and experts:
        return model.expert_parameters * chosen // experts
    return min(model.expert_parameters, 3 * model.layers * model.hidden * model.intermediate)
