"""Answers of models with gated delta nets: the native engine samples from the distribution that the trainer computes,
and no row sees the state of another one."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from hybrid import KINDS, model
from rollouts import context_of, finish, native_core, source_of

from verl.batch import pack
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.rollout.base import Completion, GenerateRequest
from verl.rollout.embedded.core import EngineCore
from verl.rollout.embedded.requests import ActiveRequest
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
        assert not (await engine.capabilities()).notes, "the hf engine is not used"
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


def core_of(kind: str, **options: Any) -> EngineCore:
    made = model(kind)
    return native_core(made.config, source_of(made), **options)


def asked(name: str, ids: np.ndarray, tokens: int = 8) -> ActiveRequest:
    return ActiveRequest(GenerateRequest(name, ids, Sampling(max_tokens=tokens, seed=len(ids), ignore_eos=True)))


def same(one: Completion, other: Completion, atol: float = 0.0) -> None:
    assert one.ids.tolist() == other.ids.tolist()
    np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=atol)


def test_a_prompt_is_computed_once_and_the_next_turn_begins_at_its_end() -> None:
    core, text = core_of("qwen3_next"), np.random.default_rng(9).integers(3, 60, 70)
    first = finish(core, (asked(f"{n}", text) for n in range(4)))
    assert (
        core.runner.stats()["prefill_tokens"] == 70 and [first[str(n)].cached_tokens for n in range(4)][1:] == [70] * 3
    )
    turn = np.concatenate([text, first["0"].ids, np.array([5, 6])])
    before = core.runner.stats()["prefill_tokens"]
    second = finish(core, [asked("s", turn)])["s"]
    assert core.runner.stats()["prefill_tokens"] - before == 10 and second.cached_tokens == 70
    same(second, finish(core_of("qwen3_next", prefix_cache_tokens=0), [asked("s", turn)])["s"], atol=1e-5)
    # states are those after a whole prompt, so another one with the same beginning is computed whole
    other = np.concatenate([text[:66], turn[:5]])
    assert finish(core, [asked("o", other)])["o"].cached_tokens == 0


def test_states_have_room_in_the_store_as_the_tokens_that_are_as_large() -> None:
    """One layer of attention with 32 float32 for each token, and two nets with 3 x 56 + 4 x 8 x 6."""
    core = core_of("qwen3_next", prefix_cache_tokens=80)
    finish(core, (asked(str(n), np.arange(3, 23 + n)) for n in range(9)))
    stats = core.runner.stats()
    tokens = -(-2 * 4 * (3 * 56 + 4 * 8 * 6) // (32 * 4))
    assert stats["prefix_tokens"] == tokens + 28 and stats["prefix_bytes"] <= 80 * 32 * 4 + 32 * 4


@pytest.mark.parametrize("compiled", [True, False])
def test_a_row_has_the_same_bits_alone_and_beside_poisoned_rows(compiled: bool) -> None:
    """The other row has huge states and keys, and ends first: the row then moves into its place."""
    alone = finish(core_of("qwen3_5_moe_text", deterministic=True, compiled=compiled), [asked("x", PROMPTS[1], 12)])[
        "x"
    ]
    core = core_of("qwen3_5_moe_text", deterministic=True, compiled=compiled)
    core.add(asked("a", PROMPTS[0], 4))
    core.add(asked("x", PROMPTS[1], 12))
    while core.running.n < 2:  # a deterministic pass computes one prompt
        core.step()
    cache = core.runner._cache  # type: ignore[attr-defined]
    for tensor, huge in ((cache.states.windows[:, 0], 1e4), (cache.states.sums[:, 0], 1e20), (cache.kv[:, :, 0], 1e4)):
        with torch.inference_mode():
            tensor.copy_(huge * torch.randn_like(tensor))
    same(finish(core)["x"], alone)
    # its place is used again by the next request
    same(finish(core, [asked("x", PROMPTS[1], 12)])["x"], alone)


def test_prompts_in_passes_and_by_lanes_have_the_logprobs_of_one_pass() -> None:
    prompts = {f"{i}": ids for i, ids in enumerate(PROMPTS)}
    whole = finish(core_of("qwen3_5_text"), (asked(name, ids) for name, ids in prompts.items()))
    parts = finish(core_of("qwen3_5_text", max_prefill_tokens=7, lanes=2), (asked(n, i) for n, i in prompts.items()))
    for name, one in whole.items():
        same(parts[name], one, atol=1e-5)


def test_a_row_continues_when_its_states_are_copied_to_more_slots() -> None:
    """More requests come than there are slots."""
    alone = finish(core_of("qwen3_next"), [asked("x", PROMPTS[1], 24)])["x"]
    core = core_of("qwen3_next")
    core.add(asked("x", PROMPTS[1], 24))
    while core.running.n < 1:
        core.step()
    core.step()
    slots = core.runner._cache._slots  # type: ignore[attr-defined]
    others = [asked(f"{i}", PROMPTS[i % 3], 6) for i in range(3 * slots)]
    found = finish(core, others)
    assert core.runner._cache._slots > slots, "its states were copied"  # type: ignore[attr-defined]
    same(found["x"], alone, atol=1e-5)
