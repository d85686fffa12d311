"""A frozen model computes the rows of a group before their step: one call at a time, nothing twice, nothing lost."""

from __future__ import annotations

from concurrent.futures import Future
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from verl.types import Metric, Refs
from verl.workers.ahead import EarlyOutputs
from verl.workers.group import WorkerDied
from verl.workers.waits import DeadlineExpired

WANTED = {"logprobs": "teacher_logprobs"}


def rows(*groups: str) -> Refs:
    """Two of each."""
    return Refs(SimpleNamespace(sample_id=f"{g}{i}", group_id=g) for g in groups for i in range(2))


class Asked:
    """Workers whose calls are answered by hand."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[tuple[tuple[str, ...], Future[Any]]] = SimpleQueue()

    def infer(self, refs: Refs, outputs: dict[str, str]) -> Future[Any]:
        assert outputs == WANTED
        found: Future[Any] = Future()
        self.calls.put((tuple(refs.ids), found))
        return found

    def take_metrics(self) -> Future[Any]:
        found: Future[Any] = Future()
        found.set_result({"rows": Metric(1.0, 1.0, "step", "sum")})
        return found

    def next(self) -> tuple[tuple[str, ...], Future[Any]]:
        return self.calls.get(timeout=60)


def made(most: int = 10, timeout_s: float = 60.0) -> tuple[EarlyOutputs, Asked]:
    asked: Any = Asked()
    return EarlyOutputs(asked, WANTED, most, timeout_s), asked


def test_one_call_is_under_way_and_a_step_waits_for_what_is_left():
    ahead, asked = made(most=2)
    for group in "abcd":
        ahead.begin(rows(group))
    ids, first = asked.next()
    assert ids == ("a0", "a1") and asked.calls.empty(), "the others wait for its answer"
    step = ahead.infer(rows("a", "b"), WANTED)
    first.set_result(frozenset())
    ids, rest = asked.next()
    assert ids == ("b0", "b1"), "a step is served next, with what is left of it alone"
    rest.set_result(frozenset({"b0"}))
    assert step.result(60) == {"b0"}
    ids, later = asked.next()
    assert ids == ("c0", "c1", "d0", "d1"), "as many groups as a step has"
    counted = ahead.take_metrics().result(0)
    assert counted["ahead"] == Metric(2.0, 4.0, "sequence") and counted["rows"].value == 2
    step = ahead.infer(rows("c", "d"), WANTED)
    later.set_result(frozenset())
    assert step.result(60) == frozenset() and asked.calls.empty(), "all of it was known"
    assert ahead.take_metrics().result(0)["ahead"].value == 1


def test_after_rows_without_an_answer_a_step_asks_for_all_that_it_wants():
    """A server that was away is back, or one that was another model's is the old one again."""
    ahead, asked = made(most=1)
    for group, broken in (("a", ()), ("b", ("b1",)), ("c", ())):
        ahead.begin(rows(group))
        under_way = ahead._running[1]
        asked.next()[1].set_result(frozenset(broken))
        under_way.result(60)
    step = ahead.infer(rows("a", "b", "c"), WANTED)
    ids, answer = asked.next()
    assert ids == ("a0", "a1", "b0", "b1"), "and not for what was answered since"
    answer.set_result(frozenset())
    assert step.result(60) == frozenset()


def test_a_step_does_not_wait_for_the_rows_of_a_later_one():
    ahead, asked = made()
    ahead.begin(rows("a"))
    asked.next()[1].set_result(frozenset())
    ahead.begin(rows("z"))
    ids, _ = asked.next()
    assert ids == ("z0", "z1") and ahead.infer(rows("a"), WANTED).result(60) == frozenset()


def test_a_step_that_nobody_was_asked_for_is_asked_for_then():
    ahead, asked = made()
    step = ahead.infer(rows("a", "b"), WANTED)
    ids, answer = asked.next()
    answer.set_result(frozenset({"b1"}))
    assert ids == ("a0", "a1", "b0", "b1") and step.result(60) == {"b1"}


@pytest.mark.parametrize("groups", ["a", "b"])
def test_what_a_call_raises_the_next_step_raises(groups):
    """The rows may be of this step or of a later one. No call is started after the error."""
    ahead, asked = made()
    ahead.begin(rows("a"))
    _, answer = asked.next()
    under_way = ahead._running[1]
    answer.set_exception(WorkerDied("rank 0 of teacher was killed"))
    with pytest.raises(WorkerDied):
        under_way.result(60)
    ahead.begin(rows("c"))
    for call in (lambda: ahead.infer(rows(*groups), WANTED), lambda: ahead.leave(rows("a"))):
        with pytest.raises(WorkerDied, match="rank 0 of teacher was killed"):
            call().result(60)
    assert asked.calls.empty()


def test_who_does_not_answer_in_time_is_named():
    ahead, _ = made(timeout_s=0.01)
    ahead.begin(rows("a"))
    with pytest.raises(DeadlineExpired, match=r"asked ahead for teacher_logprobs did not answer within 0\.01 s"):
        ahead.infer(rows("a"), WANTED).result(60)


def test_rows_that_are_dropped_are_let_go_of_once_nobody_writes_them():
    ahead, asked = made()
    for group in "abc":
        ahead.begin(rows(group))
    _, first = asked.next()
    left = ahead.leave(rows("a", "b"))
    assert not left.done()
    first.set_result(frozenset({"a0"}))
    left.result(60)
    ids, answer = asked.next()
    assert ids == ("c0", "c1"), "and b, which waited, is not asked for"
    answer.set_result(frozenset())
    step = ahead.infer(rows("a"), WANTED)  # drawn again under its name
    ids, answer = asked.next()
    answer.set_result(frozenset())
    assert ids == ("a0", "a1") and step.result(60) == frozenset(), "what was said of the dropped rows is forgotten"
