"""LoRA of models that read images: factors in the language model, as PEFT has them, in training and in rollouts."""

from __future__ import annotations

import asyncio
import copy
import re
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vision_families
from rollouts import source_of
from safetensors.torch import load_file, save_file
from test_vision_rollout import ENGINES, PROMPTS, made, requests, rows_of
from transformers import AutoModelForImageTextToText
from vision import KINDS, own_logprobs, pictures, rows

from verl.algorithms.losses import nll
from verl.batch import pack
from verl.checkpoint.hf import HfExport
from verl.config.adapter import linear_layers
from verl.config.lora_layers import trained_factors
from verl.config.schema import Config
from verl.config.tree import changed
from verl.errors import Refused
from verl.model_engine.base import EngineContext
from verl.model_engine.lora import LoraLayers, is_factor
from verl.model_engine.lora_source import PolicyFactors
from verl.model_engine.lora_spec import LoraSpec
from verl.model_engine.merging import write_merged
from verl.model_engine.optim import OptimSpec
from verl.model_engine.options import Options as TrainOptions
from verl.model_engine.settings import EngineSettings
from verl.model_engine.sibling import build_sibling
from verl.model_engine.torch_engine import TorchEngine, build
from verl.models.families import family_of
from verl.models.multimodal import with_pictures
from verl.objective import Term, TermValue
from verl.rollout.base import Completion

SPEC = LoraSpec(rank=3, alpha=6.0)
IN_LANGUAGE = re.compile(r"model\.language_model\.layers\.\d+\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj")
"""The linear layers of the language model."""


def engine_of(kind: str, spec: LoraSpec = SPEC, **more: Any) -> TorchEngine:
    """Return an engine with factors that are not zero."""
    settings = EngineSettings(dtype="float32", optim=OptimSpec(lr=0.1, weight_decay=0.0), lora=spec, **more)
    engine = TorchEngine(copy.deepcopy(made(kind)), settings)
    with torch.no_grad():
        for i, (name, p) in enumerate(engine.model.named_parameters()):
            if is_factor(name) and spec.path is None:
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.2)
    return engine


def adapter_of(engine: TorchEngine) -> dict[str, torch.Tensor]:
    assert engine.local.lora is not None
    return dict(engine.local.lora.tensors(dict(engine.model.named_parameters())))


@pytest.mark.parametrize("kind", KINDS)
def test_factors_have_the_logprobs_and_gradients_of_peft(kind: str, reference: Any, tmp_path: Path) -> None:
    """The exported adapter is loaded by PEFT and by training, and its layers are those that a plan counts."""
    peft, base = reference("peft"), tmp_path / "base"
    made(kind).save_pretrained(base)
    engine = engine_of(kind)
    assert {*adapter_of(engine)} and all(map(IN_LANGUAGE.fullmatch, engine.local.lora.parameters.targets))
    planned = trained_factors(changed(Config(), {"model.path": str(base), "model.lora": {"rank": 3}}))
    assert planned is not None and {*planned.layers} == {*engine.local.lora.parameters.targets}
    assert planned.parameters == sum(p.numel() for p in adapter_of(engine).values())
    HfExport(base).write(tmp_path / "hf", engine.snapshot().weights(), engine.exported_set)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(
            AutoModelForImageTextToText.from_pretrained(base), tmp_path / "hf", is_trainable=True
        ).eval()
        regex = peft.LoraConfig(r=3, target_modules=IN_LANGUAGE.pattern.replace("model", ".*", 1))
        whole = peft.get_peft_model(copy.deepcopy(made(kind)), regex)
    assert {n for n, _ in whole.named_parameters() if ".lora_" in n} == {
        n for n, _ in theirs.named_parameters() if ".lora_" in n
    }
    batch = with_pictures(pack(rows()), pictures(), engine.model.config)
    batch = batch.with_columns({"w/loss": torch.ones(batch.num_loss_tokens)})
    out = engine.forward_backward(batch, (Term(name="loss", fn=nll),), extra_outputs=("logprobs",))
    own = [own_logprobs(theirs, row, pictures()) for row in rows()]
    torch.testing.assert_close(out.columns["logprobs"], torch.cat(own).detach(), rtol=0, atol=2e-5)
    (-torch.cat(own).sum()).backward()
    expected = {n.replace(".default.weight", ".weight"): p.grad for n, p in theirs.named_parameters() if ".lora_" in n}
    found = dict(engine.local.lora.tensors({n: p.grad for n, p in engine.model.named_parameters()}))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(found[name] / scale, gradient / scale, rtol=0, atol=5e-5)
    assert {n for n, p in engine.model.named_parameters() if p.grad is not None} == {*engine.local.lora.names}
    before = {n: p.detach().clone() for n, p in engine.model.named_parameters()}
    engine.optim_step()
    changed_names = {n for n, p in engine.model.named_parameters() if not torch.equal(p, before[n])}
    assert changed_names == {*engine.local.lora.names}
    again = engine_of(kind, LoraSpec(path=str(tmp_path / "hf")), base=base)
    torch.testing.assert_close(again.infer(batch, ("logprobs",))["logprobs"], torch.cat(own), rtol=0, atol=2e-5)


@pytest.mark.parametrize("engine", ["compiled", "plain torch", "in pages", "hf"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rollout_computes_factors_beside_the_base_below_images(kind: str, engine: str) -> None:
    trainer = engine_of(kind)
    assert trainer.local.lora is not None
    one = replace(trainer.local.lora.parameters, id="mine")

    async def run() -> tuple[list[Completion], list[Completion]]:
        made_of = ENGINES[engine](kind)
        await made_of.load_weights(source_of(made(kind)))
        made_of._runner.add_set(one, {n: p.detach() for n, p in adapter_of(trainer).items()})
        made_of._core.sets[one.id] = 0
        given = requests(PROMPTS)
        adapted = [replace(request, parameters=one.id) for request in given]
        found = list(await asyncio.gather(*map(made_of.generate, adapted)))
        plain = list(await asyncio.gather(*map(made_of.generate, given)))
        assert (await made_of.capabilities()).lora_rank
        await made_of.close()
        return found, plain

    found, plain = asyncio.run(run())
    batch = with_pictures(pack(rows_of(requests(PROMPTS), found)), pictures(), trainer.model.config)
    gap = (trainer.infer(batch, ("logprobs",))["logprobs"] - batch.columns["rollout_logprobs"]).abs().max()
    assert gap < 1e-5
    with trainer.local.lora.off():
        base = (trainer.infer(batch, ("logprobs",))["logprobs"] - batch.columns["rollout_logprobs"]).abs().max()
    assert base > 0.1, "without the factors it is another policy"
    batch = with_pictures(pack(rows_of(requests(PROMPTS), plain)), pictures(), trainer.model.config)
    with trainer.local.lora.off():
        gap = (trainer.infer(batch, ("logprobs",))["logprobs"] - batch.columns["rollout_logprobs"]).abs().max()
    assert gap < 1e-5
    assert not all(np.array_equal(a.ids, b.ids) for a, b in zip(found, plain))


def whole(kind: str) -> LoraSpec:
    """Return factors beside the projector, which is trained whole."""
    deeper = ["visual.deepstack_merger_list"] if kind == "qwen3_vl" else []
    return replace(SPEC, modules_to_save=["visual.merger", *deeper])


def published(trainer: TorchEngine, version: int, *, with_base: bool) -> Any:
    """Return a version of a policy as a rollout reads it: base, factors and whole modules, or all but the base."""
    source = PolicyFactors(trainer, with_base=with_base)
    return SimpleNamespace(
        **{"version": version, "passes": False, "seconds": {}, "identity": "base" if with_base else ""},
        parameters=replace(source.parameters, base="base"),
        tensors=lambda: ((name, tensor.detach().clone()) for name, tensor in source.weights()),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_projector_that_is_trained_whole_has_the_gradients_of_peft(kind: str, reference: Any, tmp_path: Path) -> None:
    """The folder of the trained adapter has it, PEFT loads it there, and training starts from it."""
    peft, base = reference("peft"), tmp_path / "base"
    made(kind).save_pretrained(base)
    engine = engine_of(kind, whole(kind))
    saved = {name for name, _ in engine.model.named_parameters() if "merger" in name}
    planned = trained_factors(
        changed(
            Config(),
            {"model.path": str(base), "model.lora": {"rank": 3, "modules_to_save": whole(kind).modules_to_save}},
        )
    )
    assert planned is not None and {*planned.saved} == {*engine.local.lora.parameters.replaced} == saved
    HfExport(base).write(tmp_path / "hf", engine.snapshot().weights(), engine.exported_set)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(
            AutoModelForImageTextToText.from_pretrained(base), tmp_path / "hf", is_trainable=True
        ).eval()
    batch = with_pictures(pack(rows()), pictures(), engine.model.config)
    batch = batch.with_columns({"w/loss": torch.ones(batch.num_loss_tokens)})
    start = engine.infer(batch, ("logprobs",), start=True)["logprobs"]
    out = engine.forward_backward(batch, (Term(name="loss", fn=nll),), extra_outputs=("logprobs",))
    own = torch.cat([own_logprobs(theirs, row, pictures()) for row in rows()])
    torch.testing.assert_close(out.columns["logprobs"], own.detach(), rtol=0, atol=2e-5)
    (-own.sum()).backward()
    expected = {n.replace(".modules_to_save.default", ""): p.grad for n, p in theirs.named_parameters()}
    for name in saved:
        gradient, found = expected[f"base_model.model.{name}"], engine.model.get_parameter(name).grad
        scale = float(gradient.abs().max())
        assert scale > 0
        torch.testing.assert_close(found / scale, gradient / scale, rtol=0, atol=5e-5)
    before = {n: p.detach().clone() for n, p in engine.model.named_parameters()}
    engine.optim_step()
    names = {n for n, p in engine.model.named_parameters() if not torch.equal(p, before[n])}
    assert names == {*engine.local.lora.names} | saved
    assert torch.equal(engine.infer(batch, ("logprobs",), start=True)["logprobs"], start), "the reference stays"
    after = engine.infer(batch, ("logprobs",))["logprobs"]
    HfExport(base).write(tmp_path / "later", engine.snapshot().weights(), engine.exported_set)
    (tmp_path / "later" / "tokenizer_config.json").write_text("{}")
    write_merged(tmp_path / "later", tmp_path / "merged", "float32")
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")
    plain = TorchEngine(merged, EngineSettings(dtype="float32", optim=None))
    for e in (engine_of(kind, LoraSpec(path=str(tmp_path / "later")), base=base), plain):
        torch.testing.assert_close(e.infer(batch, ("logprobs",))["logprobs"], after, rtol=0, atol=2e-5)


@pytest.mark.parametrize("engine", ["compiled", "in pages", "hf"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_publish_without_the_base_has_a_projector_that_is_trained_whole(kind: str, engine: str) -> None:
    """Images that the rollout has encoded are encoded again, with the new projector."""
    trainer = engine_of(kind, whole(kind))
    batch = with_pictures(pack(rows()), pictures(), trainer.model.config)
    batch = batch.with_columns({"w/loss": torch.ones(batch.num_loss_tokens)})

    async def run() -> list[float]:
        made_of, gaps = ENGINES[engine](kind), list[float]()
        before: Any = None
        for version in range(3):
            await made_of.load_weights(published(trainer, version, with_base=version == 0))
            found = list(await asyncio.gather(*map(made_of.generate, requests(PROMPTS))))
            seen = with_pictures(pack(rows_of(requests(PROMPTS), found)), pictures(), trainer.model.config)
            mine = trainer.infer(seen, ("logprobs",))["logprobs"]
            gaps.append(float((mine - seen.columns["rollout_logprobs"]).abs().max()))
            if before is not None:
                now = {name: trainer.model.get_parameter(name) for name in before}
                kept = {name: p.detach().clone() for name, p in now.items()}
                with torch.no_grad():
                    for name, p in now.items():
                        p.copy_(before[name])
                    stale = trainer.infer(seen, ("logprobs",))["logprobs"]
                    for name, p in now.items():
                        p.copy_(kept[name])
                assert (stale - mine).abs().max() > 1e-2, "with the projector of before it is another policy"
            assert trainer.local.lora is not None
            saved = trainer.local.lora.parameters.replaced
            before = {name: trainer.model.get_parameter(name).detach().clone() for name in saved}
            trainer.forward_backward(batch, (Term(name="loss", fn=nll),))
            trainer.optim_step()
        await made_of.close()
        return gaps

    gaps = asyncio.run(run())
    assert max(gaps) < 1e-5, gaps


@pytest.mark.parametrize("kind", KINDS)
def test_a_critic_on_the_base_has_a_projector_of_its_own(kind: str, tmp_path: Path) -> None:
    """It computes what a critic with all weights of its own does, and trains no weight of the policy."""
    made(kind).save_pretrained(tmp_path)
    given: dict[str, Any] = {"folder": tmp_path, "lora": whole(kind), "optim": OptimSpec(lr=1e-2), "dtype": "float32"}
    policy = build(TrainOptions(), EngineContext(**given))
    critic = build_sibling(policy, TrainOptions(), EngineContext(**given, head="value"))
    alone = build(TrainOptions(), EngineContext(**given, head="value"))
    batch = with_pictures(pack(rows()), pictures(), policy.model.config)
    batch = batch.with_columns({"w/loss": torch.ones(batch.num_loss_tokens)})
    away = Term(name="loss", fn=lambda c: TermValue((c["values"] - 1) ** 2), outputs=("values",))
    for _ in range(2):
        before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
        for e in (critic, alone):
            e.forward_backward(batch, (away,))
            e.optim_step()
        assert all(torch.equal(p, before[name]) for name, p in policy.model.named_parameters())
        policy.forward_backward(batch, (Term(name="loss", fn=nll),))
        policy.optim_step()
        values = [e.infer(batch, ("values",))["values"] for e in (critic, alone)]
        assert torch.equal(*values) and values[0].abs().max() > 0
    own = dict(critic.model.named_parameters())
    mine = {name for name, p in policy.model.named_parameters() if name in own and own[name].data_ptr() != p.data_ptr()}
    assert {name for name in mine if not is_factor(name)} == {name for name in own if "merger" in name}


def test_a_projector_that_is_trained_whole_may_have_a_rate_of_its_own() -> None:
    optim = OptimSpec(lr=1e-3, options={"lr": {"projector": 1e-4}})
    engine = TorchEngine(
        copy.deepcopy(made("qwen2_5_vl")), EngineSettings(dtype="float32", optim=optim, lora=whole("qwen2_5_vl"))
    )
    rates = {id(p): group["lr"] * group["lr_scale"] for group in engine.optimizer.param_groups for p in group["params"]}
    named = {id(p): name for name, p in engine.model.named_parameters()}
    assert {named[key]: rate for key, rate in rates.items()} == {
        name: pytest.approx(1e-4 if ".merger." in name else 1e-3)
        for name, p in engine.model.named_parameters()
        if p.requires_grad
    }


def test_layers_of_the_tower_get_no_factors() -> None:
    with pytest.raises(Refused, match="targets=qkv: no linear layer of Qwen2_5_VL.* has this name"):
        engine_of("qwen2_5_vl", LoraSpec(rank=2, targets=["qkv"]))


@pytest.mark.parametrize("kind", vision_families.KINDS)
def test_the_headers_of_a_folder_have_the_layers_of_the_model(kind: str, tmp_path: Path) -> None:
    """Folders of some families have the names of an older version, and Kimi's those of Moonshot."""
    model = vision_families.model(kind)
    model.save_pretrained(tmp_path)
    if kind == "kimi_k25":
        path = tmp_path / "model.safetensors"
        save_file({vision_families.published(name): t for name, t in load_file(path).items()}, path, {"format": "pt"})
    family = family_of(model.config)
    assert family is not None
    modules = {name for name, _ in model.base_model.named_modules()}
    spec = LoraSpec(rank=2, modules_to_save=[name for name in family.projector if name in modules])
    found = LoraLayers(model, spec).parameters
    assert {*linear_layers(tmp_path)} == {*found.targets} and not any("vis" in name for name in found.targets)
    given = {"model.path": str(tmp_path), "model.lora": {"rank": 2, "modules_to_save": spec.modules_to_save}}
    planned = trained_factors(changed(Config(), given))
    assert planned is not None and planned.saved
    if kind != "kimi_k25":  # whose folders have other names for the parts of its projector
        assert {*planned.saved} == {*found.replaced}
    assert {family.part_of(name) for name in found.replaced} == {"projector"}
