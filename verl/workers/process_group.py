"""Worker groups of processes: the same calls in the same order, in processes of this or other machines.

A group ends with its first death. The other ranks would wait for the dead one in a collective, so all are killed, and
every pending or later call fails with the first cause.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Protocol, TypeVar

from verl.errors import Refused
from verl.workers.answers import CONSEQUENCES, FENCE_S, RankAnswer, failed_answer, first_failure, raised
from verl.workers.group import Arguments, Broadcast, Died, WorkerDied

T = TypeVar("T")
LOOK_S = 0.5  # the pause between two checks for failed ranks of a call


class RankProcess(Protocol):
    """The process of a rank, as its group has it. A future raises an exception only if the process has ended."""

    def call(self, number: int, payload: bytes) -> Future[RankAnswer]: ...

    def call_at_once(self, payload: bytes) -> Future[RankAnswer]: ...

    def kill(self) -> None:
        """End the process. Its end is then no death."""
        ...


class ProcessGroup:
    """A `WorkerGroup` of processes. One thread submits the calls, one after the other; arguments are pickled when
    `submit` is called."""

    def __init__(self, name: str, world_size: int, on_death: Died) -> None:
        """Create the group without processes. `add` must be called once for each rank, then `built` once for each, and
        `died` for a death."""
        self.name, self.world_size = name, world_size
        self._processes, self._on_death = list[RankProcess](), on_death
        self._lock = threading.Lock()
        self._closed = False
        self._dead: BaseException | None = None
        self._fenced = threading.Event()
        self._unbuilt, self._all_built = world_size, threading.Event()
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._number = 0
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
        found = [one.call_at_once(payload) for one, payload in zip(self._processes, call.payloads, strict=True)]
        threading.Thread(target=self._settle, args=(call, partial(self._collected, call, found)), daemon=True).start()
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

    def add(self, process: RankProcess) -> None:
        """Add the process of the next rank."""
        self._processes.append(process)
        if self._dead is not None:  # another one died meanwhile
            process.kill()

    def built(self, rank: int, found: Future[RankAnswer]) -> None:
        """Count a rank as built. If building it has failed, its error ends the wait for the others and becomes the
        answer of every call."""
        if (error := found.exception()) is None:
            if found.result().error is not None:
                self._fence(raised(found.result(), f"{self.name} was not built, it"))
        elif not self.is_death(error):  # a death is reported by `died`
            self.died(f"rank {rank} of {self.name} was not built: {error}")
        with self._lock:
            self._unbuilt -= 1
            if self._unbuilt == 0:
                self._all_built.set()

    def died(self, what: str) -> None:
        """End the group because of a death, with a text about it."""
        if self._fence(error := WorkerDied(what)) and not self._closed:
            self._on_death(error)

    def is_death(self, error: BaseException) -> bool:
        """Return True if a future with this exception is a consequence of a death that `died` reports."""
        return isinstance(error, WorkerDied)

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
        found = [one.call(self._number, payload) for one, payload in zip(self._processes, call.payloads, strict=True)]
        return self._collected(call, found)

    def _collected(self, call: _Call, answers: Sequence[Future[RankAnswer]]) -> list[Any]:
        left, error, until_s = set(answers), None, float("inf")
        found: dict[Future[RankAnswer], RankAnswer] = {}
        while left and self._dead is None and time.monotonic() < until_s:
            done, left = wait(left, timeout=LOOK_S)
            for one in done:
                if (broken := one.exception()) is None:
                    found[one] = one.result()
                elif self.is_death(broken):
                    self._fenced.wait(0.0 if self._closed else FENCE_S)  # the watch knows which process died and why
                else:
                    found[one] = failed_answer(broken)
            # a later error may be the first cause
            first, error = error, first_failure([found[one] for one in answers if one in found])
            if first is None and error is not None:
                until_s = time.monotonic() + FENCE_S
        if self._dead is not None:  # errors of other ranks about it, e.g. a broken connection, are consequences
            raise self._dead
        if left and error is not None:  # the other ranks wait in a collective for the one that raised
            what = f"{self.name}: {len(left)} of {len(answers)} ranks did not come out of {call.name} after"
            self._fence(missing := WorkerDied(f"{what}: {error.error}"))
            if isinstance(error.error, CONSEQUENCES):
                raise missing
        if error is not None:
            raise raised(error, f"{self.name}.{call.name.rpartition('.')[2]}")
        if len(found) < len(answers):
            raise WorkerDied(f"worker group {self.name!r} was closed in the middle of {call.name}")
        return [found[one].value for one in answers]

    # -- private: deaths -----------------------------------------------------------------------------------------------

    def _fence(self, error: BaseException) -> bool:
        """End all ranks because of this error and return True; return False if they have already ended because of
        another one."""
        with self._lock:
            if self._dead is not None:
                return False
            self._dead = error
        self._fenced.set()
        # In a new thread: one that reports deaths must not wait for the processes.
        threading.Thread(target=self._kill, daemon=True).start()
        return True

    def _kill(self) -> None:
        for process in list(self._processes):
            process.kill()


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
