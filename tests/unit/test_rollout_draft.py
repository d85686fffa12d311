"""Guessed tokens: the same tokens and log-probs as without, in fewer steps where text repeats itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from families import GEMMA2, GPT2, QWEN3, VOCAB
from transformers import AutoModelForCausalLM

from verl.rollout.base import Completion
from verl.rollout.native.core import EngineCore
from verl.rollout.native.draft import KEPT_ANSWERS, Drafter, following
from verl.rollout.native.request import Request
from verl.rollout.native.runner import NativeRunner
from verl.types import Sampling

CONFIGS: dict[str, Any] = {"qwen3": QWEN3, "gemma2": GEMMA2, "gpt2": GPT2}
PROMPTS = [np.random.default_rng(i).integers(0, VOCAB, 12) for i in range(3)]


def jobs(temperature: float, **more: Any) -> list[Request]:
    """Two siblings per prompt, of unlike lengths."""
    return [
        Request(f"{i}.{j}", prompt, Sampling(max_tokens=70 + 31 * i + 7 * j, temperature=temperature, seed=j, **more))
        for i, prompt in enumerate(PROMPTS)
        for j in range(2)
    ]


def run(
    name: str, requests: list[Request], num_speculative_tokens: int, *, eos: tuple[int, ...] = (), **options: Any
) -> tuple[dict[str, Completion], dict[str, int]]:
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    options = {"lanes": 1, "deterministic": False, **options}
    runner = NativeRunner(
        CONFIGS[name],
        max_context_tokens=200,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_rows=4,
        max_prefill_tokens=64,
        prefix_cache_tokens=0,
        **options,
    )
    core = EngineCore(
        runner, eos, None, (Drafter(num_speculative_tokens, 4), runner) if num_speculative_tokens else None
    )
    core.load(SimpleNamespace(version=0, tensors=lambda: module.state_dict().items()))
    for request in requests:
        core.add(request)
    done: dict[str, Completion] = {}
    while core.busy:
        done |= {c.request_id: c for _, c in core.step()}
    return done, core.stats()


@pytest.mark.parametrize(
    "options",
    [{}, {"lanes": 2}, {"deterministic": True}, {"compiled": False}],
    ids=["kernels", "lanes", "deterministic", "torch"],
)
@pytest.mark.parametrize("temperature", [0.0, 0.3])
@pytest.mark.parametrize("name", CONFIGS)
def test_guesses_change_no_result(name: str, temperature: float, options: dict[str, Any]) -> None:
    plain, without = run(name, jobs(temperature), 0, **options)
    guessed, stats = run(name, jobs(temperature), 5, **options)
    for key, one in plain.items():
        np.testing.assert_array_equal(guessed[key].ids, one.ids)
        np.testing.assert_allclose(
            guessed[key].logprobs, one.logprobs, rtol=0, atol=0 if options.get("compiled", True) else 1e-4
        )
        assert guessed[key].stop_reason == one.stop_reason
    assert stats["sampled_tokens"] == without["sampled_tokens"]
    assert 0 < stats["accepted_tokens"] <= stats["drafted_tokens"]
    assert stats["steps"] < without["steps"]


def test_a_row_ends_inside_its_guesses() -> None:
    plain, _ = run("qwen3", jobs(0.0), 0)
    loop = plain["0.0"].ids  # a greedy answer that repeats itself
    for eos in {int(t) for t in loop[-12:]}:
        ends, _ = run("qwen3", jobs(0.0), 0, eos=(eos,))
        guessed, stats = run("qwen3", jobs(0.0), 5, eos=(eos,))
        for key in ends:
            np.testing.assert_array_equal(guessed[key].ids, ends[key].ids)
            assert guessed[key].stop_reason == ends[key].stop_reason
    assert stats["accepted_tokens"]


def test_bad_guesses_are_made_rarely() -> None:
    _, stats = run("qwen3", jobs(1.5), 5)
    assert stats["drafted_tokens"] < 0.3 * stats["sampled_tokens"]


def test_without_panels_deterministic_rows_are_never_guessed() -> None:
    _, stats = run("qwen3", jobs(0.0), 5, deterministic=True, compiled=False)
    assert stats["drafted_tokens"] == 0


def test_sleep_forgets_what_was_learned_of_the_rows() -> None:
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(CONFIGS["qwen3"], dtype=torch.float32)
    runner = NativeRunner(
        CONFIGS["qwen3"],
        max_context_tokens=200,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_rows=4,
        max_prefill_tokens=64,
        prefix_cache_tokens=0,
        lanes=1,
        deterministic=False,
    )
    drafter = Drafter(5, 4)
    core = EngineCore(runner, (), None, (drafter, runner))
    core.load(SimpleNamespace(version=0, tensors=lambda: module.state_dict().items()))
    for request in jobs(1.5)[:2]:
        core.add(request)
    core.step()
    drafter.learn(0, 4, 0)
    core.sleep(1)
    assert (drafter._share == 1).all() and not drafter._rest.any()


def test_what_follows_the_last_match() -> None:
    text = np.array([1, 2, 3, 4, 1, 2, 3, 5, 6, 1, 2, 3])
    assert following(text, np.array([1, 2, 3]), 2).tolist() == [5, 6]  # not the match at the very end
    assert following(text, np.array([1, 2, 3]), 9).tolist() == [5, 6, 1, 2, 3]
    assert following(text, np.array([3, 3, 3]), 2).tolist() == []
    assert following(text[:2], np.array([1, 2, 3]), 2).tolist() == []


def test_kept_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl.rollout.native.draft.KEPT_TOKENS", 100)
    drafter = Drafter(4, 2)
    for i in range(KEPT_ANSWERS + 3):
        drafter.keep(PROMPTS[0], np.full(5, i))
    assert len(drafter._answers[PROMPTS[0].tobytes()]) == KEPT_ANSWERS
    drafter.keep(PROMPTS[1], np.zeros(90, np.int64))
    assert list(drafter._answers) == [PROMPTS[1].tobytes()] and drafter._tokens == 90
