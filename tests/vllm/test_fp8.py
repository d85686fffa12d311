"""Weights in blocks of 8 bits in a real vLLM on a CPU, whose products are emulated (emulated_fp8.py): its model of our
`quantization_config`, and the reload of its layers with our blocks."""

from __future__ import annotations

import asyncio
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from real_server import PYTHON, module_at
from transformers import AutoModelForCausalLM, Qwen3Config

from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.nn.fp8 import SCALES, in_blocks, quantise
from verl.rollout import vllm
from verl.rollout.base import RolloutContext, ServerPlace
from verl.weight_sync.base import checksum

SIZES = {"vocab_size": 64, "hidden_size": 256, "num_hidden_layers": 3, "intermediate_size": 384}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "max_position_embeddings": 512}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return an interpreter of vLLM's environment in which the plugin is installed."""
    folder = tmp_path_factory.mktemp("emulated")
    shutil.copy(Path(__file__).with_name("emulated_fp8.py"), folder)
    (made := folder / "emulated_fp8-1.dist-info").mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: emulated-fp8\nVersion: 1\n")
    (made / "entry_points.txt").write_text("[vllm.general_plugins]\nemulated_fp8 = emulated_fp8:register\n")
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}:$PYTHONPATH" exec {PYTHON} "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def sync(python: str, tmp_path: Path) -> ModuleType:
    found = module_at("test_weight_sync_contract.py", "sync_contract_of_fp8")
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES, **HEADS, tie_word_embeddings=False))
    module.save_pretrained(tmp_path / "model")

    def trainer(cls: type[TorchEngine] = TorchEngine) -> TorchEngine:
        return cls(module, EngineSettings(optim=OptimSpec(lr=0.01, weight_decay=0.0), dtype="float32"))

    def rollout(context: RolloutContext) -> Any:
        place = ServerPlace(model=str(tmp_path / "model"), log=tmp_path / "vllm.log", python=python)
        return vllm.build(vllm.Options(threads=1), replace(context, place=place, dtype=torch.bfloat16, fp8=True))

    found.trainer = trainer  # type: ignore[attr-defined]
    found.ROLLOUTS["vllm"] = rollout
    return found


def joined(name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a parameter of vLLM's model, from ours, some of which it joins by their rows."""
    for whole, parts in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
        if whole in name:
            return torch.cat([tensors[name.replace(whole, part)].view(torch.uint8) for part in parts])
    return tensors[name]


def test_vllm_computes_with_our_blocks(sync: ModuleType) -> None:
    """Its parameters are byte for byte those that quantising the trainer's weights gives, in each version."""

    async def test() -> None:
        world = sync.fp8_world("shm")
        replica = world.rollout("vllm")
        world.actor.wire_format = form = (await replica.capabilities()).weights
        assert form.fp8 and form.fp8_inputs
        for version in range(3):
            report = await world.publish([replica], version)
            masters = {name: tensor.detach() for name, tensor in world.engine.weights()}
            ours = {n: t.bfloat16() if t.dtype == torch.float32 and t.ndim > 1 else t for n, t in masters.items()}
            ours |= {n: t.bfloat16() for n, t in masters.items() if t.ndim == 1}
            for name, tensor in masters.items():
                if in_blocks(name, tensor.shape):
                    ours[name], ours[name + SCALES] = quantise(tensor)
            assert report.verified_tensors == len(ours) and 0 < report.canary_mean_abs < 0.5
            (held,) = (await replica.connection.call("/collective_rpc", {"method": "held"}))["results"]
            assert {name for name in held if name.endswith(SCALES)} and len(held) == len(ours) - 9 * 2
            assert {name: checksum(joined(name, ours)) for name in held} == held
            await world.update()
        await replica.close()

    asyncio.run(asyncio.wait_for(test(), 600))
