"""Every derived size of an RL run and an estimate of memory and disk, before anything starts. No torch, no GPU.

    step      64 prompts x 8 = 512 trajectories -> 4 updates of 128 -> about 48 micro-batches

Sizes are exact or upper bounds at the limits of prompt and response; bytes are estimates, per phase of a step.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import msgspec

from verl.algorithms.presets import find, settled
from verl.algorithms.sections import CriticConfig
from verl.bounds import size_text
from verl.chat import parsing
from verl.checkpoint.store import SLACK_BYTES
from verl.config.adapter import teacher_models
from verl.config.backends import SYNC, options_of, rollout_caches
from verl.config.memory import Memory, estimate_memory, kv_bytes_per_token, on_cuda, rollout_dtype, teacher_share
from verl.config.model_files import ModelFacts, chat_template_of, describe_model, find_model_folder, json_object
from verl.config.model_folder import check_folder, check_tie, folder_lines
from verl.config.schema import Config, OptimConfig
from verl.config.spread import Spread, on_this_machine, spread_of
from verl.data.files import expand_files, file_format
from verl.driver.dispatch import count_microbatches
from verl.driver.scheduler import Scheduler
from verl.types import Ref, Refs
from verl.workers import host

SAVE_EVERY_S, SAVE_SHARE = 1800.0, 0.05
"""The default checkpoint interval, and the most of the run's time that checkpoints take."""
STATE_BYTES, EXPORT_BYTES = 12, 4
"""Bytes of a checkpoint per parameter: masters and two optimizer states of every trained role; the hf folder."""
_COMPANIONS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")  # files of a model folder beside the weights


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """The sizes of one step. `rows`: trajectories. `microbatches`: if every row were at its limit."""

    prompts: int
    samples_per_prompt: int
    rows: int
    updates: int
    rows_per_update: int
    epochs: int
    optimizer_steps: int
    longest_row_tokens: int
    max_tokens: int
    max_tokens_per_microbatch: int
    microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLength:
    """The length of a run. None: unknown before the data is read. `rows`: before over-long prompts are filtered out."""

    rows: int | None
    eval_rows: int | None
    epochs: float | None
    steps: int | None
    optimizer_steps: int | None
    warmup_steps: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSizes:
    """Sizes of the rollout. `slots`: groups admitted and not yet published; `surplus`: over-sampled ones."""

    engine: str
    slots: int
    surplus: int
    trajectories_in_flight: int
    concurrent_sequences: int
    kv_bytes_per_token: int
    kv_tokens: int
    prefix_cache_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    run_dir: str
    algorithm: str
    model: ModelFacts
    step: StepSizes
    length: RunLength
    rollout: RolloutSizes
    memory: Memory
    checkpoint_bytes: int
    checkpoint_parts: dict[str, int]
    checkpoints_kept: int  # On disk at once, the one being written included.
    checkpoints_made: str  # At which steps.
    warnings: tuple[str, ...]
    cluster: Spread | None = None  # With it, `memory` is that of the fullest rank.
    teacher_share: float | None = None  # As a share of the FLOPs of the policy's update.
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
    length = _run_length(config, step)
    update_tokens = step.max_tokens // step.updates
    one, kept = checkpoint_bytes(config), checkpoints_kept(config, length.steps)
    spread = spread_of(config, update_tokens)
    memory = spread.fullest if spread else estimate_memory(config, model, needs_reference(config), update_tokens)
    here = on_this_machine(spread) if spread else None if on_cuda(config) else memory
    small = (*small_disk(config, one * kept), *(small_memory(here, host.total_bytes()) if here else ()))
    return Plan(
        run_dir=f"{config.run.root_dir}/{config.run.name}",
        algorithm=config.algorithm.name,
        model=model,
        step=step,
        length=length,
        rollout=_rollout_sizes(config, model),
        memory=memory,
        checkpoint_bytes=one,
        checkpoint_parts=checkpoint_parts(config),
        checkpoints_kept=kept,
        checkpoints_made=_made(config.run.save_every_steps),
        warnings=(*_warnings(config, model, length), *small),
        cluster=spread,
        teacher_share=teacher_share(config),
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


# -- checkpoints -------------------------------------------------------------------------------------------------------


def checkpoints_kept(config: Config, steps: int | None) -> int:
    """Return how many checkpoints are on disk at once, the one being written included."""
    run = config.run
    if run.save_every_steps == 0:
        return 1
    kept = run.keep_last_checkpoints + (run.keep_best is not None) + 1
    if steps is not None and run.keep_every_steps:
        kept += steps // run.keep_every_steps
    if run.save_every_steps is None or steps is None:
        return kept
    return min(kept, 1 + steps // run.save_every_steps)


def checkpoint_parts(config: Config, command: str = "train") -> dict[str, int]:
    """Return the bytes of one checkpoint of a verb, by purpose."""
    model = describe_model(config.model.path, config.model.tokenizer_path)
    own = model.body_parameters if command == "rm" else model.parameters
    folders = {find_model_folder(path) for path in (model.folder, config.model.tokenizer_path or model.folder)}
    beside = [p for folder in folders for p in folder.iterdir() if p.suffix in _COMPANIONS]
    parts = {"weights": EXPORT_BYTES * own + sum(p.stat().st_size for p in beside), "state": STATE_BYTES * own}
    if command == "train" and config.teacher.ema:
        parts["average"] = 4 * own
    if command == "train" and settled(config.algorithm.name, config.algorithm.given()).critic:
        critic = model if config.critic.path is None else describe_model(config.critic.path)
        parts["critic"] = STATE_BYTES * critic.body_parameters
    return parts


def checkpoint_bytes(config: Config, command: str = "train") -> int:
    return sum(checkpoint_parts(config, command).values())


def _made(every_steps: int | None) -> str:
    if every_steps is None:
        share = f"{SAVE_SHARE:.0%} of the time"
        return f"every {SAVE_EVERY_S / 60:.0f} minutes of work (but for at most {share}), at the end and at a stop"
    return (
        f"every {_count(every_steps, 'step')}, at the end and at a stop" if every_steps else "at the end and at a stop"
    )


def small_disk(config: Config, needed_bytes: int) -> Iterator[str]:
    """Yield a warning if the disk does not hold the checkpoints beside its present content. Its own are replaced."""
    needed_bytes += SLACK_BYTES
    run_dir = Path(config.run.root_dir) / config.run.name
    there = sum(p.stat().st_size for p in (run_dir / "checkpoints").rglob("*") if p.is_file())
    place = next(p for p in (run_dir.absolute(), *run_dir.absolute().parents) if p.is_dir())
    free = shutil.disk_usage(place).free
    if there + free < needed_bytes:
        yield (
            f"{run_dir}: the checkpoints need {size_text(needed_bytes)}, but the disk has {size_text(free)} free: free "
            "some, lower run.keep_last_checkpoints, or set another run.root_dir"
        )


def small_memory(memory: Memory, has: int) -> Iterator[str]:
    """Yield a warning if the peak exceeds the memory of this machine, of the container or of a device."""
    phase = memory.phases[memory.peak_phase]
    if memory.peak_bytes > has:
        teacher = sum(memory.items[item] for item in phase if item.startswith("teacher"))
        fix = "lower step.max_tokens_per_microbatch or rollout.max_concurrent_sequences, or take a smaller model"
        if teacher and memory.peak_bytes - teacher <= has:
            fix = f"without the teacher ({size_text(teacher)}) they would fit: serve it elsewhere "
            fix += "(teacher.path=http://HOST:PORT), or set model.engine_options.offload_frozen=true"
        wants, there = size_text(memory.peak_bytes), size_text(has)
        yield f"{memory.peak_phase} wants {wants} of memory, and there are {there}: {fix}"


# -- sizes of a step ---------------------------------------------------------------------------------------------------


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
    shares = options_of(config, "model").share_prefix
    return count_microbatches(rows, config.step.max_tokens_per_microbatch, shares_prefix=shares)


def _rollout_sizes(config: Config, model: ModelFacts) -> RolloutSizes:
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
    )


# -- length of the run -------------------------------------------------------------------------------------------------


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


def _run_length(config: Config, step: StepSizes) -> RunLength:
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


def count_rows(files: list[str]) -> int | None:
    """Return the rows of local JSONL and Parquet files (from its footer); None for other files."""
    if not files or any("://" in name for name in files):
        return None
    total = 0
    for file in expand_files(files):
        kind = file_format(file.path)
        if kind == ("parquet", None):
            import pyarrow.parquet as parquet  # only for a run with Parquet files

            total += parquet.read_metadata(file.path).num_rows
        elif kind == ("json", None) and not file.path.endswith(".json"):
            with open(file.path, "rb") as stream:
                if not re.match(rb"(\xef\xbb\xbf)?\{[^\0]", stream.peek(8)):  # a list, or not UTF-8
                    return None
                total += sum(1 for line in stream if line.strip())
        else:
            return None
    return total


def needs_reference(config: Config) -> bool:
    """Return whether a KL term needs a frozen copy of the policy."""
    return "ref" in settled(config.algorithm.name, config.algorithm.given()).roles()


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


def algorithm_warnings(config: Config) -> Iterator[str]:
    """Return the warnings about the objective; `verl train` also prints them at its start."""
    given, p = config.algorithm.given(), config.pipeline
    preset = settled(config.algorithm.name, given)
    if given.get("kl_loss_form") == "k1":
        yield "algorithm.kl_loss_form=k1: its gradient is zero on average; k3, or k1+ for the exact gradient"
    if preset.critic and preset.critic.critic_warmup_until and not preset.critic.critic_warmup_steps:
        yield "algorithm.critic_warmup_until without critic_warmup_steps: the policy waits for it, however long that is"
    if (p.staleness > 0 or p.sync_every > 1) and preset.correction is None and preset.loss.off_policy_delta is None:
        ahead = f"pipeline.staleness={p.staleness:g}" if p.staleness else f"pipeline.sync_every={p.sync_every}"
        yield (
            f"{ahead} without a correction: answers of older weights are trained as if they were of the current ones "
            "(their ratio starts at 1). Set algorithm.correction=truncate algorithm.options.correction_high=2, or "
            "algorithm.bypass=true"
        )


def render_plan(plan: Plan) -> str:
    """Return the plan as aligned plain text."""
    step, one, kept = plan.step, plan.checkpoint_bytes, plan.checkpoints_kept
    tokens = f"at most {step.max_tokens:,} per step, {step.longest_row_tokens:,} per row, "
    every = size_text(kept * one)
    parts = " + ".join(f"{name} {size_text(size)}" for name, size in plan.checkpoint_parts.items())
    lines = {
        "model": _model_line(plan.model),
        "step": _step_line(step),
        "tokens": f"{tokens}{step.max_tokens_per_microbatch:,} per micro-batch",
        "run": _run_line(plan.length),
        "rollout": _rollout_line(plan.rollout),
        "disk": f"checkpoint {size_text(one)} ({parts}), at most {kept} at once: {every} in {plan.run_dir}",
        "saved": plan.checkpoints_made,
    }
    if plan.teacher_share is not None:
        prefix = f"its pass over a step takes {plan.teacher_share:.2g} of the FLOPs of the policy's update"
        lines["teacher"] = prefix if plan.teacher_share else "computed elsewhere"
    if plan.calls:
        lines["agent"] = f"calls of tools are written as {plan.calls}"
    lines |= _cluster_lines(plan.cluster) if plan.cluster else {}
    text = [f"{name:<9} {prefix}" for name, prefix in lines.items()]
    if plan.cluster is None:
        text += ["", *_memory_lines(plan.memory)]
    for name, pool in (plan.cluster.pools if plan.cluster else {}).items():
        text += ["", *_memory_lines(pool.memory, f"a rank of {name} (estimate)")]
    text += ["", *(f"warning: {w}" for w in plan.warnings)] if plan.warnings else []
    return "\n".join(text) + "\n"


def _model_line(m: ModelFacts) -> str:
    heads = f"{m.heads} heads" + (f" ({m.kv_heads} kv)" if m.kv_heads != m.heads else "")
    tied = ", tied embeddings" if m.tied else ""
    return (
        f"{m.architecture}: {m.layers} layers, hidden {m.hidden}, {heads}, vocabulary {m.vocab:,}; "
        f"{m.parameters:,} parameters{tied}; stored {size_text(m.stored_bytes)} {m.stored_dtype}"
    )


def _step_line(s: StepSizes) -> str:
    updates = f"{_count(s.updates, 'update')} of {s.rows_per_update}"
    updates += f" x {s.epochs} epochs" if s.epochs > 1 else ""
    size = f"{_count(s.prompts, 'prompt')} x {s.samples_per_prompt} = {_count(s.rows, 'trajectory')}"
    return f"{size} -> {updates} -> about {_count(s.microbatches, 'micro-batch')}"


def _run_line(n: RunLength) -> str:
    if n.steps is None:
        return "length unknown before the data is read (remote or compressed files)"
    rows = "unknown rows" if n.rows is None else _count(n.rows, "row")
    epochs = "" if n.epochs is None else f" = {_count(n.epochs, 'epoch')}"
    warm = f", the first {n.warmup_steps:,} warming up" if n.warmup_steps else ""
    held = "" if n.eval_rows is None else f"; evaluation on {_count(n.eval_rows, 'row')}"
    updates = _count(n.optimizer_steps or 0, "optimizer step")
    return f"{rows}, {_count(n.steps, 'step')}{epochs} -> {updates}{warm}{held}"


def _rollout_line(r: RolloutSizes) -> str:
    slots = _count(r.slots, "slot") + (f" + {r.surplus} surplus" if r.surplus else "")
    cache = (
        f" + prefix cache {size_text(r.prefix_cache_tokens * r.kv_bytes_per_token)}" if r.prefix_cache_tokens else ""
    )
    return (
        f"{r.engine}, {slots} = {r.trajectories_in_flight:,} trajectories in flight, {r.concurrent_sequences} at a time"
        f"; KV {r.kv_tokens:,} tokens x {r.kv_bytes_per_token:,} B = "
        f"{size_text(r.kv_tokens * r.kv_bytes_per_token)}{cache}"
    )


def _cluster_lines(s: Spread) -> dict[str, str]:
    """Yield the lines on the placement of roles in pools."""
    where = f"at {s.address}" if s.address else "started for this run on this machine"
    whose = " of each host" if SYNC[s.sync].hosts else ""
    shared = f"2 x {size_text(s.shared_bytes // 2)} of shared memory{whose}"
    lines = {"cluster": f"{s.backend}, {where}; rows through queue {s.queue}, weights through sync {s.sync} ({shared})"}
    lines["layout"] = s.layout
    for name, pool in s.pools.items():
        each = ", ".join(f"{amount:g} {what}" for what, amount in pool.each.items())
        lives = [*pool.roles, *([_count(pool.replicas, "rollout replica")] if pool.replicas else [])]
        size = f"{_count(pool.nodes, 'node')} x {_count(pool.ranks_per_node, 'rank')}"
        lines[f"pool {name}"] = f"{size}, each {each}: {', '.join(lives)}"
    return lines


def _memory_lines(memory: Memory, title: str = "memory (estimate)") -> list[str]:
    """Return a table: items down, phases across, their sums below; the peak is marked."""
    width = max(len(name) for name in (*memory.items, title)) + 2
    phases = memory.phases.values()
    rows = [title.ljust(width) + "".join(f"{name:>14}" for name in memory.phases)]
    for item, size in memory.items.items():
        rows.append(item.ljust(width) + "".join(f"{size_text(size) if item in parts else '-':>14}" for parts in phases))
    rows.append("sum".ljust(width) + "".join(f"{size_text(size):>14}" for size in memory.peaks.values()))
    return [*rows, f"peak {size_text(memory.peak_bytes)} in {memory.peak_phase}"]


def _count(number: int | float, noun: str) -> str:
    several = {"trajectory": "trajectories", "micro-batch": "micro-batches"}.get(noun, f"{noun}s")
    return f"{number:,g} {noun}" if number == 1 else f"{number:,.10g} {several}"
