"""Who runs where, and who gives way to whom."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from verl.rollout.base import Replaceable, ReplicaLost, RolloutEngine
from verl.workers.waits import Waits

T = TypeVar("T")
LEAST = 64 << 20  # bytes that the sleep of an engine frees which does not say how many: less than any pool of KV


@dataclass(eq=False)
class Placement:
    """Colocated: the rollout engine releases its KV cache while training, and with `drops_weights` its weights, where
    every training ends with new ones. Split: a no-op. note: told, once, whose sleep freed nothing that is known of ·
    free_bytes: of the device that they share with the trainer: one of several that can sleep, and whose sleep frees too
    little of it, is given up: its end frees all."""

    replicas: Sequence[RolloutEngine]
    colocated: bool
    drops_weights: bool = False
    waits: Waits = field(default_factory=Waits)
    timeout_s: float = 600.0
    note: Callable[[str], None] | None = None
    free_bytes: Callable[[], int] | None = None

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Inside, nothing is generated when colocated; leaving wakes the KV cache of every replica, slept or not."""
        if not self.colocated:
            yield
            return
        level, parts = (2, ("weights", "kv")) if self.drops_weights else (1, ("kv",))
        try:
            freed = [
                await self._asked(i, self._asleep(of, level), f"replica {i} to sleep")
                for i, of in enumerate(self.replicas)
            ]
            if self.note is not None and (silent := [str(i) for i, found in enumerate(freed) if found == 0]):
                self.note(f"rollout: asleep, replica {', '.join(silent)} told of no memory that it freed for training")
                self.note = None
            yield
        finally:
            for i, replica in enumerate(self.replicas):
                await self._asked(i, replica.wake(parts), f"replica {i} to wake")

    async def _asleep(self, replica: RolloutEngine, level: int) -> int:
        """Bytes that it says it freed, compared with what is free now."""
        measured = self.free_bytes if isinstance(replica, Replaceable) else None
        try:
            able = measured is not None and level in (await replica.capabilities()).sleep_levels
        except ReplicaLost:  # its next engine hears of it
            able = False
        if measured is None or not able:
            return await replica.sleep(level)
        before = measured()
        told = await replica.sleep(level)
        if (freed := measured() - before) < (least := told // 2 or LEAST):
            said = f"it told of {told / 1e6:,.0f} MB, and of its device {freed / 1e6:,.0f} MB came free"
            raise RuntimeError(f"asleep, {said}: at least {least / 1e6:,.0f} MB were to make room for training")
        return told

    async def _asked(self, number: int, job: Awaitable[T], what: str) -> T | None:
        """Of several replicas, one that fails at this is given up, and the others go on."""
        try:
            return await self.waits.wait(job, who="placement", what=what, timeout_s=self.timeout_s)
        except Exception as e:
            if not isinstance(replica := self.replicas[number], Replaceable):
                raise
            replica.lose(e)
            return None
