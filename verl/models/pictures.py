"""Images as models read them: processed as the model's folder describes, and kept beside the model within a number of
bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from verl.errors import Refused
from verl.media_tokens import Picture
from verl.models.encode import picture_of
from verl.models.families import ImageFamily
from verl.models.image_files import decoded_image, image_processor
from verl.models.kept import KEPT_BYTES, KeptByBytes
from verl.transfer_queue.base import MediaStore

BLANK_SIDE = 64
"""The pixels of a side of a blank image: no processor scales it to many patches."""


class Pictures:
    """The processed images of a model, by reference. Each is decoded and processed when it is first read; those that
    were read last are kept. Any thread may call.

    folder: the model · store: the content of the images · max_bytes: the size of those that are kept"""

    def __init__(self, folder: Path, store: MediaStore, max_bytes: int = KEPT_BYTES) -> None:
        self._folder, self._store = folder, store
        self._processor: Any = None
        self._model: tuple[ImageFamily, Any]  # of the processor
        self._blank: Picture | None = None
        self._kept = KeptByBytes[Picture](max_bytes, lambda picture: picture.patches.nbytes, least=1)
        self._lock = threading.Lock()

    @property
    def kept_bytes(self) -> int:
        return self._kept.nbytes

    def of(self, references: Iterable[str]) -> dict[str, Picture]:
        with self._lock:
            return {name: self._kept.of(name, partial(self._read, name)) for name in references}

    def blank(self) -> Picture:
        """Return a small white image."""
        from PIL import Image

        with self._lock:
            if self._blank is None:
                self._blank = self._processed(Image.new("RGB", (BLANK_SIDE, BLANK_SIDE), "white"), "a white image")
            return self._blank

    def _read(self, reference: str) -> Picture:
        where = f"image {reference}"
        return self._processed(decoded_image(self._store.get(reference), where), where)

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
