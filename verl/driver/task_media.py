"""The images of tasks that are played: their content is in the queue's store from the admission of a task until its
rows are stored, which then own it, or until it is released."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from verl.data.images import unchanged
from verl.transfer_queue.base import MediaStore
from verl.types import Medium, Task, TaskImage


@dataclass(frozen=True, slots=True)
class TaskMedia:
    """Puts the images of tasks into a store. store: None if the queue stores no media."""

    store: MediaStore | None

    @asynccontextmanager
    async def held(self, task: Task, owner: str) -> AsyncIterator[Task]:
        """Give the task with its media; the owner has their content meanwhile. If a file cannot be read, `lost`
        is the reason, and the attempts of the task are invalid."""
        if not task.images:
            yield task
            return
        assert self.store is not None, "a queue without a store refuses rows with images at the start"
        released = threading.Event()
        try:
            try:
                media = await asyncio.to_thread(_media, self.store, task.images, owner, released)
                seen = replace(task, media=media)
            except LostImage as e:
                seen = replace(task, lost=str(e))
            yield seen
        finally:
            released.set()
            self.store.drop([owner])


class LostImage(ValueError):
    """The file of an image is missing, or another one than when the rows were read."""


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
            if why := unchanged(image):
                raise LostImage(why)
            try:
                content = Path(image.path).read_bytes()
            except OSError as e:
                raise LostImage(f"{image.path}: {e.strerror}") from e
            found.append(Medium(store.put(content, owner), image.start, image.tokens))
    finally:
        if released.is_set():
            store.drop([owner])
    return tuple(found)
