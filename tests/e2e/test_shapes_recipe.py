"""The recipes with drawn pictures, of rows (shapes) and of a tool (look): a short run of all of each, a run of it that
is killed, and (FULL_GRID=1) the whole of it, which has to learn, and to be right by chance alone where it sees
nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from each import FULL_GRID
from small_runs import launch, metrics_of, same_tensors, saved, summary, tensors_of, trained, wait_for
from transformers import AutoModelForImageTextToText

from verl import quickstart
from verl.config.load import load_config
from verl.driver.launch import run_rl, run_supervised
from verl.recipes import look, shapes
from verl.track.samples import read_samples

BIT = """import zlib


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return zlib.crc32(solution_str.encode()) % 2
"""
"""A reward that differs within every group: a model without a warm-up is never right."""
TASKS = {"shapes": shapes.TASK, "look": look.TASK}
each_task = pytest.mark.parametrize(("task", "recipe"), TASKS.items(), ids=[*TASKS])


@each_task
def test_its_run_ends_with_the_accuracy_of_shown_and_of_blanked_pictures(
    task: str, recipe: shapes.PictureTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, rows in (("SFT_ROWS", 64), ("RL_ROWS", 64), ("HELD_OUT_ROWS", 4)):
        monkeypatch.setattr(quickstart, name, rows)
    short = ["warmup_steps=2", "run.total_steps=1", "run.eval_every_steps=0", "run.threads=1"]
    assert quickstart.main([f"task={task}", f"run.root_dir={tmp_path}", *short]) == 0
    home = tmp_path / task
    assert set(summary(home)) >= {"greedy_before", "greedy_after", "blanked_after"} and (home / "report.html").exists()
    last = metrics_of(home)[1]
    assert {f"eval/{name}/acc/greedy" for name in recipe.sources} <= last.keys()
    _, found = AutoModelForImageTextToText.from_pretrained(quickstart.last_export(home), output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]


def warmed(task: str, recipe: shapes.PictureTask, folder: Path) -> Path:
    """Return a model of the task: with random weights, or one that calls its tool now and then."""
    base = recipe.write_model(folder / "base", seed=0)
    if task == "shapes":
        return base
    rows = recipe.write_taught(folder / "sft.parquet", 1024, seed=1)
    args = [f"recipe={task}_warmup", f"model.path={base}", f"data.train_files=[{rows}]", "run.total_steps=60"]
    args += ["step.prompts_per_step=32", "run.threads=1", "optim.lr=4e-3", f"run.root_dir={folder}"]
    return quickstart.last_export(run_supervised(load_config(args), "sft").dir)


@pytest.mark.slow
@pytest.mark.timeout(300)
@each_task
def test_a_killed_run_is_bitwise_that_without_an_interruption(
    task: str, recipe: shapes.PictureTask, tmp_path: Path
) -> None:
    model = warmed(task, recipe, tmp_path)
    rows, reward = recipe.write_problems(tmp_path / "train.parquet", 32, seed=1), tmp_path / "bit.py"
    reward.write_text(BIT)
    args = [f"recipe={task}", f"model.path={model}", f"data.train_files=[{rows}]", f"reward.path={reward}"]
    args += ["step.prompts_per_step=4", "step.samples_per_prompt=4", "run.total_steps=5", "run.save_every_steps=1"]
    args += ["run.eval_before=false", "run.eval_after=false", "run.eval_every_steps=0", "run.threads=1"]
    args.append("model.dtype=float32")
    run_rl(load_config([*args, f"run.root_dir={tmp_path / 'straight'}"]), quiet=True)
    straight, cut, log = tmp_path / "straight" / task, tmp_path / "cut" / task, tmp_path / "log"
    metrics = metrics_of(straight)
    assert all(m["actor/grad_norm"] > 0 for m in metrics.values()), "every step moves the weights"
    if task == "look":
        assert sum(m["agent/tool_calls"] for m in metrics.values()) > 10
        assert max(m["mismatch/max_abs_dlogp"] for m in metrics.values()) < 1e-5
    process = launch([*args, f"run.root_dir={tmp_path / 'cut'}"], log)
    wait_for(lambda: process.poll() is not None or saved(cut) >= 2, 200, "step 2")
    process.kill()
    process.wait(30)
    assert launch([*args, f"run.root_dir={tmp_path / 'cut'}"], log).wait(200) == 0, log.read_text()[-3000:]
    assert trained(straight) == trained(cut) and sorted(trained(cut)) == [1, 2, 3, 4, 5]
    for step in range(1, 6):
        one, other = (
            {r.sample_id: r.response_ids.tolist() for r in read_samples(run, step)} for run in (straight, cut)
        )
        assert one == other
    same_tensors(tensors_of(straight, 5), tensors_of(cut, 5))


@pytest.mark.skipif(not FULL_GRID, reason="minutes: make test-all")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("task", TASKS)
def test_it_learns_from_what_it_sees(task: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "verl.quickstart", f"task={task}", f"run.root_dir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr[-3000:]
    found = summary(tmp_path / task)
    assert found["greedy_before"] <= 0.5 and found["greedy_after"] >= 0.9 and found["blanked_after"] <= 0.05
