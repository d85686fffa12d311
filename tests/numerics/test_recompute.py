"""Norms and gates that are computed again in the backward pass: the same gradients, and less memory in between."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from each import each
from facts import use_facts
from test_attention import make, rows, run
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from verl.accel.trained import trained_rms_norm, trained_swiglu
from verl.batch import pack
from verl.nn import fused
from verl.nn.recompute import can_recompute, without_saving

FAMILIES = ("qwen3", "qwen2", "llama", "mistral")
"""With and without norms of queries and keys, biases, windows."""


@each("name", FAMILIES)
def test_the_gradients_are_the_same_bits_and_those_of_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = make(name), pack(rows())
    exact_logprobs, exact = run(model, batch, attention_mode="padded")
    calls = []
    real = fused.can_recompute
    monkeypatch.setattr(
        fused, "can_recompute", lambda out, call, n: real(out, lambda *x: calls.append(1) or call(*x), n)
    )
    for options in ({}, {"dtype": "float32"}, {"dtype": "bfloat16", "emulate_bf16": False, "copies_weights": True}):
        found = []
        for recomputes in (False, True):
            use_facts(monkeypatch, fused, recomputes=recomputes)
            calls.clear()
            found.append(run(model, batch, **options))
            layers = model.config.num_hidden_layers
            assert len(calls) == (3 * layers if recomputes else 0), "two norms and a gate, each once"
        (kept_logprobs, kept), (logprobs, again) = found
        assert torch.equal(kept_logprobs, logprobs)
        assert all(torch.equal(g, again[n]) for n, g in kept.items())
        if options.get("dtype") != "bfloat16":
            torch.testing.assert_close(logprobs.double(), exact_logprobs, rtol=1e-5, atol=1e-5)
            for n, g in exact.items():
                torch.testing.assert_close(again[n].double(), g, rtol=1e-3, atol=2e-5 * float(g.abs().max()) + 1e-6)


def gate_and_product(down: nn.Module, gate: torch.Tensor, up: torch.Tensor, *, marked: bool) -> Any:
    product = trained_swiglu(gate, up)
    if marked:
        can_recompute(product, trained_swiglu, 2)
    with without_saving(product):
        return down(product), StorageWeakRef(product.untyped_storage())


def leaves() -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    down = nn.Linear(12, 4).double()
    gate, up = (torch.randn(1, 7, 12, dtype=torch.float64, requires_grad=True) for _ in range(2))
    return down, gate, up


@pytest.mark.parametrize("marked", [True, False])
def test_the_result_is_freed_after_the_forward_pass(marked: bool) -> None:
    down, gate, up = leaves()
    out, alive = gate_and_product(down, gate, up, marked=marked)
    gc.collect()
    assert alive.expired() == marked
    out.sum().backward()


def test_a_graph_can_be_used_twice_and_its_gradient_is_that_of_finite_differences() -> None:
    down, gate, up = leaves()
    out, _ = gate_and_product(down, gate, up, marked=True)
    both = [torch.autograd.grad(out.sin().sum(), (gate, up, down.weight), retain_graph=True) for _ in range(2)]
    plain, _ = gate_and_product(down, gate, up, marked=False)
    exact = torch.autograd.grad(plain.sin().sum(), (gate, up, down.weight))
    assert all(torch.equal(a, b) for grads in both for a, b in zip(grads, exact, strict=True))

    def function(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        product = can_recompute(trained_swiglu(gate, up), trained_swiglu, 2)
        with without_saving(product):
            return torch.nn.functional.linear(product, down.weight, down.bias)

    assert torch.autograd.gradcheck(function, (gate, up))


def test_views_of_a_result_and_other_tensors_keep_their_shapes_and_values() -> None:
    x, w = torch.randn(6, 5, dtype=torch.float64, requires_grad=True), torch.randn(5, dtype=torch.float64)
    other = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    def function(x: torch.Tensor, other: torch.Tensor, *, marked: bool = True) -> torch.Tensor:
        y = trained_rms_norm(x, w, 1e-5)
        if marked:
            can_recompute(y, lambda x, weight: trained_rms_norm(x, weight, 1e-5), 2)
        with without_saving(y):
            return (y[1:5, 2:] * other).exp() + y.t()[1:4, :4].t() * other

    assert torch.autograd.gradcheck(function, (x, other))
    grads = [torch.autograd.grad(function(x, other, marked=m).sum(), (x, other)) for m in (True, False)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_without_gradients_and_of_unmarked_tensors_nothing_happens() -> None:
    x = torch.randn(3, 4)
    with torch.no_grad():
        y = can_recompute(trained_swiglu(x, x), trained_swiglu, 2)
    for t in (x, y, (x.requires_grad_() * 2)):
        with without_saving(t):
            out = t * t
        assert out.shape == x.shape
    out.sum().backward()
    torch.testing.assert_close(x.grad, 8 * x.detach())
