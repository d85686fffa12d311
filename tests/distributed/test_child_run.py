"""Whole runs whose models are in child processes: what they learn is what one process learns, they continue from a
checkpoint, and a death is named and costs a restart. VERL_WORKER_PYTHON as in test_child_engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
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
from transformers import AutoConfig, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from verl.config.load import load_config
from verl.driver.launch import run_rl
from verl.models import tiny

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


@pytest.mark.parametrize(
    "engine, backend, layout",
    [("veomni", "processes", ()), ("megatron", "processes", ("parallel.pipeline=2",)), ("megatron", "ray", ())],
)
def test_the_ranks_of_another_engine_learn_it_and_one_process_goes_on(
    engine, backend, layout, tmp_path, tiny_model, arithmetic_data
):
    """Two steps by ranks in the environment of the engine (make ENGINE-env), as children or actors of Ray; the third
    one by the engine of torch."""
    python = python_of(engine)
    data, here, there = arithmetic_data[:1], tmp_path / "here", tmp_path / "there"
    small_run(here, tiny_model, data, *SAME, "run.total_steps=3")
    more = (f"model.engine={engine}", f"model.python={python}", *layout)
    ranks = (f"cluster.backend={backend}", *RANKS[1:])
    small_run(there, tiny_model, data, *SAME, "run.total_steps=2", *ranks, *more)
    small_run(there, tiny_model, data, *SAME, "run.total_steps=3")
    compare(here, there, tiny_model)


def test_a_run_of_megatron_goes_on_after_a_kill_in_another_layout_and_with_another_engine(
    tmp_path, tiny_model, arithmetic_data, capsys
):
    """Stages, one of which is killed; then data ranks; then the ranks of FSDP. One process learns the same."""
    python = python_of("megatron")
    data, here, there = arithmetic_data[:1], tmp_path / "here", tmp_path / "there"
    small_run(here, tiny_model, data, *SAME, "run.total_steps=4")
    ranks = (*SAME, *RANKS, "model.engine=megatron", f"model.python={python}")
    killed = list[int]()
    thread = threading.Thread(target=kill_one, args=(there / "r" / "checkpoints" / "step_1", killed), daemon=True)
    thread.start()
    more = ("run.total_steps=2", "parallel.pipeline=2", "track.sinks=[console,jsonl]")
    run_rl(load_config(small_args(there, tiny_model, data, *ranks, *more)))
    thread.join(WAIT_S)
    out = capsys.readouterr().out
    assert f"of actor (process {killed[0]}) died: killed by SIGKILL" in out
    assert "starting again from the last checkpoint (1 of 3 times)" in out
    assert "without Transformer Engine rows are padded to the longest of a pass" in out
    version = subprocess.check_output([str(python), "-c", "import sys; print(*sys.version_info[:2])"], text=True)
    assert ("declares Python 3.12; it runs on 3.11" in out) == (version.split() == ["3", "11"])
    small_run(there, tiny_model, data, *ranks, "run.total_steps=3")
    small_run(there, tiny_model, data, *SAME, *RANKS, "run.total_steps=4")
    compare(here, there, tiny_model, 4)


def test_stages_of_megatron_train_with_the_experts_of_the_rollout(tmp_path, tiny_model, arithmetic_data):
    """One step, which has the same answers: what one process learns from them with the same experts."""
    python, folder = python_of("megatron"), tmp_path / "sparse"
    config, tokenizer = AutoConfig.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "layer_types": None}
    torch.manual_seed(0)
    made = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**config.to_dict(), **experts, "model_type": "qwen3_moe"}))
    tiny.save(made, tokenizer, folder)
    data, here, there = arithmetic_data[:1], tmp_path / "here", tmp_path / "there"
    given = (*SAME, "run.total_steps=1", "rollout.engine_options.replay_routes=true")
    small_run(here, folder, data, *given, "model.engine_options.share_prefix=false")
    engine = ("model.engine=megatron", f"model.python={python}", "parallel.pipeline=2")
    small_run(there, folder, data, *given, *RANKS, *engine)
    compare(here, there, folder, 1)
    shares = [metrics_of(root / "r")[1]["actor/replayed_routes"] for root in (here, there)]
    assert 0.5 < shares[0] < 1 and shares[1] == pytest.approx(shares[0])


@pytest.mark.skipif(not os.environ.get("FULL_GRID"), reason="some minutes: make test-all")
@pytest.mark.timeout(3600)
def test_the_quickstart_on_tensor_ranks_of_megatron_learns(tmp_path):
    ranks = ("cluster.backend=processes", "cluster.ranks_per_node=2", "parallel.tensor=2")
    engine = ("model.engine=megatron", f"model.python={python_of('megatron')}")
    line = [sys.executable, "-m", "verl.quickstart", f"run.root_dir={tmp_path}", *ranks, *engine]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert json.loads((tmp_path / "quickstart" / "summary.json").read_text())["greedy_after"] >= 0.85


def python_of(engine):
    """The interpreter of an engine's environment; the test is skipped where there is none."""
    python = ROOT / f".venv-{engine}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no environment of {engine}: make {engine}-env")
    return python


def compare(here, there, tiny_model, steps=3):
    """Check that two runs learned the same from the same answers."""
    start = load_file(tiny_model / "model.safetensors")
    ours, theirs = exported(here, steps), exported(there, steps)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        moved = (value - start.get(name, torch.zeros(()))).abs().max()
        assert (theirs[name] - value).abs().max() <= 1e-3 * moved + 1e-7, name
    mine, found = metrics_of(here / "r"), metrics_of(there / "r")
    scores = [[of[step]["critic/score/mean"] for step in range(1, steps + 1)] for of in (mine, found)]
    assert scores[0] == scores[1]


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
