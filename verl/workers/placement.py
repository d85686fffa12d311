"""Who runs where, and who gives way to whom."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from verl.rollout.base import RolloutEngine
from verl.workers.waits import Waits


class Placement:
    """Colocated: the rollout engine releases its KV cache while training, and its weights where every training ends
    with new ones. Split: a no-op."""

    def __init__(
        self,
        replicas: Sequence[RolloutEngine],
        *,
        colocated: bool,
        drops_weights: bool = False,
        waits: Waits | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.colocated = colocated
        self._replicas = replicas
        self._level = 2 if drops_weights else 1
        self._parts = ("weights", "kv") if drops_weights else ("kv",)
        self._waits = waits or Waits()
        self._timeout_s = timeout_s

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Inside, nothing is generated when colocated; leaving wakes the KV cache of every replica, slept or not."""
        if not self.colocated:
            yield
            return
        try:
            for i, replica in enumerate(self._replicas):
                await self._waits.wait(
                    replica.sleep(self._level), who="placement", what=f"replica {i} to sleep", timeout_s=self._timeout_s
                )
            yield
        finally:
            for i, replica in enumerate(self._replicas):
                await self._waits.wait(
                    replica.wake(self._parts), who="placement", what=f"replica {i} to wake", timeout_s=self._timeout_s
                )
