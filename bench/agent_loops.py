"""The tool loop with a tool of the bench and a model that answers at once: in this process, or in one of its own."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np
from tools import hermes_tokenizer

from verl.agent_loop.base import AgentLoopBase, ServerManager, sampling_params_of
from verl.agent_loop.load_tools import function_as_tool
from verl.agent_loop.registry import Loops
from verl.agent_loop.runner import LoopRunner, hosted_loops
from verl.agent_loop.sections import AgentConfig
from verl.agent_loop.threads import Places
from verl.agent_loop.tool_agent import ToolAgentLoop, ToolKit
from verl.agent_loop.tools import Tool
from verl.chat.bridge import bridge_of, plain_text
from verl.chat.parsing import FORMATS, TurnParser
from verl.chat.template import Renderer, audit_template
from verl.data.formats import Players
from verl.rollout.base import Completion, GenerateRequest
from verl.types import Sampling, Task

ANSWER = '<tool_call>\n{{"name": "{name}", "arguments": {{"n": {n}}}}}\n</tool_call>'
ASKED = {"role": "user", "content": "?"}
LONG_S, TICK_S = 20.0, 0.005
PLACES = 2_000  # of a tool at once
HERE, BESIDE = "in the driver", "in its own process"


async def look(n: int) -> str:
    """
    Look something up.

    Args:
        n: Its number.
    """
    return str(n)


async def slow(n: int) -> str:
    """
    Think.

    Args:
        n: A number.
    """
    await asyncio.sleep(random.expovariate(1 / LONG_S))
    return str(n)


class Says:
    """A model that answers at once: a call of the tool each turn, then a word."""

    def __init__(self, tokenizer: Any, tool: str, turns: int) -> None:
        texts = [ANSWER.format(name=tool, n=n) for n in range(turns - 1)] + ["done"]
        self._said = [tokenizer(t + "<|im_end|>", add_special_tokens=False)["input_ids"] for t in texts]

    async def generate(self, request: GenerateRequest) -> Completion:
        ids = np.array(self._said.pop(0), np.int64)
        return Completion(request.id, ids, np.zeros(len(ids), np.float32), ((0, 0, len(ids)),), "eos")


def kit_of(tool: Tool) -> tuple[Any, ToolKit]:
    tokenizer = hermes_tokenizer()
    audit = audit_template(tokenizer)
    object.__setattr__(tool, "places", Places(PLACES))
    return tokenizer, ToolKit(
        tools={tool.name: tool},
        parser=TurnParser(FORMATS["hermes"]),
        renderer=Renderer(tokenizer, {}, [dict(tool.schema)]),
        audit=audit,
        plain=plain_text(tokenizer),
        bridge=bridge_of(tokenizer, audit, {}),
        ends=frozenset([tokenizer.eos_token_id]),
        limits=AgentConfig(),
    )


def loops_of(given: tuple[str, Path], start: int) -> Loops:
    """given: the tool's name, and where the lags [ms] of the event loop that plays are written at the end."""
    name, told = given
    random.seed(0)
    tokenizer, kit = kit_of(function_as_tool({"look": look, "slow": slow}[name]))
    lags_ms: list[float] = []

    async def tick() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(TICK_S)
            lags_ms.append(1e3 * (time.perf_counter() - began - TICK_S))

    ticking = asyncio.create_task(tick()) if name == "slow" else None

    def make(manager: ServerManager, task: Task) -> AgentLoopBase:
        return ToolAgentLoop(None, manager, tokenizer, kit=kit)

    async def close() -> None:
        if ticking is not None:
            ticking.cancel()
            told.write_text(json.dumps(lags_ms))

    return Loops(players=Players("tool_agent", ("tool_agent",)), make=make, close=close)


@asynccontextmanager
async def opened(where: str, tool: str, told: Path) -> AsyncIterator[Loops]:
    given = (tool, told)
    loops = (
        loops_of(given, 0)
        if where == HERE
        else await hosted_loops(LoopRunner(loops_of, given, silent_s=60), None, None)
    )
    try:
        yield loops
    finally:
        await loops.close()


def prompt_of(tokens: int) -> np.ndarray:
    return np.resize(Renderer(hermes_tokenizer(), {}, []).ids([ASKED], prompt=True), tokens)


async def play(loops: Loops, said: Says, prompt: np.ndarray) -> None:
    sampling = Sampling(max_tokens=100_000)
    manager = ServerManager(said, sampling, seed_parts=("s",))
    task = Task(task_id="t", index=0, messages=(ASKED,), prompt_ids=prompt)
    row = {"tools": (), "extra_info": {}, "raw_prompt": [ASKED]}
    await loops.make(manager, task).run(sampling_params_of(sampling), prompt_ids=prompt, request_id="r", **row)
