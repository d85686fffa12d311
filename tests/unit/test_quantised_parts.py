"""Folders become models with a quantised base, tensor by tensor; also folders that bitsandbytes has quantised."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from verl.model_engine.hf_parts import open_skeleton
from verl.model_engine.quantised_parts import load_quantised
from verl.nn.quant_linear import QuantLinear, quantise_linears

SIZES = {
    "vocab_size": 160, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "attention_bias": True, "max_position_embeddings": 64,
}  # fmt: skip
IDS = torch.arange(4, 21)[None]
BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def folder_of(path, dtype=torch.bfloat16, **changed):
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SIZES | changed)).to(dtype).save_pretrained(path)
    return path


def quantised_folder(path, kind, config=None):
    """What transformers writes of a model that bitsandbytes quantised: codes, scales, and the method in config.json."""
    folder_of(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    names = quantise_linears(model, kind)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    state.pop("lm_head.weight") if model.config.tie_word_embeddings else None
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(described | {"quantization_config": config or BITSANDBYTES}))
    return model, names


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_is_quantised_as_the_whole_model_is(tmp_path, kind, tied):
    path = folder_of(tmp_path / "m", tie_word_embeddings=tied)
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    quantise_linears(whole, kind, skip=("o_proj",))
    ours = load_quantised(path, kind, skip=("o_proj",))
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == tied
    state = whole.state_dict()
    assert ours.state_dict().keys() == state.keys()
    assert all(torch.equal(t, state[name]) for name, t in ours.state_dict().items())
    assert torch.equal(ours(IDS).logits, whole(IDS).logits) and not any(p.requires_grad for p in ours.parameters())


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_codes_of_bitsandbytes_are_taken_as_they_are(tmp_path, kind):
    model, names = quantised_folder(tmp_path / "q", kind)
    stored = load_file(tmp_path / "q" / "model.safetensors")
    ours = load_quantised(tmp_path / "q", kind)
    assert {name for name, m in ours.named_modules() if isinstance(m, QuantLinear)} == {*names}
    for name in names:
        codes = ours.get_submodule(name).quantised.tensors()["weight"]
        assert torch.equal(codes, stored[f"{name}.weight"])
    assert torch.equal(ours(IDS).logits, model(IDS).logits)
    with pytest.raises(ValueError, match=rf"its weights are quantised as {kind}, and .* was asked for; use {kind}"):
        load_quantised(tmp_path / "q", "int8" if kind == "nf4" else "nf4")
    skeleton = open_skeleton(tmp_path / "q", quantised=True)
    weight = torch.empty(64, 128)
    skeleton.fill({"model.layers.1.self_attn.k_proj.weight": weight})
    assert torch.equal(weight, model.model.layers[1].self_attn.k_proj.quantised.dequantised(torch.float32))


def test_other_methods_are_refused_and_so_is_a_quantised_folder_that_is_trained_whole(tmp_path):
    for method in ("gptq", "awq"):
        quantised_folder(tmp_path / method, "nf4", {"quant_method": method})
        with pytest.raises(
            ValueError, match=f"quantised with {method} .*: take the model's weights in bfloat16|; take"
        ):
            load_quantised(tmp_path / method, "nf4")
    with pytest.raises(ValueError, match="quantised with gptq"):
        load_quantised(tmp_path / "gptq", "nf4")
    quantised_folder(tmp_path / "q", "nf4")
    with pytest.raises(ValueError, match="quantised with bitsandbytes"):
        open_skeleton(tmp_path / "q")
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="it has none"):
        load_quantised(tmp_path / "none", "nf4")


WATCHED = """
import re, sys
from verl.model_engine import quantised_parts
from pathlib import Path
from verl.nn.quant_linear import QuantLinear

def anonymous_bytes():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text()).group(1))

small, large = map(Path, sys.argv[1:])
quantise_weight, peak = quantised_parts.quantise_weight, []

def watched(weight, *args, **named):
    found = quantise_weight(weight, *args, **named)
    peak.append(anonymous_bytes())
    return found

quantised_parts.load_quantised(small, "nf4")  # what the first call allocates once
quantised_parts.quantise_weight, before = watched, anonymous_bytes()
layers = [m for m in quantised_parts.load_quantised(large, "nf4").modules() if isinstance(m, QuantLinear)]
exact = sum(4 * m.in_features * m.out_features for m in layers)
print(exact, sum(m.quantised.nbytes for m in layers), max(peak) - before)
"""


def test_memory_holds_the_quantised_weights_and_one_tensor(tmp_path):
    large = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 14, "tie_word_embeddings": True}
    folders = [str(folder_of(tmp_path / "small")), str(folder_of(tmp_path / "large", **large))]
    world = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # freed tensors are returned to the system at once
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *folders], env=world, capture_output=True, text=True, timeout=120, check=True
    )
    exact, quantised, peak = map(int, done.stdout.split())
    assert exact > 170 << 20 and quantised < exact / 7
    assert peak < quantised + (48 << 20), peak - quantised  # a tensor of 4 MB, and what its conversion takes
