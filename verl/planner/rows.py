"""Facts of files of rows that a plan reads: how many rows they have, and whether these have images."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

from verl.data.files import DataFile, expand_files, file_format, read_rows
from verl.data.media import is_media_column


def count_rows(files: list[str]) -> int | None:
    """Return the rows of local JSONL and Parquet files (from its footer); None for other files."""
    if not files or any("://" in name for name in files):
        return None
    total = 0
    for file in expand_files(files):
        kind = file_format(file.path)
        if kind == ("parquet", None):
            import pyarrow.parquet as parquet  # only for a run with Parquet files

            total += parquet.read_metadata(file.path).num_rows
        elif kind == ("json", None) and not file.path.endswith(".json"):
            with open(file.path, "rb") as stream:
                if not re.match(rb"(\xef\xbb\xbf)?\{[^\0]", stream.peek(8)):  # a list, or not UTF-8
                    return None
                total += sum(1 for line in stream if line.strip())
        else:
            return None
    return total


@lru_cache(maxsize=8)
def may_have_images(files: tuple[str, ...], made: bool) -> bool:
    """Return False if the first row of each file has text alone. made: a class makes the rows, which are not read."""
    return made or not files or any("://" in name for name in files) or any(map(_has_images, expand_files(files)))


def _has_images(file: DataFile) -> bool:
    if file_format(file.path) == ("parquet", None):
        import pyarrow.parquet as parquet  # only for a run with Parquet files

        schema = parquet.read_schema(file.path)
        parts = "type" in str(schema.types)  # the field of a message's parts, in whatever column
        return parts or any(map(is_media_column, schema.names))
    row = next(read_rows(file), None)
    return row is not None and (any(map(is_media_column, row.row)) or any(map(_has_parts, row.row.values())))


def _has_parts(value: object) -> bool:
    """Return True if a value is messages, one of which has parts that are no text."""
    messages = [m for m in value if isinstance(m, Mapping)] if isinstance(value, Sequence) else []
    parts = [m["content"] for m in messages if isinstance(m.get("content"), list)]
    return any(isinstance(one, Mapping) and one.get("type") != "text" for part in parts for one in part)
