"""Caches that are damaged, unwritable or full, and files that change underneath."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verl.config.schema import DataConfig
from verl.data import source
from verl.data.cache import cache_path, load_cached, store_cached
from verl.data.source import load_tasks

ARRAYS = {"ids": np.arange(100, dtype=np.int32), "mask": np.ones(7, np.bool_), "none": np.zeros(0, np.int64)}


def test_an_intact_table_comes_back(tmp_path: Path) -> None:
    path = cache_path(str(tmp_path / "new" / "deep"), "k")
    assert load_cached(path) is None and store_cached(path, {"rows": 3}, ARRAYS)
    found = load_cached(path)
    assert found is not None and found[0] == {"rows": 3}
    for name, array in ARRAYS.items():
        assert np.array_equal(found[1][name], array) and found[1][name].dtype == array.dtype
    assert [p.name for p in path.parent.iterdir()] == ["k.table"]


def test_every_damaged_byte_and_every_torn_length_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "k.table"
    store_cached(path, {"rows": 3}, ARRAYS)
    whole = path.read_bytes()
    for position in range(0, len(whole), 3):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x55]) + whole[position + 1 :])
        assert load_cached(path) is None and not path.exists(), position
    for length in (*range(0, 120, 7), len(whole) - 64, len(whole) // 2):
        path.write_bytes(whole[:length])
        assert load_cached(path) is None and not path.exists(), length
    assert "is damaged" in caplog.text


@pytest.fixture
def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: k for k, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.add_special_tokens(["<|end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] + m['content'] + '<|end|>' }}{% endfor %}"
    return fast


def write(path: Path, count: int) -> str:
    path.write_text("\n".join(json.dumps({"prompt": f"p{k}"}) for k in range(count)))
    return str(path)


def test_a_damaged_cache_is_built_again(tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, cfg = write(tmp_path / "a.jsonl", 20), DataConfig(cache_dir=str(tmp_path / "c"))
    first = load_tasks([file], tokenizer, cfg)
    expected = [t.prompt_ids.tolist() for t in first]
    (path,) = (tmp_path / "c").iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    again = load_tasks([file], tokenizer, cfg)
    assert not again.report.from_cache and [t.prompt_ids.tolist() for t in again] == expected
    assert "is damaged" in caplog.text and load_tasks([file], tokenizer, cfg).report.from_cache


def test_a_cache_that_cannot_be_written_is_a_warning(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    file = write(tmp_path / "a.jsonl", 3)
    with caplog.at_level(logging.WARNING):
        assert len(load_tasks([file], tokenizer, DataConfig(cache_dir=str(tmp_path / "file")))) == 3
    assert "are not cached" in caplog.text


def test_a_full_disk_leaves_no_torn_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert not store_cached(tmp_path / "k.table", {}, ARRAYS)
    assert not list(tmp_path.glob("k.table*"))


def test_old_tables_and_torn_writes_are_pruned(tmp_path: Path) -> None:
    for name, age_days in (
        ("old.table", 31),
        ("used.table", 29),
        ("k.table.x.tmp", 2),
        ("l.table.y.tmp", 0),
        ("mine", 99),
    ):
        (tmp_path / name).write_text("x")
        then = time.time() - age_days * 86400
        os.utime(tmp_path / name, (then, then))
    store_cached(tmp_path / "new.table", {}, ARRAYS)
    assert {p.name for p in tmp_path.iterdir()} >= {"used.table", "l.table.y.tmp", "mine", "new.table"}
    assert not (tmp_path / "old.table").exists() and not (tmp_path / "k.table.x.tmp").exists()


def test_a_file_that_changes_while_it_is_read_is_refused(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "a.jsonl", 3)
    original = source.read_rows

    def meanwhile(data_file: Any) -> Any:
        yield from original(data_file)
        write(tmp_path / "a.jsonl", 4)

    monkeypatch.setattr(source, "read_rows", meanwhile)
    with pytest.raises(ValueError, match=r"a\.jsonl: changed while it was read"):
        load_tasks([file], tokenizer, DataConfig(cache_dir=str(tmp_path / "c")))
    assert not (tmp_path / "c").exists() or not list((tmp_path / "c").iterdir())
