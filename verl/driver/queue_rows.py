"""The rows that a driver has put into the queue. No other code puts rows there or drops them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from verl.transfer_queue.base import TransferQueue
from verl.types import Refs, Sample
from verl.workers.waits import Waits


def owner_of_row(sample_id: str) -> str:
    """Return the name of a row as an owner of media."""
    return f"row {sample_id}"


@dataclass(eq=False)
class QueueRows:
    """Puts the rows of one queue and drops them, with the media that they refer to. The `owner` of rows is a group: its
    rows are dropped before they are put again under the same ids."""

    queue: TransferQueue
    waits: Waits
    _with_media: set[str] = field(default_factory=set, init=False)
    _dropping: dict[str, asyncio.Task[None]] = field(default_factory=dict, init=False)

    async def put(self, samples: Sequence[Sample], owner: str = "") -> Refs:
        """Store samples, after earlier rows of the owner are dropped, and return their refs."""
        if dropping := self._dropping.get(owner):
            await asyncio.shield(dropping)
        media = {s.sample_id: s.media for s in samples if s.media}
        if media and self.queue.media is None:
            raise ValueError(f"{next(iter(media))} has media, and this queue stores none; use queue.engine=shared")
        refs = await self.queue.put(samples)
        if media and self.queue.media is not None:
            self._with_media |= media.keys()
            try:
                for sample_id, names in media.items():
                    self.queue.media.hold(names, owner_of_row(sample_id))
            except BaseException:
                self.drop(refs)
                raise
        return refs

    def drop(self, refs: Refs) -> None:
        """Drop rows that no call of a worker uses any more, and media to which no other row refers."""
        self.queue.drop(refs)
        if (dropped := self._with_media & {*refs.ids}) and self.queue.media is not None:
            self._with_media -= dropped
            self.queue.media.drop(map(owner_of_row, dropped))

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
                await self.waits.wait(answer, waiter=owner, what=what, timeout_s=timeout_s)
            self.drop(refs)
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
