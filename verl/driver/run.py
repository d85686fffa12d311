"""An RL run: the parts that `assemble` made, and the methods that the loop calls at the ends of a step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from verl.config.schema import Config
from verl.driver.checkpointer import Checkpointer
from verl.driver.evaluate import evaluate
from verl.driver.fleet import Fleet
from verl.driver.measure import batch_metrics
from verl.driver.publisher import Publisher
from verl.driver.reporter import Reporter, due
from verl.driver.roles import Learner
from verl.driver.rollouts import RolloutManager
from verl.driver.state import DriverState, restore_rng, rng_state
from verl.driver.step import Step
from verl.driver.stopping import StopRequest
from verl.driver.trajectories import TrajectoryRunner
from verl.rollout.base import RolloutEngine
from verl.track.metrics import reduce
from verl.types import Metrics, Refs, Task
from verl.weight_sync.base import SyncReport
from verl.workers.placement import Placement

HISTORY = 200  # steps of metrics in a checkpoint, for the health rules


@dataclass(slots=True, kw_only=True)
class Run:
    """The parts of an RL run, and the methods that its loop calls."""

    config: Config
    dir: Path
    total_steps: int
    learner: Learner
    groups: RolloutManager
    trajectories: TrajectoryRunner
    eval_tasks: Sequence[Task]
    rollout: RolloutEngine
    placement: Placement
    publisher: Publisher
    fleet: Fleet
    checkpointer: Checkpointer
    reporter: Reporter
    stop: StopRequest
    lock: IO[str]
    close_reward: Callable[[], Awaitable[None]]
    close_tools: Callable[[], Awaitable[None]]
    reward_metrics: Callable[[], Metrics]
    first_index: int = 0
    _step: Step | None = None
    _beginning: DriverState | None = None  # the state before `_step`

    @property
    def version(self) -> int:
        return self.publisher.version

    # -- the steps of the loop -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Restore the checkpoint, if there is one, and publish its weights, verified, before anything is sampled."""
        state = await self.checkpointer.restore()
        if state is not None:
            self.groups.cursor.load_state(state.cursor)
            self.reporter.history = state.history
            restore_rng(state.rng)
        await self.publisher.start(state.version if state else 0)
        self.fleet.open()
        if state is not None and state.scheduler is not None:
            await self.groups.restore(state.scheduler, state.groups)
            if state.version > self.groups.scheduler.version:  # the publish committed after that step began
                self.groups.on_published(state.version)

    async def evaluate_first(self) -> None:
        """Evaluate before the first step of a new run."""
        if self.first_index == 0 and self.config.run.eval_before and self.eval_tasks:
            step = Step(-1)
            with step.clock("evaluate"):
                step.log(await evaluate(self, 0))
            self._log(step)

    def steps(self) -> Iterator[Step]:
        """Yield the steps after the resumed one, each with a fresh ledger."""
        for index in range(self.first_index, self.total_steps):
            self._beginning, self._step = self._state(index), Step(index)
            if self.stop.requested:
                raise asyncio.CancelledError("stopped between two steps")
            yield self._step

    async def publish(self, step: Step) -> None:
        """Free the groups after the optimizer steps, and publish the weights if a publish is due: with colocated
        rollout before it wakes, else in the background and in order."""
        step.updated = True
        spent_s = step.ledger.seconds()
        await self.checkpointer.updated(sum(spent_s.get(phase, 0.0) for phase in ("update_critic", "update")))
        stats = self.groups.take_stats()
        step.log(
            batch_metrics(
                step.trained, stats, self.groups.scheduler.version, max_prompt_tokens=self.config.data.max_prompt_tokens
            )
        )
        step.log(self.reward_metrics())
        trained = {"sample_ids": step.trained.ids, "version": self.version}
        self.reporter.events.append("trained", step.number, trained)
        step.truths = self.groups.on_trained(step.index, step.trained)
        if not self.groups.scheduler.publish_due(step.index):
            return
        with step.clock("publish"):
            await self.settle()

            def committed(report: SyncReport) -> None:
                self.groups.on_published(self.version)
                found = {"version": report.version, "changed": report.changed, "canary": report.canary_mean_abs}
                self.reporter.events.append("published", step.number, found)

            self.publisher.publish(committed, self.groups.fail)
            if self.placement.colocated:
                await self.settle()
        step.log(self.publisher.take_metrics())

    async def settle(self) -> None:
        """Wait for background work: samples being written, a publish."""
        await self.reporter.wait_recorded()
        await self.publisher.settle()

    async def finish(self, step: Step, refs: Refs) -> None:
        """End a step: evaluate, save a checkpoint if they are due, record the samples, log the metrics."""
        config = self.config.run
        last = step.number == self.total_steps
        if self.eval_tasks and (due(step.number, config.eval_every_steps) or (last and config.eval_after)):
            await self.settle()
            with step.clock("evaluate"):
                await self.stop.unless_given_up(self._evaluate(step), ", its evaluation is left out")
        with step.clock("log"):
            await self.reporter.record(step.number, step.trained, step.truths)  # written while the next step rolls out
            if last or self.reporter.report_due(step.number):
                await self.reporter.wait_recorded()
        if self.checkpointer.cadence.due(step.number) or last or self.stop.requested:
            self.reporter.keep(step)
            with step.clock("checkpoint"):
                await self.settle()
                best = reduce(step.metrics).get(config.keep_best) if config.keep_best else None
                await self.checkpointer.save(self._state(step.number), last=last, best=best)
        self._log(step, tokens=sum(r.total_tokens for r in refs))

    # -- the end -----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def until_stopped(self, training: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
        """Start the loop as a task, which the block awaits. If a signal ended it, save the state and raise Stopped."""
        self.stop.listen()
        try:
            with self.stop.abandonable(training, ", the state at its beginning is saved", self._why_not) as task:
                yield task
            if not task.cancelled():
                return
            self.stop.abandoned = self._step is not None and self._step.updating
        except asyncio.CancelledError:
            if not self.stop.requested:
                raise
        await self.settle()
        if self._beginning is not None:  # a publish that was under way then has committed since
            self._beginning.version = self.version
        raise await self.checkpointer.stopped(self._beginning, self.total_steps)

    # -- private -----------------------------------------------------------------------------------------------------

    def _why_not(self) -> str:
        """Return why the present step cannot be abandoned; "" if it can."""
        step = self._step
        if step is None or not step.updating:
            return ""
        return "its update is done" if step.updated else self.checkpointer.no_way_back(step.index)

    def _state(self, number: int) -> DriverState:
        """Return the state after `number` steps: all parts that may influence the next one, except models and
        optimizers."""
        return DriverState(
            step=number,
            version=self.version,
            rng=rng_state(),
            cursor=self.groups.cursor.state(),
            scheduler=self.groups.scheduler.state(),
            controllers=copy(self.learner.controllers),
            groups=self.groups.save(),
            history=self.reporter.history[-HISTORY:],
        )

    async def _evaluate(self, step: Step) -> None:
        step.log(await evaluate(self, step.number))

    def _log(self, step: Step, tokens: int = 0) -> None:
        more: dict[str, float] = {}
        if step.number > 0:
            cursor = self.groups.cursor.state()
            more["training/epoch"] = cursor["next_draw"] / cursor["num_tasks"]
        self.reporter.log(step, tokens=tokens, more=more)
        self.reporter.check_health()

    async def close(self) -> None:
        """Close all parts of the run, whether it succeeded or failed."""
        until_s = time.monotonic() + 10.0
        try:
            await self.checkpointer.close()
            await self.reporter.finish_recording()
            await self.fleet.close()
            await self.publisher.close()
            await self.rollout.close()
            await self.close_reward()
            await self.close_tools()
            self.learner.close(0.0 if self.stop.abandoned else max(1.0, until_s - time.monotonic()))
        finally:
            self.reporter.close()
            self.lock.close()
            self.stop.close()
