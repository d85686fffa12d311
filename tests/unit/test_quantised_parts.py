"""Folders become models with a quantised base, tensor by tensor; also folders that bitsandbytes has quantised."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import transformers
from quantised import quantised_copy
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from verl.config.model_files import describe_model, folder_format, read_weight_headers
from verl.model_engine.hf_model import load_causal_lm
from verl.model_engine.hf_parts import open_skeleton
from verl.model_engine.quantised_parts import load_dequantised, load_quantised
from verl.nn.quant_linear import QuantLinear, quantise_linears

SIZES = {
    "vocab_size": 160, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "attention_bias": True, "max_position_embeddings": 64,
}  # fmt: skip
IDS = torch.arange(4, 21)[None]


def folder_of(path, dtype=torch.bfloat16, **changed):
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SIZES | changed)).to(dtype).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("exact") / "m")


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
def test_codes_of_bitsandbytes_are_taken_as_they_are(tmp_path, exact, kind):
    model = AutoModelForCausalLM.from_pretrained(exact, dtype=torch.float32)
    names = quantise_linears(model, kind)
    stored = load_file(quantised_copy(exact, tmp_path / "q", kind) / "model.safetensors")
    ours = load_quantised(tmp_path / "q", kind)
    assert not hasattr(ours.config, "quantization_config"), "what is made of it holds exact weights"
    assert {name for name, m in ours.named_modules() if isinstance(m, QuantLinear)} == {*names}
    for name in names:
        layer = ours.get_submodule(name)
        assert torch.equal(layer.quantised.tensors()["weight"], stored[f"{name}.weight"])
        assert layer.weight.dtype == torch.float32, "also of codes of a weight in bfloat16 or float16"
    assert torch.equal(ours(IDS).logits, model(IDS).logits)
    with pytest.raises(ValueError, match=rf"its weights are quantised as {kind}, and .* was asked for; use {kind}"):
        load_quantised(tmp_path / "q", "int8" if kind == "nf4" else "nf4")
    skeleton = open_skeleton(tmp_path / "q", quantised=True)
    weight = torch.empty(64, 128)
    skeleton.fill({"model.layers.1.self_attn.k_proj.weight": weight})
    assert torch.equal(weight, model.model.layers[1].self_attn.k_proj.quantised.dequantised(torch.float32))
    dequantised = load_dequantised(tmp_path / "q")
    assert not [m for m in dequantised.modules() if isinstance(m, QuantLinear)]
    assert torch.allclose(dequantised(IDS).logits, model(IDS).logits, atol=1e-5)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_headers_of_codes_are_those_of_the_weights(tmp_path, exact, kind):
    folder = quantised_copy(exact, tmp_path / "q", kind)
    (found, exactly), stored = map(read_weight_headers, (folder, exact)), load_file(folder / "model.safetensors")
    assert {name: t.shape for name, t in found.items()} == {name: t.shape for name, t in exactly.items()}
    assert {t.quantised for name, t in found.items() if "proj.weight" in name} == {kind}
    assert {t.quantised for name, t in found.items() if "proj.weight" not in name} == {""}
    assert sum(t.num_bytes for t in found.values()) == sum(t.nbytes for t in stored.values())
    facts, whole = (describe_model(str(path)) for path in (folder, exact))
    assert facts == replace(whole, folder=str(folder), stored_bytes=facts.stored_bytes, stored_dtype=kind), (
        "the plan's numbers"
    )
    assert folder_format(str(folder)) == kind and folder_format(str(exact)) == "none"


def test_other_methods_are_refused_and_so_is_a_quantised_folder_that_is_trained_whole(tmp_path, exact):
    for method in ("gptq", "awq"):
        quantised_copy(exact, tmp_path / method, "nf4", {"quant_method": method})
        with pytest.raises(
            ValueError,
            match=f"quantised with {method} .*; take the model's weights in bfloat16.*model.quantization=nf4",
        ):
            load_quantised(tmp_path / method, "nf4")
    folder = quantised_copy(exact, tmp_path / "q", "nf4")
    for load in (open_skeleton, load_causal_lm):
        with pytest.raises(ValueError, match="quantised as nf4 by bitsandbytes, and codes have no gradient"):
            load(folder)
    stored, state = load_file(folder / "model.safetensors"), "model.layers.0.mlp.up_proj.weight.quant_state."
    fp4 = {name.replace(f"{state}bitsandbytes__nf4", f"{state}bitsandbytes__fp4"): t for name, t in stored.items()}
    no_codes = {name: t.bfloat16() for name, t in load_file(exact / "model.safetensors").items()}
    for tensors, found in ((fp4, "holds fp4 and nf4"), (no_codes, "holds no codes")):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=f"bitsandbytes quantised it, and it {found}; quantise it as nf4"):
            describe_model(str(folder))
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


KEEPS_A_FEW = """
import os, threading
import torch
from verl.processes.memory import anonymous_mb, return_large_blocks

return_large_blocks()
kept, before_mb = [], anonymous_mb(os.getpid())

def passes():
    x = torch.ones(256, 1024)
    for _ in range(24):  # as layers do: of several large results a small one is kept
        gate, up = x.repeat(1, 6) * 1, x.repeat(1, 6) + 1
        product = torch.nn.functional.silu(gate) * up
        more = [torch.ones(256, 1024) for _ in range(5)]
        x = product[:, :1024] + more[0]
        kept.append(x)
        x = x * 1
thread = threading.Thread(target=passes)
thread.start()
thread.join()
print(anonymous_mb(os.getpid()) - before_mb)
"""


def test_what_a_pass_frees_returns_to_the_system():
    done = subprocess.run([sys.executable, "-c", KEEPS_A_FEW], capture_output=True, text=True, timeout=120, check=True)
    assert 24 <= float(done.stdout) < 30, f"{done.stdout} MB for 24 MB of tensors; glibc alone needs 118"


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_bitsandbytes_in_transformers_writes_what_is_read_here_and_reads_what_we_write(
    tmp_path, exact, kind, reference
):
    reference("accelerate")
    functional = reference("bitsandbytes").functional
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    method = transformers.BitsAndBytesConfig(**four if kind == "nf4" else {"load_in_8bit": True})
    theirs = AutoModelForCausalLM.from_pretrained(exact, quantization_config=method, dtype=torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs")
    described = json.loads((tmp_path / "theirs" / "config.json").read_text())["quantization_config"]
    ours = load_quantised(tmp_path / "theirs", kind)
    layers = {name: module for name, module in ours.named_modules() if isinstance(module, QuantLinear)}
    assert len(layers) == 14
    again = AutoModelForCausalLM.from_pretrained(quantised_copy(exact, tmp_path / "ours", kind, described))
    for model in (theirs, again):
        for name, layer in layers.items():
            weight = model.get_submodule(name).weight
            if kind == "nf4":
                state = weight.quant_state
                state.dtype = torch.float32
                values = functional.dequantize_4bit(weight.data, state)
            else:
                values = functional.int8_vectorwise_dequant(weight.CB, weight.SCB)
            assert torch.equal(layer.weight, values), name
