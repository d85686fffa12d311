"""Several frozen models in the place of one: each row goes to its own teacher, or all of them score every row and what
they say is made one. A teacher whose process died, or does not answer in time, has nothing to say: its rows are
Invalid, and the others go on."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from verl.model_engine.base import EngineCapabilities
from verl.types import Metric, Metrics, Refs
from verl.workers.group import WorkerDied
from verl.workers.model_workers import ModelWorkers
from verl.workers.waits import DeadlineExpired, from_thread, result_of

logger = logging.getLogger(__name__)
A = TypeVar("A")
Asked = Mapping[str, tuple[Refs, Future[frozenset[str]]]]


class Teachers(ModelWorkers):
    """See `ModelWorkers`; of its calls those of a frozen model. pick: task, best or mix, as `teacher.pick` · shares: of
    a mixture, by name · timeout_s: for the answers of all to one call."""

    def __init__(
        self, members: Mapping[str, ModelWorkers], pick: str, shares: Mapping[str, float], timeout_s: float
    ) -> None:
        self._members, self._pick, self._timeout_s = dict(members), pick, timeout_s
        self._shares = tuple(shares[name] for name in members) if pick == "mix" else ()
        self._counted: dict[str, Metric] = {}  # by the last call
        # also in the calls that they have no row in; who hangs is not asked again
        self._dead: dict[str, Exception] = {}

    @property
    def capabilities(self) -> EngineCapabilities:
        """Of the first; waits for all of them to be there."""
        first, *_ = [member.capabilities for member in self._members.values()]
        return first

    @property
    def places(self) -> frozenset[str]:
        return frozenset[str]().union(*(member.places for member in self._members.values()))

    def infer(self, refs: Refs, outputs: Mapping[str, str]) -> Future[frozenset[str]]:
        """See `ModelWorkers.infer`. The samples of a dead teacher are among those without a finite output."""
        asked = {}
        for name, member in self._members.items():
            own = Refs(r for r in refs if r.teacher == name) if self._pick == "task" else refs
            to = outputs if self._pick == "task" else {o: f"{column}/{name}" for o, column in outputs.items()}
            if own:
                asked[name] = own, _failed(self._dead[name]) if name in self._dead else member.infer(own, to)
        return from_thread(lambda: self._settle(refs, asked, outputs))

    def take_metrics(self) -> Future[Metrics]:
        """Of those that live, by their names, and the samples that each of them said nothing of in the last call."""
        asked = {name: member.take_metrics() for name, member in self._members.items() if name not in self._dead}

        def counted() -> Metrics:
            out, self._counted = self._counted, {}
            for name, answer in asked.items():
                with contextlib.suppress(WorkerDied):  # the user was told when it died
                    out |= {f"{figure}/{name}": m for figure, m in self._said(answer, name).items()}
            return out

        return from_thread(counted)

    def close(self, timeout_s: float = 10.0) -> None:
        for member in self._members.values():
            member.close(timeout_s)

    def _settle(self, refs: Refs, asked: Asked, outputs: Mapping[str, str]) -> frozenset[str]:
        failed, dead, until_s = dict[str, frozenset[str]](), dict[str, Exception](), time.monotonic() + self._timeout_s
        for name, (own, answer) in asked.items():
            try:
                failed[name] = self._said(answer, name, max(0.0, until_s - time.monotonic()))
            except (WorkerDied, DeadlineExpired) as e:  # the user was told when it died
                dead[name], failed[name] = e, frozenset(own.ids)
                if isinstance(e, DeadlineExpired) and name not in self._dead:
                    late = f"teacher {name} did not answer within {self._timeout_s:g} s"
                    logger.warning("%s; its samples are Invalid from now on, the other teachers go on", late)
        self._dead |= dead
        counts = {name: (float(len(failed[name])), float(len(own))) for name, (own, _) in asked.items()}
        self._counted = {f"invalid/{name}": Metric(*count, "sequence") for name, count in counts.items()}
        left = [member for name, member in self._members.items() if name not in self._dead]
        if not left:
            raise next(iter(dead.values()))
        if dead:
            gone = Refs(r for r in refs if r.teacher in dead) if self._pick == "task" else refs
            self._said(left[0].blank(gone, outputs))
        elif self._pick != "task":
            self._said(left[0].merge(refs, outputs, tuple(self._members), self._shares))
        return frozenset[str]().union(*failed.values())

    def _said(self, answer: Future[A], name: str = "of the others", timeout_s: float | None = None) -> A:
        return result_of(answer, f"teacher {name} did not answer", self._timeout_s if timeout_s is None else timeout_s)


def _failed(error: Exception) -> Future[Any]:
    found = Future[Any]()
    found.set_exception(error)
    return found
