"""From a resolved configuration to a finished run: print the plan, build the parts, train, report."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import traceback
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import uvloop

from verl.config.devices import on_cuda
from verl.config.load import Resolved, validate
from verl.config.lora_layers import untrained
from verl.config.schema import Config
from verl.config.tree import changed
from verl.driver.assemble import assemble
from verl.driver.assemble_supervised import assemble_supervised
from verl.driver.evaluate import evaluate
from verl.driver.loop import train
from verl.driver.reporter import OnStep
from verl.driver.run import Run
from verl.driver.run_dir import is_mine
from verl.driver.setup import card_of, from_threads
from verl.driver.stopping import Stopped, unless_stopped
from verl.driver.supervised import SupervisedRun, fit
from verl.errors import CRASH_RECORD, Refused, crash_record_of
from verl.planner.card import CardFacts, card_lines, check_card
from verl.planner.checkpointing import settle_checkpointing
from verl.planner.disk import checkpoint_bytes, checkpoints_kept, small_disk
from verl.planner.plan import Plan, make_plan
from verl.planner.recorded import EVENT
from verl.planner.text import render_plan
from verl.rollout.base import ReplicaLost
from verl.track.console import LiveProgress
from verl.track.events import FINISHED
from verl.track.files import write_atomic
from verl.track.metrics import reduce
from verl.workers import host
from verl.workers.answers import FENCE_S
from verl.workers.group import Cluster, WorkerDied, first_cause
from verl.workers.torchrun import is_spare, launched, take_part

Deaths = list[tuple[str, str]]
"""The deaths of processes that ended earlier attempts at a run: (first cause, line with the crash record)."""
GC_THRESHOLD = 50_000
"""The number of new objects after which Python searches for cycles. The loop makes hardly any cycles, and with Python's
700 every burst of trajectories would cause a dozen searches."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The result of a run."""

    dir: Path
    """The run directory."""
    steps: int
    """Steps that this process did."""
    seconds: float
    """Wall time."""
    values: Mapping[str, float]
    """The metrics of the last step."""
    evals: Mapping[str, float]
    """The last value of every evaluation metric."""
    report: Path | None
    """The page of the run; None if it could not be written."""


def run_rl(
    resolved: Resolved,
    *,
    title: str = "",
    on_step: OnStep | None = None,
    quiet: bool = False,
    progress: LiveProgress | None = None,
) -> Finished:
    """Train to the end of the run. Raise the first cause of a failure, after a crash record is written and every child
    process has ended."""
    validate(resolved.config)
    progress, card = progress or LiveProgress(), card_of(resolved.config)
    resolved = _settled(resolved, card, progress)
    plan = make_plan(resolved.config)
    _refuse_small_disk(resolved.config, plan.checkpoint_bytes * plan.checkpoints_kept)
    if not quiet:
        progress.message(render_plan(plan))
    if card is not None:
        check_card(resolved.config, plan.memory, card)
        for line in card_lines(plan.memory, card):
            progress.message(f"warning: {line}")
    died = Deaths()
    for number in range(resolved.config.cluster.max_restarts + 1):
        with _repaired(resolved, number, died, progress):
            return uvloop.run(_train(resolved, title, on_step, plan, progress, died))
        resolved = _from_checkpoints(resolved)
    raise AssertionError("the last attempt returns or raises")


def _settled(
    resolved: Resolved, card: CardFacts | None, progress: LiveProgress, *, supervised: bool = False
) -> Resolved:
    """Return the configuration without model.gradient_checkpointing=auto, and print what was chosen."""
    has = card.free_bytes if card is not None else None if on_cuda(resolved.config) else host.total_bytes()
    resolved, line = settle_checkpointing(resolved, has, supervised=supervised)
    if line:
        progress.message(line)
    return resolved


@contextmanager
def _repaired(resolved: Resolved, number: int, died: Deaths, progress: LiveProgress) -> Iterator[None]:
    """Run attempt `number`. If it ends with the death of a process and another attempt is allowed, add the death to
    `died` and return. A refusal at the start of the next attempt is raised together with the death."""
    most = resolved.config.cluster.max_restarts
    try:
        yield
    except Refused as refused:
        if not died:
            raise
        death, record = died[-1]
        ended = WorkerDied(f"{death}; the run cannot start again: {refused}")
        ended.add_note(record)
        raise ended from None
    except Exception as error:
        if not isinstance(cause := first_cause(error), WorkerDied | ReplicaLost) or number == most:
            raise
        died.append((str(cause), crash_record_of(error)))  # not the error: its frames hold the run that has ended
        progress.message(f"{cause}\nstarting again from the last checkpoint ({number + 1} of {most} times)")


@asynccontextmanager
async def _deaths_first(cluster: Cluster) -> AsyncIterator[None]:
    """Raise the death of a worker as the cause of an error if one is detected soon after it: the error itself may be a
    consequence of the death."""
    try:
        yield
    except Exception as error:
        if cluster.own_processes and not isinstance(cause := first_cause(error), Stopped | ReplicaLost):
            death_seen: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
            cluster.watch(from_threads(lambda death: None if death_seen.done() else death_seen.set_result(death)))
            await asyncio.wait({death_seen}, timeout=FENCE_S)
            if death_seen.done() and death_seen.result() is not cause:
                raise error from death_seen.result()
        raise


def _from_checkpoints(resolved: Resolved) -> Resolved:
    """Return the configuration that continues from the checkpoints of this run, also if it began as a fork or with
    run.resume=never."""
    run = resolved.config.run
    if run.resume == "never" or any((Path(run.root_dir) / run.name / "checkpoints").glob("step_*")):
        return replace(resolved, config=changed(resolved.config, {"run.resume": "auto"}))
    return resolved


async def _train(
    resolved: Resolved, title: str, on_step: OnStep | None, plan: Plan, progress: LiveProgress, died: Deaths
) -> Finished:
    started = time.monotonic()
    with _crash_recorded(resolved, at_start=True):
        run = await assemble(resolved, progress=progress, on_step=on_step)
    died.clear()
    with _crash_recorded(resolved):
        try:
            write_atomic(run.dir / "plan.json", plan.to_json().encode())
            if plan.predicted is not None:
                run.reporter.events.append(EVENT, run.first_index, asdict(plan.predicted))
            _begun(run, title)
            with _rare_collections():
                async with _deaths_first(run.learner.cluster), run.until_stopped(train(run)) as training:
                    await training
            run.reporter.events.append(FINISHED, run.total_steps, {})
        finally:
            await asyncio.shield(run.close())
        return _finished(run, started)


def _begun(run: Run | SupervisedRun, title: str) -> None:
    """Print that the run resumes, if it does, and show its progress from here on."""
    progress = run.reporter.progress
    if run.first_index:
        progress.message(f"resuming {run.dir} after step {run.first_index} of {run.total_steps}")
    progress.start(run.total_steps, title or run.config.run.name)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Inside the context Python searches for cycles of objects rarely, and not among the objects that exist now."""
    thresholds, thawed = gc.get_threshold(), not gc.get_freeze_count()
    gc.collect()
    if thawed:  # else every full collection walks all long-lived objects, which takes 0.1 s
        gc.freeze()
    if thresholds[0]:  # 0: the user has switched it off
        gc.set_threshold(max(GC_THRESHOLD, thresholds[0]), *thresholds[1:])
    try:
        yield
    finally:
        if thawed:  # objects that the caller has frozen stay frozen
            gc.unfreeze()
        gc.set_threshold(*thresholds)


def _finished(run: Run, started: float) -> Finished:
    history = run.reporter.history
    values = history[-1] if history else {}
    report = run.reporter.write_report()
    summary = {
        "steps": max(run.total_steps, run.first_index),
        "seconds": round(time.monotonic() - started, 2),
        "version": run.version,
        "eval": run.reporter.last_eval,
        "checkpoint": str(run.dir / "checkpoints" / f"step_{max(run.total_steps, run.first_index)}"),
        "report": str(report or ""),
    }
    try:
        write_atomic(run.dir / "summary.json", (json.dumps(summary, indent=1) + "\n").encode())
    except OSError as e:
        run.reporter.progress.message(f"warning: {run.dir}/summary.json was not written: {e}")
    return Finished(
        run.dir,
        max(0, run.total_steps - run.first_index),
        time.monotonic() - started,
        values,
        dict(run.reporter.last_eval),
        report,
    )


def run_supervised(
    resolved: Resolved,
    command: Literal["sft", "rm", "dpo"],
    *,
    title: str = "",
    on_step: OnStep | None = None,
    progress: LiveProgress | None = None,
) -> Finished:
    """Train a supervised, reward-model or preference run to the end."""
    resolved = replace(resolved, config=replace(resolved.config, cluster=take_part(resolved.config.cluster)))
    validate(resolved.config, command)
    one, kept = checkpoint_bytes(resolved.config, command), checkpoints_kept(resolved.config, None)
    _refuse_small_disk(resolved.config, kept * one)
    shown = progress or LiveProgress(silent=is_spare())
    resolved = _settled(resolved, card_of(resolved.config), shown, supervised=True)
    died = Deaths()
    for number in range(resolved.config.cluster.max_restarts + 1):
        with nullcontext() if launched() else _repaired(resolved, number, died, shown):  # torchrun restarts all
            return uvloop.run(_fit(resolved, command, title, on_step, shown, died))
        resolved = _from_checkpoints(resolved)
    raise AssertionError("the last attempt returns or raises")


async def _fit(
    resolved: Resolved,
    command: Literal["sft", "rm", "dpo"],
    title: str,
    on_step: OnStep | None,
    progress: LiveProgress,
    died: Deaths,
) -> Finished:
    started = time.monotonic()
    with _crash_recorded(resolved, at_start=True):
        run = await assemble_supervised(resolved, command, progress=progress, on_step=on_step)
    died.clear()
    with _crash_recorded(resolved):
        try:
            _begun(run, title)
            async with _deaths_first(run.learner.cluster):
                values = await fit(run)
            run.reporter.events.append(FINISHED, run.total_steps, {})
            await run.learner.finish()
        finally:
            await run.checkpointer.close()
            run.close()
    evals = {k: v for k, v in values.items() if k.startswith("val/")}
    steps, seconds = max(0, run.total_steps - run.first_index), time.monotonic() - started
    return Finished(run.dir, steps, seconds, values, evals, run.reporter.write_report())


def run_eval(resolved: Resolved, progress: LiveProgress | None = None) -> Finished:
    """Evaluate model.path on data.eval_files; nothing is trained."""
    config = resolved.config
    if not config.data.eval_files:
        raise Refused("data.eval_files is empty: give the files to evaluate on")
    validate(config, "eval")
    one_step = {"run.total_steps": 1, "step.prompts_per_step": 1, "step.updates_per_step": 1}
    config = changed(untrained(config), {"data.train_files": [*config.data.eval_files], **one_step})
    return uvloop.run(unless_stopped(_eval(replace(resolved, config=config), progress)))


async def _eval(resolved: Resolved, progress: LiveProgress | None) -> Finished:
    started = time.monotonic()
    with _crash_recorded(resolved, at_start=True):
        run = await assemble(resolved, "eval", progress=progress)
    with _crash_recorded(resolved):
        try:
            async with run.groups:
                await run.start()
                values = reduce(await evaluate(run, 0))
        finally:
            await asyncio.shield(run.close())
    return Finished(run.dir, 0, time.monotonic() - started, values, values, None)


def _refuse_small_disk(config: Config, needed_bytes: int) -> None:
    for line in small_disk(config, needed_bytes):
        raise Refused(line)


@contextmanager
def _crash_recorded(resolved: Resolved, at_start: bool = False) -> Iterator[None]:
    """Write a record of the error that ends the block, and add its path to the error as a note. A refused start gets no
    record, so that it leaves a run directory unchanged."""
    try:
        yield
    except Stopped:
        raise
    except BaseException as e:
        if not (at_start and isinstance(e, Refused)) and (path := _crash_record(resolved, e)) is not None:
            e.add_note(f"{CRASH_RECORD}{path}")
        raise


def _crash_record(resolved: Resolved, error: BaseException) -> Path | None:
    """Write one record of an error, with its first cause, and return its path. A failure to write it must not hide the
    error."""
    run_dir = Path(resolved.config.run.root_dir) / resolved.config.run.name
    if not is_mine(run_dir) or isinstance(error, KeyboardInterrupt | SystemExit):
        return None  # a run directory of another process is not written to
    record = {
        "at_unix_s": time.time(),
        "error": resolved.hide(f"{type(error).__name__}: {error}"),
        "first_cause": resolved.hide(str(first_cause(error))),
        "traceback": [resolved.hide(part) for part in traceback.format_exception(error)],
    }
    path = run_dir / "crash" / f"{int(time.time() * 1000)}.json"
    try:
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, json.dumps(record, indent=1).encode())
    except OSError:
        print(f"could not write a crash record in {run_dir}")
        return None
    return path
