"""Tokenised tables on disk by content hash: written whole or not at all, verified when read, memory-mapped.

File: MAGIC, header length (uint64), header (JSON: the table's numbers and where each array lies), arrays, each aligned to
64 bytes. A file that is torn, truncated or damaged is as good as absent: it is rebuilt.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"verl-table-1\n\0\0\0"
ALIGN = 64
SUFFIX = ".table"
KEEP_UNUSED_S = 30 * 86400.0
KEEP_TORN_S = 86400.0
logger = logging.getLogger(__name__)


def cache_path(cache_dir: str | None, key: str) -> Path:
    folder = Path(cache_dir).expanduser() if cache_dir else Path.home() / ".cache" / "verl"
    return folder / f"{key}{SUFFIX}"


def load_cached(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """(numbers, arrays) of an intact table, else None; a damaged file is reported and removed."""
    if not path.exists():
        return None
    try:
        found = _read(path)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        logger.warning("%s: the cached table is damaged (%s); it is built again", path, exc)
        _remove(path)
        return None
    _touch(path)
    return found


def store_cached(path: Path, numbers: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bool:
    """Write atomically (temp, fsync, rename). A cache that cannot be written is a warning: the run goes on without."""
    temp: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _prune(path.parent)
        handle, temp = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".tmp", dir=path.parent)
        with os.fdopen(handle, "wb") as out:
            _write(out, numbers, arrays)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temp, path)
    except OSError as exc:
        logger.warning("%s: the tokenised rows are not cached (%s)", path, exc)
        if temp is not None:
            _remove(Path(temp))
        return False
    return True


def _write(out: Any, numbers: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    flat = {name: np.ascontiguousarray(a) for name, a in arrays.items()}
    start, index = 0, []
    for name, a in flat.items():
        data = a.data.cast("B") if a.size else b""
        index.append(
            {"name": name, "dtype": a.dtype.str, "shape": list(a.shape), "start": start, "crc32": zlib.crc32(data)}
        )
        start += -(-a.nbytes // ALIGN) * ALIGN
    header = json.dumps({"numbers": numbers, "arrays": index}).encode()
    head = MAGIC + len(header).to_bytes(8, "little") + zlib.crc32(header).to_bytes(8, "little") + header
    out.write(head + bytes(-len(head) % ALIGN))
    for a in flat.values():
        out.write(a.data.cast("B") if a.size else b"")
        out.write(bytes(-a.nbytes % ALIGN))


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    prefix = len(MAGIC) + 16
    with path.open("rb") as stream:
        head = stream.read(prefix)
        if len(head) < prefix or not head.startswith(MAGIC):
            raise ValueError("no table header")
        length = int.from_bytes(head[len(MAGIC) : len(MAGIC) + 8], "little")
        header = stream.read(min(length, path.stat().st_size))
    if zlib.crc32(header) != int.from_bytes(head[-8:], "little"):
        raise ValueError("the header's checksum is wrong")
    found = json.loads(header)
    base = -(-(prefix + length) // ALIGN) * ALIGN
    return found["numbers"], {entry["name"]: _array(path, base, entry) for entry in found["arrays"]}


def _array(path: Path, base: int, entry: Mapping[str, Any]) -> np.ndarray:
    shape, dtype = tuple(entry["shape"]), np.dtype(entry["dtype"])
    if 0 in shape:
        return np.zeros(shape, dtype)  # nothing to map
    mapped = np.memmap(path, dtype=dtype, mode="r", offset=base + entry["start"], shape=shape)
    if zlib.crc32(mapped.data.cast("B")) != entry["crc32"]:
        raise ValueError(f"the checksum of {entry['name']!r} is wrong")
    return mapped.view(np.ndarray)  # which keeps the mapping alive; a slice of a memmap costs more than what it holds


def _prune(folder: Path) -> None:
    """Tables that nobody read for a month, and what killed writers left behind."""
    now = time.time()
    for pattern, keep_s in ((f"*{SUFFIX}", KEEP_UNUSED_S), (f"*{SUFFIX}.*.tmp", KEEP_TORN_S)):
        for old in folder.glob(pattern):
            if now - _modified(old, now) > keep_s:
                _remove(old)


def _modified(path: Path, absent: float) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another process pruned it
        return absent


def _touch(path: Path) -> None:
    try:
        os.utime(path)
    except OSError:
        logger.debug("%s: cannot mark as used", path)  # a read-only cache is a good cache


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as exc:
        logger.warning("%s: cannot be removed (%s)", path, exc)
