"""Checkpoints of a run: who saves what, in one transaction, and how a run goes on from one.

state/<role>/        weights, optimizer and counters, written by the role's workers
state/driver.msgpack everything else that may influence a step
hf/                  a ready Hugging Face folder
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from verl.checkpoint.store import CheckpointStore
from verl.driver.roles import Learner
from verl.driver.state import DriverState, read_state, write_state
from verl.workers.model_workers import ModelWorkers


class Checkpointer:
    """trained: the roles that have an optimizer, the exported one first · needed_bytes: of one checkpoint, about."""

    def __init__(
        self,
        store: CheckpointStore,
        learner: Learner,
        trained: tuple[str, ...],
        needed_bytes: int,
        resumed: Path | None,
    ) -> None:
        self._store, self._learner, self._trained = store, learner, trained
        self._needed_bytes = needed_bytes
        self._from = resumed
        self.resumed = read_state(resumed) if resumed is not None else None

    async def save(self, step: int, state: DriverState, best: float | None = None) -> None:
        """Commit a checkpoint of `step`. OSError (disk full, I/O): nothing of it is left, earlier ones are
        untouched."""
        timeout_s = self._learner.config.run.wait_timeout_s

        def fill(path: Path) -> None:
            (path / "state").mkdir()
            for role in self._trained:
                self._learner.models[role].save(path / "state" / role).result(timeout_s)
            self._learner.models[self._trained[0]].export(path / "hf").result(timeout_s)
            write_state(path / "state", state)

        write = asyncio.to_thread(
            self._store.save,
            step,
            fill,
            needed_bytes=self._needed_bytes,
            meta={"metric": best, "version": state.version},
        )
        await self._learner.waits.wait(
            write, who="driver", what=f"the checkpoint of step {step}", timeout_s=(len(self._trained) + 2) * timeout_s
        )

    async def restore(self) -> DriverState | None:
        """Weights, optimizers and generators as they were; the rest of the state is the caller's to hand out."""
        if self.resumed is None or self._from is None:
            return None
        for role in self._trained:
            await load_role(self._learner, role, self._from)
        if self.resumed.controllers is not None:
            self._learner.controllers = self.resumed.controllers
        return self.resumed


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
