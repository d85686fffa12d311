"""Rows as people publish them -> messages, ground truth and metadata.

    RL   {prompt: messages | text, data_source, reward_model.ground_truth, extra_info, ...}     verl's Parquet row
         {prompt, completion?, ground_truth | answer | solution}                                TRL
         {question, answer: "... #### 72"}                                                       GSM8K as published
    SFT  {messages, tools?} · {prompt, completion | response} · {question, answer}

A wrong row is a ValueError that starts with where the row lies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GSM8K_SOURCE = "openai/gsm8k"
GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
GSM8K_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
GROUND_TRUTH_KEYS = ("ground_truth", "answer", "solution")
COMPLETION_KEYS = ("completion", "response")
MEDIA_KEYS = ("images", "videos", "audios")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """What the RL loop needs of a row; the row itself stays beside it."""

    messages: tuple[dict[str, Any], ...]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    tools: list[dict[str, Any]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRow:
    """What SFT needs of a row. Assistant turns before message `train_from` are part of the prompt."""

    messages: tuple[dict[str, Any], ...]
    tools: list[dict[str, Any]] | None
    train_from: int
    enable_thinking: bool | None


def to_task_row(
    row: Mapping[str, Any],
    *,
    where: str,
    prompt_key: str = "prompt",
    tools_key: str | None = None,
    system_prompt: str | None = None,
) -> TaskRow:
    """One row of an RL data set. `where` (file and line) starts every error."""
    _refuse_media(row, where)
    tools = _tools(row.get(tools_key), where, tools_key) if tools_key else None
    extra_info = _mapping(row.get("extra_info"), where, "extra_info")
    source = row.get("data_source")
    if source is not None and not isinstance(source, str):
        raise ValueError(f"{where}: 'data_source' must be a string, got {_kind(source)}")
    if row.get(prompt_key) is not None:
        messages = _messages(row[prompt_key], where, prompt_key)
        truth = _ground_truth(row, where, prompt_key)
    elif "question" in row and "answer" in row:
        question, answer = _gsm8k(row, where)
        messages = ({"role": "user", "content": f"{question} {GSM8K_INSTRUCTION}"},)
        truth, source = _gsm8k_number(answer, where), source or GSM8K_SOURCE
        extra_info = {"question": question, "answer": answer, **extra_info}
    else:
        raise ValueError(
            f"{where}: no prompt: column {prompt_key!r} is missing or null (columns: {_columns(row)})."
            " Fix: data.prompt_key=COLUMN"
        )
    return TaskRow(
        messages=_with_system(messages, system_prompt),
        data_source=source or "",
        ground_truth=truth,
        extra_info=extra_info,
        tools=tools,
    )


def to_conversation_row(
    row: Mapping[str, Any],
    *,
    where: str,
    messages_key: str = "messages",
    prompt_key: str = "prompt",
    tools_key: str | None = None,
    system_prompt: str | None = None,
) -> ConversationRow:
    """One row of an SFT data set."""
    _refuse_media(row, where)
    name = tools_key or "tools"
    tools = _tools(row.get(name), where, name)
    completion_key = next((k for k in COMPLETION_KEYS if row.get(k) is not None), None)
    prompt: tuple[dict[str, Any], ...] = ()
    if row.get(messages_key) is not None:
        answer = _messages(row[messages_key], where, messages_key)
    elif row.get(prompt_key) is not None and completion_key:
        prompt = _messages(row[prompt_key], where, prompt_key)
        answer = _messages(row[completion_key], where, completion_key, role="assistant")
    elif "question" in row and "answer" in row:
        question, text = _gsm8k(row, where)
        # The prompt that RL on the same file sees.
        suffix = f" {GSM8K_INSTRUCTION}" if GSM8K_ANSWER.search(text) else ""
        answer = ({"role": "user", "content": question + suffix}, {"role": "assistant", "content": text})
    else:
        raise ValueError(
            f"{where}: no conversation: needs {messages_key!r}, or {prompt_key!r} with one of {list(COMPLETION_KEYS)},"
            f" or 'question' with 'answer' (columns: {_columns(row)}). Fix: data.messages_key=COLUMN"
        )
    messages = _with_system(prompt + answer, system_prompt)
    thinking = row.get("enable_thinking")
    if thinking is not None and not isinstance(thinking, bool):
        raise ValueError(f"{where}: 'enable_thinking' must be true or false, got {_kind(thinking)}")
    train_from = len(messages) - len(answer) if prompt else 0
    return ConversationRow(messages=messages, tools=tools, train_from=train_from, enable_thinking=thinking)


# ---- parts of a row --------------------------------------------------------------------------------------------------


def _messages(value: Any, where: str, column: str, *, role: str = "user") -> tuple[dict[str, Any], ...]:
    """A list of {role, content}, or a string: one message of `role`."""
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"{where}: {column!r} is empty text")
        value = [{"role": role, "content": value}]
    if not isinstance(value, Sequence) or not value:
        what = "an empty list" if isinstance(value, Sequence) else _kind(value)
        raise ValueError(f"{where}: {column!r} must be text or a list of {{role, content}} messages, got {what}")
    return tuple(_message(m, f"{where}: {column!r} message {k}") for k, m in enumerate(value, start=1))


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be an object with role and content, got {_kind(value)}")
    message = {k: v for k, v in value.items() if v is not None}  # Arrow fills absent keys with null
    if not isinstance(message.get("role"), str):
        raise ValueError(f"{where} has no 'role' (keys: {_columns(message)})")
    content = message.get("content")
    if isinstance(content, str):
        if not content.isascii():
            _refuse_surrogates(content, where)
    elif isinstance(content, list):
        _refuse_media_parts(content, where)
    elif content is None and message.get("tool_calls"):
        message["content"] = ""  # templates add it to text
    else:
        raise ValueError(f"{where} ({message['role']}) has no text: 'content' is {_kind(content)}")
    return message


def _refuse_surrogates(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise ValueError(f"{where}: half of a surrogate pair at character {exc.start + 1} (a cut emoji)") from exc


def _refuse_media(row: Mapping[str, Any], where: str) -> None:
    for key in MEDIA_KEYS:
        if row.get(key):
            raise ValueError(
                f"{where}: {key!r} holds {len(row[key])} item(s), and prompts are rendered as text only: the model would"
                " not see them. Fix: a text-only data set, or drop the column"
            )


def _refuse_media_parts(parts: list[Any], where: str) -> None:
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise ValueError(f"{where}: a content part of type {kind!r}; only text can be rendered")


def _ground_truth(row: Mapping[str, Any], where: str, prompt_key: str) -> Any:
    model = _mapping(row.get("reward_model"), where, "reward_model")
    if model.get("ground_truth") is not None:
        return model["ground_truth"]
    return next((row[k] for k in GROUND_TRUTH_KEYS if k != prompt_key and row.get(k) is not None), None)


def _gsm8k(row: Mapping[str, Any], where: str) -> tuple[str, str]:
    for key in ("question", "answer"):
        if not isinstance(row[key], str):
            raise ValueError(f"{where}: {key!r} must be a string, got {_kind(row[key])}")
        _refuse_surrogates(row[key], f"{where}: {key!r}")
    return row["question"], row["answer"]


def _gsm8k_number(answer: str, where: str) -> str:
    found = GSM8K_ANSWER.search(answer)
    if not found:
        raise ValueError(
            f"{where}: 'answer' has no '#### NUMBER' as GSM8K's rows have (it ends with {answer[-40:]!r})."
            " Fix: for other question/answer data, data.prompt_key=question (the answer column is then the ground truth)"
        )
    return found.group(1).replace(",", "")


def _with_system(messages: tuple[dict[str, Any], ...], system_prompt: str | None) -> tuple[dict[str, Any], ...]:
    if system_prompt is None or any(m["role"] == "system" for m in messages):
        return messages
    return ({"role": "system", "content": system_prompt}, *messages)


def _tools(value: Any, where: str, column: str) -> list[dict[str, Any]] | None:
    """Tool schemas: a list of objects, or that list as JSON text (Arrow has no type for mixed schemas)."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except json.JSONDecodeError as exc:
            raise ValueError(f"{where}: {column!r} is text but not JSON: {exc.msg} at column {exc.colno}") from exc
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(t, Mapping) for t in value):
        raise ValueError(f"{where}: {column!r} must be a list of tool schemas, got {_kind(value)}")
    return [dict(t) for t in value]


def _mapping(value: Any, where: str, column: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: {column!r} must be an object, got {_kind(value)}")
    return dict(value)


def _columns(row: Mapping[str, Any]) -> str:
    return ", ".join(sorted(map(str, row))) or "none"


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return "an object"
    names: dict[type, str] = {type(None): "null", bool: "a boolean", str: "text", list: "a list", bytes: "bytes"}
    return names.get(type(value), f"a {type(value).__name__}")
