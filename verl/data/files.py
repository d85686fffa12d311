"""Files of rows, wherever they lie: expand, fingerprint and read JSONL, JSON, Parquet and CSV through fsspec.

Every failure is one ValueError that names the file (and line or row), what is wrong and what to do.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import glob
import hashlib
import io
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

import fsspec

TABLES = {".csv": ",", ".tsv": "\t"}
JSON_LINES = (".jsonl", ".ndjson", ".json")
PARQUET = (".parquet", ".pq")
COMPRESSION = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
BLOCK_BYTES = 1 << 23
PARQUET_BATCH_ROWS = 1024
# The extra of ours, or the package, that brings a protocol which fsspec knows but cannot import.
PACKAGE_OF = dict.fromkeys(("s3", "s3a"), "verl[s3]") | dict.fromkeys(("gs", "gcs"), "verl[gcs]")
PACKAGE_OF |= dict.fromkeys(("abfs", "az"), "adlfs")
# Errors of storage clients that are no OSError. Looked up only where the client was imported anyway.
CLIENT_ERRORS = (
    ("botocore.exceptions", "BotoCoreError"),
    ("aiohttp", "ClientError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("httpx", "HTTPError"),
)
# Arrow types whose Python values are JSON types or bytes already.
EXACT = re.compile(r"null|bool|u?int\d+|float|double|(large_)?(string|binary)(_view)?|fixed_size_binary\[\d+\]")


class DataFile(NamedTuple):
    url: str
    fs: fsspec.AbstractFileSystem
    path: str


class RawRow(NamedTuple):
    """One row as read. `where` names it in messages: file and 1-based line, row or item."""

    where: str
    row: dict[str, Any]


def expand_files(files: Sequence[str]) -> list[DataFile]:
    """Paths, URLs, globs and folders -> files, in the order given and sorted within a glob or folder."""
    if isinstance(files, str):
        raise ValueError(f"data files={files!r} is a string. Fix: give a list of files")
    if not files:
        raise ValueError("no data files. Fix: data.train_files=[FILE, ...] (JSONL or Parquet, paths or URLs)")
    return [found for url in files for found in _expand(str(url))]


def filesystem(url: str) -> tuple[Any, str]:
    """(the file system of a URL or path, the path there). ValueError where its package is missing, or there is none."""
    protocol = url.split("://", 1)[0] if "://" in url else "file"
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except ImportError as exc:
        package = PACKAGE_OF.get(protocol)
        fix = f"pip install '{package}'" if package else str(exc)
        raise ValueError(f"{url}: {protocol}:// needs a package that is not installed. Fix: {fix}") from exc
    except ValueError as exc:
        raise ValueError(f"{url}: {exc}. Fix: a path or a URL that fsspec knows (s3://, gs://, file://, ...)") from exc
    return fs, path


def _expand(url: str) -> list[DataFile]:
    protocol = url.split("://", 1)[0] if "://" in url else "file"
    fs, path = filesystem(url)
    with naming(url):
        fs.invalidate_cache()  # a listing from before the file was written
        try:
            info = fs.info(path)
        except FileNotFoundError:
            if not glob.has_magic(path):
                raise
            found, where = fs.glob(path), "no JSONL or Parquet file matches"
        else:
            if info["type"] != "directory":
                return [DataFile(url, fs, path)]
            found, where = fs.ls(path, detail=False), "a folder without JSONL or Parquet files"
    paths = [p for p in sorted(map(str, found)) if format_of(p) is not None]
    if not paths:
        raise ValueError(f"{url}: {where}")
    return [DataFile(p if protocol == "file" else fs.unstrip_protocol(p), fs, p) for p in paths]


def format_of(path: str) -> tuple[str, str | None] | None:
    """("json" | "parquet" | what separates the columns of a table, compression) by the file's name."""
    name = path.lower()
    compression = next((codec for ending, codec in COMPRESSION.items() if name.endswith(ending)), None)
    if compression is not None:
        name = name.rpartition(".")[0]
    if name.endswith(JSON_LINES):
        return "json", compression
    if separator := TABLES.get(name[-4:]):
        return separator, compression
    return ("parquet", None) if name.endswith(PARQUET) and compression is None else None


def fingerprint(file: DataFile) -> str:
    """Changes when the content does: the store's own tag where it has one, else a hash of the bytes."""
    with naming(file.url):
        info = file.fs.info(file.path)
        tag = next((info[k] for k in ("ETag", "etag", "md5Hash", "contentHash") if info.get(k)), None)
        if tag is not None:
            return f"{info.get('size')}:{tag}"
        with file.fs.open(file.path, "rb") as stream:
            return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def read_rows(file: DataFile) -> Iterator[RawRow]:
    """The rows of one file, streamed. JSON types only, and bytes (Parquet)."""
    known = format_of(file.path)
    if known is None:
        endings = " ".join((*JSON_LINES, *(e + c for e in JSON_LINES[:1] for c in COMPRESSION), *PARQUET, *TABLES))
        raise ValueError(f"{file.url}: unknown format. Fix: a name that ends in one of {endings}")
    kind, compression = known
    with naming(file.url), file.fs.open(file.path, "rb") as stream:
        if kind == "parquet":
            yield from _parquet_rows(file.url, stream)
            return
        if compression is not None:
            import pyarrow

            stream = pyarrow.CompressedInputStream(stream, compression)
        yield from _json_rows(file.url, stream) if kind == "json" else _table_rows(file.url, stream, kind)


def _json_rows(url: str, stream: Any) -> Iterator[RawRow]:
    lines = enumerate(io.BufferedReader(stream, BLOCK_BYTES), start=1)  # splits at \n only, not at U+2028
    for number, raw in lines:
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")  # byte order mark of Windows editors
        if not raw.strip():
            continue
        if number == 1 and raw.lstrip().startswith(b"["):
            items = _parsed(b"".join([raw, *(rest for _, rest in lines)]), url)
            for k, item in enumerate(items, start=1):
                yield _raw_row(item, f"{url}: item {k}")
        else:
            yield _raw_row(_parsed(raw, f"{url}:{number}"), f"{url}:{number}")


def _table_rows(url: str, stream: Any, separator: str) -> Iterator[RawRow]:
    """A line of names, then rows of text; an empty field is no value."""
    csv.field_size_limit(BLOCK_BYTES)
    text = io.TextIOWrapper(io.BufferedReader(stream, BLOCK_BYTES), encoding="utf-8-sig", newline="")
    rows = csv.reader(text, delimiter=separator, strict=True)
    try:
        names = next(rows, [])
        for fields in rows:
            if fields and len(fields) != len(names):
                raise ValueError(f"{url}:{rows.line_num}: {len(fields)} fields, but the first line names {len(names)}")
            if fields:
                yield RawRow(f"{url}:{rows.line_num}", {n: f for n, f in zip(names, fields) if f})
    except (csv.Error, UnicodeDecodeError) as exc:
        raise ValueError(f"{url}:{rows.line_num}: not readable as CSV in UTF-8: {_one_line(exc)}") from exc


def _parsed(raw: bytes, where: str) -> Any:
    try:
        return json.loads(raw.removesuffix(b"\n").decode("utf-8"))
    except UnicodeDecodeError as exc:
        raise ValueError(f"{where}: not UTF-8 at byte {exc.start + 1} of the line ({exc.reason})") from exc
    except json.JSONDecodeError as exc:
        at = f"line {exc.lineno} column {exc.colno}" if exc.lineno > 1 else f"column {exc.colno}"
        raise ValueError(f"{where}: invalid JSON at {at}: {exc.msg}") from exc
    except RecursionError as exc:
        raise ValueError(f"{where}: JSON nested too deeply to be read") from exc


def _raw_row(value: Any, where: str) -> RawRow:
    if not isinstance(value, dict):
        names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
        raise ValueError(f"{where}: a row must be a JSON object, this is {names.get(type(value), 'a number')}")
    return RawRow(where, value)


def _parquet_rows(url: str, stream: BinaryIO) -> Iterator[RawRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        table = pq.ParquetFile(stream)
        clean: Callable[[Any], Any] = dict if all(_is_exact(f.type) for f in table.schema_arrow) else _plain
        for batch in table.iter_batches(batch_size=PARQUET_BATCH_ROWS):
            for row in batch.to_pylist(maps_as_pydicts="lossy"):
                number += 1
                yield RawRow(f"{url}: row {number}", clean(row))
    except (pa.ArrowException, UnicodeDecodeError) as exc:
        raise ValueError(f"{url}: not a readable Parquet file (after row {number}): {_one_line(exc)}") from exc


def _is_exact(kind: Any) -> bool:
    import pyarrow.types as t

    if t.is_struct(kind):
        return all(_is_exact(kind.field(i).type) for i in range(kind.num_fields))
    if t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind) or t.is_dictionary(kind):
        return _is_exact(kind.value_type)
    return EXACT.fullmatch(str(kind)) is not None


def _plain(value: Any) -> Any:
    """JSON types and bytes: dates become ISO strings, decimals their digits, map keys strings."""
    if value is None or isinstance(value, (str, bool, int, float, bytes)):
        return value
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return str(value)
    return _plain(value.item()) if hasattr(value, "item") else str(value)


@contextmanager
def naming(url: str) -> Iterator[None]:
    """Whatever the storage says goes wrong becomes a ValueError that names the URL."""
    try:
        yield
    except FileNotFoundError as exc:
        raise ValueError(f"{url}: no such file (or the store cannot be reached)") from exc
    except PermissionError as exc:
        raise ValueError(f"{url}: permission denied ({_one_line(exc)}). Fix: credentials or access rights") from exc
    except storage_errors() as exc:
        raise ValueError(f"{url}: cannot be read: {type(exc).__name__}: {_one_line(exc)}") from exc


def storage_errors() -> tuple[type[BaseException], ...]:
    """What stores raise, as far as their packages were imported."""
    loaded = ((sys.modules[module], name) for module, name in CLIENT_ERRORS if module in sys.modules)
    return (OSError, EOFError, *(getattr(module, name) for module, name in loaded))


def _one_line(exc: BaseException) -> str:
    return " ".join(str(exc).split())[:300]
