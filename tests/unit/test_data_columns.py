"""Columns beside a row's conversation that change its meaning are used or refused, whatever their names."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_bridge_templates import tokenizer_for

from verl.config.schema import DataConfig
from verl.data.files import RawRow
from verl.data.formats import conversation_row, task_row
from verl.data.pairs import pair_of_texts, pair_row, unpaired_rows
from verl.data.render import ConversationJob, RowCounts

Q, A, B = "What is seven plus two?", "It is nine.", "It is ten."
ASKED, SAID = {"role": "user", "content": Q}, {"role": "assistant", "content": A}
SYSTEM = {"role": "system", "content": "Be terse."}
WEATHER = {"name": "weather", "description": "w", "parameters": {"type": "object", "properties": {}}}
SCHEMA = {"type": "function", "function": WEATHER}
TASK = {"prompt": [ASKED], "ground_truth": "9", "data_source": "x"}
CHAT = {"messages": [ASKED, SAID]}
PAIR = {"prompt": Q, "chosen": A, "rejected": B}


def first(read: Any, row: dict[str, Any], **options: Any) -> Any:
    """Return what a reader of rows makes of a row, the first of several."""
    found = read(RawRow("rows.jsonl:7", row), DataConfig(**options))
    return found[0] if isinstance(found, list) else found


def context(read: Any, row: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    found = first(read, row, **options)
    return list(found.prompt if hasattr(found, "prompt") else found.messages)


@pytest.mark.parametrize("column", ("system", "system_prompt"))
def test_the_system_column_is_read_beside_every_kind_of_prompt(column: str) -> None:
    rows: list[tuple[Any, dict[str, Any]]] = [
        *((task_row, row) for row in (TASK, {**TASK, "prompt": Q}, {"question": Q, "answer": "#### 9"})),
        *((conversation_row, row) for row in (CHAT, {"prompt": Q, "completion": A}, {"question": Q, "answer": A})),
        (conversation_row, {"instruction": Q, "output": A}),
        (conversation_row, {"conversations": [{"from": "human", "value": Q}, {"from": "gpt", "value": A}]}),
        *((pair_row, row) for row in (PAIR, {"question": Q, "chosen": A, "rejected": B})),
        (unpaired_rows, {"prompt": Q, "completion": A, "label": True}),
    ]
    for read, row in rows:
        assert context(read, {**row, column: "Be terse."}, system_prompt="Another.")[0] == SYSTEM, row
        assert context(read, {**row, column: ""})[0]["role"] == "user", row
    own = {"messages": [{**SYSTEM, "content": "Its own."}, ASKED, SAID], column: "Be terse."}
    assert [m["content"] for m in context(conversation_row, own)] == ["Its own.", Q, A]


def test_what_is_not_read_of_a_row_is_counted_with_its_name() -> None:
    counts, job = RowCounts(), ConversationJob(tokenizer_for("ours: chatml"), DataConfig(), {})
    own = {"messages": [{**SYSTEM, "content": "Its own."}, ASKED, SAID]}
    job.entries(RawRow("rows.jsonl:7", {**own, "system": "Its own."}), counts)
    job.entries(RawRow("rows.jsonl:7", {**CHAT, "reasoning": A, "prompt": Q}), counts)
    job.entries(RawRow("rows.jsonl:7", {"prompt": json.dumps([ASKED]), "completion": A}), counts)
    assert not counts.unread
    job.entries(RawRow("rows.jsonl:8", {**own, "system": "Be terse."}), counts)
    job.entries(RawRow("rows.jsonl:9", {**CHAT, "thinking": "Six and three.", "prompt": "Another."}), counts)
    job.entries(RawRow("rows.jsonl:9", {"question": Q, "answer": A, "context": "Some text."}), counts)
    job.entries(RawRow("rows.jsonl:9", {"prompt": Q, "completion": A, "instruction": "In French."}), counts)
    alpaca = {"instruction": Q, "output": A}
    job.entries(RawRow("rows.jsonl:9", {**alpaca, "response": B, "documents": [{"text": "Some text."}]}), counts)
    named = [line.split("'")[1] for line in counts.unread]
    assert named == ["system", "thinking", "prompt", "context", "instruction", "response", "documents"]


def test_a_dolly_row_has_its_context_behind_the_instruction() -> None:
    row = {"instruction": "Sum it up.", "context": "Some text.", "response": A, "category": "closed_qa"}
    assert context(conversation_row, row)[0]["content"] == "Sum it up.\n\nSome text."


def test_an_answer_beside_messages_that_end_with_a_question_is_the_one_that_is_trained() -> None:
    turns = [ASKED, SAID, {"role": "user", "content": "Sure?"}]
    for key in ("completion", "response"):
        found = first(conversation_row, {"messages": turns, key: "Yes."})
        assert [*found.messages] == [*turns, {"role": "assistant", "content": "Yes."}] and found.train_from == 3
    assert first(conversation_row, {**CHAT, "completion": A}).train_from == 0


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    *((read, {**row, "history": [["hi", "hello"]]}, "'history'") for read, row in ((pair_row, PAIR), (task_row, TASK))),
    *((pair_of_texts, {"chosen": A, "rejected": B, key: Q}, f"prompt_key={key}") for key in ("input", "query", "task")),
    (unpaired_rows, {"prompt": Q, "completion": A, "label": True, "kto_tag": False}, "'kto_tag' is False"),
    *((task_row, {**TASK, key: [SCHEMA]}, f"tools_key={key}") for key in ("available_tools", "function", "apis")),
    (task_row, {**TASK, "available_tools": json.dumps([WEATHER])}, "tools_key=available_tools"),
    (conversation_row, {**CHAT, "apis": [{"name": "w", "input_schema": {}}]}, "tools_key=apis"),
    (conversation_row, {**CHAT, "tool_list": json.dumps([SCHEMA])}, "tools_key=tool_list"),
    (conversation_row, {**CHAT, "tools": [SCHEMA], "functions": [{**WEATHER, "name": "other"}]}, "'functions'"),
    (pair_row, {**PAIR, "available_tools": [SCHEMA]}, "tools_key=available_tools"),
    *(
        (conversation_row, {**CHAT, key: value}, f"column {key!r}")
        for key, value in (("weight", 0.0), ("train", False))
    ),
    *((conversation_row, {**CHAT, key: [0, 1]}, f"column {key!r}") for key in ("loss_mask", "weights", "loss", "mask")),
    (conversation_row, {**CHAT, "weight": "0.5"}, "column 'weight' is 0.5"),
    (conversation_row, {**CHAT, "train_turns": [1]}, "column 'train_turns'"),
    (pair_row, {**PAIR, "sample_weight": 2.0}, "column 'sample_weight'"),
    (conversation_row, {"prompt": [ASKED, SAID], "completion": " And ten."}, "turns are not continued"),
    (unpaired_rows, {"prompt": Q, "completion": A, "response": B, "label": True}, "'completion' and 'response'"),
    (unpaired_rows, {"prompt": Q, "completion": A, "label": True, "masked": True}, "column 'masked'"),
]


def test_columns_that_would_be_dropped_are_refused_with_their_name() -> None:
    for read, row, said in REFUSED:
        with pytest.raises(ValueError) as refusal:
            first(read, row)
        assert str(refusal.value).startswith("rows.jsonl:7: ") and said in str(refusal.value), (row, refusal.value)


def test_columns_that_change_nothing_stay() -> None:
    marks = {
        "weight": None,
        "loss_mask": [],
        "train": True,
        "masked": 0,
        "mask": "a man",
        "loss": 0.35,
        "sample_weight": float("nan"),
        "weights": [1, 1],
    }
    extra = {"history": [], "tools": "[]", "functions": None, "answers": [{"name": "f", "arguments": {}}], "input": ""}
    others = {"metadata": {"tools": None}, "context": None, "reasoning": None, "options": ["a", "b"], "apis": "[1]"}
    for read, row in ((conversation_row, CHAT), (pair_row, PAIR)):
        assert first(read, {**row, **marks, **extra, **others}) == first(read, row)
    assert context(task_row, {**TASK, **extra, **others}) == context(task_row, TASK)


def test_schemas_of_tools_in_every_spelling_are_the_same() -> None:
    bare = {key: value for key, value in WEATHER.items() if key != "parameters"}
    for columns in (
        {"tools": [SCHEMA]},
        {"tools": [WEATHER]},
        {"tools": [{"type": "function", **WEATHER}]},
        {"tools": [{**bare, "input_schema": WEATHER["parameters"]}]},
        *({"functions": found} for found in ([WEATHER], [SCHEMA], json.dumps([WEATHER]))),
        *({"functions": [WEATHER], "tools": empty} for empty in ([], "")),
    ):
        assert first(conversation_row, {**CHAT, **columns}).tools == (SCHEMA,), columns
