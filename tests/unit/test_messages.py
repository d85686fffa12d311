"""Messages of rows in every public spelling are the same messages; what cannot be read is refused with its place."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from each import each
from test_chat import audit_of, conversation, tokenizer_of, trained

from verl.chat.conversation import render_conversation
from verl.chat.messages import read_message, read_messages, without_nulls
from verl.chat.template import RowRefused
from verl.config.schema import DataConfig
from verl.data.files import RawRow, expand_files, read_rows
from verl.data.formats import conversation_row, task_row
from verl.data.pairs import pair_row, unpaired_rows

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "w", "parameters": CITY}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
USER, ASSISTANT = {"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}
ANSWERS = ({"role": "tool", "content": "4 C"}, {"role": "assistant", "content": "4 C."})
WHOLE = (USER, ASSISTANT, *ANSWERS)


def read(*messages: Any, **options: Any) -> tuple[dict[str, Any], ...]:
    return read_messages(list(messages), "f:1", "messages", **options)


def test_one_conversation_in_every_spelling() -> None:
    text = json.dumps({"city": "Oslo"})
    calls = [
        [{"id": None, "type": "function", "function": {"name": "weather", "arguments": text}}],
        [{"function": {"name": "weather", "arguments": {"city": "Oslo", "a": None}}}],
        [{"name": "weather", "arguments": {"city": "Oslo"}}],
        [{"type": "function", "function": {"name": "weather", "parameters": {"city": "Oslo"}}}],
        json.dumps([CALL]),
    ]
    spelled: list[dict[str, Any]] = [
        {**ASSISTANT, "content": content, "tool_calls": c} for c in calls for content in ("", None)
    ]
    function = {"name": "weather", "arguments": text}
    spelled += [{"role": "assistant", "content": None, "function_call": function, "tool_calls": None}]
    spelled += [{"from": "function_call", "value": json.dumps(value)} for value in (calls[2][0], calls[2])]
    spelled += [
        {"role": "Function_Call", "content": json.dumps(function)},
        {"from": "function_call", "value": function},
    ]
    for call in spelled:
        assert read(USER, call) == (USER, ASSISTANT), call
    for names in (("human", "observation", "gpt"), ("User", "TOOL", "Assistant"), ("user", "function", "chatgpt")):
        user, tool, assistant = names
        share = [{"from": user, "value": "Weather?"}, spelled[-1], {"from": tool, "value": "4 C"}]
        assert read(*share, {"from": assistant, "value": "4 C."}) == WHOLE, names
    thought = read({"from": "function_call", "value": f"<think>\nwhere\n</think>\n\n{json.dumps(function)}"})
    struct = {"role": ["user", "assistant"], "content": ["Weather?", "4 C."]}
    assert read_messages(USER, "f:1", "prompt") == read(json.dumps(USER)) == (USER,)
    assert read_messages(struct, "f:1", "messages") == (USER, ANSWERS[1])
    assert thought == ({**ASSISTANT, "content": "<think>\nwhere\n</think>"},)
    for key in ("reasoning", "thinking", "reasoning_content"):
        assert read({"role": "assistant", "content": "4", key: "2+2"})[0]["reasoning_content"] == "2+2"


def test_parts_of_text_are_text_and_media_stay_for_their_refusal() -> None:
    for parts in (["2+", "2?"], [{"type": "text", "text": "2+", "image": None}, {"type": "input_text", "text": "2?"}]):
        assert read({"role": "user", "content": parts}) == ({"role": "user", "content": "2+2?"},)
    image = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    assert read({"role": "user", "content": image})[0]["content"] == image
    mixed = [{"type": "text", "text": "a", "image": "a.png"}]
    assert read({"role": "user", "content": mixed})[0]["content"] == mixed, (
        "a text part with an image is not text alone"
    )


def test_json_text_is_read_as_messages_in_every_column() -> None:
    text, answer = json.dumps([USER]), json.dumps([{"role": "assistant", "content": "4"}])
    said = ({"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "4"})
    whole = json.dumps(list(said))
    raw = lambda row: (RawRow("f:1", row), DataConfig())  # noqa: E731
    assert task_row(*raw({"prompt": text, "answer": "4"})).messages == (USER,)
    share = json.dumps([{"from": "human", "value": "Weather?"}, {"from": "gpt", "value": "4"}])
    for row in ({"prompt": text, "completion": answer}, {"messages": whole}, {"conversations": share}):
        assert conversation_row(*raw(row)).messages == said, row
    pair = pair_row(*raw({"prompt": text, "chosen": answer, "rejected": answer.replace("4", "5")}))
    assert pair.prompt == (USER,) and pair.chosen == said[1:]
    assert unpaired_rows(*raw({"prompt": text, "completion": answer, "label": True}))[0].chosen == said[1:]
    for own in (
        '{"answer": 4}',
        "[1, 2]",
        '{"role": "admin", "content": "x"}',
        "[x] or {y}?",
        '[{"a": 1}]',
        *(f"{t} Why?" for t in (text, str([USER]))),
    ):
        assert read_messages(own, "f:1", "prompt") == ({"role": "user", "content": own},), own
    for broken in (str([USER]), text[:-3]):
        with pytest.raises(ValueError, match=r"f:1: 'prompt' is text that begins like a list of messages.*Fix"):
            task_row(*raw({"prompt": broken, "answer": "4"}))
    with pytest.raises(ValueError, match=r"f:1: 'conversations' is text and no list of messages"):
        conversation_row(*raw({"conversations": "hello"}))


def test_nulls_of_arrow_are_in_no_schema_and_no_call(tmp_path: Path) -> None:
    def row(name: str, arguments: dict[str, Any], properties: dict[str, Any]) -> dict[str, Any]:
        function = {"name": name, "description": name, "parameters": {"type": "object", "properties": properties}}
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        return {
            "messages": [{"role": "user", "content": "?"}, turn],
            "tools": [{"type": "function", "function": function}],
        }

    integer = {"type": "integer"}
    rows = [
        row("weather", {"city": "Oslo"}, CITY["properties"]),
        row("add", {"a": 1, "b": 2}, {"a": integer, "b": integer}),
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet")
    (file,) = expand_files([str(tmp_path / "c.parquet")])
    for raw, wanted in zip(read_rows(file), rows, strict=True):
        found = conversation_row(raw, DataConfig())
        assert list(found.messages) == wanted["messages"] and list(found.tools) == wanted["tools"]
    assert without_nulls({"search": {"create_kwargs": {"k": 1, "other": None}}, "calc": None}) == {
        "search": {"create_kwargs": {"k": 1}}
    }


def test_a_schema_without_its_wrapper_gets_it() -> None:
    for tools in ([WEATHER["function"]], json.dumps([WEATHER["function"]]), [json.dumps(WEATHER)], [WEATHER]):
        assert conversation_row(RawRow("f:1", {"messages": WHOLE, "tools": tools}), DataConfig()).tools == (WEATHER,)
    old = {"messages": WHOLE, "functions": [{**WEATHER["function"], "strict": None}]}
    assert conversation_row(RawRow("f:1", old), DataConfig()).tools == (WEATHER,)


def test_nulls_that_say_something_stay() -> None:
    own = {
        "a": {"type": "string", "default": None},
        "b": {"enum": [None, "x"]},
        "c": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
        "d": {"type": "integer", "default": None, "description": None},
    }
    parameters = {"type": "object", "properties": {**own, "e": None}, "required": ["b", "c", "d"]}
    tool = {"type": "function", "strict": None, "function": {"name": "f", "parameters": parameters}}
    arguments = {"a": None, "b": None, "c": None, "d": 1, "e": None}
    turn = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    found = conversation_row(RawRow("f:1", {"messages": [USER, turn], "tools": [tool]}), DataConfig())
    properties = {**own, "d": {"type": "integer"}}
    assert found.tools == (
        {"type": "function", "function": {"name": "f", "parameters": {**parameters, "properties": properties}}},
    )
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == {"b": None, "c": None, "d": 1}
    exact = read(turn, filled=False)
    assert exact[0]["tool_calls"][0]["function"]["arguments"] == arguments, "a request's nulls are its own"
    as_text = json.dumps(arguments)
    turn["tool_calls"][0]["function"]["arguments"] = as_text
    assert read(turn)[0]["tool_calls"][0]["function"]["arguments"] == arguments


def test_marks_choose_the_turns_that_are_trained() -> None:
    turns = conversation("2+2?", "WRONG five", "Sure?", "4")
    for key, no, yes in (
        *((key, 0, 1) for key in ("weight", "train", "loss_mask", "loss", "trainable", "step_loss_mask")),
        *((key, False, True) for key in ("train", "do_train", "is_train", "compute_loss", "has_loss")),
        *((key, True, False) for key in ("is_masked", "ignore", "no_loss")),
        ("weight", 0.0, 1.0),
        ("masked", True, False),
        ("weight", 0, None),
    ):
        marked = [turns[0], {**turns[1], key: no}, {**turns[2], key: no}, {**turns[3], key: yes}]
        rows = render_conversation(tokenizer_of("chatml"), read(*marked), audit_of("chatml"), {})
        assert trained("chatml", rows) == ["4<|im_end|>"], key
    for key, last_only in (("weight", False), ("train", True)):
        off = read(turns[0], turns[1], turns[2], {**turns[3], key: 0})
        if last_only:
            with pytest.raises(RowRefused, match="marked as not trained"):
                render_conversation(tokenizer_of("chatml"), off, audit_of("chatml"), {}, last_only=True)
        else:
            assert trained("chatml", render_conversation(tokenizer_of("chatml"), off, audit_of("chatml"), {})) == [
                "WRONG five<|im_end|>"
            ]


def test_marks_of_context_are_refused_where_they_say_train() -> None:
    marked = {"role": "assistant", "content": "4", "weight": 1}
    asked, raw = [USER, marked, USER], lambda row: (RawRow("f:1", row), DataConfig())
    answer = {"role": "assistant", "content": "5"}
    for call in (
        lambda: task_row(*raw({"prompt": asked, "answer": "4"})),
        lambda: conversation_row(*raw({"prompt": asked, "completion": "5"})),
        lambda: pair_row(*raw({"prompt": asked, "chosen": "4", "rejected": "5"})),
        lambda: pair_row(*raw({"prompt": "a", "chosen": [marked, USER, answer], "rejected": "5"})),
        lambda: unpaired_rows(*raw({"prompt": asked, "completion": "5", "label": True})),
    ):
        with pytest.raises(ValueError, match=r"^f:1: .*marks a turn to be trained \(weight=1\).*Fix"):
            call()
    assert task_row(*raw({"prompt": [USER, {**marked, "weight": 0}, USER], "answer": "4"})).messages[1]["weight"] == 0


REFUSED = [
    ({"role": "user", "content": [{"type": "text"}]}, "a content part of type 'text' has no text"),
    ({"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}, "holds more than text.*'thinking'"),
    ({"role": "user", "content": [3]}, "must be an object with a type, got a int"),
    ({"role": "assistant", "content": "", "tool_calls": "f()"}, "tool_calls is no list"),
    (
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        "no JSON object",
    ),
    (
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
        "no JSON object",
    ),
    ({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}, "an object"),
    ({"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {}}}]}, "a tool call is"),
    (
        {"role": "assistant", "content": "", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]},
        "a tool call is",
    ),
    ({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}, "input": "x"}]}, "a tool call is"),
    ({"role": "assistant", "content": "", "tool_calls": [CALL], "function_call": CALL["function"]}, "drop one of them"),
    ({"from": "function_call", "value": "weather(Oslo)"}, "no JSON of {name, arguments}"),
    ({"role": "user", "content": "a", "from": "human", "value": "b"}, "'from' and another 'role'"),
    ({"role": "assistant", "content": "4", "weight": 0.5}, "weight=0.5: .*0 or 1"),
    ({"role": "assistant", "content": "4", "loss_mask": [0, 1]}, "0 or 1"),
    ({"role": "assistant", "content": "4", "weight": "0"}, "0 or 1"),
    ({"role": "assistant", "content": "4", "weight": 0, "train": True}, "contradict"),
    ({"role": "user", "content": "4", "weight": 1}, "'weight' marks a message of 'user'"),
    ({"role": "tool", "content": "4", "masked": False}, "'masked' marks a message of 'tool'"),
    ({"role": "assistant", "content": "4", "loss_scale": 1}, "'loss_scale', which looks like a mark"),
    ({"role": "assistant", "content": "4", "train_on_turn": True}, "looks like a mark"),
    *(
        ({"role": "assistant", "content": "4", key: False}, "looks like a mark")
        for key in ("is_loss", "learn", "train_it")
    ),
    ({"role": "user", "content": "4", "images": ["a.png"]}, "'images', which looks like media"),
    ({"role": "system", "content": "4", "tools": [WEATHER]}, "'tools', which looks like tools"),
    ({"role": "assistant", "content": "4", "reasoning_details": [1]}, "looks like reasoning"),
    ({"role": "assistant", "content": "4", "thinking": "a", "reasoning": "b"}, "another 'reasoning_content'"),
    ({"role": "assistant", "content": "4", "thinking": ["a"]}, "must be text"),
    ({"role": "assistant", "content": "<think>\na\n</think>\n\n4", "thinking": "b"}, "another reasoning beside it"),
    ({"role": "user", "content": "4", "ground_truth": "4"}, "looks like the truth"),
    ({"role": "assistant", "content": "", "refusal": "no"}, "looks like text"),
]


def test_a_thought_that_is_given_twice_is_read_once() -> None:
    turn = {"role": "assistant", "content": "<think>\na b\n</think>\n\n4", "reasoning_content": "a b"}
    assert read(turn)[0] == {**turn, "content": "4"}
    for content in ("<think>\n\n</think>\n\n4", "4 </think>"):  # an empty block, and text that speaks of one
        assert read({**turn, "content": content})[0]["content"] == content


def test_what_cannot_be_read_is_refused() -> None:
    failed = []
    for message, says in REFUSED:
        with pytest.raises(ValueError, match=r"^f:1: 'messages' message 1") as error:
            read(message)
        if not re.search(says, str(error.value)):
            failed.append((message, str(error.value)))
    assert not failed
    harmless = {
        "timestamp": 3,
        "is_tool_error": False,
        "has_image": 0,
        "finish_reason": "stop",
        "images": [],
        "refusal": None,
        "annotations": [],
        "id": "m1",
    }
    assert read_message({"role": "assistant", "content": "4", **harmless}, "f:1")["content"] == "4"


@each("role", ["ipython", "tool_result", "Observation"])
def test_results_of_tools_have_many_names(role: str) -> None:
    assert read_message({"role": role, "content": "4 C"}, "a:1")["role"] == "tool"
