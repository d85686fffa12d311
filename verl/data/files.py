"""Find, fingerprint and read files of rows (JSONL, JSON, Parquet, Arrow and CSV) on any file system of fsspec.

Every failure raises ValueError with the file (and line or row), the fault and the fix.
"""

from __future__ import annotations

import codecs
import csv
import datetime
import decimal
import glob
import hashlib
import io
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

import fsspec

from verl.data.splits import SPLITS, is_without_rows, refuse_mixed, saved_files, saved_splits
from verl.errors import Refused

TABLES = {".csv": ",", ".tsv": "\t"}
JSON_LINES = (".jsonl", ".ndjson", ".json")
PARQUET = (".parquet", ".pq")
ARROW = (".arrow", ".feather")
COMPRESSION = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
AROUND_ROWS = ("data", "rows", "examples", "instances", "records", "items")
NOT_ROWS = {"version", "metadata", "meta", "info", "description", "license", "name", "schema", "type"}
"""Keys that may be beside the list of rows in a JSON object: they are not columns."""
WIDE = (
    *((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32")),
    *((codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16")),
)
OTHER_FORMATS: Mapping[bytes, str] = {
    b"\x1f\x8b": "gzip. Fix: a name that ends in .gz",
    b"\x28\xb5\x2f\xfd": "zstd. Fix: a name that ends in .zst",
    b"PAR1": "Parquet. Fix: a name that ends in .parquet",
    b"ARROW1": "Arrow. Fix: a name that ends in .arrow",
    b"PK\x03\x04": "a zip archive or an Excel sheet. Fix: unpack it, or save the sheet as CSV in UTF-8",
    b"version https://git-lfs": "a pointer of Git LFS. Fix: git lfs pull",
}
BLOCK_BYTES = 1 << 23
PARQUET_BATCH_ROWS = 1024
# The extra of verl, or the package, with a protocol that fsspec lists but cannot import.
PACKAGE_OF = dict.fromkeys(("s3", "s3a"), "'.[s3]' in verl's folder") | dict.fromkeys(
    ("gs", "gcs"), "'.[gcs]' in verl's folder"
)
PACKAGE_OF |= dict.fromkeys(("abfs", "az"), "adlfs")
# Errors of storage clients that are no OSError. Looked up only where the client was imported anyway.
CLIENT_ERRORS = (
    ("botocore.exceptions", "BotoCoreError"),
    ("aiohttp", "ClientError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("httpx", "HTTPError"),
)
# Arrow types with Python values that are JSON types or bytes already.
EXACT = re.compile(r"null|bool|u?int\d+|float|double|(large_)?(string|binary)(_view)?|fixed_size_binary\[\d+\]")


class DataFile(NamedTuple):
    url: str
    fs: fsspec.AbstractFileSystem
    path: str


class RawRow(NamedTuple):
    """One row as it was read. `where` is its place in error messages: the file, and the number of its line, row or item
    from 1."""

    where: str
    row: dict[str, Any]


def expand_files(files: Sequence[str]) -> list[DataFile]:
    """Return the files of paths, URLs, globs and folders, in the given order, sorted within a glob or folder."""
    if isinstance(files, str):
        raise Refused(f"data files={files!r} is a string. Fix: give a list of files")
    if not files:
        raise Refused("no data files. Fix: data.train_files=[FILE, ...] (JSONL or Parquet, paths or URLs)")
    return [found for url in files for found in _expand(str(url))]


def filesystem(url: str) -> tuple[Any, str]:
    """Return (the file system of a URL or path, the path in it). Raise ValueError if its package is missing or it does
    not exist."""
    protocol = url.split("://", 1)[0] if "://" in url else "file"
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except ImportError as exc:
        package = PACKAGE_OF.get(protocol)
        fix = f"pip install {package}" if package else str(exc)
        raise Refused(f"{url}: {protocol}:// needs a package that is not installed. Fix: {fix}") from exc
    except ValueError as exc:
        raise Refused(f"{url}: {exc}. Fix: a path or a URL that fsspec knows (s3://, gs://, file://, ...)") from exc
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
            found, where = fs.glob(path), "no JSONL, Parquet or CSV file matches"
        else:
            if info["type"] != "directory":
                return [DataFile(url, fs, path)]
            found, where = fs.ls(path, detail=False), _without_rows(fs, path)
            names = {str(p).rpartition("/")[2]: str(p) for p in found}
            if "dataset_dict.json" in names:
                return _expand(_only_split(url, saved_splits(fs.cat_file(names["dataset_dict.json"]))))
            if "state.json" in names and "dataset_info.json" in names:
                saved = [names[name] for name in saved_files(fs.cat_file(names["state.json"])) if name in names]
                return [_data_file(fs, p, protocol) for p in saved]
    paths = [p for p in sorted(map(str, found)) if file_format(p) is not None and not is_without_rows(p)]
    if not paths:
        raise Refused(f"{url}: {where}")
    refuse_mixed(url, paths, [_stem(p) for p in paths])
    return [_data_file(fs, p, protocol) for p in paths]


def _data_file(fs: fsspec.AbstractFileSystem, path: str, protocol: str) -> DataFile:
    return DataFile(path if protocol == "file" else fs.unstrip_protocol(path), fs, path)


def _only_split(url: str, splits: Sequence[str]) -> str:
    if len(splits) != 1:
        fix = f"Fix: name one, e.g. {url.rstrip('/')}/{splits[0] if splits else 'train'}"
        raise Refused(f"{url}: a saved DatasetDict of the splits {', '.join(splits) or 'none'}. {fix}")
    return f"{url.rstrip('/')}/{splits[0]}"


def _without_rows(fs: fsspec.AbstractFileSystem, path: str) -> str:
    """Return a description of a folder without files of rows, which names its subfolders with such files."""
    inner = [str(p["name"]) for p in fs.ls(path, detail=True) if p["type"] == "directory"]
    filled = [p.rpartition("/")[2] for p in inner if any(file_format(str(f)) for f in fs.ls(p, detail=False))]
    there = f"; there are in {', '.join(sorted(filled))}. Fix: name one of these" if filled else ""
    return f"a folder without JSONL, Parquet or CSV files{there}"


def _stem(path: str) -> str:
    """Return the path without the ending that gives the format."""
    endings = (*COMPRESSION, *JSON_LINES, *PARQUET, *ARROW, *TABLES)
    while ending := next((e for e in endings if path.lower().endswith(e)), ""):
        path = path[: -len(ending)]
    return path


def file_format(path: str) -> tuple[str, str | None] | None:
    """Return (format, compression) by the file's name; the format is "json", "parquet", "arrow" or, for a text table,
    the separator of its columns."""
    name = path.lower()
    compression = next((codec for ending, codec in COMPRESSION.items() if name.endswith(ending)), None)
    if compression is not None:
        name = name.rpartition(".")[0]
    if name.endswith(JSON_LINES):
        return "json", compression
    if separator := TABLES.get(name[-4:]):
        return separator, compression
    if compression is not None:
        return None
    return ("parquet", None) if name.endswith(PARQUET) else ("arrow", None) if name.endswith(ARROW) else None


def fingerprint(file: DataFile) -> str:
    """Return a text that changes with the content of a file: the tag of the object store if it has one, else a hash of
    the bytes."""
    with naming(file.url):
        info = file.fs.info(file.path)
        tag = next((info[k] for k in ("ETag", "etag", "md5Hash", "contentHash") if info.get(k)), None)
        if tag is not None:
            return f"{info.get('size')}:{tag}"
        with file.fs.open(file.path, "rb") as stream:
            return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def read_rows(file: DataFile) -> Iterator[RawRow]:
    """Yield the rows of one file without reading it into memory as a whole. The values are JSON types, and bytes
    (Parquet)."""
    known = file_format(file.path)
    if known is None:
        packed = (e + c for e in JSON_LINES[:1] for c in COMPRESSION)
        endings = " ".join((*JSON_LINES, *packed, *PARQUET, *ARROW, *TABLES))
        raise Refused(f"{file.url}: unknown format. Fix: a name that ends in one of {endings}")
    kind, compression = known
    with naming(file.url), file.fs.open(file.path, "rb") as stream:
        if kind in ("parquet", "arrow"):
            yield from _parquet_rows(file.url, stream) if kind == "parquet" else _arrow_rows(file.url, stream)
            return
        if compression is not None:
            import pyarrow

            stream = pyarrow.CompressedInputStream(stream, compression)
        text = _as_utf8(file.url, io.BufferedReader(stream, BLOCK_BYTES))
        yield from _json_rows(file.url, text) if kind == "json" else _table_rows(file.url, text, kind)


def _as_utf8(url: str, stream: io.BufferedReader) -> io.BufferedIOBase:
    """Return a stream of the text as UTF-8 without a byte order mark, from any Unicode encoding. Raise ValueError for
    data that is not text."""
    head = stream.peek(64)[:64]
    if other := next((name for magic, name in OTHER_FORMATS.items() if head.startswith(magic)), None):
        raise Refused(f"{url}: no text, but {other}")
    if head.startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))
        return stream
    encoding = next((name for mark, name in WIDE if head.startswith(mark)), "")
    if not encoding and len(head) > 1 and (head[0] == 0) != (head[1] == 0):  # ASCII without a mark
        encoding = "utf-16-be" if head[0] == 0 else "utf-16-le"
    if not encoding:
        return stream
    try:
        return io.BytesIO(stream.read().decode(encoding).encode("utf-8"))
    except UnicodeError as exc:
        raise Refused(f"{url}: it begins as {encoding} and is not ({exc}). Fix: save it as UTF-8") from exc


def _json_rows(url: str, stream: Any) -> Iterator[RawRow]:
    """Yield the rows of a JSON file: one per line, the items of a list, or the items of the list in an object."""
    # str.splitlines would also split at U+2028.
    lines = ((number, raw) for number, raw in enumerate(stream, start=1) if raw.strip())
    first, second = next(lines, None), None
    if first is None:
        return
    number, raw = first
    if _begins_document(raw):
        document = _parsed(b"\n" * (number - 1) + b"".join([raw, *(rest for _, rest in lines)]), url)
    else:
        document, second = _parsed(raw, f"{url}:{number}"), next(lines, None)
    items = None if second else _listed(url, document)
    for k, item in enumerate(items or (), start=1):
        yield _raw_row(item, f"{url}: item {k}")
    if items is None:
        yield _raw_row(document, f"{url}:{number}")
    for number, raw in itertools.chain([second] if second else (), lines):
        yield _raw_row(_parsed(raw, f"{url}:{number}"), f"{url}:{number}")


def _begins_document(raw: bytes) -> bool:
    """Return True if a line begins a list, or an object that continues on the next line."""
    text = raw.decode("utf-8", errors="replace").rstrip()
    try:
        json.loads(text)
    except json.JSONDecodeError as exc:
        return exc.pos >= len(text) or text.lstrip().startswith("[")
    except RecursionError:
        return False
    return text.lstrip().startswith("[")


def _listed(url: str, document: Any) -> list[Any] | None:
    """Return the rows of a JSON document that is a list of them or contains one; None for a document that is itself a
    row."""
    if not isinstance(document, dict):
        return document if isinstance(document, list) else None
    lists = [key for key, value in document.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if len(lists) > 1 and all(key.lower() in SPLITS for key in document):
        raise Refused(f"{url}: the splits {', '.join(lists)} in one file. Fix: a file for each, a row per line")
    if document.keys() == {"columns", "index", "data"} or (
        document and all(isinstance(value, dict) and "0" in value for value in document.values())
    ):
        raise Refused(f"{url}: a table by columns. Fix: one by rows (pandas: to_json(orient='records', lines=True))")
    if len(lists) == 1 and lists[0].lower() in (*AROUND_ROWS, *SPLITS) and document.keys() - lists <= NOT_ROWS:
        return list(document[lists[0]])
    return None


def _table_rows(url: str, stream: Any, separator: str) -> Iterator[RawRow]:
    """Yield the rows of a text table, by the column names in its first line. Empty fields are left out."""
    csv.field_size_limit(BLOCK_BYTES)
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    rows = csv.reader(text, delimiter=separator, strict=True)
    try:
        first = text.readline()
        padded = any(name != name.strip() for name in first.rstrip("\r\n").split(separator))
        rows = csv.reader(itertools.chain([first], text), delimiter=separator, strict=True, skipinitialspace=padded)
        names = [name.strip() for name in next(rows, [])]
        if len(names) == 1 and (other := next((c for c in ";\t|" if c in names[0]), None)):
            raise Refused(
                f"{url}:1: one column {names[0]!r}: its fields are separated by {other!r}. Fix: save it with"
                f" {separator!r} between them" + (", or name it .tsv" if other == "\t" else "")
            )
        if twice := _twice(filter(None, names)):
            raise Refused(f"{url}:1: the column {twice!r} is there twice. Fix: keep one, or rename it")
        for fields in rows:
            if fields and len(fields) != len(names):
                raise Refused(f"{url}:{rows.line_num}: {len(fields)} fields, but the first line names {len(names)}")
            if padded:
                fields = [field.strip() for field in fields]
            if fields:
                yield RawRow(f"{url}:{rows.line_num}", {n: f for n, f in zip(names, fields) if f})
    except (csv.Error, UnicodeDecodeError) as exc:
        raise Refused(f"{url}:{rows.line_num}: not readable as CSV in UTF-8: {_one_line(exc)}") from exc


class _KeyTwice(ValueError):
    """An object of JSON has the same key twice."""


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _KeyTwice(repr(_twice(key for key, _ in pairs)))
    return found


ONE_KEY_EACH = json.JSONDecoder(object_pairs_hook=_object_of)


def _twice(names: Iterable[str]) -> str | None:
    """Return the first name that occurs twice; None if there is none."""
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)  # type: ignore[func-returns-value]


def _parsed(raw: bytes, where: str) -> Any:
    try:
        return ONE_KEY_EACH.decode(raw.removesuffix(b"\n").decode("utf-8"))
    except UnicodeDecodeError as exc:
        raise Refused(f"{where}: not UTF-8 at byte {exc.start + 1} of the line ({exc.reason})") from exc
    except json.JSONDecodeError as exc:
        at = f"line {exc.lineno} column {exc.colno}" if exc.lineno > 1 else f"column {exc.colno}"
        raise Refused(f"{where}: invalid JSON at {at}: {exc.msg}") from exc
    except _KeyTwice as exc:
        raise Refused(f"{where}: the key {exc} is there twice in an object. Fix: keep one") from exc
    except RecursionError as exc:
        raise Refused(f"{where}: JSON nested too deeply to be read") from exc


def _raw_row(value: Any, where: str) -> RawRow:
    if not isinstance(value, dict):
        names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
        raise Refused(f"{where}: a row must be a JSON object, this is {names.get(type(value), 'a number')}")
    return RawRow(where, value)


def _parquet_rows(url: str, stream: BinaryIO) -> Iterator[RawRow]:
    import pyarrow.parquet as pq

    def opened() -> tuple[Any, Iterable[Any]]:
        table = pq.ParquetFile(stream)
        return table.schema_arrow, table.iter_batches(batch_size=PARQUET_BATCH_ROWS)

    return _batch_rows(url, "Parquet", opened)


def _arrow_rows(url: str, stream: BinaryIO) -> Iterator[RawRow]:
    """Yield the rows of an Arrow file or stream, as `Dataset.save_to_disk` writes them."""
    from pyarrow import ipc

    def opened() -> tuple[Any, Iterable[Any]]:
        head = stream.read(6)
        stream.seek(0)
        if head != b"ARROW1":
            batches = ipc.open_stream(stream)
            return batches.schema, batches
        table = ipc.open_file(stream)
        return table.schema, (table.get_batch(k) for k in range(table.num_record_batches))

    return _batch_rows(url, "Arrow", opened)


def _batch_rows(url: str, name: str, opened: Callable[[], tuple[Any, Iterable[Any]]]) -> Iterator[RawRow]:
    """Yield the rows of record batches.

    opened: returns the schema and the batches
    """
    import pyarrow as pa

    number = 0
    try:
        schema, batches = opened()
        if twice := _twice(schema.names):
            raise Refused(f"{url}: the column {twice!r} is there twice. Fix: keep one, or rename it")
        clean: Callable[[Any], Any] = dict if all(_is_exact(f.type) for f in schema) else _plain
        for batch in batches:
            for row in batch.to_pylist(maps_as_pydicts="lossy"):
                number += 1
                yield RawRow(f"{url}: row {number}", clean(row))
    except (pa.ArrowException, UnicodeDecodeError) as exc:
        raise Refused(f"{url}: not a readable {name} file (after row {number}): {_one_line(exc)}") from exc


def _is_exact(kind: Any) -> bool:
    import pyarrow.types as t

    if t.is_struct(kind):
        return all(_is_exact(kind.field(i).type) for i in range(kind.num_fields))
    if t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind) or t.is_dictionary(kind):
        return _is_exact(kind.value_type)
    return EXACT.fullmatch(str(kind)) is not None


def _plain(value: Any) -> Any:
    """Return a value converted to JSON types and bytes: dates become ISO strings, decimals their digits, map keys
    strings."""
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
    """Convert errors of the storage to ValueErrors that name the URL."""
    try:
        yield
    except FileNotFoundError as exc:
        raise Refused(f"{url}: no such file (or the store cannot be reached)") from exc
    except PermissionError as exc:
        raise Refused(f"{url}: permission denied ({_one_line(exc)}). Fix: credentials or access rights") from exc
    except storage_errors() as exc:
        raise Refused(f"{url}: cannot be read: {type(exc).__name__}: {_one_line(exc)}") from exc


def storage_errors() -> tuple[type[BaseException], ...]:
    """Return the exception classes of the storage packages that are imported at present."""
    loaded = ((sys.modules[module], name) for module, name in CLIENT_ERRORS if module in sys.modules)
    return (OSError, EOFError, *(getattr(module, name) for module, name in loaded))


def _one_line(exc: BaseException) -> str:
    return " ".join(str(exc).split())[:300]
