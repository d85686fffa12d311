"""Checkpoints of a run: when, who saves what, in one transaction, and how a run goes on from one.

state/<role>/        weights, optimizer and counters, written by the role's workers
state/driver.msgpack everything else that may influence a step
hf/                  a ready Hugging Face folder
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from verl.config.plan import SAVE_EVERY_S, SAVE_SHARE
from verl.driver.reporter import Reporter, due
from verl.driver.roles import Learner
from verl.driver.run_dir import RunDir
from verl.driver.state import DriverState, hidden, write_state
from verl.driver.stopping import Stopped, StopRequest
from verl.workers.model_workers import ModelWorkers

BYTES_PER_S = 500e6  # of a save, before one was measured
COPY_ROOM = 2.0  # free memory, of a checkpoint's size, without which no copy is made of it
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
        self.cadence = Cadence(learner.config.run.save_every_steps, needed_bytes / BYTES_PER_S)
        self.stop = StopRequest(reporter.progress, learner.config.run.grace_s, lambda: self.cadence.save_s)
        self._under_way: asyncio.Task[None] | None = None
        self.newest = claimed.state.step if claimed.state else 0  # the step after which the newest checkpoint was made

    async def save(self, state: DriverState, *, last: bool = False, best: float | None = None) -> None:
        """Commit a checkpoint after `state.step` steps. One that cannot be written (disk full, I/O) is a warning:
        nothing of it is left, earlier ones are untouched, and the run goes on; with `last` the OSError is raised.

        Workers in processes of their own keep a copy of their state and write it while training goes on; the checkpoint
        has its name when all of it is on disk. `settle` waits for that, and so does the next save."""
        await self.settle()
        claimed, groups = self._claimed, tuple(hidden(group, self._claimed.hide) for group in state.groups)
        state = msgspec.structs.replace(state, identity=claimed.identity, parent=claimed.parent, groups=groups)
        events, began_s = self._reporter.events, time.monotonic()
        events.flush(fsync=True)  # of the groups that the state holds: they are taken up without a new event
        room = psutil.virtual_memory().available > COPY_ROOM * self._needed_bytes
        if not self._learner.cluster.apart or last or not room:
            await self._commit(self._write(state, best), state, began_s, last=last)
            return
        held = [self._learner.models[role].snapshot() for role in self._trained]
        for role, future in zip(self._trained, held, strict=True):
            await self._learner.done(future, f"{role}.snapshot")
        write = self._write_beside(state, best)
        self._under_way = asyncio.ensure_future(self._commit(write, state, began_s, last=False))

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
            self._reporter.progress.message(f"warning: checkpoint of step {state.step} was not written: {e}")
            events.append("save_failed", state.step, {"error": str(e)})
            self.cadence.saved(self.cadence.save_s)  # how long one takes is not known from this
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
        models, timeout_s = self._learner.models, self._learner.config.run.wait_timeout_s

        def fill(path: Path) -> None:
            for role in self._trained:
                models[role].save(path / "state" / role).result(timeout_s)
            models[self._trained[0]].export(path / "hf").result(timeout_s)

        await self._stored(state, best, fill)

    async def _write_beside(self, state: DriverState, best: float | None) -> None:
        """What the workers kept, while they go on: they are asked now and then whether it is done."""
        models, timeout_s = self._learner.models, self._learner.config.run.wait_timeout_s

        def fill(path: Path) -> None:
            for i, role in enumerate(self._trained):
                models[role].write(path / "state" / role, path / "hf" if i == 0 else None).result(timeout_s)
            for role in self._trained:
                until_s = time.monotonic() + timeout_s
                while not models[role].written().result(timeout_s):
                    if time.monotonic() > until_s:
                        raise TimeoutError(f"{role} has not written its state within {timeout_s:g} s")
                    time.sleep(ASK_EVERY_S)

        await self._stored(state, best, fill)

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
        timeout_s = self._learner.config.run.wait_timeout_s
        what, longest_s = f"the checkpoint of step {state.step}", (2 * len(self._trained) + 2) * timeout_s
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
