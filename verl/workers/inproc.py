"""A worker group of one worker in this process: a thread with a queue, so that the event loop goes on."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from typing import Any

from verl.workers.group import Split


class InprocGroup:
    """See `WorkerGroup`. `worker` is any object; its methods run one after the other in a thread of their own."""

    def __init__(self, name: str, worker: object) -> None:
        self._name = name
        self._worker = worker
        self._queue: queue.SimpleQueue[tuple[Future[Any], str, tuple[Any, ...]] | None] = queue.SimpleQueue()
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
        if self._closed:
            raise RuntimeError(f"worker group {self._name!r} is closed; {method} was not submitted")
        future: Future[Any] = Future()
        self._queue.put((future, method, args))
        if split != "all":
            return future
        listed: Future[Any] = Future()
        future.add_done_callback(lambda f: listed.set_exception(e) if (e := f.exception()) else listed.set_result([f.result()]))
        return listed

    def close(self, timeout_s: float = 10.0) -> None:
        """Finish what was submitted, then end the thread."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join(timeout_s)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            future, method, args = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(getattr(self._worker, method)(*args))
            except BaseException as e:  # the caller's future carries it; this thread serves the next call
                future.set_exception(e)
