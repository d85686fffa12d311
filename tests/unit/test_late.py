"""The late part is named in the last line, and a worker's own error about a deadline is unchanged."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from verl.cli import guarded
from verl.model_engine.layout import Layout
from verl.rollout.base import ReplicaLost
from verl.rollout.http import ServerGone
from verl.workers import dist, model_workers
from verl.workers.answers import RankLate
from verl.workers.model_workers import ModelWorkers
from verl.workers.teachers import Teachers


def workers(answer: Future[Any]) -> ModelWorkers:
    group: Any = SimpleNamespace(name="actor", world_size=1, submit=lambda method, args: answer)
    return ModelWorkers(group)


def last_line(capsys: pytest.CaptureFixture[str], work: Any) -> str:
    assert guarded(work) == 1
    return capsys.readouterr().err.splitlines()[-1]


def test_a_model_that_does_not_load_in_time_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model_workers, "START_TIMEOUT_S", 0.01)
    said = "error: actor, whose model loads slowly or hangs, was not built within 0.01 s"
    assert last_line(capsys, lambda: workers(Future()).capabilities) == said


def test_what_the_worker_says_of_a_deadline_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    answer = Future[Any]()
    answer.set_exception(RankLate("waited 7 s for another rank"))
    assert last_line(capsys, lambda: workers(answer).capabilities) == "error: waited 7 s for another rank"


def test_a_teacher_that_does_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    silent: Any = SimpleNamespace(take_metrics=Future)
    teachers = Teachers({"math": silent}, "task", {}, 0.01)
    said = "error: teacher math did not answer within 0.01 s"
    assert last_line(capsys, lambda: teachers.take_metrics().result(30)) == said


def test_a_death_is_the_last_line_and_not_the_end_of_its_connection(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        refused = ConnectionRefusedError(111, "Connect call failed")
        gone = ServerGone("vLLM ended with exit code 137; in rollout.log: killed")
        gone.__cause__ = refused
        raise ReplicaLost(f"no rollout replica serves: {gone}") from gone

    assert last_line(capsys, work) == "error: vLLM ended with exit code 137; in rollout.log: killed"


def test_an_error_without_words_has_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    def late() -> int:
        raise TimeoutError

    assert last_line(capsys, late) == "error: TimeoutError: "


def test_ranks_that_do_not_come_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """How long one waits for them is the start's deadline, not that of a collective, which may be much shorter."""
    store, _ = dist.serve_store("127.0.0.1")
    store.set("come/2", "")
    layout = Layout(world_size=4)
    said = last_line(capsys, lambda: dist.become(store, layout, 0, backend="gloo", timeout_s=0.001, start_s=0.5))
    assert said == "error: rank 0 waited 0.5 s for ranks [1, 3] of 4 to come"
