"""Weights in blocks of 8 bits for servers that read folders, by doubles of SGLang and TensorRT-LLM (tests/doubles.py).
Their reader here is one of its own: it knows the folder alone, and multiplies block by block."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_contract_doubles as doubles
import test_weight_sync_contract as contract
import torch
from each import matrix
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from verl.errors import Refused
from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.nn.fp8 import as_computed, in_blocks
from verl.rollout import launching, sglang, trtllm
from verl.rollout.base import RolloutContext, ServerPlace
from verl.rollout.client import ServedEngine
from verl.weight_sync import disk
from verl.weight_sync.local import LocalCheckpointEngine
from verl.weight_sync.sender import WeightSender
from verl.wire import FP8

SIZES = {"vocab_size": 61, "hidden_size": 160, "num_hidden_layers": 2, "max_position_embeddings": 512}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
MODELS = {  # 160: a block that is not full
    "dense": lambda: Qwen3Config(**SIZES, **HEADS, intermediate_size=256, tie_word_embeddings=False),
    "experts": lambda: Qwen3MoeConfig(**SIZES, **HEADS, **EXPERTS, tie_word_embeddings=True),
}


def whole(values: Tensor, scales: Tensor) -> Tensor:
    """Multiply each block with its scale."""
    found = values.float()
    assert scales.shape == (-(-values.shape[0] // 128), -(-values.shape[1] // 128)) and scales.dtype == torch.float32
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            found[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] *= scales[i, j]
    return found


def read(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a folder by the names of the model in memory, float32."""
    config = json.loads((folder / "config.json").read_text())
    quantised = config.pop("quantization_config")
    kept = quantised.pop("modules_to_not_convert")
    blocks = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    assert quantised == blocks
    held, plain = load_file(folder / "model.safetensors"), dict[str, Tensor]()
    for name, tensor in held.items():
        if not name.endswith("_scale_inv"):
            scales, module = held.get(f"{name}_scale_inv"), name.removesuffix(".weight")
            assert (tensor.dtype == torch.float8_e4m3fn) == (scales is not None)
            assert tensor.ndim == 1 or (scales is None) == (module in kept), name
            plain[name] = tensor.float() if scales is None else whole(tensor, scales)
    assert len(held) == len(plain) + sum(tensor.dtype == torch.float8_e4m3fn for tensor in held.values())
    with tempfile.TemporaryDirectory() as made:
        (Path(made) / "config.json").write_text(json.dumps(config))
        save_file(plain, Path(made) / "model.safetensors", metadata={"format": "pt"})
        model, report = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return dict(model.state_dict())


class Servers:
    """A trainer whose versions are folders, and a double that reads them."""

    def __init__(self, kind: str, model: str, folder: Path) -> None:
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(MODELS[model]())
        module.save_pretrained(folder / "model")
        (folder / "versions").mkdir()
        self.kind, self.model, self.taken = kind, model, list[dict[str, Tensor]]()
        self.running = doubles.Running(kind, SimpleNamespace(reference=lambda: copy.deepcopy(module)))  # type: ignore[arg-type]
        self.running.double.take = self.take  # type: ignore[method-assign]
        self.trainer = TorchEngine(module, EngineSettings(optim=OptimSpec(lr=0.01, weight_decay=0.0), dtype="float32"))
        self.outlet = disk.DiskOutlet(folder / "versions", folder / "model")

    async def take(self, folder: str, version: int) -> None:
        self.taken.append(read(Path(folder)))
        engine = self.running.engine
        tensors = {n: t for n, t in self.taken[-1].items() if n != "lm_head.weight" or not self.trainer.tied}
        await engine.load_weights(SimpleNamespace(version=version, passes=False, seconds={}, tensors=tensors.items))

    def rollout(self, context: RolloutContext) -> ServedEngine:
        place = ServerPlace(model="none", log=Path(os.devnull), url=self.running.url)
        given = {"place": place, "dtype": torch.bfloat16, "fp8": True}
        return doubles.engine_of(self.kind, self.running, replace(context, **given))

    def world(self, sender: type[WeightSender] = WeightSender) -> contract.World:
        contract.BACKENDS["folders"] = (partial(LocalCheckpointEngine, copies=True), lambda: self.outlet)
        contract.ROLLOUTS["double"] = self.rollout  # type: ignore[assignment]
        probes = contract.PROBES if self.kind == "sglang" else ()
        world = contract.World(self.trainer, "folders", probes=probes, tolerance=None)
        for role in world.group._workers:
            role.publishing.sender = sender(world.outlet, dtype=FP8)
        return world


@pytest.fixture
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Servers]:
    made = Servers(*request.param, tmp_path)
    yield made
    made.running.stop()
    contract.BACKENDS.pop("folders", None)
    contract.ROLLOUTS.pop("double", None)


CASES = [("sglang", "dense"), ("sglang", "experts"), ("trtllm", "experts"), ("trtllm", "dense")]


@matrix("servers", CASES, quick=CASES[1:2], indirect=True)
def test_a_server_multiplies_with_the_blocks_that_the_trainer_made(servers: Servers) -> None:
    async def test() -> None:
        world = servers.world()
        replica = world.rollout("double")
        world.actor.wire_format = form = (await replica.capabilities()).weights
        assert form.fp8 and form.fp8_inputs and form.dtype == "bfloat16"
        told = [note for note in (await replica.capabilities()).notes if "fp8-gemm-backend: triton" in note]
        assert len(told) == (servers.kind == "sglang")
        for version in range(2):
            await world.publish([replica], version)
            masters = dict(world.engine.weights())
            quantised = {name for name, tensor in masters.items() if in_blocks(name, tensor.shape)}
            assert len(quantised) == {"dense": 14, "experts": 12}[servers.model]
            for name, master in masters.items():
                kept = master.bfloat16().float() if master.ndim > 1 and not name.endswith("gate.weight") else master
                expected = as_computed(name, master, torch.float32, fp8=True) if name in quantised else kept
                assert torch.equal(servers.taken[version][name], expected), name
            await world.update()
        await replica.close()

    contract.run(test)


def test_sglang_is_started_with_a_model_of_blocks_and_without_weights() -> None:
    context = RolloutContext(
        hf_config=MODELS["experts"](), max_context_tokens=64, dtype=torch.bfloat16, device="cuda", fp8=True
    )
    words = sglang.serve_command("py", sglang.Options(), context, "/m", 1234)
    given = dict(zip(words, words[1:], strict=False))
    found = json.loads(given["--json-model-override-args"])["quantization_config"]
    kept = ["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    assert found["modules_to_not_convert"] == kept and found["weight_block_size"] == [128, 128]
    assert (given["--load-format"], given["--dtype"]) == ("dummy", "bfloat16")
    plain = sglang.serve_command("py", sglang.Options(), replace(context, fp8=False), "/m", 1234)
    assert not [word for word in plain if "lora" in word]
    assert not {"--json-model-override-args", "--load-format"} & {*plain}


def test_tensorrt_llm_is_refused_before_its_start_where_blocks_have_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = MODELS["experts"]()
    config.moe_intermediate_size = 96
    config.dtype = "bfloat16"
    config.save_pretrained(tmp_path)
    monkeypatch.setattr(launching, "require", lambda *given: None)
    place = ServerPlace(model=str(tmp_path), log=Path(os.devnull), python="py")
    context = RolloutContext(
        hf_config=config, max_context_tokens=64, dtype=torch.bfloat16, device="cuda", fp8=True, place=place
    )
    with pytest.raises(Refused, match=r"gate_proj.weight \[96, 160\]: a server appends another projection"):
        trtllm.build(trtllm.Options(), context)
    assert trtllm.build(trtllm.Options(), replace(context, fp8=False)).version == -1
