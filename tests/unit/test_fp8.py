"""Weights in blocks of 8 bits: quantisation, its inverse, and the reader of a version."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from families import QWEN3, QWEN3_MOE
from on_device import DEVICE
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from verl.model_engine.optim import OptimSpec
from verl.model_engine.passes import ReplicaWeights
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.nn.fp8 import (
    LARGEST,
    SCALES,
    VALUES,
    RoundedInputs,
    as_computed,
    dequantise,
    dequantised,
    in_blocks,
    quantise,
    rounded_inputs,
    scales_shape,
)


def reference(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise block after block in float64: every E4M3 value is compared, and the nearest one is taken."""
    every = torch.arange(256, dtype=torch.uint8).view(VALUES).double()
    grid = every[every.isfinite()].unique()
    values, scales = weight.double().clone(), torch.empty(scales_shape(weight.shape), dtype=torch.float64)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
            block = weight[at].double()
            scale = (block.abs().max().float() / LARGEST).double() if block.any() else torch.tensor(1.0).double()
            exact = block / scale
            right = torch.searchsorted(grid, exact).clamp(1, len(grid) - 1)
            low, high = grid[right - 1], grid[right]
            values[at] = torch.where(exact - low < high - exact, low, high)
            tie = exact - low == high - exact
            even = low.to(VALUES).view(torch.uint8) % 2 == 0
            values[at] = torch.where(tie & even, low, values[at])
            scales[i, j] = scale
    return values, scales


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (130, 257), (300, 64), (5, 129)])
@pytest.mark.parametrize("size", [1.0, 3e-5, 1e4])
def test_blocks_equal_a_search_in_float64(shape: tuple[int, int], size: float) -> None:
    weight = size * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    weight[: shape[0] // 2] *= 100
    values, scales = quantise(weight)
    expected, expected_scales = reference(weight)
    assert values.dtype == VALUES and scales.dtype == torch.float32 and scales.shape == scales_shape(shape)
    assert torch.equal(scales.double(), expected_scales)
    differ = values.double() != expected  # the quotient is rounded to float32 before it is rounded to 8 bits
    assert int(differ.sum()) <= weight.numel() // 10_000 + 1
    made = dequantise(values, scales)
    assert made.dtype == torch.float32 and made.shape == weight.shape
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    assert bool(((made - weight).abs() <= weight.abs() / 16 + spread * 2**-10).all())
    assert torch.equal(made.double().float(), (values.double() * spread.double()).float())


def test_experts_are_quantised_one_by_one() -> None:
    weight = torch.randn(3, 130, 200) * torch.tensor([1.0, 50.0, 0.01])[:, None, None]
    values, scales = quantise(weight)
    for i, one in enumerate(weight):
        alone, alone_scales = quantise(one)
        assert torch.equal(values[i].view(torch.uint8), alone.view(torch.uint8)) and torch.equal(
            scales[i], alone_scales
        )
    assert torch.equal(dequantise(values, scales)[2], dequantise(*quantise(weight[2])))


def test_zeros_and_tiny_values_stay_finite() -> None:
    weight = torch.zeros(128, 384)
    weight[0, 128], weight[1, 256] = 1e-42, 2e-38
    values, scales = quantise(weight)
    assert bool(scales.isfinite().all()) and bool((scales > 0).all())
    assert float(scales[0, 0]) == 1.0, "a block of zeros"
    made = dequantise(values, scales)
    assert bool(made.isfinite().all()) and not made[:, :128].any()
    assert float(made[1, 256]) == pytest.approx(2e-38, rel=0.5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_block_that_is_not_finite_has_such_a_scale(bad: float) -> None:
    weight = torch.ones(200, 200)
    weight[150, 10] = bad
    _, scales = quantise(weight)
    assert scales.isfinite().tolist() == [[True, True], [False, True]]


def test_a_second_quantisation_changes_nothing() -> None:
    weight = torch.randn(256, 256)
    once = dequantise(*quantise(weight))
    assert torch.equal(dequantise(*quantise(once)), once)


@pytest.mark.on_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_have_the_same_bits_on_every_device(dtype: torch.dtype) -> None:
    weight = (torch.randn(2, 300, 400) * 10 ** torch.randn(300, 1)).to(dtype)
    there = quantise(weight.to(DEVICE))
    for ours, theirs in zip(there, quantise(weight), strict=True):
        assert torch.equal(ours.cpu().view(torch.uint8), theirs.view(torch.uint8))
    assert torch.equal(dequantise(*there).cpu(), dequantise(*quantise(weight)))


class Divisors(TorchDispatchMode):
    """Keeps the second operands of all divisions."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += [args[1]] if "div" in function.overloadpacket.__name__ else []
        return function(*args, **(kwargs or {}))


def test_a_device_divides_by_no_number_of_the_host() -> None:
    """torch multiplies with its reciprocal on a GPU, which is another bit for some scales."""
    meta = torch.device("meta")
    with Divisors() as divisors:
        quantise(torch.empty(300, 400, device=meta))
        rounded_inputs(torch.empty(3, 400, device=meta))
    assert len(divisors.found) == 4
    assert all(isinstance(by, Tensor) and by.device == meta for by in divisors.found)
    largest = torch.rand(10_000) * 100
    assert not torch.equal(largest * (1.0 / LARGEST), largest / LARGEST), "the bits are others"


def test_projections_are_quantised_and_nothing_else() -> None:
    layer = "model.layers.0."
    yes = ("self_attn.q_proj.weight", "mlp.down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight")
    no = ("self_attn.q_norm.weight", "mlp.gate.weight", "input_layernorm.weight")
    assert all(in_blocks(layer + name, (8, 8)) for name in yes) and not any(in_blocks(layer + n, (8, 8)) for n in no)
    assert in_blocks(layer + "mlp.experts.gate_up_proj", (4, 8, 8)) and not in_blocks(
        layer + "self_attn.q_proj.bias", (8,)
    )
    assert not in_blocks("lm_head.weight", (8, 8)) and not in_blocks("model.embed_tokens.weight", (8, 8))


def test_the_reader_joins_both_halves_in_either_order() -> None:
    weight, norm = torch.randn(40, 50), torch.randn(50)
    values, scales = quantise(weight)
    halves = [("a_proj.weight", values), (f"a_proj.weight{SCALES}", scales)]
    for order in (halves, halves[::-1]):
        found = dict(dequantised([order[0], ("norm.weight", norm), order[1]]))
        assert torch.equal(found["a_proj.weight"], dequantise(values, scales)) and torch.equal(
            found["norm.weight"], norm
        )
        assert len(found) == 2
        with pytest.raises(ValueError, match=r"a_proj\.weight"):
            dict(dequantised(order[:1]))
    with pytest.raises(ValueError, match=r"bfloat16: weights in blocks of FP8 were expected"):
        dict(dequantised([("a_proj.weight", weight.bfloat16())]))
    with pytest.raises(ValueError, match="do not fit"):
        dict(dequantised([("a_proj.weight", values), (f"a_proj.weight{SCALES}", scales.repeat(2, 1))]))


def test_a_weight_is_rounded_after_its_blocks() -> None:
    weight = torch.randn(130, 130)
    blocks = dequantise(*quantise(weight))
    assert torch.equal(as_computed("q_proj.weight", weight, torch.bfloat16, fp8=True), blocks.bfloat16())
    assert torch.equal(as_computed("q_proj.weight", weight, torch.bfloat16, fp8=False), weight.bfloat16())
    assert torch.equal(as_computed("lm_head.weight", weight, torch.bfloat16, fp8=True), weight.bfloat16())


@pytest.mark.parametrize("columns", [128, 300, 7])
def test_inputs_are_rounded_token_by_token_in_runs_of_128_columns(columns: int) -> None:
    inputs = torch.randn(2, 3, columns) * 10 ** torch.randn(2, 3, 1)
    inputs[0, 0] = 0.0
    found = rounded_inputs(inputs)
    for token, made in zip(inputs.view(-1, columns), found.view(-1, columns), strict=True):
        for at in range(0, columns, 128):
            run = token[None, at : at + 128]
            assert torch.equal(made[at : at + 128], dequantise(*quantise(run))[0]), "a block of one row"
    assert rounded_inputs(inputs.bfloat16()).dtype == torch.bfloat16 and bool(found.isfinite().all())


def test_only_products_with_the_added_weights_have_rounded_inputs() -> None:
    weight, other, experts = torch.randn(20, 130), torch.randn(20, 130), torch.randn(3, 20, 130)
    x, linear = torch.randn(5, 130), torch.nn.functional.linear
    made, plain = rounded_inputs(x), linear(x, weight)
    mode = RoundedInputs()
    mode.add(weight)
    mode.add(experts)
    with mode:
        assert torch.equal(linear(x, weight), plain) is False
        found = linear(x, weight), linear(x, other), linear(x, experts[1]), linear(x, weight, torch.ones(20))
    expected = linear(made, weight), linear(x, other), linear(made, experts[1]), linear(made, weight, torch.ones(20))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(linear(x, weight), plain), "it has ended"


@pytest.mark.parametrize("config", [QWEN3, QWEN3_MOE], ids=["dense", "experts"])
def test_the_models_own_pass_rounds_the_inputs_of_every_projection(config: Any) -> None:
    """Against the same model whose products are written out: a hook on each linear layer, and the experts one by
    one."""
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    ids, simple = torch.arange(2, 14), copy.deepcopy(module).eval()
    for name, p in simple.named_parameters():
        p.data = as_computed(name, p.detach(), torch.float32, fp8=True)
    for name, layer in simple.named_modules():
        if isinstance(layer, torch.nn.Linear) and in_blocks(f"{name}.weight", layer.weight.shape):
            layer.register_forward_pre_hook(lambda _, given: (rounded_inputs(given[0]),))
        if hasattr(layer, "gate_up_proj") and isinstance(layer.gate_up_proj, torch.nn.Parameter):
            layer.forward = partial(written_out, layer)
    with torch.no_grad():
        logits = simple(ids[None], use_cache=False).logits[0]
    expected = torch.log_softmax(logits, -1)[:-1].gather(1, ids[1:, None])[:, 0]
    passes = TorchEngine(module, EngineSettings(optim=OptimSpec(lr=0.1), dtype="float32")).passes
    with torch.no_grad():
        (found,) = passes.models_own([ids], ReplicaWeights(dtype=torch.float32, fp8=True, fp8_inputs=True))
        (without,) = passes.models_own([ids], ReplicaWeights(dtype=torch.float32, fp8=True))
    assert float((found - expected).abs().mean()) < 1e-3 < 1e-2 < float((without - expected).abs().mean())


def written_out(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    found = torch.zeros_like(hidden)
    for token in range(len(hidden)):
        for which, weight in zip(chosen[token], weights[token], strict=True):
            gate, up = (experts.gate_up_proj[which] @ rounded_inputs(hidden[token])).chunk(2)
            found[token] += weight * (experts.down_proj[which] @ rounded_inputs(experts.act_fn(gate) * up))
    return found
