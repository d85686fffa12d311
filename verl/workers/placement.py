"""Who runs where, and who gives way to whom."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from verl.rollout.base import RolloutEngine


@dataclass(frozen=True, slots=True)
class ResourcePool:
    """Devices that roles share. In one process: one pool, one node."""

    name: str
    devices_per_node: tuple[int, ...] = (1,)

    @property
    def num_devices(self) -> int:
        return sum(self.devices_per_node)


class Placement:
    """Colocated (staleness 0): the rollout engine releases its KV cache while training. Split: a no-op."""

    def __init__(self, pool: ResourcePool, replicas: Sequence[RolloutEngine], *, colocated: bool) -> None:
        self.pool = pool
        self.colocated = colocated
        self._replicas = replicas

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Inside, nothing is generated when colocated; leaving wakes the KV cache."""
        if not self.colocated:
            yield
            return
        for replica in self._replicas:
            await replica.sleep(1)
        try:
            yield
        finally:
            for replica in self._replicas:
                await replica.wake(("kv",))
