"""The records of a run: metrics, events, samples, the report, health. A step is over when its metrics are written."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verl.config.schema import Config
from verl.driver.queue_rows import QueueRows
from verl.driver.record import SampleRecorder
from verl.driver.rollouts import RunEnded
from verl.driver.step import Step
from verl.report.page import write_report
from verl.track.console import LiveProgress
from verl.track.events import EventLog
from verl.track.health import check_health
from verl.track.metrics import reduce, units_of
from verl.track.sinks import Sinks
from verl.track.verl_names import verl_names
from verl.types import Refs, Trajectory
from verl.workers.group import WorkerGroup
from verl.workers.waits import Waits

RECORD_AFTER_S = 0.1  # samples are written after the start of the next rollout, when the event loop has less work
QUIET_STEPS = 20  # an alarm has ended after this many steps without it
OnStep = Callable[[int, Mapping[str, float]], None]


@dataclass(eq=False, kw_only=True)
class Reporter:
    """Writes the records of a run and prints its messages."""

    config: Config
    """The configuration of the run."""
    run_dir: Path
    """The run directory."""
    sinks: Sinks
    """Receive the numbers of each step."""
    events: EventLog
    """The log of events."""
    progress: LiveProgress
    """The console."""
    waits: Waits
    """The waits of the run."""
    recorder: WorkerGroup | None
    """The worker that writes samples; None in a supervised run."""
    on_step: OnStep | None
    verl_names: bool
    rows: QueueRows | None = None
    """Drops the rows that the recorder has written."""
    history: list[dict[str, float]] = field(default_factory=list)
    last_eval: dict[str, float] = field(default_factory=dict)
    _raised: dict[str, int] = field(default_factory=dict)
    """Alarm -> length of the history when it was raised last."""
    _warned: set[str] = field(default_factory=set)
    _recording: asyncio.Task[None] | None = None
    _record_now: asyncio.Event = field(default_factory=asyncio.Event)

    # -- samples -------------------------------------------------------------------------------------------------------

    async def record(self, step: int, refs: Refs, truths: Mapping[str, Any]) -> None:
        """Start to write the samples of a step, while the next one runs, and then drop its rows from the queue. One
        step at a time. truths: ground truth by task id."""
        await self.wait_recorded()
        self._record_now.clear()
        self._recording = asyncio.ensure_future(self._record(step, refs, truths))

    async def record_eval(self, step: int, found: Sequence[Trajectory], truths: Mapping[str, Any]) -> None:
        assert self.recorder is not None
        written = self.recorder.submit(SampleRecorder.record_eval, [(step, found, truths)])
        await self._done(written, "recorder.record_eval")

    async def wait_recorded(self) -> None:
        """Wait until the samples that are being written are on disk."""
        if self._recording is not None:
            task, self._recording = self._recording, None
            self._record_now.set()
            await task

    async def _record(self, step: int, refs: Refs, truths: Mapping[str, Any]) -> None:
        assert self.recorder is not None and self.rows is not None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._record_now.wait(), RECORD_AFTER_S)
        await self.waits.wait(
            asyncio.to_thread(self.events.flush),
            waiter="driver",
            what="the events to be written",
            timeout_s=self.config.run.wait_timeout_s,
        )
        await self._done(self.recorder.submit(SampleRecorder.record, [(step, refs, truths)]), "recorder.record")
        self.rows.drop(refs)

    async def _done(self, future: Future[list[list[str]]], what: str) -> None:
        """Wait for a call of the recorder and print the lines that it returns."""
        found = await self.waits.wait(
            asyncio.wrap_future(future), waiter="driver", what=what, timeout_s=self.config.run.wait_timeout_s
        )
        self._print(found)

    def _print(self, tables: Sequence[Sequence[str]]) -> None:
        for lines in tables:
            for line in lines:
                self.progress.message(line)

    # -- metrics -------------------------------------------------------------------------------------------------------

    def keep(self, step: Step) -> None:
        """Write all records of the run so far to disk before a checkpoint, so that a kill right after its commit loses
        none."""
        self.sinks.keep(step.number, reduce(step.metrics))
        self.events.flush(fsync=True)

    def log(self, step: Step, *, tokens: int, more: Mapping[str, float]) -> dict[str, float]:
        """Close the step's ledger, pass its values to the sinks, and return them."""
        step.ledger.stop()
        wall_s = step.ledger.wall_s
        values = {**reduce(step.metrics), **step.ledger.metrics(), **more, "training/global_step": float(step.number)}
        if tokens:
            values |= {
                "perf/total_num_tokens": tokens,
                "perf/time_per_step": wall_s,
                "perf/throughput": tokens / wall_s if wall_s > 0 else 0.0,
            }
        if self.verl_names:
            answers = step.metrics.get("response_length/mean")
            values |= verl_names(values, answers.total if answers is not None else 0.0)
        self.sinks.log(step.number, values, units_of(step.metrics))
        if why := self.progress.newly_lost():
            self.events.append("console_lost", step.number, {"why": why})
        self.history.append(values)
        self.last_eval.update({k: v for k, v in values.items() if k.startswith("eval/")})
        if self.report_due(step.number):
            self.events.flush()
            self.write_report()
        if self.on_step is not None:
            self.on_step(step.number, values)
        return values

    def write_report(self) -> Path | None:
        """Write the page of the run and return its path. Return None if the disk has no space or a record is damaged;
        the run continues."""
        try:
            return write_report(self.run_dir, self._warn_once)
        except (OSError, ValueError, KeyError, TypeError) as e:
            self.progress.message(f"warning: the report in {self.run_dir} was not written: {e}")
            return None

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self.progress.message(f"warning: {text}")

    def report_due(self, number: int) -> bool:
        return due(number, self.config.track.report_every_steps)

    def check_health(self) -> None:
        """Record the alarms of the step. Print those that begin, and those that have ended: QUIET_STEPS steps without
        them. Raise RunEnded if an alarm stops the run."""
        alarms, number = check_health(self.history, self.config.health), len(self.history)
        for alarm in alarms:
            if alarm.name not in self._raised:
                self.progress.message(f"{alarm.level}: {alarm.name}: {alarm.message}")
            self._raised[alarm.name] = number
            self.events.append("alarm", int(self.history[-1]["training/global_step"]), asdict(alarm))
        for name in [name for name, last in self._raised.items() if number - last >= QUIET_STEPS]:
            self.progress.message(f"over: {name}: the last {QUIET_STEPS} steps did not have it")
            del self._raised[name]
        stops = [a for a in alarms if a.level == "stop"]
        if stops:
            raise RunEnded(f"{stops[0].name}: {stops[0].message}")

    # -- the end -------------------------------------------------------------------------------------------------------

    async def finish_recording(self) -> None:
        """Write the rows that wait, and end the recorder before its cluster ends."""
        if self._recording is not None:
            self._record_now.set()
            await asyncio.gather(self._recording, return_exceptions=True)
        if self.recorder is not None:
            last = asyncio.wrap_future(self.recorder.submit(SampleRecorder.finish, [()]))
            done, _ = await asyncio.wait({last}, timeout=10)
            if done and not last.cancelled() and last.exception() is None:
                self._print(last.result())
            self.recorder.close(1.0)

    def close(self) -> None:
        self.events.close()
        self.sinks.close()
        self.progress.close()


def due(number: int, every: int) -> bool:
    return every > 0 and number % every == 0
