"""Nodes, devices and parallel sizes of verl's scripts: mapped if they exist or are requested, else one process."""

from __future__ import annotations

import itertools
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


def test_an_interpreter_of_the_models_means_processes_of_this_machine(monkeypatch):
    sizes = [f"{ACTOR}megatron.{of}_model_parallel_size=2" for of in ("tensor", "pipeline")]
    there = HERE | {"cluster.backend": "processes", "parallel.tensor": 2, "parallel.pipeline": 2}
    for devices in (0, 8):
        monkeypatch.setattr(layout, "local_gpus", lambda devices=devices: devices)
        assert said(*EIGHT, *sizes, "model_engine=megatron", "model.python=/p/python") == there
    assert said(*EIGHT, "model.python=/p", "cluster.backend=inproc") == {"cluster.backend": "inproc"}


def test_several_nodes_imply_no_processes_and_the_refusal_has_a_way_out():
    python, fix = "model.python=/p", "set cluster.backend=ray, whose nodes have that interpreter too, or"
    for where, more in (("2 nodes", TWO_NODES), ("cluster.address=h:1", (*EIGHT, "cluster.address=h:1"))):
        with pytest.raises(
            ValueError, match=rf"^model\.python=/p with {where}: [^\n]*{fix} model\.engine=torch[^\n]*$"
        ):
            translate([*more, "model_engine=megatron", python])
    assert said(*EIGHT, python)["cluster.backend"] == "processes"
    assert said(*TWO_NODES, python, "cluster.backend=ray")["cluster.backend"] == "ray"


def test_offload_is_an_option_of_the_engine_that_reads_it(monkeypatch):
    monkeypatch.setattr(layout, "local_gpus", lambda: 8)
    keys = {f"{ACTOR}{{}}.param_offload": "weights", f"{ACTOR}{{}}.optimizer_offload": "optimizer"}
    keys["actor_rollout_ref.ref.{}.param_offload"] = "frozen"
    sections = {"fsdp_config": "torch", "megatron": "megatron", "veomni": "veomni"}
    for (form, part), (section, reader) in itertools.product(keys.items(), sections.items()):
        key = f"{form.format(section)}=True"
        for engine in (None, "fsdp", "veomni", "megatron"):
            name = {None: "torch", "fsdp": "torch"}.get(engine, engine)
            found = translate([key, *([] if engine is None else [f"model_engine={engine}"])])
            options = {s.key: s.value for s in found.settings if "offload" in s.key}
            assert options == ({f"model.engine_options.offload_{part}": True} if name == reader else {}), (key, engine)
            note = f"ignored (not read with model.engine={name}): {key}"
            assert (note in render_notes(found.notes)) == (name != reader), (key, engine)
    key = f"{ACTOR}fsdp_config.param_offload=True"
    own = "model.engine_options.offload_weights"
    assert own in {s.key for s in translate([key, "model_engine=megatron", "model.engine=sharded"]).settings}


def test_sizes_that_one_engine_has_are_its_options():
    stages, chunks, shares = (
        f"{ACTOR}megatron.{of}_parallel_size=2" for of in ("pipeline_model", "virtual_pipeline_model", "expert_tensor")
    )
    own = {"model.engine_options.virtual_stages": 2, "model.engine_options.expert_tensor": 2}
    for engine, several, read in (("megatron", True, True), ("fsdp", True, False), ("megatron", False, False)):
        script = [*EIGHT, stages, chunks, shares, f"model_engine={engine}"]
        found = translate([*script, *(["cluster.backend=processes"] if several else [])])
        options = {s.key: s.value for s in found.settings if "engine_options" in s.key}
        assert options == (own if read else {}), (engine, several)
        ignored = [line for line in render_notes(found.notes).splitlines() if line.startswith("ignored")]
        assert all(any(key in line for line in ignored) == (not read) for key in (chunks, shares))


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
