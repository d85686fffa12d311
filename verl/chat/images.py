"""Prompts with images: the placeholders that the chat template writes are apart from those that a text spells out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl.chat.bridge import PlainText, plain_text
from verl.chat.template import Renderer, RowRefused, TemplateAudit, Tokenizer, refuse_dropped
from verl.data.media import PLACEHOLDER


@dataclass(frozen=True, slots=True)
class ImagePrompts:
    """Renders prompts for a model that reads images. placeholder: the token that the chat template writes for an
    image · plain: the ids of the text of each token of this kind, as of any other text."""

    placeholder: int
    plain: PlainText

    def ids(self, r: Renderer, messages: Sequence[Mapping[str, Any]], audit: TemplateAudit) -> np.ndarray:
        """Return the ids [P] int64 of the messages with the generation prompt, with one placeholder for each part of
        type image, and none else: one that a text spells out is text. Raise RowRefused if the template drops an
        image or a text."""
        marked = [self._marked(m) for m in messages]
        self._refuse_called(marked, r.tools)
        text = r.text(marked, prompt=True)
        refuse_dropped(r, text, marked, audit, prompt=True)
        ids = self.plain.encode(text)
        wanted = sum(part["type"] == "image" for m in marked for part in _parts(m))
        if (found := int((ids == self.placeholder).sum())) != wanted:
            raise RowRefused(f"images, which this chat template drops or repeats: {found} placeholders for {wanted}")
        return ids

    def _marked(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the message with marks in the place of the special tokens of images that its text spells out."""
        texts = {key: self._mark(text) for key, text in message.items() if isinstance(text, str) and key != "role"}
        parts = [{**part, "text": self._mark(part["text"])} if "text" in part else part for part in _parts(message)]
        return {**message, **texts, **({"content": parts} if parts else {})}

    def _mark(self, text: str) -> str:
        if not any(token in text for token in self.plain.control):
            return text
        marked = self.plain.marked(text)
        if "\ufffd" in marked and "\ufffd" not in text:
            raise RowRefused("a placeholder in its text, beside the private character U+E000")
        return marked

    def _refuse_called(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> None:
        """Raise RowRefused for a placeholder in a call or a schema, whose text is rendered as JSON."""
        for value in (*(m["tool_calls"] for m in messages if m.get("tool_calls")), *(tools or ())):
            text = json.dumps(value, ensure_ascii=False, default=str)
            if held := next((token for token in self.plain.control if token in text), ""):
                raise RowRefused("the placeholder of an image in a tool's call or schema", held)


def image_prompts(tokenizer: Tokenizer, placeholder: int) -> ImagePrompts:
    every, own = plain_text(tokenizer), str(tokenizer.convert_ids_to_tokens(placeholder))
    control = {text: ids for text, ids in every.control.items() if text == own or PLACEHOLDER.fullmatch(text)}
    return ImagePrompts(placeholder, PlainText(tokenizer, control))


def _parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return message["content"] if isinstance(message["content"], list) else ()
