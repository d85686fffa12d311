"""Weights in blocks of 8 bits: quantisation, its inverse, and the reader of a version."""

from __future__ import annotations

import pytest
import torch
from on_device import DEVICE
from torch import Tensor

from verl.nn.fp8 import LARGEST, SCALES, VALUES, as_computed, dequantise, dequantised, in_blocks, quantise, scales_shape


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


def test_projections_are_quantised_and_nothing_else() -> None:
    layer = "model.layers.0."
    yes = ("self_attn.q_proj.weight", "mlp.down_proj.weight")
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
