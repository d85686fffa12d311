"""Where a step's numbers go. One interface; `metrics.jsonl` is always written and is what the report reads."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from verl.track.console import LiveProgress
from verl.track.files import open_log, whole_lines, write_atomic

METRICS_FILE = "metrics.jsonl"
NAMES = ("console", "jsonl", "tensorboard", "wandb")
_HEAD = ("step", "attempt", "time_s", "texts")


class Sink(Protocol):
    """`values` are reduced metrics of `step`; `texts` are named free texts (a sample, an alarm)."""

    def log(self, step: int, values: Mapping[str, float], texts: Mapping[str, str]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class MetricLine:
    """The metrics of one step as they stand: those of the last attempt that did it."""

    step: int
    attempt: int
    time_s: float
    values: Mapping[str, float]
    texts: Mapping[str, str] = field(default_factory=dict)


class JsonlSink:
    """One strict JSON object per call: step, attempt, time_s (epoch), then every metric under its own name.

    Non-finite numbers are the strings "NaN", "Infinity", "-Infinity". Each line is on disk when `log` returns.
    """

    def __init__(self, run_dir: Path, attempt: int, clock: Callable[[], float] = time.time) -> None:
        self._attempt = attempt
        self._clock = clock
        self._log = open_log(run_dir / METRICS_FILE, _is_whole)

    def log(self, step: int, values: Mapping[str, float], texts: Mapping[str, str]) -> None:
        record: dict[str, Any] = {"step": step, "attempt": self._attempt, "time_s": self._clock()}
        for name, value in values.items():
            assert name not in _HEAD, f"a metric may not be named {name!r}"
            number = float(value)
            record[name] = number if math.isfinite(number) else _word(number)
        if texts:
            record["texts"] = dict(texts)
        self._log.append(json.dumps(record, allow_nan=False, separators=(",", ":")).encode())
        self._log.flush(fsync=True)

    def close(self) -> None:
        self._log.close()


def read_metrics(run_dir: Path) -> list[MetricLine]:
    """One entry per step, in order. Where a step was logged again, by name the later value counts; what an earlier
    attempt logged after the step where a later one began is left out, so that curves never overlap."""
    path = run_dir / METRICS_FILE
    if not path.exists():
        return []
    lines = [_decode(line) for line in whole_lines(path, _is_whole)]
    began: dict[int, int] = {}
    for line in lines:
        began[line.attempt] = min(line.step, began.get(line.attempt, line.step))
    steps: dict[int, MetricLine] = {}
    for line in sorted(lines, key=lambda entry: entry.attempt):
        if any(line.step > step for attempt, step in began.items() if attempt > line.attempt):
            continue
        old = steps.get(line.step)
        if old is not None:
            values, texts = {**old.values, **line.values}, {**old.texts, **line.texts}
            line = MetricLine(line.step, line.attempt, line.time_s, values, texts)
        steps[line.step] = line
    return [steps[step] for step in sorted(steps)]


class TensorboardSink:
    """TensorBoard event files in `runs/<name>/tensorboard/`, written without torch and without TensorFlow."""

    def __init__(self, run_dir: Path, attempt: int, clock: Callable[[], float] = time.time) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.plugins.text import metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._session = event_pb2.Event, summary_pb2.Summary, event_pb2.SessionLog
        self._tensor, self._string_type, self._text_plugin = tensor_pb2.TensorProto, types_pb2.DT_STRING, metadata
        self._writer = EventFileWriter(str(run_dir / "tensorboard"), filename_suffix=f".{attempt:04d}")
        self._clock = clock
        self._resuming = attempt > 0

    def log(self, step: int, values: Mapping[str, float], texts: Mapping[str, str]) -> None:
        if self._resuming:  # TensorBoard then drops what earlier attempts wrote at and after this step
            start = self._session(status=self._session.START)
            self._writer.add_event(self._event(wall_time=self._clock(), step=step, session_log=start))
            self._resuming = False
        items = [self._summary.Value(tag=name, simple_value=float(v)) for name, v in values.items()]
        for name, text in texts.items():
            content = self._tensor(dtype=self._string_type, string_val=[text.encode("utf-8", "replace")])
            about = self._text_plugin.create_summary_metadata(display_name=name, description="")
            items.append(self._summary.Value(tag=name, metadata=about, tensor=content))
        summary = self._summary(value=items)
        self._writer.add_event(self._event(wall_time=self._clock(), step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases. Without an account on this machine it writes offline files (`wandb sync` uploads them)."""

    def __init__(self, run_dir: Path, project: str, run_name: str, config: Mapping[str, Any]) -> None:
        try:
            self._wandb = importlib.import_module("wandb")
        except ModuleNotFoundError as fault:
            if fault.name != "wandb":
                raise  # it is there but broken: its own message says what is missing
            raise ValueError("track.sinks has wandb, which is not installed: pip install 'verl[wandb]'") from None
        offline = "WANDB_MODE" not in os.environ and not getattr(self._wandb.api, "api_key", None)
        self._run = self._wandb.init(
            project=project,
            name=run_name,
            dir=str(run_dir),
            config=dict(config),
            id=self._identity(run_dir),
            resume=None if offline else "allow",
            mode="offline" if offline else None,
            settings=self._wandb.Settings(console="off"),
        )
        self._run.define_metric("training/global_step")
        self._run.define_metric("*", step_metric="training/global_step")

    def log(self, step: int, values: Mapping[str, float], texts: Mapping[str, str]) -> None:
        self._run.log({**values, **texts, "training/global_step": step})

    def close(self) -> None:
        self._run.finish()

    def _identity(self, run_dir: Path) -> str:
        """One id per run directory, so that a resumed run goes on in the same chart."""
        path = run_dir / "wandb_id"
        if not path.exists():
            write_atomic(path, os.urandom(4).hex().encode())
        return path.read_text()


class ConsoleSink:
    """Passes each step to the progress display; texts are not shown."""

    def __init__(self, progress: LiveProgress) -> None:
        self._progress = progress

    def log(self, step: int, values: Mapping[str, float], texts: Mapping[str, str]) -> None:
        self._progress.update(step, values)

    def close(self) -> None:
        self._progress.stop()


class Sinks:
    """All sinks of a run as one. A full disk or lost mount under a sink other than jsonl is reported once and that sink
    is left out from then on: a dashboard does not end a run."""

    def __init__(self, sinks: Mapping[str, Sink], report: Callable[[str], None]) -> None:
        self._sinks = dict(sinks)
        self._report = report

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._sinks)

    def keep(self, step: int, values: Mapping[str, float]) -> None:
        """Write what is known of a step to metrics.jsonl now; its later `log` is joined with this (later values win)."""
        self._sinks["jsonl"].log(step, values, {})

    def log(self, step: int, values: Mapping[str, float], texts: Mapping[str, str] | None = None) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                sink.log(step, values, texts or {})
            except OSError as fault:
                if name == "jsonl":
                    raise
                del self._sinks[name]
                self._report(f"warning: sink {name} is left out from step {step} on: {fault}")

    def close(self) -> None:
        """Close all, the record of the run first."""
        for name, sink in self._sinks.items():
            try:
                sink.close()
            except OSError as fault:
                if name == "jsonl":
                    raise
                self._report(f"warning: sink {name} did not close: {fault}")


def open_sinks(
    names: Sequence[str],
    run_dir: Path,
    project: str,
    run_name: str,
    config: Mapping[str, Any],
    *,
    attempt: int = 0,
    progress: LiveProgress | None = None,
) -> Sinks:
    """The sinks of `track.sinks` (jsonl is always among them). `progress` is the display that `console` feeds; without
    one, `console` prints to stdout with an unknown number of steps."""
    for name in names:
        if name not in NAMES:
            raise ValueError(f"track.sinks has {name!r}; known: {', '.join(NAMES)}")
    made: dict[str, Sink] = {"jsonl": JsonlSink(run_dir, attempt)}
    report: Callable[[str], None] = _to_stderr
    if "console" in names:
        if progress is None:
            progress = LiveProgress()
            progress.start(None, run_name)
        made["console"], report = ConsoleSink(progress), progress.message
    if "tensorboard" in names:
        made["tensorboard"] = TensorboardSink(run_dir, attempt)
    if "wandb" in names:
        made["wandb"] = WandbSink(run_dir, project, run_name, config)
    return Sinks(made, report)


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _word(number: float) -> str:
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _is_whole(line: bytes) -> bool:
    return line.startswith(b"{") and line.endswith(b"}")


def _decode(line: bytes) -> MetricLine:
    record = json.loads(line)
    values = {name: float(value) for name, value in record.items() if name not in _HEAD}
    return MetricLine(record["step"], record["attempt"], record["time_s"], values, record.get("texts", {}))
