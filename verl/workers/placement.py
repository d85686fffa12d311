"""Who runs where, and who gives way to whom."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from verl.rollout.base import RolloutEngine
from verl.workers.waits import Waits


@dataclass(frozen=True, slots=True)
class ResourcePool:
    """Devices that roles share. In one process: one pool, one node."""

    name: str
    devices_per_node: tuple[int, ...] = (1,)

    @property
    def num_devices(self) -> int:
        return sum(self.devices_per_node)


class Placement:
    """Colocated (staleness 0): rollout stands still while training, without its KV cache if `frees_kv`. Split: a no-op."""

    def __init__(
        self,
        pool: ResourcePool,
        replicas: Sequence[RolloutEngine],
        *,
        colocated: bool,
        frees_kv: bool = True,
        waits: Waits | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.pool = pool
        self.colocated = colocated
        self._frees_kv = frees_kv
        self._replicas = replicas
        self._waits = waits or Waits()
        self._timeout_s = timeout_s

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Inside, nothing is generated when colocated; every replica goes on however it is left."""
        if not self.colocated:
            yield
            return
        try:
            for i, replica in enumerate(self._replicas):
                if self._frees_kv:
                    await self._wait(replica.sleep(1), f"replica {i} to sleep")
                else:
                    await self._wait(replica.pause("keep"), f"replica {i} to pause")
            yield
        finally:
            for i, replica in enumerate(self._replicas):
                if self._frees_kv:
                    await self._wait(replica.wake(("kv",)), f"replica {i} to wake")
                else:
                    await self._wait(replica.resume(), f"replica {i} to resume")

    async def _wait(self, step: Coroutine[Any, Any, Any], what: str) -> None:
        await self._waits.wait(step, who="placement", what=what, timeout_s=self._timeout_s)
