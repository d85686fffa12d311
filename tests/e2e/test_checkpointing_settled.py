"""model.gradient_checkpointing=auto is settled once, before a run begins, and recorded as the word that was chosen."""

import json

import pytest
from small_runs import metrics_of, small_args

from verl.cli import main
from verl.workers import host

CHOSEN = "model.gradient_checkpointing=auto: {} ("


@pytest.mark.parametrize("room, word", [(1, "full"), (1 << 50, "none")])
def test_a_run_prints_and_records_the_choice(room, word, tmp_path, tiny_model, arithmetic_data, capsys, monkeypatch):
    monkeypatch.setattr(host, "total_bytes", lambda *_: room)
    args = small_args(tmp_path, tiny_model, arithmetic_data, "run.total_steps=1", "model.gradient_checkpointing=auto")
    assert main(["train", *args]) == 0
    shown = capsys.readouterr()
    assert (shown.out + shown.err).count(CHOSEN.format(word)) == 1
    lines = (tmp_path / "r" / "config.yaml").read_text().splitlines()
    (recorded,) = [line for line in lines if line.strip().startswith("gradient_checkpointing:")]
    assert recorded.split() == ["gradient_checkpointing:", word, *["#", "auto,", "by", "the", "plan's", "memory"]]
    assert {1} <= metrics_of(tmp_path / "r").keys()


def test_a_supervised_run_too(tmp_path, tiny_model, capsys, monkeypatch):
    monkeypatch.setattr(host, "total_bytes", lambda *_: 1)
    row = {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}
    (tmp_path / "rows.jsonl").write_text(4 * (json.dumps(row) + "\n"))
    args = {
        **{"run.root_dir": tmp_path, "run.name": "s", "run.total_steps": 1, "run.threads": 1, "model.path": tiny_model},
        **{"data.train_files": f"[{tmp_path}/rows.jsonl]", "data.cache_dir": tmp_path / "cache"},
        **{"step.prompts_per_step": 2, "track.sinks": "[jsonl]", "model.gradient_checkpointing": "auto"},
    }
    assert main(["sft", *(f"{key}={value}" for key, value in args.items())]) == 0
    shown = capsys.readouterr()
    assert (shown.out + shown.err).count(CHOSEN.format("full")) == 1
    assert "gradient_checkpointing: full" in (tmp_path / "s" / "config.yaml").read_text()
