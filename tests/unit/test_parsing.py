"""Calls as the families write them, and whatever else a model writes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.agent_loop.parsing import FORMATS, ToolCall, Turn, TurnParser, format_of, wrong_arguments

PROPERTIES = {
    "text": {"type": "string"},
    "n": {"type": "integer"},
    "x": {"type": "number"},
    "yes": {"type": "boolean"},
    "many": {"type": "array", "items": {"type": "integer"}},
    "deep": {"type": "object"},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
    for name in ("look_up", "f")
]
Write = Callable[[list[ToolCall]], str]


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def hermes(calls: list[ToolCall]) -> str:
    rows = [json.dumps({"name": c.name, "arguments": dict(c.arguments)}, ensure_ascii=False) for c in calls]
    return "\n".join(f"<tool_call>\n{row}\n</tool_call>" for row in rows)


def qwen3_coder(calls: list[ToolCall]) -> str:
    def one(c: ToolCall) -> str:
        given = "".join(f"<parameter={k}>\n{as_text(v)}\n</parameter>\n" for k, v in c.arguments.items())
        return f"<tool_call>\n<function={c.name}>\n{given}</function>\n</tool_call>"

    return "\n".join(map(one, calls))


def glm(calls: list[ToolCall]) -> str:
    def one(c: ToolCall) -> str:
        given = "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{as_text(v)}</arg_value>\n" for k, v in c.arguments.items()
        )
        return f"<tool_call>{c.name}\n{given}</tool_call>"

    return "\n".join(map(one, calls))


def kimi(calls: list[ToolCall]) -> str:
    rows = [
        f"<|tool_call_begin|>functions.{c.name}:{k}<|tool_call_argument_begin|>{json.dumps(c.arguments)}<|tool_call_end|>"
        for k, c in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(rows)}<|tool_calls_section_end|>"


def deepseek(calls: list[ToolCall]) -> str:
    rows = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{c.name}\n```json\n{json.dumps(c.arguments)}\n```<｜tool▁call▁end｜>"
        for c in calls
    ]
    newline = "\n"
    return f"<｜tool▁calls▁begin｜>{newline.join(rows)}<｜tool▁calls▁end｜>"


WRITERS: dict[str, Write] = {f.__name__: f for f in (hermes, qwen3_coder, glm, kimi, deepseek)}
PARSERS = {name: TurnParser(FORMATS[name]) for name in FORMATS}


def test_every_format_has_a_writer_here() -> None:
    assert WRITERS.keys() == FORMATS.keys()


def random_calls(rng: random.Random) -> list[ToolCall]:
    words = ["a", "two words", 'say "so"', "line\nbreak", "中文 é", "{'x': 1}", "a,b;c", "# 1.5", "true"]
    values: dict[str, Callable[[], Any]] = {
        "text": lambda: rng.choice(words),
        "n": lambda: rng.randint(-9, 10**9),
        "x": lambda: rng.choice([0.5, -1.25, 3e10]),
        "yes": lambda: rng.random() < 0.5,
        "many": lambda: [rng.randint(0, 9) for _ in range(rng.randint(0, 3))],
        "deep": lambda: {"k": [{"z": rng.choice(words)}, None], "é": {"t": True}},
    }
    names = list(values)
    return [
        ToolCall(rng.choice(["look_up", "f"]), {k: values[k]() for k in rng.sample(names, rng.randint(0, len(names)))})
        for _ in range(rng.randint(1, 3))
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_family_writes_is_read_as_it_was_meant(name):
    rng = random.Random(7)
    for _ in range(200):
        calls = random_calls(rng)
        said = rng.choice(["", "Let me look.\n", "<think>\nhm, <b>\n</think>\n\n"])
        turn = PARSERS[name].parse(said + WRITERS[name](calls), TOOLS)
        assert (turn.calls, turn.malformed) == (tuple(calls), None), (name, said, calls)
        assert said.strip() in turn.text or turn.reasoning


@pytest.mark.parametrize("name", FORMATS)
def test_a_mutated_call_is_whole_or_refused(name):
    """2,000 mutated texts per family: no exception; and of calls whose text lost a piece, none is run with less than
    was written: what is read, written again, is what stood there."""
    rng, write = random.Random(3), WRITERS[name]
    markers = [mark for f in FORMATS.values() for mark in (f.open, f.close, *f.marks)]
    outcomes = {"calls": 0, "malformed": 0, "text": 0}
    for _ in range(2000):
        text = write(random_calls(rng))
        at, end = sorted(rng.sample(range(len(text) + 1), 2))
        kind = rng.randrange(4)
        if kind == 0:
            mutated = text[:at] + text[end:]
        elif kind == 1:
            mutated = text[:end]
        elif kind == 2:
            mutated = text[:at] + rng.choice([*markers, "{", '"', "\0", "\\", "<", "\ud83d"]) + text[at:]
        else:
            mutated = text[at:end] + text[:at]
        turn = PARSERS[name].parse(mutated, TOOLS)
        assert isinstance(turn, Turn) and not (turn.calls and turn.malformed)
        outcomes["malformed" if turn.malformed else "calls" if turn.calls else "text"] += 1
        squeezed = "".join(mutated.split())
        for call in turn.calls:
            for key, value in call.arguments.items():
                assert key in mutated and (not isinstance(value, str) or "".join(_plain(value).split()) in squeezed)
    assert outcomes["malformed"] > 100, outcomes


def _plain(value: str) -> str:
    """What of a text is written in any family as it is."""
    return value.split("\\")[0].split('"')[0].split("\n")[0] if value.isascii() else ""


CUT = [
    ("hermes", 'a <tool_call> b <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
    ("hermes", 'a </tool_call> b <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call> c'),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>\n<parameter=n>\n1\n</function>\n</tool_call>",
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=text>\na</parameter>b\n</parameter>\n</function>\n</tool_call>",
    ),
    ("glm", "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>a</arg_value>\n<arg_key>n</arg_key></tool_call>"),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {}} and more\n</tool_call>'),
    ("hermes", '<tool_call>\n[{"name": "f", "arguments": {}}]\n</tool_call>'),
    ("hermes", '<tool_call>\n{"arguments": {}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>'),
]


@pytest.mark.parametrize(("name", "text"), CUT)
def test_a_call_is_not_run_as_far_as_it_went(name, text):
    turn = PARSERS[name].parse(text, TOOLS)
    assert turn.malformed is not None and not turn.calls


def test_calls_in_reasoning_are_thoughts():
    call = hermes([ToolCall("f", {})])
    assert PARSERS["hermes"].parse(f"<think>{call}</think>No.") == Turn(text="No.", reasoning=call)
    opened = TurnParser(FORMATS["hermes"], "<think>\n")
    assert opened.parse(f"I could {call}") == Turn(reasoning=f"I could {call}")
    assert opened.parse(f"so</think>{call}").calls == (ToolCall("f", {}),)


def test_a_tokenizer_s_own_template_wins():
    own = {
        "start_anchor": "\0",
        "fields": {
            "tool_calls": {
                "open": "[[",
                "close": "]]",
                "content": "json",
                "repeats": True,
                "transform": {"function": {"name": "{content.f}", "arguments": "{content.a}"}},
            },
            "content": {},
        },
    }
    turn = TurnParser(None, "", own).parse('well [[{"f": "g", "a": {"n": 1}}]]')
    assert turn.calls == (ToolCall("g", {"n": 1}),) and turn.text == "well"
    assert TurnParser(None, "", own).parse('[[{"f": "g"').malformed is not None


def test_the_format_is_found_by_the_marks_of_the_template():
    teaches = {
        "hermes": '<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>',
        "qwen3_coder": "<tool_call>\n<function=example>\n<parameter=p>\nvalue\n</parameter>",
        "glm": "<tool_call>{function-name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>",
        "kimi": "<|tool_call_begin|>functions<|tool_call_argument_begin|>",
        "deepseek": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    }
    assert {name: format_of(text) for name, text in teaches.items()} == {name: name for name in FORMATS}
    assert format_of("nothing", "glm") == "glm"
    with pytest.raises(ValueError, match="set agent.format"):
        format_of("nothing")


SCHEMA = {
    "properties": {
        "a": {"type": "integer"},
        "b": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "c": {"type": "string", "enum": ["x", "y"]},
        "d": {"type": "object", "properties": {"e": {"type": "array", "items": {"type": "number"}}}, "required": ["e"]},
        "g": {"type": ["integer", "string"], "nullable": True},
    },
    "required": ["a"],
}
ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"a": 1, "b": None, "c": "x", "d": {"e": [1, 2.5]}, "g": None}, ""),
    ({"b": "t"}, "missing: a"),
    ({"a": True}, "a must be integer, not bool"),
    ({"a": 1.5}, "a must be integer, not float"),
    ({"a": 1, "b": 3}, "b must be string"),
    ({"a": 1, "c": "z"}, "c must be one of x, y"),
    ({"a": 1, "d": {}}, "d: missing: e"),
    ({"a": 1, "d": {"e": ["no"]}}, "d: e[0] must be number"),
    ({"a": 1, "h": 2}, "unknown: h; it takes a, b, c, d, g"),
    ({"a": 1, "g": 2.5}, "g must be integer or string"),
]


@pytest.mark.parametrize(("arguments", "said"), ARGUMENTS, ids=[said or "right" for _, said in ARGUMENTS])
def test_arguments_are_checked_by_the_schema(arguments, said):
    found = wrong_arguments(SCHEMA, arguments)
    assert found.startswith(said) and bool(found) == bool(said)


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=80), name=st.sampled_from(sorted(FORMATS)))
def test_any_text_is_a_turn(text, name):
    turn = PARSERS[name].parse(text, TOOLS)
    assert (not turn.calls and turn.text.strip() == text.strip()) or turn.reasoning or turn.malformed
