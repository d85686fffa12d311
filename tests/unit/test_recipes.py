"""The recipes that people start from on GPUs: each is a configuration that can run, and the memory in its comment is
that of the plan."""

from __future__ import annotations

import os
import re
import subprocess
from importlib import resources
from pathlib import Path

import pytest
from handmade_model import write_model, write_rows, write_safetensors

from verl.cli import main
from verl.config.load import load_config, recipe_names, validate
from verl.planner.plan import make_plan
from verl.planner.text import render_plan

SHAPES = {  # of Qwen2.5, and the layout that the plan shows
    "one_gpu_0.5b": (dict(layers=24, hidden=896, ffn=4864, heads=14, kv_heads=2, vocab=151936), None),
    "eight_gpus_7b_fsdp2": (
        dict(layers=28, hidden=3584, ffn=18944, heads=28, kv_heads=4, vocab=152064, tied=False),
        "8 ranks = 8 data: a rank holds 1/8 of a model",
    ),
    "two_nodes_32b_fsdp2_tp": (
        dict(layers=64, hidden=5120, ffn=27648, heads=40, kv_heads=8, vocab=152064, tied=False),
        "16 ranks = 4 data x 4 tensor: a rank holds 1/16 of a model",
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_recipe_can_be_planned_and_says_what_it_holds(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("verl.config.cluster.find_spec", lambda name: name)
    monkeypatch.setattr("verl.config.devices.on_cuda", lambda config: config.model.device != "cpu")
    shape, layout = SHAPES[name]
    rows, model = write_rows(tmp_path / "rows.jsonl", 7473), write_model(tmp_path / "model", **shape)
    given = (f"model.path={model}", f"data.train_files=[{rows}]", f"data.eval_files=[{rows}]")
    config = load_config([f"recipe={name}", *given, f"run.root_dir={tmp_path}"]).config
    validate(config)
    plan = make_plan(config)
    assert (plan.cluster.layout if plan.cluster else None) == layout
    text = resources.files("verl.recipes").joinpath(f"{name}.yaml").read_text()
    comment = " ".join(re.findall(r"^# ?(.*)$", text, re.MULTILINE))
    (peak,) = re.findall(r"^peak (\S+ GiB) in", re.sub(r"(?s).*\n(peak .*)", r"\1", render_plan(plan)), re.MULTILINE)
    assert name in recipe_names() and "was not run on such" in comment
    assert f"holds at most {peak}" in comment


LLAMA_70B = dict(layers=80, hidden=8192, ffn=28672, heads=64, kv_heads=8, vocab=128256, tied=False)


def write_llama_70b(folder: Path) -> Path:
    return write_model(folder, **LLAMA_70B, config={"model_type": "llama"})


def write_qwen3_235b(folder: Path) -> Path:
    """The shapes of Qwen3-235B-A22B: a header of 36 thousand tensors."""
    layers, hidden, experts, wide, q, kv, vocab = 94, 4096, 128, 1536, 8192, 512, 151936
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "moe_intermediate_size": wide, "vocab_size": vocab}
    sizes |= {"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 12288}
    kind = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "tie_word_embeddings": False}
    write_model(folder, config=kind | sizes | {"num_experts": experts, "num_experts_per_tok": 8})
    of_layer = {"self_attn.q_proj": [q, hidden], "self_attn.k_proj": [kv, hidden], "self_attn.v_proj": [kv, hidden]}
    of_layer |= {"self_attn.o_proj": [hidden, q], "self_attn.q_norm": [128], "self_attn.k_norm": [128]}
    of_layer |= {"input_layernorm": [hidden], "post_attention_layernorm": [hidden], "mlp.gate": [experts, hidden]}
    for i in range(experts):
        of_layer |= {f"mlp.experts.{i}.{name}_proj": [wide, hidden] for name in ("gate", "up")}
        of_layer |= {f"mlp.experts.{i}.down_proj": [hidden, wide]}
    tensors = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden]}
    tensors |= {f"model.layers.{i}.{n}.weight": shape for i in range(layers) for n, shape in of_layer.items()}
    write_safetensors(folder / "model.safetensors", tensors | {"lm_head.weight": [vocab, hidden]})
    return folder


FOR_MEGATRON = {
    "four_nodes_70b_megatron": (
        write_llama_70b,
        "32 ranks = 4 pipeline x 8 tensor: a rank holds about 1/32 of a model",
    ),
    "sixteen_nodes_235b_megatron": (
        write_qwen3_235b,
        "128 ranks = 2 pipeline x 16 data x 4 tensor, in 16 copies of the model: a rank holds about 1/8 of a model",
    ),
}


SLOW = pytest.param("sixteen_nodes_235b_megatron", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", ["four_nodes_70b_megatron", SLOW])
def test_a_recipe_for_megatron_can_be_planned_and_says_what_a_rank_of_its_trainer_holds(name, tmp_path, monkeypatch):
    """The environment of its nodes has Megatron-Core, and vLLM is in another one: neither is here."""
    write, layout = FOR_MEGATRON[name]
    monkeypatch.setattr("verl.config.cluster.find_spec", lambda name: name)
    monkeypatch.setattr("verl.config.devices.on_cuda", lambda config: True)
    rows, model = write_rows(tmp_path / "rows.jsonl", 7473), write(tmp_path / "model")
    given = (f"model.path={model}", f"data.train_files=[{rows}]", f"data.eval_files=[{rows}]")
    config = load_config([f"recipe={name}", *given, f"run.root_dir={tmp_path}"]).config
    with pytest.raises(ValueError, match=r"^model\.engine=megatron: megatron-core is missing in the environment of "):
        validate(config)
    monkeypatch.setattr("verl.config.worker_python._engine_faults", lambda config, python: ())
    with pytest.raises(ValueError, match=r"^rollout\.engine=vllm: vllm is not installed beside verl; [^\n]*$"):
        validate(config)
    placed = make_plan(config).cluster
    assert placed is not None and placed.layout == layout
    text = resources.files("verl.recipes").joinpath(f"{name}.yaml").read_text()
    comment = " ".join(re.findall(r"^# ?(.*)$", text, re.MULTILINE))
    peak = placed.pools["main"].memory.peak_bytes / 2**30
    assert f"a rank of the trainer holds at most {peak:.1f} GiB" in comment, peak
    assert "was not run on such machines yet, and this engine was never run on a GPU" in comment


def test_what_fits_where(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("verl.config.cluster.find_spec", lambda name: name)
    monkeypatch.setattr("verl.config.devices.on_cuda", lambda config: True)
    for name, gigabytes in (("one_gpu_0.5b", 24), ("eight_gpus_7b_fsdp2", 80), ("two_nodes_32b_fsdp2_tp", 141)):
        model = write_model(tmp_path / name, **SHAPES[name][0])
        plan = make_plan(
            load_config(
                [
                    f"recipe={name}",
                    f"model.path={model}",
                    "data.train_files=[s3://x.parquet]",
                    "data.eval_files=[s3://y.parquet]",
                ]
            ).config
        )
        assert plan.memory.peak_bytes < gigabytes * 10**9


MODELS = {
    "Qwen2.5-0.5B-Instruct": SHAPES["one_gpu_0.5b"][0],
    "Qwen2.5-1.5B-Instruct": dict(layers=28, hidden=1536, ffn=8960, heads=12, kv_heads=2, vocab=151936),
    "Qwen2.5-7B-Instruct": SHAPES["eight_gpus_7b_fsdp2"][0],
}


def test_the_plans_on_the_page_of_gpus_print_the_memory_that_it_names(tmp_path: Path, monkeypatch, capsys) -> None:
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    lines = re.findall(r"^verl plan (recipe=.*\S) +# (peak .*)$", page, re.MULTILINE)
    assert len(lines) == 4 and {model for model in MODELS if model in str(lines)} == MODELS.keys()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("verl.config.cluster.find_spec", lambda name: name)
    for name, shape in MODELS.items():
        write_model(tmp_path / name, **shape)
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    for split, count in (("train", 7473), ("test", 1319)):
        write_rows(tmp_path / "data" / "gsm8k" / f"{split}.jsonl", count)
    for given, peak in lines:
        assert main(["plan", *given.split()]) == 0
        assert f"\n{peak}\n" in capsys.readouterr().out, given
    assert main(["plan", "recipe=one_gpu_0.5b", "model.path=Qwen2.5-1.5B-Instruct", "card_gib=24"]) == 2
    (state,) = re.findall(r"optimizer states want (\S+ GiB) during\s+an update", page)
    assert f"optimizer states want {state} during an update" in capsys.readouterr().err


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_the_script_for_slurm_starts_a_ray_on_every_node_and_trains_on_the_first(nodes: int, tmp_path: Path) -> None:
    """Slurm's commands are replaced by ones that print their arguments."""
    page = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    (script,) = re.findall(r"^```text\n(#!/bin/bash\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "job").write_text(script)
    for name, does in {"srun": 'echo "$*"', "scontrol": r"printf 'node%s\n' 1 2 3 4", "sleep": ":"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    given = {"SLURM_NNODES": str(nodes), "SLURM_JOB_NODELIST": "node[1-4]", "MODEL": "/model", "SHARED": "/shared"}
    env = {**os.environ, **given, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = subprocess.run(["bash", "-eu", tmp_path / "job"], env=env, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    others = f"--nodes={nodes - 1} --ntasks={nodes - 1} -x node1 --overlap ray start --address=node1:6379 --block"
    first, run = "--nodes=1 --ntasks=1 -w node1 --overlap", "model.path=/model run.root_dir=/shared/runs"
    assert sorted(ended.stdout.splitlines()) == sorted(
        [f"{first} ray start --head --port=6379 --block", f"{first} verl train recipe=two_nodes_32b_fsdp2_tp {run}"]
        + [others] * (nodes > 1)
    )
