"""A pool of worker processes for calls of a user's callable. Workers can be killed, have limited memory, and are
replaced.

Every call ends in one value or Failure, and does not affect other calls. If a call crashes a worker that had served
other calls before, or exceeds its memory, the call is repeated once in a new worker. Calls that were waiting in that
worker return to the front of the queue.
"""

from __future__ import annotations

import asyncio
import math
import pickle
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic

from verl.errors import Refused
from verl.sandbox.messages import CallableSpec, Failure, T
from verl.sandbox.process import KILL_WAIT_S, UNFIT, CallWorker, CannotLoad, start_worker

# Quick calls are sent together, as many as take about BATCH_S: a message costs as much as they do.
BATCH_S, MAX_BATCH = 0.005, 8
ABANDONED_S = 0.05  # for a call to end that is no longer awaited: a fresh worker costs as much


@dataclass(slots=True)
class PoolStats:
    """Counts of a pool since its start."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """Calls by outcome: "ok", or the reason of a Failure."""
    restarted: int = 0
    """Workers that were replaced because a call ended them."""
    recycled: int = 0
    """Workers that were replaced after max_calls_per_worker calls, or because they leaked memory."""
    repeated: int = 0
    """Calls that were repeated in a fresh worker."""


@dataclass(slots=True)
class PoolLoad:
    """The load of a pool's workers during some time."""

    workers: int
    """Number of workers."""
    calls: int = 0
    """Calls that began to run."""
    queued_s: float = 0.0
    """Sum of the times that these calls waited for a worker."""
    longest_queued_s: float = 0.0
    """The longest of these waits."""
    busy_s: float = 0.0
    """Sum of the times that the calls ran."""
    first_s: float = 0.0
    """Arrival of the first call (`time.monotonic`)."""
    last_s: float = 0.0
    """Arrival of the last call."""

    @property
    def workers_that_would_do(self) -> int:
        """Return the number of workers that would finish all calls within two call times after the last arrival; 0 if
        the present number suffices."""
        if not self.calls or self.queued_s / self.calls <= max(1.0, 2 * self.busy_s / self.calls):
            return 0
        needed = math.ceil(self.busy_s / (self.last_s - self.first_s + 2 * self.busy_s / self.calls))
        return needed if needed > self.workers else 0


@dataclass(slots=True, eq=False)
class _Call(Generic[T]):
    arguments: bytes
    outcome: asyncio.Future[T | Failure]
    since_s: float = field(default_factory=time.monotonic)
    begun: bool = False


@dataclass(slots=True, eq=False)
class _Slot(Generic[T]):
    """A place for one worker, with the calls that the worker has."""

    worker: CallWorker[T] | None = None
    """The worker; None before its start, and if no worker could be started."""
    error: str = ""
    """Why no worker could be started."""
    calls: deque[_Call[T]] = field(default_factory=deque)
    """The calls that were sent to the worker, in order."""
    repeat: list[_Call[T]] = field(default_factory=list)
    """At most one call, which the next worker will repeat."""
    wake: asyncio.Future[None] | None = None
    """The future on which an idle slot waits."""


class WorkerPool(Generic[T]):
    """Runs the callable in `num_workers` processes, one call after the other in each. It belongs to one event loop.

    timeout_s: wall clock time of one call; after it, the worker and all that it started are killed
    memory_limit_mb: address space of a worker, and resident memory of it with its children, on top of what it uses once
        the callable is loaded: heavy imports belong at the top of the user's file. Needs Linux.
    """

    def __init__(
        self,
        spec: CallableSpec,
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
                raise Refused(f"{spec.section}.{name}={value}: must be positive; there is no call without a limit")
        self.spec, self.stats = spec, PoolStats()
        self._timeout_s, self._memory_limit_mb, self._start_timeout_s = timeout_s, memory_limit_mb, start_timeout_s
        self._max_calls = max_calls_per_worker
        self._load = PoolLoad(num_workers)
        self._slots: list[_Slot[T]] = [_Slot() for _ in range(num_workers)]
        self._idle: deque[_Slot[T]] = deque()
        self._queue: deque[_Call[T]] = deque()  # in order of arrival
        self._serving: set[asyncio.Task[None]] = set()
        self._watch: asyncio.TimerHandle | None = None
        self._moved_s = 0.0  # when a call was last begun or ended
        self._call_s = BATCH_S  # running average of the time of a call, as measured by the workers
        self._slowest_start_s = 0.0
        self._started = self._closed = False
        self._closed_early = Failure("crash", f"the {spec.section} pool was closed")

    @property
    def workers(self) -> int:
        """Number of workers that are alive now."""
        return sum(slot.worker is not None and slot.worker.alive for slot in self._slots)

    @property
    def waiting(self) -> int:
        """Number of calls that wait for a worker now."""
        return len(self._queue) + sum(max(0, len(slot.calls) - 1) for slot in self._slots)

    def take_load(self) -> PoolLoad:
        """Return the load since the previous call of this method."""
        found, self._load = self._load, PoolLoad(len(self._slots))
        return found

    async def start(self) -> None:
        """Start all workers and load the user's callable in each. Raises CannotLoad (a ValueError), with the fix."""
        assert not self._started, "a pool starts once"
        self._started = True
        try:
            await self._fill(self._slots[0])  # the first one alone, so that the error of a bad file is raised once
            if self._slots[0].worker is not None:
                await asyncio.gather(*(self._fill(slot) for slot in self._slots[1:]))
            for slot in self._slots:
                if slot.error:
                    raise CannotLoad(slot.error)
        except BaseException:
            await self.close()
            raise
        for slot in self._slots:
            self._employ(slot)

    async def call(self, arguments: Mapping[str, Any]) -> T | Failure:
        """Wait for a free worker, and call the callable once. Return its value, or the Failure of the call."""
        assert self._started, "await pool.start() first"
        if self._closed:
            return self._counted(self._closed_early)
        try:
            packed = pickle.dumps(arguments)
        except Exception as error:  # __reduce__ of the user's objects
            what = f"the {self.spec.given} cannot be sent to the {self.spec.called}"
            return self._counted(Failure("exception", f"{what}: {type(error).__name__}: {error}"))
        loop = asyncio.get_running_loop()
        call: _Call[T] = _Call(packed, loop.create_future())
        self._queue.append(call)
        self._wake()
        if self._watch is None:
            self._moved_s = time.monotonic()
            self._watch = loop.call_later(self._turn_s, self._check_queue)
        try:
            return await call.outcome
        except asyncio.CancelledError:
            for slot in self._slots:
                self._give_up_soon(slot)
            raise

    async def close(self) -> None:
        """End all workers and all that user code started; unfinished calls get a Failure. Idempotent."""
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        self._fail_all(self._slots, self._closed_early)
        await asyncio.gather(*(slot.worker.stop() for slot in self._slots if slot.worker is not None))

    def _employ(self, slot: _Slot[T]) -> None:
        task = asyncio.create_task(self._serve(slot))
        self._serving.add(task)
        task.add_done_callback(partial(self._served, slot))

    def _served(self, slot: _Slot[T], task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        error = None if self._closed or task.cancelled() else task.exception()
        if error is not None:  # an error of the pool itself: no call may wait for ever
            self._fail_all([slot], Failure("broken", f"the {self.spec.section} pool failed: {error!r}"))
            self._employ(slot)

    def _wake(self) -> None:
        """Wake idle slots for the queued calls. They begin in the next turn of the loop, so that they share a burst."""
        for _ in range(min(len(self._idle), len(self._queue))):
            wake = self._idle.popleft().wake
            assert wake is not None
            wake.set_result(None)

    async def _serve(self, slot: _Slot[T]) -> None:
        """Run calls of the queue in the slot's worker without end, and replace the worker when it is no longer
        usable."""
        while True:
            if not slot.repeat and not self._queue:
                slot.wake = asyncio.get_running_loop().create_future()
                self._idle.append(slot)
                await slot.wake
                continue  # another slot may have taken the call
            if slot.worker is None or not slot.worker.alive:  # a replacement failed, or it was killed while idle
                await self._replace(slot)
            if slot.repeat:
                calls, slot.repeat = [call for call in slot.repeat if not call.outcome.done()], []
            else:
                calls = self._next_calls(slot.worker)
            if slot.worker is None:
                for call in calls:
                    self._settle(call, Failure("broken", f"no worker could be started: {slot.error}"))
            elif calls:
                await self._run(slot, slot.worker, calls)
                if not (slot.worker.healthy and slot.worker.alive) or self._spent(slot.worker):
                    await self._replace(slot)

    async def _run(self, slot: _Slot[T], worker: CallWorker[T], calls: list[_Call[T]]) -> None:
        """Run calls and settle them. Calls that were not begun return to the queue; one that a fresh worker has to
        repeat stays in the slot."""

        def deliver(outcome: T | Failure) -> None:
            call = slot.calls.popleft()
            unfit = isinstance(outcome, Failure) and outcome.reason in UNFIT
            if unfit and worker.calls > 1 and not call.outcome.done():
                slot.repeat.append(call)
                self.stats.repeated += 1
            else:
                self._settle(call, outcome)
            self._load.busy_s += worker.took_s
            self._call_s += 0.1 * (min(max(worker.took_s, 1e-5), 1.0) - self._call_s)
            self._begin(slot)

        slot.calls.extend(calls)
        self._begin(slot)
        await worker.call([call.arguments for call in calls], self._timeout_s, deliver)
        if slot.calls:
            self._queue.extendleft(reversed(slot.calls))
            slot.calls.clear()
            self._wake()

    def _begin(self, slot: _Slot[T]) -> None:
        """Record that the first call of a slot, if there is one, runs from now on."""
        self._moved_s = time.monotonic()
        if slot.calls and not slot.calls[0].begun:
            call, load = slot.calls[0], self._load
            call.begun, queued_s = True, self._moved_s - call.since_s
            load.first_s = min(load.first_s, call.since_s) if load.calls else call.since_s
            load.last_s = max(load.last_s, call.since_s)
            load.calls += 1
            load.queued_s += queued_s
            load.longest_queued_s = max(load.longest_queued_s, queued_s)
        self._give_up_soon(slot)

    def _give_up_soon(self, slot: _Slot[T]) -> None:
        """If the caller of the running call no longer waits, end the call after ABANDONED_S, unless it ends before."""
        if slot.calls and slot.calls[0].outcome.done():
            asyncio.get_running_loop().call_later(ABANDONED_S, self._give_up, slot, slot.calls[0])

    def _give_up(self, slot: _Slot[T], call: _Call[T]) -> None:
        if slot.worker is not None and slot.calls and slot.calls[0] is call:
            slot.worker.give_up()

    def _spent(self, worker: CallWorker[T]) -> bool:
        return worker.calls >= self._max_calls or worker.leaks

    def _next_calls(self, worker: CallWorker[T] | None) -> list[_Call[T]]:
        """Take calls from the front of the queue: one call, or several quick calls that take about BATCH_S together,
        but not more than this worker's share."""
        share = -(-len(self._queue) // len(self._slots))
        room = self._max_calls - worker.calls if worker is not None else 1
        size = max(1, min(int(BATCH_S / self._call_s), share, room, MAX_BATCH))
        calls: list[_Call[T]] = []
        while self._queue and len(calls) < size:
            call = self._queue.popleft()
            calls += [] if call.outcome.done() else [call]  # done: its caller no longer waits
        return calls

    @property
    def _turn_s(self) -> float:
        """The longest time in seconds until a worker is free: two calls and two restarts. After it the pool itself has
        failed."""
        return 2 * (self._timeout_s + KILL_WAIT_S + self._slowest_start_s) + self._start_timeout_s

    def _check_queue(self) -> None:
        """Fail the queued calls if no worker became free in time."""
        self._watch = None
        still_s = time.monotonic() - self._moved_s
        if self._queue and still_s >= self._turn_s:
            self._fail_all([], Failure("broken", f"no free worker within {still_s:.0f} s"))
        elif self._queue:
            self._watch = asyncio.get_running_loop().call_later(self._turn_s - still_s, self._check_queue)

    async def _replace(self, slot: _Slot[T]) -> None:
        """End the slot's worker, then start a new one. If that fails, the slot has no worker but the error."""
        if slot.worker is not None:
            if slot.worker.healthy and self._spent(slot.worker):
                self.stats.recycled += 1
            else:
                self.stats.restarted += 1
            await slot.worker.stop()
            slot.worker = None
        await self._fill(slot)

    async def _fill(self, slot: _Slot[T]) -> None:
        slot.error = ""
        try:
            slot.worker = await start_worker(self.spec, self._memory_limit_mb, self._start_timeout_s)
            self._slowest_start_s = max(self._slowest_start_s, slot.worker.ready_s)
        except (CannotLoad, OSError) as error:  # OSError: no more processes or descriptors, for now
            slot.error = str(error)
        if self._closed and slot.worker is not None:
            await slot.worker.stop()

    def _fail_all(self, slots: Iterable[_Slot[T]], failure: Failure) -> None:
        """Settle all calls in the queue and in these slots with this failure."""
        for waiting in (self._queue, *(waiting for slot in slots for waiting in (slot.calls, slot.repeat))):
            for call in waiting:
                self._settle(call, failure)
            waiting.clear()

    def _settle(self, call: _Call[T], outcome: T | Failure) -> None:
        if not call.outcome.done():  # otherwise its caller no longer waits
            call.outcome.set_result(self._counted(outcome))

    def _counted(self, outcome: T | Failure) -> T | Failure:
        self.stats.outcomes[outcome.reason if isinstance(outcome, Failure) else "ok"] += 1
        return outcome
