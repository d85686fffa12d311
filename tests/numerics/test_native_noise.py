"""Exploration noise of the native engine against transformers with the same noise on the weights of its norms."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from each import check_each, matrix
from on_device import close_to
from rollouts import context_of, finish, source_of
from test_native_sets import WAYS, lora
from test_rollout_numerics import CONFIGS, PROMPTS, engine, logprobs_of, reference
from torch import nn

from verl.errors import Refused
from verl.nn.lora import low_ranks, with_low_ranks
from verl.parameter_set import POLICY_SET
from verl.rollout.base import GenerateRequest, check_inputs
from verl.rollout.embedded.core import EngineCore
from verl.rollout.embedded.requests import ActiveRequest
from verl.rollout.native import engine as native_engine
from verl.rollout.native import paged
from verl.rollout.native.options import Options
from verl.rollout.noise import NoiseSchedule
from verl.types import NOISE_SIDE, Sampling

NOISE = NoiseSchedule(seed=7, sigma_start=0.2, sigma_end=0.05, stages=3, steps=6, sync_every=1)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "PAGE", 16)
    monkeypatch.setattr(paged, "BUCKETS", (1, 2, 4))


def asked(name: str, noise: bool, parameters: str = POLICY_SET.id, tokens: int = 8) -> list[ActiveRequest]:
    """Two requests for each prompt, which end at other times."""
    return [
        ActiveRequest(
            GenerateRequest(
                f"{i}/{j}/{name}",
                prompt,
                Sampling(max_tokens=tokens + 5 * j, seed=i, noise=noise),
                parameters=parameters,
            )
        )
        for j in range(2)
        for i, prompt in enumerate(PROMPTS)
    ]


@contextmanager
def noisy(module: nn.Module, version: int, schedule: NoiseSchedule = NOISE) -> Iterator[None]:
    """Transformers' model with the noise of a version on the norms before attention and feed-forward."""
    gemma = "pre_feedforward_layernorm" in "".join(n for n, _ in module.named_parameters())
    ends = ("input_layernorm", "pre_feedforward_layernorm" if gemma else "post_attention_layernorm")
    norms = {
        n.removesuffix(".weight"): p for n, p in module.named_parameters() if n.removesuffix(".weight").endswith(ends)
    }
    before = {name: p.data.clone() for name, p in norms.items()}
    for name, p in norms.items():
        p.data += torch.from_numpy(schedule.drawn(version, name, len(p))).to(p)
    yield
    for name, p in norms.items():
        p.data = before[name]


def assert_exact(done: Any, module: nn.Module, prompts: Sequence[np.ndarray] = PROMPTS) -> None:
    for key, one in done.items():
        expected = logprobs_of(module, prompts[int(key.split("/")[0])], one.ids, 1.0)
        np.testing.assert_allclose(one.logprobs, expected, atol=close_to(1e-5), rtol=1e-5, err_msg=key)


def scored(core: EngineCore) -> np.ndarray:
    return core.runner.score(PROMPTS[1], 1.0).logprobs


FAMILIES = "qwen3 bias", "gemma2", "gemma3", "qwen3 moe"


@pytest.mark.on_device
@matrix("way", WAYS, quick=("compiled", "pages"))
def test_answers_under_noise_are_those_of_transformers_with_it(way: str) -> None:
    """Those asked without noise beside them have none, and scores, by which a publish is verified, have none."""

    def check(name: str) -> None:
        module = reference(CONFIGS[name])
        core = engine(CONFIGS[name], module, **{"prefix_cache_tokens": 4096, "noise": NOISE, **WAYS[way]})
        clean = logprobs_of(module, PROMPTS[1][:1], PROMPTS[1][1:], 1.0)
        for version in (0, 5):
            core.load(source_of(module, version))
            done = finish(core, [*asked("noisy", True), *asked("plain", False), *asked("again", True)])
            np.testing.assert_allclose(scored(core), clean, atol=close_to(1e-5), rtol=1e-5)
            assert_exact({key: one for key, one in done.items() if "plain" in key}, module)
            with noisy(module, version):
                assert_exact({key: one for key, one in done.items() if "plain" not in key}, module)
            for key, one in done.items():
                assert (NOISE_SIDE in one.side) == ("plain" not in key)
                sigmas = one.side.get(NOISE_SIDE, np.zeros(0, np.float32))
                assert sigmas.tolist() == [np.float32((0.2, 0.05)[version // 5])] * len(sigmas)

    check_each(FAMILIES, check)


def test_a_request_that_goes_on_in_a_new_version_has_the_noise_of_each() -> None:
    module = reference(CONFIGS["qwen3"])
    core = engine(CONFIGS["qwen3"], module, noise=NOISE)
    core.add(ActiveRequest(GenerateRequest("0", PROMPTS[0], Sampling(max_tokens=12, ignore_eos=True, noise=True))))
    for _ in range(4):
        core.step()
    core.load(source_of(module, 4))
    assert scored(core).tolist() == scored(engine(CONFIGS["qwen3"], module)).tolist(), "in the middle of a request"
    (one,) = finish(core).values()
    assert [(v, n) for v, n, _ in one.spans] == [(0, 0), (4, one.spans[1][1])]
    expected = [NOISE.sigma_of(v) for v, start, end in one.spans for _ in range(start, end)]
    np.testing.assert_allclose(one.side[NOISE_SIDE], expected, rtol=1e-6)


def test_the_noise_is_drawn_anew_when_the_factors_alone_are_published_and_other_sets_have_none() -> None:
    module = reference(CONFIGS["qwen3"])
    core = engine(CONFIGS["qwen3"], module, noise=NOISE)
    core.identity = "x"
    one, tensors = lora(module, POLICY_SET.id, 4, 2.0, seed=1)
    factors = low_ranks(one, tensors, module)
    for version in (2, 3):
        source = source_of(module, version)
        source.parameters, source.identity, source.tensors = one, "", tensors.items
        core.load(source)
        done = finish(core, asked("policy", True, tokens=4))
        with noisy(module, version), with_low_ranks(module, factors, one.scale):
            assert_exact(done, module)
    other, more = lora(module, "other", 2, 1.0, seed=2)
    core.runner.add_set(other, more)  # type: ignore[attr-defined]
    core.sets["other"] = 0
    done = finish(core, asked("other", True, parameters="other", tokens=4))
    with with_low_ranks(module, low_ranks(other, more, module), other.scale):
        assert_exact(done, module)
    assert not any(one.side for one in done.values())


def test_replicas_have_the_same_noise_and_other_versions_and_runs_have_another() -> None:
    module = reference(CONFIGS["qwen3"])

    def answers(version: int, schedule: NoiseSchedule = NOISE) -> list[list[float]]:
        core = engine(CONFIGS["qwen3"], module, noise=schedule)
        core.load(source_of(module, version))
        return [one.logprobs.tolist() for one in finish(core, asked("a", True)).values()]

    assert answers(1) == answers(1) != answers(0)
    assert answers(1, replace(NOISE, seed=8)) != answers(1)


def test_sigma_falls_exponentially_from_stage_to_stage() -> None:
    assert [round(NOISE.sigma_of(v), 6) for v in range(9)] == [0.2, 0.2, 0.1, 0.1, *[0.05] * 5]
    sparse = replace(NOISE, sync_every=2)
    assert [round(sparse.sigma_of(v), 6) for v in range(4)] == [0.2, 0.1, 0.05, 0.05]
    assert replace(NOISE, stages=1).sigma_of(5) == 0.2
    drawn = NOISE.drawn(2, "a", 100_000)
    assert abs(drawn.std() / 0.1 - 1) < 0.01 and abs(drawn.mean()) < 0.002
    assert np.array_equal(drawn, NOISE.drawn(2, "a", 100_000)) and not np.array_equal(
        drawn, NOISE.drawn(2, "b", 100_000)
    )


def test_engines_without_noise_refuse_it() -> None:
    config = CONFIGS["qwen3"]
    unknown = type(config).from_dict({**config.to_dict(), "model_type": "unheard"})
    with pytest.raises(Refused, match=r"rollout\.engine_options\.noise_sigma_start: no other engine has noise, and "):
        native_engine.build(Options(), context_of(unknown, noise=NOISE))
    able = asyncio.run(native_engine.build(Options(), context_of(config)).capabilities())
    with pytest.raises(ValueError, match="r: noise=True, but this rollout engine has no exploration noise"):
        check_inputs(able, "r", POLICY_SET.id, (), noise=True)
