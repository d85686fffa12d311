"""Folders with several splits, columns that are there twice, and files in the formats that people save."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import ipc

from verl.data.files import expand_files, read_rows
from verl.planner.sizes import count_rows

ROW = {"prompt": "2+2? é", "answer": "4"}
LINE = json.dumps(ROW, ensure_ascii=False)


def rows_of(*files: Path | str) -> list[dict[str, Any]]:
    return [raw.row for file in expand_files([str(f) for f in files]) for raw in read_rows(file)]


def says(*files: Path | str) -> str:
    try:
        return f"accepted: {rows_of(*files)}"
    except ValueError as exc:
        return str(exc)


def written(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text(LINE + "\n", encoding="utf-8")
    return folder


def test_a_folder_of_several_splits_is_refused(tmp_path: Path) -> None:
    mixed = [
        ("train-0.jsonl", "train-1.jsonl", "test-0.jsonl"),
        ("train.jsonl", "validation.jsonl"),
        ("gsm8k_train.jsonl", "gsm8k_test.jsonl"),
        ("rows.jsonl", "test.jsonl"),
        ("test.jsonl", "dev.jsonl"),
        ("train.jsonl", "eval.jsonl"),
    ]
    for k, names in enumerate(mixed):
        folder = written(tmp_path / str(k), *names)
        for spelled in (folder, folder / "*", folder / "*.jsonl"):
            said = says(spelled)
            assert "several splits" in said and names[0] in said and names[-1] in said and "Fix" in said, (names, said)
            with pytest.raises(ValueError, match="several splits"):
                count_rows([str(spelled)])
        fix = re.search(r"e\.g\. (.*)$", said)
        assert fix and len(rows_of(fix[1])) == sum(Path(fix[1]).name.strip("*") in name for name in names), said
        assert len(rows_of(*(folder / name for name in names))) == len(names), "files that are named are read"
    for k, names in enumerate(
        [("train-0.jsonl", "train-1.jsonl"), ("a.jsonl", "train.jsonl"), ("contest.jsonl", "b.jsonl")]
    ):
        folder = written(tmp_path / f"one{k}", *names, ".train.jsonl.swp.jsonl", "dataset_infos.json", "README.md")
        assert len(rows_of(folder)) == len(rows_of(folder / "*.jsonl")) == 2


def test_splits_in_folders_of_their_own(tmp_path: Path) -> None:
    for split in ("train", "test"):
        written(tmp_path / split, "rows.jsonl")
    said = says(tmp_path / "*" / "*.jsonl")
    assert "test (test/rows.jsonl); train (train/rows.jsonl)" in said and said.endswith(f"e.g. {tmp_path}/train/*"), (
        said
    )
    under = written(tmp_path / "test" / "more", "a.jsonl", "b.jsonl")
    assert len(rows_of(under)) == 2, "what stands above all of the files says nothing"


def test_one_name_in_two_formats_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", "train.jsonl")
    pq.write_table(pa.Table.from_pylist([ROW]), folder / "train.parquet")
    assert "train.jsonl, train.parquet" in says(folder) and "Fix" in says(folder)


def test_a_folder_of_folders_names_those_with_rows(tmp_path: Path) -> None:
    written(tmp_path / "data", "train-0.jsonl")
    written(tmp_path / "docs", "README.md")
    assert says(tmp_path).endswith("there are in data. Fix: name one of these")


def saved(folder: Path, rows: list[dict[str, Any]]) -> None:
    """As `Dataset.save_to_disk` writes them."""
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist(rows)
    for k in range(2):
        with ipc.new_stream(folder / f"data-{k:05}-of-00002.arrow", table.schema) as out:
            out.write_table(table.slice(k * 2, 2), max_chunksize=1)
    (folder / "cache-1.arrow").write_bytes(b"of map()")
    files = [{"filename": f"data-{k:05}-of-00002.arrow"} for k in range(2)]
    (folder / "state.json").write_text(json.dumps({"_data_files": files}))
    (folder / "dataset_info.json").write_text("{}")


def test_saved_data_sets_are_read(tmp_path: Path) -> None:
    rows = [{**ROW, "n": k} for k in range(3)]
    saved(tmp_path / "one", rows)
    assert rows_of(tmp_path / "one") == rows
    for splits in (["train"], ["train", "test"]):
        both = tmp_path / f"{len(splits)}"
        for split in splits:
            saved(both / split, rows)
        (both / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
    assert rows_of(tmp_path / "1") == rows_of(tmp_path / "2" / "train") == rows
    assert "the splits train, test. Fix: name one, e.g." in says(tmp_path / "2")
    with ipc.new_file(tmp_path / "a.feather", (table := pa.Table.from_pylist(rows)).schema) as out:
        out.write_table(table)
    assert rows_of(tmp_path / "a.feather") == rows


def test_documents_of_json(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    rows = [ROW, {**ROW, "messages": [{"role": "user", "content": "hi"}]}]
    for document in (rows, {"data": rows}, {"version": "1.0", "data": rows}, {"train": rows}, {"examples": rows}):
        for indent in (None, 2):
            for text in (json.dumps(document, indent=indent), "\n" + json.dumps(document, indent=indent) + "\n\n"):
                file.write_text(text)
                assert rows_of(file) == rows, text
    for row in rows:
        for indent in (None, 2):
            file.write_text(json.dumps(row, indent=indent))
            assert rows_of(file) == [row]
    lines = [{"data": rows}, {"data": rows}]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert rows_of(file) == lines, "of two lines each is a row"
    for document, said in (
        ({"train": rows, "test": rows}, "the splits train, test in one file"),
        ({"prompt": {"0": "a", "1": "b"}, "answer": {"0": "1", "1": "2"}}, "a table by columns.*orient='records'"),
        ({"columns": ["prompt"], "index": [0], "data": [["a"]]}, "a table by columns"),
    ):
        file.write_text(json.dumps(document))
        assert re.search(said, says(file)), says(file)


def test_text_in_other_encodings_and_other_formats_under_a_texts_name(tmp_path: Path) -> None:
    for encoding in ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"):
        (tmp_path / "a.jsonl").write_bytes(f"{LINE}\n{LINE}\n".encode(encoding))
        assert rows_of(tmp_path / "a.jsonl") == [ROW, ROW], encoding
        (tmp_path / "a.csv").write_bytes("prompt,answer\r\n2+2? é,4\r\n".encode(encoding))
        assert rows_of(tmp_path / "a.csv") == [ROW], encoding
        assert count_rows([str(tmp_path / "a.jsonl")]) in (None, 2)
    for head, said in (
        (b"\x1f\x8b\x08", "gzip"),
        (b"PAR1", "Parquet"),
        (b"PK\x03\x04", "Excel"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ):
        (tmp_path / "a.jsonl").write_bytes(head + b"xxxx")
        assert said in says(tmp_path / "a.jsonl") and "Fix" in says(tmp_path / "a.jsonl")


def test_names_and_fields_of_a_table_are_stripped_where_it_is_padded(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    for text in ("prompt, answer\n1+1=, 2\n", "prompt ,answer \n1+1= ,2 \n", 'prompt, answer\n1+1=, "2"\n'):
        file.write_text(text)
        assert rows_of(file) == [{"prompt": "1+1=", "answer": "2"}], text
    file.write_text('prompt, answer\n"1, 2", "a ""b"", c"\n')
    assert rows_of(file) == [{"prompt": "1, 2", "answer": 'a "b", c'}]
    for separator, more in ((";", ""), ("\t", "name it .tsv")):
        file.write_text(separator.join(("prompt", "answer\n1+1=", "2\n")))
        assert f"separated by {separator!r}. Fix" in says(file) and more in says(file)
    file.write_text("prompt,answer\n 1+1=, 2\n")
    assert rows_of(file) == [{"prompt": " 1+1=", "answer": " 2"}], "text is kept where the names are not padded"


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,answer, answer\n1,2,3\n")
    (tmp_path / "a.jsonl").write_text(f'{LINE}\n{{"prompt": "x", "prompt": "y"}}\n')
    (tmp_path / "b.jsonl").write_text(f'{LINE}\n{{"prompt": [{{"role": "user", "content": "a", "content": "b"}}]}}\n')
    schema = pa.schema([("prompt", pa.string()), ("prompt", pa.string())])
    table = pa.table([["a"], ["b"]], schema=schema)
    pq.write_table(table, tmp_path / "a.parquet")
    with ipc.new_stream(tmp_path / "a.arrow", schema) as out:
        out.write_table(table)
    for name, said in (
        ("a.csv", ":1: the column 'answer' is there twice"),
        ("a.jsonl", ":2: the key 'prompt' is there twice"),
        ("b.jsonl", ":2: the key 'content' is there twice"),
        ("a.parquet", ": the column 'prompt' is there twice"),
        ("a.arrow", ": the column 'prompt' is there twice"),
    ):
        assert f"{name}{said}" in says(tmp_path / name), says(tmp_path / name)
