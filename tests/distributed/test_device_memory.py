"""Ranks and rollout engines that share devices: a device holds what training or the rollout wants, never both."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from small_runs import small_run

from tests.distributed import watched
from verl.config import backends
from verl.models import tiny
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
