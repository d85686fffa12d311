"""Check that a rendering contains the text of its messages, since a chat template silently drops roles, keys and parts
that it does not read."""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

TEXT_KEYS = ("content", "reasoning_content")
SHORT = 12  # characters of a text that may be in a rendering by chance
THOUGHT_ENDS = ("</think>", "[/THINK]", "<channel|>", "</thinking>", "</reasoning>")


def dropped(
    text: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, whole: Collection[int]
) -> tuple[str, str] | None:
    """Return the kind of text that the rendering `text` lacks, and an example of it; None if it lacks none.

    Texts of messages must occur in the order of the messages, texts of system messages and schemas anywhere. White
    space may differ, and text may be escaped as in JSON.
    whole: the indices of turns with reasoning that must be in the rendering; templates drop the reasoning of others
    """
    rendering = _Rendering(text)
    for tool in tools or ():
        name = (tool.get("function") or tool).get("name")
        if isinstance(name, str) and rendering.end_of_name(name, 0) < 0:
            return "a tool's schema", f"tool {name[:60]!r}"
    at = start = 0
    for i, message in enumerate(messages):
        role = message["role"]
        anywhere = role in ("system", "developer")
        if role != "tool":  # results may be in another order, and before text beside their calls (Gemma 4)
            start = at
        for call in message.get("tool_calls") or ():
            if (end := rendering.end_of_name(call["function"]["name"], start)) < 0:
                return "a tool call", f"message {i + 1}, {call['function']['name'][:60]!r}"
            at = max(at, end)
        near = start  # most texts of a message are in their order: a message of many is read in one go
        for what, piece in _pieces(message, whole=i in whole):
            end = rendering.end_of(piece, 0 if anywhere else near)
            if end < 0 and near > start:
                end = rendering.end_of(piece, start)
            if end < 0:
                return f"the {what} of a message of {str(role)!r}", f"message {i + 1}, {piece[:60]!r}"
            near = max(near, end)
        at = at if anywhere else max(at, near)
    return None


def holds_ambiguous(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if a text of the messages could be found in a rendering by chance, because it is short or equal to
    another one."""
    texts = [text for m in messages for key in TEXT_KEYS for part in texts_in(m.get(key)) if (text := part.strip())]
    return len(set(texts)) < len(texts) or any(len(text) < SHORT for text in texts)


def with_sentinels(messages: Sequence[Mapping[str, Any]]) -> tuple[tuple[Any, ...], list[dict[str, Any]]]:
    """Return the shape of the messages, and messages of that shape in which every text is replaced by a unique one."""
    shape, made = [], []
    for i, message in enumerate(messages):
        held = [key for key in TEXT_KEYS if isinstance(message.get(key), list) or str(message.get(key) or "").strip()]
        texts = {key: _unique(message[key], f"kea{i}{key[0]}") for key in held}
        kinds = (
            tuple(part["type"] for part in content) if isinstance(content, list) else "" for content in texts.values()
        )
        shape.append((message["role"], *texts, *kinds, len(message.get("tool_calls") or ())))
        made.append({**message, **texts})
    return tuple(shape), made


def texts_in(content: Any) -> Iterator[str]:
    """Yield the texts of a content: itself, or those of its parts."""
    if isinstance(content, list):
        yield from (part["text"] for part in content if isinstance(part.get("text"), str))
    elif content:
        yield str(content)


def _unique(content: Any, name: str) -> Any:
    """Return a content of the same form with a text of its own in the place of each text."""
    if not isinstance(content, list):
        return f"{name}weka"
    return [{**part, "text": f"{name}{k}weka"} if "text" in part else part for k, part in enumerate(content)]


def _pieces(message: Mapping[str, Any], *, whole: bool) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) for every text of a message that a template must not drop."""
    if whole and isinstance(reasoning := message.get("reasoning_content"), str):
        yield "reasoning_content", reasoning
    for text in texts_in(message.get("content")):
        yield "content", text if whole or message["role"] != "assistant" else _without_thought(text)
    for call in message.get("tool_calls") or ():
        for leaf in _leaves(call["function"]["arguments"]):
            yield "tool call's arguments", leaf


def _without_thought(text: str) -> str:
    return min((text.rpartition(end)[2] for end in THOUGHT_ENDS), key=len)


def _leaves(value: Any) -> Iterator[str]:
    """Yield the keys, texts and integers of a call's arguments; other values can be written in several ways."""
    if isinstance(value, Mapping):
        for key, found in value.items():
            yield str(key)
            yield from _leaves(found)
    elif isinstance(value, list):
        for found in value:
            yield from _leaves(found)
    elif isinstance(value, str | int) and not isinstance(value, bool):
        yield str(value)


class _Rendering:
    def __init__(self, text: str) -> None:
        self._text = text
        self._squeezed = ""  # the text without its white space, once a piece was found only there
        self._places: list[int] = []  # where its characters are in the text

    def end_of_name(self, name: str, start: int) -> int:
        """Return where the first occurrence of a name, as a word of its own, ends; -1 if there is none."""
        found = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)").search(self._text, start)
        return found.end() if found else -1

    def end_of(self, piece: str, start: int) -> int:
        """Return where the first occurrence of a piece at or after `start` ends; -1 if there is none."""
        piece = piece.strip()
        if self._places and (end := self._end_without_space(piece, start)) >= 0:
            return end
        for text in (piece, *(json.dumps(piece, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True))):
            if (at := self._text.find(text, start)) >= 0:
                return at + len(text)
        return -1 if self._places else self._end_without_space(piece, start)

    def _end_without_space(self, piece: str, start: int) -> int:
        if not self._places:
            self._places = [i for i, c in enumerate(self._text) if not c.isspace()]
            self._squeezed = "".join(self._text.split())
        squeezed = "".join(piece.split())
        at = self._squeezed.find(squeezed, bisect.bisect_left(self._places, start))
        if at < 0 or not squeezed:
            return at if squeezed else start
        return self._places[at + len(squeezed) - 1] + 1
