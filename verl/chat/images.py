"""Messages with images: the placeholders that the chat template writes are apart from those that a text spells out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from verl.chat.bridge import PlainText, plain_text
from verl.chat.conversation import Rendered, render_conversation
from verl.chat.template import Message, Renderer, RowRefused, TemplateAudit, Tokenizer, refuse_dropped
from verl.data.media import PLACEHOLDER
from verl.models.expand import is_mark, placeholder_positions
from verl.models.families import LATE_IMAGE, ImageFamily


@dataclass(frozen=True, slots=True)
class Around:
    """The text that belongs before and after each placeholder of a rendering, which the tokenizer may join with the
    prompt's own. token: the placeholder; text: "" for none"""

    token: str
    text: str

    def written(self, rendering: str) -> str:
        return rendering.replace(self.token, f"{self.text}{self.token}{self.text}") if self.text else rendering


@dataclass(frozen=True, slots=True)
class MarkedRenderer(Renderer):
    """A renderer of messages that have marks in the place of special tokens. around: see `ImagePrompts`"""

    plain: PlainText = field(kw_only=True)
    around: Around = field(kw_only=True)

    def text(self, messages: Sequence[Message], *, prompt: bool) -> str:
        return self.around.written(Renderer.text(self, messages, prompt=prompt))

    def encode(self, text: str) -> np.ndarray:
        return self.plain.encode(text)

    def ids(self, messages: Sequence[Message], *, prompt: bool) -> np.ndarray:
        return self.encode(self.text(messages, prompt=prompt))

    def both(self, messages: Sequence[Message], *, prompt: bool) -> tuple[str, np.ndarray]:
        text = self.text(messages, prompt=prompt)
        return text, self.encode(text)


@dataclass(frozen=True, slots=True)
class ImagePrompts:
    """Renders prompts for a model that reads images. placeholders: the token that the chat template writes for each
    type of content part · plain: the ids of the text of each token of this kind, as of any other text · around: the
    text beside each placeholder of an image · crossed: of `ImageFamily`"""

    placeholders: Mapping[str, int]
    plain: PlainText
    around: Around
    crossed: bool

    def ids(self, r: Renderer, messages: Sequence[Mapping[str, Any]], audit: TemplateAudit) -> np.ndarray:
        """Return the ids [P] int64 of the messages with the generation prompt, with one placeholder for each image
        or video, and none else: one that a text spells out is text. Raise RowRefused if the template drops one of
        them or a text."""
        marked = self.marked(messages, r.tools)
        text = r.text(marked, prompt=True)
        refuse_dropped(r, text, marked, audit, prompt=True)
        ids = self.plain.encode(self.around.written(text))
        self.places(ids, marked)
        return ids

    def conversation(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        audit: TemplateAudit,
        template_kwargs: Mapping[str, Any],
        *,
        tools: Sequence[Any] | None = None,
        train_from: int = 0,
        last_only: bool = False,
        may_skip_thinking: bool = False,
    ) -> list[Rendered]:
        """Return the rows of `render_conversation`, with one placeholder for each image or video, and none else."""
        marked = self.marked(messages, tools)
        rows = render_conversation(
            tokenizer,
            marked,
            audit,
            template_kwargs,
            tools=tools,
            train_from=train_from,
            last_only=last_only,
            may_skip_thinking=may_skip_thinking,
            renderer=partial(MarkedRenderer, plain=self.plain, around=self.around),
        )
        for row in rows:
            places = self.places(row.ids, marked[: row.last + 1])
            if row.mask[places].any():
                raise RowRefused("an image in a turn of the assistant that is trained: what is trained is text")
            if self.crossed and len(places) and row.mask[: places[-1]].any():
                raise RowRefused(LATE_IMAGE)
        return rows

    def places(self, ids: np.ndarray, messages: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Return the positions of the placeholders in a rendering of these messages. Raise RowRefused if there is not
        one for each image."""
        found = placeholder_positions(ids, self.placeholders.values())
        wanted = [self.placeholders[kind] for m in messages for part in _parts(m) if (kind := part["type"]) != "text"]
        if ids[found].tolist() != wanted:
            how = "drops or repeats" if len(found) != len(wanted) else "moves"
            raise RowRefused(f"images, which this chat template {how}: {len(found)} placeholders for {len(wanted)}")
        return found

    def marked(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> list[dict[str, Any]]:
        """Return the messages with marks in the place of the special tokens of images that their texts spell out."""
        marked = [self._marked(m) for m in messages]
        self._refuse_called(marked, tools)
        return marked

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


def image_prompts(
    tokenizer: Tokenizer, family: ImageFamily, config: Any, placeholders: Mapping[str, int]
) -> ImagePrompts:
    """Return the renderer of prompts for a model of this family and configuration. placeholders: by the type of content
    parts"""
    placeholder, every = family.placeholder(config), plain_text(tokenizer)
    own = {str(tokenizer.convert_ids_to_tokens(i)) for i in (*placeholders.values(), *family.replaced_ids(config))}
    of_images = {text for text in every.control if PLACEHOLDER.fullmatch(text) or is_mark(family, text)}
    control = {text: ids for text, ids in every.control.items() if text in own | of_images}
    token = str(tokenizer.convert_ids_to_tokens(placeholder))
    around = Around(token, family.around if token in control else "")
    return ImagePrompts(placeholders, PlainText(tokenizer, control), around, family.crossed)


def _parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return message["content"] if isinstance(message["content"], list) else ()
