"""Whole runs whose models are in child processes: what they learn is what one process learns, they continue from a
checkpoint, and a death is named and costs a restart. VERL_WORKER_PYTHON as in test_child_engine."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from children import children
from safetensors.torch import load_file
from small_runs import metrics_of, small_args, small_run

from verl.config.load import load_config
from verl.driver.launch import run_rl

PYTHON = os.environ.get("VERL_WORKER_PYTHON", sys.executable)
RANKS = ("cluster.backend=processes", "cluster.ranks_per_node=2", "track.sinks=[jsonl]")
TWO = (*RANKS, f"model.python={PYTHON}")
SAME = ("optim.eps=1e-5", "run.save_every_steps=1")
WAIT_S = 180.0
ROOT = Path(__file__).parents[2]


def exported(root, step):
    return load_file(next((root / "r" / "checkpoints" / f"step_{step}" / "hf").glob("*model.safetensors")))


def test_ranks_in_child_processes_learn_what_one_process_learns_and_resume(tmp_path, tiny_model, arithmetic_data):
    """Two steps, of which the second samples from published weights, then a third one after a new start."""
    data = arithmetic_data[:1]
    here, there = tmp_path / "here", tmp_path / "there"
    for steps in (2, 3):
        small_run(here, tiny_model, data, *SAME, f"run.total_steps={steps}")
        small_run(there, tiny_model, data, *SAME, f"run.total_steps={steps}", *TWO)
    compare(here, there, tiny_model)
    assert not [child for child in children() if "workers.children" in " ".join(child.cmdline())]


@pytest.mark.parametrize("engine, layout", [("veomni", ()), ("megatron", ("parallel.pipeline=2",))])
def test_the_ranks_of_another_engine_learn_it_and_one_process_goes_on(
    engine, layout, tmp_path, tiny_model, arithmetic_data
):
    """Two steps by ranks in the environment of the engine (make ENGINE-env); the third one by the engine of torch."""
    python = ROOT / f".venv-{engine}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no environment of {engine}: make {engine}-env")
    data, here, there = arithmetic_data[:1], tmp_path / "here", tmp_path / "there"
    small_run(here, tiny_model, data, *SAME, "run.total_steps=3")
    more = (f"model.engine={engine}", f"model.python={python}", *layout)
    small_run(there, tiny_model, data, *SAME, "run.total_steps=2", *RANKS, *more)
    small_run(there, tiny_model, data, *SAME, "run.total_steps=3")
    compare(here, there, tiny_model)


def compare(here, there, tiny_model):
    """Check that two runs of three steps learned the same from the same answers."""
    start = load_file(tiny_model / "model.safetensors")
    ours, theirs = exported(here, 3), exported(there, 3)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        moved = (value - start.get(name, torch.zeros(()))).abs().max()
        assert (theirs[name] - value).abs().max() <= 1e-3 * moved + 1e-7, name
    mine, found = metrics_of(here / "r"), metrics_of(there / "r")
    assert [found[step]["critic/score/mean"] for step in (1, 2, 3)] == [mine[s]["critic/score/mean"] for s in (1, 2, 3)]


def test_a_killed_rank_is_named_and_the_run_starts_again(tmp_path, tiny_model, arithmetic_data, capsys):
    more = (*SAME, *TWO, "run.total_steps=6", "track.sinks=[console,jsonl]")
    killed = list[int]()
    thread = threading.Thread(target=kill_one, args=(tmp_path / "r" / "checkpoints" / "step_1", killed), daemon=True)
    thread.start()
    run_rl(load_config(small_args(tmp_path, tiny_model, arithmetic_data[:1], *more)))
    thread.join(WAIT_S)
    (process,) = killed
    out = capsys.readouterr().out
    assert f"of actor (process {process}) died: killed by SIGKILL" in out
    assert "starting again from the last checkpoint (1 of 3 times)" in out
    assert {1, 2, 3, 4, 5, 6} <= metrics_of(tmp_path / "r").keys()


def kill_one(checkpoint, killed):
    """Kill the second rank once the checkpoint is there."""
    end_s = time.monotonic() + WAIT_S
    while not checkpoint.is_dir() and time.monotonic() < end_s:
        time.sleep(0.02)
    ranks = [p for p in psutil.Process().children(recursive=True) if is_rank(p)]
    killed.append(max(p.pid for p in ranks))
    os.kill(killed[0], signal.SIGKILL)


def is_rank(process):
    line = process.cmdline()
    return len(line) > 2 and "import verl.workers.children.host" in line[3]
