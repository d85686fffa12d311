"""A run that lost a process starts again from its own checkpoint, whatever run.resume is."""

from __future__ import annotations

import pytest
from small_runs import metrics_of, small_args

from verl.cli import main
from verl.driver import launch
from verl.workers.group import WorkerDied


def dying_once(monkeypatch, name: str) -> None:
    whole, calls = getattr(launch, name), []

    async def first(*args):
        calls.append(args)
        if len(calls) == 1:
            raise WorkerDied("rank 1 died")
        return await whole(*args)

    monkeypatch.setattr(launch, name, first)


@pytest.mark.parametrize("most", [0, 1])
def test_before_the_first_checkpoint_of_a_run_that_was_to_find_nothing(
    most, tmp_path, tiny_model, arithmetic_data, monkeypatch, capsys
):
    dying_once(monkeypatch, "train")
    more = ("run.resume=never", f"cluster.max_restarts={most}", "run.total_steps=1", "run.save_every_steps=0")
    code = main(["train", *small_args(tmp_path, tiny_model, arithmetic_data, *more)])
    said = capsys.readouterr()
    if most:
        assert code == 0 and "starting again from the last checkpoint (1 of 1 times)" in said.out, said
        assert set(metrics_of(tmp_path / "r")) >= {1}
    else:
        assert code == 1 and said.err.strip().splitlines()[-1] == "error: rank 1 died"


def test_a_supervised_run(tmp_path, tiny_model, monkeypatch, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}\n' * 8)
    dying_once(monkeypatch, "fit")
    own = [f"model.path={tiny_model}", f"data.train_files=[{rows}]", f"run.root_dir={tmp_path}", "run.name=r"]
    more = ["run.total_steps=2", "step.prompts_per_step=4", "cluster.max_restarts=1", "track.sinks=[jsonl]"]
    assert main(["sft", *own, *more, f"data.cache_dir={tmp_path}/cache"]) == 0
    assert "rank 1 died" in capsys.readouterr().out and set(metrics_of(tmp_path / "r")) >= {1, 2}
