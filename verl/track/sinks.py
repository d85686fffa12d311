"""The outputs for a step's metrics. `metrics.jsonl` is always written; the others only display them."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from verl.bounds import fast_yaml
from verl.config.schema import Config
from verl.errors import Refused
from verl.track.console import LiveProgress
from verl.track.files import write_atomic
from verl.track.metrics import MetricsLog


class Sink(Protocol):
    """An output that receives `values`, the reduced metrics of `step`."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorboardSink:
    """TensorBoard event files in `runs/<name>/tensorboard/`, written without torch and without TensorFlow."""

    def __init__(self, run_dir: Path, attempt: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summary = event_pb2, summary_pb2.Summary
        self._writer = EventFileWriter(str(run_dir / "tensorboard"), filename_suffix=f".{attempt:04d}")
        self._resuming = attempt > 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._resuming:  # TensorBoard then drops the values of earlier attempts from this step on
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, session_log=start))
            self._resuming = False
        summary = self._summary(value=[self._summary.Value(tag=n, simple_value=float(v)) for n, v in values.items()])
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases. Without an account on this machine it writes offline files (`wandb sync` uploads them)."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        try:
            wandb = importlib.import_module("wandb")
        except ModuleNotFoundError as fault:
            if fault.name != "wandb":
                raise  # it is installed but broken: its own message has the reason
            raise Refused(
                "track.sinks has wandb, which is not installed: pip install '.[wandb]' in verl's folder"
            ) from None
        identity = run_dir / "wandb_id"  # one per run directory: a resumed run continues the same chart
        if not identity.exists():
            write_atomic(identity, os.urandom(4).hex().encode())
        recorded = run_dir / "config.yaml"  # contains no secrets of the environment
        offline = "WANDB_MODE" not in os.environ and not getattr(wandb.api, "api_key", None)
        self._run = wandb.init(
            project=config.track.project,
            name=config.run.name,
            dir=str(run_dir),
            config=fast_yaml(recorded.read_text("utf-8")) if recorded.is_file() else asdict(config),
            id=identity.read_text(),
            resume=None if offline else "allow",
            mode="offline" if offline else None,
            settings=wandb.Settings(console="off"),
        )
        self._run.define_metric("training/global_step")
        self._run.define_metric("*", step_metric="training/global_step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "training/global_step": step})

    def close(self) -> None:
        self._run.finish()


class Sinks:
    """All sinks of a run as one. If a sink other than metrics.jsonl meets a full disk or a lost mount, this is reported
    once and the sink is no longer used, so that a dashboard cannot end a run."""

    def __init__(self, record: MetricsLog, shown: Mapping[str, Sink], report: Callable[[str], None]) -> None:
        self._record, self._shown, self._report = record, dict(shown), report

    def keep(self, step: int, values: Mapping[str, float]) -> None:
        """Write the present metrics of a step to disk as a precaution, until `log` writes the final ones."""
        self._record.keep(step, values)

    def log(self, step: int, values: Mapping[str, float], units: Mapping[str, str] | None = None) -> None:
        self._record.log(step, values, units or {})
        for name, sink in list(self._shown.items()):
            try:
                sink.log(step, values)
            except OSError as fault:
                del self._shown[name]
                self._report(f"warning: sink {name} is left out from step {step} on: {fault}")

    def close(self) -> None:
        self._record.close()
        for name, sink in self._shown.items():
            try:
                sink.close()
            except OSError as fault:
                self._report(f"warning: sink {name} did not close: {fault}")


def open_sinks(run_dir: Path, config: Config, *, attempt: int, progress: LiveProgress) -> Sinks:
    """Open the sinks of `track.sinks`. `progress` is the display of the sink `console` and prints warnings."""
    build: dict[str, Callable[[], Sink]] = {
        "console": lambda: progress,
        "tensorboard": lambda: TensorboardSink(run_dir, attempt),
        "wandb": lambda: WandbSink(run_dir, config),
    }
    shown = {name: make() for name, make in build.items() if name in config.track.sinks}
    return Sinks(MetricsLog(run_dir, attempt, report=progress.message), shown, progress.message)
