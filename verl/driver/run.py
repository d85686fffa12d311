"""A run: the parts that `assemble` made, and what the loop does with them at the ends of a step."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from verl.algorithms.resolve import Algorithm
from verl.checkpoint.store import CheckpointStore, DiskFull
from verl.config.schema import Config
from verl.driver import state as train_state
from verl.driver.evaluate import evaluate
from verl.driver.measure import batch_metrics
from verl.driver.play import Player, RunEnded, Trajectories
from verl.rollout.base import RolloutEngine
from verl.track.console import LiveProgress
from verl.track.events import EventLog
from verl.track.health import Alarm, check_health
from verl.track.metrics import TimeLedger, reduce, write_units
from verl.track.report import write_report
from verl.track.sinks import Sinks
from verl.types import Metric, Metrics, Refs, Task, merge_metrics
from verl.weight_sync.base import CheckpointEngine, SyncReport
from verl.workers.group import WorkerGroup
from verl.workers.placement import Placement
from verl.workers.waits import Waits

RECORD_AFTER_S = (
    0.1  # samples are written once the next rollout is under way: at its start the event loop has most to do
)
PREEMPTED = 75  # exit code after a save on SIGTERM (EX_TEMPFAIL)


class Stopped(RuntimeError):
    """SIGTERM came: the step was finished and saved."""


@dataclass(slots=True)
class Step:
    """One turn of the driver. index counts from 0; number = index + 1 names it in logs and checkpoints."""

    index: int
    ledger: TimeLedger
    metrics: Metrics = field(default_factory=dict)

    @property
    def number(self) -> int:
        return self.index + 1

    def clock(self, phase: str) -> AbstractContextManager[Any]:
        return self.ledger.phase(phase)

    def log(self, metrics: Mapping[str, Metric]) -> None:
        self.metrics = merge_metrics([self.metrics, metrics])


@dataclass(slots=True, kw_only=True)
class Run:
    config: Config
    dir: Path
    algorithm: Algorithm
    total_steps: int
    player: Player
    trajectories: Trajectories
    eval_tasks: Sequence[Task]
    actor: WorkerGroup
    ref: WorkerGroup | None
    compute: WorkerGroup
    recorder: WorkerGroup
    critic: WorkerGroup | None
    reward: WorkerGroup | None
    rollout: RolloutEngine
    replicas: Sequence[RolloutEngine]
    checkpoint_engine: CheckpointEngine
    placement: Placement
    store: CheckpointStore
    lock: IO[str]
    events: EventLog
    sinks: Sinks
    progress: LiveProgress
    waits: Waits
    close_parts: Callable[[], Any]
    export_hf: Callable[[Path], None]
    checkpoint_bytes: int
    kl_coef: float = 0.0
    critic_warm: bool = False
    version: int = 0
    first_index: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    last_eval: dict[str, float] = field(default_factory=dict)
    stop_requested: bool = False
    on_step: Callable[[int, Mapping[str, float]], None] | None = None
    _publishing: asyncio.Task[None] | None = None
    _recording: asyncio.Task[None] | None = None
    _record_now: asyncio.Event = field(default_factory=asyncio.Event)
    _sync_metrics: Metrics = field(default_factory=dict)
    _resumed: Mapping[str, Any] | None = None

    # -- the loop's own words ------------------------------------------------------------------------------------------

    def playing(self) -> Player:
        return self.player

    def steps(self) -> Iterator[Step]:
        """Steps after the resumed one, each with a fresh ledger."""
        for index in range(self.first_index, self.total_steps):
            if self.stop_requested:
                raise Stopped(f"SIGTERM: stopped before step {index + 1} of {self.total_steps}; the run resumes there")
            yield Step(index, TimeLedger())

    async def call(self, group: WorkerGroup, method: str, *args: Any) -> Any:
        """Submit now, wait with a deadline."""
        future = asyncio.wrap_future(group.submit(method, *args, split="first"))
        return await self.waits.wait(
            future, who="driver", what=f"{group.name}.{method}", timeout_s=self.config.run.wait_timeout_s
        )

    async def start(self) -> None:
        """Load the latest checkpoint if there is one, and make its weights live: nothing is sampled before a verified sync."""
        if self._resumed is not None:
            await train_state.restore(self, self._resumed)
            self.events.resume_at(self.first_index + 1)
        await self._sync(self.version)
        if self._resumed is not None:
            train_state.resume_groups(self, self._resumed)
        self._resumed = None
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            loop.add_signal_handler(signal.SIGTERM, self._ask_to_stop)
        if self.first_index == 0 and self.config.run.eval_before and self.eval_tasks:
            step = Step(-1, TimeLedger())
            with step.clock("evaluate"):
                step.log(await evaluate(self, 0))
            step.ledger.stop()
            self._log(step, {})

    def resume_from(self, state: Mapping[str, Any]) -> None:
        self._resumed = state
        self.first_index = int(state["step"])
        self.version = int(state["version"])

    async def trained(self, step: Step, refs: Refs) -> None:
        """The optimizer steps are done: measure the batch, tell the scheduler."""
        stats, self.player.stats = self.player.stats, type(self.player.stats)()
        step.log(batch_metrics(refs, stats, self.player.scheduler.version))
        self.events.append("trained", step.number, {"sample_ids": refs.ids, "version": self.version})
        self.player.trained(step.index, refs)

    async def publish(self, step: Step) -> Metrics:
        """Deliver the weights when due. Colocated: before rollout wakes. Split: in the background, in order."""
        if not self.player.scheduler.publish_due(step.index):
            return {}
        with step.clock("publish"):
            await self.settle()
            self._publishing = asyncio.ensure_future(self._commit(self.version + 1, step.number))
            self._publishing.add_done_callback(self._note_publish)
            await asyncio.sleep(0)  # the snapshot is enqueued before the next optimizer step can be
            if self.placement.colocated:
                await self.settle()
        found, self._sync_metrics = self._sync_metrics, {}
        return found

    async def recorded(self) -> None:
        """Wait for the samples that are being written."""
        if self._recording is not None:
            task, self._recording = self._recording, None
            self._record_now.set()
            await task

    async def settle(self) -> None:
        """Wait for what is under way beside the loop: samples being written, a publish."""
        await self.recorded()
        if self._publishing is not None:
            task, self._publishing = self._publishing, None
            await self.waits.wait(
                task, who="driver", what="the publish under way", timeout_s=3 * self.config.run.wait_timeout_s
            )

    async def finish(self, step: Step, refs: Refs) -> None:
        """Evaluate, checkpoint, record, log. A step is over when its metrics are written."""
        config = self.config.run
        last = step.number == self.total_steps
        if self.eval_tasks and (_due(step.number, config.eval_every_steps) or (last and config.eval_after)):
            await self.settle()
            with step.clock("evaluate"):
                step.log(await evaluate(self, step.number))
        with step.clock("log"):
            await self.recorded()  # one at a time; this step's are written while the next one rolls out
            self._record_now.clear()
            self._recording = asyncio.ensure_future(self._record(step.number, refs))
            if last or _due(step.number, self.config.track.report_every_steps):
                await self.recorded()
        if _due(step.number, config.save_every_steps) or last or self.stop_requested:
            # What a checkpoint follows from is on disk before it: a kill right after its commit loses no record.
            self.events.flush(fsync=True)
            self.sinks.keep(step.number, reduce(step.metrics))
            with step.clock("checkpoint"):
                await self.save(step)
        step.ledger.stop()
        self._log(step, self._perf(step, refs))

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    async def save(self, step: Step) -> None:
        """A checkpoint of everything. A full disk is a warning: what is there stays, the run goes on."""
        await self.settle()
        state = await train_state.capture(self, step.number)
        best = reduce(step.metrics).get(self.config.run.keep_best) if self.config.run.keep_best else None
        try:
            await self.call(
                self.actor,
                "call",
                lambda engine: train_state.write(
                    self.store, step.number, state, self.export_hf, self.checkpoint_bytes, best
                ),
            )
        except (DiskFull, OSError) as e:
            self.progress.message(f"warning: checkpoint of step {step.number} was not written: {e}")
            self.events.append("save_failed", step.number, {"error": str(e)})
            if step.number == self.total_steps:
                raise
            return
        self.events.append("saved", step.number, {"version": self.version})
        self.events.flush(fsync=True)

    # -- private -----------------------------------------------------------------------------------------------------

    async def _record(self, number: int, refs: Refs) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._record_now.wait(), RECORD_AFTER_S)
        await self.waits.wait(
            asyncio.to_thread(self.events.flush),
            who="driver",
            what="the events to be written",
            timeout_s=self.config.run.wait_timeout_s,
        )
        await self.call(self.recorder, "record", number, refs)

    def _ask_to_stop(self) -> None:
        self.stop_requested = True
        self.progress.message("SIGTERM: finishing this step, then saving")

    def _note_publish(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.player.fail(error)

    async def _commit(self, version: int, number: int) -> None:
        report = await self._sync(version)
        self.version = version
        self.player.published(version)
        self.events.append(
            "published", number, {"version": version, "changed": report.changed, "canary": report.canary_max_abs}
        )

    async def _sync(self, version: int) -> SyncReport:
        """Publish the trainer's weights as `version` and verify them."""
        mode = "keep" if self.config.pipeline.partial_rollout else "wait"
        report = await self.waits.wait(
            self.checkpoint_engine.publish(
                self.actor,
                self.replicas,
                version=version,
                fenced=self.placement.colocated,
                on_inflight=mode,  # type: ignore[arg-type]
                timeout_s=self.config.run.wait_timeout_s,
            ),
            who="driver",
            what=f"the publish of version {version}",
            timeout_s=2 * self.config.run.wait_timeout_s,
        )
        for text in (*report.alarms, *(f"replica {i} failed: {e}" for i, e in report.failed_replicas.items())):
            self.progress.message(f"warning: weight sync: {text}")
        self._sync_metrics = {
            "sync/version": Metric(version, 1, "step", "last"),
            "sync/canary_max_abs": Metric(report.canary_max_abs, 1, "step", "max"),
            "sync/bytes": Metric(report.num_bytes, 1, "step", "last"),
            "sync/seconds": Metric(sum(report.seconds.values()), 1, "step", "sum"),
        }
        return report

    def _perf(self, step: Step, refs: Refs) -> dict[str, float]:
        wall = step.ledger.wall_s
        tokens = sum(r.total_tokens for r in refs)
        return {
            "perf/total_num_tokens": tokens,
            "perf/time_per_step": wall,
            "perf/throughput": tokens / wall if wall > 0 else 0.0,
        }

    def _log(self, step: Step, more: Mapping[str, float]) -> None:
        values = {**reduce(step.metrics), **step.ledger.metrics(), **more}
        values["training/global_step"] = float(step.number)
        if step.number > 0:
            values["training/epoch"] = self.player.cursor.state()["next_draw"] / self.player.cursor.state()["num_tasks"]
        write_units(self.dir, step.metrics)
        self.sinks.log(step.number, values)
        self.history.append(values)
        self.last_eval.update({k: v for k, v in values.items() if k.startswith("eval/")})
        if _due(step.number, self.config.track.report_every_steps):
            self.events.flush()
            write_report(self.dir)
        if self.on_step is not None:
            self.on_step(step.number, values)
        self._mind(check_health(self.history, self.config.health))

    def _mind(self, alarms: Sequence[Alarm]) -> None:
        for alarm in alarms:
            self.progress.message(f"{alarm.level}: {alarm.name}: {alarm.message}")
            self.events.append(
                "alarm", len(self.history), {"level": alarm.level, "name": alarm.name, "message": alarm.message}
            )
        stops = [a for a in alarms if a.level == "stop"]
        if stops:
            raise RunEnded(f"{stops[0].name}: {stops[0].message}")

    async def close(self) -> None:
        """Release everything, whatever happened."""
        started = time.monotonic()
        if self._recording is not None:
            self._record_now.set()
            await asyncio.gather(self._recording, return_exceptions=True)
        if self._publishing is not None:
            self._publishing.cancel()
            await asyncio.gather(self._publishing, return_exceptions=True)
        try:
            await self.rollout.close()
            result = self.close_parts()
            if asyncio.iscoroutine(result):
                await result
            for group in (self.actor, self.ref, self.critic, self.reward, self.compute, self.recorder):
                if group is not None:
                    group.close(timeout_s=max(1.0, 10.0 - (time.monotonic() - started)))
        finally:
            self.events.close()
            self.sinks.close()
            self.progress.stop()
            self.lock.close()
            if threading.current_thread() is threading.main_thread():
                asyncio.get_running_loop().remove_signal_handler(
                    signal.SIGTERM
                )  # uvloop would leave it there, for no loop


def _due(number: int, every: int) -> bool:
    return every > 0 and number % every == 0
