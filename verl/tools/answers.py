"""The answers of tools: what a tool returns, as text and images for the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.data.media_items import IMAGE, opened_file, part_content, resolved
from verl.data.pixels import encoded_pixels, is_pixels
from verl.models.expand import Expansion
from verl.tools.schemas import ToolResponse

NO_IMAGES = "it returned images, which this model does not take in a turn"
_FORMS = "return ToolResponse(image=[...]), an image, a list of images, or content parts that are text and images"
_BEGIN = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8")
"""The first bytes of files with an image."""
_KEYS = frozenset({*IMAGE.sources, "data"})
"""The keys with the content of an image part, here and in other protocols."""


@dataclass(frozen=True, slots=True)
class ReturnedImage:
    """An image as a tool returned it: bytes, a path, a data URL, an item or part with one of them, an image of Pillow,
    or an array [height, width] or [height, width, 3 or 4] uint8.

    without: the text in its place for a model that reads text alone; "": the call fails then
    """

    item: Any
    without: str = ""


@dataclass(frozen=True, slots=True)
class ShownImage:
    """An image of a tool whose content is stored: its hash, and the tokens by which it is shown."""

    reference: str
    expansion: Expansion


Part = str | ReturnedImage | ShownImage


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """The answer to a tool call, for the model. parts: its texts and images in order; () if it is text alone."""

    text: str
    error: str = ""  # The kind of failure in one word, or "".
    reward: float | None = None  # The reward of this call.
    queue_s: float = 0.0  # The time that the call waited for a place.
    note: str = ""  # A note for the events.
    parts: tuple[Part, ...] = ()


def failed(kind: str, text: str) -> ToolAnswer:
    return ToolAnswer(f"Error: {text}", error=kind)


def of_parts(parts: Sequence[Part]) -> dict[str, Any]:
    """Return the fields `text` and `parts` of an answer with images."""
    return {"text": "\n".join(part for part in parts if isinstance(part, str)), "parts": tuple(parts)}


def answer_of(value: Any) -> ToolAnswer:
    """Convert a tool's value to an answer: text, a dict, a ToolResponse, an image, a list of images, content parts with
    an image, None, or a tuple of one of them with a reward and metrics. Raise ValueError for an image in anything else,
    which would be text for the model."""
    reward = None
    if isinstance(value, ToolAnswer):
        return value
    if isinstance(value, tuple):
        value, reward = value[0], value[1] if len(value) > 1 else None
    reward = None if reward is None else float(reward)
    if isinstance(value, ToolResponse):
        if value.video:
            raise ValueError("it returned videos, which no tool can; return their frames as images")
        given = value.image if isinstance(value.image, list | tuple) else [value.image]
        if len(given) and value.image is not None:
            return ToolAnswer(
                **of_parts([*map(_image, given), *([_text(value.text)] if value.text else [])]), reward=reward
            )
        value = value.text
    given = value if isinstance(value, list) else [value]
    if parts := _content_parts(given):
        return ToolAnswer(**of_parts(parts), reward=reward)
    if any(map(_is_image_part, given)) or _holds_image(value):
        raise ValueError(f"it returned an image inside or beside other data; {_FORMS}")
    return ToolAnswer(_text(value), reward=reward)


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)
    return text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate cannot be tokenised


def _image(item: Any) -> ReturnedImage:
    """Return an image of a tool. Pixels are copied: the tool may draw on them again."""
    return ReturnedImage(item.copy() if is_pixels(item) else item)


def _content_parts(value: Sequence[Any]) -> list[Part]:
    """Return the texts and images of images and OpenAI's content parts; [] if one is something else, or none is an
    image."""
    parts: list[Part] = []
    for part in value:
        if is_pixels(part):
            parts.append(_image(part))
        elif _is_image_part(part):
            item = part.get("image")
            parts.append(_image(item) if is_pixels(item) else ReturnedImage(part_content(part, IMAGE, "its image")))
        elif isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
            parts.append(_text(part["text"]))
        else:
            return []
    return parts if any(isinstance(part, ReturnedImage) for part in parts) else []


def _is_image_part(value: Any, keys: frozenset[str] = _KEYS) -> bool:
    """Return True for a mapping with the type of an image part and content under one of the keys. One without content
    is plain data."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(kind, str) or kind not in IMAGE.parts:
        return False
    return any(value.get(key) is not None for key in keys) or isinstance(value.get("source"), Mapping)


def _holds_image(value: Any) -> bool:
    """Return True if there are pixels, the bytes of an image, or an image part anywhere in a value. A part with a link
    alone is plain data there."""
    if is_pixels(value) or _is_image_part(value, _KEYS - {"url", "path", "file"}):
        return True
    if isinstance(value, bytes) and value.startswith(_BEGIN):
        return True
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple | set) else ()
    return any(map(_holds_image, inside))


def content_of(item: Any, where: str) -> bytes:
    """Return the content of an image as the bytes of a file. Raise Refused, with `where`, if there is none."""
    if is_pixels(item):
        return encoded_pixels(item, where)
    content, path = resolved(item, IMAGE, where)
    if content is not None:
        return content
    with opened_file(path, where) as stream:
        return bytes(stream.read())
