"""The state of one process of a cluster, as the driver knows it: its node, its last answer, and how it ended."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from verl.workers.answers import RankAnswer

Where = tuple[str, int]
"""(node, process)"""


def this_process() -> Where:
    """Return the node and the number of this process."""
    import ray

    return ray.util.get_node_ip_address(), os.getpid()


class ActorLife:
    """The driver's view of one actor. Once it is built, the actor answers `where` at any time; its call `watch` never
    returns, and fails when the actor dies.

    died: called once, in any thread, with a text about the actor's end · started: called with the number of its
    process · start_timeout_s: the deadline of its first answer; None: Ray reports that it cannot start it"""

    def __init__(
        self,
        name: str,
        actor: Any,
        watching: Any,
        built: Any,
        *,
        died: Callable[[str], None],
        started: Callable[[int], None],
        start_timeout_s: float | None = None,
    ) -> None:
        self._name, self._actor, self._on_end, self._started = name, actor, died, started
        self._place: Where | None = None
        self._began_s, self._start_timeout_s = time.monotonic(), start_timeout_s
        self._lock = threading.Lock()
        self._ready = self.over = False
        self._request_sent_s: float | None = None
        watching.future().add_done_callback(lambda end: self.died(end.exception()))
        built.future().add_done_callback(self._built)
        self._request_place()

    def look(self, silent_s: float) -> None:
        """Check that the process answers. A stopped process does not, and counts as dead after `silent_s`."""
        limit_s = self._start_timeout_s
        if limit_s is not None and self._place is None and time.monotonic() - self._began_s > limit_s:
            self._end(f"has not started within cluster.start_timeout_s={limit_s:g}: is model.python on each node?")
        if self.over or not self._ready:
            return
        if self._request_sent_s is None:
            self._request_place()
        elif time.monotonic() - self._request_sent_s > silent_s:
            self._end(f"has not answered for {silent_s:g} s")

    def died(self, error: BaseException | None) -> None:
        """Record the death that Ray has reported."""
        self._end(f"died: {reason(str(error))}")

    def _end(self, how: str) -> None:
        with self._lock:
            if not self.over:
                self.over = True
                node, process = self._place or ("?", "?")
                self._on_end(f"{self._name} (process {process} on {node}) {how}")

    # -- private: the callbacks run in a thread of Ray's, which must not be made to wait for Ray -----------------------

    def _request_place(self) -> None:
        self._request_sent_s = time.monotonic()
        self._actor.where.remote().future().add_done_callback(self._answered)

    def _answered(self, found: Future[Where]) -> None:
        if found.exception() is None:
            first, self._place, self._request_sent_s = self._place is None, found.result(), None
            if first:
                self._started(found.result()[1])

    def _built(self, found: Future[RankAnswer]) -> None:
        if self._request_sent_s is not None:
            self._request_sent_s = time.monotonic()  # an engine that is being loaded may not answer
        self._ready = found.exception() is None


def reason(text: str) -> str:
    """Return the reason that Ray gives for a death, without its advice."""
    flat = " ".join(text.split())
    if "its node has died" in flat:
        return "its node is lost"
    _, found, detail = flat.partition("RankActor exit detail:")
    return (detail.partition("Some common causes")[0] if found else flat[:300]).strip()
