"""Files of images: checked, measured and decoded. Pillow alone is needed, neither torch nor torchvision."""

from __future__ import annotations

import io
import json
import struct
import warnings
from pathlib import Path
from typing import Any, BinaryIO

from verl.errors import Refused
from verl.models.families import ImageFamily, family_of
from verl.models.image_headers import is_complete_jpeg, plain_sides

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_PIXELS = 1 << 26
"""The most pixels of an image, 67 million: small files can describe more than a host's memory."""
SETTINGS = "preprocessor_config.json"
WHOLE = "processor_config.json"
"""The settings of all processors of a model, which newer folders have instead."""
MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
"""The kinds of pixels that are read: those of 8 bits per channel."""
_DAMAGE = (OSError, SyntaxError, ValueError, EOFError, struct.error)  # errors of Pillow for damaged files
_TURNED = (5, 6, 7, 8)  # the EXIF orientations that exchange width and height
_ORIENTATION = 0x0112
_MAY_TURN = (b"Raw profile type", b"XML:com.adobe.xmp")  # texts in a PNG from which Pillow reads an orientation


def decoded_image(content: bytes, where: str) -> Any:
    """Return the bytes of an image file as an RGB image of Pillow, upright, with white where it is transparent. Raise
    Refused, with `where`, for a file that is damaged, animated, of another format, or too large."""
    from PIL import Image, ImageOps

    image = _opened(io.BytesIO(content), where)
    try:
        image.load()
        image = ImageOps.exif_transpose(image)
        if image.has_transparency_data:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    except _DAMAGE as e:
        raise Refused(f"{where}: a damaged {image.format} image: {e}") from e
    return image.convert("RGB")


def image_size(stream: BinaryIO, where: str) -> tuple[int, int]:
    """Return the height and width of the image that `decoded_image` makes of a file, in general without decoding it.
    Raise Refused as that function does. Of damage, only a file that is not complete is found."""
    if (sides := plain_sides(stream, MAX_PIXELS)) is not None:
        return sides
    stream.seek(0)
    image = _opened(stream, where)
    try:
        sides = _sides(image, stream)
    except _DAMAGE as e:
        raise Refused(f"{where}: a damaged {image.format} image: {e}") from e
    if sides is None:
        stream.seek(0)
        whole = decoded_image(stream.read(), where)
        sides = whole.height, whole.width
    return sides


def image_processor(folder: Path) -> tuple[Any, tuple[ImageFamily, Any]]:
    """Return the image processor of a model's folder, without torchvision, and the model's family and configuration.
    Raise Refused if the folder has none."""
    from transformers import AutoConfig, AutoImageProcessor

    file = next((folder / name for name in (SETTINGS, WHOLE) if _describes_images(folder / name)), None)
    if file is None:
        why = "which describes how images are processed; copy it from the model"
        raise Refused(f"{folder}: no {SETTINGS}, nor {WHOLE} with an image_processor, {why}")
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if (family := family_of(config)) is None:
        raise Refused(f"{folder}: a model of type {config.model_type!r} reads no images")
    if family.torchvision:
        from verl.models.navit import NavitProcessor

        return NavitProcessor(file), (family, config)
    more = family.processing(config)
    processor: Any = AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True, **more)
    return processor, (family, config)


def _describes_images(file: Path) -> bool:
    return file.is_file() and (file.name == SETTINGS or "image_processor" in json.loads(file.read_bytes()))


def _opened(stream: BinaryIO, where: str) -> Any:
    """Return the image of a file of which only the header is read. Raise Refused if it cannot be read, or must not."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the size is checked below
            image: Any = Image.open(stream, formats=FORMATS)
    except Image.DecompressionBombError as e:
        raise Refused(f"{where}: {e}") from e
    except _DAMAGE as e:
        size, known = stream.seek(0, io.SEEK_END), ", ".join(FORMATS)
        why = "" if isinstance(e, UnidentifiedImageError) else f": {e}"  # whose text has the address of the stream
        raise Refused(f"{where}: {size} bytes are no image that can be read ({known}){why}") from e
    if image.width * image.height > MAX_PIXELS:
        raise Refused(f"{where}: {image.width} x {image.height} pixels, more than {MAX_PIXELS}; scale it down")
    if (frames := getattr(image, "n_frames", 1)) > 1:
        raise Refused(f"{where}: an image of {frames} frames; take one of them")
    if image.mode not in MODES:
        how = "their range is not known, and a conversion would cut it off"
        raise Refused(f"{where}: pixels of the kind {image.mode!r}: {how}; save it with 8 bits per channel")
    return image


def _sides(image: Any, stream: BinaryIO) -> tuple[int, int] | None:
    """Return the height and width of the upright image; None if the file must be decoded for them, or to know that it
    is complete."""
    if image.format == "PNG":
        return None if _has_more(stream) else (image.height, image.width)
    if image.format not in ("JPEG", "WEBP"):
        return None
    if image.format == "JPEG":
        complete = is_complete_jpeg(stream)
    else:
        size = stream.seek(0, io.SEEK_END)
        stream.seek(4)
        complete = int.from_bytes(stream.read(4), "little") + 8 <= size
    if not complete:
        return None
    sides = image.height, image.width
    return sides[::-1] if image.getexif().get(_ORIENTATION) in _TURNED else sides


def _has_more(stream: BinaryIO) -> bool:
    """Return True if a PNG may have an orientation, or does not end with its last chunk."""
    stream.seek(8)
    while True:
        head = stream.read(8)
        if len(head) < 8 or head[4:] == b"eXIf":
            return True
        if head[4:] == b"IEND":
            return False
        size, start = int.from_bytes(head[:4], "big"), stream.tell()
        if head[4:] in (b"tEXt", b"zTXt", b"iTXt") and stream.read(18).startswith(_MAY_TURN):
            return True
        stream.seek(start + size + 4)
