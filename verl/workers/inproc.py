"""Worker groups in this process, with one thread per rank, so that the event loop is never blocked. Ranks that share
one engine (virtual ranks) use it one after the other, each with its own share of the rows. The worker code is the same
as in many processes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import threading
import time
from asyncio import CancelledError
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from torch import Tensor

from verl.batch import Batch
from verl.model_engine.base import ModelEngine, StepOutput
from verl.model_engine.layout import Layout
from verl.objective import Term
from verl.rollout.base import RolloutEngine
from verl.types import Metrics
from verl.workers.group import Arguments, Broadcast, Build, ClusterContext, Died

if TYPE_CHECKING:
    from verl.model_engine.snapshot import Snapshot

T = TypeVar("T")
MEETING_TIMEOUT_S = 3600.0  # the longest wait of a rank for the slowest rank of its call


class Meeting:
    """The exchange of values among the ranks of one call. If one rank raises, the wait of all others ends with an
    error."""

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size)
        self._values: list[Any] = [None] * world_size

    def all_gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait(MEETING_TIMEOUT_S)
        found = list(self._values)
        self._barrier.wait(MEETING_TIMEOUT_S)  # the next values may be written only after all ranks have read these
        return found

    def abort(self) -> None:
        self._barrier.abort()


class VirtualRank:
    """`Ranks` of a thread in this process. `meeting` belongs to the call that the rank works on."""

    primary = True

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.meeting: Meeting | None = None

    def all_gather(self, value: T) -> list[T]:
        assert self.meeting is not None, "a rank meets the others inside a call"
        return self.meeting.all_gather(self.rank, value)

    def in_turn(self, fn: Callable[[], T]) -> T:
        """Run the function of every rank, one rank after the other, so that sums of gradients are the same in every
        run."""
        out: list[T] = []
        for turn in range(self.world_size):
            if turn == self.rank:
                out.append(fn())
            self.all_gather(None)
        return out[0]


class SharedEngine:
    """One engine of this process, used by several virtual ranks. Implements `ModelEngine`.

    The gradients of all ranks add up in the engine, and the first rank makes the one optimizer step. Methods that only
    read are delegated to the engine."""

    def __init__(self, engine: ModelEngine, rank: VirtualRank) -> None:
        self._engine, self._rank = engine, rank

    @property
    def whole(self) -> ModelEngine:
        """The engine that the ranks share."""
        return self._engine

    def forward_backward(
        self, batch: Batch, terms: Sequence[Term], num_microbatches: int = 0, extra_outputs: Sequence[str] = ()
    ) -> StepOutput:
        return self._rank.in_turn(lambda: self._engine.forward_backward(batch, terms, num_microbatches, extra_outputs))

    def infer(
        self, batch: Batch, columns: Sequence[str], average: bool = False, start: bool = False
    ) -> dict[str, Tensor]:
        return self._rank.in_turn(lambda: self._engine.infer(batch, columns, average, start))

    def optim_step(self) -> Metrics:
        return self._first(self._engine.optim_step)

    def published(self, version: int) -> None:
        self._first(lambda: self._engine.published(version))

    def save(self, path: Path) -> None:
        self._first(lambda: self._engine.save(path))

    def snapshot(self) -> Snapshot:
        found = self._first(self._engine.snapshot)
        return found if self._rank.rank == 0 else found.without_tensors()

    @property
    def snapshot_bytes(self) -> int:
        return self._engine.snapshot_bytes if self._rank.rank == 0 else 0

    def load(self, path: Path) -> None:
        self._first(lambda: self._engine.load(path))

    def own_logprobs(self, probes: Sequence[np.ndarray], dtype: str, merged: bool = True) -> list[np.ndarray]:
        return self._first(lambda: self._engine.own_logprobs(probes, dtype, merged))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _first(self, fn: Callable[[], T]) -> T:
        """Run the function on the first rank and return its result on all ranks."""
        found = self._rank.all_gather(fn() if self._rank.rank == 0 else None)[0]
        return found  # type: ignore[return-value]


class InprocGroup:
    """A `WorkerGroup` in this process.

    workers: one object per rank, each with its own thread · ranks: the ranks of these workers; empty if they exchange
    nothing."""

    def __init__(self, name: str, workers: Sequence[object], ranks: Sequence[VirtualRank] = ()) -> None:
        assert len(ranks) in (0, len(workers)), f"{len(ranks)} ranks for {len(workers)} workers"
        self.name, self.world_size = name, len(workers)
        self._workers, self._ranks = tuple(workers), tuple(ranks)
        self._lock = (
            threading.Lock()
        )  # all ranks see one order of calls, and no call enters a queue after the final None
        self._closed = False
        self._queues: list[queue.SimpleQueue[_Call | None]] = [queue.SimpleQueue() for _ in workers]
        # Daemons: a worker that hangs in a kernel does not keep the process from ending with its error.
        self._threads = [
            threading.Thread(target=self._work, args=(i,), name=f"verl-{name}-{i}", daemon=True)
            for i in range(len(workers))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, method: Callable[..., T], args: Arguments) -> Future[list[T]]:
        per_rank = [args.args] * self.world_size if isinstance(args, Broadcast) else list(args)
        assert len(per_rank) == self.world_size, f"{len(per_rank)} sets of arguments for {self.world_size} ranks"
        call = _Call(method, per_rank, Meeting(self.world_size) if self._ranks else None)
        with self._lock:
            if self._closed:
                raise RuntimeError(f"worker group {self.name!r} is closed; {method.__qualname__} was not submitted")
            for waiting in self._queues:
                waiting.put(call)
        return call.future

    def call_at_once(self, method: Callable[..., T], args: tuple[Any, ...] = ()) -> Future[list[T]]:
        future: Future[list[T]] = Future()
        try:
            future.set_result([method(worker, *args) for worker in self._workers])
        except Exception as e:
            future.set_exception(e)
        return future

    def close(self, timeout_s: float = 10.0) -> None:
        """Finish the submitted calls, then end the threads. A call that has not begun after `timeout_s` is
        cancelled."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for waiting in self._queues:
                    waiting.put(None)
        until_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        for waiting in self._queues:  # no caller may wait for a call that never begins
            with contextlib.suppress(queue.Empty):
                while True:
                    if (call := waiting.get_nowait()) is not None:
                        call.future.cancel()
            waiting.put(None)

    def _work(self, rank: int) -> None:
        while (call := self._queues[rank].get()) is not None:
            if call.begin():
                if self._ranks:
                    self._ranks[rank].meeting = call.meeting
                self._serve(call, rank)
            del call  # arguments and result belong to the caller now

    def _serve(self, call: _Call, rank: int) -> None:
        """Run one call and set its result or its error in the caller's future. The thread can then serve the next
        call."""
        try:
            found = call.method(self._workers[rank], *call.per_rank[rank])
        except (StopIteration, CancelledError, concurrent.futures.CancelledError) as e:
            # a waiting coroutine would treat these as its own end
            error = RuntimeError(f"{self.name}.{call.method.__name__} ended with {type(e).__name__}: {e}")
            error.__cause__ = e
            call.end(rank, error=error)
        except BaseException as e:
            call.end(rank, error=e)
        else:
            call.end(rank, value=found)


class InprocCluster:
    """A `Cluster` in this process: the ranks of a model are virtual ranks."""

    own_processes = False
    drivers = None

    def __init__(self, virtual_ranks: int = 1) -> None:
        self.layout = Layout(world_size=virtual_ranks)

    def start(
        self, name: str, build: Build, args: tuple[Any, ...], *, world_size: int = 1, died: Died | None = None
    ) -> InprocGroup:
        ranks = [VirtualRank(i, world_size) for i in range(world_size)]
        return InprocGroup(name, build(*args, ranks=ranks), ranks)

    def place(self, name: str) -> str:
        return "here"

    def replica(
        self, number: int, build: Callable[..., RolloutEngine], args: tuple[Any, ...], died: Died | None = None
    ) -> RolloutEngine:
        return build(*args)

    def watch(self, on_failure: Callable[[BaseException], None]) -> None:
        """Do nothing: a worker cannot die here without the driver."""

    def close(self) -> None:
        """Do nothing: closing the groups has released everything."""


def build_cluster(section: object, context: ClusterContext) -> InprocCluster:
    """Build the cluster of cluster.backend=inproc."""
    return InprocCluster(context.layout.world_size)


class _Call:
    """One call of all ranks. Its future receives the results in rank order, or the first error."""

    def __init__(self, method: Callable[..., Any], per_rank: list[tuple[Any, ...]], meeting: Meeting | None) -> None:
        self.future: Future[Any] = Future()
        self.method, self.per_rank, self.meeting = method, per_rank, meeting
        self._values: list[Any] = [None] * len(per_rank)
        self._left = len(per_rank)
        self._error: BaseException | None = None
        self._begun: bool | None = None
        self._lock = threading.Lock()

    def begin(self) -> bool:
        """Mark the call as begun. Return False if the caller has cancelled it."""
        with self._lock:
            if self._begun is None:
                self._begun = self.future.set_running_or_notify_cancel()
            return self._begun

    def end(self, rank: int, value: Any = None, error: BaseException | None = None) -> None:
        with self._lock:
            self._values[rank] = value
            self._left -= 1
            if error is not None and (self._error is None or isinstance(self._error, threading.BrokenBarrierError)):
                self._error = error
            if error is not None and self.meeting is not None:
                self.meeting.abort()
            if self._left:
                return
        if self._error is not None:
            self.future.set_exception(self._error)
        else:
            self.future.set_result(self._values)
