"""Find images, videos and sounds in columns and content parts, under the names that datasets give them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

from verl.errors import Refused

_KIND = r"(image|img|picture|photo|video|audio)s?"
_FORM = r"(path|file|filepath|filename|url|uri|link|byte|data|base64|b64|binary|list|input|content|feature|tensor)s?"
COLUMN = re.compile(
    rf"{_KIND}|{_KIND}_?\d+|{_KIND}_?{_FORM}|(multi_?modal|mm)_(data|input|feature)s?|pixel_values(_images|_videos)?|"
    r"input_features|(image|video)_grid_thw"
)
"""Names of columns that hold media, in lower case with underscores."""
MAY_HOLD = re.compile(rf"(.*_)?({_KIND}|media|screenshots?|figures?|frames?|clips?|speech|wav|file_?name)(_.*)?")
"""Names of columns in which a text is an image or another medium if it is the name of a media file."""
ABOUT = re.compile(rf"(.*_)?({_KIND})(_.*)?")
"""Names of columns that describe a medium."""
PLACEHOLDER = re.compile(
    r"</?\|?(start_of_|end_of_)?(image|img|picture|video|audio|vision)(_?(pad|start|end|bos|eos|token|\d+)| \d+)?\|?>"
    r"|\[IMG\]",
    re.IGNORECASE,
)
"""Placeholders in a text that a processor replaces by an image, a video or a sound."""
ENDINGS = (
    *(".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".mp4", ".avi", ".mov", ".mkv", ".webm"),
    *(".wav", ".mp3", ".flac", ".ogg", ".m4a"),
)
MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"OggS", b"fLaC", b"ID3", b"\x1aE\xdf\xa3")
_HF_FEATURE = ({"bytes", "path"}, {"array", "path", "sampling_rate"}, {"bytes", "path", "sampling_rate"})
_NOTHING = ("", "[]", "{}", "null", "none", "nan")


@lru_cache(maxsize=256)
def media_columns(names: tuple[str, ...]) -> tuple[frozenset[str], frozenset[str]]:
    """Return (the columns that contain media, the columns that may contain media)."""
    held = frozenset(filter(is_media_column, names))
    return held, frozenset(name for name in names if name not in held and MAY_HOLD.fullmatch(_lower(name)))


def is_media_column(name: str) -> bool:
    return COLUMN.fullmatch(_lower(name)) is not None


def _lower(name: str) -> str:
    return name.strip().lower().replace("-", "_").replace(" ", "_")


def _places(row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the place of each item of media columns, and of content parts of messages that are not text."""
    named, others = media_columns(tuple(row))
    for key, value in row.items():
        medium = key in named or (type(value) in (list, dict, bytes) and _is_medium(value))
        if (medium or (key in others and _is_file(value))) and (items := _items(value)):
            yield f"{key!r} holds {len(items)} item(s)"
    for message in messages:
        for part in message["content"] if isinstance(message["content"], list) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind != "text":
                yield f"a message of {message['role']!r} has a content part of type {kind!r}"


def refuse_media(row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raise ValueError for a row with media, or with a placeholder in its text for media of another column."""
    place = next(_places(row, messages), "") or _placeholder(row, messages)
    if place:
        raise Refused(
            f"{where}: {place}, and prompts are rendered as text only: the model would not see it."
            " Fix: a text-only data set, or drop the column"
        )


def _placeholder(row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a description of a placeholder in the text for which another column may have the medium (a media column,
    even an empty one, or a file name); "" if there is none."""
    texts = [text for m in messages if isinstance(text := m.get("content"), str) and ("<" in text or "[" in text)]
    found = next((mark for text in texts if (mark := PLACEHOLDER.search(text))), None)
    if found is None:
        return ""
    inner = (cell.items() for cell in row.values() if isinstance(cell, Mapping))
    cells = [*row.items(), *chain.from_iterable(inner)]
    about = next((key for key, value in cells if _is_about(str(key), value) or _is_file(value)), None)
    return "" if about is None else f"a message holds {found.group()!r} and the row has {about!r}"


def _is_about(name: str, value: Any) -> bool:
    return is_media_column(name) or (bool(value) and ABOUT.fullmatch(_lower(name)) is not None)


def _is_medium(value: Any) -> bool:
    """Return True if a value is a medium by its content: a feature of `datasets`, or bytes of a known format."""
    if isinstance(value, list):
        return bool(value) and type(value[0]) in (dict, bytes) and _is_medium(value[0])
    if isinstance(value, dict):
        return "path" in value and value.keys() in _HF_FEATURE and _holds(value)
    return isinstance(value, bytes) and value.startswith(MAGIC)


def _is_file(value: Any) -> bool:
    """Return True if a text, or the first of a list of texts, is the name of a media file."""
    value = value[0] if isinstance(value, list) and value else value
    return isinstance(value, str) and (value[-5:].lower().endswith(ENDINGS) or value.startswith("data:image/"))


def _items(value: Any) -> list[Any]:
    """Return the media in the value of a column. An empty object in a list counts as one."""
    if isinstance(value, list):
        return [item for item in value if item == {} or _holds(item)]
    return [value] if _holds(value) else []


def _holds(value: Any) -> bool:
    """Return True if a value is not empty. Arrow fills absent values with nulls, structs of nulls and empty lists."""
    if isinstance(value, str):
        return value.strip().lower() not in _NOTHING
    if isinstance(value, Mapping):
        return any(map(_holds, value.values()))
    if isinstance(value, list):
        return any(map(_holds, value))
    return value is not None and value is not False and value != b""
