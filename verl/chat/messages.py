"""Convert messages from the forms in which datasets have them to the form that chat templates expect.

A message is {role, content, tool_calls?, reasoning_content?, name?, tool_call_id?, weight?}. `content` is text (a list
of parts only if one of them is media), the `arguments` of a call are an object, and `weight` is on assistant turns that
the row marks: 1 to be trained, 0 as context. Other forms (OpenAI's, ShareGPT's, JSON text, parts, nulls that Arrow
adds) are converted, or refused with a ValueError that begins with `where`, the place of the message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verl.data.values import kind_of, names_of, refuse_surrogates
from verl.errors import Refused

Messages = tuple[dict[str, Any], ...]
Tools = Sequence[Mapping[str, Any]]

KNOWN_KEYS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "weight"})
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
MARKS = {
    **dict.fromkeys(("weight", "train", "loss_mask", "loss", "trainable", "loss_weight", "step_loss_mask"), 1),
    **dict.fromkeys(("do_train", "is_train", "is_trained", "compute_loss", "has_loss"), 1),
    **dict.fromkeys(("masked", "is_masked", "ignore", "ignored", "no_loss"), 0),
}
"""Key of a message that marks a turn -> its value on a turn that is trained."""
FUNCTION_CALL = "function_call"
ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "chatbot", "ai"), "assistant"),
    **dict.fromkeys(
        ("tool", "function", "observation", "tool_response", "tool_result", "function_response", "ipython"), "tool"
    ),
    **dict.fromkeys((FUNCTION_CALL, "tool_call"), FUNCTION_CALL),
    **{role: role for role in ("system", "developer")},
}
"""Roles as rows spell them, in lower case -> roles of chat templates. A `function_call` is an assistant turn."""
TEXT_PARTS = frozenset({"text", "input_text", "output_text", None})
TEXT_PART_KEYS = frozenset({"type", "text", "cache_control", "annotations"})
MEDIA_PART = re.compile(r"image|video|audio|file|document|media", re.IGNORECASE)
A_MARK = re.compile(r"(^|_|is)(loss|mask|train|weight|ignor|learn|superv)", re.IGNORECASE)
LOOKS_LIKE = (
    (A_MARK, "a mark of what is trained"),
    (
        re.compile(r"(^|_)(image|video|audio|media|attachment|file|pixel)", re.IGNORECASE),
        "media, which is not rendered",
    ),
    (re.compile(r"(^|_)(tool|function|call)", re.IGNORECASE), "tools or calls"),
    (re.compile(r"think|thought|^reason|rationale|chain_of|^cot$", re.IGNORECASE), "reasoning"),
    (re.compile(r"ground_truth|^(answer|solution|label|reference|expected)s?$", re.IGNORECASE), "the truth of a task"),
    (re.compile(r"^(text|value|from|parts|refusal|message|response|completion|prompt)$", re.IGNORECASE), "text"),
)
"""Patterns of keys that are not read, and the kind of content that would be lost. Such keys are refused."""


def read_messages(
    value: Any, where: str, column: str, *, role: str = "user", tools: Tools = (), filled: bool = True
) -> Messages:
    """Return the messages of a value: a list of messages, that list as JSON text, or a text as one message of `role`.

    where, column: the place of the value, for errors
    tools: the schemas of the tools that may be called
    filled: True if objects may contain nulls that Arrow added
    """
    if isinstance(value, str):
        if not value.strip():
            raise Refused(f"{where}: {column!r} is empty text")
        value = messages_of_text(value, where, column) or [{"role": role, "content": value}]
    if isinstance(value, Mapping):  # one message, or the list of messages as a struct of lists
        lists = bool(value) and all(isinstance(v, list) for v in value.values())
        value = [dict(zip(value, turn)) for turn in zip(*value.values())] if lists else [value]
    if not isinstance(value, Sequence) or not value:
        what = "an empty list" if isinstance(value, Sequence) else kind_of(value)
        raise Refused(f"{where}: {column!r} must be text or a list of {{role, content}} messages, got {what}")
    every = [(messages_of_text(m, where, column) or [m])[0] if isinstance(m, str) else m for m in value]
    places = (f"{where}: {column!r} message {k}" for k in range(1, len(every) + 1))
    return tuple(read_message(m, place, tools, filled) for m, place in zip(every, places))


def messages_of_text(text: str, where: str, column: str) -> list[Any] | None:
    """Return the messages that are written as JSON in a text; None if the text is not JSON of messages."""
    if text.lstrip()[:1] not in ("[", "{"):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as e:
        begins = re.match(r"\s*\[\s*\{\s*(['\"])(role|from|content|value)['\"]\s*:", text)
        more = str(e).startswith("Extra data")  # JSON that other text follows is a text of its own
        if begins and not more and (begins.group(1) == '"' or text.rstrip().endswith("]")):
            prefix = f"{column!r} is text that begins like a list of messages and is not JSON: {text.strip()[:60]!r}"
            raise Refused(f"{where}: {prefix}. Fix: write the column as a list, or with json.dumps") from None
        return None
    listed = [found] if isinstance(found, dict) else found
    if not isinstance(listed, list) or not listed or not all(map(_is_message, listed)):
        return None
    return listed


def _is_message(value: Any) -> bool:
    """Return True if an object of JSON text is a message: its role is known, and it has content."""
    if not isinstance(value, Mapping):
        return False
    role = value.get("role", value.get("from"))
    known = isinstance(role, str) and role.strip().lower() in ROLES
    return known and not {"content", "value", "tool_calls", FUNCTION_CALL}.isdisjoint(value)


def read_message(value: Any, where: str, tools: Tools = (), filled: bool = True) -> dict[str, Any]:
    """Return one message in the form that the module describes."""
    if not isinstance(value, Mapping):
        raise Refused(f"{where} must be an object with role and content, got {kind_of(value)}")
    message = {k: v for k, v in value.items() if v is not None}  # Arrow fills absent keys with null
    if "from" in message:  # ShareGPT
        _rename(message, "from", "role", where)
        _rename(message, "value", "content", where)
    if not isinstance(role := message.get("role"), str):
        raise Refused(f"{where} has no 'role' (keys: {names_of(message)})")
    message["role"] = role = ROLES.get(role.strip().lower(), role)
    if message.keys() - KNOWN_KEYS or "weight" in message:
        _read_marks(message, where)
        _read_others(message, where)
    if role == FUNCTION_CALL:
        message |= {"role": "assistant", **_called_in_content(message, where)}
    if calls := message.get("tool_calls"):
        calls = _json_list(calls) if isinstance(calls, str) else calls
        if not isinstance(calls, list):
            raise Refused(f"{where}: tool_calls is no list, got {kind_of(calls)}")
        message["tool_calls"] = [_call(call, where, tools, filled) for call in calls]
    else:
        message.pop("tool_calls", None)
    _read_content(message, where)
    return message


def _rename(message: dict[str, Any], old: str, new: str, where: str) -> None:
    if old in message:
        if message.setdefault(new, message[old]) != message[old]:
            raise Refused(f"{where} has {old!r} and another {new!r}. Fix: drop one of them")
        del message[old]


def _read_content(message: dict[str, Any], where: str) -> None:
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = content = _joined(content, where)
    if isinstance(content, str):
        refuse_surrogates(content, where)
        if "</think>" in content and message.get(REASONING_KEYS[0]):
            message["content"] = _without_thought(content, message[REASONING_KEYS[0]], where)
    elif content is None and message.get("tool_calls"):
        message["content"] = ""  # templates add it to text
    elif not isinstance(content, list):
        raise Refused(f"{where} ({message['role']}) has no text: 'content' is {kind_of(content)}")


def _without_thought(content: str, thought: Any, where: str) -> str:
    """Return the content without a `<think>` block at its beginning that repeats the reasoning of the turn."""
    found = re.match(r"\s*<think>(.*?)</think>\s*", content, re.DOTALL)
    if found is None or not found.group(1).strip():
        return content
    if "".join(found.group(1).split()) != "".join(str(thought).split()):
        prefix = "a <think> block in its content and another reasoning beside it"
        raise Refused(f"{where} has {prefix}: it would be trained twice. Fix: drop one of them")
    return content[found.end() :]


def _joined(parts: list[Any], where: str) -> Any:
    """Return the joined text of content parts; the parts themselves if one of them is media."""
    texts, media = [], False
    for part in parts:
        part = {"type": "text", "text": part} if isinstance(part, str) else part
        if not isinstance(part, Mapping):
            raise Refused(f"{where}: a content part must be an object with a type, got {kind_of(part)}")
        there = {key: found for key, found in part.items() if found is not None}
        kind, more = there.get("type"), there.keys() - TEXT_PART_KEYS
        if kind in TEXT_PARTS and not more:
            if not isinstance(text := there.get("text"), str):
                raise Refused(f"{where}: a content part of type 'text' has no text (keys: {names_of(there)})")
            texts.append(text)
        elif (isinstance(kind, str) and MEDIA_PART.search(kind)) or any(MEDIA_PART.search(str(key)) for key in more):
            media = True
        else:
            prefix = f"a content part of type {kind!r} with the keys {names_of(there)}"
            raise Refused(f"{where}: content holds more than text: {prefix}. Fix: write it as text, or drop it")
    return parts if media else "".join(texts)


def _read_others(message: dict[str, Any], where: str) -> None:
    """Rename the keys of reasoning and calls to those of the module, in place. Raise ValueError for keys that must not
    be dropped."""
    for key in REASONING_KEYS[1:]:
        if key in message and not isinstance(message[key], str):
            raise Refused(f"{where}: {key!r} must be text, got {kind_of(message[key])}")
        _rename(message, key, REASONING_KEYS[0], where)
    if (call := message.pop(FUNCTION_CALL, None)) is not None:
        if message.get("tool_calls"):
            raise Refused(f"{where} has 'function_call' and 'tool_calls'. Fix: drop one of them")
        message["tool_calls"] = [call]
    for key in message.keys() - KNOWN_KEYS:
        if (value := message[key]) in ("", [], {}):
            del message[key]
            continue
        for pattern, what in LOOKS_LIKE:
            if pattern.search(key) and (value or pattern is A_MARK):
                known = ", ".join(sorted({*KNOWN_KEYS, *MARKS}))
                raise Refused(
                    f"{where} has a key {key!r}, which looks like {what} and is not read (keys that are: {known})."
                    " Fix: rename it, or drop it"
                )


def _read_marks(message: dict[str, Any], where: str) -> None:
    """Replace the marks of a message by `weight` (0 or 1) on an assistant turn, in place."""
    found: dict[str, int] = {}
    for key in [key for key in message if key in MARKS]:
        mark = message.pop(key)
        if isinstance(mark, str) or mark not in (0, 1):
            prefix = f"{key}={mark!r}: a turn is trained or it is context. Fix: 0 or 1"
            raise Refused(f"{where}: {prefix}")
        found[key] = int(int(mark) == MARKS[key])
    if not found:
        return
    if len(set(found.values())) > 1:
        raise Refused(f"{where}: {' and '.join(found)} contradict each other. Fix: drop one of them")
    weight = next(iter(found.values()))
    if message["role"] in ("assistant", FUNCTION_CALL):
        message["weight"] = weight
    elif weight:
        prefix = f"{next(iter(found))!r} marks a message of {message['role']!r} to be trained"
        raise Refused(f"{where}: {prefix}; only turns of the assistant are. Fix: drop the mark")


def refuse_trained(messages: Iterable[Mapping[str, Any]], where: str, column: str) -> None:
    """Raise ValueError if one of these messages, which are context, is marked to be trained."""
    if any(m.get("weight") == 1 for m in messages):
        prefix = f"{column!r} marks a turn to be trained (weight=1) that is context here"
        raise Refused(f"{where}: {prefix}. Fix: drop the mark, or `verl sft` with the whole conversation")


# ---- calls -----------------------------------------------------------------------------------------------------------


def _called_in_content(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the content and the calls of ShareGPT's `function_call`: JSON of a call or a list of calls, after optional
    reasoning."""
    content, thought = message.get("content"), ""
    if isinstance(content, str):
        if found := re.match(r"\s*<think>.*?</think>\s*", content, re.DOTALL):
            thought, content = found.group().strip(), content[found.end() :]
        try:
            content = json.loads(content)
        except (ValueError, RecursionError):
            prefix = f"the text of a function call is no JSON of {{name, arguments}}: {str(content)[:60]!r}"
            raise Refused(f"{where}: {prefix}") from None
    calls = content if isinstance(content, list) else [content]
    return {"content": thought, "tool_calls": calls}


def _call(value: Any, where: str, tools: Tools, filled: bool) -> dict[str, Any]:
    """Return a call as {id?, type, function: {name, arguments: object}}."""
    call = {k: v for k, v in value.items() if v is not None} if isinstance(value, Mapping) else {}
    function = call.pop("function", None)
    if function is None:  # {name, arguments} alone
        function = {key: call.pop(key) for key in ("name", "arguments", "parameters") if key in call}
    function = {k: v for k, v in function.items() if v is not None} if isinstance(function, Mapping) else {}
    if "arguments" not in function and "parameters" in function:
        function["arguments"] = function.pop("parameters")
    name, arguments = function.get("name"), function.get("arguments")
    more = sorted(function.keys() - {"name", "arguments"} | call.keys() - {"id", "type", "index"})
    if not isinstance(name, str) or not name or more or call.get("type", "function") != "function":
        prefix = f"got {json.dumps(value, default=str, ensure_ascii=False)[:120]}"
        raise Refused(f"{where}: a tool call is {{id, type: function, function: {{name, arguments}}}}, {prefix}")
    if arguments is None or isinstance(arguments, str):
        arguments = _arguments_of_text(arguments or "", name, where)
    elif isinstance(arguments, Mapping):
        arguments = _fitting(arguments, _parameters(tools, name)) if filled else dict(arguments)
    else:
        raise Refused(f"{where}: the arguments of {name!r} must be an object, got {kind_of(arguments)}")
    return {**call, "type": "function", "function": {"name": name, "arguments": arguments}}


def _json_list(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _arguments_of_text(text: str, name: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Refused(f"{where}: the arguments of {name!r} are text that is no JSON object: {text[:60]!r}")
    return found


# ---- nulls that Arrow fills in ---------------------------------------------------------------------------------------


def _parameters(tools: Tools, name: str) -> Any:
    """Return the JSON schema of a function's arguments; None if it is not among the tools."""
    functions = (tool.get("function") or tool for tool in tools)
    return next((f.get("parameters") for f in functions if isinstance(f, Mapping) and f.get("name") == name), None)


def _admits_null(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    kinds = schema.get("type")
    options = [option for key in ("anyOf", "oneOf") for option in schema.get(key) or ()]
    return bool(
        schema.get("nullable")
        or kinds == "null"
        or (isinstance(kinds, list) and "null" in kinds)
        or None in (schema.get("enum") or ())
        or any(map(_admits_null, options))
    )


def _fitting(value: Any, schema: Any) -> Any:
    """Return arguments without the nulls that their schema does not admit. Arrow adds such keys from the calls of other
    rows."""
    if isinstance(value, Mapping):
        known = (schema.get("properties") or {}) if isinstance(schema, Mapping) else {}
        return {
            key: _fitting(found, known.get(key))
            for key, found in value.items()
            if found is not None or _admits_null(known.get(key))
        }
    if isinstance(value, list):
        items = schema.get("items") if isinstance(schema, Mapping) else None
        return [_fitting(item, items) for item in value]
    return value


def without_nulls(value: Any) -> Any:
    """Return an object without keys that are null, at any depth. Null items of lists are kept."""
    if isinstance(value, Mapping):
        return {key: without_nulls(found) for key, found in value.items() if found is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def tool_without_nulls(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool's schema without nulls, except those with a meaning: `default: null` of an optional argument."""
    return {key: _schema_without_nulls(found) for key, found in tool.items() if found is not None}


def _schema_without_nulls(value: Any, required: bool = False) -> Any:
    if isinstance(value, list):
        return [_schema_without_nulls(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    kept = {key: found for key, found in value.items() if found is not None}
    if "default" in value and value["default"] is None and (not required or _admits_null(value)):
        kept = {key: found for key, found in value.items() if found is not None or key == "default"}
    made = {key: found if key in ("enum", "default") else _schema_without_nulls(found) for key, found in kept.items()}
    if isinstance(properties := kept.get("properties"), Mapping):
        needed = kept.get("required") or ()
        made["properties"] = {
            key: _schema_without_nulls(found, key in needed) for key, found in properties.items() if found is not None
        }
    return made
