"""A worker group of one worker in this process: a thread with a queue, so that the event loop goes on."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from verl.workers.group import Split


@dataclass(frozen=True, slots=True)
class _Call:
    future: Future[Any]
    method: str
    args: tuple[Any, ...]
    split: Split


class InprocGroup:
    """See `WorkerGroup`. `worker` is any object; its methods run one after the other in a thread of their own."""

    def __init__(self, name: str, worker: object) -> None:
        self._name = name
        self._worker = worker
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # nothing enters the queue after the word that ends it
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=f"verl-{name}", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self._name

    @property
    def world_size(self) -> int:
        return 1

    def submit(self, method: str, *args: Any, split: Split = "dp") -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"worker group {self._name!r} is closed; {method} was not submitted")
            self._queue.put(_Call(future, method, args, split))
        return future

    def close(self, timeout_s: float = 10.0) -> None:
        """Finish what was submitted, then end the thread. What has not begun after `timeout_s` is cancelled."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._cancel_waiting()

    def _cancel_waiting(self) -> None:
        """Nobody shall wait for a call that will never begin. The one that is running ends in the background."""
        with contextlib.suppress(queue.Empty):
            while True:
                if (call := self._queue.get_nowait()) is not None:
                    call.future.cancel()
        self._queue.put(None)

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            if call.future.set_running_or_notify_cancel():
                self._serve(call)
            del call  # arguments and result (a copy of the weights, say) are the caller's now

    def _serve(self, call: _Call) -> None:
        """The caller's future carries whatever comes of it; this thread serves the next call."""
        try:
            result = getattr(self._worker, call.method)(*call.args)
        except (StopIteration, asyncio.CancelledError, concurrent.futures.CancelledError) as e:
            # a waiting coroutine would take these for its own end
            error = RuntimeError(f"{self._name}.{call.method} ended with {type(e).__name__}: {e}")
            error.__cause__ = e
            call.future.set_exception(error)
        except BaseException as e:
            call.future.set_exception(e)
        else:
            call.future.set_result([result] if call.split == "all" else result)
