"""Checkpoints of a run: when they are saved, by which workers, in one transaction, and how a run continues from one.

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
from verl.driver.assemble_images import media_of_run
from verl.driver.reporter import Reporter, due
from verl.driver.roles import Learner
from verl.driver.run_dir import RunDir
from verl.driver.saved_images import SavedImages
from verl.driver.state import DriverState, hidden, write_state
from verl.driver.stopping import Stopped, StopRequest
from verl.errors import Refused
from verl.planner.disk import SAVE_EVERY_S, SAVE_SHARE
from verl.workers.host import RankMemory, too_small
from verl.workers.model_workers import ModelWorkers

T = TypeVar("T")
BYTES_PER_S = 500e6  # assumed speed of a save before the first measurement
SLOW_BYTES_PER_S = 100e6  # bytes per second; a slower save is given up
LOOK_BACK = 5  # steps; the longest of their updates predicts the next one
COPY_S = 1.0  # a copy shorter than this is made at every step; a longer one may take SAVE_SHARE of the update
BUSY = 2.0  # how much slower a save is during an update in the same process
CLOSE_S = 60.0  # limit for a checkpoint that is being written when the run ends
POLL_S = 0.2  # between two checks whether the workers have written their state


@dataclass(slots=True)
class Cadence:
    """Decides after which steps to save: after every `every_steps` steps, or by time if that is None. By time, at most
    SAVE_EVERY_S of work can be lost, and saving takes at most SAVE_SHARE of the time."""

    every_steps: int | None
    """Steps between two saves; None: by time."""
    save_s: float
    """Duration of the last save, or an estimate."""
    clock: Callable[[], float] = time.monotonic
    """Seconds; only differences count."""
    _worked_from_s: float = field(init=False)
    _checked_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._worked_from_s = self._checked_s = self.clock()

    def due(self, number: int) -> bool:
        """Return whether to save after step `number`. By time it is due if a save after one more step of the same
        length would be too late."""
        now_s = self.clock()
        step_s, worked_s, self._checked_s = now_s - self._checked_s, now_s - self._worked_from_s, now_s
        if self.every_steps is not None:
            return due(number, self.every_steps)
        return worked_s + step_s > SAVE_EVERY_S and self.save_s <= SAVE_SHARE * (worked_s + self.save_s)

    def saved(self, took_s: float) -> None:
        self.save_s, self._worked_from_s = took_s, self.clock()
        self._checked_s = self._worked_from_s


class Checkpointer:
    """Saves and restores the state of a run. trained: the roles that have an optimizer; the first one is exported ·
    needed_bytes: the approximate size of one checkpoint."""

    def __init__(
        self, claimed: RunDir, learner: Learner, trained: tuple[str, ...], needed_bytes: int, reporter: Reporter
    ) -> None:
        self._claimed, self._learner, self._trained = claimed, learner, trained
        self._needed_bytes, self._reporter = needed_bytes, reporter
        self._limit_s = max(learner.config.run.wait_timeout_s, needed_bytes / SLOW_BYTES_PER_S)
        self.cadence = Cadence(learner.config.run.save_every_steps, needed_bytes / BYTES_PER_S)
        self.stop = StopRequest(reporter.progress, learner.config.run.grace_s, self._save_s)
        self._under_way: asyncio.Task[None] | None = None
        kept = media_of_run(claimed.path)
        self._images = SavedImages(learner.queue.media, kept, claimed.path / "checkpoints")
        self.newest = claimed.state.step if claimed.state else 0  # step of the newest complete checkpoint
        self._written = self.newest  # step of the checkpoint that was started last
        self._held: int | None = None  # step of the copy that the workers keep
        self._copied = -1  # step of the copy that was requested last
        self._why_not = ""  # why there is no copy
        self._updates_s: deque[float] = deque(maxlen=LOOK_BACK)
        self._copies_s: deque[float] = deque(maxlen=2)  # the first copy also allocates its memory
        self._reported: set[bool] = set()

    async def save(self, state: DriverState, *, last: bool = False, best: float | None = None) -> None:
        """Commit a checkpoint after `state.step` steps. If it cannot be written (disk full, I/O), a warning is printed:
        nothing of it remains, earlier checkpoints are untouched, and the run continues; with `last` the OSError is
        raised. Raise TimeoutError if workers do not answer within run.wait_timeout_s, or within the time that a slow
        disk needs.

        Workers in processes of their own (torchrun's too) make a copy of their state and write it while training
        continues. The checkpoint gets its name when all of it is on disk. `settle` waits for that, and so does the next
        save."""
        await self.settle()
        claimed, groups = self._claimed, tuple(hidden(group, self._claimed.hide) for group in state.groups)
        state = msgspec.structs.replace(state, identity=claimed.identity, parent=claimed.parent, groups=groups)
        events, began_s = self._reporter.events, time.monotonic()
        await asyncio.to_thread(self._images.save, state.step, groups)
        events.flush(fsync=True)  # the state's groups continue after a resume without new events
        self._written = state.step
        if self._held == state.step:
            self._held = None
            await self._commit(self._write_copies(state, best), state, began_s, last=last)
        elif not self._writes_copies or last or too_small(await self._rooms()):
            await self._commit(self._write(state, best), state, began_s, last=last)
        else:
            await self._copy(state.step)
            write = self._write_copies(state, best)
            self._under_way = asyncio.ensure_future(self._commit(write, state, began_s, last=False))

    async def hold(self, step: int) -> None:
        """Copy the models before the updates of step `step` + 1 if these updates may last longer than the grace of a
        stop. No copy is made if the state is on disk already, or if the hosts do not have enough memory."""
        self._why_not = ""
        if self._learner.why_together():
            return
        if self._written == step:  # it is still being written, or it failed
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
        if (self._held is None) not in self._reported:
            self._reported.add(self._held is None)
            what = f"updates take {longest_s:.0f} s, longer than run.grace_s={grace_s:g} leaves"
            size = f"{sum(room.copy_bytes for room in rooms) / 1e9:.2g} GB"
            kept = f"a copy of the state ({size}) is kept in host memory, so that a stop can save what was before them"
            waits = f"a stop in one waits for its end all the same: {self._why_not}"
            self._reporter.progress.message(f"{what}: {waits if self._why_not else kept}")

    def no_way_back(self, step: int) -> str:
        """Return why the state after `step` is lost once the models are trained further; "" if it can still be
        saved."""
        return self._learner.why_together() or ("" if step in (self._held, self.newest) else self._why_not)

    async def updated(self, seconds: float) -> None:
        """Drop the copy that was kept for a stop: the updates of a step, which took `seconds`, have ended."""
        self._updates_s.append(seconds)
        if self._held is not None:
            self._held = None
            await self._each(ModelWorkers.forget)

    @property
    def _writes_copies(self) -> bool:
        """Return whether a save runs while training continues: workers have processes of their own, or every rank is a
        driver."""
        return self._learner.cluster.own_processes or self._learner.cluster.drivers is not None

    async def _copy(self, step: int) -> None:
        self._copied = step
        await self._each(ModelWorkers.snapshot)

    async def _each(self, call: Callable[[ModelWorkers], Future[T]]) -> list[T]:
        """Call a method of the workers of every trained role at once, and return the results."""
        calls = [call(self._learner.models[role]) for role in self._trained]
        return [await self._learner.done(c, f"{role}.{call.__name__}") for role, c in zip(self._trained, calls)]

    async def _rooms(self) -> list[RankMemory]:
        return [room for rooms in await self._each(ModelWorkers.room) for room in rooms]

    def _save_s(self) -> float:
        slowed = self._held is not None and not self._writes_copies
        return self.cadence.save_s * (BUSY if slowed else 1.0)

    async def settle(self) -> None:
        """Wait until the checkpoint that is being written is complete or has failed."""
        if self._under_way is not None:
            task, self._under_way = self._under_way, None
            await task

    async def close(self) -> None:
        """Wait at most CLOSE_S for the checkpoint that is being written. The run does not fail if the checkpoint
        does."""
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
            self.cadence.saved(self.cadence.save_s)  # a failed save does not measure the duration
            if self._copied == state.step:  # workers that did not write the copy would keep it
                await self._each(ModelWorkers.forget)
            if last:
                raise
            return
        self.cadence.saved(time.monotonic() - began_s)
        self.newest = state.step
        events.append("saved", state.step, {"version": state.version, "seconds": self.cadence.save_s})
        events.flush(fsync=True)

    async def stopped(self, beginning: DriverState | None, total_steps: int) -> Stopped:
        """Save the state at the beginning of the unfinished step after a stop, unless it is saved already."""
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

    async def _write_copies(self, state: DriverState, best: float | None) -> None:
        """Write the workers' copies while training continues; poll the workers until they are done."""
        models = self._learner.models

        def fill(path: Path) -> None:
            for i, role in enumerate(self._trained):
                self._done(models[role].write(path / "state" / role, path / "hf" if i == 0 else None), role)
            for role in self._trained:
                until_s = time.monotonic() + self._limit_s
                while not self._done(models[role].written(), role):
                    if time.monotonic() > until_s:
                        raise self._late(role)
                    time.sleep(POLL_S)

        await self._stored(state, best, fill)

    def _done(self, future: Future[T], role: str) -> T:
        try:
            return future.result(self._limit_s)
        except TimeoutError as e:
            raise e if future.done() else self._late(role) from None

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
        await self._learner.waits.wait(write, waiter="driver", what=what, timeout_s=longest_s)

    async def restore(self) -> DriverState | None:
        """Restore weights, optimizers and generators from the checkpoint. Return the rest of the state, which the
        caller restores; None without a checkpoint."""
        state, checkpoint = self._claimed.state, self._claimed.resumed
        if state is None or checkpoint is None:
            return None
        for role in self._trained:
            await load_role(self._learner, role, checkpoint)
        self._images.restore(state.groups, media_of_run(checkpoint.parent.parent))
        if state.controllers is not None:  # keys that a fork changes keep their new values
            changed, now = self._claimed.changed, self._learner.controllers
            if not any(key.startswith("algorithm.kl_reward") for key in changed):
                now.kl_coef = state.controllers.kl_coef
            if not any(key.startswith("algorithm.critic_warmup") for key in changed):
                now.critic_warm = state.controllers.critic_warm
        return state


async def load_role(learner: Learner, role: str, checkpoint: Path) -> None:
    """Load the state of one model from a checkpoint."""
    path = checkpoint / "state" / role
    if not path.is_dir():
        raise Refused(
            f"{checkpoint} has no {role}: it was written by an algorithm without one; start a new run from its hf "
            "folder"
        )
    workers: ModelWorkers = learner.models[role]
    await learner.done(workers.load(path), f"{role}.load")
