"""The images and videos of tasks, of tools and of supervised rows: their content is in the queue's store from the
admission of a task until its rows are stored, which then own it, or until it is released."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from verl.agent_loop.base import LoopMedia
from verl.data.images import unchanged
from verl.errors import Refused
from verl.rollout.base import Completion, GenerateRequest, Generates
from verl.transfer_queue.base import MediaFiles, MediaStore, copy_media
from verl.types import Medium, Task, TaskImage

SAME_FILE = "Fix: the file as it was, and the same command again"


def owner_of_group(group_id: str) -> str:
    """Return the name of a group as an owner of media."""
    return f"group {group_id}"


@dataclass(frozen=True, slots=True)
class TaskMedia:
    """Puts the images of tasks into a store. store: None if the queue stores no media."""

    store: MediaStore | None

    @asynccontextmanager
    async def held(self, task: Task, owner: str) -> AsyncIterator[Task]:
        """Give the task with its media; the owner has their content, and that of images of tools, meanwhile. If a file
        cannot be read, `lost` is the reason, and the attempts of the task are invalid."""
        async with AsyncExitStack() as stored:
            if self.store is not None:
                stored.callback(self.store.drop, [owner])
            try:
                media = await stored.enter_async_context(images_held(self.store, task.images, owner))
                seen = replace(task, media=media)
            except LostImage as e:
                seen = replace(task, lost=str(e))
            yield seen


@asynccontextmanager
async def images_held(
    store: MediaStore | None, images: tuple[TaskImage, ...], owner: str
) -> AsyncIterator[tuple[Medium, ...]]:
    """Give images as media; the owner has their content meanwhile. Raise LostImage for a file that cannot be read."""
    if not images:
        yield ()
        return
    assert store is not None, "a queue without a store refuses rows with images at the start"
    released = threading.Event()
    try:
        yield await asyncio.to_thread(_media, store, images, owner, released)
    finally:
        released.set()
        store.drop([owner])


@dataclass(frozen=True, slots=True)
class ToolImages:
    """The images that tools return. They are files while an attempt is played, which a reward function may read; the
    queue's store gets their content before a request or a row has them, as one of its group.

    files: also of the process that plays loops · refused: why no tool can return an image; "" if one can
    """

    files: MediaFiles
    store: MediaStore | None
    refused: str

    @contextmanager
    def of_attempt(self, name: str) -> Iterator[LoopMedia]:
        """Give the store of the files of an attempt, which exist meanwhile."""
        try:
            yield LoopMedia(self.files, name, self.refused)
        finally:
            self.files.drop([name])

    async def stored(self, media: Iterable[Medium], owner: str) -> None:
        """Copy the content of images into the queue's store."""
        references = {m.reference for m in media}
        assert self.store is not None, "a tool returns no image if the queue stores none"
        copying = asyncio.ensure_future(asyncio.to_thread(copy_media, self.files, self.store, references, owner))
        try:
            await asyncio.shield(copying)
        finally:
            await asyncio.wait({copying})  # a cancelled wait does not end its thread, and the owner is released next

    def paths(self, media: Iterable[Medium]) -> list[str]:
        """Return the files of images."""
        return [str(self.files.path(m.reference)) for m in media]

    def clear(self) -> None:
        """Remove all files, and those that a killed run has left."""
        shutil.rmtree(self.files.root, ignore_errors=True)


@dataclass(eq=False, slots=True)
class ImageStoringEngine:
    """The engine of one attempt. It stores the images that tools have returned before a request reads them.

    known: the references of the images that are stored
    """

    engine: Generates
    images: ToolImages
    owner: str
    known: set[str]

    async def generate(self, request: GenerateRequest) -> Completion:
        await self.store(request.media)
        return await self.engine.generate(request)

    async def store(self, media: Iterable[Medium]) -> None:
        if new := [m for m in media if m.reference not in self.known]:
            await self.images.stored(new, self.owner)
            self.known.update(m.reference for m in new)


class LostImage(ValueError):
    """The file of an image is missing, or another one than when the rows were read."""


@contextmanager
def images_stored(store: MediaStore | None, owner: str) -> Iterator[Callable[[TaskImage], str]]:
    """Give a function that stores the content of an image and returns its reference; one thread at a time may call it.
    The owner has the content meanwhile. Raise Refused for a file that cannot be read."""
    kept, released = dict[TaskImage, str](), threading.Event()

    def stored(image: TaskImage) -> str:
        assert store is not None, "a queue without a store refuses rows with images at the start"
        image = image._replace(start=0)  # wherever it is in a row
        if image not in kept:
            try:
                kept[image] = store.put(stored_content(image), owner)
            except LostImage as e:
                raise Refused(f"{e}. {SAME_FILE}") from e
            if released.is_set():  # a cancelled wait does not end its thread
                store.drop([owner])
                raise Refused(f"{image.path}: {owner} are no longer wanted")
        return kept[image]

    try:
        yield stored
    finally:
        released.set()
        if store is not None:
            store.drop([owner])


def stored_content(image: TaskImage) -> bytes:
    """Return the content of an image in a store. Raise LostImage if its file cannot be read, or is another one than
    when the rows were read."""
    if why := unchanged(image):
        raise LostImage(why)
    return image.head + b"".join(_read(path) for path, _, _ in image.files)


def _media(
    store: MediaStore, images: tuple[TaskImage, ...], owner: str, released: threading.Event
) -> tuple[Medium, ...]:
    """Store the content of images for the owner. If it is released meanwhile, what was stored is dropped here: a
    cancelled wait does not end its thread."""
    found = list[Medium]()
    try:
        for image in images:
            if released.is_set():
                break
            found.append(Medium(store.put(stored_content(image), owner), image.start, image.tokens))
    finally:
        if released.is_set():
            store.drop([owner])
    return tuple(found)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as e:
        raise LostImage(f"{path}: {e.strerror}") from e
