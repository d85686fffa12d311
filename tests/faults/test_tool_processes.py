"""Tools in processes of their own: whatever a call does ends that call, and the run's event loop never waits."""

from __future__ import annotations

import asyncio
import io
import json
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from PIL import Image

from verl.agent_loop.load_tools import load_tools
from verl.agent_loop.tools import Tool, Toolbox, close_tools
from verl.chat.parsing import ToolCall
from verl.tools import ToolBroken
from verl.tools.answers import ToolAnswer
from verl.tools.function_tool import ToolLimits

TOOLS = '''
import os, re, signal, sys
from PIL import Image

from verl.tools import ToolBroken, ToolResponse, function_tool


class IndexGone(ToolBroken, TimeoutError):
    pass


@function_tool(processes=2, timeout_s=3)
def act(what: str, n: int = 1) -> str:
    """
    Do what is said.

    Args:
        what: What.
        n: A number.
    """
    if what == "hold":  # one step of the interpreter, which keeps its lock
        return str(len(str(9**9**9)))
    if what == "regex":
        return str(re.match("(a+)+$", "a" * 60 + "!"))
    if what == "raise":
        raise KeyError("gone")
    if what == "exit":
        sys.exit(3)
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "eat":
        return str(len(bytearray(8 << 30)))
    if what == "broken":
        raise ToolBroken("the index is not there")
    if what == "lines":
        raise ToolBroken("the index is not there:\\n  no host\\n")
    if what == "long":
        raise ToolBroken("the index is not there: " + "x" * 10_000)
    if what == "kind":
        raise IndexGone("the index is not there")
    if what == "note":
        gone = ToolBroken("the index is not there")
        gone.add_note("while it was read")
        raise gone
    if what == "image":
        return ToolResponse(text="see", video=[1])
    if what == "drawing":
        return Image.new("L", (n, 8))
    if what == "reward":
        return f"got {n}", 0.5 * n, {}
    return {"pid": os.getpid(), "n": n}
'''


class Acts(NamedTuple):
    tools: dict[str, Tool]
    loop: asyncio.Runner


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Acts]:
    path = tmp_path_factory.mktemp("tools") / "acts.py"
    path.write_text(TOOLS)
    found = load_tools([str(path)])
    with asyncio.Runner() as loop:  # a tool belongs to one
        yield Acts(dict(found), loop)
    close_tools(found)


def call(acts: Acts, *asked: dict[str, object]) -> tuple[list[ToolAnswer], float]:
    """The answers of calls made together, and the longest time that the event loop stood still."""

    async def beat() -> float:
        worst_s, last_s = 0.0, time.monotonic()
        while True:
            try:
                await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                return worst_s
            worst_s, last_s = max(worst_s, time.monotonic() - last_s), time.monotonic()

    async def play() -> tuple[list[ToolAnswer], float]:
        box, pulse = Toolbox(acts.tools, {}, 30.0), asyncio.create_task(beat())
        await asyncio.sleep(0)
        found = await asyncio.gather(*(box.call(ToolCall("act", dict(given))) for given in asked))
        pulse.cancel()
        return found, await pulse

    return acts.loop.run(play())


def test_calls_run_elsewhere_and_their_rewards_come_along(tools):
    found, _ = call(tools, {"what": "say", "n": 7}, {"what": "reward", "n": 3}, {"what": "say"})
    assert [a.error for a in found] == ["", "", ""] and (found[1].text, found[1].reward) == ("got 3", 1.5)
    said = [json.loads(found[i].text) for i in (0, 2)]
    assert [one["n"] for one in said] == [7, 1] and not {one["pid"] for one in said} & {os.getpid()}


@pytest.mark.parametrize("what", ["hold", "regex"])
def test_what_holds_the_interpreter_is_ended_at_its_deadline(tools, what):
    found, stood_still_s = call(tools, {"what": what}, {"what": "say", "n": 2})
    assert found[0].error == "timeout" and found[0].text == "Error: act gave no answer in 3 s"
    assert json.loads(found[1].text)["n"] == 2 and stood_still_s < 30, "it would hold the loop for good"


def test_whatever_a_call_does_is_an_answer(tools):
    whats = ("raise", "exit", "die", "eat", "image")
    found, _ = call(tools, *({"what": what} for what in whats), {"what": "say"})
    *failed, last = found
    assert [a.error for a in failed] == ["exception"] * len(whats) and last.error == ""
    for answer, said in zip(failed, ("KeyError: 'gone'", "SystemExit: 3", "(crash)", "(memory)", "returned videos")):
        assert answer.text.startswith("Error: act failed: ") and said in answer.text, answer


def test_a_call_may_return_an_image(tools):
    (answer,), _ = call(tools, {"what": "drawing", "n": 12})
    (part,) = answer.parts
    assert Image.open(io.BytesIO(part.item)).size == (12, 8) and answer.text == ""


@pytest.mark.parametrize("what", ["broken", "lines", "long", "kind", "note"])
def test_what_a_tool_needs_is_gone_however_it_says_so(tools, what):
    with pytest.raises(ToolBroken, match="^the index is not there"):
        call(tools, {"what": what})


@pytest.mark.full("its deadline is tested with a call")
def test_the_start_of_a_worker_is_no_part_of_a_calls_time(tmp_path):
    path = tmp_path / "slow.py"
    one = TOOLS.replace("processes=2, timeout_s=3", "processes=1, timeout_s=3")
    path.write_text(f"import time\ntime.sleep(4)\n{one}")
    found = load_tools([str(path)])
    with asyncio.Runner() as loop:
        answers, _ = call(Acts(dict(found), loop), *({"what": what} for what in ("regex", "say", "say")))
    close_tools(found)
    assert [a.error for a in answers] == ["timeout", "", ""], answers


def test_what_cannot_be_loaded_there_is_said_at_the_start(tmp_path):
    path = tmp_path / "once.py"
    marker = tmp_path / "loaded"
    more = f"if os.path.exists({str(marker)!r}):\n    raise OSError('only once')\nopen({str(marker)!r}, 'w').close()\n"
    path.write_text(TOOLS + more)
    with pytest.raises(ValueError, match="only once"):
        load_tools([str(path)])


def test_one_that_cannot_be_closed_keeps_no_other_open():
    closed = []

    class Stays:
        def close(self) -> None:
            closed.append(self)
            raise TimeoutError("its processes did not end")

    tools = {name: Tool(name, {}, ToolLimits(), held=Stays()) for name in "abc"}
    with pytest.raises(TimeoutError, match="did not end"):
        close_tools(tools)
    assert len(closed) == 3
