"""The checkpoints of a run on disk, and warnings about a disk or a memory that is too small."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from verl.algorithms.presets import settled
from verl.bounds import counted, size_text
from verl.checkpoint.store import SLACK_BYTES
from verl.config.image_models import frozen_values
from verl.config.lora_layers import trained_factors
from verl.config.model_files import ModelFacts, describe_model, find_model_folder
from verl.config.schema import Config
from verl.model_engine.optimizer_table import optimizer_bytes
from verl.planner.memory import MemoryEstimate

SAVE_EVERY_S, SAVE_SHARE = 1800.0, 0.05
"""The default checkpoint interval, and the most of the run's time that checkpoints take."""
EXPORT_BYTES = 4
"""Bytes per parameter of the hf folder of a checkpoint."""
_COMPANIONS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")  # files of a model folder beside the weights


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
    factors = trained_factors(config)
    exported = own
    if factors is not None:
        exported = factors.parameters + factors.whole(head=command != "rm") + model.hidden * (command == "rm")
    parts = {
        "weights": EXPORT_BYTES * exported + sum(p.stat().st_size for p in beside),
        "state": _state_bytes(config, model, own, frozen_values(config), head=command != "rm"),
    }
    if command == "train" and config.teacher.ema:
        parts["average"] = 4 * exported
    if command == "train" and settled(config.algorithm.name, config.algorithm.given()).critic:
        critic = model if config.critic.path is None else describe_model(config.critic.path)
        parts["critic"] = _state_bytes(config, critic, critic.body_parameters, head=False)
    return parts


def _state_bytes(
    config: Config, model: ModelFacts, parameters: int, frozen: tuple[int, int] = (0, 0), *, head: bool
) -> int:
    """Return the bytes of the masters and optimizer states of a trained role: under LoRA of its factors and of weights
    that are trained whole. frozen: the values that are not trained, and those outside of layers among them · head: it
    has an output head"""
    matrices, short_side = model.body_parameters - model.embedding_parameters - frozen[0] + frozen[1], model.hidden
    parameters -= frozen[0]
    if (factors := trained_factors(config, model.folder)) is not None:
        parameters, matrices, short_side = factors.parameters, factors.parameters, factors.rank
        parameters += factors.whole(head=head)
    others, optim = parameters - matrices, config.optim
    states = optimizer_bytes(optim.name, optim.options, matrices=matrices, others=others, short_side=short_side)
    return 4 * parameters + states


def checkpoint_bytes(config: Config, command: str = "train") -> int:
    return sum(checkpoint_parts(config, command).values())


def checkpoints_made(every_steps: int | None) -> str:
    if every_steps is None:
        share = f"{SAVE_SHARE:.0%} of the time"
        return f"every {SAVE_EVERY_S / 60:.0f} minutes of work (but for at most {share}), at the end and at a stop"
    return (
        f"every {counted(every_steps, 'step')}, at the end and at a stop" if every_steps else "at the end and at a stop"
    )


def free_disk_bytes(place: Path) -> int:
    """Return the bytes that are free on the disk of a folder that exists."""
    return shutil.disk_usage(place).free


def small_disk(config: Config, needed_bytes: int) -> Iterator[str]:
    """Yield a warning if the disk has no space for the checkpoints beside its present content. The run's own are
    replaced."""
    needed_bytes += SLACK_BYTES
    run_dir = Path(config.run.root_dir) / config.run.name
    there = sum(p.stat().st_size for p in (run_dir / "checkpoints").rglob("*") if p.is_file())
    place = next(p for p in (run_dir.absolute(), *run_dir.absolute().parents) if p.is_dir())
    free = free_disk_bytes(place)
    if there + free < needed_bytes:
        yield (
            f"{run_dir}: the checkpoints need {size_text(needed_bytes)}, but the disk has {size_text(free)} free: free "
            "some, lower run.keep_last_checkpoints, or set another run.root_dir"
        )


def small_memory(memory: MemoryEstimate, has: int) -> Iterator[str]:
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
