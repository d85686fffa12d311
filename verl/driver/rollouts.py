"""Groups in flight: agent loops, rewards streamed per trajectory, retries, selection. A crash cancels all.

consumes    tasks from the cursor, while the scheduler has free slots
waits for   the rollout engine and the reward function, per trajectory, each with a deadline
produces    complete, scored, selected groups in the queue; `take` hands out their refs
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from verl.agent_loop.base import together
from verl.algorithms.filters import reject_flat
from verl.algorithms.resolve import Algorithm
from verl.data.source import TaskTable
from verl.driver.media_ahead import MediaAhead
from verl.driver.queue_rows import QueueRows
from verl.driver.saved_images import HeldImages
from verl.driver.scheduler import Exhausted, Scheduler, StepBatch
from verl.driver.state import SavedGroup, restore_group, save_group
from verl.driver.task_media import TaskMedia, owner_of_group
from verl.driver.trajectories import TrajectoryRunner, TrajectorySpec
from verl.errors import Refused
from verl.track.events import EventLog
from verl.types import SHAPED, Group, Purpose, Refs, Sampling, Score, Task, Trajectory, samples_of, with_task
from verl.workers.ahead import EarlyOutputs
from verl.workers.waits import Waits


class RunEnded(RuntimeError):
    """The run cannot continue as configured: data or draw budget exhausted, too many invalid rewards."""


class Draws(Protocol):
    """A resumable cursor over the tasks (data/source.py)."""

    def next(self) -> Any: ...
    def coming(self, count: int) -> list[Any]: ...
    def give_back(self, draw: Any) -> None: ...
    def scored(self, draw: Any, score: float) -> None: ...
    def step_ended(self) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def load_state(self, state: Mapping[str, Any]) -> None: ...


@dataclass(slots=True)
class RolloutStats:
    """Counts since the last step was trained."""

    released: Counter[str] = field(default_factory=Counter)
    """Released groups by reason."""
    invalid: Counter[str] = field(default_factory=Counter)
    """Trajectories without a valid reward, by reason."""
    turns: Counter[int] = field(default_factory=Counter)
    """Number of turns -> trajectories with a valid reward that have it."""
    agent: Counter[str] = field(default_factory=Counter)
    """Sums of the loops' counts."""
    played: int = 0
    """Trajectories that ended."""
    flat: int = 0
    """Groups with equal scores."""
    groups: int = 0
    """Groups that ended."""
    sampled: int = 0
    """Sampled tokens."""
    unread: int = 0
    """Sampled tokens that are no text."""


def _none(ids: np.ndarray) -> int:
    return 0


@dataclass(slots=True)
class InvalidShare:
    """Ends a run with too many trajectories without a valid reward: more than `limit` beyond chance (three standard
    deviations). It is checked after at least `least` trajectories, and counts are kept over at least `span`, so that it
    works for steps of any size."""

    limit: float
    least: int
    span: int = 256
    played: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, trajectories: Iterable[Trajectory]) -> None:
        for t in trajectories:
            self.played += 1
            if t.outcome != "ok":
                self.reasons[reason_of(t)] += 1
                self.examples.setdefault(reason_of(t), " ".join(t.error.split())[-200:])

    def check(self) -> None:
        invalid = self.reasons.total()
        chance = 3 * math.sqrt(self.limit * (1 - self.limit) * self.played)
        if self.played >= self.least and invalid > self.limit * self.played + chance:
            reasons = "; ".join(f"{n} x {self.examples[r]}" for r, n in self.reasons.most_common(5))
            raise RunEnded(
                f"{invalid} of {self.played} trajectories had no valid reward "
                f"(pipeline.max_invalid_share={self.limit}): "
                f"{reasons}"
            )

    def step_ended(self) -> None:
        if self.played >= max(self.span, self.least):
            self.played = 0
            self.reasons.clear()
            self.examples.clear()


@dataclass(eq=False, kw_only=True)
class RolloutManager:
    """Runs the agent loops and rewards of a run's groups. It belongs to the driver's event loop."""

    scheduler: Scheduler
    cursor: Draws
    tasks: TaskTable
    trajectories: TrajectoryRunner
    algorithm: Algorithm
    sampling: Sampling
    samples_per_prompt: int
    rows: QueueRows
    events: EventLog
    waits: Waits
    timeout_s: float
    """Limit of a wait that does not depend on a trajectory; trajectories have deadlines of their own."""
    eager: bool
    """Admit as soon as a slot is free; else only when a batch is requested (staleness 0)."""
    max_invalid_share: float
    inform: Callable[[Task, Trajectory], Task] | None = None
    """Adds the text that the teacher reads about an attempt to its task."""
    ahead: Sequence[EarlyOutputs] = ()
    """Frozen models that compute a group's rows as soon as it is complete."""
    unread: Callable[[np.ndarray], int] = _none
    """Counts the sampled ids that are no text."""

    def __post_init__(self) -> None:
        self._wait_s = self.timeout_s + self.trajectories.longest_s
        self.media = TaskMedia(self.rows.queue.media)
        self._held_images = HeldImages(self.rows.queue.media)
        self._media_ahead = MediaAhead(self.rows.queue.media, self.tasks)
        self._invalid = InvalidShare(self.max_invalid_share, least=4 * self.samples_per_prompt)
        self._closed = False
        self._running: dict[str, asyncio.Task[None]] = {}
        self.groups: dict[str, Group] = {}  # in flight: running, or complete and not trained yet
        self._draws: dict[str, Any] = {}
        self._refs: dict[str, Refs] = {}
        self._taken: tuple[str, ...] = ()  # the batch that is being trained
        self._done: dict[str, list[Trajectory]] = {}  # ended trajectories of running groups, kept for a checkpoint
        self._number = 1  # the present step; a checkpoint of a step contains the state after its events
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self.stats = RolloutStats()

    async def __aenter__(self) -> RolloutManager:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel every task and wait until it has ended."""
        self._closed = True
        self._media_ahead.close()
        await self._cancel([*self._running.values(), *self.rows.pending])

    async def take(self, step: int) -> Refs:
        """Return the groups of this step: complete, scored, selected, within their deadline. Raise an error if the wait
        exceeds its own deadline."""
        self._number = step + 1
        self._media_ahead.end()
        while True:
            self.check()
            self._changed.clear()
            self._admit()
            got = self.scheduler.take()
            if isinstance(got, StepBatch):
                self._taken = got.group_ids
                await self._drop(got.dropped)
                if not self.eager and not self.scheduler.done and self._media_ahead.wanted:
                    coming = self.cursor.coming(self.scheduler.prompts_per_step + self.scheduler.extra)
                    self._media_ahead.begin([draw.index for draw in coming])
                return Refs(r for g in got.group_ids for r in self._refs[g])
            if isinstance(got, Exhausted):
                raise RunEnded(str(got))
            await self.waits.wait(
                self._changed.wait(),
                waiter=f"step {step + 1}",
                what=lambda: self.scheduler.why_waiting(time.monotonic()),
                timeout_s=self._wait_s,
                moved_s=lambda: self.trajectories.moved_s,
            )

    def on_trained(self, step: int, refs: Refs) -> dict[str, Any]:
        """Free the groups of a step. Return the ground truths of their tasks by id."""
        self.scheduler.trained(step)
        assert {r.group_id for r in refs} <= set(self._taken), "trained on other groups than were taken"
        tasks = [self.groups[group_id].task for group_id in self._taken]
        for group_id in self._taken:
            del self.groups[group_id], self._refs[group_id], self._draws[group_id]
        self._taken = ()
        self._invalid.step_ended()
        self.cursor.step_ended()
        return {task.task_id: task.ground_truth for task in tasks}

    def on_published(self, version: int) -> None:
        self.scheduler.published(version)
        if self.eager:
            self._admit()
        self._changed.set()

    async def drain(self) -> None:
        """Wait until no request is in progress (before the engine sleeps)."""
        while self._running:
            await self.waits.wait(
                asyncio.wait(list(self._running.values()), return_when=asyncio.ALL_COMPLETED),
                waiter="driver",
                what=lambda: f"{len(self._running)} groups to end before training",
                timeout_s=self._wait_s,
                moved_s=lambda: self.trajectories.moved_s,
            )
            self.check()

    async def restore(self, scheduler: Mapping[str, Any], saved: Sequence[SavedGroup]) -> None:
        """Restore the groups in flight at a checkpoint. Complete groups are stored again; the others continue under the
        restored version with the trajectories that had ended."""
        by_id = {group.group_id: group for group in saved}
        found = self.scheduler.load_state(scheduler, time.monotonic())
        self._number = self.scheduler.next_step + 1
        for group_id in (*found.complete, *found.running):
            draw = by_id[group_id].draw
            group = restore_group(by_id[group_id], self.tasks[draw.index])
            self.groups[group_id], self._draws[group_id] = group, draw
            if group_id in found.complete:
                async with self.media.held(group.task, owner_of_group(group_id)) as task:
                    if task.lost:
                        raise Refused(
                            f"an image of a group in flight at the checkpoint is lost: {task.lost}; restore it"
                        )
                    self.groups[group_id] = seen = replace(group, task=task)
                    await self._store(seen)
                self._ask_ahead(group_id)
            else:
                self._start(group)
        for group_id in found.dropped:
            if self.media.store is not None:
                self.media.store.drop([owner_of_group(group_id)])  # images of its tools
            if group_id in by_id:
                self.cursor.give_back(by_id[group_id].draw)

    def save(self) -> tuple[SavedGroup, ...]:
        """Return every group that is not trained yet, with its ended trajectories."""
        out = []
        for group_id, group in self.groups.items():
            complete = group_id in self._refs
            ended = group.trajectories if complete else tuple(self._done.get(group_id, group.trajectories))
            out.append(save_group(replace(group, trajectories=ended), self._draws[group_id], complete))
        self._held_images.hold(out)
        return tuple(out)

    def take_stats(self) -> RolloutStats:
        """Return the counts since the last step was trained, and reset them."""
        found, self.stats = self.stats, RolloutStats()
        return found

    # -- private -----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        for _ in range(0 if self._closed else self.scheduler.free_slots()):
            draw = self.cursor.next()
            if draw is None:
                self.scheduler.no_more_tasks()
                return
            group_id = f"g{draw.draw:08d}"
            task = self.tasks[draw.index]
            admission = self.scheduler.admit(group_id, time.monotonic())
            group = Group(
                group_id=group_id, task=task, epoch=draw.epoch, draw=draw.draw, admitted_version=admission.version
            )
            self.groups[group_id] = group
            self._draws[group_id] = draw
            self.events.append(
                "dispatched",
                self._number,
                {
                    "group_id": group_id,
                    "task_id": task.task_id,
                    "index": draw.index,
                    "epoch": draw.epoch,
                    "draw": draw.draw,
                    "version": admission.version,
                    "last_version": admission.last_version,
                },
            )
            self._start(group)

    def _start(self, group: Group) -> None:
        self._done[group.group_id] = list(group.trajectories)  # a restored group keeps its ended trajectories
        task = asyncio.ensure_future(self._run(group))
        self._running[group.group_id] = task
        task.add_done_callback(lambda t: self._ended(group.group_id, t))

    def _ended(self, group_id: str, task: asyncio.Task[None]) -> None:
        if self._running.get(group_id) is task:
            del self._running[group_id], self._done[group_id]
        if not task.cancelled():
            broken = task.exception()  # retrieve the exception in any case, else asyncio logs a warning
            self._failure = self._failure or broken
        elif not self._closed and self.scheduler.holds(group_id):
            self._failure = self._failure or RuntimeError(f"group {group_id} was cancelled, but not by the driver")
        self._changed.set()

    async def _cancel(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Cancel tasks and wait until they have ended, so that none of their requests is left in the engine."""
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self._wait_s)

    def fail(self, error: BaseException) -> None:
        """Make `take` raise this error, for example of a publish, instead of waiting further."""
        self._failure = self._failure or error
        self._changed.set()

    def check(self) -> None:
        """Raise an error of a background task, or RunEnded if too many rewards are invalid."""
        if self._failure is not None:
            raise self._failure
        self._invalid.check()

    async def _run(self, group: Group) -> None:
        async with self.media.held(group.task, owner_of_group(group.group_id)) as task:
            self.groups[group.group_id] = seen = replace(group, task=task)
            if task.lost:  # rows of trajectories from before a resume would have no content
                self._done[group.group_id].clear()
            await self._play(seen)

    async def _play(self, group: Group) -> None:
        if (stored := self.trajectories.stored(group, self.sampling)) is not None:
            await self._complete(replace(group, trajectories=(stored,)))
            return
        done = self._done[group.group_id]
        ended = {(t.purpose, t.index) for t in done}

        async def run(purpose: Purpose, index: int, sampling: Sampling) -> None:
            if (purpose, index) not in ended:
                spec = TrajectorySpec(
                    group_id=group.group_id, index=index, purpose=purpose, epoch=group.epoch, draw=group.draw
                )
                done.append(await self.trajectories.run(group.task, spec, sampling))

        runs = [run("train", i, self.sampling) for i in range(self.samples_per_prompt)]
        baseline = self.algorithm.group.baseline_sampling
        if baseline is not None:
            runs += [run("baseline", i, baseline(self.sampling)) for i in range(self.algorithm.group.baselines)]
        await together(runs)
        group = replace(group, trajectories=tuple(sorted(done, key=lambda t: (t.purpose == "baseline", t.index))))
        if self.scheduler.holds(group.group_id):
            await self._finish(group)

    async def _finish(self, group: Group) -> None:
        """Count a group after all its trajectories have ended, select it, and store or release it."""
        self.stats.played += len(group.trajectories)
        for ids in (s.ids for t in group.trajectories for row in t.rows for s in row if s.source == "sampled"):
            self.stats.sampled += len(ids)
            self.stats.unread += self.unread(ids)
        bad = [t for t in group.trajectories if t.outcome != "ok"]
        self.stats.invalid.update(reason_of(t) for t in bad)
        self.stats.turns.update(t.turns for t in group.trajectories if t.outcome == "ok" and t.purpose == "train")
        for t in group.trajectories:
            self.stats.agent.update(t.agent)
            for entry in t.timeline:
                facts = {name: value for name, value in entry.items() if name != "kind"}
                self.events.append(entry["kind"], self._number, {"trajectory": t.trajectory_id, **facts})
        self._invalid.add(group.trajectories)
        scores = [
            metric_of(t, self.algorithm.group_filter.filter_metric)
            for t in group.trajectories
            if t.outcome == "ok" and t.purpose == "train"
        ]
        self.stats.groups += 1
        if scores:
            self.cursor.scored(self._draws[group.group_id], sum(scores) / len(scores))
        self.stats.flat += len(scores) > 1 and reject_flat(scores) == "reject"
        self.events.append(
            "scored",
            self._number,
            {
                "group_id": group.group_id,
                "rewards": [t.reward.value if isinstance(t.reward, Score) else None for t in group.trajectories],
                "outcomes": [t.outcome for t in group.trajectories],
                "errors": [t.error for t in bad],
                "tokens": [t.loss_tokens for t in group.trajectories],
                "attempts": [t.attempt + 1 for t in group.trajectories],
            },
        )
        broken_baseline = any(t.outcome != "ok" and t.purpose == "baseline" for t in group.trajectories)
        if len(scores) < self.algorithm.group.least or broken_baseline:
            self._release(group.group_id, "invalid" if any(t.outcome == "invalid" for t in bad) else "failed")
        elif self.algorithm.group_filter.select(scores) == "reject":
            self._release(group.group_id, "rejected")
        else:
            await self._complete(group)

    async def _complete(self, group: Group) -> None:
        self.groups[group.group_id] = group
        await self._store(group)
        if self.scheduler.holds(group.group_id):
            self.scheduler.complete(group.group_id)
            self._ask_ahead(group.group_id)
        else:  # dropped while its rows were stored
            self.rows.drop(self._refs.pop(group.group_id))

    async def _store(self, group: Group) -> None:
        ended = [t for t in group.trajectories if t.outcome == "ok"]
        tasks = [group.task if self.inform is None else self.inform(group.task, t) for t in ended]
        samples = [with_task(s, task) for t, task in zip(ended, tasks) for s in samples_of(t) if s.loss_tokens > 0]
        self._refs[group.group_id] = await self.rows.put(samples, group.group_id)

    def _ask_ahead(self, group_id: str) -> None:
        for workers in self.ahead:
            workers.begin(self._refs[group_id].of("train"))

    def _release(self, group_id: str, reason: Any) -> None:
        self.scheduler.release(group_id, reason)
        self.stats.released[reason] += 1
        self.events.append("released", self._number, {"group_id": group_id, "reason": reason})
        self._forget(group_id)
        if self.eager:
            self._admit()

    async def _drop(self, group_ids: Sequence[str]) -> None:
        """Cancel over-sampled surplus and return its tasks to the cursor, latest admitted first.

        A task may be drawn again under the same group id, so the dropped group must have ended before. Its slot stays
        free until the next admission: a group drawn again at once would be the latest admitted of the same version
        again, and would be dropped at every step."""
        await self._cancel([self._running[g] for g in group_ids if g in self._running])
        for group_id in reversed(group_ids):
            self.cursor.give_back(self._draws[group_id])
            self.stats.released["dropped"] += 1
            self.events.append("released", self._number, {"group_id": group_id, "reason": "dropped"})
            self._forget(group_id)

    def _forget(self, group_id: str) -> None:
        del self.groups[group_id], self._draws[group_id]
        if (refs := self._refs.pop(group_id, None)) and self.ahead:
            calls = [workers.leave(refs) for workers in self.ahead]
            self.rows.drop_after(calls, refs, group_id, self.timeout_s, self.fail)
        elif refs:
            self.rows.drop(refs)


def reason_of(trajectory: Trajectory) -> str:
    """Return the reason, as one word, why a trajectory has no valid reward. Errors have the form `reason: detail`."""
    return trajectory.error.partition(":")[0]


def metric_of(trajectory: Trajectory, name: str | None) -> float:
    """Return the number that selects groups: a named component, or the raw score before shaping. The accuracy (`acc`)
    of a reward function that returns one number is that number, as in verl's reward managers."""
    score = trajectory.reward
    assert isinstance(score, Score)
    if name is None or (name == "acc" and score.components.keys() <= SHAPED):
        return score.components.get("score", score.value)
    if name not in score.components and name != "score":
        raise Refused(
            f"algorithm.filter_metric={name!r} is not a component of the reward "
            f"({', '.join(score.components) or 'none'})"
        )
    return score.components.get(name, score.value)
