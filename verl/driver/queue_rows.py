"""The rows that a driver has put into the queue: the only code that puts them there and drops them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from verl.transfer_queue.base import TransferQueue
from verl.types import Refs, Sample
from verl.workers.waits import Waits


@dataclass(eq=False)
class QueueRows:
    """Puts and drops the rows of one queue. `owner` names the rows that are dropped and may be put again under the same
    ids: a group."""

    queue: TransferQueue
    waits: Waits
    _dropping: dict[str, asyncio.Task[None]] = field(default_factory=dict, init=False)

    async def put(self, samples: Sequence[Sample], owner: str = "") -> Refs:
        """Store samples, after earlier rows of the owner are dropped, and return their refs."""
        if dropping := self._dropping.get(owner):
            await asyncio.shield(dropping)
        return await self.queue.put(samples)

    def drop(self, refs: Refs) -> None:
        """Drop rows that no call of a worker uses any more."""
        self.queue.drop(refs)

    def drop_after(
        self,
        calls: Sequence[Future[None]],
        refs: Refs,
        owner: str,
        timeout_s: float,
        failed: Callable[[BaseException], None],
    ) -> None:
        """Drop rows of the owner in the background, after the calls that still use them have ended. failed: called with
        the error if they do not end."""

        async def drop() -> None:
            for answer in map(asyncio.wrap_future, calls):
                what = "a model to let go of rows that are dropped"
                await self.waits.wait(answer, who=owner, what=what, timeout_s=timeout_s)
            self.queue.drop(refs)
            del self._dropping[owner]

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()):
                failed(error)

        self._dropping[owner] = asyncio.ensure_future(drop())
        self._dropping[owner].add_done_callback(ended)

    @property
    def pending(self) -> list[asyncio.Task[None]]:
        """The drops in the background."""
        return [*self._dropping.values()]
