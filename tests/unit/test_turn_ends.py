"""Where a turn of the assistant ends: what is trained, and at what inference stops, with published chat templates."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each import each
from test_bridge_templates import SOURCES, TOOL, audited, tokenizer_for
from test_chat import tokenizer_of

from verl.agent_loop.registry import _kit
from verl.chat.conversation import render_conversation
from verl.chat.template import Renderer, RowRefused, audit_template
from verl.config.load import load_config
from verl.config.schema import Config, DataConfig
from verl.data.source import load_conversations
from verl.driver import assemble_fleet
from verl.driver.setup import end_lines, eos_ids, require_an_end, stop_ids

Turn = dict[str, Any]
ASKED, AGAIN = {"role": "user", "content": "six times 7?"}, {"role": "user", "content": "And 5?"}
SAID = {"role": "assistant", "content": "It is 42."}
THOUGHT = {**SAID, "reasoning_content": "well"}


def calls(*numbers: int, **more: str) -> Turn:
    made = [{"name": "multiply", "arguments": {"a": a, "b": 7}} for a in numbers]
    listed = [{"id": f"call{k:05d}", "type": "function", "function": one} for k, one in enumerate(made)]
    return {"role": "assistant", "content": "", "tool_calls": listed} | more


def result(k: int = 0) -> Turn:
    return {"role": "tool", "name": "multiply", "tool_call_id": f"call{k:05d}", "content": "42"}


THOUGHT_CALL = calls(6, reasoning_content="hm so")
CONVERSATIONS: dict[str, list[Turn]] = {
    "plain": [ASKED, SAID, AGAIN, SAID],
    "call": [ASKED, calls(6)],
    "answered": [ASKED, calls(6), result(), SAID],
    "parallel": [ASKED, calls(6, 5), result(), result(1), SAID],
    "thoughts": [ASKED, THOUGHT_CALL, result(), THOUGHT],
    "again": [ASKED, THOUGHT_CALL, result(), SAID, AGAIN, calls(6), result(), SAID],
    "text": [ASKED, calls(6, content="Let me see."), result(), SAID],
}


def rows_of(name: str, conversation: str) -> list[Any]:
    tools, audit = [dict(TOOL.schema)], audited(name)
    assert audit is not None
    shown = tools if audit.supports_tools and conversation != "plain" else None
    messages = CONVERSATIONS[conversation]
    return render_conversation(tokenizer_for(name), messages, audit, {}, tools=shown, may_skip_thinking=True)


def spans(name: str, conversation: str) -> list[str]:
    """The text of each trained run of tokens."""
    found = []
    for row in rows_of(name, conversation):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], row.mask.astype(int), [0]])))
        found += [tokenizer_for(name).decode(row.ids[a:b]) for a, b in edges.reshape(-1, 2)]
    return found


GPT_CALL = ' to=functions.multiply<|channel|>commentary json<|message|>{"a": 6, "b": 7}<|call|>'
GPT_THINKS, GPT_SAYS = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant", "<|channel|>final<|message|>"
GPT_ANSWER = f"{GPT_SAYS}It is 42.<|return|>"
GEMMA_ONE, GEMMA_TWO = (f"<|tool_call>call:multiply{{a:{a},b:7}}<tool_call|>" for a in (6, 5))
GEMMA_CALL, GEMMA_ANSWER = f"{GEMMA_ONE}<|tool_response>", "It is 42.<turn|>"
NEMOTRON_ONE, NEMOTRON_TWO = (
    f"<tool_call>\n<function=multiply>\n<parameter=a>\n{a}\n</parameter>\n<parameter=b>\n7\n</parameter>\n"
    "</function>\n</tool_call>\n"
    for a in (6, 5)
)
GLM_ONE, GLM_TWO = (
    f"\n<tool_call>multiply\n<arg_key>a</arg_key>\n<arg_value>{a}</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>7</arg_value>\n</tool_call>"
    for a in (6, 5)
)
GLM_CALL, GLM_ANSWER = f"\n<think></think>{GLM_ONE}", "\n<think></think>\nIt is 42."
LFM_ONE = "multiply(a=6, b=7)"
LFM_CALL, LFM_ANSWER = f"<|tool_call_start|>[{LFM_ONE}]<|tool_call_end|><|im_end|>", "It is 42.<|im_end|>"
LFM_BOTH = f"<|tool_call_start|>[{LFM_ONE}, multiply(a=5, b=7)]<|tool_call_end|><|im_end|>"
COHERE_ANSWER = "It is 42.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"
TRAINED = [
    ("gptoss", "plain", [GPT_ANSWER] * 2),
    ("gptoss", "call", [GPT_CALL]),
    ("gptoss", "answered", [GPT_CALL, GPT_ANSWER]),
    ("gptoss", "thoughts", [GPT_THINKS.format("hm so") + GPT_CALL, GPT_THINKS.format("well") + GPT_ANSWER]),
    ("gptoss", "again", [GPT_THINKS.format("hm so") + GPT_CALL, GPT_ANSWER, GPT_CALL, GPT_ANSWER]),
    ("gptoss", "text", [GPT_THINKS.format("Let me see.") + GPT_CALL, GPT_ANSWER]),
    ("gemma4", "answered", [GEMMA_CALL, GEMMA_ANSWER]),
    (
        "gemma4",
        "again",
        [f"<|channel>thought\nhm so\n<channel|>{GEMMA_CALL}", *[GEMMA_ANSWER, GEMMA_CALL, GEMMA_ANSWER]],
    ),
    ("gemma4_v5", "call", [GEMMA_CALL]),
    ("gemma4_v5", "parallel", [f"{GEMMA_ONE}{GEMMA_TWO}<|tool_response>", GEMMA_ANSWER]),
    *(
        ("gemma4_v5", "thoughts", [f"<|channel>thought\n{t}\n<channel|>{a}" for t, a in pairs])
        for pairs in [[("hm so", GEMMA_CALL), ("well", GEMMA_ANSWER)]]
    ),
    ("nemotron_3_nano", "answered", [f"\n{NEMOTRON_ONE}<|im_end|>", "It is 42.<|im_end|>"]),
    ("nemotron_3_nano", "parallel", [f"\n{NEMOTRON_ONE}{NEMOTRON_TWO}<|im_end|>", "It is 42.<|im_end|>"]),
    (
        "nemotron_3_nano",
        "thoughts",
        [f"hm so\n</think>\n{NEMOTRON_ONE}<|im_end|>", "well\n</think>\nIt is 42.<|im_end|>"],
    ),
    ("nemotron_3_5_lightning", "text", [f"Let me see.\n{NEMOTRON_ONE}<|im_end|>", "It is 42.<|im_end|>"]),
    ("lfm2_v2", "answered", [LFM_CALL, LFM_ANSWER]),
    ("lfm2_v2", "parallel", [LFM_BOTH, LFM_ANSWER]),
    ("lfm2_2_5", "thoughts", [f"<think>hm so</think>{LFM_CALL}", f"<think>well</think>{LFM_ANSWER}"]),
    ("lfm2_2_5", "text", [f"Let me see.{LFM_CALL}", LFM_ANSWER]),
    ("glm4moe", "plain", [f"{GLM_ANSWER}<|user|>", f"{GLM_ANSWER}</s>"]),
    ("glm4moe", "call", [f"{GLM_CALL}</s>"]),
    ("glm4moe", "answered", [f"{GLM_CALL}<|observation|>", f"{GLM_ANSWER}</s>"]),
    ("glm4moe", "parallel", [f"{GLM_CALL}{GLM_TWO}<|observation|>", f"{GLM_ANSWER}</s>"]),
    ("cohere2", "plain", [COHERE_ANSWER] * 2),
]


@each("name, conversation, expected", TRAINED)
def test_what_the_assistant_writes_is_trained_up_to_its_end(name, conversation, expected):
    assert spans(name, conversation) == expected


REFUSED = [
    ("gptoss", "parallel", "several tool calls in one turn"),
    ("llama3_1", "parallel", "several tool calls in one turn"),
    ("llama3_1", "text", "chat template drops"),
    ("muse_glimmer", "text", "chat template drops"),
    ("gemma4_v2", "text", "behind the call"),
    ("gemma4", "thoughts", "reasoning_content"),
    ("lfm2", "call", "tool calls or tool results"),
]


@each("name, conversation, reason", REFUSED)
def test_what_has_no_exact_row_is_refused(name, conversation, reason):
    with pytest.raises(RowRefused, match=reason):
        rows_of(name, conversation)


@pytest.mark.parametrize("name", SOURCES)
def test_a_row_is_a_prompt_of_inference_with_what_the_template_renders_behind_it(name):
    """The trained tokens follow ids that an engine would get, and end as inference ends an answer."""
    tokenizer, audit = tokenizer_for(name), audited(name)
    if audit is None:
        return
    ends = {*audit.ends, audit.last_end}
    for conversation, messages in CONVERSATIONS.items():
        try:
            rows = rows_of(name, conversation)
        except RowRefused:
            continue
        tools = [dict(TOOL.schema)] if audit.supports_tools and conversation != "plain" else None
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        given = [Renderer(tokenizer, kwargs, tools, audit.spelling) for kwargs in ({}, {"enable_thinking": False})]
        prompts = {r.ids(messages[:i], prompt=True).tobytes() for i in turns for r in given}
        for row in rows:
            edges = np.flatnonzero(np.diff(np.concatenate([[0], row.mask.astype(int), [0]]))).reshape(-1, 2)
            assert all(row.ids[:first].tobytes() in prompts for first, _ in edges), (name, conversation)
            assert all(row.ids[last - 1] in ends for _, last in edges), (name, conversation)


def test_text_without_any_token_at_its_end_is_ended_by_the_eos():
    tokenizer = copy.deepcopy(tokenizer_of("plain_text"))
    written = "{% for m in messages %}{{ m['role'] + ':\n' + m['content'] + '\n' }}{% endfor %}"
    tokenizer.chat_template = written + "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
    rows = render_conversation(
        tokenizer,
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "7"}] * 2,
        audit_template(tokenizer),
        {},
    )
    ends = [tokenizer.decode(row.ids[row.mask]) for row in rows]
    assert len(rows) == 2 and ends == ["7\n<eos>"] * 2


def copy_with(tokenizer: Any, eos: str) -> Any:
    other = copy.deepcopy(tokenizer)
    other.eos_token = eos
    return other


def config_of(folder: Path, eos: Any, *more: str) -> Config:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return load_config([f"model.path={folder}", *more]).config


def test_inference_stops_where_the_template_ends_turns_and_the_difference_is_said(tmp_path):
    tokenizer = copy.deepcopy(tokenizer_of("chatml"))
    end, other = (tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>"))
    assert stop_ids(config_of(tmp_path, end), tokenizer) == (end,) and not end_lines(
        config_of(tmp_path, end), tokenizer
    )
    tokenizer.eos_token = "<|endoftext|>"
    config = config_of(tmp_path, other)
    (line,) = end_lines(config, tokenizer)
    assert stop_ids(config, tokenizer) == (other, end)
    assert all(part in line for part in (f"<|im_end|> ({end})", f"<|endoftext|> ({other})", f"stop_token_ids=[{end}]"))
    assert not end_lines(config_of(tmp_path, other, f"rollout.stop_token_ids=[{end}]"), tokenizer)
    assert not end_lines(config_of(tmp_path, [other, end]), tokenizer)
    tokenizer.eos_token = None
    require_an_end(config_of(tmp_path, None), tokenizer)  # the template's own


def test_a_template_without_an_end_is_said_and_stops_at_the_next_turn(tmp_path):
    tokenizer = tokenizer_for("glm4moe")
    ids = {t: tokenizer.convert_tokens_to_ids(t) for t in ("<|user|>", "<|observation|>", "</s>")}
    config = config_of(tmp_path, [ids["<|user|>"], ids["<|observation|>"]])
    (line,) = end_lines(config, tokenizer)
    assert set(stop_ids(config, tokenizer)) == {*ids.values()} and all(t in line for t in ids)
    less = config_of(tmp_path, ids["</s>"])
    assert set(stop_ids(less, tokenizer)) == {*ids.values()} and len(end_lines(less, tokenizer)) == 2


def test_rollouts_and_loops_are_given_the_end_of_the_template(tiny_model, monkeypatch):
    config = load_config([f"model.path={tiny_model}", "model.dtype=float32"]).config
    tokenizer, context = tokenizer_of("chatml"), lambda options, context: context
    monkeypatch.setattr(assemble_fleet, "import_object", lambda place: context)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end not in eos_ids(config, copy_with(tokenizer, "<|endoftext|>"))
    assert end in assemble_fleet.rollout_engine(config, copy_with(tokenizer, "<|endoftext|>"), "cpu").eos_token_ids
    gemma = tokenizer_for("gemma4_v5")
    kit, _ = _kit(config, gemma, {"multiply": TOOL}, (gemma.eos_token_id,))
    assert gemma.convert_tokens_to_ids("<|tool_response>") in kit.ends


def test_turns_without_a_thought_are_counted(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"messages": c}) + "\n" for c in ([ASKED, SAID], [ASKED, THOUGHT])))
    table = load_conversations([str(file)], tokenizer_for("nemotron_3_nano"), DataConfig(cache_dir=str(tmp_path / "c")))
    assert table.report.rows_unthinking == 1 and "enable_thinking=false" in table.report.summary()
