"""The plan of an RL run: every derived size, and an estimate of memory and disk, before anything starts. No torch.

    step      64 prompts x 8 = 512 trajectories -> 4 updates of 128 -> about 48 micro-batches

Sizes are exact or upper bounds at the limits of prompt and response; bytes are estimates, per phase of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from verl.algorithms.presets import settled
from verl.chat import parsing
from verl.config.adapter import teacher_models
from verl.config.cluster import roles_on_base
from verl.config.devices import base_format, on_cuda
from verl.config.lora_layers import (
    TrainedFactors,
    base_warnings,
    idle_lora,
    served_factors,
    small_factors,
    trained_factors,
)
from verl.config.model_files import ModelFacts, chat_template_of, describe_model, find_model_folder, json_object
from verl.config.model_folder import check_folder, check_tie, folder_lines
from verl.config.noise import corrects, noise_of
from verl.config.schema import Config, CriticConfig, OptimConfig
from verl.model_engine.lora_spec import LR_FACTOR, trained_by
from verl.model_engine.optimizer_table import OPTIMIZERS
from verl.planner.cluster import ClusterPlan, cluster_plan, memory_on_this_machine
from verl.planner.disk import (
    checkpoint_bytes,
    checkpoint_parts,
    checkpoints_kept,
    checkpoints_made,
    small_disk,
    small_memory,
)
from verl.planner.memory import MemoryEstimate, process_memory
from verl.planner.recorded import Prediction, prediction_of
from verl.planner.sizes import RolloutSizes, RunLength, StepSizes, rollout_sizes, run_length, step_sizes, teacher_share
from verl.planner.updates import update_text
from verl.wire import FP8
from verl.workers import host


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of a run: its sizes, its memory and disk, and warnings."""

    run_dir: str
    algorithm: str
    model: ModelFacts
    optimizer: str  # With the values that it updates otherwise than its name says.
    step: StepSizes
    length: RunLength
    rollout: RolloutSizes
    memory: MemoryEstimate
    checkpoint_bytes: int
    checkpoint_parts: dict[str, int]
    checkpoints_kept: int  # On disk at once, the one being written included.
    checkpoints_made: str  # The steps after which they are written.
    warnings: tuple[str, ...]
    cluster: ClusterPlan | None = None  # With it, `memory` is that of the fullest rank.
    teacher_share: float | None = None  # As a share of the FLOPs of the policy's update.
    factors: TrainedFactors | None = None  # Of the policy, under LoRA.
    on_base: tuple[str, ...] = ()  # Roles that compute on the policy's frozen base.
    base_format: str = "none"  # The format of that base: none (float32), nf4 or int8.
    served_factors: bool = False  # Rollout engines get the factors unmerged.
    predicted: Prediction | None = None  # The seconds of a step, if the run names a cluster file.
    calls: str = ""  # How calls of tools are written; "" without tools.

    def to_json(self) -> str:
        """Return the text of `plan.json` of the run directory."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n"


def make_plan(config: Config) -> Plan:
    """Derive the sizes of a validated configuration."""
    model, step = describe_model(config.model.path, config.model.tokenizer_path), step_sizes(config)
    own, tokenizer = config.model.chat_template, tokenizer_folder(config)
    template = Path(own).expanduser().read_text(encoding="utf-8") if own and Path(own).expanduser().is_file() else None
    check_folder(Path(model.folder), tokenizer, template)
    for path in teacher_models(config).values():
        check_tie(find_model_folder(path))
    length = run_length(config, step)
    update_tokens = step.max_tokens // step.updates
    one, kept = checkpoint_bytes(config), checkpoints_kept(config, length.steps)
    placement = cluster_plan(config, update_tokens)
    memory = placement.fullest if placement else process_memory(config, update_tokens)
    here = memory_on_this_machine(placement) if placement else None if on_cuda(config) else memory
    small = (*small_disk(config, one * kept), *(small_memory(here, host.total_bytes()) if here else ()))
    return Plan(
        run_dir=f"{config.run.root_dir}/{config.run.name}",
        algorithm=config.algorithm.name,
        model=model,
        optimizer=update_text(config),
        step=step,
        length=length,
        rollout=rollout_sizes(config, model),
        memory=memory,
        checkpoint_bytes=one,
        checkpoint_parts=checkpoint_parts(config),
        checkpoints_kept=kept,
        checkpoints_made=checkpoints_made(config.run.save_every_steps),
        warnings=(*_warnings(config, model, length), *small),
        cluster=placement,
        teacher_share=teacher_share(config),
        factors=trained_factors(config),
        on_base=roles_on_base(config),
        base_format=base_format(config),
        served_factors=served_factors(config) is not None,
        predicted=prediction_of(config),
        calls=written_calls(config, Path(config.model.tokenizer_path or model.folder).expanduser()),
    )


def tokenizer_folder(config: Config) -> Path:
    return Path(config.model.tokenizer_path or find_model_folder(config.model.path)).expanduser()


def written_calls(config: Config, folder: Path) -> str:
    """Return how calls are written, as the start of the run determines it, from the text of the template alone."""
    agent, own, file = config.agent, config.model.chat_template, folder / "tokenizer_config.json"
    if not agent.tools or agent.format.startswith("renderers:"):
        return agent.format if agent.tools else ""
    if file.is_file() and json_object(file, file.read_bytes()).get("response_template"):
        return "of the tokenizer"
    try:
        return parsing.format_of(Path(own).expanduser().read_text() if own else chat_template_of(folder), agent.format)
    except (ValueError, OSError) as e:
        return f"unknown: {e}"


def _warnings(config: Config, model: ModelFacts, length: RunLength) -> Iterator[str]:
    """Yield warnings about a configuration that is allowed but unusual."""
    if config.model.chat_template is None:
        yield from folder_lines(tokenizer_folder(config))
    if not model.has_chat_template and config.model.chat_template is None:
        yield "the tokenizer has no chat template: prompts that are messages need model.chat_template=FILE.jinja"
    if not model.has_output_head:
        yield "config.json says that the output layer is not tied, but no lm_head.weight is stored: it starts random"
    yield from algorithm_warnings(config)
    e = config.eval
    if e.samples_per_prompt > 1 and e.temperature == 0 and not e.also_sampled:
        yield f"eval.samples_per_prompt={e.samples_per_prompt} at eval.temperature=0: all answers to a prompt are equal"
    if config.optim.schedule == "constant" and config.optim.min_lr_ratio:
        yield f"optim.min_lr_ratio={config.optim.min_lr_ratio:g} does nothing with optim.schedule=constant"
    if length.rows is not None and length.steps == 0:
        yield (
            f"{length.rows} rows x {config.run.total_epochs} epochs are fewer than the {config.step.prompts_per_step} "
            "of a step: raise run.total_epochs, or lower the batch"
        )
    if config.run.save_every_steps == 0 and (length.steps or 0) > 500:
        yield f"run.save_every_steps=0: {length.steps} steps with one checkpoint, at the end; null saves by time"


def trained_warnings(config: Config) -> Iterator[str]:
    """Yield the warnings about what is trained: a learning rate that is usual for another optimizer or for training of
    all weights, and settings of LoRA that do nothing."""
    yield from idle_lora(config)
    yield from base_warnings(config)
    yield from small_factors(config)
    factor, lr = OPTIMIZERS[config.optim.name].lr_factor, config.optim.lr
    lora, rates = trained_by(config.model.lora) is not None, {"optim.lr": (lr, OptimConfig().lr)}
    if settled(config.algorithm.name, config.algorithm.given()).critic:
        rates["critic.lr"] = config.critic.lr, CriticConfig().lr
    for key, (given, usual_lr) in rates.items() if lora else ():
        if given < LR_FACTOR * factor * usual_lr:
            usual = f"factors want about {LR_FACTOR:g} times the rate of training all weights"
            yield f"{key}={given:g} is low for LoRA with optim.name={config.optim.name}: {usual}; try {10 * given:g}"
    if not lora and lr < factor * OptimConfig().lr and factor > 1:
        yield f"optim.lr={lr:g} is low for optim.name={config.optim.name}: usual is {factor:g} times that of adamw"


def sampled_otherwise(config: Config) -> str:
    """Return the reason why answers are sampled by other weights than the trainer's; "" if they are not."""
    if (noise := noise_of(config)) is not None:
        falls = f"from {noise.sigma_start:g} to {noise.sigma_end:g} in {noise.steps} steps"
        return f"exploration noise ({falls}): answers are sampled under it"
    return "rollout.dtype=fp8: answers are sampled with rounded weights" if config.rollout.dtype == FP8 else ""


def algorithm_warnings(config: Config) -> Iterator[str]:
    """Return the warnings about the objective; `verl train` also prints them at its start."""
    given, p = config.algorithm.given(), config.pipeline
    preset = settled(config.algorithm.name, given)
    yield from trained_warnings(config)
    if given.get("kl_loss_form") == "k1":
        yield "algorithm.kl_loss_form=k1: its gradient is zero on average; k3, or k1+ for the exact gradient"
    if preset.critic and preset.critic.critic_warmup_until and not preset.critic.critic_warmup_steps:
        yield "algorithm.critic_warmup_until without critic_warmup_steps: the policy waits for it, however long that is"
    if why := sampled_otherwise(config):
        c = preset.correction
        if c is None or not corrects(c):
            yield f"{why}, and {preset.name} weighs their tokens by no correction: the gradient is of another policy"
        elif c.form is None:
            yield (
                f"{why}, and with algorithm.bypass=true their log-probs are the old ones: the ratio of the loss holds "
                "that difference too, its clip counts it as a change of the policy, and no weights correct it. Set "
                "algorithm.bypass=false: algorithm.correction=truncate is the default then"
            )
        else:
            yield f"{why}; tokens are weighed by pi_train / pi_rollout (algorithm.correction={c.form}, {c.high:g})"
    if (p.staleness > 0 or p.sync_every > 1) and preset.correction is None and preset.loss.off_policy_delta is None:
        ahead = f"pipeline.staleness={p.staleness:g}" if p.staleness else f"pipeline.sync_every={p.sync_every}"
        yield (
            f"{ahead} without a correction: answers of older weights are trained as if they were of the current ones "
            "(their ratio starts at 1). Set algorithm.correction=truncate algorithm.options.correction_high=2, or "
            "algorithm.bypass=true"
        )
