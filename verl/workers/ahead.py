"""A frozen model in a place of its own, which is asked for the rows of a group once it has ended: it computes while
other answers are drawn and while the policy learns. A step asks it as it asks any other, and waits for what is left."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from itertools import islice
from typing import TypeVar

from verl.model_engine.base import EngineCapabilities
from verl.types import Metric, Metrics, Refs, merge_metrics
from verl.workers.model_workers import ModelWorkers
from verl.workers.waits import from_thread, result_of

T = TypeVar("T")


class Ahead(ModelWorkers):
    """See `ModelWorkers`; of its calls those of a frozen model. One call is under way at a time, of whole groups, so
    that each has the deadline that a step's call has. outputs: what a step will ask for · most: groups of a call ·
    timeout_s: for each answer. What a call raises, the next step that asks raises; nothing is begun after it. After a
    call with rows that got no finite output, a step asks for all that it wants: a server may be back by then, or
    another one may have answered before (model_engine/served.py keeps what is sure)."""

    def __init__(self, workers: ModelWorkers, outputs: Mapping[str, str], most: int, timeout_s: float) -> None:
        self._workers, self._outputs, self._most, self._timeout_s = workers, dict(outputs), most, timeout_s
        self._lock = threading.Lock()
        self._waiting: dict[str, Refs] = {}  # group id -> rows that nobody has been asked for
        self._now: tuple[frozenset[str], Future[None]] | None = None  # the groups of the call under way, or that failed
        self._known: set[str] = set()  # groups of which every row has its outputs
        self._held = False  # a step asks: it is served next
        self._counted: Metrics = {}

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._workers.capabilities

    @property
    def places(self) -> frozenset[str]:
        return self._workers.places

    def begin(self, refs: Refs) -> None:
        """Ask for the rows of these groups, once those before them are answered."""
        with self._lock:
            self._waiting |= refs.groups()
            self._go()

    def leave(self, refs: Refs) -> Future[None]:
        """No step will ask for these groups. Done when nobody reads or writes their rows any more."""
        groups = refs.groups().keys()
        with self._lock:
            self._waiting = {group: rows for group, rows in self._waiting.items() if group not in groups}
            now = self._now

        def left() -> None:
            if now is not None and not now[0].isdisjoint(groups):
                self._wait(now[1])
            with self._lock:
                self._known -= groups

        return from_thread(left)

    def infer(self, refs: Refs, outputs: Mapping[str, str]) -> Future[frozenset[str]]:
        """See `ModelWorkers.infer`; rows that were asked for before are not asked for again."""
        assert dict(outputs) == self._outputs, f"{outputs}: asked ahead for {self._outputs}"
        groups = refs.groups()
        with self._lock:
            self._held = True
            self._waiting = {group: rows for group, rows in self._waiting.items() if group not in groups}
            now = self._now

        def answered() -> frozenset[str]:
            try:
                return self._answer(refs, now and now[1])
            finally:
                with self._lock:
                    self._held = False
                    self._go()

        return from_thread(answered)

    def take_metrics(self) -> Future[Metrics]:
        """Counted with each call, so that nobody waits for the one under way."""
        found = Future[Metrics]()
        with self._lock:
            counted, self._counted = self._counted, {}
        found.set_result(counted)
        return found

    def close(self, timeout_s: float = 10.0) -> None:
        with self._lock:
            self._held = True
        self._workers.close(timeout_s)

    def _go(self) -> None:
        """Begin the next call, if it is time; in the lock."""
        if self._waiting and self._now is None and not self._held:
            groups = dict(islice(self._waiting.items(), self._most))
            self._waiting = {group: rows for group, rows in self._waiting.items() if group not in groups}
            self._now = frozenset(groups), from_thread(lambda: self._ask(groups))

    def _ask(self, groups: Mapping[str, Refs]) -> None:
        broken = self._called(Refs(r for rows in groups.values() for r in rows))
        with self._lock:
            self._known = set() if broken else self._known | groups.keys()
            self._now = None
            self._go()

    def _answer(self, refs: Refs, now: Future[None] | None) -> frozenset[str]:
        groups = refs.groups().keys()
        with self._lock:
            all_known = groups <= self._known
        if now is not None and (now.done() or not all_known):
            self._wait(now)
        with self._lock:
            known = self._known & groups
            self._known -= groups
        rest = Refs(r for r in refs if r.group_id not in known)
        broken = self._called(rest) if rest else frozenset[str]()
        share = Metric(float(len(refs) - len(rest)), float(len(refs)), "sequence")
        with self._lock:
            self._counted = merge_metrics([self._counted, {"ahead": share}])
        return broken.intersection(refs.ids)

    def _called(self, refs: Refs) -> frozenset[str]:
        broken = self._wait(self._workers.infer(refs, self._outputs))
        counted = self._wait(self._workers.take_metrics())
        with self._lock:
            self._counted = merge_metrics([self._counted, counted])
        return broken

    def _wait(self, answer: Future[T]) -> T:
        asked = ", ".join(self._outputs.values())
        return result_of(answer, f"a model that is asked ahead for {asked} did not answer", self._timeout_s)
