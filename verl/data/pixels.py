"""Images that user code gives as pixels, as the bytes of a file."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from verl.errors import Refused

_SAVED_AS_THEY_ARE = ("1", "L", "LA", "P", "RGB", "RGBA")
"""The kinds of pixels that PNG keeps without loss and `decoded_image` reads."""


def is_pixels(value: Any) -> bool:
    """Return True for an image of Pillow and for an array of pixels."""
    if isinstance(value, np.ndarray):
        return value.dtype == np.uint8 and (value.ndim == 2 or (value.ndim == 3 and value.shape[2] in (3, 4)))
    return hasattr(value, "getbands") and hasattr(value, "save")


def encoded_pixels(pixels: Any, where: str) -> bytes:
    """Return an image of Pillow, or an array [height, width] or [height, width, 3 or 4] uint8, as a PNG file. Raise
    Refused, with `where`, for an image without pixels, and for other kinds of them."""
    from PIL import Image

    image = Image.fromarray(pixels) if isinstance(pixels, np.ndarray) else pixels
    if not image.width or not image.height:
        raise Refused(f"{where}: an image of {image.width} x {image.height} pixels")
    if image.mode not in (*_SAVED_AS_THEY_ARE, "CMYK", "YCbCr", "RGBX", "HSV", "LAB"):
        raise Refused(f"{where}: pixels of the kind {image.mode!r}; convert it to 8 bits per channel")
    out = io.BytesIO()
    kept = image if image.mode in _SAVED_AS_THEY_ARE else image.convert("RGB")
    kept.save(out, "PNG", compress_level=1)
    return out.getvalue()


def upright(image: Any) -> Any:
    """Return an image of Pillow turned as its EXIF orientation names, as files are read; an array as it is. Raise
    Refused for an animated one."""
    if isinstance(image, np.ndarray):
        return image
    from PIL import ImageOps

    if getattr(image, "n_frames", 1) > 1:
        raise Refused(f"an animated {image.format} image of {image.n_frames} frames; give one frame")
    return ImageOps.exif_transpose(image)
