"""Weights in blocks of 8 bits in a real vLLM on a CPU, whose products are emulated (emulated_fp8.py): its model of our
`quantization_config`, and the reload of its layers with our blocks."""

from __future__ import annotations

import asyncio
import shutil
import stat
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from real_server import PYTHON, module_at
from small_runs import metrics_of, small_run
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.models import tiny
from verl.nn.fp8 import SCALES, in_blocks, quantise
from verl.recipes import arithmetic
from verl.rollout import vllm
from verl.rollout.base import RolloutContext, ServerPlace
from verl.weight_sync.base import checksum

SIZES = {"vocab_size": 64, "hidden_size": 256, "num_hidden_layers": 3, "intermediate_size": 512}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 512}

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
MODELS = {
    "dense": lambda: Qwen3Config(**SIZES, **HEADS, tie_word_embeddings=False),
    "experts": lambda: Qwen3MoeConfig(**SIZES, **HEADS, **EXPERTS, tie_word_embeddings=False),
}


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


@pytest.fixture(params=["dense", "experts"])
def sync(request: pytest.FixtureRequest, python: str, tmp_path: Path) -> ModuleType:
    found = module_at("test_weight_sync_contract.py", "sync_contract_of_fp8")
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(MODELS[request.param]())
    module.save_pretrained(tmp_path / "model")

    def trainer(cls: type[TorchEngine] = TorchEngine) -> TorchEngine:
        return cls(module, EngineSettings(optim=OptimSpec(lr=0.01, weight_decay=0.0), dtype="float32"))

    def rollout(context: RolloutContext, processes: int = 1) -> Any:
        place = ServerPlace(model=str(tmp_path / "model"), log=tmp_path / "vllm.log", python=python)
        options = vllm.Options(threads=1, tensor_parallel_size=processes)
        return vllm.build(options, replace(context, place=place, dtype=torch.bfloat16, fp8=True))

    found.trainer = trainer  # type: ignore[attr-defined]
    found.ROLLOUTS |= {"vllm": rollout, "vllm of two processes": partial(rollout, processes=2)}
    return found


JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
STACKED = {"experts.w13_weight": "experts.gate_up_proj", "experts.w2_weight": "experts.down_proj"}


def joined(name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a parameter of vLLM's model from ours, some of which it joins by their rows."""
    name = name.replace("routed_experts.", "")
    for theirs, ours in STACKED.items():
        name = name.replace(theirs, ours)
    whole = next((whole for whole in JOINED if whole in name and name not in tensors), None)
    if whole is None:
        return tensors[name]
    return torch.cat([tensors[name.replace(whole, part)].view(torch.uint8) for part in JOINED[whole]])


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
            assert sum(name.endswith(SCALES) for name in held) == 4 * 3, "of both products of attention, and after it"
            packed = {name for name in held if name.endswith("mlp.gate.weight")}  # for the CPU, in another tensor
            assert {name: checksum(joined(name, ours)) for name in held.keys() - packed} == {
                name: found for name, found in held.items() if name not in packed
            }
            await world.update()
        await replica.close()

    asyncio.run(asyncio.wait_for(test(), 600))


@pytest.mark.full("one process and whole versions, above; the parts of a layer are cut by vLLM")
def test_two_processes_read_blocks_from_buckets(sync: ModuleType) -> None:
    async def test() -> None:
        world = sync.fp8_world("shm, buckets")
        replica = world.rollout("vllm of two processes")
        world.actor.wire_format = (await replica.capabilities()).weights
        for version in range(2):
            report = await world.publish([replica], version)
            assert report.verified_tensors == report.num_tensors and 0 < report.canary_mean_abs < 0.5
            await world.update()
        await replica.close()

    asyncio.run(asyncio.wait_for(test(), 600))


def test_a_run_corrects_what_was_sampled_with_blocks(python: str, tmp_path: Path, arithmetic_data: list[Path]) -> None:
    """Truncated importance weights are the default, the canary is on, and each step publishes."""
    tokenizer = tiny.character_tokenizer(arithmetic.CHARACTERS)
    module = tiny.qwen3(tokenizer, hidden=128, layers=2, heads=1, kv_heads=1, ffn=128, seed=1)
    model = tiny.save(module, tokenizer, tmp_path / "model")
    served = ("rollout.engine=vllm", f"rollout.python={python}", "rollout.dtype=fp8", "run.wait_timeout_s=600")
    small_run(tmp_path, model, arithmetic_data[:1], *served, "sync.canary=true", "run.total_steps=2")
    for step in (1, 2):
        found = metrics_of(tmp_path / "r")[step]
        assert 0 < found["sync/canary_mean_abs"] < 0.1 and found["sync/version"] == step
        assert found["rollout_corr/rollout_is_min"] < 1 < found["rollout_corr/rollout_is_max"]
        assert 1e-6 < found["rollout_corr/k3_kl"] < 1e-2, "the rounding of blocks, and no more"
