"""Compute the ids of the next prompt after a sampled turn by tokenising only the new messages, independently of the
conversation before them.

The text that a template writes after an assistant turn (its trailing text, the results of tools, the generation prompt)
is the difference between two renderings of a short artificial history: with and without the new messages. This requires
a template for which the difference is the same after any history. `bridge_of` tests that with several histories, and
returns None for a template without this property.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl.chat.encoding import encoded_text, rendered_ids
from verl.chat.template import (
    AGAIN,
    ANSWER,
    CALLS,
    SYSTEM,
    THINK,
    USER,
    Message,
    Renderer,
    RenderError,
    TemplateAudit,
    Tokenizer,
    is_prefix,
    keeps_text,
)

_OPEN, _CLOSE = "\ue000", "\ue001"
"""Characters before and after the number of a marker. A marker replaces a special token in the text of a message."""
_ANSWERED = {"role": "assistant", "content": "It is 42.", "tool_calls": CALLS}
_DUMMIES = (
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    _ANSWERED,
    {**_ANSWERED, "reasoning_content": "six sevens"},
    {"role": "assistant", "content": "It is 42."},
)
"""Candidates for the assistant turn that ends the artificial history. Many templates render a turn differently when it
is the last message; `bridge_of` uses the first candidate that this template renders alike in both cases."""


@dataclass(frozen=True, slots=True)
class PlainText:
    """Tokenises the text of tools and environments without control tokens, so that the text cannot open or close a
    turn."""

    tokenizer: Tokenizer
    control: Mapping[str, tuple[int, ...]]  # text of a special token -> the ids of that text as plain text

    def marked(self, text: str, only: Collection[str] | None = None) -> str:
        """Return the text with each special token (`only`: each of these) replaced by a marker, for use as the content
        of a message."""
        text = text.replace(_OPEN, "\ufffd")
        for k, token in enumerate(self.control):
            if only is not None and token not in only:
                continue
            if token in text:
                text = text.replace(token, f"{_OPEN}{k}{_CLOSE}")
        return text

    def marked_content(self, content: Any) -> Any:
        """Return the content of a message, a text or content parts, with its texts as `marked` returns them."""
        if not isinstance(content, list):
            return self.marked(str(content))
        return [{**part, "text": self.marked(part["text"])} if "text" in part else part for part in content]

    def encode(self, text: str) -> np.ndarray:
        """Return the ids [t] int64 of a rendering of marked messages: control tokens where the template wrote them, and
        the ids of plain text in the place of each marker."""
        return np.concatenate([np.zeros(0, np.int64), *(ids for ids, _ in self._parts(text))])

    def encode_within(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids [t] int64 of `encode`, and a mask [t] bool: True for tokens that contain a character of one of
        the given (start, end) spans of the text. All True if the tokenizer does not return the characters of its
        tokens."""
        inside = np.zeros(len(text) + 1, np.int64)
        for a, b in spans:
            inside[a + 1 : b + 1] = 1  # at the place behind each character
        before, ids, flags = np.cumsum(inside), [np.zeros(0, np.int64)], [np.zeros(0, bool)]
        for part, characters in self._parts(text, places=True):
            start, end = np.array(characters, np.int64).reshape(-1, 2).T
            ids.append(part)
            flags.append(before[end] > before[start])
        known = bool(getattr(self.tokenizer, "is_fast", False))
        return np.concatenate(ids), np.concatenate(flags) if known else np.ones(sum(map(len, ids)), bool)

    def _parts(self, text: str, *, places: bool = False) -> Iterator[tuple[np.ndarray, list[tuple[int, int]]]]:
        """Yield, for each marker and each text between markers, its ids and (with `places`) the (start, end) of each id
        in the text."""
        plain, at = list(self.control.values()), 0
        placed = places and getattr(self.tokenizer, "is_fast", False)
        for i, part in enumerate(re.split(f"{_OPEN}(\\d+){_CLOSE}", text)):
            if i % 2:
                ids, size = np.array(plain[int(part)], np.int64), len(part) + 2
                yield ids, [(at, at + size)] * len(ids)
                at += size
            elif part:
                if placed:
                    found: Any = self.tokenizer(part, add_special_tokens=False, return_offsets_mapping=True)
                    yield rendered_ids(found), [(at + a, at + b) for a, b in found["offset_mapping"]]
                else:
                    ids = encoded_text(self.tokenizer, part)
                    yield ids, [(0, 0)] * len(ids)
                at += len(part)


def plain_text(tokenizer: Tokenizer) -> PlainText:
    """Return the `PlainText` of a tokenizer. Its `control` has every special token and every added token that a
    template may write (`<tool_call>`), the longest first."""
    added = tokenizer.added_tokens_decoder
    texts = {t.content for t in added.values() if t.special or len(t.content) > 2} | set(tokenizer.all_special_tokens)
    control = {}
    for text in sorted(filter(None, texts), key=lambda t: (-len(t), t)):
        halves = (rendered_ids(tokenizer(half, add_special_tokens=False)) for half in (text[:1], text[1:]) if half)
        control[text] = tuple(i for half in halves for i in half.tolist() if i not in added)
    return PlainText(tokenizer, control)


@dataclass(frozen=True, slots=True)
class Bridge:
    """Computes the ids between a sampled turn and the next turn of the model, for one chat template (`bridge_of`)."""

    renderer: Renderer
    plain: PlainText
    end: tuple[int, ...]
    """The token that ends a turn. It is added if the sampled ids do not end with it."""
    dummy: tuple[Message, ...]
    """The artificial history after which the new messages are rendered."""
    before: str
    """The rendered text of that history, up to the end of its last turn."""
    image_token: str = ""
    """The token that the template writes for an image; "" if the model reads text alone."""

    def ids(self, sampled: np.ndarray, messages: Sequence[Message]) -> np.ndarray:
        """Return the ids [t] int64 that follow the sampled ids: the end of the turn if it is missing, the messages, and
        the generation prompt."""
        return self.after(sampled, messages)[0]

    def after(self, sampled: np.ndarray, messages: Sequence[Message]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids [t] int64 of `ids`, and a mask [t] bool: True for tokens of the messages' content, False for
        tokens of the template. If the content cannot be located in the rendering, all tokens of the rendering are
        True. An image in the content is the template's token for one; its mask is True."""
        text, at, spans = self._text(messages), 0, list[tuple[int, int]]()
        for content in (piece for m in messages for piece in self._pieces(m["content"])):
            start = text.find(content, at)
            at = start + len(content)
            spans.append((start, at))
        ids, written = self.plain.encode_within(text, spans)
        if any(start < 0 for start, _ in spans):  # the template writes it in other characters
            written[:] = True
        end = np.array(self.end if not len(sampled) or sampled[-1] != self.end[-1] else (), np.int64)
        return np.concatenate([end, ids]), np.concatenate([np.zeros(len(end), bool), written])

    def added(self, messages: Sequence[Message]) -> np.ndarray:
        return self.plain.encode(self._text(messages))

    def _pieces(self, content: Any) -> Iterator[str]:
        """Yield the texts of a message's content as they are in a rendering, with the token of each image."""
        marked = self.plain.marked_content(content)
        for part in marked if isinstance(marked, list) else [{"text": marked}]:
            yield part["text"].strip() if "text" in part else self.image_token

    def _text(self, messages: Sequence[Message]) -> str:
        marked = [{**m, "content": self.plain.marked_content(m["content"])} for m in messages]
        text = self.renderer.text([*self.dummy, *marked], prompt=True)
        if not text.startswith(self.before):
            raise RenderError("the chat template rewrites the history for these messages")
        return text[len(self.before) :]


def bridge_of(tokenizer: Tokenizer, audit: TemplateAudit, template_kwargs: Mapping[str, Any]) -> Bridge | None:
    """Return the bridge of a tokenizer's chat template; None if its turns have no end token, or if new messages change
    the rendering of the messages before them."""
    if not audit.ends_turn_with:
        return None
    r, plain = Renderer(tokenizer, template_kwargs, spelling=audit.spelling), plain_text(tokenizer)
    for prefix in _DUMMIES:
        dummy = (USER, prefix)
        before = _up_to_end(r, dummy, audit)
        if before is None:
            continue
        bridge = Bridge(r, plain, audit.ends_turn_with[-1:], dummy, before)
        if all(_holds(bridge, history, messages, audit) for history in _histories(prefix, audit) for messages in _NEW):
            return bridge
    return None


_NEW = ([ANSWER], [ANSWER, {**ANSWER, "content": '{"kiwi": "a\\nb"}\nkea'}])


def _histories(prefix: Message, audit: TemplateAudit) -> list[list[Message]]:
    """Return test histories that end with an assistant turn: a short one, one with several turns, one with a tool
    result, and one with a system message if the template supports it."""
    found: list[list[Message]] = [
        [USER, prefix],
        [USER, {**THINK, "tool_calls": CALLS}],
        [AGAIN, prefix, ANSWER, prefix],
        [USER, prefix, ANSWER, _ANSWERED, AGAIN, prefix],
    ]
    return [*found, [SYSTEM, *found[3]]] if audit.supports_system else found


def _up_to_end(r: Renderer, history: Sequence[Message], audit: TemplateAudit) -> str | None:
    """Return the text of a history up to the end token of its last turn."""
    try:
        ids, text = r.ids(history, prompt=False), r.text(history, prompt=False)
    except RenderError:
        return None
    trailing = len(audit.trailing_ids)
    if tuple(ids[len(ids) - trailing - 1 :].tolist()) != (*audit.ends_turn_with[-1:], *audit.trailing_ids):
        return None
    after = str(r.tokenizer.decode(list(audit.trailing_ids))) if trailing else ""
    return text[: len(text) - len(after)] if text.endswith(after) else None


def _holds(bridge: Bridge, history: Sequence[Message], messages: Sequence[Message], audit: TemplateAudit) -> bool:
    """Return True if the rendering of `history` up to its end, followed by the ids of the bridge, equals the rendering
    of the history with the new messages, and the text of the last turn is complete in it."""
    r = bridge.renderer
    try:
        full, head = r.ids([*history, *messages], prompt=True), r.ids(history, prompt=False)
        kept, text = head[: len(head) - len(audit.trailing_ids)], r.text([*history, *messages], prompt=True)
        return (
            is_prefix(kept, full)
            and np.array_equal(full[len(kept) :], bridge.added(messages))
            and keeps_text(history[-1], text)
        )
    except RenderError:
        return False
