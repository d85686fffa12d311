"""model.head_dtype=float32: the head multiplies numbers of bfloat16 in float32, in training and in the rollout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rollouts import context_of, finish, source_of
from test_attention import TERMS, make, rows
from test_rollout_numerics import CONFIGS, reference
from torch.nn.functional import linear

from verl.batch import pack
from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.nn.precision import rounded_weight
from verl.parameter_set import POLICY_SET
from verl.rollout.base import GenerateRequest
from verl.rollout.embedded.core import EngineCore
from verl.rollout.embedded.requests import ActiveRequest
from verl.rollout.hf import Options as HfOptions
from verl.rollout.hf import build as build_hf
from verl.rollout.native.options import Options
from verl.rollout.native.runner import NativeRunner
from verl.types import Sampling

BF16 = torch.bfloat16


def trained(name: str, head_dtype: str, **given: Any) -> TorchEngine:
    settings = EngineSettings(**{"dtype": "bfloat16", "emulate_bf16": False, "head_dtype": head_dtype, **given})
    return TorchEngine(make(name), settings)


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_the_trainer_multiplies_in_float32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log-probs are those of the hidden states and the head, both rounded to bfloat16, in float64."""
    from verl.model_engine import passes

    batch, seen = pack(rows()), []
    plain = passes.lm_outputs
    monkeypatch.setattr(passes, "lm_outputs", lambda rows, *rest, **k: seen.append(rows) or plain(rows, *rest, **k))
    errors = {}
    for head_dtype in ("float32", "auto"):
        seen.clear()
        engine = trained(name, head_dtype)
        ours = engine.infer(batch, ("logprobs",))["logprobs"]
        weight = engine.local.model.get_output_embeddings().weight.detach().to(BF16).double()
        (hidden,) = seen
        assert torch.equal(hidden, hidden.to(BF16).to(hidden.dtype)), "the hidden states are rounded"
        exact = torch.log_softmax(linear(hidden.double(), weight) / 0.8, -1).gather(1, batch.targets[:, None])[:, 0]
        errors[head_dtype] = float((ours - exact).abs().max())
    assert errors["float32"] < 1e-5 < 1e-3 < errors["auto"], errors


def test_the_gradient_reaches_the_exact_weights() -> None:
    weight = torch.randn(50, 30, requires_grad=True)
    with torch.no_grad():
        weight[0, :3] = torch.tensor([0.0, -0.0, 1e-40])
    taken = rounded_weight(weight, BF16)
    assert torch.equal(taken, weight.to(BF16).float()) and not torch.equal(taken, weight)
    upstream = torch.randn(50, 30)
    assert torch.equal(torch.autograd.grad(taken, weight, upstream)[0], upstream)
    found = {}
    for head_dtype in ("float32", "auto"):
        engine = trained("llama", head_dtype, optim=OptimSpec(lr=1.0))
        batch = pack(rows())
        batch = batch.with_columns({"w/loss": torch.full((batch.num_loss_tokens,), 1 / batch.num_loss_tokens)})
        engine.forward_backward(batch, TERMS)
        found[head_dtype] = engine.local.model.get_output_embeddings().weight.grad
    torch.testing.assert_close(found["float32"], found["auto"], atol=2e-3, rtol=3e-2)
    assert not torch.equal(found["float32"], found["auto"])


def rollout(config: Any, module: Any, float32_head: bool) -> EngineCore:
    context = context_of(config, 4, dtype=BF16, float32_head=float32_head)
    core = EngineCore(NativeRunner(Options(), context, lanes=1, emulate_bf16=False), (), None)
    core.load(source_of(module))
    return core


@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma2"])
def test_the_rollout_multiplies_in_float32_and_takes_each_version(name: str) -> None:
    """Also the second version, which is written over the first one: no copy of the head is left behind."""
    core, hidden = rollout(CONFIGS[name], reference(CONFIGS[name], BF16), True), None
    for version in range(2):
        module = reference(CONFIGS[name], BF16)
        with torch.no_grad():
            for p in module.parameters():
                p.mul_(1 + version)
        core.load(source_of(module, version))
        live = core.runner.model.live
        hidden = torch.randn(5, live.embed.shape[1]).to(BF16)
        logits = live.logits(hidden)
        exact = linear(hidden.double(), module.get_output_embeddings().weight.double())
        cap = live.logit_cap
        exact = cap * torch.tanh(exact / cap) if cap else exact
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits.double(), exact, atol=1e-5, rtol=1e-5)
    assert rollout(CONFIGS[name], module, False).runner.model.live.logits(hidden).dtype == BF16


def test_scores_and_draws_are_of_exact_logits() -> None:
    """The scores of a sequence against the head in float64; the log-probs of draws against the scores."""
    config = CONFIGS["qwen3"]
    module, ids = reference(config), np.arange(1, 60)
    errors = {}
    for float32_head in (False, True):
        core = rollout(config, module, float32_head)
        hidden = torch.cat(list(core.runner._prompts.hidden_states(torch.from_numpy(ids[:-1]), POLICY_SET.id, None)))
        weight = module.get_output_embeddings().weight.detach().to(BF16)
        exact = torch.log_softmax(linear(hidden.double(), weight.double()), -1)
        exact = exact.gather(1, torch.from_numpy(ids[1:])[:, None])[:, 0].numpy()
        errors[float32_head] = float(np.abs(core.runner.score(ids, 1.0).logprobs - exact).max())
    assert errors[True] < 1e-5 < 1e-3 < errors[False], errors
    asked = [ActiveRequest(GenerateRequest("a", ids[:8], Sampling(max_tokens=20, temperature=0.7, seed=1)))]
    completion = finish(core, asked)["a"]
    scored = core.runner.score(np.concatenate([ids[:8], completion.ids]), 0.7).logprobs[7:]
    np.testing.assert_allclose(completion.logprobs, scored, atol=0.1)


def test_in_float32_nothing_changes_and_hf_refuses() -> None:
    context = context_of(CONFIGS["qwen3"], 4, float32_head=True)
    assert NativeRunner(Options(), context, lanes=1).ops.float32_linear is None
    with pytest.raises(ValueError, match="model.head_dtype=float32: the hf engine"):
        build_hf(HfOptions(), context)
