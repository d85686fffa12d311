"""Columns that change the meaning of a row's conversation. They are read, or the row is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl.chat.messages import MARKS
from verl.data.values import names_of
from verl.errors import Refused

SYSTEM_COLUMNS = ("system", "system_prompt")
CONTEXT_COLUMNS = ("input", "context")
"""Columns of an Alpaca row with the text that the instruction refers to (Dolly's is `context`)."""
PROMPT_COLUMNS = (
    *("input", "query", "problem", "user", "task", "context", "passage", "post", "dialogue", "conversation"),
    *("history", "instruction", "messages", *SYSTEM_COLUMNS),
)
"""Columns that may be the prompt of two answers, under names that are not read. Two answers without a prompt are
refused beside them."""
REASONING_COLUMNS = ("reasoning", "reasoning_content", "thinking", "thought", "thoughts", "cot", "rationale")
ROW_MARKS = {
    **MARKS,
    **dict.fromkeys(("weights", "loss_weights", "sample_weight", "sample_weights", "loss_masks", "train_mask"), 1),
    **dict.fromkeys(("mask", "masks"), 1),
}
"""Columns that weight or mark a row or its turns -> the value with which the whole row is trained."""
TURN_COLUMNS = ("train_on", "train_turns")
"""Columns that name the turns to train."""


def system_of(row: Mapping[str, Any]) -> str:
    """Return the text of the row's column for the system message; "" if there is none."""
    texts = (row.get(key) for key in SYSTEM_COLUMNS)
    return next((text for text in texts if isinstance(text, str) and text.strip()), "")


def unread_system(row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the columns of system messages that are not read, because the messages have another system message."""
    for key in SYSTEM_COLUMNS:
        text = row.get(key)
        if not isinstance(text, str) or not text.strip():
            continue
        if not any(m["role"] in ("system", "developer") and text.strip() in str(m["content"]) for m in messages):
            yield key


def question_of(row: Mapping[str, Any]) -> str:
    """Return the question of an Alpaca row: the instruction, and the text that it refers to."""
    parts = (row["instruction"], *(row.get(key) for key in CONTEXT_COLUMNS))
    return "\n\n".join(str(text) for text in parts if text)


def refuse_history(row: Mapping[str, Any], where: str) -> None:
    """Raise ValueError for a row with turns in Alpaca's `history` if its prompt is not the `instruction`."""
    history = row.get("history")
    if isinstance(history, list) and history and all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        fix = "Fix: write the whole conversation as messages, or drop the column"
        raise Refused(f"{where}: 'history' holds turns, and it is read beside 'instruction' alone. {fix}")


def refuse_unasked(row: Mapping[str, Any], where: str) -> None:
    """Raise ValueError for two answers without a prompt if another column of the row could be their prompt."""
    if column := next((key for key in PROMPT_COLUMNS if row.get(key)), ""):
        prefix = f"no prompt is read for 'chosen' and 'rejected', and the row has {column!r} (columns: {names_of(row)})"
        raise Refused(f"{where}: {prefix}. Fix: data.prompt_key={column} if that is the prompt, or drop the column")


def refuse_schemas(row: Mapping[str, Any], where: str, read: str) -> None:
    """Raise ValueError for a column of tool schemas that is not `read`, the column that is used."""
    for key, value in row.items():
        if key != read and isinstance(value, list | str) and value and are_schemas(value) and value != row.get(read):
            prefix = f"column {key!r} holds the schemas of tools and is not read ({read!r} is)"
            raise Refused(f"{where}: {prefix}. Fix: data.tools_key={key}, or drop the column")


def are_schemas(value: Any) -> bool:
    """Return whether a value is a list of tool schemas, bare or in {type: function, function: ...}, or its JSON."""
    if isinstance(value, str):
        if not value.lstrip()[:200].startswith("[") or '"name"' not in value or "{" not in value[:20]:
            return False
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return False
    first = value[0] if isinstance(value, list) and value else None
    if not isinstance(first, Mapping):
        return False
    function = first.get("function")
    function = function if isinstance(function, Mapping) else first
    described = any(isinstance(function.get(key), Mapping) for key in ("parameters", "input_schema"))
    return isinstance(function.get("name"), str) and described


def refuse_marks(row: Mapping[str, Any], where: str) -> None:
    """Raise ValueError for a row in which a column gives weights or marks to the row or its turns: marks are read from
    messages only."""
    for key in [key for key in row if key in ROW_MARKS or key in TURN_COLUMNS]:
        if (row[key] and key in TURN_COLUMNS) or not _trains_all(row[key], ROW_MARKS.get(key, 1), key):
            prefix = f"column {key!r} is {str(row[key])[:60]}, and marks of what is trained are read on messages alone"
            raise Refused(f"{where}: {prefix}. Fix: weight=0 or 1 on each message of the assistant, or drop the column")


def _trains_all(value: Any, trained: int, column: str = "") -> bool:
    """Return True if a mark has no effect: it is empty, has another type, or is `trained` throughout. A number in the
    column `loss` is a measurement and has no effect either."""
    if isinstance(value, list):
        return all(_trains_all(item, trained) for item in value)
    if column == "loss" and not isinstance(value, bool):
        return True
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return True
    return not isinstance(value, int | float) or value == trained or value != value  # NaN: pandas has no null


def unread_texts(
    row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], columns: Sequence[str]
) -> Iterator[str]:
    """Yield the columns with a text that is in none of the messages."""
    for key in columns:
        text = row.get(key)
        if isinstance(text, str) and text.strip():
            prefix = (str(m.get(part)) for m in messages for part in ("content", "reasoning_content"))
            if not any(text.strip() in part for part in prefix):
                yield key
