"""Modules that are trained whole beside LoRA's factors, in configuration and plan: what is known from the headers of a
model's files."""

import json
from pathlib import Path

import pytest
import torch
from handmade_model import write_model, write_rows
from safetensors.torch import load_file, save_file
from test_lora_config import adapter, planned, resolved_of

from verl.config.compat.peft import lora_keys
from verl.config.validate import validate
from verl.driver.identity import compare, identity_of
from verl.model_engine.layout import Layout
from verl.planner.memory import role_items
from verl.planner.text import render_plan

RANK = "model.lora.rank=8"
BOTH = "model.lora.modules_to_save=[embed_tokens, lm_head]"
BUCKETS = "sync.engine_options.bucket_mb=8"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    where = tmp_path_factory.mktemp("saved")
    write_model(where / "tiny", tied=False)
    write_model(where / "tied")
    write_rows(where / "train.jsonl", 64)
    return where


def test_the_plan_counts_values_gradients_states_and_the_start(folder):
    plan, alone = planned(folder, RANK, BOTH), planned(folder, RANK)
    whole = 2 * 1000 * 64
    assert plan.factors.saved == {"model.embed_tokens.weight": (1000, 64), "lm_head.weight": (1000, 64)}
    values = plan.factors.parameters + whole
    found, before = plan.memory.items, alone.memory.items
    assert found["gradients"] == 4 * values and found["optimizer states"] == 8 * values
    assert found["master weights"] - before["master weights"] == 4 * whole, "the values of the start are kept"
    assert found["head's gradient"] == (4 + 2) * 1000 * 64 and "head's gradient" not in before
    assert plan.checkpoint_parts["state"] == 12 * values
    assert plan.checkpoint_parts["weights"] - alone.checkpoint_parts["weights"] == 4 * whole
    text = render_plan(plan)
    assert "in 14 layers; and 128,000 (" in text and "of embed_tokens, lm_head, whole" in text
    apart = "served    rollout engines get the base once, then the factors of each version, unmerged, and the weights"
    assert apart in text
    for given in (("rollout.engine=vllm", "rollout.python=/bin/true"), ("sync.engine=shm", BUCKETS)):
        merged = render_plan(planned(folder, RANK, BOTH, *given))
        assert "served    rollout engines get all weights in each version, with the factors added in float32" in merged
    coded = ("model.quantization=nf4", "model.dtype=float32", "model.device=cpu")
    items, without = (planned(folder, RANK, *more, *coded).memory.items for more in ((BOTH,), ()))
    own = "its rollout has an embedding and a head of its own, since they change"
    assert items["rollout weights"] - without.get("rollout weights", 0) == 4 * whole, own
    assert items["incoming weights"] == 4 * values
    ppo = planned(folder, RANK, BOTH, "algorithm.name=ppo")
    critic = plan.factors.parameters + 64_000 + 64 + 1  # a critic has no output head
    assert ppo.checkpoint_parts["critic"] == pytest.approx(12 * critic, rel=0.01)
    assert ppo.memory.items["critic with its optimizer"] == pytest.approx(16 * critic + 4 * 64_000, rel=0.01)
    ranks = role_items(resolved_of(folder, RANK, BOTH).config, "actor", Layout(world_size=2), 64)
    assert ranks["gradients"] == pytest.approx(4 * values / 2, rel=0.01) and ranks["reduced embeddings"] > 0


def test_what_cannot_be_trained_whole_is_one_line_before_anything_is_loaded(folder, tmp_path):
    tied = " of Qwen2ForCausalLM: the embedding and the output head are one tied tensor"
    for model, given, text in (
        ("tied", (BOTH,), tied),
        ("tied", ("model.lora.modules_to_save=[lm_head]",), "lm_head of Qwen2ForCausalLM: the embedding and"),
        ("tiny", ("model.lora.modules_to_save=[lm_haed]",), "modules_to_save=lm_haed: no module of Qwen2ForCausalLM"),
        ("tiny", ("model.lora.modules_to_save=[v_proj]",), "layers.0.self_attn.v_proj of Qwen2ForCausalLM: it has f"),
        (
            "tiny",
            ("model.lora.targets=[q_proj]", "model.lora.modules_to_save=[v_proj]", "model.quantization=nf4"),
            "self_attn.v_proj of Qwen2ForCausalLM: its weights are quantised",
        ),
    ):
        with pytest.raises(ValueError) as found:
            validate(resolved_of(folder, RANK, *given, model=model).config)
        (line,) = [one for one in str(found.value).splitlines() if "modules_to_save" in one]
        assert text in line, line
    with pytest.raises(ValueError, match="modules_to_save=lm_head: a reward model has no output head"):
        validate(resolved_of(folder, RANK, BOTH).config, command="rm")
    with pytest.raises(ValueError, match=r"model.lora.modules_to_save=\['lm_head'\] beside model.lora.path"):
        made = f"model.lora.path={adapter(tmp_path / 'made')}"
        resolved_of(folder, made, "model.lora.modules_to_save=[lm_head]")
    with pytest.raises(ValueError, match="model.lora.modules_to_save without a rank does nothing"):
        resolved_of(folder, BOTH)


def test_an_adapter_to_go_on_from_may_have_whole_weights_but_no_factors_of_a_head(folder, tmp_path):
    path = adapter(tmp_path / "made", modules_to_save=["lm_head"])
    factors = load_file(path / "adapter_model.safetensors")
    save_file(factors | {"base_model.model.lm_head.weight": torch.ones(1000, 64)}, path / "adapter_model.safetensors")
    plan = planned(folder, f"model.lora.path={path}")
    assert plan.factors.saved == {"lm_head.weight": (1000, 64)} and plan.factors.rank == 4
    head = {"A": torch.ones(4, 64), "B": torch.ones(1000, 4)}
    factors |= {f"base_model.model.lm_head.lora_{name}.weight": factor for name, factor in head.items()}
    save_file(factors, path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="model.lora.path=.*an adapter with factors of lm_head.weight, and linear"):
        validate(resolved_of(folder, f"model.lora.path={path}").config)


def test_a_run_goes_on_with_the_same_modules_alone(folder):
    one, other = (identity_of(resolved_of(folder, RANK, *more), "train") for more in ((BOTH,), ()))
    assert compare(one, one) == ([], {})
    (line,), _ = compare(one, other)
    assert "model.lora" in line


def test_fields_of_peft_have_its_meaning(folder):
    given = lora_keys({"target_modules": "all-linear", "r": 8, "modules_to_save": ["norm", "embed_tokens"]})
    entries = json.dumps(given["model.lora.modules_to_save"]).replace('"', "")
    saved = planned(folder, RANK, f"model.lora.modules_to_save={entries}").factors.saved
    norms = {n for n in saved if n.endswith("norm.weight")}
    assert len(norms) == 5 and {*saved} == norms | {"model.embed_tokens.weight"}, "ends of names, as PEFT compares"
