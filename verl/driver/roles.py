"""The workers of a run by role, and how the driver waits for their results."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from verl.algorithms.resolve import Algorithm
from verl.config.schema import Config
from verl.driver.queue_rows import QueueRows
from verl.transfer_queue.base import TransferQueue
from verl.workers.group import Cluster
from verl.workers.inproc import InprocCluster
from verl.workers.model_workers import ComputeWorker, ModelWorkers
from verl.workers.waits import Waits

T = TypeVar("T")


class Controllers(msgspec.Struct):
    """State that an algorithm adapts from step to step. It is saved with every checkpoint."""

    kl_coef: float = 0.0
    """The present coefficient of the KL penalty."""
    critic_warm: bool = False
    """The critic's warm-up is over."""


@dataclass(slots=True, kw_only=True)
class Learner:
    """An algorithm over the workers of its roles. RL runs, supervised runs, a replayed step, the Python API and a
    user's own flow differ only in the source of the samples."""

    config: Config
    """The configuration of the run."""
    models: dict[str, ModelWorkers]
    """Role -> workers: actor, and where the algorithm has them ref, critic, reward_model; trainer in a supervised
    run."""
    compute: ComputeWorker
    """The worker for columns that need no model."""
    queue: TransferQueue
    """The queue of the samples."""
    waits: Waits
    """The waits of the run."""
    algorithm: Algorithm | None = None
    """None in a supervised run."""
    cluster: Cluster = field(default_factory=InprocCluster)
    """The processes of the workers."""
    controllers: Controllers = field(default_factory=Controllers)
    rows: QueueRows = field(init=False)
    """Puts and drops the rows of the queue."""

    def __post_init__(self) -> None:
        self.rows = QueueRows(self.queue, self.waits)

    async def done(self, future: Future[T], what: str) -> T:
        """Return the result of a call that was enqueued, within the run's deadline."""
        return await self.waits.wait(
            asyncio.wrap_future(future), waiter="driver", what=what, timeout_s=self.config.run.wait_timeout_s
        )

    def why_together(self) -> str:
        """Return why this process may not abandon work alone; "" if it may."""
        return "" if self.cluster.drivers is None else "the processes of torchrun end a step together"

    async def agreed(self, value: T) -> T:
        """Return the first driver's value if several processes run the driver."""
        drivers = self.cluster.drivers
        return value if drivers is None else (await self.done(drivers.gather(value), "the other ranks"))[0]

    async def finish(self) -> None:
        """Wait until all drivers are done."""
        if (drivers := self.cluster.drivers) is not None:
            await self.done(drivers.finish(), "the other ranks to finish")

    def close(self, timeout_s: float = 10.0) -> None:
        for workers in self.models.values():
            workers.close(timeout_s)
        self.compute.close(timeout_s)
        self.cluster.close()
