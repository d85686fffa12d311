"""The images and videos of tasks and of supervised rows: their content is in the queue's store from the admission of a
task until its rows are stored, which then own it, or until it is released."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from verl.data.images import unchanged
from verl.errors import Refused
from verl.transfer_queue.base import MediaStore
from verl.types import Medium, Task, TaskImage

SAME_FILE = "Fix: the file as it was, and the same command again"


@dataclass(frozen=True, slots=True)
class TaskMedia:
    """Puts the images of tasks into a store. store: None if the queue stores no media."""

    store: MediaStore | None

    @asynccontextmanager
    async def held(self, task: Task, owner: str) -> AsyncIterator[Task]:
        """Give the task with its media; the owner has their content meanwhile. If a file cannot be read, `lost`
        is the reason, and the attempts of the task are invalid."""
        async with AsyncExitStack() as stored:
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
                kept[image] = store.put(_content(image), owner)
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


def _content(image: TaskImage) -> bytes:
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
            found.append(Medium(store.put(_content(image), owner), image.start, image.tokens))
    finally:
        if released.is_set():
            store.drop([owner])
    return tuple(found)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as e:
        raise LostImage(f"{path}: {e.strerror}") from e
