"""Rollout of models that read images: every request has the log-probs of transformers' own forward pass."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from rollouts import finish, native_core, source_of
from vision import KINDS, model

from verl.rollout.base import GenerateRequest
from verl.rollout.embedded.core import EngineCore
from verl.rollout.embedded.requests import ActiveRequest
from verl.types import Sampling

TEXTS = [np.random.default_rng(i).integers(0, 58, n) for i, n in enumerate((3, 40, 17))]


@cache
def made(kind: str) -> Any:
    """Return a model in which biases and norms have an effect."""
    module = model(kind).eval().requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for name, parameter in module.named_parameters():
            if "bias" in name or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return module


def core_of(kind: str, **options: Any) -> EngineCore:
    return native_core(made(kind).config, source_of(made(kind)), max_context_tokens=128, **options)


def sampling(seed: int = 0, tokens: int = 12) -> Sampling:
    return Sampling(max_tokens=tokens, seed=seed, ignore_eos=True)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_text_has_the_logprobs_of_transformers(kind: str, compiled: bool) -> None:
    core = core_of(kind, compiled=compiled)
    requests = [ActiveRequest(GenerateRequest(str(i), ids, sampling(i))) for i, ids in enumerate(TEXTS)]
    for name, answer in finish(core, requests).items():
        ids = np.concatenate([TEXTS[int(name)], answer.ids])
        logits = made(kind)(input_ids=torch.from_numpy(ids)[None]).logits[0]
        expected = logits.log_softmax(-1)[len(TEXTS[int(name)]) - 1 : -1].gather(
            1, torch.from_numpy(answer.ids)[:, None]
        )
        np.testing.assert_allclose(answer.logprobs, expected[:, 0].numpy(), rtol=0, atol=1e-5)
        scored = core.runner.score(ids, 1.0).logprobs[-len(answer.ids) :]
        np.testing.assert_allclose(scored, expected[:, 0].numpy(), rtol=0, atol=1e-5)
