"""Models of transformers that are trained by the kernels of a GPU, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from each import matrix
from test_attention import make, rows, run

pytest.importorskip("triton", reason="no Triton here (make triton-package)")
from as_card import TRAINED, take_for_card

from verl.batch import pack

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
HEAD = ("logit_sums", "logit_gradients")


def flat(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradients[name].double().flatten() for name in sorted(gradients)])


def error_of(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """The error of all gradients together, as a share of their norm."""
    assert found.keys() == exact.keys() and all(g.dtype == torch.float32 for g in found.values())
    ours, theirs = flat(found), flat(exact)
    return float((ours - theirs).norm() / theirs.norm())


@matrix("name", ["qwen3", "llama", "qwen2", "mistral"], quick=("qwen3",))
@pytest.mark.parametrize("policy", ["none", "full"])
def test_loss_and_gradients_are_those_of_transformers(name: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that share a prompt, in float64 by padded rows of transformers' modules, which no kernel computes."""
    model, batch = make(name), pack(rows())
    exact_logprobs, exact = run(model, batch, attention_mode="padded")
    calls = take_for_card(monkeypatch)
    logprobs, found = run(model, batch, dtype="float32", gradient_checkpointing=policy)
    assert {*calls} == {*TRAINED, *HEAD}, calls
    layers, again = model.config.num_hidden_layers, 2 if policy == "full" else 1
    assert calls["trained_rotation"] % (2 * again * layers) == 0 and calls["trained_swiglu"] % layers == 0
    assert float((logprobs.double() - exact_logprobs).abs().max()) < 1e-5
    assert error_of(found, exact) < 2e-6


@matrix("name", ["qwen3", "llama"], quick=("llama",))
def test_bfloat16_is_as_near_as_that_of_torchs_operations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a copy of the weights that computes, and attention in one call: no kernel rounds more often than torch."""
    model, batch = make(name), pack(rows())
    _, exact = run(model, batch, attention_mode="padded")
    usual = run(model, batch, dtype="bfloat16", emulate_bf16=False, copies_weights=True)[1]
    calls = take_for_card(monkeypatch)
    found = run(model, batch, dtype="bfloat16", emulate_bf16=False)[1]
    assert {*calls} == {*TRAINED, *HEAD, "trained_attention"}, calls
    assert 1e-3 < error_of(found, exact) < 1.2 * error_of(usual, exact) < 0.1
