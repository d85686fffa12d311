"""The driver's view of a process that answers, dies, or is silent; without Ray."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from verl.workers import process_group
from verl.workers.answers import CONSEQUENCES, MeetingEnded, RankAnswer, failed_answer, first_failure
from verl.workers.process_group import ProcessGroup
from verl.workers.ray import life
from verl.workers.ray.life import ActorLife


def test_the_first_cause_is_the_error_of_its_own_whoever_answers_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0, which waited for the one that failed, may be reported first."""
    group, call = ProcessGroup("actor", 2, lambda death: None), SimpleNamespace(name="Role.update")
    late, own = RankAnswer(error=MeetingEnded("rank 1: a bad row")), RankAnswer(error=ValueError("a bad row"))
    for order in ([0, 1], [1, 0]):
        answers, given = [Future[RankAnswer](), Future[RankAnswer]()], (late, own)

        def answer_next(waiting, *, timeout, answers=answers, given=given, order=order):
            answers[at := order.pop(0)].set_result(given[at])
            return {answers[at]}, {one for one in waiting if not one.done()}

        monkeypatch.setattr(process_group, "wait", answer_next)
        with pytest.raises(ValueError, match="^a bad row"):
            group._collected(call, answers)


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:16811."


class DistNetworkError(RuntimeError):
    """torch's, of a store."""


@pytest.mark.parametrize(
    "of_another", [RuntimeError(GLOO), DistNetworkError("Broken pipe"), MeetingEnded("rank 1: a bad row")]
)
@pytest.mark.parametrize("own", [ConnectionResetError(104, "Connection reset by peer"), RuntimeError("died by peer")])
def test_a_service_that_hung_up_is_a_cause_and_a_rank_that_did_is_a_consequence(of_another, own) -> None:
    """The type of an error shows if it is about a rank; its text is of another program."""
    first, second = failed_answer(of_another), failed_answer(own)
    assert isinstance(first.error, CONSEQUENCES) and str(first.error) == str(of_another)
    assert first_failure([first, second]) is second and first_failure([first]) is first


class Process:
    """An `ActorLife`, and the futures of its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(life.time, "monotonic", lambda: self.now_s)
        self.asked: list[Future[Any]] = []
        self.end: Future[Any] = Future()
        self.built: Future[Any] = Future()
        self.died: list[str] = []
        self.started: list[int] = []
        actor, ref = (
            SimpleNamespace(where=SimpleNamespace(remote=self.ask)),
            lambda f: SimpleNamespace(future=lambda: f),
        )
        self.life = ActorLife(
            "rank 1 of actor", actor, ref(self.end), ref(self.built), died=self.died.append, started=self.started.append
        )

    def ask(self) -> Any:
        self.asked.append(Future())
        return SimpleNamespace(future=lambda: self.asked[-1])

    def answer(self) -> None:
        self.asked[-1].set_result(("10.0.0.1", 7))

    def look(self, now_s: float) -> None:
        self.now_s = now_s
        self.life.look(10.0)


def test_who_answers_is_asked_again_and_who_is_silent_is_given_up_once(monkeypatch):
    process = Process(monkeypatch)
    process.built.set_result(None)
    process.answer()
    assert process.started == [7]
    for now_s in (100.0, 200.0):
        process.look(now_s)
        process.look(now_s + 9)
        process.answer()
    assert len(process.asked) == 3 and process.started == [7] and process.died == []
    process.look(300.0)
    process.look(309.0)
    assert process.died == [] and len(process.asked) == 4, "one question at a time"
    process.look(311.0)
    process.look(312.0)
    process.end.set_exception(RuntimeError("RankActor exit detail: killed. Some common causes"))
    assert process.died == ["rank 1 of actor (process 7 on 10.0.0.1) has not answered for 10 s"]


def test_it_may_be_silent_while_it_is_built(monkeypatch):
    process = Process(monkeypatch)
    process.look(1000.0)
    process.built.set_result(None)
    process.look(1009.0)
    assert process.died == [] and len(process.asked) == 1
    process.look(1011.0)
    assert process.died == ["rank 1 of actor (process ? on ?) has not answered for 10 s"]


def test_a_death_is_told_with_its_reason_and_that_of_one_that_was_ended_is_not(monkeypatch):
    process, ended = Process(monkeypatch), Process(monkeypatch)
    process.answer()
    ended.life.over = True
    for one in (process, ended):
        one.end.set_exception(RuntimeError("a\nb RankActor exit detail: killed\n by 9. Some common causes include: x"))
        one.built.set_exception(RuntimeError("gone"))
        one.look(99.0)
    assert process.died == ["rank 1 of actor (process 7 on 10.0.0.1) died: killed by 9."]
    assert ended.died == [] and len(ended.asked) == 1
