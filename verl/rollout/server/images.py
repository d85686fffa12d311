"""The images of chat requests: data URLs in content parts, as in OpenAI's API."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from verl.chat.images import ImagePrompts, image_prompts
from verl.chat.template import Renderer, TemplateAudit
from verl.data.images import ImageFile, ImageRules, expanded, image_rules
from verl.data.media_items import IMAGE, data_url_of, part_content, resolved
from verl.errors import Refused
from verl.medium import Medium, media_hash
from verl.models.image_files import MAX_PIXELS, decoded_image, image_size

MOST_PIXELS = 4 * MAX_PIXELS
"""The most pixels of all images of a request: one thread decodes them, and other requests wait for it."""
_ONLY_DATA = (
    'an image of a request is a data URL ("data:image/png;base64,..."); nothing is downloaded or read from disk'
)


class ChatPrompt(NamedTuple):
    """The prompt of a chat request: its ids [P] int64, the places of its images, and their content by its hash."""

    ids: np.ndarray
    media: tuple[Medium, ...] = ()
    contents: Mapping[str, bytes] = {}


@dataclass(frozen=True, slots=True)
class ChatImages:
    """Reads and renders the images of chat requests for one model."""

    rules: ImageRules
    prompts: ImagePrompts

    def prompt(self, messages: Sequence[Mapping[str, Any]], renderer: Renderer, audit: TemplateAudit) -> ChatPrompt:
        """Return the messages with the generation prompt. Raise Refused for a part that is no text and no image that
        can be read, RowRefused for one that the template drops."""
        files, contents, shown = list[ImageFile](), dict[str, bytes](), list[dict[str, Any]]()
        pixels = 0
        for i, message in enumerate(messages):
            if isinstance(message["content"], str):
                shown.append(dict(message))
                continue
            parts = list[dict[str, Any]]()
            for part in message["content"]:
                if isinstance(part.get("text"), str) and part.get("type") in (None, "text", "input_text"):
                    parts.append({"type": "text", "text": part["text"]})
                    continue
                where = f"messages[{i}]: image {len(files) + 1}"
                content = _content(part, where)
                contents[name := media_hash(content)] = content
                height, width = image_size(io.BytesIO(content), where)
                if (pixels := pixels + height * width) > MOST_PIXELS:
                    raise Refused(f"{where}: {pixels} pixels with those before, more than {MOST_PIXELS} in one request")
                files.append(self._file(name, content, (height, width), where))
                parts.append(IMAGE.part)
            shown.append({**message, "content": parts})
        ids = self.prompts.ids(renderer, shown, audit)
        ids, places = expanded(ids, self.rules.placeholders.values(), files)
        return ChatPrompt(ids, tuple(Medium(place.path, place.start, place.tokens) for place in places), contents)

    def _file(self, name: str, content: bytes, sides: tuple[int, int], where: str) -> ImageFile:
        return ImageFile(
            name, len(content), 0, self.rules.expansion(sides, where, lambda: decoded_image(content, where))
        )


def _content(part: Mapping[str, Any], where: str) -> bytes:
    """Return the content of an image part. Raise Refused for a part that is something else."""
    if part.get("type") not in IMAGE.parts:
        raise Refused(f"{where}: a content part of type {str(part.get('type'))[:60]!r}; text and images are read")
    item = part_content(part, IMAGE, where)
    if not str(data_url_of(item, IMAGE)).startswith("data:"):
        raise Refused(f"{where}: {_ONLY_DATA}")
    content, _ = resolved(item, IMAGE, where)
    assert content is not None, "it is a data URL"
    return content


def chat_images(folder: Path, tokenizer: Any) -> ChatImages | None:
    """Return what reads the images of requests for the model in a folder; None if it reads text alone."""
    rules = image_rules(folder, Path(), tokenizer)
    return None if rules is None else ChatImages(rules, image_prompts(tokenizer, *rules.model, rules.placeholders))
