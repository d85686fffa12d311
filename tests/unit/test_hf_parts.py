"""A model that is read part by part is bitwise the model that transformers loads. Faults of a folder are reported
before a weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from each import each
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from verl.model_engine.hf_model import load_causal_lm
from verl.model_engine.hf_parts import Skeleton, open_skeleton

SIZES: dict[str, Any] = dict(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    vocab_size=64,
    head_dim=16,
    pad_token_id=0,
)
SIZES |= dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, qk_rope_head_dim=16)
KINDS = ("qwen3", "llama", "gemma3_text", "gpt2", "gpt_neox", "phi3", "qwen3_moe", "mixtral", "olmoe", "qwen2_moe")
KINDS += ("deepseek_v3", "gpt_oss", "bloom")  # persistent buffers, experts with biases, biases computed from nothing


def folder_of(folder: Path, kind: str, *, tied: bool, dtype: torch.dtype = torch.bfloat16) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SIZES, tie_word_embeddings=tied))
    model.to(dtype).save_pretrained(folder, max_shard_size="20KB")  # several files
    return folder


def named(model: Any) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


def ties(model: Any) -> set[frozenset[str]]:
    every = dict(model.named_parameters(remove_duplicate=False))
    return {frozenset(n for n, p in every.items() if p is one) for one in every.values()}


def filled(skeleton: Skeleton) -> Any:
    """The whole model in this process, every number of which was read."""
    model, before = skeleton.model, list(skeleton.model.parameters())
    assert all(p.is_meta for p in before) and not any(b.is_meta for b in model.buffers())
    room = {id(p): nn.Parameter(torch.full_like(p, torch.nan, device="cpu")) for p in before}
    for module in model.modules():
        module._parameters.update({n: room.get(id(p), p) for n, p in module._parameters.items()})
    skeleton.fill({n: t for n, t in named(model).items() if n in model.state_dict()})
    return model


@each("kind", KINDS, quick=3)
def test_a_family_part_by_part(kind, tmp_path):
    for tied in (True, False):
        folder = folder_of(tmp_path / str(tied), kind, tied=tied)
        expected, skeleton = load_causal_lm(folder), open_skeleton(folder)
        assert skeleton is not None
        model = filled(skeleton)
        wanted, found = named(expected), named(model)
        assert wanted.keys() == found.keys() and ties(expected) == ties(model)
        for name, t in wanted.items():
            assert t.dtype == found[name].dtype and torch.equal(t, found[name]), name
        for what in ("_attn_implementation", "_experts_implementation"):
            assert getattr(model.config, what) == getattr(expected.config, what)


def rewritten(folder: Path, change: Any) -> Path:
    """The same folder in one file, with its tensors changed."""
    files = sorted(folder.glob("*.safetensors"))
    tensors = {name: t for file in files for name, t in load_file(file).items()}
    for file in (*files, folder / "model.safetensors.index.json"):
        file.unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


EMBEDDINGS, HEAD, UP = "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
WRONG = {
    "missing": ("qwen3", lambda t: t.pop(UP), ("start at random", UP)),
    "missing expert": ("qwen3_moe", lambda t: t.pop(EXPERT), ("model.layers.1.mlp.experts.gate_up_proj",)),
    "of no layer": ("qwen3", lambda t: t.update({"model.layers.9.norm": torch.ones(3)}), ("none of the model",)),
    "shape": ("qwen3", lambda t: t.update({UP: torch.ones(3, 4)}), (UP, "[3, 4]", "[64, 64]")),
    "expert's shape": ("qwen3_moe", lambda t: t.update({EXPERT: torch.ones(3, 4)}), ("experts.gate_up_proj",)),
    "no head": ("qwen3", lambda t: t.pop(HEAD), (HEAD,)),
}


@each("what", WRONG)
def test_what_is_wrong_with_a_folder_is_named(what, tmp_path):
    kind, spoil, words = WRONG[what]
    folder = rewritten(folder_of(tmp_path, kind, tied=False), spoil)
    with pytest.raises(ValueError) as caught:
        open_skeleton(folder)
    said = str(caught.value)
    assert all(word in said for word in (str(folder), *words)) and "\n" not in said
    if "expert" not in what:
        with pytest.raises(ValueError) as caught:
            load_causal_lm(folder)
        assert all(word in str(caught.value) for word in (str(folder), *words))


def test_tied_weights_under_either_name_or_both(tmp_path):
    def under_the_head(t: dict[str, Tensor]) -> None:
        t[HEAD] = t.pop(EMBEDDINGS)

    def both(t: dict[str, Tensor]) -> None:
        t[HEAD] = t[EMBEDDINGS].clone()

    def differing(t: dict[str, Tensor]) -> None:
        t[HEAD] = t[EMBEDDINGS] * 2

    for change in (under_the_head, both, differing):
        folder = rewritten(folder_of(tmp_path / change.__name__, "qwen3", tied=True), change)
        expected, skeleton = load_causal_lm(folder), open_skeleton(folder)
        assert skeleton is not None
        model = filled(skeleton)
        assert ties(expected) == ties(model), change
        assert all(torch.equal(t, named(model)[n]) for n, t in named(expected).items()), change


def test_a_body_without_a_head_serves_a_value_head(tmp_path):
    """A reward model's folder: its body is read, its score is not of the model, the head that it lacks is drawn, the
    same on every rank."""
    config = CONFIG_MAPPING["qwen3"](**SIZES, num_labels=1, tie_word_embeddings=False)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="lm_head"):
        open_skeleton(tmp_path)
    expected = load_causal_lm(tmp_path, needs_lm_head=False)
    first, second = (filled(open_skeleton(tmp_path, needs_lm_head=False)) for _ in range(2))
    for name, t in named(first).items():
        assert torch.equal(t, named(second)[name]) and (name == HEAD or torch.equal(t, named(expected)[name])), name
    assert 0.01 < float(named(first)[HEAD].detach().std()) < 0.03


def test_other_folders_are_left_to_transformers(tmp_path):
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["qwen3"](**SIZES))
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert open_skeleton(tmp_path) is None and open_skeleton(tmp_path / "nowhere") is None


def test_numbers_are_read_where_they_are_held_and_nowhere_else(tmp_path, monkeypatch):
    """Nothing is read of a tensor that is not requested."""
    folder = folder_of(tmp_path, "qwen3_moe", tied=False)
    skeleton = open_skeleton(folder)
    asked = "model.layers.0.mlp.experts.down_proj"
    read: list[str] = []
    monkeypatch.setattr("verl.model_engine.hf_parts.safe_open", lambda path, kind: Noted(safe(path, kind), read))
    from safetensors import safe_open as safe

    skeleton.fill({asked: torch.empty(skeleton.model.get_parameter(asked).shape)})
    assert sorted(read) == [f"model.layers.0.mlp.experts.{i}.down_proj.weight" for i in range(4)]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len({*index["weight_map"].values()}) > 5


class Noted:
    """A safetensors file that records the tensors of which numbers are read."""

    def __init__(self, file: Any, read: list[str]) -> None:
        self.file, self.read = file, read

    def __enter__(self) -> Any:
        self.file.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self.file.__exit__(*args)

    def get_tensor(self, name: str) -> Tensor:
        self.read.append(name)
        return self.file.get_tensor(name)
