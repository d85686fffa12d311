"""Worker groups of Ray actors: the same calls in the same order, in processes of this or other machines.

A group ends with its first death. The other ranks would wait for the dead one in a collective, so all are killed, and
every pending or later call fails with the first cause.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from verl.errors import Refused
from verl.model_engine.layout import Layout
from verl.workers.answers import CONSEQUENCES, FENCE_S, RankAnswer, failed_answer, first_failure, raised
from verl.workers.group import Arguments, Broadcast, DevicePlace, Died, WorkerDied
from verl.workers.ray.life import ActorLife, Where, this_process

T = TypeVar("T")
Live = Callable[..., ActorLife]
LOOK_S = 0.5  # the pause between two checks for failed ranks of a call


class RankActor:
    """The actor of one rank. Its first call builds it; then one thread serves one call after the other."""

    def __init__(self, env: Mapping[str, str]) -> None:
        os.environ.update(env)
        self._ranks: Any = None
        self._worker: object = None
        self._store: Any = None

    def serve(self) -> str:
        """Start the store with which the ranks of this group connect, and return its address."""
        import ray

        from verl.workers.dist import serve_store

        self._store, address = serve_store(ray.util.get_node_ip_address())
        return address

    def build(
        self, address: str, number: int, layout: Layout, place: DevicePlace, wait_timeout_s: float, made: bytes
    ) -> RankAnswer:
        """Build the worker. Return an empty answer, or the error that becomes the answer of every call. wait_timeout_s:
        the deadline of a rank for the others."""
        try:
            build, (set_up, args) = pickle.loads(made)
            set_up(place)
            if layout.world_size > 1:
                from verl.workers.dist import join_ranks

                self._ranks = join_ranks(address, layout, number, device=place.device, timeout_s=wait_timeout_s)
                (self._worker,) = build(*args, ranks=[self._ranks])
            else:
                from verl.model_engine.base import OneRank

                (self._worker,) = build(*args, ranks=[OneRank()])
        except BaseException as e:
            return failed_answer(e)
        return RankAnswer()

    def call(self, number: int, payload: bytes) -> RankAnswer:
        if self._ranks is not None:
            self._ranks.begin(number)
        found = self.call_at_once(payload)
        if found.error is not None and self._ranks is not None:
            self._ranks.abort(f"{type(found.error).__name__}: {found.error}")
        return found

    def call_at_once(self, payload: bytes) -> RankAnswer:
        """Run a call that exchanges nothing with other ranks."""
        try:
            method, args = pickle.loads(payload)
            return RankAnswer(method(self._worker, *args))
        except BaseException as e:
            return failed_answer(e)

    def where(self) -> Where:
        return this_process()

    def watch(self) -> None:
        """Never return: a failure of this call means that the process has died."""
        threading.Event().wait()


class RayGroup:
    """A `WorkerGroup` of Ray actors. One thread submits the calls, one after the other; arguments are pickled when
    `submit` is called."""

    def __init__(self, name: str, actors: Sequence[Any], built: Sequence[Any], live: Live, on_death: Died) -> None:
        """Create the group.

        built: for each actor, the answer of `RankActor.build`
        live: starts to watch an actor
        """
        self.name, self.world_size = name, len(actors)
        self._actors, self._on_death = tuple(actors), on_death
        self._lock = threading.Lock()
        self._closed = False
        self._dead: BaseException | None = None
        self._fenced = threading.Event()
        self._unbuilt, self._all_built = len(actors), threading.Event()
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._number = 0
        self._lives: list[ActorLife] = []
        for rank, (actor, made) in enumerate(zip(actors, built, strict=True)):
            watching = actor.watch.options(concurrency_group="watch").remote()
            self._lives.append(live(f"rank {rank} of {name}", actor, watching, made, died=self._died))
            made.future().add_done_callback(partial(self._built, rank))
        self._thread = threading.Thread(target=self._work, name=f"verl-{name}", daemon=True)
        self._thread.start()

    def submit(self, method: Callable[..., T], args: Arguments) -> Future[list[T]]:
        count = self.world_size
        if isinstance(args, Broadcast):
            payloads = [pickled(method, args.args)] * count
        else:
            assert len(args) == count, f"{len(args)} sets of arguments for {count} ranks"
            payloads = [pickled(method, one) for one in args]
        call = _Call(method.__qualname__, payloads)
        with self._lock:
            if self._closed:
                raise RuntimeError(f"worker group {self.name!r} is closed; {method.__qualname__} was not submitted")
            self._queue.put(call)
        return call.future

    def call_at_once(self, method: Callable[..., T], args: tuple[Any, ...] = ()) -> Future[list[T]]:
        call = _Call(method.__qualname__, [pickled(method, args)] * self.world_size)
        refs = [
            actor.call_at_once.options(concurrency_group="beside").remote(payload)
            for actor, payload in zip(self._actors, call.payloads, strict=True)
        ]
        threading.Thread(target=self._settle, args=(call, partial(self._collected, call, refs)), daemon=True).start()
        return call.future

    def close(self, timeout_s: float = 10.0) -> None:
        """Finish the submitted calls, then end the processes. A call that has not begun after `timeout_s` is
        cancelled."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join(timeout_s)
        with contextlib.suppress(queue.Empty):
            while True:
                if (call := self._queue.get_nowait()) is not None:
                    call.future.cancel()
        self._queue.put(None)
        self._kill()

    # -- private: the thread that submits the calls --------------------------------------------------------------------

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            self._settle(call, partial(self._answered, call))
            del call  # arguments and result belong to the caller now

    def _settle(self, call: _Call, answer: Callable[[], list[Any]]) -> None:
        if call.future.set_running_or_notify_cancel():
            try:
                call.future.set_result(answer())
            except BaseException as e:
                call.future.set_exception(e)

    def _answered(self, call: _Call) -> list[Any]:
        while not self._all_built.wait(LOOK_S) and self._dead is None:  # a worker gets no call before all are built
            continue
        if self._dead is not None:
            raise self._dead
        self._number += 1
        refs = [
            actor.call.options(concurrency_group="calls").remote(self._number, payload)
            for actor, payload in zip(self._actors, call.payloads, strict=True)
        ]
        return self._collected(call, refs)

    def _collected(self, call: _Call, refs: Sequence[Any]) -> list[Any]:
        import ray

        left, error, until_s = list(refs), None, float("inf")
        found: dict[Any, RankAnswer] = {}
        while left and self._dead is None and time.monotonic() < until_s:
            done, left = ray.wait(left, num_returns=len(left), timeout=LOOK_S)
            for ref in done:
                try:
                    found[ref] = ray.get(ref)
                except ray.exceptions.RayActorError:
                    self._fenced.wait(FENCE_S)  # the watch knows which process died and why
            # a later error may be the first cause
            first, error = error, first_failure([found[r] for r in refs if r in found])
            if first is None and error is not None:
                until_s = time.monotonic() + FENCE_S
        if self._dead is not None:  # errors of other ranks about it, e.g. a broken connection, are consequences
            raise self._dead
        if left and error is not None:  # the other ranks wait in a collective for the one that raised
            what = f"{self.name}: {len(left)} of {len(refs)} ranks did not come out of {call.name} after: {error.error}"
            self._fence(missing := WorkerDied(what))
            if isinstance(error.error, CONSEQUENCES):
                raise missing
        if error is not None:
            raise raised(error, f"{self.name}.{call.name.rpartition('.')[2]}")
        if len(found) < len(refs):
            raise WorkerDied(f"worker group {self.name!r} was closed in the middle of {call.name}")
        return [found[ref].value for ref in refs]

    # -- private: deaths -----------------------------------------------------------------------------------------------

    def _built(self, rank: int, found: Future[RankAnswer]) -> None:
        """Count a rank as built. If building it has failed, its error ends the wait for the others and becomes the
        answer of every call."""
        if (error := found.exception()) is None:
            if found.result().error is not None:
                self._fence(raised(found.result(), f"{self.name} was not built, it"))
        elif type(error).__name__ not in ("ActorDiedError", "ActorUnavailableError"):  # the watch reports these
            self._died(f"rank {rank} of {self.name} was not built: {error}")
        with self._lock:
            self._unbuilt -= 1
            if self._unbuilt == 0:
                self._all_built.set()

    def _died(self, what: str) -> None:
        if self._fence(error := WorkerDied(what)) and not self._closed:
            self._on_death(error)

    def _fence(self, error: BaseException) -> bool:
        """End all ranks because of this error and return True; return False if they have already ended because of
        another one."""
        with self._lock:
            if self._dead is not None:
                return False
            self._dead = error
        self._fenced.set()
        # In a new thread: Ray's own thread, which reports deaths, must not call Ray.
        threading.Thread(target=self._kill, daemon=True).start()
        return True

    def _kill(self) -> None:
        import ray

        for life in self._lives:
            life.over = True
        for actor in self._actors:
            ray.kill(actor, no_restart=True)


class _Call:
    """One call of all ranks: its pickled arguments by rank, and the future of its results."""

    def __init__(self, name: str, payloads: list[bytes]) -> None:
        self.future: Future[Any] = Future()
        self.name, self.payloads = name, payloads


def pickled(method: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle a method and its arguments. Raise Refused if that is impossible."""
    try:
        return pickle.dumps((method, args), protocol=5)
    except (pickle.PicklingError, AttributeError, TypeError) as e:
        raise Refused(
            f"{method.__qualname__} goes to another process, and its arguments cannot: {e}; define functions and "
            "classes in a module, not inside a function or in a notebook"
        ) from e
