"""Who runs where, and who gives way to whom."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from verl.rollout.base import RolloutEngine
from verl.workers.waits import Waits


@dataclass(eq=False)
class Placement:
    """Colocated: the rollout engine releases its KV cache while training, and with `drops_weights` its weights, where
    every training ends with new ones. Split: a no-op."""

    replicas: Sequence[RolloutEngine]
    colocated: bool
    drops_weights: bool = False
    waits: Waits = field(default_factory=Waits)
    timeout_s: float = 600.0

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Inside, nothing is generated when colocated; leaving wakes the KV cache of every replica, slept or not."""
        if not self.colocated:
            yield
            return
        level, parts = (2, ("weights", "kv")) if self.drops_weights else (1, ("kv",))
        try:
            for i, replica in enumerate(self.replicas):
                await self._wait(replica.sleep(level), f"replica {i} to sleep")
            yield
        finally:
            for i, replica in enumerate(self.replicas):
                await self._wait(replica.wake(parts), f"replica {i} to wake")

    async def _wait(self, job: Awaitable[object], what: str) -> None:
        await self.waits.wait(job, who="placement", what=what, timeout_s=self.timeout_s)
