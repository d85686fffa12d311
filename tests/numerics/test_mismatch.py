"""The log-probs of the rollout and of the trainer, of the same tokens by the same weights: how far they are apart."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from rollouts import context_of, finish, source_of
from test_rollout_numerics import CONFIGS, reference

from verl.batch import pack
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.rollout.base import GenerateRequest
from verl.rollout.embedded.core import EngineCore
from verl.rollout.embedded.requests import ActiveRequest
from verl.rollout.native.options import Options
from verl.rollout.native.runner import NativeRunner
from verl.types import Sample, Sampling, Segment


def sampled(name: str, module: Any, dtype: torch.dtype, emulate: bool | None) -> list[Sample]:
    """24 answers of 32 tokens by the native engine with run.deterministic=true."""
    context = context_of(CONFIGS[name], 8, dtype=dtype, deterministic=True)
    core = EngineCore(NativeRunner(Options(), context, lanes=1, emulate_bf16=emulate), (), None)
    core.load(source_of(module))
    prompts = {str(i): np.random.default_rng(i).integers(0, 67, 3 + i) for i in range(24)}
    asked = [ActiveRequest(GenerateRequest(n, p, Sampling(max_tokens=32, seed=int(n)))) for n, p in prompts.items()]
    done = finish(core, asked)
    return [
        Sample(
            sample_id=n,
            trajectory_id=n,
            group_id=n,
            purpose="train",
            segments=(
                Segment(ids=p, source="prompt"),
                Segment(ids=done[n].ids, source="sampled", logprobs=done[n].logprobs, version=0),
            ),
        )
        for n, p in prompts.items()
    ]


def gap(name: str, dtype: str, emulate: bool | None = None) -> tuple[float, float, float]:
    """Return the k3 KL per token, the largest difference, and the share of tokens whose log-prob has the same bits."""
    kind: torch.dtype = getattr(torch, dtype)
    module = reference(copy.deepcopy(CONFIGS[name]))  # the trainer changes its model's configuration
    rows = sampled(name, copy.deepcopy(module).to(kind), kind, emulate)
    e = TorchEngine(module, EngineSettings(dtype=dtype, emulate_bf16=emulate))
    ours = e.infer(pack(rows), ("logprobs",))["logprobs"].float().numpy()
    theirs = np.concatenate([row.segments[1].logprobs for row in rows]).astype(np.float32)
    apart = ours.astype(np.float64) - theirs
    assert len(apart) > 500 and np.std(ours) > 0.3, "the distributions are far from uniform"
    return float(np.mean(np.expm1(apart) - apart)), float(np.abs(apart).max()), float(np.mean(ours == theirs))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_rollout_and_trainer_are_as_near_as_their_arithmetic(name: str) -> None:
    """In float32, and in bfloat16 on a CPU that computes it in float32, the order of sums alone differs: a quarter of
    the tokens have the same bits. In bfloat16 arithmetic each result is rounded, to one part in 256."""
    for dtype in ("float32", "bfloat16"):
        kl, largest, same = gap(name, dtype, emulate=True)
        assert kl < 1e-11 and largest < 1e-5 and same > 0.1, (dtype, kl, largest, same)
    kl, largest, _ = gap(name, "bfloat16", emulate=False)
    assert 1e-7 < kl < 2e-4 and largest < 0.2, (kl, largest)
