"""Many processes with the same driver and no controller (torchrun). Each process makes the same calls in the same order
and computes its own share. Every answer contains those of all ranks, so all processes make the same decisions."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import pickle
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from verl.errors import Refused
from verl.model_engine.base import OneRank
from verl.model_engine.layout import Layout
from verl.rollout.base import RolloutEngine
from verl.workers.answers import FENCE_S, RankAnswer, RankLate, failed_answer, first_failure, raised, typed_error
from verl.workers.dist import ProcessRanks, become, group_backend
from verl.workers.group import Arguments, Broadcast, Build, ClusterContext, Died, WorkerDied, WorkerGroup
from verl.workers.inproc import InprocGroup
from verl.workers.sections import ClusterConfig
from verl.workers.torchrun import launched

T = TypeVar("T")
EXIT_S = 10.0  # the time that a process gets to end by itself after another one has died
LOOK_EVERY_S = 0.05  # the pause between two checks of a meeting for the values of other processes


class Meetings:
    """Exchanges of values among all processes, independent of the calls. They use only the store, because the running
    call of any rank may be inside a collective. All processes must hold them in the same order. After the death of a
    process `death` is the error that ends them."""

    def __init__(self, store: dist.Store, number: int, world_size: int, timeout_s: float) -> None:
        self._store, self._number, self._world_size, self._timeout_s = store, number, world_size, timeout_s
        self._met, self.waits = 0, False
        self.death: WorkerDied | None = None

    def meet(self, value: T, timeout_s: float) -> list[T]:
        """Implement `group.Drivers.meet`."""
        assert not self.waits, "one meeting after the other"
        self._met += 1
        keys = [f"{self._met}/{n}" for n in range(self._world_size)]
        limit_s = max(timeout_s, self._timeout_s)
        until_s = time.monotonic() + limit_s
        self.waits = True
        try:
            self._store.set(keys[self._number], pickle.dumps(value))  # type: ignore[arg-type]
            while not self._store.check(keys):  # poll: a wait in the store would block the calls
                if self.death is not None:
                    raise self.death
                if time.monotonic() > until_s:
                    missing = [n for n, key in enumerate(keys) if not self._store.check([key])]
                    raise RankLate(f"rank {self._number} waited {limit_s:g} s for ranks {missing} in a save")
                time.sleep(LOOK_EVERY_S)
            found: list[T] = [pickle.loads(self._store.get(key)) for key in keys]
        finally:
            self.waits = False
        if self._met > 1:  # every rank has reached this meeting, so it has read the values of the last one
            self._store.delete_key(f"{self._met - 1}/{self._number}")
        return found


class SpmdDrivers:
    """The `group.Drivers` of torchrun's processes. One thread makes the calls. Another thread watches the processes of
    this machine, and fails the pending calls when one of them ends too early."""

    def __init__(self, store: dist.Store, layout: Layout, number: int, timeout_s: float, device: int | None) -> None:
        self.number = number
        self.ranks = ProcessRanks(dist.PrefixStore("calls", store), layout, number, timeout_s)
        flat = Layout(world_size=layout.world_size)
        self._everyone = ProcessRanks(dist.PrefixStore("drivers", store), flat, number, timeout_s)
        self._store, self._device, self._called = dist.PrefixStore("ends", store), device, 0
        self._meetings = Meetings(dist.PrefixStore("beside", store), number, layout.world_size, timeout_s)
        self._lock = threading.Lock()
        self._pending: set[Future[Any]] = set()
        self._death: WorkerDied | None = None
        self._death_seen, self._failed = threading.Event(), False
        self._watched: dict[int, tuple[int, int]] = {}  # a descriptor of a process -> its rank and number
        self._calls: queue.SimpleQueue[tuple[Future[Any], str, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._everyone.begin(0)
        places = self._everyone.all_gather((socket.gethostname(), os.getpid()))
        here = {n: pid for n, (host, pid) in enumerate(places) if host == places[number][0] and n != number}
        atexit.register(self._leave)
        threading.Thread(target=self._work, name="verl-ranks", daemon=True).start()
        if hasattr(os, "pidfd_open"):
            threading.Thread(target=self._watch, args=(here,), name="verl-watch", daemon=True).start()

    @property
    def broken(self) -> bool:
        return self._failed or self._meetings.waits or bool(self._pending) or self._death is not None

    def gather(self, value: T) -> Future[list[T]]:
        return self.together("gather", lambda: value)

    def finish(self) -> Future[list[None]]:
        return self.together("finish", lambda: None)

    def meet(self, value: T, timeout_s: float) -> list[T]:
        return self._meetings.meet(value, timeout_s)

    def alone(self, fn: Callable[[], T]) -> T:
        """Run a function in the calling thread, independently of the queued calls. If other processes take part in it,
        a broken connection is raised as the death of one of them, and an expired wait as a late rank."""
        if self._death is not None:
            raise self._death
        try:
            return fn()
        except OSError:
            raise
        except Exception as e:
            error = typed_error(e)
            if not isinstance(error, RankLate) and self._death_seen.wait(FENCE_S):
                assert self._death is not None
                raise self._death from None
            raise error from None

    def together(self, name: str, fn: Callable[[], T]) -> Future[list[T]]:
        """Enqueue a call that every process makes. The future holds the results of all processes by rank, or the first
        cause if the call raised in any of them."""
        future: Future[list[T]] = Future()
        with self._lock:
            self._pending.add(future)
            missing = self._death
        future.add_done_callback(self._pending.discard)
        if missing is not None:
            future.set_exception(missing)
        else:
            self._calls.put((future, name, fn))
        return future

    def close(self) -> None:
        self._calls.put(None)
        if self.broken:
            _exit_soon()

    # -- private -------------------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """End this process at once if a call failed or is pending: Python would wait for threads that hang in a
        collective, or be aborted by it."""
        if self.broken:
            if self.number == 0 and self._death is None:  # a stopped process does not react to torchrun
                for fd in list(self._watched):
                    with contextlib.suppress(OSError):
                        signal.pidfd_send_signal(fd, signal.SIGKILL)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _work(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)  # the device is a setting of the thread
        while (call := self._calls.get()) is not None:
            future, name, fn = call
            # the call is made even if it is cancelled here, because the other processes make it
            future.set_running_or_notify_cancel()
            with contextlib.suppress(InvalidStateError):
                try:
                    future.set_result(self._exchanged(name, fn))
                except BaseException as e:
                    future.set_exception(e)

    def _exchanged(self, name: str, fn: Callable[[], Any]) -> list[Any]:
        self._called += 1
        self.ranks.begin(self._called)
        self._everyone.begin(self._called)
        try:
            answer = RankAnswer(fn())
        except BaseException as e:
            answer = failed_answer(e)
            self.ranks.abort(f"{type(e).__name__}: {e}")
        try:
            found = self._everyone.all_gather((name, answer), FENCE_S if answer.error else None)
        except Exception as e:
            self._failed = True
            if not isinstance(e, TimeoutError) and self._death_seen.wait(
                FENCE_S
            ):  # a broken connection: a process has died
                assert self._death is not None
                raise self._death from None
            if answer.error is None:
                raise
            self._store.set(f"why/{self.number}", f"{type(answer.error).__name__}: {answer.error}")
            raise raised(answer, name) from None  # the other ranks hang in a collective until this process ends
        if (error := first_failure([one for _, one in found])) is not None:
            raise raised(error, name)
        assert len({other for other, _ in found}) == 1, f"the processes are at different calls: {found}"
        if name == "finish":
            self._store.set(f"finished/{self.number}", "")
        return [one.value for _, one in found]

    def _watch(self, here: dict[int, int]) -> None:
        poll, watched = select.poll(), self._watched
        for number, process in here.items():
            try:
                fd = os.pidfd_open(process)
            except ProcessLookupError:
                self._lost(number, process)
            else:
                watched[fd] = (number, process)
                poll.register(fd, select.POLLIN)
        while watched:
            for fd, _ in poll.poll():
                poll.unregister(fd)
                self._lost(*watched.pop(fd))

    def _lost(self, number: int, process: int) -> None:
        why = "torchrun says how it ended"
        with contextlib.suppress(RuntimeError):  # the process with the store has ended
            if self._store.check([f"finished/{number}"]):
                return
            if self._store.check([f"why/{number}"]):
                why = self._store.get(f"why/{number}").decode()
        with self._lock:
            if self._death is not None:
                return
            self._death = self._meetings.death = WorkerDied(f"rank {number} (process {process}) is gone: {why}")
            pending = list(self._pending)
        self._death_seen.set()
        for future in pending:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(self._death)
        _exit_soon()


def _exit_soon() -> None:
    """End this process after EXIT_S, because threads that hang in a collective end only with their process."""
    faulthandler.dump_traceback_later(EXIT_S, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115 - until the end


def join_processes(layout: Layout, device: str, timeout_s: float, start_s: float) -> SpmdDrivers:
    """Join the processes that torchrun started on all nodes, as `become` describes."""
    launch = launched()
    assert launch is not None and launch.world_size == layout.world_size
    if dist.is_initialized():
        raise Refused("a process that torchrun started makes one run; start torchrun again for the next one")
    store, number, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=start_s))))
    become(store, layout, number, backend=group_backend(device), timeout_s=timeout_s, start_s=start_s)
    local = None if device == "cpu" else launch.local_rank
    if local is not None:
        torch.cuda.set_device(local)
    return SpmdDrivers(store, layout, number, timeout_s, local)


class SpmdGroup:
    """A `WorkerGroup` with one rank in this process. The other processes make the same calls for their ranks."""

    def __init__(self, name: str, worker: object, drivers: SpmdDrivers, world_size: int) -> None:
        self.name, self.world_size = name, world_size
        self._worker, self._drivers = worker, drivers

    def submit(self, method: Callable[..., T], args: Arguments) -> Future[list[T]]:
        mine = args.args if isinstance(args, Broadcast) else args[self._drivers.number]
        return self._drivers.together(f"{self.name}.{method.__name__}", partial(method, self._worker, *mine))

    def call_at_once(self, method: Callable[..., T], args: tuple[Any, ...] = ()) -> Future[list[T]]:
        """Call the method of this process's rank only. The other processes do the same, and exchange results if
        necessary."""
        future: Future[list[T]] = Future()
        try:
            future.set_result([self._drivers.alone(partial(method, self._worker, *args))])
        except Exception as e:
            future.set_exception(e)
        return future

    def close(self, timeout_s: float = 10.0) -> None:
        """Do nothing: the thread of all calls ends with the cluster."""


class SpmdCluster:
    """A `Cluster` with one rank of every model in this process. Workers without a model run in each process."""

    own_processes = False

    def __init__(self, layout: Layout, drivers: SpmdDrivers) -> None:
        self.layout, self.drivers = layout, drivers

    def start(
        self, name: str, build: Build, args: tuple[Any, ...], *, world_size: int = 1, died: Died | None = None
    ) -> WorkerGroup:
        if world_size == 1:
            return InprocGroup(name, build(*args, ranks=[OneRank()]))
        (worker,) = build(*args, ranks=[self.drivers.ranks])
        return SpmdGroup(name, worker, self.drivers, world_size)

    def place(self, name: str) -> str:
        return "here"

    def replica(
        self, number: int, build: Callable[..., RolloutEngine], args: tuple[Any, ...], died: Died | None = None
    ) -> RolloutEngine:
        raise Refused("cluster.backend=torchrun has no controller that could sample: use cluster.backend=ray")

    def watch(self, on_failure: Callable[[BaseException], None]) -> None:
        """Do nothing: a death fails the calls that wait for the dead process."""

    def close(self) -> None:
        self.drivers.close()


def build(section: ClusterConfig, context: ClusterContext) -> SpmdCluster:
    assert isinstance(context.drivers, SpmdDrivers), "joined before the run directory was opened"
    return SpmdCluster(context.layout, context.drivers)
