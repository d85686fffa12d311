"""Attention of training by the compiled kernel, over forests of segments, against plain attention in float64."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from each import each
from facts import use_facts
from torch import Tensor

from verl.accel import trained
from verl.accel.cpu import nf4
from verl.accel.cpu.kernels import Segments
from verl.accel.cpu.rows import load_kernels
from verl.accel.cpu.training import compiled_attention
from verl.nn import attention, quant
from verl.nn.quant import Kind

CPU = torch.device("cpu")
KERNELS = load_kernels(torch.float32)
pytestmark = pytest.mark.skipif(isinstance(KERNELS, str), reason=str(KERNELS))
KINDS: tuple[Kind, ...] = ("nf4", "int8")
KERNEL = partial(compiled_attention, kernels=KERNELS)


def forest_of(rng: np.random.Generator, segments: int) -> tuple[attention.Varlen, int]:
    """Trees with segments that lie between each other's, of 1 to 40 tokens; and all tokens."""
    parent = np.array([-1, -1, *(int(rng.integers(-1, i)) for i in range(2, segments))])
    starts = np.concatenate([[0], np.cumsum(rng.integers(1, 41, segments))])
    return attention._varlen(attention._Forest(starts, parent), np.arange(segments), CPU), int(starts[-1])


def tensors_of(tokens: int, heads: int, kv_heads: int, dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(tokens, n, dim, generator=generator) for n in (heads, kv_heads, kv_heads, heads)]


def results(kernel: Any, of: attention.Varlen, tensors: list[Tensor], window: int | None) -> list[Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    out = attention.attend_varlen(of, q, k, v, 0.3, window, kernel)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3].to(out))]


SHAPES = ((4, 2, 16), (3, 3, 12), (6, 1, 48), (2, 1, 130))


@each("shape, window", list(product(SHAPES, [None, 7])))
def test_values_and_gradients_of_a_forest(shape: tuple[int, int, int], window: int | None) -> None:
    for seed in range(3):
        of, tokens = forest_of(np.random.default_rng(seed), 9)
        tensors = tensors_of(tokens, *shape)
        exact = results(trained.trained_attention, of, [x.double() for x in tensors], window)
        for ours, theirs in zip(results(KERNEL, of, tensors, window), exact, strict=True):
            assert float((ours - theirs).abs().max() / theirs.abs().max()) < 2e-6


def test_the_bits_depend_on_no_number_of_threads_and_no_other_tree() -> None:
    """Gradients of a shared prompt are summed in one order."""
    of, tokens = forest_of(np.random.default_rng(5), 40)
    tensors, threads = tensors_of(tokens, 4, 2, 16), torch.get_num_threads()
    found = []
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            found.append(results(KERNEL, of, tensors, None))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for one in found[1:] for a, b in zip(one, found[0], strict=True))
    starts, parent = np.array([0, 9, 30, 50, 64]), np.array([-1, 0, -1, 2])
    two, one = (attention._varlen(attention._Forest(starts[: n + 1], parent[:n]), np.arange(n), CPU) for n in (4, 2))
    tensors = tensors_of(64, 4, 2, 16)
    both, alone = results(KERNEL, two, tensors, None), results(KERNEL, one, [x[:30] for x in tensors], None)
    assert all(torch.equal(a[:30], b) for a, b in zip(both, alone, strict=True))


@each(
    "parent, parts",
    [
        ([-1, -1, -1], [0, 1, 2]),
        ([-1, 0, -1, -1, 2], [0, 2]),  # the branch of the second tree is behind the third tree
        ([-1, -1, 1, 0, -1], [0, 4]),
        ([-1, 0, -1, 2, -1, 0], [0]),
    ],
)
def test_trees_with_segments_between_each_others_are_one_part(parent: list[int], parts: list[int]) -> None:
    """Else two threads would add to the gradients of the same keys."""
    assert not isinstance(KERNELS, str)
    starts = np.arange(len(parent) + 1) * 3
    of = attention._varlen(attention._Forest(starts, np.array(parent)), np.arange(len(parent)), CPU)
    queries, keys, *_ = of.bounds
    assert KERNELS.segment_parts(Segments(queries, keys, of.k_index, 1.0, 0)) == parts


@each("window", [None, 7])
def test_queries_of_a_run_of_tokens_have_the_values_and_gradients_of_that_run(window: int | None) -> None:
    """As a rank that shares a sequence computes them: over segments that are cut, with keys of all tokens."""
    rng = np.random.default_rng(2)
    parent = np.array([-1, -1, 0, 1, 2, 2])
    whole = attention._Forest(np.concatenate([[0], np.cumsum(rng.integers(9, 41, 6))]), parent)
    first, end = int(whole.seg_start[1]) + 4, int(whole.seg_start[5]) + 3
    cut, tensors = whole.cut((first, end)), tensors_of(int(whole.seg_start[-1]), 4, 2, 16)
    run = [tensors[0][first:end], *tensors[1:3], tensors[3][first:end]]
    of = attention._varlen(cut, cut.inside((first, end)), CPU)
    exact = results(trained.trained_attention, of, [x.double() for x in run], window)
    for ours, theirs in zip(results(KERNEL, of, run, window), exact, strict=True):
        assert float((ours - theirs).abs().max() / theirs.abs().max()) < 2e-6
    uncut = results(KERNEL, attention._varlen(whole, np.arange(6), CPU), tensors, window)
    torch.testing.assert_close(results(KERNEL, of, run, window)[0], uncut[0][first:end], atol=2e-6, rtol=2e-6)


def test_short_segments_are_one_call_and_long_ones_are_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from test_attention import rows

    from verl.batch import pack

    batch, calls = pack(rows()), []
    longest = int(attention.make_varlen(batch, CPU).bounds[3])
    kernel = attention.segment_kernel(CPU, torch.float32, 8)
    assert kernel is not None and attention.segment_kernel(CPU, torch.float64, 8) is None
    monkeypatch.setattr(attention, "segment_kernel", lambda *use: lambda *a, **k: calls.append(1) or kernel(*a, **k))
    q, k, v, _ = tensors_of(batch.num_tokens, 4, 2, 8)
    found = []
    for most in (longest, longest - 1):
        use_facts(monkeypatch, attention, segment_keys=most)
        found.append(attention.attend(attention.plan_attention(batch, CPU), q, k, v, 0.3))
    assert len(calls) == 1 and not torch.equal(*found)
    torch.testing.assert_close(*found, atol=2e-6, rtol=2e-6)


def test_half_precision_values_are_widened_and_the_result_is_narrowed() -> None:
    of, tokens = forest_of(np.random.default_rng(1), 5)
    q, k, v, upstream = tensors_of(tokens, 4, 2, 16)
    found = results(KERNEL, of, [q, k, v.bfloat16(), upstream], None)
    exact = results(trained.trained_attention, of, [x.double() for x in (q, k, v.bfloat16(), upstream)], None)
    assert [x.dtype for x in found] == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
    for ours, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=2e-2, rtol=2e-2)


def test_buffers_of_kernels_are_float32_whatever_the_default_dtype_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may change the default of the process: transformers does so while it loads a model."""
    assert not isinstance(KERNELS, str)
    of, tokens = forest_of(np.random.default_rng(3), 9)
    tensors, x, whole = tensors_of(tokens, 4, 2, 16), torch.randn(50, 96), torch.randn(70, 96)
    seen = set[torch.dtype]()

    def watched(kernel: Any, *given: Any) -> None:
        seen.update(t.dtype for t in given if isinstance(t, Tensor) and t.is_floating_point())
        assert seen == {torch.float32}
        kernel(*given)

    for name in ("segments", "segments_backward", "nf4_linear", "nf4_rows"):
        monkeypatch.setitem(KERNELS.functions, name, partial(watched, KERNELS.functions[name]))
    found = []
    for default in (torch.float32, torch.bfloat16):
        for cached in (quant.code_values, quant._nearest, quant._levels, quant._pairs):
            cached.cache_clear()
        torch.set_default_dtype(default)
        try:
            values = results(KERNEL, of, tensors, None)
            for kind in KINDS:
                weight = quant.quantise_weight(whole, kind)
                product = nf4.quantised_linear(x, weight, kernels=KERNELS)
                back = nf4.quantised_back(product, weight, kernels=KERNELS)
                values += [product, back, weight.dequantised(torch.float32)]
        finally:
            torch.set_default_dtype(torch.float32)
        found.append(values)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
