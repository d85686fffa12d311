"""How rollout and training share devices."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from verl.rollout.base import ReplicaLost, RolloutEngine
from verl.workers.waits import Waits

T = TypeVar("T")
LEAST = 64 << 20  # bytes that sleep frees at least, for an engine that reports no number: less than any KV cache


@dataclass(eq=False)
class Placement:
    """The use of a device by rollout and training. Colocated: during training the rollout engines release their KV
    cache, and with `drops_weights` also their weights, if every training ends with new ones. Split, on devices of their
    own: nothing is released."""

    replicas: Sequence[RolloutEngine]  # The rollout engines.
    colocated: bool  # Rollout and training share devices.
    drops_weights: bool = False  # Sleeping engines release their weights too.
    waits: Waits = field(default_factory=Waits)
    timeout_s: float = 600.0  # The deadline of one engine to sleep or to wake.
    note: Callable[[str], None] | None = (
        None  # Prints a message, once, if the sleep of an engine freed no measurable memory.
    )
    free_bytes: Callable[[], int] | None = None
    """Returns the free memory of the shared device. If there are several replicas and the sleep of one frees too
    little, that replica is given up, because its end frees everything."""

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Keep the engines asleep inside this context if they are colocated. At its end the KV cache of every replica
        wakes, also of one that did not sleep."""
        if not self.colocated:
            yield
            return
        level, parts = (2, ("weights", "kv")) if self.drops_weights else (1, ("kv",))
        try:
            freed = [
                await self._awaited(i, self._asleep(of, level), f"replica {i} to sleep")
                for i, of in enumerate(self.replicas)
            ]
            if self.note is not None and (silent := [str(i) for i, found in enumerate(freed) if found == 0]):
                self.note(f"rollout: asleep, replica {', '.join(silent)} told of no memory that it freed for training")
                self.note = None
            yield
        finally:
            for i, replica in enumerate(self.replicas):
                await self._awaited(i, replica.wake(parts), f"replica {i} to wake")

    async def _asleep(self, replica: RolloutEngine, level: int) -> int:
        """Let a replica sleep and return the number of bytes that it reports as freed. Raise RuntimeError if the
        measured free memory of the device did not grow by at least half of that."""
        measured = self.free_bytes if replica.replaceable else None
        try:
            able = measured is not None and level in (await replica.capabilities()).sleep_levels
        except ReplicaLost:  # the replacement of this engine is built awake
            able = False
        if measured is None or not able:
            return await replica.sleep(level)
        before = measured()
        found = await replica.sleep(level)
        if (freed := measured() - before) < (least := found // 2 or LEAST):
            message = f"it told of {found / 1e6:,.0f} MB, and of its device {freed / 1e6:,.0f} MB came free"
            raise RuntimeError(f"asleep, {message}: at least {least / 1e6:,.0f} MB were to make room for training")
        return found

    async def _awaited(self, number: int, job: Awaitable[T], what: str) -> T | None:
        """Await a job of one replica. If it fails and there are several replicas, this one is given up and the others
        continue."""
        try:
            return await self.waits.wait(job, waiter="placement", what=what, timeout_s=self.timeout_s)
        except Exception as e:
            if not (replica := self.replicas[number]).replaceable:
                raise
            replica.lose(e)
            return None
