"""The sizes of ordinary PNG and JPEG files, from a few bytes of each. Other files are read by Pillow, which takes
several times as long."""

from __future__ import annotations

import io
import struct
import zlib
from typing import BinaryIO

PNG, JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8"
_COLOURS = (0, 2, 4, 6)  # grey and RGB, with alpha or without
_LENGTHS = {b"gAMA": 4, b"cHRM": 32, b"sRGB": 1, b"pHYs": 9, b"tIME": 7}
"""Chunks without effect on an image, and the number of their bytes."""
_TABLES = (0xC4, 0xDD)  # segments of a JPEG that only decoding reads
_QUANTA, _QUANTA_BYTES = 0xDB, 65  # tables of 8 bits, each with its number
_SIZES = (0xC0, 0xC1, 0xC2)  # segments with its size
_PIXELS = 0xDA


def plain_sides(stream: BinaryIO, max_pixels: int) -> tuple[int, int] | None:
    """Return the height and width of an image with 8 bits per channel that is complete, upright, not animated and of at
    most `max_pixels`. None: the header does not say so."""
    head = stream.read(33)
    if head.startswith(PNG):
        sides = _png_sides(head, stream)
    elif head.startswith(JPEG):
        sides = _jpeg_sides(stream)
    else:
        return None
    return sides if sides is not None and 0 < sides[0] * sides[1] <= max_pixels else None


def _png_sides(head: bytes, stream: BinaryIO) -> tuple[int, int] | None:
    if len(head) < 33 or head[8:16] != b"\0\0\0\rIHDR" or zlib.crc32(head[12:29]) != int.from_bytes(head[29:], "big"):
        return None
    width, height, bits, colour, method, filtered, rows = struct.unpack(">IIBBBBB", head[16:29])
    if bits != 8 or colour not in _COLOURS or method or filtered or rows > 1:
        return None
    pixels = False
    while len(chunk := stream.read(8)) == 8:
        size, kind = int.from_bytes(chunk[:4], "big"), chunk[4:]
        if kind == b"IEND":
            return (height, width) if pixels else None
        if kind == b"IDAT":
            pixels = True
            stream.seek(size + 4, io.SEEK_CUR)
        elif pixels or _LENGTHS.get(kind) != size:
            return None
        else:
            content = stream.read(size + 4)
            if zlib.crc32(kind + content[:size]) != int.from_bytes(content[size:], "big"):
                return None
    return None


def _jpeg_sides(stream: BinaryIO) -> tuple[int, int] | None:
    stream.seek(2)
    sides = None
    while len(head := stream.read(4)) == 4 and head[0] == 0xFF:
        kind, size = head[1], int.from_bytes(head[2:], "big") - 2
        content = stream.read(size) if size > 0 else b""
        if len(content) != size:
            return None
        if kind == _PIXELS:
            return sides if sides is not None and is_complete_jpeg(stream) else None
        if kind in _SIZES and size > 5:
            bits, height, width, channels = struct.unpack(">BHHB", content[:6])
            if sides is not None or bits != 8 or channels not in (1, 3) or size != 6 + 3 * channels:
                return None
            sides = height, width
        elif kind == _QUANTA:
            if size % _QUANTA_BYTES or any(number > 3 for number in content[::_QUANTA_BYTES]):
                return None
        elif kind not in _TABLES and not (kind == 0xE0 and size == 14 and content.startswith(b"JFIF\0")):
            return None  # it may have an orientation, or further images
    return None


def is_complete_jpeg(stream: BinaryIO) -> bool:
    """Return True if a JPEG ends with the mark of its end."""
    size = stream.seek(0, io.SEEK_END)
    stream.seek(-min(1024, size), io.SEEK_END)
    return stream.read().rstrip(b"\0\r\n").endswith(b"\xff\xd9")
