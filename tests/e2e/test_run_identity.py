"""A run continues only as itself: another one is refused and the first is unchanged; changes that are allowed are
printed."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from small_runs import REWARD, small_args, small_run, state_of, tensors_of

from verl.cli import main
from verl.driver.replay import replay
from verl.models import tiny
from verl.recipes import arithmetic
from verl.track.events import read_events


@pytest.fixture(scope="module")
def another_model(tmp_path_factory):
    tokenizer = tiny.character_tokenizer(arithmetic.CHARACTERS)
    model = tiny.qwen3(tokenizer, hidden=32, layers=2, heads=2, kv_heads=1, ffn=64, seed=2)
    return tiny.save(model, tokenizer, tmp_path_factory.mktemp("another"))


def everything(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = (p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns) for p in files}


def resumed(run_dir: Path) -> list[dict]:
    return [dict(e.data) for e in read_events(run_dir, {"resumed"})]


def test_another_run_is_refused_key_by_key_and_the_first_is_untouched(
    tmp_path, tiny_model, another_model, arithmetic_data, capsys
):
    small_run(tmp_path, tiny_model, arithmetic_data[:1], "run.total_steps=1")
    before = everything(tmp_path / "r")
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD.read_text() + "\n# another\n")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(arithmetic_data[0].read_text().splitlines(keepends=True)[::-1]))
    wrong = []
    for given, key in (
        (f"model.path={another_model}", "model.path"),
        (f"data.train_files=[{rows}]", "data.train_files"),
        ("algorithm.name=rloo", "algorithm.name"),
        ("algorithm.clip_high=0.3", "algorithm.clip_high"),
        ("rollout.temperature=0.5", "rollout.temperature"),
        (f"reward.path={reward}", "reward.path"),
        ("step.prompts_per_step=8", "step.prompts_per_step"),
        ("model.dtype=bfloat16", "model.dtype"),
        ("data.max_rows=32", "data.max_rows"),
        ("model.lora.rank=4", "model.lora"),
    ):
        code = main(["train", *small_args(tmp_path, tiny_model, arithmetic_data[:1], "run.total_steps=2", given)])
        said = capsys.readouterr().err
        ways = "run.name=NEW" in said and f"run.resume={tmp_path}/r/checkpoints/step_1" in said
        if code != 2 or f"  {key}: " not in said or not ways or everything(tmp_path / "r") != before:
            wrong.append((given, code, said))
    assert not wrong, wrong


def test_what_may_change_is_accepted_said_and_written(tmp_path, tiny_model, arithmetic_data, capsys):
    saving = ("run.save_every_steps=1", "run.keep_last_checkpoints=9")
    small_run(tmp_path, tiny_model, arithmetic_data[:1], "run.total_steps=2", *saving)
    capsys.readouterr()
    more = ("run.total_steps=4", "optim.lr=5e-4", "track.sinks=[jsonl]")
    small_run(tmp_path, tiny_model, arithmetic_data[:1], *saving, *more)
    [line] = [t for t in capsys.readouterr().out.splitlines() if t.startswith("changed since step 2: ")]
    assert "optim.lr 0.001 -> 0.0005" in line and "run.total_steps 2 -> 4" in line
    first, second = resumed(tmp_path / "r")
    assert not first["changed"] and second["changed"]["optim.lr"] == ["0.001", "0.0005"]
    assert second["checkpoint"].endswith("step_2")
    texts = [(tmp_path / "r" / "configs" / f"attempt_{i:04d}.yaml").read_text() for i in (0, 1)]
    assert "lr: 0.001" in texts[0] and "lr: 0.0005" in texts[1]
    assert (tmp_path / "r" / "config.yaml").read_text() == texts[1]
    for step in (2, 3, 4):  # a replay takes the learning rate that the step had
        assert replay([f"run.root_dir={tmp_path}", "run.name=r"], step) == 0, capsys.readouterr().out
    shutil.rmtree(tmp_path / "r" / "checkpoints")
    with pytest.raises(ValueError, match="more than one learning rate"):
        replay([f"run.root_dir={tmp_path}", "run.name=r"], 4)


@pytest.mark.slow
def test_a_fork_starts_from_the_parent_records_it_and_goes_on_as_itself(tmp_path, tiny_model, arithmetic_data, capsys):
    small_run(tmp_path, tiny_model, arithmetic_data[:1], "run.total_steps=2", "run.save_every_steps=1")
    parent = tmp_path / "r" / "checkpoints" / "step_1"
    before = everything(tmp_path / "r")
    more = ("run.name=fork", f"run.resume={parent}", "algorithm.clip_high=0.3", "run.save_every_steps=1")
    assert small_run(tmp_path, tiny_model, arithmetic_data[:1], "run.total_steps=2", *more).steps == 1
    assert f"is a fork of {parent}" in capsys.readouterr().out
    [event] = resumed(tmp_path / "fork")
    assert event["parent"] == str(parent) and event["changed"]["algorithm.clip_high"][1] == "0.3"
    assert state_of(tmp_path / "fork", 2).parent == str(parent)
    # the same command again continues the fork, not its parent
    assert small_run(tmp_path, tiny_model, arithmetic_data[:1], "run.total_steps=3", *more).steps == 1
    assert everything(tmp_path / "r") == before
    with pytest.raises(ValueError, match=r"algorithm\.clip_high: 0\.3 -> 0\.4"):
        small_run(tmp_path, tiny_model, arithmetic_data[:1], "run.total_steps=4", *more, "algorithm.clip_high=0.4")
    with pytest.raises(ValueError, match="a run of its own"):
        small_run(tmp_path, tiny_model, arithmetic_data[:1], f"run.resume={tmp_path}/fork/checkpoints/step_3")


def test_a_checkpoint_of_another_model_is_refused_before_a_model_is_built(
    tmp_path, tiny_model, arithmetic_data, monkeypatch
):
    tokenizer = tiny.character_tokenizer(arithmetic.CHARACTERS)
    wide = tiny.qwen3(tokenizer, hidden=32, layers=2, heads=2, kv_heads=1, ffn=96, seed=2)
    another_model = tiny.save(wide, tokenizer, tmp_path / "wide")
    small_run(tmp_path, tiny_model, arithmetic_data[:1], "run.total_steps=1")
    monkeypatch.setattr("verl.driver.assemble.context_of", None)
    step = tmp_path / "r" / "checkpoints" / "step_1"
    fork = ("run.name=fork", f"run.resume={step}")
    with pytest.raises(ValueError) as caught:
        small_run(tmp_path, another_model, arithmetic_data[:1], *fork)
    (said,) = str(caught.value).splitlines()
    assert said.startswith(f"run.resume={step} is of another model than model.path={another_model}: ")
    assert said.count(" there and ") == 3 and "] here" in said and f"set model.path={step}/hf" in said


@pytest.mark.slow
def test_damaged_vanished_and_too_short_are_said_by_resume_and_export(tmp_path, tiny_model, arithmetic_data, capsys):
    shape = ("run.save_every_steps=1", "run.keep_last_checkpoints=5", "track.sinks=[jsonl]")

    def rerun(steps: int) -> str:
        capsys.readouterr()
        small_run(tmp_path, tiny_model, arithmetic_data[:1], f"run.total_steps={steps}", *shape)
        return capsys.readouterr().out

    def export(name: str) -> str:
        capsys.readouterr()
        assert main(["export", str(tmp_path / "r"), str(tmp_path / name)]) == 0
        return capsys.readouterr().out

    rerun(3)
    weights = tensors_of(tmp_path / "r", 3)
    said = rerun(2)
    assert "run.total_steps=2" in said and "has done 3" in said
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["steps"] == 3
    assert all(torch.equal(v, weights[k]) for k, v in tensors_of(tmp_path / "r", 3).items())
    assert "has done 3" in export("short")
    checkpoints = tmp_path / "r" / "checkpoints"
    with (checkpoints / "step_3" / "hf" / "config.json").open("a") as f:
        f.write(" ")
    assert "step_3 is damaged and left out" in export("damaged") and "step_3 is damaged and left out" in rerun(3)
    shutil.rmtree(checkpoints / "step_3")
    assert "step_3 was saved" in export("vanished")
    assert "step_3 was saved" in rerun(3)
    shutil.rmtree(checkpoints)
    said = rerun(1)
    assert "no checkpoint is left" in said and "starts at the beginning" in said
