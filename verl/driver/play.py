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
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from verl.agent_loop.base import AgentLoopFactory, AgentLoopOutput, Played, ServerManager, played, sampling_params_of
from verl.algorithms.resolve import Algorithm
from verl.algorithms.specs import reject_flat
from verl.driver.scheduler import Batch, Exhausted, Scheduler
from verl.reward.base import RewardFn, RewardRequest, parse_result
from verl.rollout.base import DecodeFn, RolloutEngine
from verl.track.events import EventLog
from verl.transfer_queue.base import TransferQueue
from verl.types import (
    Group,
    Invalid,
    Outcome,
    Purpose,
    Refs,
    Sampling,
    Score,
    Segment,
    Task,
    Trajectory,
    response_ids_of,
    samples_of,
)
from verl.workers.waits import DeadlineExpired, Waits

T = TypeVar("T")


class RunEnded(RuntimeError):
    """The run cannot go on as configured: data or draw budget exhausted, too many invalid rewards."""


class Draws(Protocol):
    """A resumable cursor over the tasks (data/source.py)."""

    def next(self) -> Any: ...
    def give_back(self, draw: Any) -> None: ...
    def state(self) -> dict[str, Any]: ...


class Tasks(Protocol):
    """The training rows by index (data/source.py)."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Task: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where a trajectory belongs: its ids, purpose and the parts of its seed."""

    group_id: str
    index: int
    purpose: Purpose
    epoch: int = 0
    draw: int = 0


class Trajectories:
    """Plays single trajectories: agent loop, then reward, then retries. Outcomes are values, never exceptions."""

    def __init__(
        self,
        *,
        engine: RolloutEngine,
        loop: AgentLoopFactory,
        reward: RewardFn,
        decode: DecodeFn,
        waits: Waits,
        seed: int,
        max_attempts: int,
        timeout_s: float,
    ) -> None:
        """timeout_s: for the agent loop of one attempt, and again for its reward."""
        assert max_attempts >= 1, f"max_attempts={max_attempts}: a trajectory is played at least once"
        self._engine = engine
        self._loop = loop
        self._reward = reward
        self._decode = decode
        self._waits = waits
        self._seed = seed
        self._max_attempts = max_attempts
        self._timeout_s = timeout_s

    @property
    def longest_s(self) -> float:
        """No trajectory takes longer, whatever user code does."""
        return 2 * self._max_attempts * self._timeout_s

    async def play(self, task: Task, seat: Seat, sampling: Sampling) -> Trajectory:
        """The first attempt that ends with a valid reward, or the last one."""
        for attempt in range(self._max_attempts):
            trajectory = await self._attempt(task, seat, sampling, attempt)
            if trajectory.outcome == "ok":
                break
        return trajectory

    async def _attempt(self, task: Task, seat: Seat, sampling: Sampling, attempt: int) -> Trajectory:
        name = f"{seat.group_id}/{seat.purpose}{seat.index}.{attempt}"
        seed_parts = (self._seed, seat.purpose, seat.epoch, seat.draw, task.task_id, seat.index, attempt)
        manager = ServerManager(self._engine, sampling, seed_parts=seed_parts, prefix_key=seat.group_id)
        started = time.monotonic()
        row = {
            **task.row,
            "raw_prompt": list(task.messages),
            "prompt_ids": task.prompt_ids,
            "index": task.index,
            "request_id": name,
        }
        outcome: Outcome = "failed"
        reward: Score | Invalid | None = None
        error = ""
        try:
            loop = self._loop(manager)
            run, who, what = loop.run(sampling_params_of(sampling), **row), f"trajectory {name}", "its agent loop"
            if loop.ends_when_cancelled:
                with self._waits.limit(who=who, what=what, timeout_s=self._timeout_s):
                    output = await run
            else:
                output = await self._waits.wait(run, who=who, what=what, timeout_s=self._timeout_s)
            made = played(output, manager, sampling.max_tokens)
        except Exception as e:  # an agent loop is user code: its failure is an outcome, and retried
            late = f"timeout: the agent loop did not end in {self._timeout_s:g} s"
            error = late if isinstance(e, DeadlineExpired) else f"{type(e).__name__}: {e}"
            made, turns = Played((Segment(ids=task.prompt_ids, source="prompt"),), "error"), 1
        else:
            turns = max(1, len(manager.record))
            if made.stop_reason == "abort":
                outcome, error = "cancelled", "abort: the rollout engine gave the request up"
            elif not any(s.source == "sampled" for s in made.segments):
                error = "empty: the agent loop returned no token of the model"
            else:
                reward = await self._score(name, task, sampling, made, output, turns)
                if isinstance(reward, Score):
                    outcome = "ok"
                else:
                    outcome, error = "invalid", f"{reward.reason}: {reward.detail}"
        return Trajectory(
            trajectory_id=name,
            group_id=seat.group_id,
            task_id=task.task_id,
            index=seat.index,
            purpose=seat.purpose,
            attempt=attempt,
            sampling=sampling,
            segments=made.segments,
            stop_reason=made.stop_reason,
            outcome=outcome,
            reward=reward,
            turns=turns,
            wall_s=time.monotonic() - started,
            error=error,
        )

    async def _score(
        self, name: str, task: Task, sampling: Sampling, made: Played, output: AgentLoopOutput, turns: int
    ) -> Score | Invalid:
        response = response_ids_of(made.segments)
        try:
            if output.reward_score is not None:
                return parse_result(output.reward_score)
            text = self._decode(response.tolist())
        except Exception as e:  # what the loop returned: an object of its own, ids that are none
            return Invalid("exception", f"{type(e).__name__}: {e}")
        request = RewardRequest(
            request_id=name,
            data_source=task.data_source,
            solution_str=text,
            ground_truth=task.ground_truth,
            extra_info={**task.extra_info, "num_turns": output.num_turns or turns},
            response_tokens=len(response),
            max_response_tokens=sampling.max_tokens,
            truncated=made.stop_reason in ("length", "context_full"),
            prompt_ids=task.prompt_ids,
            response_ids=response,
        )
        try:
            with self._waits.limit(who=f"trajectory {name}", what="its reward", timeout_s=self._timeout_s):
                return await self._reward.score(request)
        except DeadlineExpired:
            return Invalid("timeout", f"no reward in {self._timeout_s:g} s")


@dataclass(slots=True)
class PlayStats:
    """Since the last step was trained. `invalid`: trajectories without a valid reward, by reason."""

    released: Counter[str] = field(default_factory=Counter)
    invalid: Counter[str] = field(default_factory=Counter)
    played: int = 0
    flat: int = 0
    groups: int = 0


@dataclass(slots=True)
class InvalidShare:
    """Ends a run in which too many trajectories get no valid reward: more than `limit` beyond chance (three standard
    deviations), judged from `least` trajectories on and over at least `span`, whatever the size of a step."""

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
                f"{invalid} of {self.played} trajectories had no valid reward (pipeline.max_invalid_share={self.limit}): "
                f"{reasons}"
            )

    def step_ended(self) -> None:
        if self.played >= max(self.span, self.least):
            self.played = 0
            self.reasons.clear()
            self.examples.clear()


class Player:
    """See the module. Owned by the driver's event loop."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        cursor: Draws,
        tasks: Tasks,
        trajectories: Trajectories,
        algorithm: Algorithm,
        sampling: Sampling,
        samples_per_prompt: int,
        queue: TransferQueue,
        events: EventLog,
        waits: Waits,
        timeout_s: float,
        eager: bool,
        max_invalid_share: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """timeout_s: for a wait that no trajectory is the cause of; those have deadlines of their own, which come first."""
        self.scheduler = scheduler
        self.cursor = cursor
        self._tasks = tasks
        self._trajectories = trajectories
        self._algorithm = algorithm
        self._sampling = sampling
        self._n = samples_per_prompt
        self._queue = queue
        self._events = events
        self._waits = waits
        self._timeout_s = timeout_s + trajectories.longest_s
        self._eager = eager  # admit as soon as a slot is free; else only when a batch is asked for (staleness 0)
        self._invalid = InvalidShare(max_invalid_share, least=4 * samples_per_prompt)
        self._clock = clock
        self._closed = False
        self._running: dict[str, asyncio.Task[None]] = {}
        self.groups: dict[str, Group] = {}  # in flight: running, or complete and waiting to be trained
        self._draws: dict[str, Any] = {}
        self._refs: dict[str, Refs] = {}
        self._taken: tuple[str, ...] = ()  # handed out, not trained yet
        self._done: dict[str, list[Trajectory]] = {}  # ended trajectories of running groups, kept for a checkpoint
        self._number = 1  # of the step that is worked on; a checkpoint of a step holds what its events say
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self.stats = PlayStats()

    async def __aenter__(self) -> Player:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is played any more: every task is cancelled and has ended."""
        self._closed = True
        await self._cancel(list(self._running))

    async def take(self, step: int) -> Refs:
        """The groups of this step: complete, scored, selected, within their deadline. Waits with a deadline."""
        self._number = step + 1
        while True:
            self._check()
            self._changed.clear()
            self._admit()
            got = self.scheduler.take(self._clock())
            if isinstance(got, Batch):
                self._taken = got.group_ids
                await self._drop(got.dropped)
                return Refs(r for g in got.group_ids for r in self._refs[g])
            if isinstance(got, Exhausted):
                raise RunEnded(str(got))
            await self._waits.wait(
                self._changed.wait(),
                who=f"step {step + 1}",
                what=lambda: self.scheduler.why_waiting(self._clock()),
                timeout_s=self._timeout_s,
            )

    def trained(self, step: int, refs: Refs) -> None:
        self.scheduler.trained(step)
        assert {r.group_id for r in refs} <= set(self._taken), "trained on other groups than were taken"
        for group_id in self._taken:
            del self.groups[group_id], self._refs[group_id], self._draws[group_id]
        self._taken = ()
        self._invalid.step_ended()

    def published(self, version: int) -> None:
        self.scheduler.published(version)
        if self._eager:
            self._admit()
        self._changed.set()

    async def drain(self) -> None:
        """Wait until nothing is generated any more (before the engine sleeps)."""
        while self._running:
            await self._waits.wait(
                asyncio.wait(list(self._running.values()), return_when=asyncio.ALL_COMPLETED),
                who="driver",
                what=lambda: f"{len(self._running)} groups to end before training",
                timeout_s=self._timeout_s,
            )
            self._check()

    def resume(self, group: Group, draw: Any, *, complete: bool) -> None:
        """A group of a checkpoint: complete ones go to the queue as they are, the others are played again."""
        self._number = self.scheduler.next_step + 1
        self.groups[group.group_id] = group
        self._draws[group.group_id] = draw
        if complete:
            self._store(group)
        else:
            self._start(group)

    def in_flight(self) -> list[tuple[Group, Any, bool]]:
        """(group with its ended trajectories, draw, complete) of every group that is not trained yet."""
        out = []
        for group_id, group in self.groups.items():
            complete = group_id in self._refs
            ended = group.trajectories if complete else tuple(self._done.get(group_id, group.trajectories))
            out.append((replace(group, trajectories=ended), self._draws[group_id], complete))
        return out

    # -- private -----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        for _ in range(0 if self._closed else self.scheduler.free_slots()):
            draw = self.cursor.next()
            if draw is None:
                self.scheduler.no_more_tasks()
                return
            group_id = f"g{draw.draw:08d}"
            task = self._tasks[draw.index]
            admission = self.scheduler.admit(group_id, self._clock())
            group = Group(
                group_id=group_id, task=task, epoch=draw.epoch, draw=draw.draw, admitted_version=admission.version
            )
            self.groups[group_id] = group
            self._draws[group_id] = draw
            self._events.append(
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
        self._done[group.group_id] = list(group.trajectories)  # of a checkpoint: they are not played again
        task = asyncio.ensure_future(self._play(group))
        self._running[group.group_id] = task
        task.add_done_callback(lambda t: self._ended(group.group_id, t))

    def _ended(self, group_id: str, task: asyncio.Task[None]) -> None:
        if self._running.get(group_id) is task:
            del self._running[group_id], self._done[group_id]
        if not task.cancelled():
            self._failure = self._failure or task.exception()
        elif not self._closed and self.scheduler.holds(group_id):
            self._failure = self._failure or RuntimeError(f"group {group_id} was cancelled, but not by the driver")
        self._changed.set()

    async def _cancel(self, group_ids: Sequence[str]) -> None:
        """Stay until they have ended: what is cancelled neither generates nor holds a request id any more."""
        tasks = [task for g in group_ids if (task := self._running.get(g)) is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self._timeout_s)

    def fail(self, error: BaseException) -> None:
        """Something that `take` may be waiting for broke (a publish): it raises this instead of waiting on."""
        self._failure = self._failure or error
        self._changed.set()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._invalid.check()

    async def _play(self, group: Group) -> None:
        done = self._done[group.group_id]
        ended = {(t.purpose, t.index) for t in done}

        async def play(purpose: Purpose, index: int, sampling: Sampling) -> None:
            if (purpose, index) not in ended:
                seat = Seat(group_id=group.group_id, index=index, purpose=purpose, epoch=group.epoch, draw=group.draw)
                done.append(await self._trajectories.play(group.task, seat, sampling))

        plays = [play("train", i, self._sampling) for i in range(self._n)]
        baseline = self._algorithm.group.baseline_sampling
        if baseline is not None:
            plays += [play("baseline", i, baseline(self._sampling)) for i in range(self._algorithm.group.baselines)]
        await together(plays)
        group = replace(group, trajectories=tuple(sorted(done, key=lambda t: (t.purpose == "baseline", t.index))))
        if self.scheduler.holds(group.group_id):
            self._finish(group)

    def _finish(self, group: Group) -> None:
        """Count, select, and store or release a group whose trajectories have ended."""
        self.stats.played += len(group.trajectories)
        bad = [t for t in group.trajectories if t.outcome != "ok"]
        self.stats.invalid.update(reason_of(t) for t in bad)
        self._invalid.add(group.trajectories)
        scores = [
            metric_of(t, self._algorithm.group_filter.filter_metric)
            for t in group.trajectories
            if t.outcome == "ok" and t.purpose == "train"
        ]
        self.stats.groups += 1
        self.stats.flat += len(scores) > 1 and reject_flat(scores) == "reject"
        self._events.append(
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
        if len(scores) < self._algorithm.group.least or broken_baseline:
            self._release(group.group_id, "invalid" if any(t.outcome == "invalid" for t in bad) else "failed")
        elif self._algorithm.group_filter.select(scores) == "reject":
            self._release(group.group_id, "rejected")
        else:
            self.groups[group.group_id] = group
            self._store(group)
            self.scheduler.complete(group.group_id, self._clock())

    def _store(self, group: Group) -> None:
        samples = [s for t in group.trajectories if t.outcome == "ok" for s in samples_of(t) if s.loss_tokens > 0]
        self._refs[group.group_id] = self._queue.put(samples)

    def _release(self, group_id: str, reason: Any) -> None:
        self.scheduler.release(group_id, reason)
        self.stats.released[reason] += 1
        self._events.append("released", self._number, {"group_id": group_id, "reason": reason})
        self._forget(group_id)
        if self._eager:
            self._admit()

    async def _drop(self, group_ids: Sequence[str]) -> None:
        """Over-sampled surplus: cancel it and return its tasks to the cursor, latest admitted first.

        A task may be drawn again under the same group id, so what was dropped has ended before. Its slot stays free
        until the next admission: drawn again at once, it would be the latest admitted of the same version again, and
        dropped at every step.
        """
        await self._cancel(group_ids)
        for group_id in reversed(group_ids):
            self.cursor.give_back(self._draws[group_id])
            self.stats.released["dropped"] += 1
            self._events.append("released", self._number, {"group_id": group_id, "reason": "dropped"})
            self._forget(group_id)

    def _forget(self, group_id: str) -> None:
        refs = self._refs.pop(group_id, None)
        if refs:
            self._queue.drop(refs)
        del self.groups[group_id], self._draws[group_id]


async def together(plays: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order. When one raises, the others are cancelled and have ended before that error comes out."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(play) for play in plays]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def reason_of(trajectory: Trajectory) -> str:
    """Why it has no valid reward, in a word: errors read `reason: detail`."""
    return trajectory.error.partition(":")[0]


def metric_of(trajectory: Trajectory, name: str | None) -> float:
    """The number that selection looks at: a named component, or the raw score before shaping."""
    score = trajectory.reward
    assert isinstance(score, Score)
    if name is None:
        return score.components.get("score", score.value)
    if name not in score.components and name != "score":
        raise ValueError(
            f"algorithm.filter_metric={name!r} is not a component of the reward ({', '.join(score.components) or 'none'})"
        )
    return score.components.get(name, score.value)
