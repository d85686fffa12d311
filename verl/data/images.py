"""Images, videos and sounds of rows: found in columns and content parts, checked by the headers of their files, and
expanded to tokens.

    images  [item, ...] · image  item                verl's columns and TRL's; videos, video, audios, audio likewise
    {"type": "image"} in the content of a message    the next item of the column
    {"type": "image", "image": item} · {"type": "image_url", "image_url": {"url": item}}
    item    a path, from the data file's folder or the working directory · bytes · {bytes, path} · a data URL
            · a URL of a host of data.media_hosts
            of a video also a list of images, its frames, or {"video": list, "sample_fps": frames in a second}
            of a sound also {array, sampling_rate}, or OpenAI's {"input_audio": {data, format}}

`<image>` in a text is the place of the next image of the column. If neither marks nor parts give a place, images are
in front of the first text of the user. Content that is no file is written to one beside the cached tables.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from verl.chat.conversation import Rendered
from verl.chat.messages import Messages
from verl.config.model_files import read_model_config
from verl.data.downloads import downloaded
from verl.data.media import is_media_column, refuse_media
from verl.data.media_items import (
    IMAGE,
    ITEM_FIX,
    SOUND,
    VIDEO,
    MediaKind,
    data_url_of,
    frames_of,
    opened_file,
    part_content,
    resolved,
    with_places,
    written_once,
)
from verl.data.sounds import sounds_as_files
from verl.errors import Refused
from verl.models.clips import CLIPS
from verl.models.expand import Expander, Expansion, expander, placeholder_positions
from verl.models.families import FAMILIES, ImageFamily, family_name, family_of
from verl.models.image_files import decoded_image, image_processor, image_size
from verl.models.sound_reader import SoundReader, sound_reader
from verl.models.sounds import is_sound
from verl.models.video_files import video_facts
from verl.models.videos import FILES, Encode, VideoReader, video_reader
from verl.types import TaskImage


class SeenRow(NamedTuple):
    """A row with images. messages: each image is a part `IMAGE.part` · row: its columns, with the path of a file in the
    place of content · named: the same with a hash in that place · images: by the order of the parts"""

    messages: Messages
    row: dict[str, Any]
    named: dict[str, Any]
    images: tuple[ImageFile, ...]


class ImageFile(NamedTuple):
    """A file with an image, a video or a sound, of which the header was read. head, frames: as in `TaskImage`"""

    path: str
    num_bytes: int
    changed_ns: int
    expansion: Expansion
    head: bytes = b""
    frames: tuple[tuple[str, int, int], ...] = ()

    @property
    def named(self) -> str | list[str]:
        """The path of the file, or those of the frames."""
        return [path for path, _, _ in self.frames] or self.path


@dataclass
class ImageRules:
    """Reads the images of rows for one model. digest: a hash of the files on which an image's tokens and pixels depend,
    beside its tokenizer · content: the folder for content that is no file · sounds: rows may have sounds, if the model
    reads them · hosts: those from which media are downloaded · ask: `answer` in another process, which has the image
    processor; None: it is loaded here when it is needed"""

    folder: Path = field(repr=False)
    content: Path = field(repr=False)
    digest: str
    tokenizer: Any = field(repr=False)
    sounds: bool = False
    hosts: tuple[str, ...] = field(default=(), repr=False)
    ask: Callable[[tuple[int, int]], Expansion | str | None] | None = field(init=False, default=None, repr=False)

    @cached_property
    def model(self) -> tuple[ImageFamily, Any]:
        """The model's family and configuration."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self.folder, local_files_only=True)
        family = family_of(config)
        assert family is not None, "checked in image_rules"
        return family, config

    @cached_property
    def model_type(self) -> str:
        return str(self.model[1].model_type)

    @cached_property
    def placeholders(self) -> dict[str, int]:
        """The token that the chat template writes for each kind of media."""
        family, config = self.model
        found = {IMAGE.name: family.placeholder(config)}
        if VIDEO in self.kinds:
            found[VIDEO.name] = int(config.video_token_id)
        if SOUND in self.kinds:
            found[SOUND.name] = int(config.audio_token_id)
        return found

    @cached_property
    def kinds(self) -> tuple[MediaKind, ...]:
        """The kinds of media that rows may have."""
        family, config = self.model
        read = (VIDEO, config.model_type in CLIPS), (SOUND, family.sounds is not None and self.sounds)
        return (IMAGE, *(kind for kind, able in read if able))

    def _fix(self, kind: MediaKind) -> str:
        """Return which models read videos or sounds."""
        able = [*CLIPS] if kind == VIDEO else [name for name, family in FAMILIES.items() if family.sounds]
        train_alone = kind == SOUND and not self.sounds
        here = "in rows of verl train alone" if train_alone else f"not for a {self.model_type}"
        return f"{_called(kind).capitalize()} are read for {', '.join(able)}, {here}"

    @cached_property
    def _videos(self) -> VideoReader:
        reader = video_reader(self.folder, self.model[1])
        assert reader is not None, "a model that reads videos"
        return reader

    @cached_property
    def _sounds(self) -> SoundReader:
        reader = sound_reader(self.folder, self.model[1])
        assert reader is not None, "a model that reads sounds"
        return reader

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
        own = ("folder", "content", "digest", "tokenizer", "sounds", "hosts", "kinds", "placeholders", "model_type")
        return {name: self.__dict__[name] for name in own if name in self.__dict__}

    def seen(self, row: dict[str, Any], messages: Messages, where: str, encode: Encode) -> SeenRow:
        """Return the row with its images, videos and sounds. encode: the ids of a text. Raise Refused for one that
        cannot be read, and if media and their places in the messages do not fit."""
        kinds, unread = self.kinds, [kind for kind in (VIDEO, SOUND) if kind not in self.kinds]
        for kind in unread:
            if (column := _column(row, kind, where)) and _items(row[column]):
                raise Refused(f"{where}: {_called(kind)} in the column {column!r}. {self._fix(kind)}")
        if SOUND in kinds:
            row, messages = sounds_as_files(row, where), sounds_as_files(messages, where)
        columns = {kind.name: _column(row, kind, where) for kind in kinds}
        fixes = {part: self._fix(kind) for kind in unread for part in kind.parts}
        parts = [*_media_parts(messages, kinds, fixes, where)]
        refuse_media(*_without_media(row, messages, columns, kinds), where)
        given, marked, front = dict[str, list[Any]](), list[MediaKind](), list[dict[str, str]]()
        for kind in kinds:
            column = columns[kind.name]
            items = _items(row[column]) if column else []
            own = [part for part in parts if part["type"] in kind.parts]
            inline = [source for part in own if (source := part_content(part, kind, where)) is not None]
            if items and inline:
                both = f"{_called(kind)} in the column {column!r} and in parts of messages"
                raise Refused(f"{where}: {both}. Fix: one of both")
            if column and any(kind.mark in text for m in messages for text in _texts(m)):
                marked.append(kind)
            elif items and not own:
                front += [kind.part] * len(items)
            given[kind.name] = inline or items
        messages = tuple(_with_parts(m, marked, kinds) for m in messages)
        if front:
            messages = _in_front(messages, front, where)
        for kind in kinds:
            _check_places(messages, kind, given[kind.name], parts, columns[kind.name], where)
        return self._with_files(row, messages, given, columns, where, encode)

    def _with_files(
        self,
        row: dict[str, Any],
        messages: Messages,
        given: Mapping[str, Sequence[Any]],
        columns: Mapping[str, str],
        where: str,
        encode: Encode,
    ) -> SeenRow:
        places: dict[Any, tuple[str, str]] = {}
        found: dict[str, list[ImageFile]] = {kind.name: [] for kind in (IMAGE, VIDEO, SOUND)}
        for k, item in enumerate(given[IMAGE.name], start=1):
            found[IMAGE.name].append(self._image(item, f"{where}: image {k}", places))
        for k, item in enumerate(given.get(VIDEO.name, ()), start=1):
            found[VIDEO.name].append(self._video(item, f"{where}: video {k}", places, encode))
        for k, item in enumerate(given.get(SOUND.name, ()), start=1):
            found[SOUND.name].append(self._sound(item, f"{where}: sound {k}", places))
        if not any(found.values()):
            return SeenRow(messages, row, row, ())
        paths = {column: [file.named for file in found[name]] for name, column in columns.items() if column}
        rest = {name: iter(files) for name, files in found.items()}
        kinds = [part["type"] for m in messages if isinstance(m["content"], list) for part in m["content"]]
        files = tuple(next(rest[kind]) for kind in kinds if kind in rest)
        if not places:  # no content to replace
            return SeenRow(messages, row | paths, row, files)
        return SeenRow(messages, with_places(row, places, 0) | paths, with_places(row, places, 1), files)

    def _image(self, item: Any, where: str, places: dict[Any, tuple[str, str]]) -> ImageFile:
        facts, sides = self._measured(item, where, places)
        named = f"{where} ({facts[0]})"
        return ImageFile(
            *facts, self.expansion(sides, named, lambda: decoded_image(Path(facts[0]).read_bytes(), named))
        )

    def _measured(
        self, item: Any, where: str, places: dict[Any, tuple[str, str]]
    ) -> tuple[tuple[str, int, int], tuple[int, int]]:
        """Return the path, the bytes and the time of the file of an image, and its height and width."""
        path = self._file_of(item, IMAGE, where, places)
        with opened_file(path, where) as stream:
            facts = os.fstat(stream.fileno())
            return (str(path), facts.st_size, facts.st_mtime_ns), image_size(stream, f"{where} ({path})")

    def _video(self, item: Any, where: str, places: dict[Any, tuple[str, str]], encode: Encode) -> ImageFile:
        frames, rate = frames_of(item, where)
        if frames is not None:
            measured = [self._measured(one, f"{where}: frame {k}", places) for k, one in enumerate(frames, start=1)]
            files, sizes = tuple(facts for facts, _ in measured), tuple(facts[1] for facts, _ in measured)
            fps = float(self._videos.settings["fps"]) if rate is None else rate
            head, expansion = self._videos.of_images([sides for _, sides in measured], sizes, fps, encode, where)
            return ImageFile(*files[0], expansion, head.packed(), files)
        path = self._file_of(item, VIDEO, where, places)
        with opened_file(path, where) as stream:
            facts = os.fstat(stream.fileno())
            head, expansion = self._videos.of_file(
                video_facts(stream, f"{where} ({path})"), encode, f"{where} ({path})"
            )
        return ImageFile(str(path), facts.st_size, facts.st_mtime_ns, expansion, head.packed())

    def _sound(self, item: Any, where: str, places: dict[Any, tuple[str, str]]) -> ImageFile:
        path = self._file_of(item, SOUND, where, places)
        with opened_file(path, where) as stream:
            facts = os.fstat(stream.fileno())
            head, expansion = self._sounds.of_file(stream, f"{where} ({path})")
        return ImageFile(str(path), facts.st_size, facts.st_mtime_ns, expansion, head.packed())

    def _file_of(self, item: Any, kind: MediaKind, where: str, places: dict[Any, tuple[str, str]]) -> Path:
        """Return the file of an item, which is written if the item has the content itself."""
        check = {IMAGE.name: image_size, VIDEO.name: video_facts}.get(kind.name) or self._sounds.of_file
        content, path = resolved(item, kind, where, lambda url: downloaded(url, self.hosts, self.content, where, check))
        if content is not None:
            path = written_once(content, self.content)
            places[content] = str(path), f"blake2b:{path.name}"
            if str(text := data_url_of(item, kind)).startswith("data:"):  # a path of the same item is not its content
                places[text] = places[content]
        return path

    def expansion_of(self, path: str) -> Expansion:
        """Return the tokens of the image in a file."""
        return self._image(path, path, {}).expansion

    def expansion(self, sides: tuple[int, int], where: str, decoded: Callable[[], Any]) -> Expansion:
        """Return the tokens of an image of this height and width. decoded: returns its pixels, which a few families
        need. Raise Refused for sides that the processor refuses."""
        if sides in self._expansions:
            return self._expansions[sides]
        found = self.answer(sides) if self.ask is None else self.ask(sides)
        if isinstance(found, str):
            raise Refused(f"{where}: {sides[1]} x {sides[0]} pixels: {found}")
        if found is not None:
            return self._expansions.setdefault(sides, found)
        from verl.models.pictures import processed

        return self._expander.of(processed(self._processor, decoded(), where, *self.model).grid)

    def answer(self, sides: tuple[int, int]) -> Expansion | str | None:
        """Return the tokens of an image of this height and width; a text: why the processor refuses it; None: they
        depend on its pixels."""
        (family, config), processor = self.model, self._processor
        try:
            grid = family.grid_of(processor, config, *sides)
        except ValueError as e:
            return str(e)
        return None if grid is None else self._expander.of(grid)


def image_rules(
    folder: Path, content: Path, tokenizer: Any, *, sounds: bool = False, hosts: Sequence[str] = ()
) -> ImageRules | None:
    """Return the reader of images and videos, and if `sounds` also of sounds, for the model in a folder; None if it
    reads text alone. content: the folder for content that is no file · hosts: those from which media are downloaded"""
    config = read_model_config(folder)
    if family_name(config) is None:
        return None
    digest = hashlib.blake2b(repr(sorted(config.items())).encode(), digest_size=16)
    for settings in (folder / file for file in FILES):  # the first one may have settings of images too
        if settings.is_file():
            digest.update(settings.read_bytes())
    return ImageRules(folder, content, digest.hexdigest(), tokenizer, sounds, tuple(hosts))


def expanded(
    ids: np.ndarray, placeholders: Collection[int], images: Sequence[ImageFile]
) -> tuple[np.ndarray, tuple[TaskImage, ...]]:
    """Return a prompt's ids [P] int64 with the tokens of each image in the place of its placeholder, and the images
    with their places."""
    parts, found, start, at = list[np.ndarray](), list[TaskImage](), 0, 0
    for image, place in zip(images, placeholder_positions(ids, placeholders), strict=True):
        parts += [ids[start:place], image.expansion.ids]
        at += int(place) - start
        tokens = at + image.expansion.start, image.expansion.tokens
        found.append(TaskImage(*image[:3], *tokens, image.head, image.frames))
        at += len(image.expansion.ids)
        start = int(place) + 1
    return np.concatenate([*parts, ids[start:]]), tuple(found)


def expanded_row(row: Rendered, placeholders: Collection[int], images: Sequence[ImageFile]) -> Rendered:
    """Return a row of training with the tokens of its images in the place of their placeholders. images: those of its
    conversation, of which the row has the first ones."""
    places = placeholder_positions(row.ids, placeholders)
    ids, seen = expanded(row.ids, placeholders, images[: len(places)])
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


def paths_of(files: Sequence[ImageFile]) -> dict[str, list[Any]]:
    """Return the paths of a row's images, videos and sounds, for reward functions; without the kinds that it has
    not."""
    found = dict[str, list[Any]]()
    for file in files:
        kind = IMAGE if not file.head else SOUND if is_sound(file.head) else VIDEO
        found.setdefault(kind.columns[0], []).append(file.named)
    return found


def unchanged(image: TaskImage) -> str:
    """Return why a file is not the one that was read with the rows; "" if all are."""
    for path, num_bytes, changed_ns in image.files:
        try:
            facts = os.stat(path)
        except OSError as e:
            return f"{path}: {e.strerror}"
        if (facts.st_size, facts.st_mtime_ns) != (num_bytes, changed_ns):
            return f"{path}: the file was changed after the rows were read"
    return ""


def _called(kind: MediaKind) -> str:
    """Return how errors name media of a kind."""
    return "sounds" if kind == SOUND else f"{kind.name}s"


def _column(row: Mapping[str, Any], kind: MediaKind, where: str) -> str:
    filled = [key for key in kind.columns if key in row and _items(row[key])]
    if len(filled) > 1:
        many, one = kind.columns
        raise Refused(f"{where}: {_called(kind)} in the columns {many!r} and {one!r}. Fix: one of both")
    named = [key for key in kind.columns if key in row]
    return (filled or named or [""])[0]


def _items(value: Any) -> list[Any]:
    """Return the images in the value of a column."""
    items = value if isinstance(value, list) else [value]
    return [
        item for item in items if item not in (None, "", b"") and (not isinstance(item, dict) or any(item.values()))
    ]


def _without_media(
    row: Mapping[str, Any], messages: Messages, columns: Mapping[str, str], kinds: Sequence[MediaKind]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the row and messages without images and videos, for the check that they have no other media."""
    own = {key for kind in kinds for key in kind.columns}
    held = columns.values()
    plain = {key: value for key, value in row.items() if key not in own or (key not in held and is_media_column(key))}
    texts = [{**m, "content": "\n".join(_texts(m))} for m in messages]
    for kind in kinds:
        if columns[kind.name]:  # the places of its items
            texts = [{**m, "content": m["content"].replace(kind.mark, "")} for m in texts]
    return plain, texts


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    content = message["content"]
    if isinstance(content, str):
        yield content
    else:
        yield from (part["text"] for part in content if isinstance(part.get("text"), str))


def _media_parts(
    messages: Messages, kinds: Sequence[MediaKind], fixes: Mapping[str, str], where: str
) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        for part in message["content"] if isinstance(message["content"], list) else ():
            kind = part.get("type")
            if any(kind in one.parts for one in kinds):
                yield part
            elif not isinstance(part.get("text"), str):
                fix = fixes.get(str(kind), ITEM_FIX)
                raise Refused(f"{where}: a message of {message['role']!r} has a content part of type {kind!r}. {fix}")


def _check_places(
    messages: Messages,
    kind: MediaKind,
    found: Sequence[Any],
    parts: Sequence[Mapping[str, Any]],
    column: str,
    where: str,
) -> None:
    """Raise Refused if the messages have other places of this kind than there are items."""
    wanted = sum(part == kind.part for m in messages if isinstance(m["content"], list) for part in m["content"])
    own = [part for part in parts if part["type"] in kind.parts]
    inline = any(part_content(part, kind, where) is not None for part in own)
    if wanted != len(found) or (inline and len(found) != len(own)):
        source = f"{len(found)} in the column {column!r}" if column else f"{len(found)} with content"
        raise Refused(
            f"{where}: the messages have places for {wanted} {_called(kind)}, and there are {source}. Fix: as many"
        )


def _with_parts(message: dict[str, Any], marked: Sequence[MediaKind], kinds: Sequence[MediaKind]) -> dict[str, Any]:
    """Return the message with its media as parts. marked: the kinds of which a mark in a text is a place."""
    content, marks = message["content"], {kind.mark: kind.part for kind in marked}
    given = [{"type": "text", "text": content}] if isinstance(content, str) else content
    parts: list[dict[str, Any]] = []
    for part in given:
        if own := next((kind.part for kind in kinds if part.get("type") in kind.parts), None):
            parts.append(own)
            continue
        for piece in re.split(f"({'|'.join(marks)})", part["text"]) if marks else [part["text"]]:
            if piece:
                parts.append(marks.get(piece) or {"type": "text", "text": piece})
    seen = any(kind.part in parts for kind in kinds)
    return {**message, "content": parts} if seen else {**message, "content": "".join(_texts(message))}


def _in_front(messages: Messages, parts: list[dict[str, str]], where: str) -> Messages:
    """Return the messages with the media before the text of the first message of the user, as in TRL."""
    first = next((k for k, m in enumerate(messages) if m["role"] == "user"), None)
    if first is None:
        marks = f"<{parts[0]['type']}>"
        raise Refused(
            f"{where}: {len(parts)} {parts[0]['type']}s and no message of the user. Fix: write {marks} at the place of"
            " each"
        )
    content = messages[first]["content"]
    after = [{"type": "text", "text": content}] if isinstance(content, str) else content
    seen = {**messages[first], "content": [*parts, *after]}
    return (*messages[:first], seen, *messages[first + 1 :])
