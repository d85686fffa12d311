"""Images as models read them: checked, decoded, processed as the model's folder describes, and kept beside the model
within a number of bytes. Pillow alone is needed, not torchvision."""

from __future__ import annotations

import io
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from verl.errors import Refused
from verl.media_tokens import Picture
from verl.models.encode import picture_of
from verl.models.families import ImageFamily, family_of
from verl.transfer_queue.base import MediaStore

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_PIXELS = 1 << 26
"""The most pixels of an image, 67 million: small files can describe more than a host's memory."""
KEPT_BYTES = 1 << 28
"""The size of the cache of processed images of a model."""
BLANK_SIDE = 64
"""The pixels of a side of a blank image: no processor scales it to many patches."""
_SETTINGS = "preprocessor_config.json"
MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
"""The kinds of pixels that are read: those of 8 bits per channel."""
_DAMAGE = (OSError, SyntaxError, ValueError, EOFError)  # errors of Pillow for damaged files


def decoded_image(content: bytes, where: str) -> Any:
    """Return the bytes of an image file as an RGB image of Pillow, upright, with white where it is transparent. Raise
    Refused, with `where`, for a file that is damaged, animated, of another format, or too large."""
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the size is checked below
            image: Any = Image.open(io.BytesIO(content), formats=FORMATS)
    except Image.DecompressionBombError as e:
        raise Refused(f"{where}: {e}") from e
    except _DAMAGE as e:
        known = ", ".join(FORMATS)
        raise Refused(f"{where}: {len(content)} bytes are no image that can be read ({known}): {e}") from e
    if image.width * image.height > MAX_PIXELS:
        raise Refused(f"{where}: {image.width} x {image.height} pixels, more than {MAX_PIXELS}; scale it down")
    if (frames := getattr(image, "n_frames", 1)) > 1:
        raise Refused(f"{where}: an image of {frames} frames; take one of them")
    if image.mode not in MODES:
        how = "their range is not known, and a conversion would cut it off"
        raise Refused(f"{where}: pixels of the kind {image.mode!r}: {how}; save it with 8 bits per channel")
    try:
        image.load()
        image = ImageOps.exif_transpose(image)
        if image.has_transparency_data:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    except _DAMAGE as e:
        raise Refused(f"{where}: a damaged {image.format} image: {e}") from e
    return image.convert("RGB")


def image_processor(folder: Path) -> tuple[Any, tuple[ImageFamily, Any]]:
    """Return the image processor of a model's folder, without torchvision, and the model's family and configuration.
    Raise Refused if the folder has none."""
    from transformers import AutoConfig, AutoImageProcessor

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if (family := family_of(config)) is None:
        raise Refused(f"{folder}: a model of type {config.model_type!r} reads no images")
    if not (folder / _SETTINGS).is_file():
        raise Refused(f"{folder}: no {_SETTINGS}, which describes how images are processed; copy it from the model")
    more = family.processing(config)
    processor: Any = AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True, **more)
    return processor, (family, config)


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
        try:
            found = self._processor(images=[image], return_tensors="pt")
        except ValueError as e:  # sides that differ too much
            raise Refused(f"{where}: {image.width} x {image.height} pixels: {e}") from e
        return picture_of(found, *self._model)
