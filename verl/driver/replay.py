"""`verl train --replay STEP`: recompute a recorded step from samples/ and print equality or the first difference.

Every step from the newest checkpoint before the step (or from the start weights) is trained again on its recorded
samples. The step's own log-probs, advantages and gradient norm are compared with the recorded ones."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import uvloop

from verl.checkpoint.store import CheckpointStore
from verl.columns import COLUMNS
from verl.config.load import load_config, read_config
from verl.config.schema import Config
from verl.data.formats import FEEDBACK
from verl.driver.assemble import offline_learner, trained_roles
from verl.driver.assemble_images import media_of_run
from verl.driver.checkpointer import load_role
from verl.driver.queue_rows import QueueRows
from verl.driver.run_dir import config_path
from verl.driver.setup import with_native_dtype
from verl.driver.state import read_state
from verl.driver.step import Step, experience_and_update
from verl.driver.worker_setup import set_up_process
from verl.errors import Refused
from verl.track.events import read_events
from verl.track.metrics import read_metrics, reduce
from verl.track.packed import unpacked_segments
from verl.track.samples import SampleRow, read_samples, sample_steps
from verl.transfer_queue.base import MediaStore, TransferQueue, copy_media
from verl.types import Refs, Sample, Segment, facts_of

COMPARED = tuple(c.recorded for c in COLUMNS if c.replayed)
REPLAY = "replay"
"""The owner of the media of a replayed step, until its rows are in the queue."""
COMPARED_METRICS = ("actor/pg_loss", "actor/grad_norm", "actor/entropy")


def replay(args: Sequence[str], number: int) -> int:
    """Replay step `number`. Return 0 if it is equal and 1 if something differs (printed). Raise ValueError with the
    reason if the step cannot be replayed."""
    run_dir = _recorded(args)
    recorded = sample_steps(run_dir)
    if number not in recorded:
        raise Refused(f"{run_dir} has no samples of step {number}; recorded: {_span(recorded)}")
    differences = uvloop.run(_replay(run_dir, number))
    if not differences:
        print(f"step {number}: equal ({', '.join((*COMPARED, *COMPARED_METRICS))})")
        return 0
    print(f"step {number}: {differences[0]}")
    for text in differences[1:5]:
        print(f"  also: {text}")
    return 1


def _recorded(args: Sequence[str]) -> Path:
    """Return the directory of the run named on the command line."""
    if any(a.partition("=")[0] in ("recipe", "model.path") for a in args):
        wanted = load_config(args).config
        run_dir = Path(wanted.run.root_dir) / wanted.run.name
    else:
        given = dict(a.partition("=")[::2] for a in args)
        run_dir = Path(given.get("run.root_dir", "runs")) / given.get("run.name", "run")
    if not (run_dir / "config.yaml").is_file():
        raise Refused(f"{run_dir} has no config.yaml: not a run; name it with run.name= and run.root_dir=")
    return run_dir


def _config_of(run_dir: Path, first: int, last: int) -> tuple[Config, int]:
    """Return the configuration of the attempt that trained these steps, and its number of steps, which the schedule
    needs."""
    total_steps = {e.attempt: e.data["total_steps"] for e in read_events(run_dir, {"resumed"})}
    attempts = sorted({line.attempt for line in read_metrics(run_dir) if first <= line.step <= last})
    made = [(read_config(config_path(run_dir, attempt)), total_steps[attempt]) for attempt in attempts]
    if any((c.optim, c.critic, n) != (made[-1][0].optim, made[-1][0].critic, made[-1][1]) for c, n in made):
        raise Refused(
            f"steps {first}..{last} were trained with more than one learning rate, schedule or number of steps, and no "
            "checkpoint is left where that changed: they cannot be replayed together"
        )
    return made[-1]


async def _replay(run_dir: Path, number: int) -> list[str]:
    store = CheckpointStore(run_dir / "checkpoints", read_only=True)
    base = max((s for s in store.steps() if s < number), default=0)
    missing = sorted(set(range(base + 1, number + 1)) - set(sample_steps(run_dir)))
    if missing:
        raise Refused(f"steps {_span(missing)} have no samples, and no checkpoint lies between them and step {number}")
    config, total_steps = _config_of(run_dir, base + 1, number)
    config = with_native_dtype(config)
    set_up_process(config)
    learner = offline_learner(config, total_steps, run_dir / "crash")
    try:
        if base:
            checkpoint = run_dir / "checkpoints" / f"step_{base}"
            learner.controllers = read_state(checkpoint).controllers or learner.controllers
            for role in trained_roles(learner):
                await load_role(learner, role, checkpoint)
        published = {event.step: event.data["version"] for event in read_events(run_dir, {"published"})}
        for n in range(base + 1, number + 1):
            rows, step = read_samples(run_dir, n), Step(n - 1)
            reads = config.teacher.hint_key == FEEDBACK
            refs = await put_recorded(
                learner.rows, [recorded_sample(row, reads) for row in rows], media_of_run(run_dir)
            )
            await experience_and_update(learner, step, refs)
            if n == number:
                break
            learner.rows.drop(refs)
            if n in published:
                await asyncio.wrap_future(learner.models["actor"].published(published[n]))
        return _differences(rows, refs, learner.queue) + _metric_differences(run_dir, number, reduce(step.metrics))
    finally:
        learner.close()


async def put_recorded(rows: QueueRows, samples: Sequence[Sample], media: MediaStore) -> Refs:
    """Put recorded samples into the queue, with their media from the run's store."""
    references, into = {m for sample in samples for m in sample.media}, rows.queue.media
    if not references or into is None:
        return await rows.put(samples)
    copy_media(media, into, references, REPLAY)
    try:
        return await rows.put(samples)
    finally:
        into.drop([REPLAY])


def recorded_sample(row: SampleRow, reads_feedback: bool) -> Sample:
    """Return a recorded row as a sample. reads_feedback: its teacher reads the feedback of the environment."""
    adapter, segments = unpacked_segments(row.segments) if row.segments else (None, _segments(row))
    known = facts_of(row) | {"copies": 1}  # the replayed step selects them again
    known["adapter"] = row.adapter or adapter  # older files have it only in the segments
    known["taught"] = row.taught and not (reads_feedback and not len(row.context))
    return Sample(**known, segments=segments, context=row.context if len(row.context) else None)


def _segments(row: SampleRow) -> tuple[Segment, ...]:
    """Split the response into segments of equal mask and equal version."""
    mask, logprobs = row.response_mask.astype(bool), row.tokens["rollout_logprobs"]
    versions = row.tokens["token_versions"]
    edges = [0, *(np.flatnonzero(np.diff(mask) | (np.diff(versions) != 0)) + 1), len(mask)]
    segments = [Segment(ids=row.prompt_ids, source="prompt")]
    for a, b in zip(edges, edges[1:]):
        if a == b:
            break  # an empty response
        ids, version = row.response_ids[a:b], int(versions[a])
        if not mask[a]:
            segments.append(Segment(ids=ids, source="env"))
        elif version < 0:
            segments.append(Segment(ids=ids, source="stored"))
        else:
            segments.append(Segment(ids=ids, source="sampled", logprobs=logprobs[a:b], version=version))
    return tuple(segments)


def _differences(rows: Sequence[SampleRow], refs: Refs, queue: TransferQueue) -> list[str]:
    out = []
    for column in (c for c in COLUMNS if c.replayed):
        names = [n for n in (column.name, column.instead) if n and queue.having(refs, n) == refs]
        if not names:
            continue
        found = queue.read(refs, (names[0],))[names[0]]
        for i, row in enumerate(rows):
            if (recorded := row.tokens.get(column.recorded)) is None:
                continue
            was, now = recorded[row.response_mask.astype(bool)], found.row(i).numpy().astype(np.float32)
            if not np.array_equal(was, now):
                at = int(np.flatnonzero(was != now)[0])
                where = f"{column.recorded} of {row.sample_id} differs first at trainable token {at}"
                out.append(f"{where}: recorded {was[at]:.9g}, now {now[at]:.9g}")
                break
    return out


def _metric_differences(run_dir: Path, number: int, now: dict[str, float]) -> list[str]:
    was = next((line.values for line in read_metrics(run_dir) if line.step == number), {})
    return [
        f"{name} was {was[name]:.9g}, now {now[name]:.9g}"
        for name in COMPARED_METRICS
        if name in was and name in now and not math.isclose(was[name], now[name], rel_tol=1e-12)
    ]


def _span(steps: Sequence[int]) -> str:
    return "none" if not steps else str(steps[0]) if len(steps) == 1 else f"{steps[0]}..{steps[-1]}"
