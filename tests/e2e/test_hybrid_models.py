"""Runs of a model with gated delta nets, and what such models cannot do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hybrid import SIZES, model
from rollouts import finish, native_core, source_of
from safetensors.torch import load_file, save_file
from small_runs import metrics_of, small_args, small_run
from transformers import AutoModelForCausalLM

from verl.config.adapter import linear_layers
from verl.config.load import load_config
from verl.config.model_files import describe_model
from verl.config.model_folder import further_note
from verl.config.row_states import RowStates, row_states
from verl.config.validate import validate
from verl.models import tiny
from verl.planner.memory import rollout_items
from verl.recipes import arithmetic
from verl.rollout.base import GenerateRequest
from verl.rollout.embedded.requests import ActiveRequest
from verl.types import Sampling


def saved(kind: str, root: Path) -> Path:
    tokenizer = tiny.character_tokenizer(arithmetic.CHARACTERS)
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    return tiny.save(model(kind, **ends), tokenizer, root / kind)


def with_further_layers(folder: Path) -> dict[str, torch.Tensor]:
    """Add tensors to a folder that transformers leaves out, as published ones have them, and return them."""
    more = {"mtp.layers.0.self_attn.q_proj.weight": torch.randn(32, 64), "mtp.norm.weight": torch.randn(32).bfloat16()}
    whole = folder / "model.safetensors"
    save_file(load_file(whole) | more, whole, metadata={"format": "pt"})
    return more


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("qwen3_5_text", tmp_path_factory.mktemp("hybrid"))


@pytest.mark.slow
@pytest.mark.parametrize("kind, more", [("qwen3_next", ()), ("qwen3_5_text", ("model.lora.rank=4",))])
def test_what_is_sampled_is_what_is_trained(
    arithmetic_data: Sequence[Path], tmp_path: Path, kind: str, more: Sequence[str]
) -> None:
    """Factors are in all projections of the delta nets. Layers that predict further tokens stay as they were."""
    folder = saved(kind, tmp_path)
    plain, further = describe_model(str(folder)), with_further_layers(folder)
    assert describe_model(str(folder)).parameters == plain.parameters
    assert str(further_note(str(folder))).startswith("model: 2 tensors mtp.*")
    assert not [name for name in linear_layers(folder) if "mtp" in name], "they get no factors"
    done = small_run(tmp_path, folder, arithmetic_data, "checkpoint.every_steps=3", *more)
    last = metrics_of(tmp_path / "r")[3]
    assert done.steps == 3 and last["mismatch/max_abs_dlogp"] < 1e-5 and last["sync/canary_mean_abs"] < 1e-5
    if more:
        targets = json.loads(next((tmp_path / "r").rglob("adapter_config.json")).read_text())["target_modules"]
        ends = {name.rpartition(".")[2] for name in targets}
        assert ends >= {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "q_proj", "down_proj"}, ends
        return
    files = (tmp_path / "r" / "checkpoints" / "step_3" / "hf").glob("*.safetensors")
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    for name, tensor in further.items():
        assert written[name].dtype == tensor.dtype and torch.equal(written[name], tensor)
    loaded, found = AutoModelForCausalLM.from_pretrained(
        tmp_path / "r" / "checkpoints" / "step_3" / "hf", output_loading_info=True
    )
    assert not found["missing_keys"] and not found["unexpected_keys"]
    before = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    changed = {name for name, p in loaded.named_parameters() if not torch.equal(p, before[name])}
    assert {name for name in before if ".linear_attn." in name} <= changed


def test_the_plan_counts_keys_of_attention_alone_and_the_states_of_rows(
    folder: Path, arithmetic_data: Sequence[Path], tmp_path: Path
) -> None:
    """Within a tenth of the caches of an engine with all rows at full length; of two nets in three layers."""
    made = AutoModelForCausalLM.from_pretrained(folder)
    sizes = ("rollout.max_concurrent_sequences=8", "data.max_prompt_tokens=64", "rollout.max_response_tokens=64")
    config = load_config(small_args(tmp_path, folder, arithmetic_data, *sizes)).config
    items = rollout_items(config, describe_model(str(folder)))
    core = native_core(made.config, source_of(made), rows=8, max_context_tokens=128, prefix_cache_tokens=400)
    sampling = Sampling(max_tokens=64, ignore_eos=True)
    finish(core, (ActiveRequest(GenerateRequest(f"{n}", np.arange(n // 8, 64) % 60, sampling)) for n in range(16)))
    stats = core.runner.stats()
    assert items["row states"] == 8 * 4 * 2 * (3 * 56 + 4 * 8 * 6)
    assert items["KV cache"] + items["row states"] == pytest.approx(stats["kv_bytes"], rel=0.1)
    described = json.loads((folder / "config.json").read_text())
    described.pop("layer_types")
    by_interval, listed = {"full_attention_interval": 2}, {"layer_types": SIZES["layer_types"]}
    assert row_states(described | by_interval, 3) == row_states(described | listed, 3)
    assert row_states({"model_type": "qwen3", "layer_types": ["full_attention"]}, 1) == RowStates()


@pytest.mark.parametrize(
    "given, line",
    [
        ("parallel.sequence=2", "parallel.sequence=2: .* ranks that share the tokens of a row do not pass its states"),
        ("parallel.context=2", "parallel.context=2: .* ranks that share the tokens of a row do not pass its states on"),
        ("parallel.tensor=2", "parallel.tensor=2: .* is a qwen3_5_text, which cannot be cut over ranks here"),
        ("parallel.pipeline=2", "parallel.pipeline=2: .* is a qwen3_5_text, which cannot be cut into stages here"),
    ],
)
def test_ranks_that_do_not_share_states_are_refused(
    folder: Path, arithmetic_data: Sequence[Path], tmp_path: Path, given: str, line: str
) -> None:
    ranks = ("cluster.ranks_per_node=2", "cluster.backend=ray", given)
    with pytest.raises(ValueError, match=line):
        validate(load_config(small_args(tmp_path, folder, arithmetic_data, *ranks)).config)


def test_other_states_are_refused_for_packed_rows_before_a_start(
    folder: Path, arithmetic_data: Sequence[Path], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    described = json.loads((other / "config.json").read_text()) | {"model_type": "olmo_hybrid"}
    (other / "config.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match=r"model_type olmo_hybrid\) has layers that keep a state .*attention=padded"):
        validate(load_config(small_args(tmp_path, other, arithmetic_data)).config)
    padded = ("model.engine_options.attention=padded", "model.engine_options.share_prefix=false")
    validate(load_config(small_args(tmp_path, other, arithmetic_data, *padded)).config)
