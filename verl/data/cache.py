"""Store tables of arrays on disk by content hash. Files are written atomically, verified when they are read, and
memory-mapped.

Layout of a file: 64 bytes with MAGIC, the length of the header and the checksum of all that follows; the header (JSON:
the table's numbers, names and shapes of the arrays); the arrays. Each part is padded to 64 bytes. A truncated or
damaged file counts as absent: its table is built again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from verl.track.files import replacing

MAGIC = b"verl-table-2\n".ljust(48, b"\0")
PREFIX_BYTES = len(MAGIC) + 16
ALIGN = 64
SUFFIX = ".table"
KEEP_UNUSED_S = 30 * 86400.0
KEEP_TORN_S = 86400.0
logger = logging.getLogger(__name__)


def cache_path(cache_dir: str | None, key: str) -> Path:
    folder = Path(cache_dir).expanduser() if cache_dir else Path.home() / ".cache" / "verl"
    return folder / f"{key}{SUFFIX}"


def load_cached(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """Return (numbers, arrays) of an intact table, else None. A damaged file is reported and removed."""
    if not path.exists():
        return None
    try:
        found = _read(path)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        logger.warning("%s: the cached table is damaged (%s); it is built again", path, exc)
        _remove(path)
        return None
    with contextlib.suppress(OSError):  # a read-only cache is a good cache
        os.utime(path)
    return found


def store_cached(path: Path, numbers: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bool:
    """Write a table atomically, and return True. If it cannot be written, log a warning and return False."""
    try:
        with replacing(path) as out:
            _prune(path.parent)
            _write(out, numbers, arrays)
    except OSError as exc:
        logger.warning("%s: the tokenised rows are not cached (%s)", path, exc)
        return False
    return True


def _write(out: BinaryIO, numbers: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    parts = [np.ascontiguousarray(a) for a in arrays.values()]
    shapes = [[name, a.dtype.str, a.shape] for name, a in zip(arrays, parts)]
    header, checksum = json.dumps({"numbers": numbers, "arrays": shapes}).encode(), 0
    out.write(bytes(PREFIX_BYTES))
    for part in (header, *(a.data.cast("B") if a.size else b"" for a in parts)):
        for piece in (part, bytes(-len(part) % ALIGN)):
            checksum = zlib.crc32(piece, checksum)
            out.write(piece)
    out.seek(0)
    out.write(MAGIC + len(header).to_bytes(8, "little") + checksum.to_bytes(8, "little"))


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    # As a plain array, which keeps the mapping alive: a slice of a memmap costs more than what it holds.
    whole = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
    prefix = whole[:PREFIX_BYTES].tobytes()
    if not prefix.startswith(MAGIC):
        raise ValueError("no table header")
    length, checksum = (int.from_bytes(prefix[k : k + 8], "little") for k in (len(MAGIC), len(MAGIC) + 8))
    if zlib.crc32(whole[PREFIX_BYTES:].data) != checksum:
        raise ValueError("the checksum is wrong")
    header = json.loads(whole[PREFIX_BYTES : PREFIX_BYTES + length].tobytes())
    arrays, start = {}, PREFIX_BYTES + _aligned(length)
    for name, dtype, shape in header["arrays"]:
        num_bytes = np.dtype(dtype).itemsize * math.prod(shape)
        arrays[name] = whole[start : start + num_bytes].view(dtype).reshape(shape)
        start += _aligned(num_bytes)
    return header["numbers"], arrays


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN


def _prune(folder: Path) -> None:
    """Remove tables that were not read for a month, and temporary files of killed writers."""
    now = time.time()
    for pattern, keep_s in ((f"*{SUFFIX}", KEEP_UNUSED_S), (f"*{SUFFIX}.*.tmp", KEEP_TORN_S)):
        for old in folder.glob(pattern):
            with contextlib.suppress(FileNotFoundError):  # another process pruned it
                if now - old.stat().st_mtime > keep_s:
                    _remove(old)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as exc:
        logger.warning("%s: cannot be removed (%s)", path, exc)
