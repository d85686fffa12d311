"""Runs with vLLM as the rollout engine: they learn, the weights arrive, nothing is lost and no process is left."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from real_server import PYTHON
from small_runs import metrics_of, small_args, small_run, summary, trained
from taught import TOOLS, args, teach

from verl.config.load import load_config
from verl.config.lora_layers import trained_factors
from verl.driver.launch import run_rl
from verl.track.samples import read_samples

pytestmark = pytest.mark.runs

SERVED = ("rollout.engine=vllm", f"rollout.python={PYTHON}", "rollout.dtype=float32", "model.dtype=float32")


MADE = ("base", "data", "seed", "warmup")  # of a quickstart, before its RL


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the quickstarts, which begin from one warm-up."""
    return tmp_path_factory.mktemp("quickstarts")


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, root: Path) -> Any:
    """Assert that no server of a run is left; their models are in its folder."""
    yield
    left = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if (
            any(str(of) in line for of in (tmp_path, root))
            and "vllm.entrypoints" in line
            and process.status() != psutil.STATUS_ZOMBIE
        ):
            left.append(process)
    assert not left


IN_FLIGHT = pytest.mark.full("two processes and updates in flight, below")
BUCKETS = ("sync.engine=shm", "sync.engine_options.bucket_mb=1")


@pytest.mark.parametrize(
    ("processes", "num_steps", "sync"), [(1, 25, ()), pytest.param(2, 10, BUCKETS, marks=IN_FLIGHT)]
)
def test_the_quickstart_learns(root: Path, processes: int, num_steps: int, sync: tuple[str, ...]) -> None:
    run = root / "quickstart"
    for path in run.glob("*"):  # what the one before left of its RL
        if path.name not in MADE:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    more = (*sync, f"run.total_steps={num_steps}", f"rollout.engine_options.tensor_parallel_size={processes}")
    command = [sys.executable, "-m", "verl.quickstart", f"run.root_dir={root}", "run.threads=1", *SERVED, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]
    found = summary(run)
    steps = metrics_of(run)
    canary = max(step["sync/canary_mean_abs"] for step in steps.values() if "sync/canary_mean_abs" in step)
    print(found, f"canary {canary:.2g}", {k: v for k, v in steps[max(steps)].items() if k.startswith(("time", "sync"))})
    assert found["greedy_before"] < 0.5 and found["greedy_after"] >= 0.85
    assert 0 < canary <= 1e-4 and steps[num_steps]["sync/version"] == num_steps
    once = [name for names in trained(run).values() for name in names]
    assert len(once) == len(set(once)) == num_steps * 32 * 8, "no sample is lost or doubled"
    assert (run / "logs" / "rollout_0.log").stat().st_size > 0
    assert versions_as_published(run, num_steps) == {1}, "every token is of the weights that the step began with"


def versions_as_published(run: Path, num_steps: int) -> set[int]:
    """Return how many publishes ago the tokens of a step were sampled. Tokens that are labelled with the latest weights
    have the trainer's log-probs under these; no version is above it, or decreases within an answer."""
    ages = set[int]()
    assert all(of["sync/version"] <= i for i, of in metrics_of(run).items() if i)
    for step in range(1, num_steps + 1):
        for row in read_samples(run, step):
            assert {"token_versions", "rollout_logprobs", "old_logprobs"} <= row.tokens.keys()
            drawn = row.response_mask == 1
            versions, latest = row.tokens["token_versions"][drawn], step - 1
            assert (np.diff(versions) >= 0).all() and versions.max() <= latest
            ages |= {step - int(version) for version in versions}
            now = row.tokens["token_versions"] == latest
            off = np.abs(row.tokens["rollout_logprobs"] - row.tokens["old_logprobs"])[drawn & now]
            assert not len(off) or off.mean() < 1e-4, (step, row.sample_id, off.max())
    return ages


def tiny_model(tmp_path: Path) -> Path:
    from verl.models import tiny
    from verl.recipes import arithmetic

    tokenizer = tiny.character_tokenizer(arithmetic.CHARACTERS)
    model = tiny.qwen3(tokenizer, hidden=64, layers=2, heads=2, kv_heads=2, ffn=64, seed=1)
    return tiny.save(model, tokenizer, tmp_path / "model")


def test_two_processes_and_updates_in_flight(tmp_path: Path, arithmetic_data: Any) -> None:
    ahead = ("pipeline.staleness=1", "pipeline.partial_rollout=true", "rollout.engine_options.tensor_parallel_size=2")
    args = (*SERVED, *ahead, "run.total_steps=4", "rollout.max_response_tokens=64", "run.wait_timeout_s=600")
    small_run(tmp_path, tiny_model(tmp_path), arithmetic_data, *args)
    steps = metrics_of(tmp_path / "r")
    assert {1, 2, 3, 4} <= steps.keys()
    assert max(steps[i]["sync/canary_mean_abs"] for i in (1, 2, 3, 4)) <= 1e-4
    assert versions_as_published(tmp_path / "r", 4) <= {1, 2}, "at most one publish behind"


AGAIN = pytest.mark.full("its first three steps; contracts/test_policy_factors.py, with a double")


@pytest.mark.parametrize("totals", [(3,), pytest.param((3, 5), marks=AGAIN)])
def test_lora_factors_are_served_as_adapters(tmp_path: Path, arithmetic_data: Any, totals: tuple[int, ...]) -> None:
    """The base is sent with the first version of each server: also of a run that continues. No adapter of an older
    version acts in a later one: every token has the trainer's log-prob under its version."""
    model = tiny_model(tmp_path)
    ahead = ("pipeline.staleness=1", "rollout.max_response_tokens=64", "model.lora.rank=4", "optim.lr=1e-2")
    args = (*SERVED, *ahead, "run.wait_timeout_s=600", "run.save_every_steps=3")
    for total in totals:
        small_run(tmp_path, model, arithmetic_data, *args, f"run.total_steps={total}")
    steps = metrics_of(tmp_path / "r")
    factors = trained_factors(load_config(small_args(tmp_path, model, arithmetic_data, *args)).config)
    assert factors is not None and {steps[i]["sync/bytes"] for i in (2, 3)} == {4 * factors.parameters}
    assert max(of["sync/canary_mean_abs"] for of in steps.values() if "sync/canary_mean_abs" in of) <= 1e-4
    assert versions_as_published(tmp_path / "r", totals[-1]) <= {1, 2}


@pytest.mark.full("the quickstart above; e2e/test_agents.py has tools")
def test_turns_with_a_tool(tmp_path: Path) -> None:
    """Its calls are played here between its answers, and every trained token is one that it drew in that place."""
    teach(tmp_path)
    more = (*TOOLS, *SERVED, "run.total_steps=2", "run.wait_timeout_s=600")
    run_rl(load_config(args(tmp_path, (tmp_path / "model", tmp_path), *more)), quiet=True)
    metrics, called = metrics_of(tmp_path / "r"), 0
    assert sum(m["agent/tool_calls"] for m in metrics.values()) > 4 and metrics[1]["num_turns/max"] >= 4
    assert max(metrics[i]["sync/canary_mean_abs"] for i in (1, 2)) <= 1e-4
    for step in (1, 2):
        for row in read_samples(tmp_path / "r", step):
            drawn = row.response_mask == 1
            assert (
                np.isfinite(row.tokens["rollout_logprobs"][drawn]).all()
                and np.isnan(row.tokens["rollout_logprobs"][~drawn]).all()
            )
            called += int((~drawn).any() and drawn[int(np.flatnonzero(~drawn)[-1]) :].any())
    assert called > 4, "answers after a tool's result are trained"
    assert versions_as_published(tmp_path / "r", 2) == {1}, "each has the trainer's log-prob after what precedes it"


def test_a_mixture_of_experts_is_refused_by_the_canary(tmp_path: Path, arithmetic_data: Any) -> None:
    """Its update is wrong although it reports that all was loaded: no step may be trained on its samples."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from verl.models import tiny
    from verl.recipes import arithmetic

    tokenizer = tiny.character_tokenizer(arithmetic.CHARACTERS)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        initializer_range=0.15,
    )
    folder = tiny.save(Qwen3MoeForCausalLM(config), tokenizer, tmp_path / "model")
    command = [sys.executable, "-m", "verl.cli", "train", *small_args(tmp_path, folder, arithmetic_data, *SERVED)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode != 0
    said = done.stdout + done.stderr
    last = said.strip().splitlines()[-1]
    assert "does not run the trainer's weights" in last and "rollout.engine=native" in last, said[-3000:]
    assert not trained(tmp_path / "r")
