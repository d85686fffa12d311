"""Items of columns and content parts that are images, videos or sounds: their content, and the files with it."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import uuid
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from verl.data.values import kind_of, names_of
from verl.errors import Refused


class MediaKind(NamedTuple):
    """A kind of media. columns: those of rows · mark: the place of an item in a text · part: a content part as chat
    templates read it · parts: the types of parts of messages · sources: the keys with the content in a part, or in an
    item of a column"""

    name: str
    columns: tuple[str, str]
    mark: str
    part: dict[str, str]
    parts: frozenset[str]
    sources: tuple[str, ...]


def _kind(name: str, *more_sources: str) -> MediaKind:
    parts = frozenset({name, f"{name}_url", f"input_{name}"})
    sources = (name, f"{name}_url", "url", "path", "bytes", "file", *more_sources)
    return MediaKind(name, (f"{name}s", name), f"<{name}>", {"type": name}, parts, sources)


IMAGE, VIDEO, SOUND = _kind("image"), _kind("video"), _kind("audio", "input_audio")
_RATE = "sample_fps"
"""The key with the frames in a second of a video that is a list of images."""
ITEM_FIX = "Fix: a file (PNG, JPEG or WEBP; MP4 or WEBM; WAV, MP3 or FLAC), bytes, or a data URL"


def part_content(part: Mapping[str, Any], kind: MediaKind, where: str) -> Any:
    """Return the content in a part of a message; None if the part takes the next item of the column."""
    filled = {key: value for key, value in part.items() if value is not None and key not in ("type", "text")}
    if filled.get("detail") == "auto":
        del filled["detail"]
    read = {*kind.sources, _RATE} if kind is VIDEO else {*kind.sources}
    if more := sorted(filled.keys() - read):
        raise Refused(
            f"{where}: a part of type {part['type']!r} has {', '.join(more)}, which is not read. Fix: drop it"
        )
    named = [key for key in filled if key != _RATE]
    if len(named) > 1 and {*named} != {"bytes", "path"}:
        raise Refused(f"{where}: a part of type {part['type']!r} has {' and '.join(named)}. Fix: one of them")
    return filled or None


def frames_of(item: Any, where: str) -> tuple[list[Any] | None, float | None]:
    """Return the frames of a video that is a list of images, and the frames in a second that it names; (None, None) for
    a file."""
    if isinstance(item, list):
        return item, None
    if not isinstance(item, Mapping):
        return None, None
    value, rate = next((item[key] for key in VIDEO.sources if item.get(key) is not None), None), item.get(_RATE)
    if isinstance(value, list):
        if rate is not None and not (isinstance(rate, (int, float)) and 0 < rate < float("inf")):
            raise Refused(f"{where}: {_RATE}={rate!r}. Fix: a number of frames in a second above 0")
        return value, None if rate is None else float(rate)
    if rate is not None:
        why = "frames of a file are taken as the settings of the model's folder say"
        raise Refused(f"{where}: {_RATE} is the rate of a list of frames, and {why}. Fix: drop it")
    return None, None


def resolved(
    item: Any, kind: MediaKind, where: str, downloaded: Callable[[str], Path] | None = None
) -> tuple[bytes | None, Path]:
    """Return the content of an item of a column or part, or else the path of its file. downloaded: returns the file of
    a URL; None: URLs are refused"""
    if isinstance(item, bytes):
        return item, Path()
    if isinstance(item, Mapping):
        filled = {key: value for key, value in item.items() if value not in (None, "")}
        key = next((key for key in ("bytes", *kind.sources) if key in filled), None)
        if key is None or filled.keys() - {*kind.sources}:
            raise Refused(f"{where}: an object with the keys {names_of(filled)}. {ITEM_FIX}")
        return resolved(filled[key], kind, where, downloaded)
    if not isinstance(item, str):
        raise Refused(f"{where}: {kind_of(item)}. {ITEM_FIX}")
    if item.startswith("data:"):
        head, _, text = item.partition(",")
        try:
            return base64.b64decode(text, validate=True) if head.endswith(";base64") else _refuse_url(where), Path()
        except binascii.Error as e:
            raise Refused(f"{where}: a data URL that is not base64: {e}. {ITEM_FIX}") from e
    if re.match(r"https?://", item):
        if downloaded is not None:
            return None, downloaded(item)
        raise Refused(f"{where}: {item[:120]}: {kind.name}s are not downloaded. Fix: download them, and name the files")
    return None, _found(item.removeprefix("file://"), where)


def _refuse_url(where: str) -> bytes:
    raise Refused(f"{where}: a data URL without base64. {ITEM_FIX}")


def _found(name: str, where: str) -> Path:
    """Return the path of a file that a row names: absolute, from the folder of the data file, or from the working
    directory."""
    given, here = os.path.expanduser(name), os.getcwd()
    folder = _folder_of(re.split(r":(?:\d+| row \d+| item \d+): ", where)[0])
    tried = [given] if os.path.isabs(given) else [os.path.join(here, folder, given), os.path.join(here, given)]
    for path in tried:
        if os.path.isfile(path):
            return Path(path)
    raise Refused(f"{where}: no file {' or '.join(dict.fromkeys(str(Path(path)) for path in tried))}, or none to read")


@lru_cache(maxsize=64)
def _folder_of(file: str) -> str:
    """Return the folder of a data file."""
    return str(Path(file).expanduser().parent)


def opened_file(path: Path, where: str) -> Any:
    try:
        return path.open("rb")
    except OSError as e:
        raise Refused(f"{where}: {path}: {e.strerror}") from e


def written_once(content: bytes, folder: Path) -> Path:
    """Return the file with this content, which is written once, under the name of its hash."""
    name = hashlib.blake2b(content, digest_size=16).hexdigest()
    path = folder / name[:2] / name
    if (there := path.is_file()) and path.stat().st_size == len(content):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    coming = path.with_suffix(f".{uuid.uuid4().hex}")
    coming.write_bytes(content)
    if there:  # damaged
        coming.rename(path)
    else:
        published(coming, path)
    return path


def published(coming: Path, path: Path) -> None:
    """Give a complete file its name. If another process was first, its file stays: rows that were read have the time of
    its last change."""
    try:
        os.link(coming, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        os.replace(coming, path)
    coming.unlink(missing_ok=True)


def data_url_of(item: Any, kind: MediaKind) -> Any:
    """Return the data URL in an item; the item itself if it has none."""
    while isinstance(item, Mapping):
        item = next((item[key] for key in kind.sources if item.get(key) is not None), None)
    return item


def with_places(value: Any, places: Mapping[Any, tuple[str, str]], which: int) -> Any:
    """Return a value with another text in the place of each content."""
    if isinstance(value, (bytes, str)):
        return places[value][which] if value in places else value
    if isinstance(value, Mapping):
        return {key: with_places(inner, places, which) for key, inner in value.items()}
    return [with_places(inner, places, which) for inner in value] if isinstance(value, list) else value
