"""A pool of killable, memory-limited, self-healing workers for user reward functions.

consumes RewardRequests · waits for a free worker, then for the function · unblocked by an answer, a death or the
deadline · produces exactly one Score or Invalid per request. Whatever a grader does costs its own sample's score and
nothing else: a call that crashes or runs out of memory in a worker that served others before it is repeated once in a
fresh one, so that nobody pays for what an earlier sample left behind.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl.reward.base import RewardRequest
from verl.reward.process import KILL_WAIT_S, Target, TargetError, Worker, start_worker
from verl.types import Invalid, Score

__all__ = ["PoolStats", "RewardPool", "SlowCall", "Target", "TargetError"]

SLOWEST = 10


@dataclass(frozen=True, slots=True, order=True)
class SlowCall:
    wall_s: float
    request_id: str
    data_source: str
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """What the pool has done since its start. `outcomes` counts requests by "ok" and by reason of Invalid."""

    outcomes: Mapping[str, int]
    examples: Mapping[str, str]  # the latest detail of each reason
    slowest: tuple[SlowCall, ...]  # slowest first
    workers: int  # alive now
    waiting: int  # requests that wait for a worker now
    longest_wait_s: float
    restarted: int  # workers replaced because a call ended them
    recycled: int  # workers replaced after max_calls_per_worker, or because they leaked
    repeated: int  # calls repeated in a fresh worker


@dataclass(slots=True)
class _Slot:
    """A place for one worker. Owned by the one that took it from the idle queue."""

    worker: Worker | None = None
    error: str = ""


class RewardPool:
    """A RewardFn that runs the user's function in `num_workers` processes, one call at a time in each.

    timeout_s: wall clock of one call, kept by killing the worker and all it started. memory_limit_mb: address space of
    a worker (and resident memory of it with its children) on top of what it has once the function is loaded, so heavy
    imports belong at the top of the user's file. Limits on memory need Linux. Belongs to one event loop,
    and dies with the thread that runs it.
    """

    def __init__(
        self,
        target: Target,
        *,
        num_workers: int = 2,
        timeout_s: float = 30.0,
        memory_limit_mb: float = 2048,
        max_calls_per_worker: int = 10_000,
        start_timeout_s: float = 120.0,
    ) -> None:
        sizes = {"num_workers": num_workers, "max_calls_per_worker": max_calls_per_worker}
        limits = {"timeout_s": timeout_s, "memory_limit_mb": memory_limit_mb, "start_timeout_s": start_timeout_s}
        for name, value in {**sizes, **limits}.items():
            if not value > 0:
                raise ValueError(f"reward.{name}={value}: must be positive; there is no call without a limit")
        self._target = target
        self._num_workers, self._max_calls = num_workers, max_calls_per_worker
        self._timeout_s, self._memory_limit_mb, self._start_timeout_s = timeout_s, memory_limit_mb, start_timeout_s
        self._idle: asyncio.Queue[_Slot | None] = asyncio.Queue()
        self._slots = [_Slot() for _ in range(num_workers)]
        self._healing: set[asyncio.Task[None]] = set()
        self._started = self._closed = False
        self._waiting, self._longest_wait_s, self._slowest_start_s = 0, 0.0, 0.0
        self._outcomes: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self._slowest: list[SlowCall] = []
        self._restarted = self._recycled = self._repeated = 0

    async def __aenter__(self) -> RewardPool:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Load the user's function in every worker. Raises one TargetError (a ValueError), with the fix."""
        assert not self._started, "a reward pool starts once"
        self._started = True
        try:
            await self._fill(self._slots[0])  # one alone first: a bad file is loaded, and reported, once
            if self._slots[0].worker is not None:
                await asyncio.gather(*(self._fill(slot) for slot in self._slots[1:]))
            for slot in self._slots:
                if slot.error:
                    raise TargetError(slot.error)
        except BaseException:
            await self.close()
            raise
        for slot in self._slots:
            self._idle.put_nowait(slot)

    async def score(self, request: RewardRequest) -> Score | Invalid:
        """Score one request, waiting for a free worker first (that is the back-pressure). Never raises for a grader."""
        assert self._started, "await pool.start() comes first"
        slot = await self._take()
        if isinstance(slot, Invalid):
            outcome: Score | Invalid = slot
        else:
            began = time.monotonic()
            try:
                outcome = await self._run(slot, _arguments(request, self._target.with_ids))
            finally:
                self._give_back(slot)
            self._note_time(time.monotonic() - began, request, outcome)
        self._count(outcome)
        return outcome

    def stats(self) -> PoolStats:
        """Counts since the start; a snapshot."""
        return PoolStats(
            outcomes=dict(self._outcomes), examples=dict(self._examples),
            slowest=tuple(sorted(self._slowest, reverse=True)),
            workers=sum(slot.worker is not None and slot.worker.alive for slot in self._slots),
            waiting=self._waiting, longest_wait_s=self._longest_wait_s,
            restarted=self._restarted, recycled=self._recycled, repeated=self._repeated,
        )  # fmt: skip

    async def close(self) -> None:
        """End every worker and all that user code started; requests in flight get Invalid. Idempotent."""
        self._closed = True
        for _ in range(self._waiting):
            self._idle.put_nowait(None)
        for task in self._healing:
            task.cancel()
        await asyncio.gather(*self._healing, return_exceptions=True)
        await asyncio.gather(*(slot.worker.stop() for slot in self._slots if slot.worker is not None))

    async def _take(self) -> _Slot | Invalid:
        """A free slot, first come first served; or Invalid when the pool closes or the wait cannot be right."""
        if self._closed:
            return Invalid("crash", "the reward pool was closed")
        # Everyone ahead takes at most two calls and a restart or two: past that, something of ours is broken.
        turn_s = 2 * (self._timeout_s + KILL_WAIT_S + self._slowest_start_s) + self._start_timeout_s
        limit_s = (self._waiting // self._num_workers + 1) * turn_s
        began = time.monotonic()
        self._waiting += 1
        try:
            async with asyncio.timeout(limit_s):
                slot = await self._idle.get()
        except TimeoutError:
            return Invalid("timeout", f"no free worker within {limit_s:.0f} s")
        finally:
            self._waiting -= 1
            self._longest_wait_s = max(self._longest_wait_s, time.monotonic() - began)
        return slot if slot is not None else Invalid("crash", "the reward pool was closed")

    async def _run(self, slot: _Slot, arguments: Mapping[str, Any]) -> Score | Invalid:
        if slot.worker is None or not slot.worker.alive:  # a replacement failed, or it was killed while idle
            await self._replace(slot)
        while slot.worker is not None and not self._closed:
            worker = slot.worker
            outcome = await worker.call(arguments, self._timeout_s)
            innocent = isinstance(outcome, Invalid) and outcome.reason in ("crash", "memory") and worker.calls > 1
            if not innocent or self._closed:
                return outcome
            self._repeated += 1
            await self._replace(slot)
        return Invalid(
            "crash", f"no worker could be started: {slot.error}" if slot.error else "the reward pool was closed"
        )

    def _give_back(self, slot: _Slot) -> None:
        """Return the slot to the idle queue; through the repair shop if its worker should not serve again."""
        worker = slot.worker
        if self._closed:
            return
        if worker is not None and worker.healthy and worker.alive:
            # Half the limit gained between calls is a leak: end it before it costs an innocent sample.
            if worker.calls < self._max_calls and worker.grown_mb < self._memory_limit_mb / 2:
                self._idle.put_nowait(slot)
                return
            self._recycled += 1
        task = asyncio.create_task(self._heal(slot))
        self._healing.add(task)
        task.add_done_callback(self._healing.discard)

    async def _heal(self, slot: _Slot) -> None:
        try:
            await self._replace(slot)
        finally:
            self._idle.put_nowait(slot)

    async def _replace(self, slot: _Slot) -> None:
        """A fresh worker in the slot; the old one is gone before. On failure the slot stays empty, with the error."""
        if slot.worker is not None:
            if not slot.worker.healthy or not slot.worker.alive:
                self._restarted += 1
            await slot.worker.stop()
            slot.worker = None
        await self._fill(slot)

    async def _fill(self, slot: _Slot) -> None:
        slot.error = ""
        try:
            slot.worker = await start_worker(
                self._target, memory_limit_mb=self._memory_limit_mb, start_timeout_s=self._start_timeout_s
            )
            self._slowest_start_s = max(self._slowest_start_s, slot.worker.ready_s)
        except (TargetError, OSError) as error:  # OSError: no more processes or descriptors, for now
            slot.error = str(error)
        if self._closed and slot.worker is not None:
            await slot.worker.stop()

    def _note_time(self, wall_s: float, request: RewardRequest, outcome: Score | Invalid) -> None:
        name = outcome.reason if isinstance(outcome, Invalid) else "ok"
        call = SlowCall(wall_s, request.request_id, request.data_source, name)
        push = heapq.heappush if len(self._slowest) < SLOWEST else heapq.heappushpop
        push(self._slowest, call)

    def _count(self, outcome: Score | Invalid) -> None:
        if isinstance(outcome, Invalid):
            self._outcomes[outcome.reason] += 1
            self._examples[outcome.reason] = outcome.detail
        else:
            self._outcomes["ok"] += 1


def _arguments(request: RewardRequest, with_ids: bool) -> dict[str, Any]:
    arguments = {
        "data_source": request.data_source, "solution_str": request.solution_str,
        "ground_truth": request.ground_truth, "extra_info": dict(request.extra_info),
    }  # fmt: skip
    if with_ids:
        arguments |= {"prompt_ids": request.prompt_ids, "response_ids": request.response_ids}
    return arguments
