"""No message of a row vanishes: it is written as the chat template wants it, and what that drops is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_bridge_templates import FILES, audited, tokenizer_for
from test_chat import CHATML
from test_messages import ANSWERS, ASSISTANT, CALL, USER, WEATHER

from verl.chat.conversation import render_conversation
from verl.chat.kept import dropped
from verl.chat.messages import read_messages
from verl.chat.template import Renderer, RenderError, RowRefused, audit_template, refuse_unsupported, render_prompt
from verl.config.schema import DataConfig
from verl.data.source import load_conversations, load_tasks

IDEFICS = (  # walks over content parts; the text of a string is lost
    "{% for m in messages %}{{ m.role | capitalize + ':' }}{% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
DEVELOPER = {"role": "developer", "content": "Answer in French only."}


def of(template: str) -> Any:
    """The tokenizer of ChatML's marks with another template."""
    import copy

    made = copy.copy(tokenizer_for("ours: chatml"))
    made.chat_template = template
    return made


def prompt_of(name: str, *messages: dict[str, Any], tools: Any = None) -> str:
    audit, tokenizer = audited(name), tokenizer_for(name)
    assert audit is not None
    refuse_unsupported(messages, audit, tools)
    return tokenizer.decode(render_prompt(tokenizer, messages, {}, tools, audit))


def test_a_developer_is_rendered_as_system_where_the_template_has_none() -> None:
    for name in ("qwen3", "qwen2_5", "qwen3_5_think", "llama3", "llama3_1", "ours: chatml", "phi3", "llava_next"):
        system = {**DEVELOPER, "role": "system"}
        assert prompt_of(name, DEVELOPER, USER) == prompt_of(name, system, USER), name
        assert "developer" not in prompt_of(name, DEVELOPER, USER).replace("Answer in French only.", "")
    assert "developer<|message|>" in prompt_of("gptoss", DEVELOPER, USER)
    for name in ("gemma", "ours: quickstart"):
        with pytest.raises(RowRefused, match="a system message"):
            prompt_of(name, DEVELOPER, USER)


def test_a_role_that_no_template_knows_is_refused() -> None:
    for name in ("ours: chatml", "qwen3", "llama3", "gptoss"):
        with pytest.raises(RowRefused, match="a role that neither .*'assitant'"):
            prompt_of(name, USER, {"role": "assitant", "content": "4 C"}, USER)
    assert "4 C" in prompt_of("llama3_1", USER, ASSISTANT, {"role": "ipython", "content": "4 C"})


def test_arguments_are_written_as_the_template_wants_them() -> None:
    for name in ("deepseekv3", "qwen2_5", "llama3_1"):
        text = prompt_of(name, USER, ASSISTANT, ANSWERS[0])
        assert '{"city": "Oslo"}' in text and '\\"' not in text, name
    concatenated = CHATML.replace(
        "m['content']", "m['content'] + (m.tool_calls[0].function.arguments if m.tool_calls else '')"
    )
    printed = CHATML.replace(
        "m['content']",
        "m['content'] ~ (m.tool_calls[0].function.name ~ m.tool_calls[0].function.arguments if m.tool_calls else '')",
    )
    for template in (concatenated.replace(".arguments", ".name + m.tool_calls[0].function.arguments"), printed):
        tokenizer = of(template)
        spelling = audit_template(tokenizer).spelling
        assert spelling.text_arguments
        assert 'weather{"city": "Oslo"}' in Renderer(tokenizer, {}, None, spelling).text([USER, ASSISTANT], prompt=True)


def test_a_template_of_parts_gets_parts() -> None:
    tokenizer = of(IDEFICS)
    audit = audit_template(tokenizer)
    assert audit.spelling.parts >= {"user", "assistant"} and audit.append_only
    said = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "four"}]
    assert "User:2+2?<" in tokenizer.decode(render_prompt(tokenizer, said[:1], {}, None, audit))
    with pytest.raises(RenderError, match="drops the text of a question"):
        audit_template(of(IDEFICS.replace("'text'", "'image'")))


def test_reasoning_is_rendered_under_the_key_that_the_template_reads() -> None:
    for key in ("reasoning_content", "thinking", "reasoning"):
        template = CHATML.replace("m['content']", f"('[' ~ m.{key} ~ ']' if m.{key} else '') + m['content']")
        tokenizer = of(template)
        audit = audit_template(tokenizer)
        turn = read_messages([{"role": "assistant", "content": "4", "reasoning": "2+2"}], "f:1", "messages")
        (row,) = render_conversation(tokenizer, [USER, *turn], audit, {})
        assert tokenizer.decode(row.ids[row.mask]) == "[2+2]4<|im_end|>", key
    with pytest.raises(RowRefused, match="reasoning_content, which this chat template does not render"):
        prompt_of("llama3", USER, *turn, USER)


DROPS = {  # a template that drops it -> the text of the refusal
    "{% if m.role != 'tool' %}": ("content of a message of 'tool'", [USER, ASSISTANT, *ANSWERS]),
    "{% if not (m.role == 'system' and not loop.first) %}": (
        "content of a message of 'system'",
        [USER, *ANSWERS[1:], {"role": "system", "content": "Rule 7."}, USER],
    ),
    "{% if loop.index0 != 2 %}": ("content of a message of 'user'", [USER, *ANSWERS[1:], {**USER, "content": "Oslo?"}]),
}


def test_what_a_template_drops_is_refused_with_file_and_line(tmp_path: Path) -> None:
    calls = "m['content'] ~ (m.tool_calls[0].function | tojson if m.tool_calls else '')"
    for opening, (says, messages) in DROPS.items():
        template = CHATML.replace("{{ '<|im_start|>' +", opening + "{{ '<|im_start|>' +", 1).replace(
            "{% endfor %}", "{% endif %}{% endfor %}"
        )
        tokenizer = of(template.replace("m['content']", calls))
        audit = audit_template(tokenizer)
        cfg = DataConfig(cache_dir=str(tmp_path / "cache"), num_workers=0)
        (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": [*messages, USER], "answer": "4"}))
        with pytest.raises(ValueError, match=rf"p\.jsonl:1: the prompt has .*({says}|tool results)"):
            load_tasks([str(tmp_path / "p.jsonl")], tokenizer, cfg)
        (tmp_path / "s.jsonl").write_text(json.dumps({"messages": [*messages, *ANSWERS[1:]]}))
        with pytest.raises(ValueError, match=rf"s\.jsonl:1: .*({says}|tool results)"):
            load_conversations([str(tmp_path / "s.jsonl")], tokenizer, cfg)
        assert audit.spelling.parts == frozenset()


def test_a_short_text_that_is_there_by_chance_is_missed() -> None:
    """qwen3_vl drops a system message that is not the first; `Hi` is in the user's `Hindi`, and `4` in a date."""
    long = "The same words of two messages."
    late = [{"role": "user", "content": "Hindi"}, *ANSWERS[1:], {"role": "system", "content": "Hi"}, USER]
    for name, messages, role in (
        ("qwen3_vl", late, "system"),
        ("llama3_1", [USER, {**ASSISTANT, "content": "4"}, ANSWERS[0]], "assistant"),
        (
            "qwen3_vl",
            [USER, *ANSWERS[1:], {"role": "system", "content": long}, {"role": "user", "content": long}],
            "system",
        ),
    ):
        for _ in range(2):
            with pytest.raises(RowRefused, match=f"the content of a message of '{role}'"):
                prompt_of(name, *messages)


def test_keys_that_nothing_reads_are_listed_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    turn = {"role": "assistant", "content": "4", "timestamp": 3, "annotations": [], "title": "x"}
    named = {**USER, "name": "Ada"}
    (tmp_path / "k.jsonl").write_text((json.dumps({"messages": [named, turn]}) + "\n") * 2)
    tokenizer = of(CHATML + "{# m.title #}")
    load_conversations([str(tmp_path / "k.jsonl")], tokenizer, DataConfig(cache_dir=str(tmp_path / "c"), num_workers=0))
    (said,) = [r.getMessage() for r in caplog.records if "neither verl nor" in r.getMessage()]
    assert (
        "'timestamp' (first" in said and f"'name of user' (first {tmp_path}/k.jsonl:1)" in said and "title" not in said
    )


def test_arguments_and_schemas_are_looked_for() -> None:
    tokenizer, two = tokenizer_for("qwen2_5"), [WEATHER, {"type": "function", "function": {"name": "idle"}}]
    audit = audit_template(tokenizer)
    long = {"a": "x" * 300, "b": {"c": ['say "hi"\n', "é", 3, None, True, 0.5]}}
    turn = {**ASSISTANT, "tool_calls": [CALL, {"type": "function", "function": {"name": "add", "arguments": long}}]}
    assert "say" in tokenizer.decode(render_prompt(tokenizer, [USER, turn, *ANSWERS], {}, two, audit))
    for old, new in (
        ("tool_call.arguments | tojson", "'{}'"),
        ("{{- tool | tojson }}", "{{- tools[0] | tojson }}"),
        ("tool_call.name", "'weather'"),
    ):
        assert old in tokenizer.chat_template
        with pytest.raises(RowRefused, match="tool call|a tool's schema"):
            render_prompt(of(tokenizer.chat_template.replace(old, new)), [USER, turn, *ANSWERS], {}, two, audit)


def test_texts_are_found_in_their_order_and_in_the_forms_of_templates() -> None:
    ask, tell = {"role": "user", "content": "alpha beta"}, {"role": "assistant", "content": "gamma\ndelta"}
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": 'x "y"'}}}],
    }
    thought = {**tell, "content": "<think>why</think> gamma"}
    for text, messages, whole, lacks in (
        ("alpha beta gamma delta", [ask, tell], (), None),
        ("gamma\ndelta alpha beta", [ask, tell], (), "the content of a message of 'assistant'"),
        ('alpha beta "gamma\\ndelta"', [ask, tell], (), None),
        ("gamma alpha beta", [{**ask, "role": "system"}, thought], (), None),
        ("alpha beta gamma", [ask, thought], (1,), "the content of a message of 'assistant'"),
        ("alpha beta gamma", [ask, {**thought, "role": "tool"}], (), "the content of a message of 'tool'"),
        ('alpha beta f {"a": "x \\"y\\""}', [ask, call], (), None),
        ('alpha beta of {"a": "x \\"y\\""}', [ask, call], (), "a tool call"),
        ('alpha beta f {"a": "x"}', [ask, call], (), "the tool call's arguments of a message of 'assistant'"),
        (
            'alpha beta f "a" x "y" one gamma',
            [ask, {**call, "content": "gamma"}, {"role": "tool", "content": "one"}],
            (),
            None,
        ),
        ("alpha beta two one", [ask, *({"role": "tool", "content": text} for text in ("one", "two"))], (), None),
    ):
        found = dropped(text, messages, None, whole)
        assert (found and found[0]) == lacks, (text, messages)


def test_a_block_that_the_prompt_opens_is_trained_once() -> None:
    """qwen3_8 appends, opens `<think>` in the prompt, and does not look for it in the content."""
    name, block = "qwen3_8", {"role": "assistant", "content": "<think>\nweigh it\n</think>\n\nfour"}
    tokenizer, audit = tokenizer_for(name), audited(name)
    assert audit is not None and audit.append_only
    as_reasoning = {"role": "assistant", "content": "four", "reasoning_content": "weigh it"}
    first, second = (render_conversation(tokenizer, [USER, m, USER, m], audit, {}) for m in (block, as_reasoning))
    assert np.array_equal(first[0].ids, second[0].ids) and np.array_equal(first[0].mask, second[0].mask)
    assert tokenizer.decode(first[0].ids).count("<think>") == 2 == tokenizer.decode(first[0].ids).count("weigh it")
    opens = CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}").replace(
        "m['content']", "('<think>\n\n</think>\n\n' if m.role == 'assistant' else '') + m['content']"
    )
    rest = {**block, "content": block["content"].removeprefix("<think>")}
    for turn in (block, rest):
        with pytest.raises(RowRefused, match="opens <think>, and so does the assistant message"):
            render_conversation(of(opens), [USER, turn], audit_template(of(opens)), {})
    (third,) = render_conversation(tokenizer, [USER, rest, USER, rest], audit, {})
    assert np.array_equal(first[0].ids, third.ids) and np.array_equal(first[0].mask, third.mask)


def test_every_template_of_trl_keeps_a_plain_conversation() -> None:
    for name in FILES:
        said = [
            {"role": "user", "content": "q one"},
            {"role": "assistant", "content": "a two"},
            {"role": "user", "content": "q three"},
        ]
        text = prompt_of(name, *said)
        assert text.index("q one") < text.index("a two") < text.index("q three"), name
