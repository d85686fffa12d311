"""Publishes LoRA sets on top of the policy: each set is published again with every version of the weights under it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.errors import Refused
from verl.rollout.base import RolloutEngine
from verl.weight_sync.base import CheckpointEngine, SyncReport
from verl.workers.model_workers import ModelWorkers
from verl.workers.waits import Waits


@dataclass(slots=True, eq=False)
class OpenSet:
    """A LoRA set that is published: its folder, its transport, its workers, and the number of its versions."""

    folder: Path
    engine: CheckpointEngine
    workers: ModelWorkers
    version: int = -1


@dataclass(eq=False, kw_only=True)
class LoraPublisher:
    """Publishes adapters in PEFT's layout as LoRA sets of the policy's workers."""

    trainer: ModelWorkers
    """The workers that hold the policy."""
    base: Path
    """The model folder that the policy was loaded from."""
    new_engine: Callable[[], CheckpointEngine]
    """Makes the transport of one set, which stages whole versions."""
    after: Callable[[RolloutEngine, asyncio.Future[Any]], RolloutEngine]
    """Makes a replica that takes weights only after this publish has ended (`AfterPublish`)."""
    waits: Waits
    """The waits of the run, with their reports."""
    timeout_s: float
    """Limit of one publish."""
    note: Callable[[str], None]
    """Prints a line for the user."""
    published: Callable[[str], None]
    """Called with the id of a set once its first version is live."""
    drop: Callable[[str], Awaitable[None]]
    """Drops a set from all replicas."""
    _open: dict[str, OpenSet] = field(default_factory=dict, init=False)

    async def open(self, name: str, folder: Path, replicas: Sequence[RolloutEngine]) -> SyncReport:
        """Publish an adapter as a set, on top of the weights that were published last: the same folder again is its
        next version. Raise Refused if another folder has this name, and an error if no replica takes the set, which is
        dropped then."""
        before = self._open.get(name)
        if before is not None and _place(before.folder) != _place(folder):
            fix = "drop that set first, or give this one another name"
            raise Refused(f"LoRA set {name!r}: the adapter in {before.folder} has this name, not {folder}; {fix}")
        engine = self.new_engine()
        opening = self.trainer.open_set(name, folder, self.base, engine.outlet())
        await self._wait(asyncio.wrap_future(opening), f"the trainer's workers to open LoRA set {name!r}")
        version = -1 if before is None else before.version
        self._open[name] = opened = OpenSet(folder, engine, self.trainer.of_set(name), version)
        try:
            report = await self._publish(opened, replicas)
        except BaseException:
            await self.close(name)
            raise
        self.published(name)
        return report

    async def close(self, name: str) -> None:
        """Drop a set from all replicas, and do not publish it again."""
        if self._open.pop(name, None) is not None:
            closing = asyncio.wrap_future(self.trainer.close_set(name))
            await self._wait(closing, f"the trainer's workers to close LoRA set {name!r}")
            await self._wait(self.drop(name), f"the replicas to drop LoRA set {name!r}")

    def follow(
        self, publish: asyncio.Future[Any], replicas: Sequence[RolloutEngine]
    ) -> list[asyncio.Future[SyncReport]]:
        """Read all sets as they are at this call, and deliver them after this publish of the policy has ended."""
        every = self._open.values()
        return [self._publish(opened, [self.after(one, publish) for one in replicas]) for opened in every]

    async def settled(self, pending: Sequence[asyncio.Future[SyncReport]]) -> None:
        """Wait for the publishes that `follow` began. A set that failed somewhere is printed: its requests are refused
        there until its next version."""
        results = await asyncio.gather(*pending, return_exceptions=True)
        for name, result in zip(list(self._open), results):
            if isinstance(result, BaseException):
                self.note(f"warning: LoRA set {name!r} was not published: {result}")
            elif result.failed_replicas:
                self.note(f"warning: LoRA set {name!r} is missing: {result.failed_replicas}")

    async def _wait(self, job: Awaitable[Any], what: str) -> None:
        """Await a job. Raise DeadlineExpired, which names it, after `timeout_s`."""
        await self.waits.wait(job, waiter="the publisher of LoRA sets", what=lambda: what, timeout_s=self.timeout_s)

    def _publish(self, opened: OpenSet, replicas: Sequence[RolloutEngine]) -> asyncio.Future[SyncReport]:
        opened.version += 1
        return opened.engine.publish(
            opened.workers,
            replicas,
            version=opened.version,
            exclusive=False,
            on_inflight=["wait"] * len(replicas),
            timeout_s=2 * self.timeout_s,
        )


def _place(folder: Path) -> Path:
    """Return where a folder is, however its path is written."""
    return folder.expanduser().resolve()
