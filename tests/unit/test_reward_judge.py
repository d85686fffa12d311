"""A judge behind HTTP: its request, how its answer is read, and that no failure is a score."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from verl.reward import judge
from verl.reward.base import RewardRequest
from verl.reward.judge import compute_score, label_of
from verl.reward.model import combined
from verl.reward.pool import RewardPool, grader_spec
from verl.types import Invalid, Score

Answer = Callable[[dict[str, Any]], tuple[int, Any]]


class Judge:
    """answer: (status, JSON) of a body; asked: (path, key, body)."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None, dict[str, Any]]] = []
        self.answer: Answer = lambda body: (200, said("It is right. Score: 7.5"))
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append((self.path, self.headers.get("Authorization"), body))
                status, found = outer.answer(body)
                content = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *given: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def said(text: str) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


@pytest.fixture
def served() -> Iterator[Judge]:
    made = Judge()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_a_judge_says_a_score(served: Judge) -> None:
    info = {"question": "What is 2 + 2?", "level": 3}
    assert compute_score("s", "four", "4", info, url=served.url, model="judge", api_key="k") == 0.75
    path, key, body = served.asked[0]
    assert (path, key, body["model"], body["temperature"]) == ("/v1/chat/completions", "Bearer k", "judge", 0.0)
    assert all(part in body["messages"][0]["content"] for part in ("What is 2 + 2?", "four", "\n4\n"))
    served.answer = lambda body: (200, said("I thought score: 9, but no.\nSCORE = -2"))
    other = {"prompt": "{level} {answer}", "scale": 1.0, "pattern": r"SCORE = (-?\d+)"}
    found = compute_score("s", "four", "4", info, url=served.url, **other)
    assert found == -2.0 and served.asked[1][2]["messages"][0]["content"] == "3 four"


def cut_off(text: str, why: str = "length") -> dict[str, Any]:
    choice = said(text)["choices"][0]
    return {"choices": [{**choice, "finish_reason": why}]}


def test_half_a_verdict_is_none(served: Judge) -> None:
    """A server that ends, or is paused, cuts `Score: 10` wherever it is."""
    for why in ("abort", "length", "error"):
        served.answer = lambda body, why=why: (200, cut_off("Score: 1", why))
        with pytest.raises(ValueError, match="before its verdict"):
            compute_score("s", "four", "4", {}, url=served.url)
    served.answer = lambda body: (200, cut_off("Score: 10", "stop"))
    assert compute_score("s", "four", "4", {}, url=served.url) == 1.0


@pytest.mark.parametrize("shape", [{"data": [{"probs": [0.25]}]}, {"embedding": [0.25]}, [{"embedding": [0.25]}]])
def test_a_classifier_gives_a_number(served: Judge, shape: Any) -> None:
    served.answer = lambda body: (200, shape)
    found = compute_score("s", "four", "4", {"question": "2 + 2? "}, url=served.url + "/", kind="classify")
    assert found == 0.25 and served.asked[0][0] == "/classify" and served.asked[0][2]["input"] == "2 + 2? four"
    with pytest.raises(ValueError, match="2 labels; one is needed"):
        label_of({"data": [{"probs": [0.2, 0.8]}]})


@pytest.mark.parametrize(
    ("answer", "said_of_it"),
    [
        ((200, said("It is fine.")), "the judge gave no score"),
        ((200, said("Score: 85")), "score of 85 is not within 0 and scale=10"),
        ((200, said("Score: -3")), "score of -3 is not within"),
        ((200, cut_off("score: 3 for clarity, and")), "cut off after max_tokens=512"),
        ((200, {"choices": []}), r'no chat completion: \{"choices": \[\]\}'),
        ((200, ["ok"]), r'no chat completion: \["ok"\]'),
        ((500, {"error": "out of memory"}), "HTTP 500: .*out of memory"),
        ((401, {"error": "a wrong key"}), "HTTP 401"),
    ],
)
def test_what_goes_wrong_raises(served: Judge, answer: tuple[int, Any], said_of_it: str) -> None:
    served.answer = lambda body: answer
    with pytest.raises((ValueError, RuntimeError), match=said_of_it):
        compute_score("s", "a", "b", url=served.url)
    with pytest.raises(ValueError, match=r"prompt names \{hint\}, and the row's extra_info has question"):
        compute_score("s", "a", "b", url=served.url, prompt="{hint}")
    with pytest.raises(ValueError, match="kind=score: it is chat or classify"):
        compute_score("s", "a", "b", url=served.url, kind="score")


def test_a_busy_judge_is_asked_again_until_the_deadline(served: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "AGAIN_S", 0.01)
    served.answer = lambda body: (200, said("Score: 10")) if len(served.asked) > 3 else (429, {"error": "full"})
    assert compute_score("s", "a", "b", url=served.url) == 1.0 and len(served.asked) == 4
    served.answer = lambda body: (503, {"error": "full"})
    with pytest.raises(RuntimeError, match="HTTP 503"):
        compute_score("s", "a", "b", url=served.url, timeout_s=0.1)


def test_nobody_there_and_nobody_answering(served: Judge) -> None:
    served.answer = lambda body: time.sleep(2.0) or (200, said("Score: 1"))  # type: ignore[func-returns-value]
    with pytest.raises(RuntimeError, match=r"does the judge run there\?"):
        compute_score("s", "a", "b", url=served.url, timeout_s=0.1)
    with pytest.raises(RuntimeError, match=r"refused.*does the judge run there\?"):
        compute_score("s", "a", "b", url="http://127.0.0.1:1")


def test_as_a_grader_its_failures_are_invalid_and_calls_run_side_by_side(served: Judge) -> None:
    together, most = 0, 0
    lock = threading.Lock()

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        nonlocal together, most
        with lock:
            together += 1
            most = max(most, together)
        time.sleep(0.3)
        with lock:
            together -= 1
        wanted = "9" in body["messages"][0]["content"]
        return (200, said("Score: 4" if wanted else "I do not know"))

    served.answer = answer

    async def run() -> list[Score | Invalid]:
        kwargs = {"url": served.url, "prompt": "{answer}"}
        spec = grader_spec("verl.reward.judge", "compute_score", kwargs)
        pool = RewardPool(spec, num_workers=2, timeout_s=20.0, memory_limit_mb=2048)
        await pool.start()
        try:
            return await asyncio.gather(*(pool.score(request(str(i))) for i in (9, 1, 9, 1)))
        finally:
            await pool.close()

    def request(text: str) -> RewardRequest:
        return RewardRequest(request_id=text, data_source="s", solution_str=text, ground_truth="x")

    found = asyncio.run(run())
    assert [isinstance(one, Score) and one.value for one in found] == [0.4, False, 0.4, False]
    assert all("no score" in one.detail for one in found if isinstance(one, Invalid)) and most == 2


def test_the_score_of_a_model_is_weighted_and_added_to_that_of_a_function() -> None:
    assert combined(None, 4.0, 0.5) == Score(2.0, {"reward_model": 4.0})
    both = combined(Score(1.0, {"length": 0.1}), 4.0, 0.5)
    assert both == Score(3.0, {"function": 1.0, "length": 0.1, "reward_model": 4.0})
    invalid = Invalid("timeout", "it took 9 s")
    assert combined(invalid, 4.0, 0.5) is invalid
    assert isinstance(combined(Score(1.0), float("nan"), 0.5), Invalid)
