"""Compute the outputs of a frozen model before the training step needs them. The model has devices of its own, so it
can compute complete groups while other answers are sampled and while the policy trains."""

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


class EarlyOutputs(ModelWorkers):
    """`ModelWorkers` of a frozen model that computes groups as soon as they are complete.

    One call runs at a time, over whole groups, so each call has the deadline of a step's call. An error of a call is
    raised by the next `infer` of a step, and no further call starts. If a call returned rows without finite output, the
    next `infer` computes all rows of its step again: a server may be reachable by then (model_engine/served.py caches
    the rows that it already has).

    outputs: the model outputs and their columns, as the step requests them
    most: the maximum number of groups per call
    timeout_s: the deadline of each call
    """

    def __init__(self, workers: ModelWorkers, outputs: Mapping[str, str], most: int, timeout_s: float) -> None:
        self._workers, self._outputs, self._most, self._timeout_s = workers, dict(outputs), most, timeout_s
        self._lock = threading.Lock()
        self._waiting: dict[str, Refs] = {}  # group id -> rows that no call has computed yet
        self._running: tuple[frozenset[str], Future[None]] | None = None  # the groups of the running or failed call
        self._complete: set[str] = set()  # the groups with outputs for all their rows
        self._step_waits = False  # a step waits in `infer`: no call may start before it
        self._metrics: Metrics = {}

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._workers.capabilities

    @property
    def places(self) -> frozenset[str]:
        return self._workers.places

    def begin(self, refs: Refs) -> None:
        """Add these groups to the waiting ones, and start a call if none is running."""
        with self._lock:
            self._waiting |= refs.groups()
            self._start_next()

    def leave(self, refs: Refs) -> Future[None]:
        """Remove these groups, which no step will use. The future is done once no call reads or writes their rows."""
        groups = refs.groups().keys()
        with self._lock:
            self._waiting = {group: rows for group, rows in self._waiting.items() if group not in groups}
            running = self._running

        def left() -> None:
            if running is not None and not running[0].isdisjoint(groups):
                self._result(running[1])
            with self._lock:
                self._complete -= groups

        return from_thread(left)

    def infer(self, refs: Refs, outputs: Mapping[str, str]) -> Future[frozenset[str]]:
        """Compute the outputs of the rows that no earlier call has computed, and return the ids of rows without finite
        output."""
        assert dict(outputs) == self._outputs, f"{outputs}: asked ahead for {self._outputs}"
        groups = refs.groups()
        with self._lock:
            self._step_waits = True
            self._waiting = {group: rows for group, rows in self._waiting.items() if group not in groups}
            running = self._running

        def answered() -> frozenset[str]:
            try:
                return self._remaining(refs, running and running[1])
            finally:
                with self._lock:
                    self._step_waits = False
                    self._start_next()

        return from_thread(answered)

    def take_metrics(self) -> Future[Metrics]:
        """Return the metrics of the finished calls at once, without waiting for the running one."""
        found = Future[Metrics]()
        with self._lock:
            counted, self._metrics = self._metrics, {}
        found.set_result(counted)
        return found

    def close(self, timeout_s: float = 10.0) -> None:
        with self._lock:
            self._step_waits = True
        self._workers.close(timeout_s)

    def _start_next(self) -> None:
        """Start the next call if there are waiting groups, no call runs and no step waits. The caller holds the
        lock."""
        if self._waiting and self._running is None and not self._step_waits:
            groups = dict(islice(self._waiting.items(), self._most))
            self._waiting = {group: rows for group, rows in self._waiting.items() if group not in groups}
            self._running = frozenset(groups), from_thread(lambda: self._run_call(groups))

    def _run_call(self, groups: Mapping[str, Refs]) -> None:
        broken = self._computed(Refs(r for rows in groups.values() for r in rows))
        with self._lock:
            self._complete = set() if broken else self._complete | groups.keys()
            self._running = None
            self._start_next()

    def _remaining(self, refs: Refs, running: Future[None] | None) -> frozenset[str]:
        groups = refs.groups().keys()
        with self._lock:
            all_known = groups <= self._complete
        if running is not None and (running.done() or not all_known):
            self._result(running)
        with self._lock:
            known = self._complete & groups
            self._complete -= groups
        rest = Refs(r for r in refs if r.group_id not in known)
        broken = self._computed(rest) if rest else frozenset[str]()
        share = Metric(float(len(refs) - len(rest)), float(len(refs)), "sequence")
        with self._lock:
            self._metrics = merge_metrics([self._metrics, {"ahead": share}])
        return broken.intersection(refs.ids)

    def _computed(self, refs: Refs) -> frozenset[str]:
        broken = self._result(self._workers.infer(refs, self._outputs))
        counted = self._result(self._workers.take_metrics())
        with self._lock:
            self._metrics = merge_metrics([self._metrics, counted])
        return broken

    def _result(self, answer: Future[T]) -> T:
        wanted = ", ".join(self._outputs.values())
        return result_of(answer, f"a model that is asked ahead for {wanted} did not answer", self._timeout_s)
