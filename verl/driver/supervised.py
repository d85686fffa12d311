"""Supervised runs (SFT, reward model, preferences) on the same engine, batch and terms as RL: rows -> weights -> optimizer steps."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from verl.checkpoint.store import CheckpointStore, DiskFull
from verl.config.schema import Config
from verl.data.source import Cursor
from verl.driver import state as train_state
from verl.driver.stages import Stage
from verl.track.console import LiveProgress
from verl.track.metrics import TimeLedger, reduce, units_of
from verl.track.sinks import Sinks
from verl.types import Metrics, merge_metrics
from verl.workers.group import WorkerGroup


@dataclass(slots=True, kw_only=True)
class SupervisedRun:
    config: Config
    dir: Path
    total_steps: int
    stage: Stage
    eval_stage: Stage | None
    cursor: Cursor
    trainer: WorkerGroup
    store: CheckpointStore
    lock: IO[str]
    sinks: Sinks
    progress: LiveProgress
    export_hf: Callable[[Path], None]
    checkpoint_bytes: int
    first_index: int = 0
    stop_requested: bool = False
    on_step: Callable[[int, Mapping[str, float]], None] | None = None

    def close(self) -> None:
        self.trainer.close()
        self.sinks.close()
        self.progress.close()
        self.lock.close()


def fit(run: SupervisedRun) -> dict[str, float]:
    """Train; the values of the last step. Raises whatever stopped it, after a save on SIGTERM."""
    previous = (
        signal.signal(signal.SIGTERM, lambda *_: setattr(run, "stop_requested", True)) if _in_main_thread() else None
    )
    values: dict[str, float] = {}
    try:
        for index in range(run.first_index, run.total_steps):
            ledger, number = TimeLedger(), index + 1
            with ledger.phase("data"):
                draws = _draws(run)
                samples, columns = run.stage.rows([d.index for d in draws], [f"s{d.draw}" for d in draws])
            with ledger.phase("update"):
                metrics = _call(run, "fit", samples, columns, run.stage.terms)
            if _due(number, run.config.run.eval_every_steps) or (
                number == run.total_steps and run.config.run.eval_after
            ):
                with ledger.phase("evaluate"):
                    metrics |= evaluate(run)
            if _due(number, run.config.run.save_every_steps) or number == run.total_steps or run.stop_requested:
                run.sinks.keep(number, reduce(metrics))  # on disk before the checkpoint that follows from it
                with ledger.phase("checkpoint"):
                    save(run, number)
            ledger.stop()
            tokens = sum(s.total_tokens for s in samples)
            values = {
                **reduce(metrics),
                **ledger.metrics(),
                "training/global_step": float(number),
                "perf/throughput": tokens / ledger.wall_s,
                "perf/time_per_step": ledger.wall_s,
            }
            run.sinks.log(number, values, units_of(metrics))
            if run.on_step is not None:
                run.on_step(number, values)
            if run.stop_requested and number < run.total_steps:
                raise KeyboardInterrupt(f"SIGTERM: stopped and saved after step {number} of {run.total_steps}")
    finally:
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)
    return values


def evaluate(run: SupervisedRun) -> Metrics:
    """The stage's own loss and metrics on the evaluation rows, without a step."""
    if run.eval_stage is None:
        return {}
    count = min(len(run.eval_stage), run.config.supervised.eval_rows)
    step = max(1, run.config.supervised.rows_per_step)
    parts = []
    for at in range(0, count, step):
        indices = range(at, min(count, at + step))
        samples, columns = run.eval_stage.rows(indices, [f"e{i}" for i in indices])
        parts.append(_call(run, "measure", samples, columns, run.eval_stage.terms))
    return {f"val/{name}": metric for name, metric in merge_metrics(parts).items()}


def save(run: SupervisedRun, number: int) -> None:
    state: dict[str, Any] = {
        "format": train_state.FORMAT,
        "step": number,
        "version": 0,
        "policy": _call(run, "state"),
        "cursor": run.cursor.state(),
    }
    try:
        train_state.write(run.store, number, state, run.export_hf, run.checkpoint_bytes, None)
    except (DiskFull, OSError) as e:
        run.progress.message(f"warning: checkpoint of step {number} was not written: {e}")
        if number == run.total_steps:
            raise


def resume(run: SupervisedRun, state: Mapping[str, Any]) -> None:
    _call(run, "load_state", state["policy"])
    run.cursor.load_state(state["cursor"])
    run.first_index = int(state["step"])


def write_summary(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n")


def _draws(run: SupervisedRun) -> list[Any]:
    found = [run.cursor.next() for _ in range(run.config.supervised.rows_per_step)]
    return [d for d in found if d is not None]


def _call(run: SupervisedRun, method: str, *args: Any) -> Any:
    return run.trainer.submit(method, *args, split="first").result(timeout=run.config.run.wait_timeout_s)


def _due(number: int, every: int) -> bool:
    return every > 0 and number % every == 0


def _in_main_thread() -> bool:
    import threading

    return threading.current_thread() is threading.main_thread()
