"""Broken, missing and unreachable data: one ValueError that names the file, the place and the reason."""

from __future__ import annotations

import gzip
import re
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.data.files import expand_files, read_rows


def read(*files: str | Path) -> int:
    return sum(1 for f in expand_files([str(f) for f in files]) for _ in read_rows(f))


GOOD = b'{"prompt": "a"}\n'


MALFORMED = [
    (GOOD + b'\n{"prompt": "b",}\n', r"a\.jsonl:3: invalid JSON at column 16"),
    (GOOD + b'{"prompt": "b"', r"a\.jsonl:2: invalid JSON at column 15: Expecting ',' delimiter"),
    (GOOD + b"[1, 2]\n", r"a\.jsonl:2: a row must be a JSON object, this is an array"),
    (GOOD + b'"text"\n', r"a\.jsonl:2: a row must be a JSON object, this is a string"),
    (GOOD + b"3\n", r"a\.jsonl:2: .*this is a number"),
    (GOOD + b'{"prompt": "\xff"}\n', r"a\.jsonl:2: not UTF-8 at byte 13 of the line"),
    (GOOD + b'{"a":' + b"[" * 100_000 + b"\n", r"a\.jsonl:2: JSON nested too deeply"),
    (b'[{"prompt": "a"}, 7]', r"a\.jsonl: item 2: a row must be a JSON object, this is a number"),
    (b'[{"prompt": "a"},\n {"prompt": }]', r"a\.jsonl: invalid JSON at line 2 column 13"),
]


def test_malformed_jsonl_names_the_line(tmp_path: Path) -> None:
    failed = []
    for content, message in MALFORMED:
        (tmp_path / "a.jsonl").write_bytes(content)
        try:
            failed.append((content[:60], f"accepted: {read(tmp_path / 'a.jsonl')}"))
        except ValueError as exc:
            if not re.search(message, str(exc)):
                failed.append((content[:60], str(exc)))
    assert not failed


def test_damaged_files(tmp_path: Path) -> None:
    packed = gzip.compress(GOOD * 1000)
    (tmp_path / "a.jsonl.gz").write_bytes(packed[:-20])
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz: cannot be read: OSError: Truncated compressed stream"):
        read(tmp_path / "a.jsonl.gz")
    (tmp_path / "b.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(ValueError, match=r"b\.parquet: not a readable Parquet file \(after row 0\)"):
        read(tmp_path / "b.parquet")
    pq.write_table(pa.table({"prompt": ["x" * 50] * 5000}), tmp_path / "c.parquet", compression="gzip")
    whole = bytearray((tmp_path / "c.parquet").read_bytes())
    whole[40:120] = bytes(80)
    (tmp_path / "c.parquet").write_bytes(whole)
    with pytest.raises(ValueError, match=r"c\.parquet: "):
        read(tmp_path / "c.parquet")


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    for name, message in (
        ("none.jsonl", r"none\.jsonl: no such file"),
        ("*.jsonl", r"\*\.jsonl: no JSONL, Parquet or CSV file matches"),
        ("a.xlsx", r"a\.xlsx: unknown format. Fix: a name that ends in one of \.jsonl"),
        ("folder", r"folder: a folder without JSONL, Parquet or CSV files"),
    ):
        (tmp_path / "a.xlsx").write_text("x")
        (tmp_path / "folder").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match=message):
            read(tmp_path / name)
    with pytest.raises(ValueError, match=r"no data files. Fix: data\.train_files"):
        expand_files([])
    with pytest.raises(ValueError, match="is a string"):
        expand_files("a.jsonl")
    with pytest.raises(ValueError, match=r"nope://x: Protocol not known: nope"):
        read("nope://x")


def test_permission_denied_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    (file,) = expand_files([str(tmp_path / "a.jsonl")])

    def denied(path: str, mode: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(file.fs, "open", denied)
    with pytest.raises(ValueError, match=r"a\.jsonl: permission denied .*Fix: credentials or access rights"):
        list(read_rows(file))


def test_a_missing_extra_is_one_line_with_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for url, module, fix in (
        ("s3://b/x", "s3fs", r"'\.\[s3\]' in verl's folder"),
        ("gs://b/x", "gcsfs", r"'\.\[gcs\]' in verl's folder"),
    ):
        monkeypatch.setitem(sys.modules, module, None)  # importing it fails, as if it were not installed
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, url.partition(":")[0], raising=False)
        with pytest.raises(ValueError, match=rf"^{url}: .* not installed. Fix: pip install {fix}$"):
            read(url)
