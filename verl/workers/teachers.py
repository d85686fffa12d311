"""Several frozen models behind the interface of one. Each row has its own teacher, or all teachers score every row and
their outputs are merged. If the process of a teacher dies, or does not answer in time, its rows are Invalid and the
other teachers continue."""

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
ScoreRequests = Mapping[str, tuple[Refs, Future[frozenset[str]]]]


class Teachers(ModelWorkers):
    """`ModelWorkers` of several frozen models.

    pick: task, best or mix, as in `teacher.pick`
    shares: the weights of a mixture, by the teacher's name
    timeout_s: the deadline of one call for the answers of all teachers
    """

    def __init__(
        self, members: Mapping[str, ModelWorkers], pick: str, shares: Mapping[str, float], timeout_s: float
    ) -> None:
        self._members, self._pick, self._timeout_s = dict(members), pick, timeout_s
        self._shares = tuple(shares[name] for name in members) if pick == "mix" else ()
        self._counted: dict[str, Metric] = {}  # by the last call
        # dead teachers by name: they get no further call, and their rows count as rows without output
        self._dead: dict[str, Exception] = {}

    @property
    def capabilities(self) -> EngineCapabilities:
        """Wait until all teachers are built, and return the capabilities of the first one."""
        first, *_ = [member.capabilities for member in self._members.values()]
        return first

    @property
    def places(self) -> frozenset[str]:
        return frozenset[str]().union(*(member.places for member in self._members.values()))

    def infer(self, refs: Refs, outputs: Mapping[str, str]) -> Future[frozenset[str]]:
        """Compute the outputs as `ModelWorkers.infer` does. The rows of a dead teacher count as rows without finite
        output."""
        wanted = {}
        for name, member in self._members.items():
            own = Refs(r for r in refs if r.teacher == name) if self._pick == "task" else refs
            to = outputs if self._pick == "task" else {o: f"{column}/{name}" for o, column in outputs.items()}
            if own:
                wanted[name] = own, _failed(self._dead[name]) if name in self._dead else member.infer(own, to)
        return from_thread(lambda: self._settle(refs, wanted, outputs))

    def take_metrics(self) -> Future[Metrics]:
        """Return the metrics of the living teachers, with the teacher's name in theirs, and for each teacher the share
        of samples without output in the last call."""
        wanted = {name: member.take_metrics() for name, member in self._members.items() if name not in self._dead}

        def counted() -> Metrics:
            out, self._counted = self._counted, {}
            for name, answer in wanted.items():
                with contextlib.suppress(WorkerDied):  # its death was reported when it happened
                    out |= {f"{figure}/{name}": m for figure, m in self._result(answer, name).items()}
            return out

        return from_thread(counted)

    def close(self, timeout_s: float = 10.0) -> None:
        for member in self._members.values():
            member.close(timeout_s)

    def _settle(self, refs: Refs, requests: ScoreRequests, outputs: Mapping[str, str]) -> frozenset[str]:
        failed, dead, until_s = dict[str, frozenset[str]](), dict[str, Exception](), time.monotonic() + self._timeout_s
        for name, (own, answer) in requests.items():
            try:
                failed[name] = self._result(answer, name, max(0.0, until_s - time.monotonic()))
            except (WorkerDied, DeadlineExpired) as e:  # its death was reported when it happened
                dead[name], failed[name] = e, frozenset(own.ids)
                if isinstance(e, DeadlineExpired) and name not in self._dead:
                    late = f"teacher {name} did not answer within {self._timeout_s:g} s"
                    logger.warning("%s; its samples are Invalid from now on, the other teachers go on", late)
        self._dead |= dead
        counts = {name: (float(len(failed[name])), float(len(own))) for name, (own, _) in requests.items()}
        self._counted = {f"invalid/{name}": Metric(*count, "sequence") for name, count in counts.items()}
        left = [member for name, member in self._members.items() if name not in self._dead]
        if not left:
            raise next(iter(dead.values()))
        if dead:
            unanswered = Refs(r for r in refs if r.teacher in dead) if self._pick == "task" else refs
            self._result(left[0].blank(unanswered, outputs))
        elif self._pick != "task":
            self._result(left[0].merge(refs, outputs, tuple(self._members), self._shares))
        return frozenset[str]().union(*failed.values())

    def _result(self, answer: Future[A], name: str = "of the others", timeout_s: float | None = None) -> A:
        return result_of(answer, f"teacher {name} did not answer", self._timeout_s if timeout_s is None else timeout_s)


def _failed(error: Exception) -> Future[Any]:
    found = Future[Any]()
    found.set_exception(error)
    return found
