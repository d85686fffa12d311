"""Columns and content parts that hold images, videos or sounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl.data.values import content_hash

MEDIA_KEYS = ("images", "videos", "audios")


def media_in(row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """(reference, where it is) of what is not text: items of the media columns, and content parts of messages.

    A reference is the item itself if it is a string (a path or a URL), else the hash of its content.
    """
    found = [(item, f"{key!r} holds {len(row[key])} item(s)") for key in MEDIA_KEYS for item in row.get(key) or ()]
    for message in messages:
        for part in message["content"] if isinstance(message["content"], list) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind != "text":
                found.append((part, f"a message of {message['role']!r} has a content part of type {kind!r}"))
    for item, place in found:
        yield item if isinstance(item, str) else f"blake2b:{content_hash(item, 16)}", place


def refuse_media(row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], where: str) -> None:
    for _, place in media_in(row, messages):
        raise ValueError(
            f"{where}: {place}, and prompts are rendered as text only: the model would not see it."
            " Fix: a text-only data set, or drop the column"
        )
