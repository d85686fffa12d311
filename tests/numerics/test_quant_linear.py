"""A model with quantised linear layers is the model with their dequantised weights."""

import copy

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from verl.model_engine.lora import LoraLayers
from verl.model_engine.lora_spec import LoraSpec
from verl.nn import quant_linear
from verl.nn.quant import quantise_weight
from verl.nn.quant_linear import QuantLinear, quantise_linears

SIZES = {
    "vocab_size": 160, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
KINDS = ("nf4", "int8")


def model_of(**changed):
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES | changed, attention_bias=True)).float()


def dequantised(model):
    """A copy of a model with quantised layers, with ordinary layers of the dequantised weights."""
    plain = copy.deepcopy(model)
    for name, layer in model.named_modules():
        if isinstance(layer, QuantLinear):
            made = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
            made.weight = nn.Parameter(layer.quantised.dequantised(torch.float32))
            made.bias = layer.bias
            holder, _, leaf = name.rpartition(".")
            setattr(plain.get_submodule(holder), leaf, made)
    return plain


def passed(model, embedded):
    embedded = embedded.clone().requires_grad_()
    logits = model(inputs_embeds=embedded).logits
    (logits * torch.linspace(-1, 1, logits.numel()).view(logits.shape)).sum().backward()
    return logits, embedded.grad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hidden", [128, 96])  # rows of whole blocks, and rows that end within one
def test_logits_and_gradients_are_those_of_the_dequantised_weights(kind, hidden):
    model = model_of(hidden_size=hidden, intermediate_size=208)
    kept = model.model.embed_tokens.weight
    names = quantise_linears(model, kind)
    assert len(names) == 14 and model.lm_head.weight is kept and type(model.lm_head) is nn.Linear
    embedded = torch.randn(2, 21, hidden)
    for ours, theirs in zip(passed(model, embedded), passed(dequantised(model), embedded), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6 * theirs.abs().max().item(), rtol=1e-6)
    trained = {name for name, p in model.named_parameters() if "_proj.weight" in name}
    assert not trained and model.model.layers[0].self_attn.q_proj.bias.grad is not None


def test_layers_are_replaced_one_at_a_time(monkeypatch):
    """When a weight is quantised, those before it are freed."""
    model, alive = model_of(), []

    def watched(weight, *args, **named):
        alive.append(sum(p.numel() for name, p in model.named_parameters() if "_proj.weight" in name))
        return quantise_weight(weight, *args, **named)

    monkeypatch.setattr(quant_linear, "quantise_weight", watched)
    sizes = [model.get_submodule(name).weight.numel() for name in quantise_linears(model, "nf4")]
    assert alive == [sum(sizes[i:]) for i in range(len(sizes))]


@pytest.mark.parametrize("kind", KINDS)
def test_scales_keep_their_dtype_and_products_are_in_that_of_the_input(kind):
    model = model_of()
    quantise_linears(model, kind)
    layer = model.model.layers[0].mlp.up_proj
    before = layer.quantised
    model.to(torch.bfloat16)
    assert torch.equal(layer.quantised.dequantised(torch.float32), before.dequantised(torch.float32))
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    out = layer(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, x @ before.dequantised(torch.bfloat16).T, atol=3e-2, rtol=3e-2)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x.float()), out)
    assert layer.weight.shape == (192, 128) and layer.weight.dtype == torch.float32 and not layer.weight.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_has_the_names_of_bitsandbytes_and_is_read_again(kind):
    model, other = model_of(), model_of()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1.0)
    quantise_linears(model, kind)
    quantise_linears(other, kind)
    state = model.state_dict()
    at = "model.layers.1.mlp.down_proj."
    added = {"weight.absmax", "weight.quant_map"} if kind == "nf4" else {"SCB", "weight_format"}
    assert {f"{at}{name}" for name in {"weight", *added}} <= state.keys() and f"{at}codes" not in state
    other.load_state_dict(state)
    assert all(torch.equal(t, state[name]) for name, t in other.state_dict().items())
    ids = torch.arange(9)[None]
    assert torch.equal(model(ids).logits, other(ids).logits)
    short = {name: t for name, t in state.items() if not name.startswith(at)}
    with pytest.raises(RuntimeError, match=r"Missing key.*down_proj\.weight"):
        other.load_state_dict(short)


def test_routers_and_skipped_layers_stay():
    torch.manual_seed(0)
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [0]}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | moe))
    names = quantise_linears(model, "nf4", skip=("o_proj", "model.layers.0.mlp.up_proj"))
    assert len(names) == 2 * 3 + 2 and not any("gate" in name.split(".")[-1] and "proj" not in name for name in names)
    assert not isinstance(model.model.layers[0].self_attn.o_proj, QuantLinear)
    assert not isinstance(model.model.layers[0].mlp.up_proj, QuantLinear)
    assert isinstance(model.model.layers[0].mlp.gate_proj, QuantLinear)
    with pytest.raises(ValueError, match="oo_proj is no linear layer of Qwen3ForCausalLM: down_proj, gate_proj"):
        quantise_linears(model_of(), "nf4", skip=("oo_proj",))
    with pytest.raises(ValueError, match="Sequential has no linear layer in decoder layers"):
        quantise_linears(nn.Sequential(nn.ReLU()), "nf4")


def test_lora_is_trained_on_quantised_layers():
    """The layers that LoRA adds to are linear layers to it: factors get the gradients that they have on the dequantised
    weights."""
    grads = []
    for plain in (False, True):
        model = model_of()
        quantise_linears(model, "nf4")
        model = dequantised(model) if plain else model
        layers = LoraLayers(model, LoraSpec(rank=4))
        with torch.no_grad():
            layers.fill(dict(model.named_parameters()), lambda factor: factor)
            for name in layers.names:
                model.get_parameter(name).add_(0.01)
        model(torch.arange(12)[None]).logits.square().sum().backward()
        grads.append([model.get_parameter(name).grad for name in layers.names])
    assert len(grads[0]) == 28
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5 * theirs.abs().max().item(), rtol=1e-5)
