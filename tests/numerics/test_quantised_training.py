"""LoRA on a quantised base: it computes and publishes what LoRA on the dequantised weights does."""

from dataclasses import replace

import pytest
import torch
from each import each
from test_engine import NLL, batch_of, make, samples

from verl.model_engine.base import EngineContext
from verl.model_engine.lora import B, is_factor
from verl.model_engine.lora_spec import LoraSpec
from verl.model_engine.optim import OptimSpec
from verl.model_engine.options import Options
from verl.model_engine.sibling import build_sibling
from verl.model_engine.torch_engine import build
from verl.nn.quant import Int8, Nf4
from verl.nn.quant_linear import quantised_layers

SPEC = LoraSpec(rank=4, alpha=8.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("base")
    make().save_pretrained(found)
    return found


def context(folder, kind=None, **more):
    return EngineContext(folder=folder, lora=SPEC, optim=OptimSpec(lr=1e-2), dtype="float32", quantisation=kind, **more)


def dequantised(quantised, folder, into):
    """An engine with LoRA on a folder of the weights that the codes of another engine stand for, with its factors."""
    model = make()
    layers = quantised_layers(quantised.model)
    with torch.no_grad():
        for name, layer in layers.items():
            model.get_submodule(name).weight.copy_(layer.weight)
    model.save_pretrained(into)
    found = build(Options(), context(into))
    with torch.no_grad():
        for name, p in found.model.named_parameters():
            if is_factor(name):
                p.copy_(quantised.model.get_parameter(name))
    return found


def moved(engine):
    """Factors B that are not zero."""
    with torch.no_grad():
        for name, p in engine.model.named_parameters():
            if name.endswith(B):
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) * 0.2)
    return engine


@each("kind", (Nf4, Int8))
def test_factors_are_added_without_a_dequantised_weight(folder, kind, monkeypatch):
    def refuse(*_):
        raise AssertionError("a whole weight, for nothing but its dtype")

    monkeypatch.setattr(kind, "dequantised", refuse)
    engine = build(Options(), context(folder, kind.__name__.lower()))
    factors = [p for name, p in engine.model.named_parameters() if is_factor(name)]
    assert factors and {p.dtype for p in factors} == {torch.float32}


@each("kind", ("nf4", "int8"))
def test_it_trains_as_lora_on_the_dequantised_weights(folder, tmp_path, kind):
    ours = moved(build(Options(), context(folder, kind)))
    plain = dequantised(ours, folder, tmp_path / kind)
    assert len(quantised_layers(ours.model)) == 14 and ours.check_packing(share_prefix=True) < 1e-4
    codes = {n: layer.quantised.codes.clone() for n, layer in quantised_layers(ours.model).items()}
    batch = batch_of(samples())
    for _ in range(3):
        found = [e.infer(batch, ("logprobs",))["logprobs"] for e in (ours, plain)]
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
        for e in (ours, plain):
            e.forward_backward(batch, NLL)
        for name, p in plain.model.named_parameters():
            if is_factor(name):
                torch.testing.assert_close(ours.model.get_parameter(name).grad, p.grad, rtol=1e-3, atol=1e-5)
        for e in (ours, plain):
            e.optim_step()
    assert all(torch.equal(layer.quantised.codes, codes[n]) for n, layer in quantised_layers(ours.model).items())
    exact = build(Options(), context(folder)).infer(batch, ("logprobs",))["logprobs"]
    assert (exact - found[0]).abs().max() > 1e-3, "quantising changed the model"


@each("kind", ("nf4", "int8"))
def test_it_publishes_dequantised_weights(folder, tmp_path, kind):
    ours = moved(build(Options(), context(folder, kind)))
    plain = dequantised(ours, folder, tmp_path / kind)
    published, wanted = dict(ours.weights()), dict(plain.weights())
    assert published.keys() == wanted.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(published[name], weight, rtol=1e-6, atol=1e-6)
    parts = {part.name: part.mine() for part in ours.weight_parts()}
    assert all(torch.equal(parts[name], weight) for name, weight in published.items())
    probes = [torch.arange(1, 12).numpy()]
    for dtype in ("float32", "bfloat16"):
        for merged in (True, False):
            own, theirs = (e.own_logprobs(probes, dtype, merged)[0] for e in (ours, plain))
            assert abs(own - theirs).max() < 1e-5, (dtype, merged)
    assert abs(ours.own_logprobs(probes, "float32", merged=False)[0] - own).max() > 1e-5, "bfloat16 rounds"
    names = {name for name in ours.masters if name.endswith(".codes")}
    assert len(names) == 14 and all(ours.masters[n].numel() for n in names), "the base is also known by its codes"


def test_a_state_is_factors_alone_and_roles_share_the_codes(folder, tmp_path):
    ours = build(Options(), context(folder, "nf4"))
    for _ in range(2):
        ours.forward_backward(batch_of(samples()), NLL)
        ours.optim_step()
    ours.save(tmp_path / "state")
    again = build(Options(), context(folder, "nf4"))
    again.load(tmp_path / "state")
    batch = batch_of(samples())
    assert torch.equal(*(e.infer(batch, ("logprobs",))["logprobs"] for e in (ours, again)))
    critic = build_sibling(ours, Options(), replace(context(folder, "nf4"), head="value"))
    mine, theirs = (quantised_layers(e.model) for e in (ours, critic))
    assert {n: x.quantised.codes.data_ptr() for n, x in mine.items()} == {
        n: x.quantised.codes.data_ptr() for n, x in theirs.items()
    }
