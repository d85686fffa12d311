"""Supervised runs (SFT, reward models, preferences) on the same roles, queue and terms as RL: rows -> weights ->
optimizer steps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np

from verl.batch import Ragged
from verl.config.schema import Config
from verl.data.source import Cursor
from verl.driver.checkpointer import Checkpointer
from verl.driver.reporter import Reporter, due
from verl.driver.roles import Learner
from verl.driver.stages import Stage
from verl.driver.state import DriverState, restore_rng, rng_state
from verl.driver.step import Step, inputs_of
from verl.driver.stopping import StopRequest
from verl.driver.task_media import images_stored
from verl.types import Metrics, Refs, merge_metrics
from verl.workers.model_workers import OptimizerStep

TRAINER = "trainer"
EVAL_ROWS = 256
"""The evaluation rows that are used if `data.max_eval_rows` is null."""


@dataclass(slots=True, kw_only=True)
class SupervisedRun:
    """The parts of an SFT, reward-model or preference run."""

    config: Config
    dir: Path
    total_steps: int
    stage: Stage
    eval_stage: Stage | None
    cursor: Cursor
    learner: Learner
    checkpointer: Checkpointer
    reporter: Reporter
    stop: StopRequest
    lock: IO[str]
    first_index: int = 0

    def close(self) -> None:
        self.learner.close(0.0 if self.stop.abandoned else 10.0)
        self.reporter.close()
        self.lock.close()
        drivers = self.learner.cluster.drivers
        self.stop.close(deaf=drivers is not None and drivers.broken)


async def fit(run: SupervisedRun) -> dict[str, float]:
    """Train to the end of the run, and return the values of the last step."""
    config = run.config.run
    values: dict[str, float] = {}
    await _restore(run)
    run.stop.listen()
    for index in range(run.first_index, run.total_steps):
        if stopping := await run.learner.agreed(run.stop.requested):
            run.stop.requested = stopping  # the first driver got the signal; all drivers stop here
            stopped = await run.checkpointer.stopped(_state(run, index), run.total_steps)
            await run.learner.finish()
            raise stopped
        step, beginning = Step(index), _state(run, index)
        with step.clock("data"):
            draws = [run.cursor.next() for _ in range(run.config.step.prompts_per_step)]
            refs = await put_rows(run.learner, run.stage, [d.index for d in draws], [f"s{d.draw}" for d in draws])
        with step.clock("checkpoint"):
            await run.checkpointer.hold(index)
        with step.clock("update"):
            update, why_not = _update(run, step, refs), partial(run.checkpointer.no_way_back, index)
            if not await run.stop.unless_given_up(update, ", the state at its beginning is saved", why_not):
                run.stop.abandoned = True
                raise await run.checkpointer.stopped(beginning, run.total_steps)
        await run.checkpointer.updated(step.ledger.seconds()["update"])
        last = step.number == run.total_steps
        if due(step.number, config.eval_every_steps) or (last and config.eval_after):
            with step.clock("evaluate"):
                together, then = run.learner.why_together, ", its evaluation is left out"
                await run.stop.unless_given_up(_evaluate(run, step), then, together)
        if await run.learner.agreed(run.checkpointer.cadence.due(step.number) or last or bool(run.stop.requested)):
            run.reporter.keep(step)
            with step.clock("checkpoint"):
                await run.checkpointer.save(_state(run, step.number), last=last)
        values = run.reporter.log(step, tokens=sum(r.total_tokens for r in refs), more={})
    return values


async def _evaluate(run: SupervisedRun, step: Step) -> None:
    step.log(await evaluate_rows(run))


async def put_rows(learner: Learner, stage: Stage, indices: Sequence[int], names: Sequence[str]) -> Refs:
    """Put the samples of these entries into the queue, with their images and the stage's own columns."""
    with images_stored(learner.queue.media, f"rows from {names[0]}") as store:
        samples, columns = await asyncio.to_thread(stage.rows, indices, names, store)  # files of images are read
        refs = await learner.rows.put(samples)
    offsets = np.cumsum([0, *(r.loss_tokens for r in refs)], dtype=np.int64)
    learner.queue.write(refs, {name: Ragged(column, offsets) for name, column in columns.items()})
    return refs


async def _update(run: SupervisedRun, step: Step, refs: Refs) -> None:
    learner, terms = run.learner, run.stage.terms
    steps, inputs = [OptimizerStep(refs)], inputs_of(terms)
    await learner.done(learner.compute.weigh(steps, terms, inputs), "compute.weigh")
    update = learner.models[TRAINER].update(steps, terms, inputs, prefix="train/")
    step.log(await learner.done(update, "trainer.update"))
    learner.rows.drop(refs)


async def evaluate_rows(run: SupervisedRun) -> Metrics:
    """Compute the stage's own loss and metrics on the evaluation rows, without an optimizer step."""
    stage, learner = run.eval_stage, run.learner
    if stage is None:
        return {}
    limit, rows_at_once = run.config.data.max_eval_rows, run.config.step.prompts_per_step
    count = min(len(stage.table), EVAL_ROWS if limit is None else limit)
    inputs = inputs_of(stage.terms)
    parts = []
    for at in range(0, count, rows_at_once):
        indices = range(at, min(count, at + rows_at_once))
        refs = await put_rows(learner, stage, indices, [f"e{i}" for i in indices])
        await learner.done(learner.compute.weigh([OptimizerStep(refs)], stage.terms, inputs), "compute.weigh")
        found = learner.models[TRAINER].measure(OptimizerStep(refs), stage.terms, inputs)
        parts.append(await learner.done(found, "trainer.measure"))
        learner.rows.drop(refs)
    return {f"val/{name}": metric for name, metric in merge_metrics(parts).items()}


def _state(run: SupervisedRun, number: int) -> DriverState:
    return DriverState(step=number, rng=rng_state(), cursor=run.cursor.state(), history=run.reporter.history[-1:])


async def _restore(run: SupervisedRun) -> None:
    state = await run.checkpointer.restore()
    if state is not None:
        run.cursor.load_state(state.cursor)
        restore_rng(state.rng)
