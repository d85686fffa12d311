"""Checkpoints of a run: when, who saves what, in one transaction, and how a run goes on from one.

state/<role>/        weights, optimizer and counters, written by the role's workers
state/driver.msgpack everything else that may influence a step
hf/                  a ready Hugging Face folder
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from verl.checkpoint.store import is_late
from verl.config.plan import SAVE_EVERY_S, SAVE_SHARE
from verl.driver.reporter import Reporter, due
from verl.driver.roles import Learner
from verl.driver.run_dir import RunDir
from verl.driver.state import DriverState, hidden, write_state
from verl.driver.stopping import Stopped, StopRequest
from verl.workers.host import Room, too_small
from verl.workers.model_workers import ModelWorkers

T = TypeVar("T")
BYTES_PER_S = 500e6  # of a save, before one was measured
SLOW_BYTES_PER_S = 100e6  # of one that is given up
LOOK_BACK = 5  # steps, whose updates say how long the next one may take
COPY_S = 1.0  # of a copy for every step, which may take SAVE_SHARE of its update; shorter ones are nobody's concern
BUSY = 2.0  # a save beside an update in the same process, against one that has it for itself
CLOSE_S = 60.0  # for a checkpoint that is being written when the run ends
ASK_EVERY_S = 0.2  # whether the workers have written theirs


@dataclass(slots=True)
class Cadence:
    """When a step is to be saved: every so many steps, or by time (None), so that no more than SAVE_EVERY_S of work can
    be lost and saving takes at most SAVE_SHARE of the time. save_s: what the last save took, or an estimate."""

    every_steps: int | None
    save_s: float
    clock: Callable[[], float] = time.monotonic
    _worked_from_s: float = field(init=False)
    _asked_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._worked_from_s = self._asked_s = self.clock()

    def due(self, number: int) -> bool:
        """After step `number`. By time: whether the next step, as long as this one, would be too late."""
        now_s = self.clock()
        step_s, worked_s, self._asked_s = now_s - self._asked_s, now_s - self._worked_from_s, now_s
        if self.every_steps is not None:
            return due(number, self.every_steps)
        return worked_s + step_s > SAVE_EVERY_S and self.save_s <= SAVE_SHARE * (worked_s + self.save_s)

    def saved(self, took_s: float) -> None:
        self.save_s, self._worked_from_s = took_s, self.clock()
        self._asked_s = self._worked_from_s


class Checkpointer:
    """trained: the roles that have an optimizer, the exported one first · needed_bytes: of one checkpoint, about."""

    def __init__(
        self, claimed: RunDir, learner: Learner, trained: tuple[str, ...], needed_bytes: int, reporter: Reporter
    ) -> None:
        self._claimed, self._learner, self._trained = claimed, learner, trained
        self._needed_bytes, self._reporter = needed_bytes, reporter
        self._limit_s = max(learner.config.run.wait_timeout_s, needed_bytes / SLOW_BYTES_PER_S)
        self.cadence = Cadence(learner.config.run.save_every_steps, needed_bytes / BYTES_PER_S)
        self.stop = StopRequest(reporter.progress, learner.config.run.grace_s, self._save_s)
        self._under_way: asyncio.Task[None] | None = None
        self.newest = claimed.state.step if claimed.state else 0  # the step after which the newest checkpoint was made
        self._written = self.newest  # the same of the one that is being written, if one is
        self._held: int | None = None  # the step after which the state was as the copy that is kept
        self._copied = -1  # the same of the copy that was asked for last
        self._why_not = ""  # there is none
        self._updates_s: deque[float] = deque(maxlen=LOOK_BACK)
        self._copies_s: deque[float] = deque(maxlen=2)  # the first one also makes what they need
        self._told: set[bool] = set()

    async def save(self, state: DriverState, *, last: bool = False, best: float | None = None) -> None:
        """Commit a checkpoint after `state.step` steps. One that cannot be written (disk full, I/O) is a warning:
        nothing of it is left, earlier ones are untouched, and the run goes on; with `last` the OSError is raised.
        Workers that do not answer for run.wait_timeout_s, or for as long as a slow disk takes, are a TimeoutError.

        Workers in processes of their own (torchrun's too) keep a copy of their state and write it while training goes
        on; the checkpoint has its name when all of it is on disk. `settle` waits for that, as does the next save."""
        await self.settle()
        claimed, groups = self._claimed, tuple(hidden(group, self._claimed.hide) for group in state.groups)
        state = msgspec.structs.replace(state, identity=claimed.identity, parent=claimed.parent, groups=groups)
        events, began_s = self._reporter.events, time.monotonic()
        events.flush(fsync=True)  # of the groups that the state holds: they are taken up without a new event
        self._written = state.step
        if self._held == state.step:
            self._held = None
            await self._commit(self._write_beside(state, best), state, began_s, last=last)
        elif not self._beside or last or too_small(await self._rooms()):
            await self._commit(self._write(state, best), state, began_s, last=last)
        else:
            await self._copy(state.step)
            write = self._write_beside(state, best)
            self._under_way = asyncio.ensure_future(self._commit(write, state, began_s, last=False))

    async def hold(self, step: int) -> None:
        """Before the updates of the step that comes after `step`: keep a copy of what they change, if they may outlast
        the grace of a stop. It is not needed where that state is on disk, and not kept where its hosts have no room."""
        self._why_not = ""
        if self._learner.why_together():
            return
        if self._written == step:  # still being written, or it failed
            self._why_not = f"the checkpoint of step {step} is not on disk"
            return
        longest_s, grace_s = max(self._updates_s, default=0.0), self._learner.config.run.grace_s
        if longest_s <= self.stop.left_s:
            self._why_not = f"no copy of the state before it is kept, since updates took {longest_s:.0f} s at most"
            return
        rooms = await self._rooms()
        if lacking := too_small(rooms):
            self._why_not = f"no room for a copy of the state before it: {lacking}"
        elif len(self._copies_s) > 1 and min(self._copies_s) > max(COPY_S, SAVE_SHARE * longest_s):
            self._why_not = f"a copy of the state before it takes {min(self._copies_s):.0f} s, too long for every step"
        else:
            began_s = time.monotonic()
            await self._copy(step)
            self._held = step
            self._copies_s.append(time.monotonic() - began_s)
        if (self._held is None) not in self._told:
            self._told.add(self._held is None)
            what = f"updates take {longest_s:.0f} s, longer than run.grace_s={grace_s:g} leaves"
            size = f"{sum(room.copy_bytes for room in rooms) / 1e9:.2g} GB"
            kept = f"a copy of the state ({size}) is kept in host memory, so that a stop can save what was before them"
            waits = f"a stop in one waits for its end all the same: {self._why_not}"
            self._reporter.progress.message(f"{what}: {waits if self._why_not else kept}")

    def no_way_back(self, step: int) -> str:
        """Why the state after `step` cannot be had any more, once the models are trained further; "" where it can."""
        return self._learner.why_together() or ("" if step in (self._held, self.newest) else self._why_not)

    async def updated(self, seconds: float) -> None:
        """The updates of a step have ended: what was kept for a stop in them goes."""
        self._updates_s.append(seconds)
        if self._held is not None:
            self._held = None
            await self._each(ModelWorkers.forget)

    @property
    def _beside(self) -> bool:
        """Whether a save goes on beside training: workers have processes of their own, or every rank is one."""
        return self._learner.cluster.apart or self._learner.cluster.drivers is not None

    async def _copy(self, step: int) -> None:
        self._copied = step
        await self._each(ModelWorkers.snapshot)

    async def _each(self, call: Callable[[ModelWorkers], Future[T]]) -> list[T]:
        """Of every role that is trained, all at once."""
        calls = [call(self._learner.models[role]) for role in self._trained]
        return [await self._learner.done(c, f"{role}.{call.__name__}") for role, c in zip(self._trained, calls)]

    async def _rooms(self) -> list[Room]:
        return [room for rooms in await self._each(ModelWorkers.room) for room in rooms]

    def _save_s(self) -> float:
        beside = self._held is not None and not self._beside
        return self.cadence.save_s * (BUSY if beside else 1.0)

    async def settle(self) -> None:
        """Until what is being written is a checkpoint, or has failed to be one."""
        if self._under_way is not None:
            task, self._under_way = self._under_way, None
            await task

    async def close(self) -> None:
        """A checkpoint that is being written is finished, within bounds; its failure is not the run's any more."""
        if self._under_way is not None:
            await asyncio.wait({self._under_way}, timeout=CLOSE_S)
            if not self._under_way.cancel():
                self._under_way.exception()

    async def _commit(self, write: Awaitable[None], state: DriverState, began_s: float, *, last: bool) -> None:
        events = self._reporter.events
        try:
            await write
        except OSError as e:
            if is_late(e):
                raise
            self._reporter.progress.message(f"warning: checkpoint of step {state.step} was not written: {e}")
            events.append("save_failed", state.step, {"error": str(e)})
            self.cadence.saved(self.cadence.save_s)  # how long one takes is not known from this
            if self._copied == state.step:  # those that were not asked to write it would keep it
                await self._each(ModelWorkers.forget)
            if last:
                raise
            return
        self.cadence.saved(time.monotonic() - began_s)
        self.newest = state.step
        events.append("saved", state.step, {"version": state.version, "seconds": self.cadence.save_s})
        events.flush(fsync=True)

    async def stopped(self, beginning: DriverState | None, total_steps: int) -> Stopped:
        """After a stop: the state at the beginning of the step that was not done is saved, where it is not already."""
        await self.settle()
        done = beginning.step if beginning else 0
        if beginning is not None and self.newest < done:
            await self.save(beginning)
            await self.settle()
        return self.stop.stopped(done + 1, total_steps, self.newest)

    async def _write(self, state: DriverState, best: float | None) -> None:
        models = self._learner.models

        def fill(path: Path) -> None:
            for role in self._trained:
                self._done(models[role].save(path / "state" / role), role)
            self._done(models[self._trained[0]].export(path / "hf"), self._trained[0])

        await self._stored(state, best, fill)

    async def _write_beside(self, state: DriverState, best: float | None) -> None:
        """What the workers kept, while they go on: they are asked now and then whether it is done."""
        models = self._learner.models

        def fill(path: Path) -> None:
            for i, role in enumerate(self._trained):
                self._done(models[role].write(path / "state" / role, path / "hf" if i == 0 else None), role)
            for role in self._trained:
                until_s = time.monotonic() + self._limit_s
                while not self._done(models[role].written(), role):
                    if time.monotonic() > until_s:
                        raise self._late(role)
                    time.sleep(ASK_EVERY_S)

        await self._stored(state, best, fill)

    def _done(self, asked: Future[T], role: str) -> T:
        try:
            return asked.result(self._limit_s)
        except TimeoutError as e:
            raise e if asked.done() else self._late(role) from None

    def _late(self, role: str) -> TimeoutError:
        least = f"run.wait_timeout_s, or what {SLOW_BYTES_PER_S / 1e6:g} MB/s would take"
        return TimeoutError(f"{role} has not written its state within {self._limit_s:g} s ({least})")

    async def _stored(self, state: DriverState, best: float | None, fill: Callable[[Path], None]) -> None:
        def everything(path: Path) -> None:
            fill(path)
            if self._claimed.records is None:
                write_state(path / "state", state)

        write = asyncio.to_thread(
            self._claimed.store.save,
            state.step,
            everything,
            needed_bytes=self._needed_bytes,
            meta={"metric": best, "version": state.version},
        )
        what, longest_s = f"the checkpoint of step {state.step}", (2 * len(self._trained) + 2) * self._limit_s
        await self._learner.waits.wait(write, who="driver", what=what, timeout_s=longest_s)

    async def restore(self) -> DriverState | None:
        """Weights, optimizers and generators as they were; the rest of the state is the caller's to hand out."""
        state, checkpoint = self._claimed.state, self._claimed.resumed
        if state is None or checkpoint is None:
            return None
        for role in self._trained:
            await load_role(self._learner, role, checkpoint)
        if state.controllers is not None:  # what a fork was given anew begins as it was given
            changed, now = self._claimed.changed, self._learner.controllers
            if not any(key.startswith("algorithm.kl_reward") for key in changed):
                now.kl_coef = state.controllers.kl_coef
            if not any(key.startswith("algorithm.critic_warmup") for key in changed):
                now.critic_warm = state.controllers.critic_warm
        return state


async def load_role(learner: Learner, role: str, checkpoint: Path) -> None:
    """One model as a checkpoint has it."""
    path = checkpoint / "state" / role
    if not path.is_dir():
        raise ValueError(
            f"{checkpoint} has no {role}: it was written by an algorithm without one; start a new run from its hf "
            "folder"
        )
    workers: ModelWorkers = learner.models[role]
    await learner.done(workers.load(path), f"{role}.load")
