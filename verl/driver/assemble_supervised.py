"""Build the parts of a supervised run (SFT, reward models, preferences) from its configuration."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from verl.algorithms.preference import preference_terms, reward_terms
from verl.algorithms.presets import preference
from verl.chat import turn_end
from verl.config.backends import layout_of
from verl.config.load import Resolved
from verl.config.model_files import find_model_folder
from verl.config.schema import Config
from verl.data.preference import load_pairs
from verl.data.source import Cursor, load_conversations
from verl.driver.assemble import context_of, learner_of, reporter_of, say_notes, total_steps_of, trained_roles
from verl.driver.assemble_images import refuse_unstored
from verl.driver.checkpointer import Checkpointer
from verl.driver.identity import start_beside_folder
from verl.driver.models import hf_export, trained, workers_of
from verl.driver.reporter import OnStep
from verl.driver.roles import Learner
from verl.driver.run_dir import RunDir, open_run_dir
from verl.driver.setup import (
    data_seed,
    device_of,
    load_tokenizer_of,
    pad_id,
    refuse_unembedded,
    refuse_untrained,
    stop_ids,
    template_lines,
    with_native_dtype,
)
from verl.driver.stages import PreferenceStage, RewardStage, SftStage, Stage, StoreImage, reference_logprobs
from verl.driver.supervised import TRAINER, SupervisedRun
from verl.driver.task_media import images_stored
from verl.driver.together import open_together
from verl.driver.worker_setup import set_up_worker
from verl.errors import Refused
from verl.planner.disk import checkpoint_bytes
from verl.planner.plan import trained_warnings
from verl.planner.updates import update_text
from verl.track.console import LiveProgress
from verl.types import Sample
from verl.workers.group import DevicePlace, Drivers
from verl.workers.torchrun import launched
from verl.workers.waits import Waits


async def assemble_supervised(
    resolved: Resolved,
    command: Literal["sft", "rm", "dpo"],
    *,
    progress: LiveProgress | None = None,
    on_step: OnStep | None = None,
) -> SupervisedRun:
    """Build every part of an SFT, reward-model or preference run. The rows are read and checked before a model is
    loaded."""
    resolved, launch = replace(resolved, config=with_native_dtype(resolved.config)), launched()
    config = resolved.config
    set_up_worker(config, None, DevicePlace(neighbours=launch.local_world_size if launch else 1))
    tokenizer = load_tokenizer_of(config, needs_template=False)
    if command == "rm":
        hf_export(config, head="score")  # refuses what could not be saved
    stages = _stages(config, command, tokenizer)
    refuse_untrained(config, command, stages[0].table)
    drivers = _drivers(config, stages) if launch else None
    made = stages[0].table.report.contents
    claimed = open_together(resolved, command, drivers, made) if drivers else open_run_dir(resolved, command, made)
    with contextlib.ExitStack() as refused:  # a refused start may be tried again in this process
        refused.callback(claimed.lock.close)
        shown = progress or LiveProgress()
        run = await _run_of(resolved, command, claimed, tokenizer, stages, shown, on_step, drivers, refused)
        refused.pop_all()  # the run closes them
        return run


async def _run_of(
    resolved: Resolved,
    command: Literal["sft", "rm", "dpo"],
    claimed: RunDir,
    tokenizer: Any,
    stages: tuple[Stage, Stage | None, str],
    progress: LiveProgress,
    on_step: OnStep | None,
    drivers: Drivers | None,
    refused: contextlib.ExitStack,
) -> SupervisedRun:
    config, (stage, eval_stage, summary) = resolved.config, stages
    for line in (f"data: {summary}", *(template_lines(config, tokenizer) if command != "rm" else ())):
        progress.message(line)
    if config.optim.name != "adamw":
        progress.message(f"optimizer: {update_text(config)}")
    for line in trained_warnings(config):
        progress.message(f"warning: {line}")
    num_steps = total_steps_of(config, len(stage.table), config.step.prompts_per_step)
    head: Literal["lm", "score"] = "score" if command == "rm" else "lm"
    share, waits = command != "sft", Waits((claimed.records or claimed.path) / "waits.json")
    crash_dir, roles = claimed.path / "crash", (TRAINER, "compute")
    longest = config.data.max_tokens_per_row
    context = context_of(
        config, roles, updates=num_steps, crash_dir=crash_dir, drivers=drivers, longest=longest, tokenizer=tokenizer
    )
    refused.callback(context.cluster.close)
    refuse_unstored(config, [one.table.has_images for one in (stage, eval_stage) if one], context.queue.media)
    export = hf_export(config, head=head, pad_token_id=pad_id(tokenizer))
    trainer = workers_of(context, trained(context, TRAINER, head=head, share_prefix=share, hf_export=export))
    learner = learner_of(context, None, {TRAINER: trainer}, waits)
    for one in (stage, eval_stage):
        if isinstance(one, PreferenceStage) and "ref_logprobs" in one.terms[0].inputs:
            one.reference = await reference_logprobs(  # the engine still has the start weights
                one,
                partial(_logprobs, learner),
                model_dir=Path(config.model.path),
                dtype=config.model.dtype,
                cache_dir=config.data.cache_dir,
                note=progress.message,
                drivers=drivers,
                start=start_beside_folder(config),
            )
    reporter = reporter_of(claimed, resolved, progress, waits, num_steps, on_step=on_step)
    needed_bytes = checkpoint_bytes(config, command)
    checkpointer = Checkpointer(claimed, learner, trained_roles(learner), needed_bytes, reporter)
    say_notes(learner, progress.message)
    return SupervisedRun(
        config=config,
        dir=claimed.path,
        total_steps=num_steps,
        stage=stage,
        eval_stage=eval_stage,
        cursor=Cursor(len(stage.table), data_seed(config), config.data.shuffle),
        learner=learner,
        checkpointer=checkpointer,
        reporter=reporter,
        stop=checkpointer.stop,
        lock=claimed.lock,
        first_index=claimed.state.step if claimed.state else 0,
    )


async def _logprobs(learner: Learner, made: Callable[[StoreImage], list[Sample]]) -> list[np.ndarray]:
    """Return the log-probs of the trainable tokens of each row that the function makes, float32."""
    with images_stored(learner.queue.media, "rows of the start weights") as store:
        refs = await learner.rows.put(await asyncio.to_thread(made, store))
    found = await learner.done(learner.models[TRAINER].logprobs(refs), "trainer.logprobs")
    learner.rows.drop(refs)
    return found


def _drivers(config: Config, stages: tuple[Stage, Stage | None, str]) -> Drivers:
    """Join the processes that torchrun started, after a check that all of them have read the same rows, and images in
    the same way."""
    from verl.workers.spmd import join_processes  # one process needs no torch.distributed

    wait_s = config.run.wait_timeout_s
    drivers = join_processes(layout_of(config), device_of(config), wait_s, max(wait_s, config.cluster.start_timeout_s))
    keys = drivers.gather([stage.table.key for stage in stages[:2] if stage]).result()
    for number, key in enumerate(keys):
        if key != keys[0]:
            raise Refused(
                f"rank {number} has read other rows than rank 0: data.train_files and data.eval_files must be the same "
                "files on every node, and so must the settings of images in model.path"
            )
    return drivers


def _stages(config: Config, command: str, tokenizer: Any) -> tuple[Stage, Stage | None, str]:
    """Return the training stage, the evaluation stage if there are evaluation files, and a line about the rows."""
    kwargs, p, stops = config.model.template_kwargs, config.preference, stop_ids(config, tokenizer)
    model = find_model_folder(config.model.path)
    files = ((config.data.train_files, config.data.max_rows), (config.data.eval_files, config.data.max_eval_rows))
    if command == "sft":
        read = partial(load_conversations, tokenizer=tokenizer, cfg=config.data, template_kwargs=kwargs, stops=stops)
        read = partial(read, model=model)
        tables = [read(f, max_rows=n) if f else None for f, n in files]
        assert tables[0] is not None, "validated"
        refuse_unembedded(config, tokenizer, *(table.report for table in tables if table))
        return SftStage(tables[0]), SftStage(tables[1]) if tables[1] else None, tables[0].report.summary()
    terms = (
        reward_terms(center_coef=p.center_coef, margin=p.use_margin)
        if command == "rm"
        else preference_terms(p.loss, beta=p.beta, options=p.options)
    )
    row = preference(p.loss)
    paired, needs_gap = command == "rm" or row.paired, p.use_margin if command == "rm" else row.needs_gap
    if not paired and config.step.prompts_per_step < 2:
        raise Refused(
            "step.prompts_per_step=1: kto compares rows with the other rows of a step; set at least 2 (64 is usual)"
        )
    kind: dict[str, Any] = {"paired": paired, "needs_gap": needs_gap, "template_kwargs": kwargs, "stops": stops}
    kind["model"] = model
    pairs = [load_pairs(f, tokenizer, config.data, max_rows=n, **kind) if f else None for f, n in files]
    assert pairs[0] is not None, "validated"
    refuse_unembedded(config, tokenizer, *(table.report for table in pairs if table))
    make: Callable[..., PreferenceStage]
    make = partial(RewardStage, end=turn_end(tokenizer, kwargs)) if command == "rm" else PreferenceStage
    held_out = make(pairs[1], terms, paired) if pairs[1] else None
    return make(pairs[0], terms, paired), held_out, pairs[0].summary()
