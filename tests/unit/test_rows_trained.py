"""Random rows in every public spelling with every template: the trained text is that of a plain reading of the row, and
the rest is context, or the row is refused with its place.

The quick suite reads a few rows with some templates, FULL_GRID=1 200 rows with each; ROWS=1000 sets another number.
"""

from __future__ import annotations

import json
import os
import random
import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from each import FULL_GRID
from test_bridge_templates import SOURCES, audited, tokenizer_for

from verl.chat.template import RowRefused
from verl.config.schema import DataConfig
from verl.data.files import RawRow
from verl.data.preference import PairJob
from verl.data.render import ConversationJob, PromptJob, RowCounts

QUICK = ("qwen2_5", "qwen3", "qwen3_8", "deepseekv3", "gptoss", "llama3_1", "gemma4_v5", "llava_next", "ours: r1")
NAMES = [name for name in SOURCES if name in QUICK or FULL_GRID]
ROWS = int(os.environ.get("ROWS", 200 if FULL_GRID else 12))
OPENS = ("deepseekv3", "deepseek_r1_distill", "ours: r1")  # `<think>` in the prompt, and look for it in the content
WORD = re.compile(r"w\d+x")
MARKS = (("weight", 0, 1), ("train", False, True), ("loss_mask", 0, 1), ("masked", True, False), ("trainable", 0, 1))
NAMES_OF = {
    "user": ("human", "user", "Human"),
    "assistant": ("gpt", "assistant", "chatgpt", "GPT"),
    "tool": ("observation", "tool", "function"),
    "system": ("system",),
    "developer": ("developer",),
}


@dataclass
class Turn:
    """A message as it is meant. thought: words that templates may drop of turns that are not trained."""

    role: str
    said: list[str] = field(default_factory=list)
    thought: list[str] = field(default_factory=list)
    called: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    in_content: bool = False
    mark: int | None = None

    @property
    def words(self) -> set[str]:
        return {*self.said, *WORD.findall(json.dumps(self.called))}


class Writer:
    """Makes a row and knows what it means."""

    def __init__(self, rng: random.Random, name: str) -> None:
        self.rng, self.count, self.opens = rng, 0, name in OPENS

    def words(self, most: int = 3) -> list[str]:
        n = self.rng.randint(1, most)
        self.count += n
        return [f"w{k}x" for k in range(self.count - n, self.count)]

    def turns(self) -> list[Turn]:
        rng = self.rng
        found = [Turn(rng.choice(("system", "system", "developer")), self.words())] if rng.random() < 0.25 else []
        for _ in range(rng.randint(1, 3)):
            found.append(Turn("user", self.words()))
            if rng.random() < 0.25:
                for _ in range(rng.choice((1, 1, 2))):
                    many = rng.choice((1, 1, 1, 2))
                    call = Turn("assistant", self.words() if rng.random() < 0.3 else [])
                    call.called = [("lookup", {"city": f'{self.words(1)[0]} "é\n', "n": 3}) for _ in range(many)]
                    call.thought = self.words() if rng.random() < 0.2 else []
                    found += [call, *(Turn("tool", self.words()) for _ in range(many))]
            answer = Turn("assistant", self.words())
            if rng.random() < 0.25 or self.opens:
                answer.thought, answer.in_content = self.words(), rng.random() < 0.5 or self.opens
            found.append(answer)
        if rng.random() < 0.3:
            for turn in found:
                if turn.role == "assistant":
                    turn.mark = rng.choice((0, 1, None))
        return found

    def text(self, words: list[str]) -> str:
        return self.rng.choice((" ", ", ", "\n", ' {} "')).join(words)

    def content(self, turn: Turn) -> Any:
        text = self.text(turn.said) if turn.said else ""
        if turn.thought and turn.in_content:
            text = f"<think>\n{self.text(turn.thought)}\n</think>\n\n{text}"
        if not text and turn.called:
            return self.rng.choice(("", None))
        if self.rng.random() < 0.25:
            at = self.rng.randrange(len(text) + 1)
            return [{"type": "text", "text": piece} for piece in (text[:at], text[at:])]
        return text

    def message(self, turn: Turn, share: bool) -> dict[str, Any]:
        rng = self.rng
        made: dict[str, Any] = {"role": turn.role, "content": self.content(turn)}
        if turn.role == "tool" and rng.random() < 0.5:
            made |= {"name": "lookup", "tool_call_id": "abcdef123"}
        if turn.thought and not turn.in_content:
            made[rng.choice(("reasoning_content", "thinking", "reasoning"))] = self.text(turn.thought)
        if turn.mark is not None:
            key, off, on = rng.choice(MARKS)
            made[key] = on if turn.mark else off
        if rng.random() < 0.3:
            made |= {"tool_calls": None, "weight": made.get("weight"), "audio": None}
        if turn.called:
            self.calls(made, turn, share)
        if share:
            made["from"] = rng.choice(NAMES_OF[turn.role]) if "from" not in made else made["from"]
            made["value"] = made.pop("content")
            del made["role"]
        elif rng.random() < 0.1:
            made["role"] = rng.choice((made["role"].upper(), made["role"].capitalize()))
        return made

    def calls(self, made: dict[str, Any], turn: Turn, share: bool) -> None:
        rng = self.rng
        listed = []
        for name, arguments in turn.called:
            given: Any = {**arguments, "other": None} if rng.random() < 0.3 else arguments
            given = json.dumps(arguments) if rng.random() < 0.4 else given
            listed.append({"name": name, "arguments": given})
        if share and not turn.said:
            made["from"], one = "function_call", listed if len(listed) > 1 or rng.random() < 0.5 else listed[0]
            made["content"] = json.dumps(one)
        elif len(listed) == 1 and rng.random() < 0.3:
            made["function_call"] = listed[0]
        else:
            ids = [{"id": "abcdef123", "type": "function"} if rng.random() < 0.7 else {} for _ in listed]
            made["tool_calls"] = [{**i, "function": call} for i, call in zip(ids, listed)]

    def tools(self) -> Any:
        properties: dict[str, Any] = {"city": {"type": "string"}, "n": {"type": "integer"}}
        if as_text := self.rng.random() < 0.3:
            pass
        elif self.rng.random() < 0.5:
            properties |= {"other": None, "city": {"type": "string", "enum": None}}
        schema = {"type": "object", "properties": properties, "required": ["city"]}
        tools = [{"type": "function", "function": {"name": "lookup", "description": "Looks.", "parameters": schema}}]
        return json.dumps(tools) if as_text else tools


def listed(rng: random.Random, messages: list[dict[str, Any]]) -> Any:
    return json.dumps(messages) if rng.random() < 0.1 else messages


def sft_row(rng: random.Random, name: str) -> tuple[dict[str, Any], list[Turn], set[int]]:
    """(row, what it means, its turns that are trained)."""
    writer = Writer(rng, name)
    turns, share = writer.turns(), rng.random() < 0.3
    messages = [writer.message(turn, share) for turn in turns]
    row: dict[str, Any] = {"tools": writer.tools()} if any(t.called for t in turns) else {}
    answers = {i for i, turn in enumerate(turns) if turn.role == "assistant"}
    split = rng.random() < 0.2 and not any(t.mark for t in turns)
    if share and not split:
        row["conversations"] = listed(rng, messages)
    elif split:
        start = max(i for i, turn in enumerate(turns) if turn.role == "user") + 1
        row |= {"prompt": listed(rng, messages[:start]), "completion": listed(rng, messages[start:])}
        answers = {i for i in answers if i >= start}
    else:
        row["messages"] = listed(rng, messages)
    return row, turns, {i for i in answers if turns[i].mark != 0}


@cache
def job_of(name: str, kind: Any) -> Any:
    cfg = DataConfig(max_tokens_per_row=9999, max_prompt_tokens=9999, tools_key="tools")
    options = {"paired": True, "needs_gap": False} if kind is PairJob else {}
    return kind(tokenizer=tokenizer_for(name), cfg=cfg, template_kwargs={}, **options)


def entries(name: str, kind: Any, row: dict[str, Any]) -> list[Any] | None:
    """The entries of a row; None if it was refused, with its place."""
    try:
        return job_of(name, kind).entries(RawRow("f.jsonl:7", row), RowCounts())  # type: ignore[no-any-return]
    except RowRefused:
        return None  # counted, and its example has the place
    except ValueError as e:
        assert str(e).startswith("f.jsonl:7"), e
        return None


def check_context(name: str, turns: list[Turn], text: str, whole: set[int]) -> None:
    """All words of the turns are in the text in order, but for thoughts that are not in `whole`."""
    found = WORD.findall(text)
    order = []
    for i, turn in enumerate(turns):
        kept = turn.words | (set(turn.thought) if i in whole else set())
        assert kept <= set(found), (
            f"{name}: {sorted(kept - set(found))} of turn {i + 1} ({turn.role}) are not in {text!r}"
        )
        if turn.role not in ("system", "developer"):
            order.append([w for w in found if w in kept])
    assert len(found) == len(set(found)), f"{name}: twice in {text!r}"
    positions = [[found.index(w) for w in words] for words in order if words]
    results = [t.role == "tool" for t in turns if t.role not in ("system", "developer")]
    assert len(results) == len(order)
    flat = [max(p) for p in positions]
    assert flat == sorted(flat) or any(results), f"{name}: another order in {text!r}"


def check_sft(name: str, rng: random.Random) -> bool:
    row, turns, trained = sft_row(rng, name)
    found = entries(name, ConversationJob, row)
    if found is None:
        return False
    tokenizer = tokenizer_for(name)
    masked = [WORD.findall(tokenizer.decode(e["ids"][e["mask"]])) for e in found]
    wanted = [turns[i].words | set(turns[i].thought) for i in sorted(trained)]
    words = [set(w) for w in masked]
    if whole := len(found) == 1:
        wanted = [set().union(*wanted)]
    assert words == wanted, f"{name}: trained {words}, the row says {wanted}: {row}"
    last = [max(trained)] if whole else sorted(trained)
    for entry, i in zip(found, last, strict=True):
        text = tokenizer.decode(entry["ids"])
        assert "null" not in text and "None" not in text, f"{name}: {text!r}"
        assert text.count("<think>") <= max(2 * text.count("</think>"), 1)
        check_context(name, turns[: i + 1], text, trained if whole else {i})
    return True


def check_prompt(name: str, rng: random.Random) -> bool:
    writer = Writer(rng, name)
    turns, share = writer.turns()[:-1], rng.random() < 0.3
    for turn in turns:
        turn.mark = None
    if not turns or turns[-1].role == "assistant":
        return False
    row: dict[str, Any] = {"prompt": listed(rng, [writer.message(turn, share) for turn in turns]), "answer": "4"}
    if any(t.called for t in turns):
        row["tools"] = writer.tools()
    found = entries(name, PromptJob, row)
    if found is None:
        return False
    text = tokenizer_for(name).decode(found[0]["ids"])
    check_context(name, turns, text, set())
    return True


def check_pair(name: str, rng: random.Random) -> bool:
    writer = Writer(rng, name)
    turns = writer.turns()
    for turn in turns:
        turn.mark = None
    other = Turn("assistant", writer.words())
    messages = [writer.message(turn, False) for turn in (*turns, other)]
    row = {"prompt": messages[:-2], "chosen": messages[-2:-1], "rejected": messages[-1:]}
    if any(t.called for t in turns):
        row["tools"] = writer.tools()
    found = entries(name, PairJob, row)
    if found is None:
        return False
    tokenizer = tokenizer_for(name)
    for entry, answer in zip(found, (turns[-1], other), strict=True):
        said = set(WORD.findall(tokenizer.decode(entry["ids"][entry["mask"]])))
        assert said == answer.words | set(answer.thought), f"{name}: {row}"
        check_context(name, [*turns[:-1], answer], tokenizer.decode(entry["ids"]), {len(turns) - 1})
    return True


@pytest.mark.parametrize("name", NAMES)
def test_what_is_trained_is_what_the_row_says(name: str) -> None:
    if audited(name) is None or not audited(name).ends_turn_with:  # type: ignore[union-attr]
        pytest.skip("no conversation of this template can be trained")
    taken = {check: 0 for check in (check_sft, check_prompt, check_pair)}
    for seed in range(ROWS):
        for check, every in ((check_sft, 1), (check_prompt, 3), (check_pair, 3)):
            if seed % every == 0:
                try:
                    taken[check] += check(name, random.Random(f"{name} {seed} {check.__name__}"))
                except Exception as e:
                    e.add_note(f"row {seed} of {check.__name__} with {name}")
                    raise
    assert taken[check_sft] >= ROWS // 40 + 1, f"{name} refuses almost all: {taken}"
