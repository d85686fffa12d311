"""Images as models read them: processed as the model's folder describes, and kept beside the model within a number of
bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from verl.errors import Refused
from verl.media_tokens import Picture
from verl.models.encode import picture_of
from verl.models.families import ImageFamily
from verl.models.image_files import decoded_image, image_processor
from verl.transfer_queue.base import MediaStore

KEPT_BYTES = 1 << 28
"""The size of the cache of processed images of a model."""
BLANK_SIDE = 64
"""The pixels of a side of a blank image: no processor scales it to many patches."""


class Pictures:
    """The processed images of a model, by reference. Each is decoded and processed when it is first read; those that
    were read last are kept. Any thread may call.

    folder: the model · store: the content of the images · max_bytes: the size of those that are kept"""

    def __init__(self, folder: Path, store: MediaStore, max_bytes: int = KEPT_BYTES) -> None:
        self._folder, self._store, self._max_bytes = folder, store, max_bytes
        self._processor: Any = None
        self._model: tuple[ImageFamily, Any]  # of the processor
        self._blank: Picture | None = None
        self._kept: OrderedDict[str, Picture] = OrderedDict()
        self.kept_bytes, self._lock = 0, threading.Lock()

    def of(self, references: Iterable[str]) -> dict[str, Picture]:
        with self._lock:
            return {reference: self._one(reference) for reference in references}

    def blank(self) -> Picture:
        """Return a small white image."""
        from PIL import Image

        with self._lock:
            if self._blank is None:
                self._blank = self._processed(Image.new("RGB", (BLANK_SIDE, BLANK_SIDE), "white"), "a white image")
            return self._blank

    def _one(self, reference: str) -> Picture:
        if reference in self._kept:
            self._kept.move_to_end(reference)
            return self._kept[reference]
        where = f"image {reference}"
        image = decoded_image(self._store.get(reference), where)
        found = self._kept[reference] = self._processed(image, where)
        self.kept_bytes += found.patches.nbytes
        while self.kept_bytes > self._max_bytes and len(self._kept) > 1:
            self.kept_bytes -= self._kept.popitem(last=False)[1].patches.nbytes
        return found

    def _processed(self, image: Any, where: str) -> Picture:
        if self._processor is None:
            self._processor, self._model = image_processor(self._folder)
        return processed(self._processor, image, where, *self._model)


def processed(processor: Any, image: Any, where: str, family: ImageFamily, config: Any) -> Picture:
    """Return a decoded image as a model reads it. Raise Refused, with `where`, for a size that the processor
    refuses."""
    try:
        found = processor(images=[image], return_tensors="pt")
    except ValueError as e:  # sides that differ too much
        raise Refused(f"{where}: {image.width} x {image.height} pixels: {e}") from e
    return picture_of(found, family, config)
