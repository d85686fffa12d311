"""Random conversations with every template that can be had: ours, which imitate published ones, the files of trl
(tests/data/trl_templates) and, in test_renderers.py, what the package renderers writes. Each token that the loop plays
has an owner, whatever the template does.

The quick suite plays the first hundred with each template (25 of the package's, which renders slowly), FULL_GRID=1 the
first thousand, three minutes of processor; CONVERSATIONS=10000 sets another number, and takes half an hour."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each import FULL_GRID, matrix
from fakes import FakeEngine
from test_chat import TEMPLATES
from tools import HERMES, REWRITING, hermes_tokenizer

from verl.agent_loop.base import ServerManager, sampling_params_of
from verl.agent_loop.load_tools import function_as_tool
from verl.agent_loop.registry import load_loops
from verl.agent_loop.sections import AgentConfig
from verl.agent_loop.tool_agent import ToolAgentLoop, ToolKit
from verl.chat.bridge import bridge_of, plain_text
from verl.chat.parsing import FORMATS, TurnParser
from verl.chat.template import Renderer, RenderError, TemplateAudit, audit_template, is_prefix
from verl.config.schema import Config
from verl.config.tree import changed
from verl.driver.checked import check_output
from verl.rollout.base import Completion, GenerateRequest
from verl.tools import function_tool
from verl.types import Sampling

FILES = {path.stem: path for path in sorted((Path(__file__).parents[1] / "data" / "trl_templates").glob("*.jinja"))}
MARKS = re.compile(r"<[|｜][^|｜>\s'\"]{1,40}[|｜]>|</?\|?[a-zA-Z_]\w*\|?>|\[/?[A-Z_]+\]")
ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<｜end▁of▁sentence｜>",
    "<|end|>",
)
PACKAGE = "renderers: "
SOURCES = {name: path.read_text() for name, path in FILES.items()}
SOURCES |= {f"ours: {name}": template for name, (template, _, _) in TEMPLATES.items()}
SOURCES |= {"ours: hermes": HERMES, "ours: rewriting": REWRITING}


@function_tool
async def multiply(a: int, b: int) -> str:
    """
    Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return str(a * b)


TOOL = function_as_tool(multiply)


def written(*texts: str) -> list[str]:
    """For tokenizers: what most of a prompt is, texts and the tool, in few tokens, for that is what rendering costs."""
    return [*texts, *[json.dumps(TOOL.schema)] * 4]


@cache
def tokenizer_for(name: str) -> Any:
    """Bytes, and every mark that the template writes, as one token each."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if name in ("ours: hermes", "ours: rewriting"):
        return hermes_tokenizer(SOURCES[name])
    if name.startswith(PACKAGE):
        from test_renderers import family

        return family(name.removeprefix(PACKAGE)).tokenizer
    template, eos, marks = TEMPLATES.get(name.removeprefix("ours: "), (SOURCES[name], "", ()))
    if name in FILES:
        marks = tuple(dict.fromkeys(["<bos>", "</s>", *MARKS.findall(template)]))
        eos = next((end for end in ENDS if end in marks), "</s>")
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=list(marks), initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(["user assistant system tool It is 42.", *written(template)], trainer)
    bos = "<bos>" if "<bos>" in marks else None
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, bos_token=bos)
    tokenizer.chat_template = template
    return tokenizer


@cache
def audited(name: str) -> TemplateAudit | None:
    """None: the template refuses a question and an answer, and with it every run."""
    try:
        return audit_template(tokenizer_for(name))
    except RenderError:
        return None


WITHOUT = {  # tools, or no template of conversations at all
    *("cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gemma3", "lfm2", "llama3", "llava_next"),
    *("phi3", "ours: chatml", "ours: llama3", "ours: llama2", "ours: gemma", "ours: mistral", "ours: phi", "ours: r1"),
    *("ours: zephyr", "ours: command_r", "ours: quickstart", "ours: stripping", "ours: plain_text"),
}
WITH_TOOLS = [name for name in SOURCES if name not in WITHOUT]
REWRITES = {  # new messages change the text before them, or turns have no end of their own: a branch per turn
    *("gemma4", "gemma4_v5", "glm4moe", "gptoss", "llama3_1", "llama3_2", "muse_glimmer", "ours: rewriting")
}


ONE_CALL = {"gptoss", "llama3_1", "llama3_2"}  # of a turn: they refuse more, or show one


@cache
def kit_for(name: str) -> ToolKit:
    tokenizer, audit = tokenizer_for(name), audited(name)
    assert audit is not None
    return ToolKit(
        tools={"multiply": TOOL},
        parser=TurnParser(FORMATS["hermes"]),  # how calls are written is another matter: tests/unit/test_parsing.py
        renderer=Renderer(tokenizer, {}, [dict(TOOL.schema)]),
        plain=plain_text(tokenizer),
        bridge=bridge_of(tokenizer, audit, {}),
        audit=audit,
        ends=frozenset([end_of(name)]),
        limits=AgentConfig(),
    )


def end_of(name: str) -> int:
    audit = audited(name)
    return audit.ends_turn_with[-1] if audit and audit.ends_turn_with else int(tokenizer_for(name).eos_token_id)


@pytest.mark.slow
def test_which_templates_of_trl_go_on_which_branch_and_which_are_refused(tmp_path):
    audits = {name: audited(name) for name in SOURCES}  # here: each worker of the tests would do it to collect them
    able = {name for name, found in audits.items() if found and found.supports_tools and found.supports_tool_calls}
    assert audits.keys() - able == WITHOUT
    assert {name for name in WITH_TOOLS if kit_for(name).bridge is None} == REWRITES
    assert {name for name in REWRITES if not kit_for(name).audit.supports_parallel_calls} == ONE_CALL
    (tmp_path / "mine.py").write_text(
        "from verl.tools import function_tool\n\n\n@function_tool\ndef add(a: int) -> int:\n"
        '    """\n    Add.\n\n    Args:\n        a: One.\n    """\n    return a\n'
    )
    config = Config()
    config = changed(
        config, {"agent.loop": "tool_agent", "agent.tools": [str(tmp_path / "mine.py")], "agent.format": "hermes"}
    )
    for name in sorted(WITHOUT):
        tokenizer = tokenizer_for(name)
        with pytest.raises(ValueError, match="template"):
            load_loops(config, tokenizer, (tokenizer.eos_token_id,))


class Says(FakeEngine):
    """A random turn with calls, so many times, then one without; each ended as the template ends turns."""

    def __init__(self, tokenizer: Any, end: int, rng: random.Random, turns: int) -> None:
        super().__init__()
        self.version, self._tokenizer, self._end, self._rng = 0, tokenizer, end, rng
        self._turns = turns
        self.said: list[tuple[list[int], list[int], list[dict[str, int]]]] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        text, calls = words(self._rng), list[dict[str, int]]()
        if len(self.said) < self._turns:
            many = self._rng.choice((1, 1, 2))
            calls = [{"a": self._rng.randint(-9, 9), "b": len(self.said)} for _ in range(many)]
            lines = (f'<tool_call>\n{{"name": "multiply", "arguments": {json.dumps(c)}}}\n</tool_call>' for c in calls)
            text += "\n".join(lines)
        ids = [*self._tokenizer(text, add_special_tokens=False)["input_ids"], self._end]
        self.said.append((request.prompt_ids.tolist(), ids, calls))
        logprobs = np.full(len(ids), -0.5, np.float32)
        return Completion(request.id, np.array(ids, np.int64), logprobs, ((0, 0, len(ids)),), "eos")


def words(rng: random.Random) -> str:
    """Text of no template's: no marks, white space at its ends as well."""
    return "".join(rng.choices("ab 0.\n<|>é中🙂{}\"'\\/[]", k=rng.randrange(12)))


def history(rng: random.Random, audit: TemplateAudit) -> list[dict[str, Any]]:
    """Return the beginning of a row: a question, sometimes after a system message and earlier turns."""
    found: list[dict[str, Any]] = []
    if audit.supports_system and rng.random() < 0.3:
        found.append({"role": "system", "content": words(rng)})
    for _ in range(rng.choice((0, 0, 1, 2))):
        found += [{"role": "user", "content": words(rng)}, {"role": "assistant", "content": words(rng)}]
    return [*found, {"role": "user", "content": f"q{words(rng)}"}]


async def play(name: str, rng: random.Random) -> None:
    kit, tokenizer, audit = kit_for(name), tokenizer_for(name), audited(name)
    assert audit is not None
    asked = history(rng, audit)
    turns = rng.randint(1, 3)
    engine, sampling = Says(tokenizer, end_of(name), rng, turns), Sampling(max_tokens=100_000)
    manager = ServerManager(engine, sampling, seed_parts=("s",), max_turns=None, credits_turns=True)
    prompt = kit.renderer.ids(asked, prompt=True)

    loop = ToolAgentLoop(None, manager, tokenizer, kit=kit)
    row = {"tools": (), "extra_info": {}, "raw_prompt": asked}
    out = await loop.run(sampling_params_of(sampling), prompt_ids=prompt, request_id="r", **row)
    found = check_output(out, manager, sampling.max_tokens)  # ValueError for a token without an owner
    rows = [found.segments, *found.branches]
    assert len(engine.said) == turns + 1 and found.discarded == 0
    sampled = [s.ids.tolist() for row in rows for s in row if s.source == "sampled"]
    assert sampled == [ids for _, ids, _ in engine.said], "each turn as sampled, once"
    whole = [np.concatenate([s.ids for s in row]).tolist() for row in rows]
    for before, ids, _ in engine.said:
        assert any(row[: len(before) + len(ids)] == before + ids for row in whole), "after what it was sampled after"
    if kit.bridge is None:
        assert len(rows) == turns + 1, "a branch per turn"
        if not audit.supports_parallel_calls:
            shown = [tokenizer.decode(before) for before, _, _ in engine.said[1:]]
            many = [len(calls) == 2 for _, _, calls in engine.said[:-1]]
            assert [text.count("2 calls in one turn") for text in shown] == list(itertools.accumulate(many))
            assert manager.counts["tool_calls"] == many.count(False)
        return
    assert len(rows) == 1
    runs = itertools.groupby(rows[0], key=lambda s: s.source)  # a result has segments of its own in what was added
    env = [[int(i) for s in run for i in s.ids] for source, run in runs if source == "env"]
    assert len(env) == turns
    messages, shown, at = list(asked), rng.randrange(turns), 0
    for _, _, calls in engine.said[: shown + 1]:
        at += len(calls)
        messages += [spoken(rng, calls), *(result(call, at, k) for k, call in enumerate(calls))]
    compare(name, messages, len(engine.said[shown][2]), env[shown])


def spoken(rng: random.Random, calls: list[dict[str, int]]) -> dict[str, Any]:
    """A turn with as many calls, as a message."""
    made = [{"name": "multiply", "arguments": arguments} for arguments in calls]
    listed = [{"id": f"call{k:05d}", "type": "function", "function": function} for k, function in enumerate(made)]
    return {"role": "assistant", "content": words(rng), "tool_calls": listed}


def result(call: dict[str, int], at: int, k: int) -> dict[str, Any]:
    named = {"role": "tool", "name": "multiply", "tool_call_id": f"call{at:03d}{k:02d}"}
    return named | {"content": str(call["a"] * call["b"])}


def compare(name: str, messages: list[dict[str, Any]], new: int, env: list[int]) -> None:
    """Assert that the ids that the loop added for the last `new` messages are those that the template writes for them.
    Any one turn of a conversation is compared, since rendering all earlier messages takes most of the time."""
    audit, shown = audited(name), Renderer(tokenizer_for(name), {}, kit_for(name).renderer.tools)
    assert audit is not None
    head, full = shown.ids(messages[:-new], prompt=False), shown.ids(messages, prompt=True)
    head = head[: len(head) - len(audit.trailing_ids)]
    assert full[len(full) - len(env) :].tolist() == env
    assert full[len(full) - len(env) - 1] == head[-1], "what ends the turn stands before them"
    if is_prefix(head, full):
        assert full[len(head) :].tolist() == env, "all that came after the turn"


CASES = int(os.environ.get("CONVERSATIONS", 1000 if FULL_GRID else 0))  # 0: of the quick suite


@matrix("name", WITH_TOOLS, quick=WITH_TOOLS[::4])
def test_conversations_are_owned_token_for_token(name):
    play_cases(name, CASES or 100)


def play_cases(name: str, cases: int) -> None:
    async def all_of_them() -> None:
        for seed in range(cases):
            try:
                await play(name, random.Random(f"{name} {seed}"))
            except Exception as e:
                e.add_note(f"conversation {seed} with {name}")
                raise

    asyncio.run(all_of_them())
