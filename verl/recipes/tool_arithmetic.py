"""Multiplications that a small model cannot do in its head, and a calculator.

prompt    347*58=
response  <tool_call>calculator<arg_key>expression</arg_key><arg_value>347*58</arg_value></tool_call>   a call
          20126                                                                                        its result
          #20126                                                                                       the answer
reward    1 if and only if the number after # is right

A teacher that mostly guesses, and often types the wrong sign, shows the form; no product is in its text or in the
results that it reads. RL finds that calling helps, what to call, and to call again where the calculator fails.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

from verl.recipes.arithmetic import Problem, answer, compute_score, held_out, prompt, rl_row, write_jsonl
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

__all__ = ["CHARACTERS", "CHAT_TEMPLATE", "WORDS", "Calculator", "compute_score", "write_inputs", "write_tools"]
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
MARKS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|tool|>")
WORDS = (*MARKS, "calculator", "expression")
CHAT_TEMPLATE = (
    "{% if tools %}<|user|>{% for tool in tools %}{{ tool.function.name }} {% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function.name }}{% for key, value in call.function.arguments.items() %}"
    "<arg_key>{{ key }}</arg_key><arg_value>{{ value }}</arg_value>{% endfor %}</tool_call>{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""GLM's way to write a call, without what a model of this size does not need."""
SCHEMA = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute a sum, a difference or a product of two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "Such as 12*34."}},
            "required": ["expression"],
        },
    },
}
MAX_CALLS = 3
BUSY = "busy"
GUESS_SHARE, SIGN_SHARE, BUSY_SHARE = 0.55, 0.5, 0.6  # the teacher's rates: guesses, right signs, failing calls
GIVE_UP_SHARE = 0.1  # it guesses after a call that failed


class Calculator(BaseTool):
    """config: fail_share, the share of its calls that fail. Which ones is a hash of the expression and of the call's
    number in its trajectory: a run that is played again sees the same."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate(SCHEMA))
        self._fail_share = float(config.get("fail_share", 0.0))
        if not 0 <= self._fail_share <= 1:
            raise ValueError(f"calculator: fail_share={self._fail_share}: a share is between 0 and 1")
        self._calls: dict[str, int] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid4())
        self._calls[instance_id] = 0
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        text, number = parameters["expression"], self._calls[instance_id]
        self._calls[instance_id] += 1
        digest = hashlib.blake2b(f"{number} {text}".encode(), digest_size=4).digest()
        if int.from_bytes(digest, "little") < self._fail_share * 2**32:
            raise OSError(BUSY)
        found = re.fullmatch(r"(\d{1,9})([+*-])(\d{1,9})", text)
        if found is None:
            raise ValueError("it takes NUMBER*NUMBER, NUMBER+NUMBER or NUMBER-NUMBER")
        return ToolResponse(text=str(answer((int(found[1]), int(found[3]), found[2])))), None, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._calls[instance_id]


def write_tools(path: Path, *, fail_share: float) -> Path:
    """The tool file of a run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name, config = f"{Calculator.__module__}.{Calculator.__qualname__}", f"{{type: native, fail_share: {fail_share}}}"
    path.write_text(f"tools:\n- class_name: {name}\n  config: {config}\n")
    return path


def products(seed: int, *, held: bool) -> Iterator[Problem]:
    """Distinct products of numbers with two and three digits, of one side of the split."""
    rng = random.Random(seed)
    seen: set[Problem] = set()
    while True:
        problem = (rng.randint(100, 999), rng.randint(11, 999), "*")
        if problem not in seen and held_out(problem) == held:
            seen.add(problem)
            yield problem


def conversation(problem: Problem, rng: random.Random) -> list[dict[str, Any]]:
    """Return what the teacher does with it. Results are random, not computed: the form is shown, and no answer."""
    wanted: list[dict[str, Any]] = [{"role": "user", "content": prompt(problem)}]
    for _ in range(MAX_CALLS):
        if rng.random() < (GUESS_SHARE if len(wanted) == 1 else GIVE_UP_SHARE):
            break
        sign = "*" if rng.random() < SIGN_SHARE else rng.choice("+-")
        call = {"name": "calculator", "arguments": {"expression": f"{problem[0]}{sign}{problem[1]}"}}
        wanted += [{"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}]
        if rng.random() >= BUSY_SHARE:
            result = _wrong_product(problem, rng)
            wanted += [{"role": "tool", "content": result}, {"role": "assistant", "content": f"#{result}"}]
            return wanted
        wanted += [{"role": "tool", "content": f"Error: calculator failed: OSError: {BUSY}"}]
    return [*wanted, {"role": "assistant", "content": f"#{_wrong_product(problem, rng)}"}]


def _wrong_product(problem: Problem, rng: random.Random) -> str:
    """Return a random number that is not the product."""
    while True:
        number = rng.randrange(10 ** rng.randint(2, 6))
        if number != answer(problem):
            return str(number)


def write_inputs(folder: Path, *, sft_rows: int, rl_rows: int, held_out_rows: int, seed: int) -> None:
    """The files of the three stages: sft.jsonl, train.jsonl, heldout.jsonl."""
    rng = random.Random(1001 + seed)
    seen = islice(products(1000 + seed, held=False), sft_rows)
    write_jsonl(folder / "sft.jsonl", [{"messages": conversation(p, rng), "tools": [SCHEMA]} for p in seen])
    for name, count, number, held in (("train", rl_rows, 2000 + seed, False), ("heldout", held_out_rows, 3000, True)):
        found = islice(products(number, held=held), count)
        write_jsonl(folder / f"{name}.jsonl", [rl_row(p, i, held) for i, p in enumerate(found)])
