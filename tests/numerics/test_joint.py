"""Linear layers of one input as one function: the outputs and gradients are those of the layers one by one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from verl.nn import joint
from verl.nn.fused import trained_ops
from verl.nn.lora import AddsFactors, LowRank

INTO, OUTS, RANK, SCALE = 16, (24, 8, 8), 3, 2.5  # whole blocks of the compiled kernel


GRADIENTS = trained_ops(torch.device("cpu"), INTO, recomputes=False, joint=True).low_rank_gradients
joint_products = partial(joint.joint_products, gradients=GRADIENTS)


def layers_of(dtype: torch.dtype, *, bias: bool, factors: bool, frozen: bool) -> list[nn.Linear]:
    """Three layers, of which the last one has no factors."""
    torch.manual_seed(0)
    found = [nn.Linear(INTO, out, bias=bias, dtype=dtype) for out in OUTS]
    for layer in found:
        layer.requires_grad_(not frozen)
    for layer in found[: 2 if factors else 0]:
        layer.a = nn.Parameter(torch.randn(RANK, INTO, dtype=dtype))
        layer.b = nn.Parameter(torch.randn(layer.out_features, RANK, dtype=dtype))
        layer.register_forward_hook(AddsFactors(lambda layer, x: LowRank(layer.a, layer.b), SCALE, True))
    return found


def results(call: Any, layers: list[nn.Linear], x: Tensor, used: int) -> list[Tensor | None]:
    """The outputs, the gradient of x and those of all parameters, for a loss of the first `used` outputs."""
    leaf = x.clone().requires_grad_()
    outputs = call(leaf * 1.0, layers)
    torch.manual_seed(1)
    sum(((out * torch.randn_like(out)).sum() for out in outputs[:used]), torch.zeros(())).backward()
    found = [*outputs, leaf.grad, *(p.grad for layer in layers for p in layer.parameters())]
    for layer in layers:
        layer.zero_grad()
    return found


def one_by_one(x: Tensor, layers: list[nn.Linear]) -> list[Tensor]:
    return [layer(x) for layer in layers]


def is_joint(outputs: Sequence[Tensor]) -> bool:
    node = outputs[0].grad_fn
    return node is not None and "Joint" in node.name()


@pytest.mark.parametrize("used", [3, 1])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("factors", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_gradients_are_those_of_the_layers(bias: bool, factors: bool, frozen: bool, used: int) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        layers = layers_of(dtype, bias=bias, factors=factors, frozen=frozen)
        x = torch.randn(2, 50, INTO, dtype=dtype)
        (mine, theirs) = (results(call, layers, x, used) for call in (joint_products, one_by_one))
        assert is_joint(joint_products(x, layers)) == factors
        for ours, reference in zip(mine, theirs, strict=True):
            if ours is None or reference is None:  # a gradient that no loss needs is no tensor, or zeros
                assert not any(t is not None and t.any() for t in (ours, reference))
            else:
                torch.testing.assert_close(ours, reference, rtol=tolerance, atol=tolerance)


def test_what_is_not_a_plain_layer_is_called() -> None:
    """A hook of others, fewer rows than merging is worth, another dtype and autocast: each layer is called itself."""
    called: list[nn.Module] = []
    layers, x = layers_of(torch.float32, bias=True, factors=True, frozen=True), torch.randn(50, INTO)
    assert is_joint(joint_products(x, layers)) and not is_joint(joint_products(x[:4], layers))
    with pytest.raises(RuntimeError, match="dtype"):
        joint_products(x.double(), layers)
    with torch.autocast("cpu", torch.bfloat16):
        assert joint_products(x, layers)[0].dtype == torch.bfloat16
    layers[1].register_forward_hook(partial(lambda *given: called.append(given[0])))
    assert torch.equal(joint_products(x, layers)[1], layers[1](x)) and called == [layers[1]] * 2


def test_a_pass_without_gradients_merges_factors_too() -> None:
    layers = layers_of(torch.float64, bias=True, factors=True, frozen=True)
    x = torch.randn(50, INTO, dtype=torch.float64)
    with torch.no_grad():
        for ours, reference in zip(joint_products(x, layers), one_by_one(x, layers), strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)
