"""LoRA of models that read images: factors in the language model, as PEFT has them, in training and in rollouts."""

from __future__ import annotations

import asyncio
import copy
import re
import warnings
from dataclasses import replace
from pathlib import Path
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
from verl.model_engine.lora import LoraLayers, is_factor
from verl.model_engine.lora_spec import LoraSpec
from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.models.multimodal import with_pictures
from verl.objective import Term
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
    targets = LoraLayers(model, LoraSpec(rank=2)).parameters.targets
    assert {*linear_layers(tmp_path)} == {*targets} and not any("vis" in name for name in targets)
