"""Answers of models with gated delta nets: the hf engine samples from the distribution that the trainer computes."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hybrid import KINDS, model
from rollouts import context_of, source_of

from verl.batch import pack
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.rollout.base import Completion, GenerateRequest
from verl.rollout.native.engine import build
from verl.rollout.native.options import Options
from verl.types import Sample, Sampling, Segment

PROMPTS = [np.random.default_rng(i).integers(3, 60, n) for i, n in enumerate((5, 70, 1, 12, 2))]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sampled_has_the_logprobs_of_the_trainer(kind: str) -> None:
    """Groups, rows of unlike length, and rows that end before others; a second version of the weights."""
    made, other = model(kind), model(kind, initializer_range=0.15)
    engine: Any = build(Options(), context_of(made.config, max_context_tokens=128))
    given = [(i, prompt, member) for i, prompt in enumerate(PROMPTS) for member in range(2)]

    def request(i: int, prompt: np.ndarray, member: int) -> GenerateRequest:
        tokens = 14 - 3 * ((i + member) % 4)
        sampling = Sampling(max_tokens=tokens, temperature=0.9, seed=7 * i + member, ignore_eos=True)
        return GenerateRequest(f"{i}.{member}", prompt, sampling)

    async def main() -> list[list[Completion]]:
        out = []
        assert any("the hf engine is used" in note for note in (await engine.capabilities()).notes)
        for weights in (made, other):
            await engine.load_weights(source_of(weights, len(out)))
            out.append(await asyncio.gather(*(engine.generate(request(*one)) for one in given)))
        await engine.sleep()
        await engine.close()
        return out

    for weights, found in zip((made, other), asyncio.run(main()), strict=True):
        samples = [
            Sample(
                sample_id=f"{i}.{member}",
                trajectory_id=f"{i}.{member}",
                group_id=str(i),
                purpose="train",
                temperature=0.9,
                segments=(
                    Segment(ids=prompt, source="prompt"),
                    Segment(ids=c.ids, source="sampled", logprobs=c.logprobs, version=0),
                ),
            )
            for (i, prompt, member), c in zip(given, found, strict=True)
        ]
        batch = pack(samples)
        own = TorchEngine(weights, EngineSettings(dtype="float32")).infer(batch, ("logprobs",))["logprobs"]
        assert (own - batch.columns["rollout_logprobs"]).abs().max() < 1e-5
