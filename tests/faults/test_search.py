"""The search tool against a real HTTP retriever: batches, bad answers, and a retriever that is killed in the middle."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from verl.agent_loop.load_tools import load_tools
from verl.agent_loop.tools import Toolbox
from verl.chat.parsing import ToolCall
from verl.tools import ToolBroken, search_tool
from verl.tools.answers import ToolAnswer
from verl.tools.search_tool import passages_text

RETRIEVER = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

asked = []

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        queries, topk = body["queries"], body["topk"]
        asked.append(len(queries))
        assert body["return_scores"] is True
        if "slow" in queries:
            time.sleep(60)
        text = lambda q, k: f'"About {q}"\\nPassage {k} on {q}.'
        row = lambda q: [{"document": {"contents": text(q, k)}, "score": 1 / k} for k in range(1, topk + 1)]
        result = [row(q) if q != "stats" else [{"contents": f"stats\\n{json.dumps(asked)}"}] for q in queries]
        said = json.dumps({"result": result[1:] if "short" in queries else result})
        said = {"garbage": "<html>", "none": "{}", "null": '{"result": null}'}.get(queries[0], said).encode()
        self.send_response(int(queries[0]) if queries[0].isdecimal() else 200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *args):
        pass

ThreadingHTTPServer.request_queue_size = 128
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Retriever:
    """A process that can be killed, and started again at its port."""

    def __init__(self, folder: Path) -> None:
        self.script = folder / "retriever.py"
        self.script.write_text(RETRIEVER)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.start()

    def start(self) -> None:
        command = [sys.executable, str(self.script), str(self.port)]
        self.process, deadline = subprocess.Popen(command), time.monotonic() + 30
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                assert time.monotonic() < deadline, "no retriever within 30 s"
                time.sleep(0.02)
                if self.process.poll() is not None:  # another test of this machine had its port for a moment
                    self.process = subprocess.Popen(command)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def retriever(tmp_path: Path) -> Any:
    made = Retriever(tmp_path)
    yield made
    made.kill()


def tool_of(folder: Path, port: int, **config: Any) -> Any:
    """Return the tool of verl's own YAML, as in its examples."""
    given = {"retrieval_service_url": f"http://127.0.0.1:{port}/retrieve", "num_workers": 8, "rate_limit": 120} | config
    lines = "\n".join(f"    {key}: {value}" for key, value in {**given, "type": "native"}.items())
    (folder / "search.yaml").write_text(
        f"tools:\n- class_name: verl.tools.search_tool.SearchTool\n  config:\n{lines}\n"
    )
    (tool,) = load_tools([str(folder / "search.yaml")]).values()
    return tool


async def ask(tool: Any, *queries: str, timeout_s: float = 20.0) -> ToolAnswer:
    box = Toolbox({tool.name: tool}, {}, timeout_s)
    answer = await box.call(ToolCall("search", {"query_list": list(queries)}))
    assert await box.close() == []
    return answer


def test_calls_of_many_trajectories_are_few_requests_and_each_gets_its_own(tmp_path, retriever):
    tool = tool_of(tmp_path, retriever.port, topk=2)

    async def play() -> tuple[list[ToolAnswer], ToolAnswer]:
        together = await asyncio.gather(*(ask(tool, f"q{k}", f"r{k}") for k in range(30)))
        return together, await ask(tool, "stats")

    answers, stats = asyncio.run(play())
    for k, answer in enumerate(answers):
        one, two = answer.text.split("\n---\n")
        assert (
            one == f'Doc 1 (Title: "About q{k}")\nPassage 1 on q{k}.\n\nDoc 2 (Title: "About q{k}")\nPassage 2 on q{k}.'
        )
        assert two == one.replace(f"q{k}", f"r{k}")
    asked = [int(n) for n in stats.text.partition("\n")[2].strip("[]").split(",")]
    assert sum(asked) == 61 and len(asked) <= 4, "thirty calls came at one moment"


def test_whatever_the_retriever_does_is_an_answer(tmp_path, retriever):
    tool = tool_of(tmp_path, retriever.port, timeout=1)
    wrong = {
        "garbage": "JSONDecodeError",
        "none": "KeyError",
        "null": "TypeError",
        "500": "500, message='Internal Server Error'",
    }
    wrong |= {"404": "404, message", "short": "0 results for 1 queries", "slow": "timed out"}
    for query, said in wrong.items():
        answer = asyncio.run(ask(tool, query))
        assert answer.error == "exception" and said in answer.text and "the retriever gave" in answer.text, query
    assert asyncio.run(ask(tool)).text.startswith("Error: search failed: ValueError: query_list is empty")
    assert asyncio.run(ask(tool, "a")).error == "" and passages_text([]) == "(nothing found)"


def test_a_trajectory_that_gives_up_takes_nobody_with_it(tmp_path, retriever):
    tool = tool_of(tmp_path, retriever.port, window_ms=200)

    async def play() -> list[ToolAnswer]:
        return await asyncio.gather(ask(tool, "a", timeout_s=0.05), ask(tool, "b"))

    late, fine = asyncio.run(play())
    assert late.error == "timeout" and fine.error == "" and "Passage 1 on b" in fine.text and "on a" not in fine.text


def test_a_killed_retriever_makes_attempts_invalid_and_one_that_comes_back_is_used(tmp_path, retriever, monkeypatch):
    tool = tool_of(tmp_path, retriever.port, timeout=30)

    async def back_within_moments() -> list[ToolAnswer]:
        retriever.kill()
        asked = asyncio.create_task(ask(tool, "while it is away"))
        await asyncio.sleep(0.3)
        retriever.start()
        return [await asked, await ask(tool, "again")]

    answers = asyncio.run(back_within_moments())
    assert [a.error for a in answers] == ["", ""] and "Passage 1 on while it is away." in answers[0].text

    async def gone() -> list[Any]:
        asked = [asyncio.create_task(ask(tool, "slow")), asyncio.create_task(ask(tool, "too"))]
        await asyncio.sleep(0.5)
        retriever.kill()
        asked += [asyncio.create_task(ask(tool, f"while it is away {k}")) for k in range(3)]
        lost = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 20)
        retriever.start()
        return [*lost, await ask(tool, "again")]

    monkeypatch.setattr(search_tool, "RETRY_S", 0.5)
    *lost, last = asyncio.run(gone())
    assert len(lost) == 5 and all(isinstance(e, ToolBroken) and "is down" in str(e) for e in lost), lost
    assert last.error == "" and "Passage 1 on again." in last.text


def test_what_stands_before_a_retriever_that_is_down_is_no_answer_of_it(tmp_path, retriever, monkeypatch):
    monkeypatch.setattr(search_tool, "RETRY_S", 0.3)
    tool = tool_of(tmp_path, retriever.port)
    for status in ("502", "503", "504"):
        with pytest.raises(ToolBroken, match=f"is down: HTTP {status}"):
            asyncio.run(ask(tool, status))
    with socket.socket() as full:  # no answer: the second connection waits for the first one's place
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        with socket.create_connection(full.getsockname()):
            with pytest.raises(ToolBroken, match="is down: .*[Tt]imeout"):
                asyncio.run(ask(tool_of(tmp_path, full.getsockname()[1]), "a"))


def test_the_limit_of_the_tool_leaves_room_to_find_that_a_retriever_is_down(tmp_path, retriever):
    retriever.kill()
    with pytest.raises(ToolBroken, match="is down"):
        asyncio.run(ask(tool_of(tmp_path, retriever.port, timeout_s=1), "a"))


def test_the_runs_limit_of_a_tool_leaves_that_room_too(tmp_path, retriever):
    """`agent.tool_timeout_s`, for a tool without a limit of its own."""
    retriever.kill()
    tool_of(tmp_path, retriever.port)
    (tool,) = load_tools([str(tmp_path / "search.yaml")], 1.0).values()
    with pytest.raises(ToolBroken, match="is down"):
        asyncio.run(ask(tool, "a", timeout_s=1.0))


def test_what_waits_for_a_place_while_a_retriever_is_down_is_no_answer_either(tmp_path, retriever):
    retriever.kill()
    tool = tool_of(tmp_path, retriever.port, timeout_s=2, num_workers=1, window_ms=0, concurrency=64)

    async def play() -> list[Any]:
        calls = []
        for k in range(12):
            calls.append(asyncio.ensure_future(ask(tool, f"q{k}")))
            await asyncio.sleep(0.02)  # each is a request of its own
        lost = await asyncio.gather(*calls, return_exceptions=True)
        retriever.start()
        return [*lost, await ask(tool, "again")]

    *lost, last = asyncio.run(play())
    assert [type(e) for e in lost] == [ToolBroken] * 12, lost
    assert last.error == "" and "Passage 1 on again." in last.text


def test_a_tool_without_a_retriever_is_refused(tmp_path):
    for config in ({"retrieval_service_url": "localhost:8000"}, {"topk": 0}, {"timeout": 0}):
        with pytest.raises(ValueError, match="search: "):
            tool_of(tmp_path, 1, **config)
