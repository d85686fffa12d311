"""SFT rows without a conversation: texts, and rows that were tokenised before."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from verl.config.load import load_config
from verl.config.schema import DataConfig
from verl.data.source import ConversationTable, load_conversations
from verl.driver.assemble_supervised import _stages
from verl.driver.setup import end_lines, load_tokenizer_of
from verl.models import tiny

IDS = [5, 6, 7, 8]


@pytest.fixture
def tokenizer() -> Any:
    made: Any = tiny.character_tokenizer("0123456789+=? abc\n")
    return made


def loaded(folder: Path, tokenizer: Any, *rows: dict[str, Any], **options: Any) -> ConversationTable:
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    cfg = DataConfig(cache_dir=str(folder / "cache"), num_workers=0, **options)
    return load_conversations([str(file)], tokenizer, cfg)


def test_of_a_text_every_token_but_the_first_is_trained_and_the_end(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = None
    ended = f"1+1{tokenizer.eos_token}"
    for text in ("1+1", ended):
        (row,) = loaded(tmp_path, tokenizer, {"text": text})
        assert tokenizer.decode(row.ids) == ended and row.mask.tolist() == [False, True, True, True]
    table = loaded(tmp_path, tokenizer, {"text": "1+1"}, {"text": " "}, {"text": ""})
    assert len(table) == 1 and table.report.refused == {"an empty text": 2}
    (cut,) = loaded(tmp_path, tokenizer, {"text": "1+1=2"}, max_tokens_per_row=3, truncation="right")
    assert tokenizer.decode(cut.ids) == "1+1" and cut.mask.tolist() == [False, True, True]
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: the row has 6 tokens, data\.max_tokens_per_row is 3"):
        loaded(tmp_path, tokenizer, {"text": "1+1=2"}, max_tokens_per_row=3)
    with pytest.raises(ValueError, match="'text' must be text, got a int"):
        loaded(tmp_path, tokenizer, {"text": 3})
    with pytest.raises(ValueError, match="has no chat template"):
        loaded(
            tmp_path, tokenizer, {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}
        )


@pytest.mark.parametrize(
    ("row", "ids", "mask"),
    [
        ({}, IDS, [0, 1, 1, 1]),
        ({"labels": [-100, -100, 7, 8]}, IDS, [0, 0, 1, 1]),
        ({"labels": IDS}, IDS, [0, 1, 1, 1]),
        ({"loss_mask": [1, 0, 1, 1]}, IDS, [0, 0, 1, 1]),
        ({"assistant_masks": [0, 0, 0, 1]}, IDS, [0, 0, 0, 1]),
        ({"completion_mask": [0, 0, 1, 1], "assistant_masks": [0, 1, 1, 0]}, IDS, [0, 0, 1, 0]),
        ({"labels": [-100, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}, IDS, [0, 0, 1, 1]),
        ({"attention_mask": [1, 1, 1, 0]}, IDS[:3], [0, 1, 1]),
        ({"attention_mask": [0, 1, 1, 1], "position_ids": [0, 0, 1, 2]}, IDS[1:], [0, 1, 1]),
        ({"labels": None, "position_ids": [0, 1, 2, 3], "token_type_ids": [0, 0, 0, 0]}, IDS, [0, 1, 1, 1]),
    ],
)
def test_rows_that_were_tokenised_before(tmp_path: Path, tokenizer: Any, row: Any, ids: Any, mask: Any) -> None:
    tokenizer.chat_template = None
    (got,) = loaded(tmp_path, tokenizer, {"input_ids": IDS, **row})
    assert got.ids.tolist() == ids and got.mask.tolist() == [bool(m) for m in mask]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"labels": [6, 7, 8, -100]}, "'labels' are those of the next token"),
        ({"labels": [5, 6, 7, 9]}, "'labels' are other ids"),
        ({"labels": IDS[:3]}, "'labels' has 3 values and 'input_ids' has 4"),
        ({"loss_mask": [0, 1, 2, 1]}, "'loss_mask' must be from 0 to 1"),
        ({"prompt_mask": [1, 1, 0, 0]}, "'prompt_mask' is not read beside"),
        ({"position_ids": [0, 1, 0, 1]}, "'position_ids' begin anew"),
        ({"seq_lengths": [2, 2]}, "'seq_lengths' has several rows"),
        ({"input_ids": [-1, 2]}, "must be a list of token ids"),
        ({"input_ids": "1 2"}, "must be a list of integers"),
        ({"input_ids": [1.5, 2]}, "must be a list of integers"),
        ({"loss_mask": [1, 0, 0, 0]}, "no rows left.*no token to train behind the first"),
    ],
)
def test_wrong_rows_that_were_tokenised_before(tmp_path: Path, tokenizer: Any, row: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        loaded(tmp_path, tokenizer, {"input_ids": IDS, **row})


def test_a_conversation_is_read_and_what_is_beside_it_named(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    for row in ({"messages": turns}, {"prompt": "1", "completion": "2"}, {"instruction": "1", "output": "2"}):
        caplog.clear()
        (got,) = loaded(tmp_path, tokenizer, {**row, "text": "a b c", "input_ids": IDS})
        assert tokenizer.decode(got.ids[got.mask]).startswith("2")
        said = [r.message for r in caplog.records if "is not read" in r.message]
        assert len(said) == 2 and "'text'" in said[0] and "'input_ids'" in said[1] and "rows.jsonl:1" in said[0], row
    caplog.clear()
    loaded(tmp_path, tokenizer, {"messages": turns, "conversations": turns, "prompt": "1", "response": "3"})
    assert [r.message.split("'")[1] for r in caplog.records if "is not read" in r.message] == [
        "conversations",
        "response",
    ]


@pytest.mark.parametrize("command", ["sft", "dpo", "rm"])
def test_rows_that_need_no_template_start_without_one(tmp_path: Path, tiny_model: Path, command: Any) -> None:
    folder, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").unlink()
    rows.write_text(json.dumps({"text": "1+1=2"} if command == "sft" else {"chosen": "1+1=2", "rejected": "1+1=3"}))
    named = [f"model.path={folder}", f"data.train_files=[{rows}]", f"data.cache_dir={tmp_path}/cache"]
    config = load_config(named).config
    tokenizer = load_tokenizer_of(config, needs_template=False)
    assert not tokenizer.chat_template and not end_lines(config, tokenizer)
    stage, _, summary = _stages(config, command, tokenizer)
    assert len(stage.table) == 1 and "1 of 1 rows" in summary
