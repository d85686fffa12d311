"""Every derived size and an estimate of memory and disk, before anything starts. No torch, no GPU.

    step      64 prompts x 8 = 512 trajectories -> 4 updates of 128 -> about 48 micro-batches

Sizes are exact or upper bounds at the limits of prompt and response; bytes are estimates, per phase of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

import msgspec

from verl.algorithms.presets import find, settled
from verl.config.backends import options_of, rollout_caches
from verl.config.memory import Memory, estimate_memory, kv_bytes_per_token, rollout_dtype
from verl.config.model_files import ModelFacts, describe_model
from verl.config.schema import Config
from verl.config.validate import RL, SAMPLES, TRAINS, Command
from verl.data.files import expand_files, format_of
from verl.driver.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """One step. `rows`: trajectories, or rows of a supervised step. Micro-batches: if every row were at its limit."""

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
    """None: not known before the data is read. `rows`: before over-long prompts are filtered out."""

    rows: int | None
    eval_rows: int | None
    epochs: float | None
    steps: int | None
    optimizer_steps: int | None
    warmup_steps: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSizes:
    """`slots`: groups admitted and not yet trained and published; `surplus`: more of them by over-sampling."""

    engine: str
    slots: int
    surplus: int
    trajectories_in_flight: int
    concurrent_sequences: int
    kv_bytes_per_token: int
    kv_tokens: int
    prefix_cache_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """`kept`: checkpoints on disk at once, the one being written included."""

    weights_bytes: int
    state_bytes: int
    checkpoint_bytes: int
    kept: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    command: str
    run_dir: str
    algorithm: str
    model: ModelFacts
    step: StepSizes | None
    length: RunLength | None
    rollout: RolloutSizes | None
    memory: Memory
    disk: Disk | None
    warnings: tuple[str, ...]

    def to_json(self) -> str:
        """`plan.json` of the run directory."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n"


def make_plan(
    config: Config, command: Command = "train", *, reference: bool | None = None, device_bytes: int | None = None
) -> Plan:
    """Derive the sizes of a validated configuration.

    `reference`: whether a frozen copy of the policy is held for a KL term (default: as algorithm and coefficients say).
    `device_bytes`: memory of the device, to warn where a phase is above it.
    """
    model = describe_model(config.model.path, config.model.tokenizer_path)
    step = step_sizes(config, command) if command in TRAINS else None
    if reference is None:
        reference = command == "dpo" or (command in RL and needs_reference(config))
    tokens = step.max_tokens // step.updates if step else None
    plan = Plan(
        command=command,
        run_dir=f"{config.run.root_dir}/{config.run.name}",
        algorithm=config.algorithm.name,
        model=model,
        step=step,
        length=_run_length(config, step) if step else None,
        rollout=rollout_sizes(config, model, command) if command in SAMPLES else None,
        memory=estimate_memory(config, model, command, reference=reference, update_tokens=tokens),
        disk=_disk(config, model) if step else None,
        warnings=(),
    )
    return replace(plan, warnings=tuple(_warnings(config, plan, device_bytes)))


# -- sizes of a step ---------------------------------------------------------------------------------------------------


def step_sizes(config: Config, command: Command = "train") -> StepSizes:
    s, budget = config.step, config.step.max_tokens_per_microbatch
    if command in RL:
        prompt, answer = config.data.max_prompt_tokens, config.rollout.max_response_tokens
        prompts, n, updates, epochs = s.prompts_per_step, s.samples_per_prompt, s.updates_per_step, s.epochs_per_step
        each = _microbatches(prompts // updates, n, prompt, answer, budget, options_of(config, "model").share_prefix)
        longest, tokens = prompt + answer, prompts * n * (prompt + answer)
    else:
        pair = 2 if command in ("rm", "dpo") else 1
        prompts, n, updates, epochs = config.supervised.rows_per_step, pair, 1, 1
        longest = config.data.max_tokens_per_row
        each, tokens = math.ceil(prompts * n / max(1, budget // longest)), prompts * n * longest
    return StepSizes(
        prompts=prompts,
        samples_per_prompt=n,
        rows=prompts * n,
        updates=updates,
        rows_per_update=prompts * n // updates,
        epochs=epochs,
        optimizer_steps=updates * epochs,
        longest_row_tokens=longest,
        max_tokens=tokens,
        max_tokens_per_microbatch=budget,
        microbatches=each * updates * epochs,
    )


def _microbatches(groups: int, n: int, prompt: int, answer: int, budget: int, share_prefix: bool) -> int:
    """Micro-batches of one update if all rows are as long as they may be. A shared prompt is held once per group."""
    if not share_prefix:
        return math.ceil(groups * n / max(1, budget // (prompt + answer)))
    count, used = 1, 0
    for row in range(groups * n):  # as batch.make_microbatches: in order, a new one where the next row does not fit
        cost = answer if row % n and used else prompt + answer
        if used and used + cost > budget:
            count, used, cost = count + 1, 0, prompt + answer
        used += cost
    return count


def scheduler_of(config: Config) -> Scheduler:
    """The scheduler of the loop, for the sizes that are its own to say."""
    p = config.pipeline
    return Scheduler(
        prompts_per_step=config.step.prompts_per_step,
        total_steps=1,
        sync_every=p.sync_every,
        staleness=p.staleness,
        oversample=p.oversample,
    )


def rollout_sizes(config: Config, model: ModelFacts, command: Command = "train") -> RolloutSizes:
    in_loop, limit = command in RL, config.rollout.max_concurrent_sequences
    scheduler = scheduler_of(config)
    slots, surplus = (scheduler.slots, scheduler.extra) if in_loop else (0, 0)
    caches = rollout_caches(config, bytes_per_token=1)
    per_group = config.step.samples_per_prompt + find(config.algorithm.name).group.baselines
    flying = (slots + surplus) * per_group
    return RolloutSizes(
        engine=config.rollout.engine,
        slots=slots,
        surplus=surplus,
        trajectories_in_flight=flying,
        concurrent_sequences=min(limit, flying) if in_loop else limit,
        kv_bytes_per_token=kv_bytes_per_token(model, rollout_dtype(config)),
        kv_tokens=caches["KV cache"],
        prefix_cache_tokens=caches.get("prefix cache", 0),
    )


# -- length of the run -------------------------------------------------------------------------------------------------


def total_steps(config: Config, rows: int, rows_per_step: int) -> int:
    """Of the loop on `rows` training rows. Epochs follow each other without a gap; the rest below a step is left."""
    if config.run.total_steps is not None:
        return config.run.total_steps
    return rows * config.run.total_epochs // rows_per_step


def warmup_steps(config: Config, optimizer_steps: int) -> int:
    """Optimizer steps of the warm-up: `optim.warmup_steps`, else the share `optim.warmup_ratio` of all."""
    return config.optim.warmup_steps or math.floor(Fraction(str(config.optim.warmup_ratio)) * optimizer_steps)


def _run_length(config: Config, step: StepSizes) -> RunLength:
    rows = _at_most(config.data.max_rows, count_rows(config.data.train_files))
    eval_rows = _at_most(config.data.max_eval_rows, count_rows(config.data.eval_files))
    steps = config.run.total_steps if rows is None else total_steps(config, rows, step.prompts)
    optimizer_steps = None if steps is None else steps * step.optimizer_steps
    epochs = None if steps is None or not rows else round(steps * step.prompts / rows, 2)
    warmup = config.optim.warmup_steps if optimizer_steps is None else warmup_steps(config, optimizer_steps)
    return RunLength(
        rows=rows, eval_rows=eval_rows, epochs=epochs, steps=steps, optimizer_steps=optimizer_steps, warmup_steps=warmup
    )


def _at_most(limit: int | None, rows: int | None) -> int | None:
    return rows if rows is None or limit is None else min(rows, limit)


def count_rows(files: list[str]) -> int | None:
    """Rows of local JSONL and Parquet files (of Parquet from its footer); None: remote, compressed or none named."""
    if not files or any("://" in name for name in files):
        return None
    total = 0
    for file in expand_files(files):
        kind = format_of(file.path)
        if kind == ("parquet", None):
            import pyarrow.parquet as parquet  # only for a run with Parquet files

            total += parquet.read_metadata(file.path).num_rows
        elif kind == ("json", None) and not file.path.endswith(".json"):
            with open(file.path, "rb") as stream:
                total += sum(1 for line in stream if line.strip())
        else:
            return None
    return total


# -- bytes -------------------------------------------------------------------------------------------------------------


def _disk(config: Config, model: ModelFacts) -> Disk:
    """A checkpoint: a Hugging Face folder in the stored precision, float32 masters and two optimizer states."""
    state = 12 * model.parameters
    kept = config.run.keep_last_checkpoints + (config.run.keep_best is not None) + 1
    one = model.stored_bytes + state
    return Disk(
        weights_bytes=model.stored_bytes, state_bytes=state, checkpoint_bytes=one, kept=kept, total_bytes=kept * one
    )


def needs_reference(config: Config) -> bool:
    """Whether a KL term needs a frozen copy of the policy."""
    return "ref" in settled(config.algorithm.name, config.algorithm.given()).roles()


# -- what is allowed but worth a word ----------------------------------------------------------------------------------


def _warnings(config: Config, plan: Plan, device_bytes: int | None) -> Iterator[str]:
    model, length, memory = plan.model, plan.length, plan.memory
    if not model.has_chat_template and config.model.chat_template is None:
        yield "the tokenizer has no chat template: prompts that are messages need model.chat_template=FILE.jinja"
    if not model.has_output_head:
        yield "config.json says that the output layer is not tied, but no lm_head.weight is stored: it starts random"
    if config.algorithm.kl_loss_form == "k1" and plan.command in RL:
        yield "algorithm.kl_loss_form=k1: its gradient is zero on average; k3, or k1+ for the exact gradient"
    e = config.eval
    if plan.command in ("train", "eval") and e.samples_per_prompt > 1 and e.temperature == 0 and not e.also_sampled:
        yield f"eval.samples_per_prompt={e.samples_per_prompt} at eval.temperature=0: all answers to a prompt are equal"
    if config.optim.schedule == "constant" and config.optim.min_lr_ratio:
        yield f"optim.min_lr_ratio={config.optim.min_lr_ratio:g} does nothing with optim.schedule=constant"
    if plan.step and length and length.rows is not None and length.steps == 0:
        yield (
            f"{length.rows} rows x {config.run.total_epochs} epochs are fewer than the {plan.step.prompts} of a step: "
            "raise run.total_epochs, or lower the batch"
        )
    if plan.disk and config.run.save_every_steps == 0 and length and (length.steps or 0) > 500:
        yield f"run.save_every_steps=0: {length.steps} steps with one checkpoint, at the end"
    over = [name for name, size in memory.peaks.items() if device_bytes is not None and size > device_bytes]
    if device_bytes is not None and over:
        yield (
            f"{' and '.join(over)}: above the {_gib(device_bytes)} of the device; lower step.max_tokens_per_microbatch "
            "or rollout.max_concurrent_sequences, or set model.gradient_checkpointing=true"
        )


# -- text --------------------------------------------------------------------------------------------------------------


def render_plan(plan: Plan) -> str:
    """The plan as aligned plain text."""
    lines = [("model", _model_line(plan.model))]
    if plan.step:
        lines += [("step", _step_line(plan.step, plan.command)), ("tokens", _tokens_line(plan.step))]
    if plan.length:
        lines.append(("run", _run_line(plan.length)))
    if plan.rollout:
        lines.append(("rollout", _rollout_line(plan.rollout, plan.command in RL)))
    if plan.disk:
        d = plan.disk
        parts = f"weights {_gib(d.weights_bytes)} + state {_gib(d.state_bytes)}"
        kept = f"at most {d.kept} at once: {_gib(d.total_bytes)} in {plan.run_dir}"
        lines.append(("disk", f"checkpoint {_gib(d.checkpoint_bytes)} ({parts}), {kept}"))
    text = [f"{name:<9} {said}" for name, said in lines]
    text += ["", *_memory_lines(plan.memory)]
    text += ["", *(f"warning: {w}" for w in plan.warnings)] if plan.warnings else []
    return "\n".join(text) + "\n"


def _model_line(m: ModelFacts) -> str:
    heads = f"{m.heads} heads" + (f" ({m.kv_heads} kv)" if m.kv_heads != m.heads else "")
    tied = ", tied embeddings" if m.tied else ""
    return (
        f"{m.architecture}: {m.layers} layers, hidden {m.hidden}, {heads}, vocabulary {m.vocab:,}; "
        f"{m.parameters:,} parameters{tied}; stored {_gib(m.stored_bytes)} {m.stored_dtype}"
    )


def _step_line(s: StepSizes, command: str) -> str:
    updates = f"{_count(s.updates, 'update')} of {s.rows_per_update}" + (
        f" x {s.epochs} epochs" if s.epochs > 1 else ""
    )
    if command in RL:
        size = f"{_count(s.prompts, 'prompt')} x {s.samples_per_prompt} = {_count(s.rows, 'trajectory')}"
    else:
        one = s.samples_per_prompt == 1
        size, updates = _count(s.rows, "row") if one else f"{_count(s.prompts, 'pair')} = {s.rows} rows", "1 update"
    return f"{size} -> {updates} -> about {_count(s.microbatches, 'micro-batch')}"


def _tokens_line(s: StepSizes) -> str:
    return (
        f"at most {s.max_tokens:,} per step, {s.longest_row_tokens:,} per row, "
        f"{s.max_tokens_per_microbatch:,} per micro-batch"
    )


def _run_line(n: RunLength) -> str:
    if n.steps is None:
        return "length unknown before the data is read (remote or compressed files)"
    rows = "unknown rows" if n.rows is None else _count(n.rows, "row")
    epochs = "" if n.epochs is None else f" = {_count(n.epochs, 'epoch')}"
    warm = f", the first {n.warmup_steps:,} warming up" if n.warmup_steps else ""
    held = "" if n.eval_rows is None else f"; evaluation on {_count(n.eval_rows, 'row')}"
    updates = _count(n.optimizer_steps or 0, "optimizer step")
    return f"{rows}, {_count(n.steps, 'step')}{epochs} -> {updates}{warm}{held}"


def _rollout_line(r: RolloutSizes, in_loop: bool) -> str:
    slots = f"{_count(r.slots, 'slot')}" + (f" + {r.surplus} surplus" if r.surplus else "")
    flight = f"{slots} = {r.trajectories_in_flight:,} trajectories in flight, " if in_loop else ""
    cache = f" + prefix cache {_gib(r.prefix_cache_tokens * r.kv_bytes_per_token)}" if r.prefix_cache_tokens else ""
    return (
        f"{r.engine}, {flight}{r.concurrent_sequences} at a time; KV {r.kv_tokens:,} tokens x "
        f"{r.kv_bytes_per_token:,} B = {_gib(r.kv_tokens * r.kv_bytes_per_token)}{cache}"
    )


def _memory_lines(memory: Memory) -> list[str]:
    """A table: items down, phases across, their sums below; the peak is marked."""
    width = max(len(name) for name in memory.items) + 2
    phases = memory.phases.values()
    rows = ["memory (estimate)".ljust(width) + "".join(f"{name:>14}" for name in memory.phases)]
    for item, size in memory.items.items():
        rows.append(item.ljust(width) + "".join(f"{_gib(size) if item in parts else '-':>14}" for parts in phases))
    rows.append("sum".ljust(width) + "".join(f"{_gib(size):>14}" for size in memory.peaks.values()))
    return [*rows, f"peak {_gib(memory.peak_bytes)} in {memory.peak_phase}"]


def _count(number: int | float, noun: str) -> str:
    several = {"trajectory": "trajectories", "micro-batch": "micro-batches"}.get(noun, f"{noun}s")
    return f"{number:,g} {noun}" if number == 1 else f"{number:,.10g} {several}"


def _gib(size: int) -> str:
    """Three significant digits: 942 MiB, 1.84 GiB."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            value = size / scale
            return f"{value:.{max(0, 3 - len(str(int(value))))}f} {unit}"
    return f"{size} B"
