"""Ranks and rollout engines that share devices: a device holds what training or the rollout wants, never both."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from small_runs import metrics_of, small_args, small_run

from tests.distributed import watched
from verl.cli import main
from verl.config import backends
from verl.config.load import load_config
from verl.models import tiny
from verl.planner.plan import make_plan
from verl.recipes import arithmetic

OFFLOAD = tuple(f"model.engine_options.offload_{part}=true" for part in ("weights", "optimizer", "frozen"))


@pytest.mark.skipif(not os.environ.get("FULL_GRID"), reason="minutes: make test-all; test_offload has the ranks")
def test_a_device_holds_no_more_than_training_or_rollout_want(ray_session, tmp_path, arithmetic_data, monkeypatch):
    """For a model of W bytes, on each of two devices. Without offloading: the weights, gradients and states of an actor
    and of a critic (2W each, of which W are gradients, which are freed), half a reference and a rollout engine (W).
    With it: a role with its gradients and states, or the rollout engine beside the actor's half, while all others are
    off the device."""
    monkeypatch.setitem(
        backends.MODEL, "sharded", replace(backends.MODEL["sharded"], build="tests.distributed.watched:model")
    )
    monkeypatch.setattr("verl.driver.assemble.rollout_engine", watched.rollout_engine)
    tokenizer = tiny.character_tokenizer(arithmetic.CHARACTERS)
    model = tiny.qwen3(tokenizer, hidden=384, layers=4, heads=4, kv_heads=2, ffn=1024, seed=1)
    folder = tiny.save(model, tokenizer, tmp_path / "model")
    size, largest = (f(4 * p.numel() for p in model.parameters()) for f in (sum, max))

    def held(name: str, *given: str) -> dict[int, int]:
        notes: Path = tmp_path / f"notes_{name}"
        notes.mkdir()
        small_run(
            tmp_path / name,
            folder,
            arithmetic_data[:1],
            *("algorithm.name=ppo", "algorithm.kl_loss_coef=0.01", "run.total_steps=2"),
            *("rollout.engine_options.prefix_cache_tokens=0", "rollout.replicas=2"),
            *("cluster.backend=ray", "cluster.ranks_per_node=2", "cluster.pools.main.cpus_per_rank=0.5"),
            f"cluster.pools.main.env={{{watched.FOLDER}: {notes}}}",
            *given,
        )
        return watched.peaks(notes)

    goes = held("goes", *OFFLOAD)
    assert sorted(goes) == [0, 1]
    assert all(found < 2 * size + largest + size / 2 for found in goes.values()), goes
    stays = held("stays")
    assert sorted(stays) == [0, 1]
    assert all(found > 4.5 * size for found in stays.values()), stays


@pytest.mark.skipif(not os.environ.get("FULL_GRID"), reason="a minute: make test-all")
def test_a_printed_placement_runs_as_it_is_with_the_planned_bytes(
    ray_session, tmp_path, arithmetic_data, monkeypatch, capsys
):
    """What `verl plan cluster_file=FILE` prints is added to the command line, and two ranks hold what the plan of this
    command line says, looked at around the optimizer's steps."""
    monkeypatch.setitem(
        backends.MODEL, "sharded", replace(backends.MODEL["sharded"], build="tests.distributed.watched:model")
    )
    monkeypatch.setattr("verl.driver.assemble.rollout_engine", watched.rollout_engine)
    tokenizer = tiny.character_tokenizer(arithmetic.CHARACTERS)
    model = tiny.qwen3(tokenizer, hidden=384, layers=4, heads=4, kv_heads=2, ffn=1024, seed=1)
    folder, notes = tiny.save(model, tokenizer, tmp_path / "model"), tmp_path / "notes"
    notes.mkdir()
    file = tmp_path / "cluster.yaml"
    rates = "memory_gb: 4, bandwidth_gbs: 10, matrix_tflops: 0.1, link_gbs: 2, item_bytes: 4"
    file.write_text(f"- {{device: a processor, devices_per_node: 2, {rates}}}\n")
    more = ("run.total_steps=2", "rollout.engine_options.prefix_cache_tokens=0")
    given = small_args(tmp_path / "run", folder, arithmetic_data[:1], *more)
    assert main(["plan", *given, f"cluster_file={file}"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("configure "))
    printed = shlex.split(line.removeprefix("configure "))
    assert "cluster.ranks_per_node=2" in printed and "rollout.replicas=2" in printed, printed
    planned = make_plan(load_config([*given, *printed]).config).memory
    watching = ("cluster.pools.main.cpus_per_rank=0.5", f"cluster.pools.main.env={{{watched.FOLDER}: {notes}}}")
    small_run(tmp_path / "run", folder, arithmetic_data[:1], *more, *printed, *watching)
    assert {1, 2} <= {*metrics_of(tmp_path / "run" / "r")}
    found = watched.peaks(notes)
    passing = ("activations", "log-prob chunk", "head's gradient", "gathered")  # freed before the optimizer's step
    beside = sum(size for name, size in planned.items.items() if any(part in name for part in passing))
    assert sorted(found) == [0, 1]
    for held in found.values():
        assert planned.peak_bytes - beside < 1.1 * held and held < 1.1 * planned.peak_bytes, (held, planned)
