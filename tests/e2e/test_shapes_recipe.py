"""The recipe with drawn pictures: a short run of all of it, a run of it that is killed, and (FULL_GRID=1) the whole of
it, which has to learn, and to be right by chance alone where it sees nothing."""

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
from verl.driver.launch import run_rl
from verl.recipes import shapes

BIT = """import zlib


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return zlib.crc32(solution_str.encode()) % 2
"""
"""A reward that differs within every group: a model without a warm-up is never right."""


def test_its_run_ends_with_the_accuracy_of_shown_and_of_blanked_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, rows in (("SFT_ROWS", 64), ("RL_ROWS", 64), ("HELD_OUT_ROWS", 4)):
        monkeypatch.setattr(quickstart, name, rows)
    short = ["warmup_steps=2", "run.total_steps=1", "run.eval_every_steps=0", "run.threads=1"]
    assert quickstart.main(["task=shapes", f"run.root_dir={tmp_path}", *short]) == 0
    home = tmp_path / "shapes"
    assert set(summary(home)) >= {"greedy_before", "greedy_after", "blanked_after"} and (home / "report.html").exists()
    last = metrics_of(home)[1]
    assert {f"eval/{name}/acc/greedy" for name in (shapes.DATA_SOURCE, shapes.BLANKED)} <= last.keys()
    _, found = AutoModelForImageTextToText.from_pretrained(quickstart.last_export(home), output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_run_is_bitwise_that_without_an_interruption(tmp_path: Path) -> None:
    base = shapes.write_model(tmp_path / "base", seed=0)
    rows, reward = shapes.write_problems(tmp_path / "train.parquet", 32, seed=1), tmp_path / "bit.py"
    reward.write_text(BIT)
    args = ["recipe=shapes", f"model.path={base}", f"data.train_files=[{rows}]", f"reward.path={reward}"]
    args += ["step.prompts_per_step=4", "step.samples_per_prompt=4", "run.total_steps=5", "run.save_every_steps=1"]
    args += ["run.eval_before=false", "run.eval_after=false", "run.eval_every_steps=0", "run.threads=1"]
    run_rl(load_config([*args, f"run.root_dir={tmp_path / 'straight'}"]), quiet=True)
    straight, cut, log = tmp_path / "straight" / "shapes", tmp_path / "cut" / "shapes", tmp_path / "log"
    assert all(m["actor/grad_norm"] > 0 for m in metrics_of(straight).values()), "every step moves the weights"
    process = launch([*args, f"run.root_dir={tmp_path / 'cut'}"], log)
    wait_for(lambda: process.poll() is not None or saved(cut) >= 2, 200, "step 2")
    process.kill()
    process.wait(30)
    assert launch([*args, f"run.root_dir={tmp_path / 'cut'}"], log).wait(200) == 0, log.read_text()[-3000:]
    assert trained(straight) == trained(cut) and sorted(trained(cut)) == [1, 2, 3, 4, 5]
    same_tensors(tensors_of(straight, 5), tensors_of(cut, 5))


@pytest.mark.skipif(not FULL_GRID, reason="minutes: make test-all")
@pytest.mark.timeout(1800)
def test_it_learns_from_what_it_sees(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "verl.quickstart", "task=shapes", f"run.root_dir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr[-3000:]
    found = summary(tmp_path / "shapes")
    assert found["greedy_before"] <= 0.5 and found["greedy_after"] >= 0.9 and found["blanked_after"] <= 0.05
