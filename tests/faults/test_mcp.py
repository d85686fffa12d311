"""Tools of real MCP servers, over standard input and output and over HTTP, that are missing, talk nonsense, change and
die."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from each import FULL_GRID

from verl.agent_loop.load_tools import load_tools
from verl.agent_loop.tools import Tool, Toolbox
from verl.chat.parsing import ToolCall
from verl.rollout.process import free_port
from verl.tools import ToolBroken, mcp
from verl.tools.mcp import McpServer, tools_hash

# Not imported here: every worker that collects would pay the second that it takes.
pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="the package mcp is not installed (the extra mcp)")
pytestmark = pytest.mark.timeout(120)

SERVER = '''
import anyio, os, subprocess, sys, time
from pathlib import Path
from mcp.server.mcpserver import MCPServer
from pydantic import BaseModel, Field

server, count, here = MCPServer("s"), [0], Path(__file__).parent

@server.tool()
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)

@server.tool()
def bump() -> dict:
    """Counts its calls."""
    count[0] += 1
    return {"count": count[0], "pid": os.getpid()}

@server.tool()
def fail() -> str:
    """Fails."""
    raise ValueError("no")

@server.tool()
def die() -> str:
    """Ends the server in the middle of a call."""
    os._exit(3)

@server.tool()
def talk() -> str:
    """Says much to its standard error."""
    print("x" * 50_000, file=sys.stderr, flush=True)
    return "said"

@server.tool()
async def hang() -> str:
    """Stops everything."""
    time.sleep(600)

within = [0, 0]

@server.tool()
async def nap() -> str:
    """Sleeps, and says how many did at most."""
    within[0] += 1
    within[1] = max(within)
    await anyio.sleep(2)
    within[0] -= 1
    return str(within[1])

@server.tool()
def child() -> str:
    """Leaves a process behind."""
    script = "setsid sleep 600 </dev/null >/dev/null 2>&1 & echo $!"  # an orphan in a session of its own
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True).stdout.strip()

class Strange(BaseModel):
    """Its pattern takes longer than anybody waits for this value."""

    text: str = Field(json_schema_extra={"pattern": "^(a+)+$"})

@server.tool()
def strange() -> Strange:
    """Answers what its own schema does not hold."""
    return Strange(text="a" * 60 + "!")

if (here / "more").exists():
    server.add_tool(lambda: "x", name="more", description="More.")
print("hello, no message of the protocol", flush=True)
server.run("streamable-http", port=int(sys.argv[1])) if len(sys.argv) > 1 else server.run()
'''


def given(tmp_path: Path, **servers: dict[str, Any]) -> list[str]:
    (tmp_path / "server.py").write_text(SERVER)
    file = tmp_path / "servers.json"
    file.write_text(json.dumps({"mcpServers": servers}))
    return [str(file)]


def stdio(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {"command": sys.executable, "args": [str(tmp_path / "server.py")], **more}


def server_of(tools: Any) -> McpServer:
    (held,) = {tool.held for tool in tools.values()}
    return held


def box_of(tools: Any) -> Toolbox:
    return Toolbox(tools, {}, 20.0)


async def say(box: Toolbox, name: str, **arguments: Any) -> Any:
    answer = await box.call(ToolCall(name, arguments))
    return json.loads(answer.text) if answer.text.startswith("{") else answer


def _ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def gone(pid: int, within_s: float = 5.0) -> bool:
    until_s = time.monotonic() + within_s
    while not _ended(pid):
        if time.monotonic() > until_s:
            return False
        time.sleep(0.05)
    return True


def test_what_a_server_logs_is_kept_within_bounds_and_its_patterns_are_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(mcp, "MOST_LOG_BYTES", 100_000)
    tools = load_tools(given(tmp_path, s=stdio(tmp_path)))
    server, sizes = server_of(tools), []

    async def body() -> None:
        box = box_of(tools)
        assert (await say(box, "strange"))["text"].endswith("a!"), "what a server declares is not checked here"
        for _ in range(8):
            assert (await say(box, "talk")).text == "said"
            sizes.append(os.fstat(server._log.fileno()).st_size)

    asyncio.run(body())
    server.close()
    assert 100_000 < max(sizes) <= 200_000 and min(sizes[3:]) < 100_000, sizes


@pytest.mark.slow
def test_one_session_serves_all_until_it_dies_and_then_another(tmp_path):
    tools = load_tools(given(tmp_path, s=stdio(tmp_path, concurrency=3)))
    assert (
        list(tools) == ["add", "bump", "fail", "die", "talk", "hang", "nap", "child", "strange"]
        and tools["add"].limits.concurrency == 3
    )
    assert tools["add"].parameters["required"] == ["a", "b"]
    server, listed = server_of(tools), tools_hash(tools)

    async def body() -> int:
        a, b = box_of(tools), box_of(tools)
        assert (await say(a, "add", a=1, b=2)).text == "3"
        first, second = await say(a, "bump"), await say(b, "bump")
        assert (first["count"], second["count"], first["pid"]) == (1, 2, second["pid"])
        assert (await say(a, "fail")).error == "exception" and (await say(a, "add", a="x", b=1)).error == "arguments"
        slow = asyncio.ensure_future(say(b, "die"))
        with pytest.raises(ToolBroken, match="went away during the call"):
            await slow
        third = await say(b, "bump")
        assert third["count"] == 1 and gone(first["pid"])
        (tmp_path / "more").touch()
        os.kill(third["pid"], signal.SIGKILL)
        with pytest.raises(ToolBroken):
            await say(a, "bump")
        told = await say(a, "add", a=2, b=2)
        assert told.text == "4" and told.note.startswith("tools of s: "), "a change is an event"
        assert (await say(a, "add", a=2, b=2)).note == "" and "more" not in tools and tools_hash(tools) == listed
        assert await a.close() == [] and await b.close() == []
        return (await say(box_of(tools), "bump"))["pid"]

    pid = asyncio.run(body())
    server.close()
    assert gone(pid), "the servers of a run end with it"


def test_a_server_that_hangs_is_begun_anew(tmp_path):
    """Else every later call would be one more that gave no answer, to the end of the run."""
    tools = load_tools(given(tmp_path, s=stdio(tmp_path, timeout_s=2)))

    async def body() -> None:
        box = box_of(tools)
        before = (await say(box, "bump"))["pid"]
        assert (await say(box, "hang")).error == "timeout"
        until_s, after = time.monotonic() + 60, before
        while after == before:
            assert time.monotonic() < until_s
            with contextlib.suppress(ToolBroken, TypeError):
                after = (await say(box, "bump"))["pid"]
        assert gone(before, 20)
        await box.close()

    asyncio.run(body())
    server_of(tools).close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "stateful, down, own",
    [(False, "gone", {"timeout_s": 3}), *([(False, "hangs", {}), (True, "hangs", {})] if FULL_GRID else [])],
)
def test_a_server_that_is_down_is_no_answer_within_a_short_limit_either(tmp_path, stateful, down, own):
    """The limit is that of the tool, or of the run if the tool has none: the model would get an error in place of an
    answer."""
    gate = f'[ -e {tmp_path}/gone ] && exit 1; [ -e {tmp_path}/hangs ] && exec sleep 600; exec "$@"'
    command = ["-c", gate, "-", sys.executable, str(tmp_path / "server.py")]
    tools = load_tools(given(tmp_path, s={"command": "bash", "args": command, "stateful": stateful, **own}), 3.0)

    async def body() -> None:
        boxes = [Toolbox(tools, {}, 3.0) for _ in range(3)]
        if not stateful:
            os.kill((await say(boxes[0], "bump"))["pid"], signal.SIGKILL)
        (tmp_path / down).touch()
        lost: list[Any] = []
        while len(lost) < 9:  # the first may hear that it went away during the call
            lost += await asyncio.gather(*(say(box, "bump") for box in boxes), return_exceptions=True)
        assert [type(e) for e in lost] == [ToolBroken] * 9, lost
        (tmp_path / down).unlink()
        until_s, told = time.monotonic() + 60, lost[0]
        while not isinstance(told, dict):
            assert time.monotonic() < until_s, told
            (told,) = await asyncio.gather(say(boxes[0], "bump"), return_exceptions=True)

    asyncio.run(body())
    server_of(tools).close()


@pytest.mark.full("a server that hangs is begun anew")
def test_a_session_that_begins_slower_than_a_call_may_wait_is_the_next_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(mcp, "START_S", 60.0)
    command = ["-c", f'echo >>{tmp_path}/begun; sleep 4; exec "$@"', "-", sys.executable, str(tmp_path / "server.py")]
    tools = load_tools(given(tmp_path, s={"command": "bash", "args": command, "stateful": True}), 3.0)

    async def body() -> None:
        told: list[Any] = []
        until_s = time.monotonic() + 60
        while not told or not isinstance(told[-1], dict):
            assert time.monotonic() < until_s, told
            told += await asyncio.gather(say(Toolbox(tools, {}, 3.0), "bump"), return_exceptions=True)
        assert {type(e) for e in told[:-1]} == {ToolBroken}
        assert len((tmp_path / "begun").read_text()) <= 2 + len(told) // 4, "one at the start, one for all of them"

    asyncio.run(body())
    server_of(tools).close()


@pytest.mark.slow
def test_a_stateful_server_has_a_session_for_each_trajectory(tmp_path):
    tools = load_tools(given(tmp_path, s=stdio(tmp_path, stateful=True, tools=["bump"])))
    assert list(tools) == ["bump"]

    async def body() -> None:
        a, b = box_of(tools), box_of(tools)
        together = await asyncio.gather(say(a, "bump"), say(a, "bump"))
        assert {x["count"] for x in together} == {1, 2} and (await say(b, "bump"))["count"] == 1
        assert await a.close() == [] and gone(together[0]["pid"])
        other = (await say(b, "bump"))["pid"]
        os.kill(other, signal.SIGKILL)
        with pytest.raises(ToolBroken):
            await say(b, "bump")
        with pytest.raises(ToolBroken, match="has ended"):  # its state is lost: a new session has none
            await say(b, "bump")
        assert await b.close() == []

    asyncio.run(body())
    server_of(tools).close()


def once_there(entries: list[str]) -> dict[str, Tool]:
    """The tools of a server that was just started."""
    until_s = time.monotonic() + 30
    while True:
        try:
            return dict(load_tools(entries))
        except ValueError as e:
            assert time.monotonic() < until_s, e
            time.sleep(0.2)


@pytest.mark.full("one session serves all until it dies")
def test_over_http_as_many_calls_run_as_the_tool_takes(tmp_path):
    port = free_port()
    (tmp_path / "server.py").write_text(SERVER)
    with (tmp_path / "log").open("ab") as log:
        server = subprocess.Popen([sys.executable, str(tmp_path / "server.py"), str(port)], stdout=log, stderr=log)
    try:
        there = {"url": f"http://127.0.0.1:{port}/mcp", "concurrency": 130, "tools": ["nap"]}
        tools = once_there(given(tmp_path, s=there))

        async def body() -> list[Any]:
            return await asyncio.gather(*(say(box_of(tools), "nap") for _ in range(130)))

        answers = asyncio.run(body())
        assert max(int(a.text) for a in answers) > 110, "a pool of a hundred connections would hold the others back"
        server_of(tools).close()
    finally:
        server.kill()
        server.wait(10)


@pytest.mark.full("a server that hangs is begun anew")
def test_over_http_a_server_that_begins_anew_costs_calls(tmp_path):
    port = free_port()
    (tmp_path / "server.py").write_text(SERVER)

    def start() -> Any:
        log = (tmp_path / "log").open("ab")
        return subprocess.Popen([sys.executable, str(tmp_path / "server.py"), str(port)], stdout=log, stderr=log)

    server = start()
    try:
        tools = once_there(given(tmp_path, s={"url": f"http://127.0.0.1:{port}/mcp"}))

        async def body() -> None:
            nonlocal server
            box = box_of(tools)
            assert (await say(box, "add", a=1, b=2)).text == "3"
            with pytest.raises(ToolBroken, match="went away"):
                await say(box, "die")
            server.wait(10)
            began_s = time.monotonic()
            with pytest.raises(ToolBroken, match="MCP server s"):
                await say(box, "add", a=1, b=2)
            assert 4 < time.monotonic() - began_s < 15, "a call waits for the server, and not for ever"
            server, answered, broken = start(), None, 0
            while answered is None and broken < 5:
                try:
                    answered = await say(box, "add", a=1, b=2)
                except ToolBroken:
                    broken += 1
            assert answered is not None and answered.text == "3"
            server.kill()
            server.wait(10)
            server = start()  # the session is unknown to it
            done, broken = None, 0
            while done is None and broken < 5:
                try:
                    done = await say(box, "add", a=1, b=2)
                except ToolBroken:
                    broken += 1
            assert done is not None and done.text == "3"

        asyncio.run(body())
    finally:
        server.kill()
        server.wait(10)
        if tools:
            server_of(tools).close()


def test_servers_end_with_the_process_that_started_them(tmp_path):
    """Killed, and with what the server started, in a session of its own."""
    code = f"""
import asyncio, sys
sys.path[:0] = {[str(folder) for folder in Path(__file__).parents[:2]]!r}
from test_mcp import box_of, say
from verl.agent_loop.load_tools import load_tools
tools = load_tools([{given(tmp_path, s=stdio(tmp_path))[0]!r}])
async def body():
    print((await say(box_of(tools), "bump"))["pid"], (await say(box_of(tools), "child")).text, flush=True)
    await asyncio.sleep(60)
asyncio.run(body())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2 and not any(gone(pid, 0.0) for pid in pids)
        parent.kill()
    assert all(map(gone, pids))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"s": {"command": "/no/such/server"}}, "No such file"),
    ({"s": {"url": "http://127.0.0.1:9/mcp"}}, "attempts failed"),
    ({"s": {"command": "bash", "args": ["-c", "echo hello; echo oops >&2; sleep 60"]}}, "no answer in .*oops"),
    ({"s": {"command": "a", "url": "b"}}, "give command"),
    ({"s": {"command": "a", "shell": True}}, "shell: unknown"),
    ({"s": 3}, "mcpServers"),
]


@pytest.mark.parametrize(("servers", "said"), BAD, ids=[said for _, said in BAD])
def test_a_server_that_is_not_there_is_an_error_within_ten_seconds(tmp_path, servers, said):
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(ValueError, match=said):
        load_tools(given(tmp_path, **servers))
    assert mcp.START_S + 2 < 10, "2 s for one that says nothing to end"
    assert set(psutil.Process().children(recursive=True)) <= before


def test_two_tools_with_one_name_and_tools_that_are_not_there(tmp_path):
    with pytest.raises(ValueError, match="two tools are called 'add'"):
        load_tools(given(tmp_path, s=stdio(tmp_path, tools=["add"]), t=stdio(tmp_path, tools=["add"])))
    with pytest.raises(ValueError, match="s has no tool nothing; it has add"):
        load_tools(given(tmp_path, s=stdio(tmp_path, tools=["nothing"])))
