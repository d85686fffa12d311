"""Nodes, devices and parallel sizes of verl's scripts: mapped if they exist or are requested, else one process."""

from __future__ import annotations

import shlex

import pytest
from handmade_model import write_model, write_rows
from translating import translate

from verl.config.compat import layout
from verl.config.compat.layout import ONE_PROCESS
from verl.config.compat.table import key_rows
from verl.config.compat.translate import render_notes
from verl.config.load import load_config, validate

ACTOR = "actor_rollout_ref.actor."
EIGHT = ("trainer.nnodes=1", "trainer.n_gpus_per_node=8")
TWO_NODES = ("trainer.nnodes=2", "trainer.n_gpus_per_node=8")
HERE = {"cluster.backend": "ray", "cluster.nodes": 1, "cluster.ranks_per_node": 8, "rollout.replicas": 8}


@pytest.fixture(autouse=True)
def a_laptop(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(layout, "local_gpus", lambda: 0)
    monkeypatch.setattr(layout, "find_spec", lambda name: name)


def said(*args: str) -> dict[str, object]:
    found = {s.key: s.value for s in translate(list(args)).settings}
    return {key: value for key, value in found.items() if key.startswith(("cluster", "parallel", "rollout.replicas"))}


def test_without_the_devices_a_script_runs_in_one_process_and_says_so():
    ulysses = f"{ACTOR}ulysses_sequence_parallel_size=2"
    for script in (EIGHT, TWO_NODES, (*EIGHT, ulysses), ("trainer.n_gpus_per_node=$GPUS",)):
        assert said(*script) == {}, script
        (line,) = render_notes(translate(list(script)).notes).splitlines()
        assert line.startswith(f"ignored ({ONE_PROCESS}): ") and all(word in line for word in script)
    ignored = {row.text for row in key_rows().values() if row.text.startswith("layout:")}
    assert ignored == {ONE_PROCESS}, "what is never mapped says the same, so that it is one line"


def test_with_the_devices_it_is_mapped(monkeypatch):
    monkeypatch.setattr(layout, "local_gpus", lambda: 8)
    assert said(*EIGHT) == HERE
    assert said(*TWO_NODES) == {}, "the other node is not in sight"
    assert said("trainer.n_gpus_per_node=16") == said("trainer.n_gpus_per_node=1") == {}
    assert said(*EIGHT, "model.device=cpu") == {}
    assert said(*EIGHT, "cluster.backend=inproc") == {"cluster.backend": "inproc"}
    monkeypatch.setattr(layout, "find_spec", lambda name: None)
    assert said(*EIGHT) == {}, "without Ray a script still runs"


def test_a_named_cluster_is_used(monkeypatch):
    assert said(*TWO_NODES, "cluster.address=auto") == HERE | {"cluster.nodes": 2, "cluster.address": "auto"}
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert said(*TWO_NODES) == HERE | {"cluster.nodes": 2}


PARALLEL = [
    ((f"{ACTOR}megatron.tensor_model_parallel_size=2",), {"parallel.tensor": 2}),
    (("engine.tensor_model_parallel_size=4",), {"parallel.tensor": 4}),
    ((f"{ACTOR}ulysses_sequence_parallel_size=2",), {"parallel.sequence": 2}),
    ((f"{ACTOR}fsdp_config.ulysses_sequence_parallel_size=2",), {"parallel.sequence": 2}),
    ((f"{ACTOR}veomni.ulysses_parallel_size=8",), {"parallel.sequence": 8}),
    ((f"{ACTOR}megatron.context_parallel_size=2",), {"parallel.sequence": 2}),
    (("engine.ulysses_sequence_parallel_size=2",), {"parallel.sequence": 2}),
    (("engine.ulysses_parallel_size=2",), {"parallel.sequence": 2}),
    ((f"{ACTOR}fsdp_config.fsdp_size=4",), {"parallel.replicate": 2}),
    (
        (f"{ACTOR}fsdp_config.fsdp_size=4", f"{ACTOR}megatron.tensor_model_parallel_size=2"),
        {"parallel.replicate": 1, "parallel.tensor": 2},
    ),
    ((f"{ACTOR}fsdp_config.fsdp_size=-1",), {}),
    ((f"{ACTOR}ulysses_sequence_parallel_size=1",), {}),
    ((f"{ACTOR}megatron.pipeline_model_parallel_size=2",), {"parallel.pipeline": 2}),
    (("engine.pipeline_model_parallel_size=4",), {"parallel.pipeline": 4}),
    ((f"{ACTOR}megatron.pipeline_model_parallel_size=1",), {}),
    ((f"{ACTOR}megatron.expert_model_parallel_size=4",), {"parallel.expert": 4}),
    (("engine.expert_model_parallel_size=2",), {"parallel.expert": 2}),
    (
        (f"{ACTOR}fsdp_config.fsdp_size=2", f"{ACTOR}megatron.pipeline_model_parallel_size=2"),
        {"parallel.replicate": 2, "parallel.pipeline": 2},
    ),
    (("actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=4",), {}),
    (("actor_rollout_ref.rollout.tensor_model_parallel_size=4",), {}),
    (("actor_rollout_ref.ref.megatron.tensor_model_parallel_size=4",), {}),
    (("cluster.ranks_per_node=4",), {"cluster.ranks_per_node": 4, "rollout.replicas": 4}),
    (("rollout.replicas=2",), {"rollout.replicas": 2}),
    (("parallel.tensor=4", f"{ACTOR}megatron.tensor_model_parallel_size=2"), {"parallel.tensor": 4}),
]


def test_what_is_asked_for_is_mapped():
    wrong = []
    for keys, more in PARALLEL:
        found = said(*EIGHT, "cluster.backend=ray", *keys)
        wrong += [] if found == HERE | more else [(keys, found)]
    assert not wrong
    assert said("cluster.backend=ray") == {"cluster.backend": "ray"}
    for key, value in ((f"{ACTOR}fsdp_config.fsdp_size", 3), ("trainer.n_gpus_per_node", "many")):
        with pytest.raises(ValueError, match=rf"{key}={value}: |{key}={value} does not divide the 8 ranks"):
            translate([*EIGHT[:1], "cluster.backend=ray", *(EIGHT[1:] if value == 3 else ()), f"{key}={value}"])


def test_a_whole_script_is_a_configuration_that_can_run(tmp_path, monkeypatch):
    rows, model = write_rows(tmp_path / "rows.jsonl", 50), write_model(tmp_path / "model", heads=8, kv_heads=8)
    script = (
        f"algorithm.adv_estimator=grpo data.train_files={rows} data.val_files={rows} data.train_batch_size=16 "
        f"actor_rollout_ref.model.path={model} {ACTOR}ppo_mini_batch_size=8 actor_rollout_ref.rollout.n=4 "
        f"{ACTOR}strategy=fsdp2 {ACTOR}ulysses_sequence_parallel_size=2 actor_rollout_ref.rollout.name=vllm "
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2 trainer.n_gpus_per_node=4 trainer.nnodes=1"
    )
    one = load_config(shlex.split(script), verl_defaults="rl")
    validate(one.config)
    assert (one.config.cluster.backend, one.config.parallel.sequence, one.config.rollout.replicas) == ("inproc", 1, 1)
    monkeypatch.setattr(layout, "local_gpus", lambda: 4)
    monkeypatch.setattr("verl.config.cluster.find_spec", lambda name: name)
    four = load_config(shlex.split(f"{script} rollout.fallback=native"), verl_defaults="rl")
    validate(four.config)
    config = four.config
    assert (config.cluster.backend, config.cluster.ranks_per_node, config.rollout.replicas) == ("ray", 4, 4)
    assert config.parallel.sequence == 2 and four.origins["cluster.backend"].startswith("verl key trainer.n")
