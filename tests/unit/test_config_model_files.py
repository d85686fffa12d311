"""A model folder is read without torch: exact counts, and broken folders refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from each import each
from handmade_model import qwen2_tensors, write_model, write_qwen_half_billion, write_safetensors

from verl.checkpoint.loadable import check_loadable
from verl.config.model_files import (
    check_tokenizer,
    describe_model,
    find_model_folder,
    read_weight_headers,
    refuse_foreign,
)
from verl.config.schema import Config
from verl.config.tree import changed
from verl.driver.run_dir import _refuse_another_model


def test_half_a_billion_parameters_exactly(tmp_path: Path) -> None:
    m = describe_model(str(write_qwen_half_billion(tmp_path / "m")))
    assert m.parameters == 494_032_768 and m.tied and m.has_output_head and m.has_chat_template
    assert m.embedding_parameters == 151936 * 896
    assert (m.layers, m.hidden, m.intermediate, m.heads, m.kv_heads, m.head_dim, m.vocab) == (
        24,
        896,
        4864,
        14,
        2,
        64,
        151936,
    )
    assert (m.stored_dtype, m.stored_bytes, m.max_context_tokens) == ("bfloat16", 2 * 494_032_768, 32768)


def test_shards_count_once(tmp_path: Path) -> None:
    assert (
        describe_model(str(write_model(tmp_path / "a", shards=3))).parameters
        == describe_model(str(write_model(tmp_path / "b"))).parameters
    )


def test_tied_embeddings(tmp_path: Path) -> None:
    tied, untied = (
        describe_model(str(write_model(tmp_path / "t"))),
        describe_model(str(write_model(tmp_path / "u", tied=False))),
    )
    assert untied.parameters - tied.parameters == 1000 * 64 and not untied.tied
    both = write_model(tmp_path / "both", tied=False, config={"tie_word_embeddings": True})
    assert describe_model(str(both)).parameters == tied.parameters
    unsaid = write_model(tmp_path / "unsaid", config={"tie_word_embeddings": None})
    assert describe_model(str(unsaid)).tied
    headless = write_model(tmp_path / "headless", config={"tie_word_embeddings": False})
    assert not describe_model(str(headless)).has_output_head


def test_buffers_are_no_parameters(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    count = describe_model(str(folder)).parameters
    tensors = qwen2_tensors(layers=2, hidden=64, ffn=128, heads=4, kv_heads=2, vocab=1000, tied=True)
    tensors |= {
        "model.layers.0.self_attn.rotary_emb.inv_freq": [8],
        "h.0.attn.bias": [1, 1, 16, 16],
        "h.0.attn.masked_bias": [1],
    }
    write_safetensors(folder / "model.safetensors", tensors)
    assert describe_model(str(folder)).parameters == count


def test_other_names_and_experts(tmp_path: Path) -> None:
    names = {
        "hidden_size": None,
        "n_embd": 64,
        "num_hidden_layers": None,
        "n_layer": 2,
        "num_attention_heads": None,
        "n_head": 4,
        "num_key_value_heads": None,
        "intermediate_size": None,
        "max_position_embeddings": None,
        "n_positions": 128,
    }
    m = describe_model(str(write_model(tmp_path / "gpt2", config=names)))
    assert (m.hidden, m.layers, m.heads, m.kv_heads, m.intermediate, m.max_context_tokens) == (64, 2, 4, 4, 256, 128)
    experts = {"num_experts_per_tok": 8, "moe_intermediate_size": 32, "head_dim": 32}
    m = describe_model(str(write_model(tmp_path / "moe", config=experts)))
    assert (m.intermediate, m.head_dim) == (256, 32)


def test_text_config_of_a_multimodal_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"architectures": ["VL"], "text_config": config}))
    assert describe_model(str(folder)).hidden == 64


def broken(folder: Path, how: str) -> Path:
    write_model(folder, shards=2 if how == "shard" else 1)
    file = folder / "model.safetensors"
    if how == "config":
        (folder / "config.json").unlink()
    elif how == "json":
        (folder / "config.json").write_text("{")
    elif how == "layers":
        (folder / "config.json").write_text(json.dumps({"hidden_size": 64}))
    elif how == "shard":
        (folder / "model-00002-of-00002.safetensors").unlink()
    elif how == "cut":
        with file.open("r+b") as stream:
            stream.truncate(file.stat().st_size - 100)
    elif how == "pointer":
        file.write_text("version https://git-lfs.github.com/spec/v1\n")
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "bin":
        file.rename(folder / "pytorch_model.bin")
    return folder


@each(
    "how, reason",
    [
        ("config", "no config.json"),
        ("json", "not JSON"),
        ("layers", "no num_attention_heads"),
        ("shard", "model-00002-of-00002.safetensors is missing"),
        ("cut", "it was cut; download it again"),
        ("pointer", "Git LFS pointer"),
        ("empty", "not a safetensors file"),
        ("bin", "there is pytorch_model.bin: save it again"),
    ],
)
def test_broken_folders_are_one_line(tmp_path: Path, how: str, reason: str) -> None:
    folder = broken(tmp_path / "m", how)
    with pytest.raises(ValueError, match=reason) as caught:
        describe_model(str(folder))
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


@each("name", ["../other/model.safetensors", "/etc/passwd", "a/../../x.safetensors", ""])
def test_an_index_names_files_of_its_own_folder_alone(tmp_path: Path, name: str) -> None:
    """In that of safetensors, and in that of pytorch_model.bin, which transformers follows as well."""
    write_model(tmp_path / "m")
    write_model(tmp_path / "other")
    index = json.dumps({"weight_map": {"a": name}})
    (tmp_path / "m" / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match="is no file of this folder"):
        read_weight_headers(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors.index.json").unlink()
    (tmp_path / "m" / "pytorch_model.bin.index.json").write_text(index)
    with pytest.raises(ValueError, match="is no file of this folder"):
        check_loadable(tmp_path / "m")


@each(
    "more",
    [
        {"attn_implementation": "org/kernel"},
        {"_attn_implementation": "org/kernel@main:f"},
        {"attn_implementation": {"text_config": "org/kernel"}},
        {"text_config": {"attn_implementation": "org/kernel"}},
    ],
)
def test_code_of_a_hub_is_not_run_unless_that_is_wanted(tmp_path: Path, more: dict) -> None:
    folder = write_model(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **more}))
    with pytest.raises(ValueError, match=r"config\.json: attn_implementation='org/kernel.*trust_remote_code=true"):
        check_loadable(folder)
    refuse_foreign(folder, {**config, **more}, trust_remote_code=True)
    refuse_foreign(folder, {**config, "attn_implementation": "sdpa"}, trust_remote_code=False)


def test_folders_and_tokenizers_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="hf download Org/Name"):
        find_model_folder("Org/Name")
    with pytest.raises(ValueError, match="no such folder"):
        find_model_folder(str(tmp_path / "no"))
    (tmp_path / "bare").mkdir()
    with pytest.raises(ValueError, match="no tokenizer"):
        check_tokenizer(tmp_path / "bare")
    with pytest.raises(ValueError, match=r"no \*.safetensors"):
        read_weight_headers(tmp_path / "bare")


def test_a_checkpoint_and_a_model_are_compared_by_names_and_shapes(tmp_path: Path) -> None:
    def said(ours: Path) -> str:
        config = Config()
        config = changed(config, {"model.path": str(ours)})
        try:
            _refuse_another_model(config, tmp_path / "step_1")
        except ValueError as e:
            return str(e)
        return ""

    saved = write_model(tmp_path / "step_1" / "hf")
    assert said(saved) == said(write_model(tmp_path / "head", tied=False)) == "", "a tied head may be written or not"
    plain = write_model(tmp_path / "plain")
    write_safetensors(
        plain / "model.safetensors",
        {n.removeprefix("model."): list(h.shape) for n, h in read_weight_headers(saved).items()},
    )
    assert said(plain) == ""
    wide = said(write_model(tmp_path / "wide", ffn=256))
    assert "6 tensors differ" in wide and "layers.0.mlp.down_proj.weight is [64, 128] there and [64, 256] here" in wide
    assert "is not there and [64] here" in said(write_model(tmp_path / "deep", layers=3))
    assert "12 tensors differ" in said(write_model(tmp_path / "flat", layers=1))
    (saved / "model.safetensors").unlink()
    assert said(tmp_path / "wide") == "", "what has no export is compared when it is loaded"
