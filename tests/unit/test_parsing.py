"""Calls as the families write them, and whatever else a model writes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.chat.arguments import as_declared, wrong_arguments
from verl.chat.parsing import FORMATS, ToolCall, Turn, TurnParser, format_of, opening_of

PROPERTIES = {
    "text": {"type": "string"},
    "n": {"type": "integer"},
    "x": {"type": "number"},
    "yes": {"type": "boolean"},
    "many": {"type": "array", "items": {"type": "integer"}},
    "deep": {"type": "object"},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": PARAMETERS}}
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


def llama3_json(calls: list[ToolCall]) -> str:
    return "".join(json.dumps({"name": c.name, "parameters": dict(c.arguments)}) for c in calls)


def pythonic(calls: list[ToolCall]) -> str:
    rows = [f"{c.name}({', '.join(f'{k}={v!r}' for k, v in c.arguments.items())})" for c in calls]
    return f"[{', '.join(rows)}]"


def lfm2(calls: list[ToolCall]) -> str:
    """As LFM2's template writes them: texts in single quotes, lists and objects as JSON."""

    def one(value: Any) -> str:
        if not isinstance(value, str):
            return json.dumps(value) if isinstance(value, list | dict) else str(value)
        for raw, escaped in (("\\", "\\\\"), ("'", "\\'"), ("\n", "\\n"), ("\r", "\\r")):
            value = value.replace(raw, escaped)
        return f"'{value}'"

    rows = [f"{c.name}({', '.join(f'{k}={one(v)}' for k, v in c.arguments.items())})" for c in calls]
    return f"<|tool_call_start|>[{', '.join(rows)}]<|tool_call_end|>"


def mistral(calls: list[ToolCall]) -> str:
    rows = [{"name": c.name, "arguments": dict(c.arguments), "id": f"abcdef{k:03d}"} for k, c in enumerate(calls)]
    return f"[TOOL_CALLS] {json.dumps(rows, ensure_ascii=False)}"


def mistral_v11(calls: list[ToolCall]) -> str:
    between = ["[CALL_ID]abcdef123[ARGS]", "[ARGS]"]
    return "".join(f"[TOOL_CALLS]{c.name}{between[k % 2]}{json.dumps(c.arguments)}" for k, c in enumerate(calls))


def gpt_oss(calls: list[ToolCall]) -> str:
    """A call as the model samples it, and as its template writes it; the last one without the end of the turn."""
    heads = [
        "<|start|>assistant<|channel|>commentary to=functions.{} <|constrain|>json<|message|>",
        "<|start|>assistant to=functions.{}<|channel|>commentary json<|message|>",
    ]
    rows = [f"{heads[k % 2].format(c.name)}{json.dumps(c.arguments)}<|call|>" for k, c in enumerate(calls)]
    return "".join(rows).removeprefix("<|start|>assistant").removesuffix("<|call|>")


QUOTE = '<|"|>'


def gemma4(calls: list[ToolCall]) -> str:
    def one(value: Any) -> str:
        if isinstance(value, str):
            return f'<|"|>{value}<|"|>'
        if isinstance(value, dict):
            return "{" + ",".join(f"{k}:{one(v)}" for k, v in value.items()) + "}"
        return "[" + ",".join(map(one, value)) + "]" if isinstance(value, list) else json.dumps(value)

    return "".join(f"<|tool_call>call:{c.name}{one(dict(c.arguments))}<tool_call|>" for c in calls)


OLDER: tuple[Write, ...] = (hermes, qwen3_coder, glm, kimi, deepseek)
NEWER: tuple[Write, ...] = (llama3_json, pythonic, lfm2, mistral, mistral_v11, gpt_oss, gemma4)
WRITERS: dict[str, Write] = {f.__name__.replace("gpt_oss", "gpt-oss"): f for f in (*OLDER, *NEWER)}
ONE_CALL = ("llama3_json",)
WHOLE_TURN = ("llama3_json", "pythonic")  # a turn with a call has no other text
SAID = {
    "mistral_v11": ("", "Let me look.", "[THINK]hm, <b>[/THINK]"),
    "gpt-oss": ("", "<|channel|>analysis<|message|>hm, <b><|end|>", "<|channel|>commentary<|message|>Look.<|end|>"),
    "gemma4": ("", "Let me look.", "<|channel>thought\nhm, <b>\n<channel|>"),
}
PARSERS = {name: TurnParser(FORMATS[name]) for name in FORMATS}


def test_every_format_has_a_writer_here() -> None:
    assert WRITERS.keys() == FORMATS.keys()


def random_calls(rng: random.Random, name: str = "") -> list[ToolCall]:
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
        for _ in range(1 if name == "llama3_json" else rng.randint(1, 3))
    ]


@each("name", FORMATS)
def test_what_a_family_writes_is_read_as_it_was_meant(name):
    rng = random.Random(7)
    for _ in range(200):
        calls = random_calls(rng, name)
        said = rng.choice(SAID.get(name, ("", "Let me look.\n", "<think>\nhm, <b>\n</think>\n\n")))
        said = "" if name in WHOLE_TURN and "think" not in said else said
        turn = PARSERS[name].parse(said + WRITERS[name](calls), TOOLS)
        assert (turn.calls, turn.malformed) == (tuple(calls), None), (name, said, calls)
        assert said.strip() in turn.text or turn.reasoning


@pytest.mark.slow
@each("name", FORMATS)
def test_a_mutated_call_is_whole_or_refused(name):
    """2,000 mutated texts per family: no exception, and no call that lost a piece of its text is run: a call that is
    read, written again, is its text."""
    rng, write = random.Random(3), WRITERS[name]
    markers = [mark for f in FORMATS.values() for mark in (f.open, f.close, *f.marks)]
    outcomes = {"calls": 0, "malformed": 0, "text": 0}
    for _ in range(2000):
        calls = random_calls(rng, name)
        text = write(calls)
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
        squeezed = "".join(mutated.replace("\\'", "'").split())
        for call in turn.calls:
            for key, value in call.arguments.items():
                named = key in mutated or json.dumps(key)[1:-1] in mutated  # a backslash may have made an escape
                assert named and (not isinstance(value, str) or "".join(_plain(value).split()) in squeezed)
        if kind == 1 and turn.calls:  # cut at its end: of the calls that were written, the first ones, as written
            assert turn.calls == tuple(calls[: len(turn.calls)]), (name, mutated)
    assert outcomes["malformed"] > 100, outcomes


def _plain(value: str) -> str:
    """Return the characters of a text that every family writes unchanged."""
    return value.split("\\")[0].split('"')[0].split("\n")[0] if value.isascii() else ""


OWN = {  # what the text of a value cannot hold, because the format has no way to write it
    "qwen3_coder": ("<parameter=", "</parameter"),
    "glm": ("<arg_key>", "<arg_value>", "</arg_value>"),
    "gemma4": (QUOTE,),
}
MARKERS = sorted({mark for f in FORMATS.values() for mark in (f.open, f.close, *f.marks, *f.frame) if mark})
NASTY = st.lists(
    st.sampled_from(
        [*MARKERS, "</think>", "<think>", '"', "\\", "\n", "{", "}", "[", "]", "'", ",", ": ", "a", "é", " b "]
    ),
    max_size=6,
).map("".join)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(name=st.sampled_from(sorted(FORMATS)), texts=st.lists(NASTY, min_size=1, max_size=2), thought=st.booleans())
def test_a_call_is_read_as_written_whatever_its_texts_hold(name, texts, thought):
    texts = [t for t in texts if not any(mark in t for mark in OWN.get(name, ()))]
    texts = [t.strip() for t in texts] if name == "qwen3_coder" else texts
    calls = [ToolCall("f", {"text": t, "deep": {"k": [t]}}) for t in (texts[:1] if name in ONE_CALL else texts)]
    said = "<think>\nhm <b>\n</think>\n\n" if thought and name not in SAID else ""
    turn = PARSERS[name].parse(said + WRITERS[name](calls) if calls else said, TOOLS)
    assert (turn.calls, turn.malformed) == (tuple(calls), None)


NO_ARGUMENTS = [
    ("hermes", '<tool_call>{"name": "w"}</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "w", "arguments": null}\n</tool_call>'),
    ("llama3_json", '{"name": "w"}'),
    ("mistral", '[TOOL_CALLS][{"name": "w", "id": "abcdef123"}]'),
    ("mistral_v11", "[TOOL_CALLS]w[ARGS]"),
    ("kimi", "<|tool_call_begin|>functions.w:0<|tool_call_argument_begin|><|tool_call_end|>"),
    ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>w\n```json\n\n```<｜tool▁call▁end｜>"),
    ("gpt-oss", "<|channel|>commentary to=functions.w<|message|><|call|>"),
    ("qwen3_coder", "<tool_call>\n<function=w>\n</function>\n</tool_call>"),
    ("glm", "<tool_call>w\n</tool_call>"),
    ("pythonic", "[w()]"),
    ("gemma4", "<|tool_call>call:w{}<tool_call|>"),
]


@each("name, text", NO_ARGUMENTS)
def test_a_tool_without_parameters_is_called_without_arguments(name, text):
    for parameters in ({}, {"type": "object", "properties": {}}):
        tools = [*TOOLS, {"type": "function", "function": {"name": "w", "parameters": parameters}}]
        assert PARSERS[name].parse(text, tools).calls == (ToolCall("w", {}),)
    if name in ("hermes", "llama3_json", "mistral"):
        thought = f"<think>so {text}</think>Yes."
        assert PARSERS[name].parse(thought, tools).reasoning == f"so {text}", "what is thought stays as it is"
        takes = [{"type": "function", "function": {"name": "w", "parameters": PARAMETERS}}]
        assert PARSERS[name].parse(text, takes).malformed


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
    ("llama3_json", '{"name": "f", "parameters": {"n": 1}'),
    ("llama3_json", 'Look: {"name": "f", "parameters": {}}'),
    ("llama3_json", '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}'),
    ("llama3_json", '<|python_tag|>brave_search.call(query="x")'),
    ("llama3_json", '{"name": "f"}'),
    ("pythonic", "[f(n=1), f(n="),
    ("pythonic", "[f(n=1), f(n=2)] and more"),
    ("pythonic", "Look:\n[f(n=1)]"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[f(n=1, n=2)]"),
    ("pythonic", "[f(**{'n': 1})]"),
    ("pythonic", "[f(n=f())]"),
    ("pythonic", "[f(n=1 + 1)]"),
    ("pythonic", "[f(n={1, 2})]"),
    ("pythonic", "[f(n=1)()]"),
    ("pythonic", "[f(n=1), 3]"),
    ("pythonic", "[f(n=1)] + [f(n=2)]"),
    ("pythonic", "[f(n=" + "[" * 5000 + "]" * 5000 + ")]"),
    ("pythonic", "[f(n=1)]<|python_end|>[f(n=2)]"),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}'),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g"}]'),
    ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}'),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}][TOOL_CALLS][{"name": "f", "arguments": {}}]'),
    ("mistral", "[TOOL_CALLS]f[ARGS]{}"),
    ("mistral_v11", '[TOOL_CALLS]f[ARGS]{"n": 1}[TOOL_CALLS]f[ARGS]{"n": '),
    ("mistral_v11", '[TOOL_CALLS]f{"n": 1}'),
    ("mistral_v11", '[TOOL_CALLS]f[ARGS]{"n": 1} and more'),
    ("gpt-oss", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 1'),
    ("gpt-oss", "<|channel|>commentary to=browser.search<|message|>{}<|call|>"),
    ("gpt-oss", '<|channel|>commentary to=functions.f<|message|>{"n": 1}<|end|>'),
    ("gpt-oss", "<|channel|>final<|message|>a<|channel|>commentary to=functions.f<|message|>{}<|call|>"),
    ("gpt-oss", "to=functions.f<|message|>{}<|call|>"),
    ("gemma4", "<|tool_call>call:f{n:1}"),
    ("gemma4", "<|tool_call>call:f{n:1}}<tool_call|>"),
    ("gemma4", '<|tool_call>call:f{text:<|"|>a}<tool_call|>'),
    ("gemma4", "call:f{n:1}<tool_call|>"),
]


@each("name, text", CUT)
def test_a_call_is_not_run_as_far_as_it_went(name, text):
    turn = PARSERS[name].parse(text, TOOLS)
    assert turn.malformed is not None and not turn.calls


def test_calls_in_reasoning_are_thoughts():
    call = hermes([ToolCall("f", {})])
    assert PARSERS["hermes"].parse(f"<think>{call}</think>No.") == Turn(text="No.", reasoning=call)
    opened = TurnParser(FORMATS["hermes"], "<think>\n")
    assert opened.parse(f"I could {call}") == Turn(reasoning=f"I could {call}")
    assert opened.parse(f"so</think>{call}").calls == (ToolCall("f", {}),)


def test_what_is_no_call_is_an_answer():
    """Also where calls have no markers: JSON, Python and links of an answer are text."""
    for name, text in (
        ("llama3_json", '{"answer": {"name": "x"}}'),
        ("pythonic", "[1, 2] and [f](https://x)"),
        ("mistral", '[{"name": "f", "arguments": {}}]'),
        ("gpt-oss", "It is 42."),
        ("gemma4", "call: {n:1}"),
    ):
        assert PARSERS[name].parse(text, TOOLS) == Turn(text=text), name
    said = "<|channel|>analysis<|message|>6 x 7<|end|><|start|>assistant<|channel|>final<|message|>It is 42."
    assert PARSERS["gpt-oss"].parse(said) == Turn(text="It is 42.", reasoning="6 x 7")
    opened = PARSERS["mistral_v11"].parse("so[/THINK][TOOL_CALLS]f[ARGS]{}", (), opening_of("mistral_v11", "[THINK]"))
    assert opened == Turn((ToolCall("f", {}),), reasoning="so")
    assert opening_of("gpt-oss", "<think>\n") == "" and opening_of("hermes", "a<think>\n") == "<think>\n"


PEERS = {  # file of trl's chat templates: our format, and the response template beside it in that package
    "llama3_1": ("llama3_json", "llama3"),
    "llama3_2": ("llama3_json", "llama3"),
    "gptoss": ("gpt-oss", "gptoss"),
    "gemma4": ("gemma4", "gemma4"),
    "gemma4_v2": ("gemma4", "gemma4"),
    "gemma4_v5": ("gemma4", "gemma4"),
    "glm4moe": ("glm", "glm4moe"),
    "qwen2_5": ("hermes", "qwen3"),
    "qwen3": ("hermes", "qwen3"),
    "qwen3_instruct_2507": ("hermes", "qwen3"),
    "qwen3_vl": ("hermes", "qwen3"),
    "qwen3_5_think": ("qwen3_coder", "qwen3_5"),
    "qwen3_5_nothink": ("qwen3_coder", "qwen3_5"),
    "qwen3_8": ("qwen3_coder", "qwen3_5"),
    "nemotron_3_nano": ("qwen3_coder", "nemotron_3"),
    "nemotron_3_5_lightning": ("qwen3_coder", "nemotron_3"),
}
HEADS = {
    "llama3_json": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "gpt-oss": "<|start|>assistant",
    "gemma4": "<|turn>model\n",
    "glm": "<|assistant|>",
    "hermes": "<|im_start|>assistant\n",
    "qwen3_coder": "<|im_start|>assistant\n",
}
ENDS = ("<|eot_id|>", "<|call|>", "<turn|>", "<|im_end|>", "<|tool_response>", "\n")
DATA = Path(__file__).parents[1] / "data" / "trl_templates"


@pytest.mark.parametrize("file", PEERS)
def test_what_the_templates_of_trl_write_is_read_as_its_own_parser_reads_it(file):
    """The families' own templates, and the response templates that stand beside them in that package."""
    from transformers.utils.chat_parsing import parse_response
    from transformers.utils.chat_template_utils import render_jinja_template

    (name, peer), template = PEERS[file], (DATA / f"{file}.jinja").read_text()
    assert format_of(template) == name
    theirs = json.loads((DATA / "response_templates.json").read_text())[peer]
    rng, compared = random.Random(11), 0
    while compared < 200:
        calls = [c for c in random_calls(rng, name) if name != "gemma4" or "deep" not in c.arguments]  # None is no JSON
        calls = calls[:1] if name in ("llama3_json", "gpt-oss") else calls
        if not calls:
            continue
        written = [{"type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}} for c in calls]
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": written}]
        full = render_jinja_template([messages], tools=TOOLS, chat_template=template, bos_token="")[0][0]
        text = full[full.rindex(HEADS[name]) + len(HEADS[name]) :]
        whole = text
        while end := next((e for e in ENDS if text.endswith(e)), ""):
            text = text.removesuffix(end)
        assert PARSERS[name].parse(text, TOOLS).calls == tuple(calls), text
        found = parse_response(whole, theirs, prefix="", tools=TOOLS)
        assert [ToolCall(**c["function"]) for c in found["tool_calls"]] == calls
        compared += 1


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
        "llama3_json": '<|start_header_id|> in the format {"name": function name, "parameters": dictionary of',
        "pythonic": "<|start_header_id|> [func_name1(params_name1=params_value1, params_name2=params_value2...)]",
        "lfm2": """'<|tool_call_start|>[' + calls + ']<|tool_call_end|>'""",
        "mistral": "{{ '[TOOL_CALLS][' }}",
        "mistral_v11": "{{ '[TOOL_CALLS]' + name + '[ARGS]' }}",
        "gpt-oss": '"functions." + name + "<|channel|>commentary " "<|call|>"',
        "gemma4": "'<|tool_call>call:' + name '<|\"|>'",
    }
    assert {name: format_of(text) for name, text in teaches.items()} == {name: name for name in FORMATS}
    public = Path(__file__).parents[1] / "data" / "trl_templates"
    assert {format_of((public / f"{name}.jinja").read_text()) for name in ("lfm2_v2", "lfm2_2_5")} == {"lfm2"}
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


@each("arguments, said", ARGUMENTS)
def test_arguments_are_checked_by_the_schema(arguments, said):
    found = wrong_arguments(SCHEMA, arguments)
    assert found.startswith(said) and bool(found) == bool(said)


OPEN_SCHEMA = {"properties": {"a": {"type": "integer"}}, "additionalProperties": True}


def test_what_json_schema_allows_is_allowed():
    """Unknown arguments where the schema is open, whole floats for integers; a text is no number."""
    assert not wrong_arguments(OPEN_SCHEMA, {"a": 5.0, "z": "new"})
    typed = {"properties": {}, "additionalProperties": {"type": "integer"}}
    assert not wrong_arguments(typed, {"n": 1}) and wrong_arguments(typed, {"n": "1"})
    assert wrong_arguments({**OPEN_SCHEMA, "additionalProperties": False}, {"z": 1}).startswith("unknown: z")
    for value in ("5", 5.5, True, float("inf")):
        assert wrong_arguments(OPEN_SCHEMA, {"a": value})
    either = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    assert not wrong_arguments({"properties": {"a": either}}, {"a": "5"})
    assert wrong_arguments({"properties": {"a": {"enum": [1]}}}, {"a": True})
    schema = {"properties": {"a": {"type": "integer"}, "x": {"type": "number"}, "l": {"items": {"type": "integer"}}}}
    found = as_declared(schema | {"additionalProperties": either}, {"a": 5.0, "x": 5.0, "l": [1.0, 2], "z": 3.0})
    assert found == {"a": 5, "x": 5.0, "l": [1, 2], "z": 3}
    assert [type(v) for v in (found["a"], found["x"], found["l"][0], found["z"])] == [int, float, int, int]


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=80), name=st.sampled_from(sorted(FORMATS)))
def test_any_text_is_a_turn(text, name):
    turn = PARSERS[name].parse(text, TOOLS)
    assert (not turn.calls and turn.text.strip() == text.strip()) or turn.reasoning or turn.malformed
