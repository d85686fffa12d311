"""Embedding, head and norm trained whole beside the factors of LoRA on many ranks: numbers, state and publishes are
those of one process, the reference has the values of the start, and a critic on the base has its own."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import EXPERTS, Case, differences, gradients, model, share
from forked import run
from test_gate import LAYOUTS
from test_siblings import context_of, started

from verl.model_engine import rank_engine
from verl.model_engine.layout import Layout
from verl.model_engine.lora import is_factor
from verl.model_engine.lora_spec import LoraSpec
from verl.model_engine.optim import OptimSpec
from verl.model_engine.options import Options
from verl.model_engine.sibling import build_sibling
from verl.model_engine.torch_engine import build as build_torch

SPEC = LoraSpec(rank=5, alpha=10.0, modules_to_save=["embed_tokens", "lm_head", "model.norm"])
WHOLE = {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"}
SPREAD = ("FSDP, three", "HSDP", "FSDP x TP", "CP", "FSDP x EP", "PP")


def updates(policy: Any, critic: Any, case: Case, rank: int | None, count: int) -> dict[str, torch.Tensor]:
    """Make updates of both in turn; return the policy's first gradients, and the weights of both."""
    found = dict[str, torch.Tensor]()
    for number in range(count):
        for one, role in ((policy, "actor"), (critic, "critic")):
            at = replace(case, role=role)
            _, batch, passes = share(at, rank) if rank is not None else (None, at.batch()[1], 0)
            one.forward_backward(batch, at.batch()[2], passes)
            if one is policy and number == 0:
                found = {f"gradient of {name}": g for name, g in gradients(one).items()}
            one.optim_step()
    for one, role in ((policy, "actor"), (critic, "critic")):
        named = one.local.trained_parameters().items()
        found |= {f"{role} {n}": one.local.whole(p).clone() for n, p in named}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS if os.environ.get("FULL_GRID") else SPREAD)
def test_ranks_train_them_as_one_process(layout, tmp_path):
    at = LAYOUTS[layout]
    sparse = at.expert > 1
    case = Case(at, model=EXPERTS if sparse else "llama, biases")
    model(case.model).save_pretrained(tmp_path / "base")
    given: dict[str, Any] = {}
    if sparse:  # in float64 transformers cannot compute them, and Adam makes steps of noise
        given = {"dtype": "float32", "optim": OptimSpec(name="sgd", lr=1e-2)}
    one = replace(context_of(tmp_path / "base", Layout(), **given), lora=SPEC)
    policy = started(build_torch(Options(), one))
    critic = started(build_sibling(policy, Options(), replace(one, head="value")))
    plain = build_torch(Options(), replace(one, lora=None, optim=None))
    expected = updates(policy, critic, case, None, 2)
    assert {n for n in expected if n.startswith("gradient") and not is_factor(n)} == {f"gradient of {n}" for n in WHOLE}
    weights = {n: t.clone() for n, t in policy.weights()}
    policy.save(tmp_path / "alone")
    further = updates(policy, critic, case, None, 1)
    rtol = 1e-4 if sparse else 1e-6

    def on(rank: int) -> Any:
        context = replace(context_of(tmp_path / "base", at, **given), lora=SPEC)
        ours = started(rank_engine.build(Options(), context))
        beside = started(rank_engine.build_rank_sibling(ours, Options(), replace(context, head="value")))
        found = updates(ours, beside, case, rank, 2)
        batch = share(case, rank)[1]
        now, start, again = (ours.infer(batch, ("logprobs",), start=s)["logprobs"] for s in (False, True, False))
        assert torch.equal(now, again) and (now - start).abs().max() > 1e-3
        assert torch.allclose(start, plain.infer(batch, ("logprobs",))["logprobs"], rtol=rtol, atol=rtol)
        assert not differences({n: t.clone() for n, t in ours.weights()}, weights, rtol)
        ours.save(tmp_path / "ranks")
        ours.load(tmp_path / "alone")
        return found, updates(ours, beside, case, rank, 1)

    for found, after in run(at.world_size, on):
        assert len(found) > 20 and not differences(found, {n: expected[n] for n in found}, rtol)
        assert not differences(after, {n: further[n] for n in after}, rtol)
    back = started(build_torch(Options(), one))
    back.load(tmp_path / "ranks")
    assert not differences({n: t.clone() for n, t in back.weights()}, weights, rtol)
