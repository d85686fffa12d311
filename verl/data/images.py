"""Images of rows: found in columns and content parts, checked by the headers of their files, and expanded to tokens.

    images  [item, ...] · image  item                verl's columns and TRL's
    {"type": "image"} in the content of a message    the next item of the column
    {"type": "image", "image": item} · {"type": "image_url", "image_url": {"url": item}}
    item    a path, from the data file's folder or the working directory · bytes · {bytes, path} · a data URL

`<image>` in a text is the place of the next image of the column. If neither marks nor parts give a place, images are
in front of the first text of the user. Content that is no file is written to one beside the cached tables.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import marshal
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from verl.chat.conversation import Rendered
from verl.chat.messages import Messages
from verl.config.model_files import read_model_config
from verl.data.media import is_media_column, refuse_media
from verl.data.values import kind_of, names_of
from verl.errors import Refused
from verl.models.expand import Expander, Expansion, expander
from verl.models.families import ImageFamily, family_name, family_of
from verl.models.image_files import SETTINGS, decoded_image, image_processor, image_size
from verl.types import TaskImage

COLUMNS = ("images", "image")
MARK = "<image>"
IMAGE = {"type": "image"}
"""A content part as chat templates read it."""
_PARTS = frozenset({"image", "image_url", "input_image"})
_SOURCES = ("image", "image_url", "url", "path", "bytes", "file")
"""The keys with the content of an image in a part, or in an item of a column."""
_FIX = "Fix: a PNG, JPEG or WEBP file, bytes, or a data URL"


class SeenRow(NamedTuple):
    """A row with images. messages: each image is a part `IMAGE` · row: its columns, with the path of a file in the
    place of content · named: the same with a hash in that place · images: by the order of the parts"""

    messages: Messages
    row: dict[str, Any]
    named: dict[str, Any]
    images: tuple[ImageFile, ...]


class ImageFile(NamedTuple):
    """A file with an image whose header was read."""

    path: str
    num_bytes: int
    changed_ns: int
    expansion: Expansion


@dataclass(frozen=True)
class ImageRules:
    """Reads the images of rows for one model. digest: a hash of the files on which an image's tokens depend, beside its
    tokenizer · content: the folder for content that is no file."""

    folder: Path = field(repr=False)
    content: Path = field(repr=False)
    digest: str
    tokenizer: Any = field(repr=False)

    @cached_property
    def model(self) -> tuple[ImageFamily, Any]:
        """The model's family and configuration."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self.folder, local_files_only=True)
        family = family_of(config)
        assert family is not None, "checked in image_rules"
        return family, config

    @cached_property
    def placeholder(self) -> int:
        family, config = self.model
        return family.placeholder(config)

    @cached_property
    def _processor(self) -> Any:
        """The image processor, which a run on rows of text does not need."""
        return image_processor(self.folder)[0]

    @cached_property
    def _expander(self) -> Expander:
        return expander(*self.model, self.tokenizer)

    @cached_property
    def _expansions(self) -> dict[Any, Expansion]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        own = ("folder", "content", "digest", "tokenizer")
        return {name: getattr(self, name) for name in own}

    def seen(self, row: dict[str, Any], messages: Messages, where: str) -> SeenRow:
        """Return the row with its images. Raise Refused for an image that cannot be read, and if images and their
        places in the messages do not fit."""
        column = _column(row, where)
        items = _items(row[column]) if column else []
        parts = [part for part in _media_parts(messages, where)]
        refuse_media(*_without_images(row, messages, column), where)
        inline = [source for part in parts if (source := _source(part, where)) is not None]
        marked = bool(column) and any(MARK in text for m in messages for text in _texts(m))
        if items and inline:
            raise Refused(f"{where}: images in the column {column!r} and in parts of messages. Fix: one of both")
        if items and not parts and not marked:
            messages = _in_front(messages, len(items), where)
        else:
            messages = tuple(_with_parts(m, marked) for m in messages)
        wanted = sum(part == IMAGE for m in messages if isinstance(m["content"], list) for part in m["content"])
        found = inline or items
        if wanted != len(found) or (inline and len(inline) != len(parts)):
            source = f"{len(found)} in the column {column!r}" if column else f"{len(found)} with content"
            raise Refused(
                f"{where}: the messages have places for {wanted} images, and there are {source}. Fix: as many"
            )
        places: dict[Any, tuple[str, str]] = {}
        images = tuple(self._image(item, f"{where}: image {k}", places) for k, item in enumerate(found, start=1))
        if not images:
            return SeenRow(messages, row, row, ())
        paths = {column: [image.path for image in images]} if column else {}
        return SeenRow(messages, _replaced(row, places, 0) | paths, _replaced(row, places, 1), images)

    def _image(self, item: Any, where: str, places: dict[Any, tuple[str, str]]) -> ImageFile:
        content, path = _resolved(item, where)
        if content is not None:
            path = _written(content, self.content)
            places[content] = str(path), f"blake2b:{path.name}"
            if str(text := _text_of(item)).startswith("data:"):  # a path of the same item is not its content
                places[text] = places[content]
        with _opened(path, where) as stream:
            facts = os.fstat(stream.fileno())
            sides = image_size(stream, f"{where} ({path})")
            expansion = self._expansion(sides, path, f"{where} ({path})")
        return ImageFile(str(path), facts.st_size, facts.st_mtime_ns, expansion)

    def _expansion(self, sides: tuple[int, int], path: Path, where: str) -> Expansion:
        if sides in self._expansions:
            return self._expansions[sides]
        processor, (family, config) = self._processor, self.model
        try:
            grid = family.grid_of(processor, config, *sides)
        except ValueError as e:
            raise Refused(f"{where}: {sides[1]} x {sides[0]} pixels: {e}") from e
        if grid is not None:
            return self._expansions.setdefault(sides, self._expander.of(grid))
        from verl.models.pictures import processed

        image = decoded_image(path.read_bytes(), where)
        return self._expander.of(processed(processor, image, where, family, config).grid)


def image_rules(folder: Path, content: Path, tokenizer: Any) -> ImageRules | None:
    """Return the reader of images for the model in a folder; None if it reads text alone."""
    config = read_model_config(folder)
    if family_name(config) is None:
        return None
    digest = hashlib.blake2b(repr(sorted(config.items())).encode(), digest_size=16)
    if (settings := folder / SETTINGS).is_file():
        digest.update(settings.read_bytes())
    return ImageRules(folder, content, digest.hexdigest(), tokenizer)


def expanded(
    ids: np.ndarray, placeholder: int, images: Sequence[ImageFile]
) -> tuple[np.ndarray, tuple[TaskImage, ...]]:
    """Return a prompt's ids [P] int64 with the tokens of each image in the place of its placeholder, and the images
    with their places."""
    parts, found, start, at = list[np.ndarray](), list[TaskImage](), 0, 0
    for image, place in zip(images, np.flatnonzero(ids == placeholder), strict=True):
        parts += [ids[start:place], image.expansion.ids]
        at += int(place) - start
        found.append(TaskImage(*image[:3], at + image.expansion.start, image.expansion.tokens))
        at += len(image.expansion.ids)
        start = int(place) + 1
    return np.concatenate([*parts, ids[start:]]), tuple(found)


def expanded_row(row: Rendered, placeholder: int, images: Sequence[ImageFile]) -> Rendered:
    """Return a row of training with the tokens of its images in the place of their placeholders. images: those of its
    conversation, of which the row has the first ones."""
    places = np.flatnonzero(row.ids == placeholder)
    ids, seen = expanded(row.ids, placeholder, images[: len(places)])
    lengths = np.ones(len(row.ids), np.int64)
    lengths[places] = [len(image.expansion.ids) for image in images[: len(places)]]
    return replace(row, ids=ids, mask=np.repeat(row.mask, lengths), images=seen)


def cut_images(images: Sequence[TaskImage], first: int, end: int) -> tuple[TaskImage, ...]:
    """Return the images of the tokens first:end of a row. Raise ValueError for one of which only a part is in them."""
    if any(i.start < cut < i.start + i.tokens for i in images for cut in (first, end)):
        raise ValueError("it would cut through an image")
    return tuple(i._replace(start=i.start - first) for i in images if first <= i.start < end)


def packed_images(images: Sequence[TaskImage]) -> np.ndarray:
    """Return images as bytes of a table: [b] uint8, read by `images_of`."""
    return np.frombuffer(marshal.dumps(tuple(map(tuple, images))), np.uint8) if images else np.zeros(0, np.uint8)


def images_of(packed: np.ndarray) -> tuple[TaskImage, ...]:
    """Return the images of an entry from its part of a table."""
    return tuple(TaskImage(*image) for image in marshal.loads(packed.data)) if len(packed) else ()


def unchanged(image: TaskImage) -> str:
    """Return why a file is not the one that was read with the rows; "" if it is."""
    try:
        facts = os.stat(image.path)
    except OSError as e:
        return f"{image.path}: {e.strerror}"
    same = (facts.st_size, facts.st_mtime_ns) == (image.num_bytes, image.changed_ns)
    return "" if same else f"{image.path}: the file was changed after the rows were read"


def _column(row: Mapping[str, Any], where: str) -> str:
    filled = [key for key in COLUMNS if key in row and _items(row[key])]
    if len(filled) > 1:
        raise Refused(f"{where}: images in the columns 'images' and 'image'. Fix: one of both")
    named = [key for key in COLUMNS if key in row]
    return (filled or named or [""])[0]


def _items(value: Any) -> list[Any]:
    """Return the images in the value of a column."""
    items = value if isinstance(value, list) else [value]
    return [
        item for item in items if item not in (None, "", b"") and (not isinstance(item, dict) or any(item.values()))
    ]


def _without_images(
    row: Mapping[str, Any], messages: Messages, column: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the row and messages without images, for the check that they have no other media."""
    plain = {key: value for key, value in row.items() if key not in COLUMNS or (key != column and is_media_column(key))}
    texts = [{**m, "content": "\n".join(_texts(m))} for m in messages]
    if column:  # the places of images
        texts = [{**m, "content": m["content"].replace(MARK, "")} for m in texts]
    return plain, texts


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    content = message["content"]
    if isinstance(content, str):
        yield content
    else:
        yield from (part["text"] for part in content if isinstance(part.get("text"), str))


def _media_parts(messages: Messages, where: str) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        for part in message["content"] if isinstance(message["content"], list) else ():
            if part.get("type") in _PARTS:
                yield part
            elif not isinstance(part.get("text"), str):
                kind = part.get("type")
                raise Refused(f"{where}: a message of {message['role']!r} has a content part of type {kind!r}. {_FIX}")


def _source(part: Mapping[str, Any], where: str) -> Any:
    """Return the content in a part of a message; None if the part takes the next image of the column."""
    filled = {key: value for key, value in part.items() if value is not None and key not in ("type", "text")}
    if filled.get("detail") == "auto":
        del filled["detail"]
    if more := sorted(filled.keys() - set(_SOURCES)):
        raise Refused(
            f"{where}: a part of type {part['type']!r} has {', '.join(more)}, which is not read. Fix: drop it"
        )
    if len(filled) > 1 and filled.keys() != {"bytes", "path"}:
        raise Refused(f"{where}: a part of type {part['type']!r} has {' and '.join(filled)}. Fix: one of them")
    return filled or None


def _with_parts(message: dict[str, Any], marked: bool) -> dict[str, Any]:
    """Return the message with its images as parts. marked: `MARK` in a text is the place of an image."""
    content = message["content"]
    given = [{"type": "text", "text": content}] if isinstance(content, str) else content
    parts: list[dict[str, Any]] = []
    for part in given:
        if part.get("type") in _PARTS:
            parts.append(IMAGE)
            continue
        for piece in re.split(f"({MARK})", part["text"]) if marked else [part["text"]]:
            if piece:
                parts.append(IMAGE if piece == MARK else {"type": "text", "text": piece})
    return {**message, "content": parts} if IMAGE in parts else {**message, "content": "".join(_texts(message))}


def _in_front(messages: Messages, images: int, where: str) -> Messages:
    """Return the messages with the images before the text of the first message of the user, as in TRL."""
    first = next((k for k, m in enumerate(messages) if m["role"] == "user"), None)
    if first is None:
        raise Refused(f"{where}: {images} images and no message of the user. Fix: write {MARK} at the place of each")
    text = {"type": "text", "text": "".join(_texts(messages[first]))}
    seen = {**messages[first], "content": [*[IMAGE] * images, text]}
    return (*messages[:first], seen, *messages[first + 1 :])


def _resolved(item: Any, where: str) -> tuple[bytes | None, Path]:
    """Return the content of an item of a column or part, or else the path of its file."""
    if isinstance(item, bytes):
        return item, Path()
    if isinstance(item, Mapping):
        filled = {key: value for key, value in item.items() if value not in (None, "")}
        key = next((key for key in ("bytes", *_SOURCES) if key in filled), None)
        if key is None or filled.keys() - set(_SOURCES):
            raise Refused(f"{where}: an object with the keys {names_of(filled)}. {_FIX}")
        return _resolved(filled[key], where)
    if not isinstance(item, str):
        raise Refused(f"{where}: {kind_of(item)}. {_FIX}")
    if item.startswith("data:"):
        head, _, text = item.partition(",")
        try:
            return base64.b64decode(text, validate=True) if head.endswith(";base64") else _refuse_url(where), Path()
        except binascii.Error as e:
            raise Refused(f"{where}: a data URL that is not base64: {e}. {_FIX}") from e
    if re.match(r"https?://", item):
        raise Refused(f"{where}: {item[:120]}: images are not downloaded. Fix: download them, and name the files")
    return None, _found(item.removeprefix("file://"), where)


def _refuse_url(where: str) -> bytes:
    raise Refused(f"{where}: a data URL without base64. {_FIX}")


def _found(name: str, where: str) -> Path:
    """Return the path of a file that a row names: absolute, from the folder of the data file, or from the working
    directory."""
    data = Path(re.split(r":(?:\d+| row \d+| item \d+): ", where)[0]).expanduser().parent
    given = Path(name).expanduser()
    tried = [given] if given.is_absolute() else [(data / given).absolute(), given.absolute()]
    for path in tried:
        if path.is_file():
            return path
    raise Refused(f"{where}: no file {' or '.join(dict.fromkeys(map(str, tried)))}")


def _opened(path: Path, where: str) -> Any:
    try:
        return path.open("rb")
    except OSError as e:
        raise Refused(f"{where}: {path}: {e.strerror}") from e


def _written(content: bytes, folder: Path) -> Path:
    """Return the file with this content, which is written once, under the name of its hash."""
    name = hashlib.blake2b(content, digest_size=16).hexdigest()
    path = folder / name[:2] / name
    if not path.is_file() or path.stat().st_size != len(content):
        path.parent.mkdir(parents=True, exist_ok=True)
        coming = path.with_suffix(f".{uuid.uuid4().hex}")
        coming.write_bytes(content)
        coming.rename(path)
    return path


def _text_of(item: Any) -> Any:
    """Return the data URL in an item; the item itself if it has none."""
    while isinstance(item, Mapping):
        item = next((item[key] for key in _SOURCES if item.get(key) is not None), None)
    return item


def _replaced(value: Any, places: Mapping[Any, tuple[str, str]], which: int) -> Any:
    """Return a value with another text in the place of each content."""
    if isinstance(value, (bytes, str)):
        return places[value][which] if value in places else value
    if isinstance(value, Mapping):
        return {key: _replaced(inner, places, which) for key, inner in value.items()}
    return [_replaced(inner, places, which) for inner in value] if isinstance(value, list) else value
