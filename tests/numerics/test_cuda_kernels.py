"""The Triton kernels of accel/cuda in Triton's interpreter, each against plain torch in float64."""

from __future__ import annotations

from itertools import product
from typing import Any

import decode_references as references
import numpy as np
import pytest
import torch
from decode_references import pages_of
from each import matrix
from interpreted import Traffic, fix_bf16_products
from rollouts import draws_of
from test_accel_table import CASES, as_function, check_row
from torch import Tensor

from verl.accel import plain, trained
from verl.accel.cuda.rows import KERNELS, TRITON
from verl.accel.operations import Kernel, Use
from verl.accel.table import OPERATIONS
from verl.accel.uniforms import plain_uniforms, uniforms
from verl.nn.fp8 import dequantise, quantise
from verl.nn.quant import quantise_weight
from verl.rollout.embedded.sampler import sample, stream_of

pytest.importorskip("triton", reason="no Triton here (make triton-package)")
import triton
from triton import language as tl

from verl.accel.cuda import attention, blocks, experts, layers, nf4, prompts, rotary, sampling, training, truncation
from verl.accel.cuda.attention import _first_of_part, _split_of_row

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
CUT = plain.plain_truncate
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCE)


@pytest.fixture(autouse=True)
def bf16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    fix_bf16_products(monkeypatch)


def close(ours: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Compare with a float64 reference, relative to its size."""
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def attention_case(
    heads: int, kv_heads: int, dim: int, positions: list[int], *, page: int = 16, splits: int = 1, window: int = 0,
    cap: float = 0.0, with_sinks: bool = False, dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    """One call of `attend_pages` against float64; empty rows give 0."""
    at = torch.tensor(positions)
    torch.manual_seed(heads + dim + splits + window)
    q, (pool, table) = torch.randn(len(at), heads, dim).to(dtype), pages_of(at, page, kv_heads, dim, dtype)
    sinks = torch.randn(heads) if with_sinks else None
    read = {"scale": 0.5, "window": window, "cap": cap, "sinks": sinks}
    ours = attention.attend_pages(q, *pool, table, at, **read, splits=splits)
    close(ours, references.page_attention(q.double(), *pool.double(), table, at, **read), dtype)


@matrix("each", range(1, 17), quick=(1, 3, 16))
def test_every_ratio_of_query_to_key_heads(each: int) -> None:
    attention_case(2 * each, 2, 8, [-1, 21], splits=1 + each % 2, dtype=DTYPES[each % 3])


@pytest.mark.parametrize("splits", [1, 4])
@matrix("window,cap", [(0, 0.0), (1, 0.0), (7, 2.0), (64, 0.0), (65, 1.0), (300, 0.0)], quick=[(0, 0.0), (7, 2.0)])
def test_edges_of_pages_parts_and_windows(splits: int, window: int, cap: float) -> None:
    """Rows that end at, before and after a page (64) and the least keys of two parts (512), and one with four parts."""
    rows = [-1, 0, 63, 64, 255, 256, 257, 510, 511, 512, 1030]
    attention_case(4, 2, 16, rows, page=64, splits=splits, window=window, cap=cap)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits,dim", [(1, 24), (2, 96)])
def test_sinks_and_sizes_that_are_no_power_of_two(splits: int, dim: int, dtype: torch.dtype) -> None:
    attention_case(6, 2, dim, [-1, 0, 40, 600], page=32, splits=splits, with_sinks=True, dtype=dtype, window=590)


def test_more_parts_than_a_row_needs_are_not_read() -> None:
    """16 parts are allowed; the row of 601 tokens has 2, that of one token 1."""
    attention_case(2, 1, 16, [0, 600], page=128, splits=16)


@triton.jit
def _store_parts(out, length, window, BLOCK: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr):
    first, blocks, parts = _split_of_row(length, window, BLOCK, KEYS, SPLITS)
    tl.store(out, parts)
    for part in range(0, parts + 1):
        tl.store(out + 1 + part, _first_of_part(first, blocks, parts, part, BLOCK))


@pytest.mark.parametrize("block", [16, 64])
def test_a_part_has_its_least_keys_and_all_parts_have_every_key(block: int) -> None:
    """As the kernel splits a row on the device, for every length at which the number of parts changes."""
    edges = [256 * i + off for i in range(5) for off in (-1, 0, 1, 17, 65, 191)]
    for length, splits, window in product(edges, (1, 4, 64), (attention.ALL_KEYS, 300, 513)):
        out = torch.zeros(2 + splits, dtype=torch.int64)
        _store_parts[(1,)](out, max(length, 0), window, BLOCK=block, KEYS=attention.KEYS_PER_SPLIT, SPLITS=splits)
        parts, length = int(out[0]), max(length, 0)
        begins = out[1 : 2 + parts].clamp(max=length)
        sizes, read = begins.diff(), length - int(begins[0])
        assert parts == max(1, min(splits, read // 256)), "257 keys are one part"
        assert int(begins[0]) == max(length - window, 0) // block * block and int(begins[-1]) == length
        assert parts == 1 or (int(sizes.min()) >= 256 and int(sizes.max() - sizes.min()) < 2 * block), sizes


@pytest.mark.parametrize("each", [1, 3])
@matrix("window,cap", [(0, 0.0), (1, 0.0), (16, 2.0), (17, 0.0), (100, 1.0)], quick=[(16, 2.0)])
def test_prompts_with_and_without_a_past(each: int, window: int, cap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Around the ends of blocks (16): new tokens, keys of the past, and windows that begin in either."""
    monkeypatch.setattr(prompts, "BLOCK_QUERIES", 16)
    monkeypatch.setattr(prompts, "BLOCK_KEYS", 16)
    tokens, past = torch.tensor([16, 1, 17, 0, 5, 33]), torch.tensor([0, 31, 0, 7, 16, 40])
    starts, key_starts = (torch.cat([torch.zeros(1), n.cumsum(0)]).int() for n in (tokens, tokens + past))
    torch.manual_seed(each)
    q, (keys, values) = torch.randn(72, each, 24), torch.randn(2, 166, 1, 24)
    given, read = (keys, values, starts, key_starts, (33, 73)), {"scale": 0.4, "window": window, "cap": cap}
    ours = prompts.attend_prompts(q, *given, **read)
    exact = references.prompt_attention(q.double(), keys.double(), values.double(), *given[2:], **read)
    close(ours, exact, torch.float32)
    alone = slice(39, 72)
    one = torch.tensor([0, 33]).int(), torch.tensor([0, 73]).int()
    again = prompts.attend_prompts(q[alone], keys[93:], values[93:], *one, (33, 73), **read)
    assert torch.equal(again, ours[alone]), "the bits of a prompt do not depend on the others"


@pytest.mark.parametrize("window", [0, 20])
def test_prompts_in_pages_of_several_blocks_have_the_bits_of_packed_ones(window: int, monkeypatch: Any) -> None:
    """Pages of 32 tokens, blocks of 16; a past that ends in the middle of a page, and tokens of no prompt."""
    monkeypatch.setattr(prompts, "BLOCK_KEYS", 16)
    starts, lengths = torch.tensor([0, 5, 5, 22]), torch.tensor([50, 0, 70])
    torch.manual_seed(window)
    q, (pool, table) = torch.randn(24, 2, 16), pages_of(lengths - 1, 32, 1, 16, torch.float32)
    packed = torch.cat([pool[:, row.long()].flatten(1, 2)[:, :n] for row, n in zip(table, lengths.tolist())], 1)
    key_starts = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    read = {"scale": 0.25, "window": window, "cap": 0.0}
    expected = prompts.attend_prompts(q, *packed, starts.int(), key_starts, (24, 70), **read)
    ours = prompts.attend_prompts_in_pages(q, *pool, table, starts, lengths, 24, **read)
    assert torch.isfinite(expected[:22]).all() and torch.equal(ours[:22], expected[:22])


@matrix("splits", [2, 1, 8])
def test_a_row_does_not_depend_on_the_others(splits: int) -> None:
    at = torch.tensor([10, 700, -1, 300])
    q, (pool, table) = torch.randn(4, 4, 16), pages_of(at, 64, 2, 16, torch.float32)
    read = {"scale": 0.25, "window": 0, "cap": 0.0, "splits": splits}
    together = attention.attend_pages(q, *pool, table, at, **read)
    for row in range(4):
        one = slice(row, row + 1)
        assert torch.equal(attention.attend_pages(q[one], *pool, table[one], at[one], **read), together[one])


def test_parts_fill_the_card_and_stay_above_their_least_length() -> None:
    assert attention.splits_of(1, 8, 131072, 132) == 64  # at most
    assert attention.splits_of(1, 8, 4096, 132) == 16  # of 256 keys
    assert attention.splits_of(16, 8, 4096, 132) == 4  # 16 x 8 x 4 programs on 132 processors
    assert attention.splits_of(64, 8, 131072, 132) == 1
    assert attention.splits_of(1, 1, 100, 132) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads,kv_heads,dim,normed", [(4, 2, 8, True), (3, 1, 12, False), (10, 3, 16, True)])
def test_rotation_and_storage(heads: int, kv_heads: int, dim: int, normed: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    at, page = torch.tensor([-1, 0, 15, 16, 17, 47]), 16
    qkv = torch.randn(len(at), (heads + 2 * kv_heads) * dim).to(dtype)
    norm = torch.randn(heads + kv_heads, dim) if normed else None
    turns = torch.view_as_real(torch.polar(torch.ones(50, dim // 2), torch.rand(50, dim // 2) * 6))
    table = (torch.randperm(18).view(6, 3) + 1).int()
    pool = torch.full((2, 19, page, kv_heads, dim), 7.0).to(dtype)
    before = pool.clone()
    q = rotary.rotate_and_store(qkv, norm, turns, at, table, *pool, 1e-5)
    exact = before.double()
    close(q[1:], references.rotate_and_store(qkv.double(), norm, turns, at, table, *exact, 1e-5)[1:], dtype)
    close(pool, exact, dtype)
    for row in range(1, len(at)):
        pool[:, table[row, int(at[row]) // page], int(at[row]) % page] = 7.0
    assert torch.equal(pool, before), "nothing else was written, also not by the empty row"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 33, 256])
def test_residual_and_norm(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x, delta, inner, weight = torch.randn(3, width), torch.randn(3, width), torch.randn(width), torch.randn(width)

    x, delta = x.to(dtype), delta.to(dtype)
    for added, by in ((None, None), (delta, None), (delta, inner)):
        residual, exact = x.clone(), x.double()
        ours = layers.add_norm(residual, added, by, weight, 1e-4)
        references.add_norm(exact, None if added is None else added.double(), by, weight, 1e-4)
        close(residual, exact, dtype)
        close(ours, references.add_norm(residual.double(), None, None, weight, 1e-4), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activation_and_gate(activation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    both = (torch.randn(2, 2 * 1030) * 3).to(dtype)
    both[0, :4] = torch.tensor([-90.0, 90.0, 0.0, -1e-3])
    gate, up = both.double().chunk(2, dim=1)
    active = (
        torch.nn.functional.silu(gate) if activation == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    )
    close(layers.gated(both, activation), active * up, dtype)


def drawn(logits: Tensor, temperature: np.ndarray, uniform: np.ndarray) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """(ids and log-probs of the host's sampler, [2, n] of the kernels)."""
    rows = draws_of(uniform, temperature)
    ours = sampling.draw_tokens(logits, torch.from_numpy(temperature).double(), torch.from_numpy(uniform))
    return sample(logits, rows), ours


def test_ten_thousand_draws_are_those_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also over several blocks of the vocabulary, and greedy ones."""
    monkeypatch.setattr(sampling, "VOCAB_BLOCK", 256)
    monkeypatch.setattr(sampling, "ROWS_AT_ONCE", 512)
    rng, count, seed = np.random.default_rng(0), 0, 0
    for vocab, n in ((40, 1000), (256, 3000), (700, 6000)):
        logits = torch.from_numpy((rng.normal(size=(n, vocab)) * 2).astype(np.float32))
        temperature = rng.choice(np.array([0.0, 0.6, 1.0, 1.0], np.float32), n)
        streams = np.array([stream_of(seed + i) for i in range(n)])
        (ids, logprobs), ours = drawn(logits, temperature, uniforms(streams, np.arange(n)))
        assert torch.equal(ours[0].long(), ids)
        torch.testing.assert_close(ours[1].float(), logprobs, atol=2e-6, rtol=2e-6)
        count, seed = count + n, seed + n
    assert count == 10_000


def test_ten_thousand_uniforms_are_those_of_the_host() -> None:
    """By torch and by the kernel, bit for bit, also for the ends of both counters."""
    streams = np.array([stream_of(seed, seed % 7) for seed in range(9_998)] + [0, 2**64 - 1], np.uint64)
    positions = np.concatenate([np.arange(9_998), [2**40, 2**31 - 1]])
    expected = torch.from_numpy(uniforms(streams, positions))
    given = torch.from_numpy(streams.view(np.int64)), torch.from_numpy(positions)
    assert torch.equal(plain_uniforms(*given), expected)
    assert torch.equal(sampling.draw_uniforms(*given), expected)


@matrix("dtype", [torch.float32, torch.bfloat16])
def test_top_k_top_p_and_min_p_without_a_sort(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every combination over several blocks; equal logits, of which those with lower ids are kept; -0 is 0."""
    monkeypatch.setattr(truncation, "VOCAB_BLOCK", 64)
    torch.manual_seed(0)
    every = [*product([0, 3], [1.0, 0.9], [0.0, 0.1]), (1, 0.3, 1.0), (200, 0.3, 0.0), (40, 1e-6, 0.0)]
    logits = (torch.randn(len(every), 75) * 3).to(dtype)
    logits[::2] = logits[::2].round()
    logits[::4] = torch.where(logits[::4] == 0, -0.0, logits[::4])
    logits[1::4, 60:] = -torch.inf
    temperature = torch.tensor([0.5, 1.0, 2.0])[torch.arange(len(every)) % 3].double()
    top_k, top_p, min_p = (torch.tensor(column) for column in zip(*every, strict=True))
    settings = top_k, top_p.double(), min_p.double()
    ours = truncation.truncate(logits.clone(), temperature, *settings)
    exact = CUT(logits.double(), temperature, *settings)
    assert torch.equal(ours.double(), exact)
    assert torch.isfinite(exact).any(1).all() and (~torch.isfinite(exact)).any(1).sum() >= 10
    greedy = truncation.truncate(logits.clone(), torch.zeros_like(temperature), *settings)
    assert torch.equal(greedy, logits)


def test_ends_of_the_distribution() -> None:
    """A uniform of 0 and just below 1, ids without probability at both ends, ties, and NaN."""
    low, top = -torch.inf, np.nextafter(1.0, 0.0)
    rows = [[low, 0, 1, low], [low, 0, 1, low], [2, 2, 2, 2], [5, 5, 1, 5], [low, low, 0, low], [0, torch.nan, 0, 0]]
    temperature = np.array([1, 1, 1, 0, 0.5, 1], np.float32)
    (ids, logprobs), ours = drawn(torch.tensor(rows), temperature, np.array([0, top, 0.5, 0.9, top, 0.375]))
    assert ours[0, :5].tolist() == ids[:5].tolist() == [1, 2, 2, 0, 2]
    torch.testing.assert_close(ours[1, :5].float(), logprobs[:5], atol=1e-6, rtol=0)
    assert torch.isnan(ours[1, 5]) and 0 <= ours[0, 5] < 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("each", [1, 2])
def test_products_of_experts(each: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert without a pair, with one, with exactly a block, and with two blocks and a rest."""
    monkeypatch.setattr(experts, "BLOCK_PAIRS", 4)
    monkeypatch.setattr(experts, "BLOCK_OUT", 16)
    monkeypatch.setattr(experts, "BLOCK_IN", 32)
    torch.manual_seed(each)
    of_pair = torch.tensor([1, 3, 3, 4, 3, 3, 3, 3, 3, 4, 3, 4, 3, 4])[torch.randperm(14)]
    x, weights = torch.randn(14 // each, 40).to(dtype), torch.randn(6, 24, 40).to(dtype)
    order = of_pair.argsort(stable=True)
    starts = torch.searchsorted(of_pair[order], torch.arange(7))
    ours = experts.expert_products(x, weights, order, starts, each)
    close(ours / 8, references.expert_products(x.double(), weights.double(), order, starts, each) / 8, dtype)


def check_blocks(rows: int, width: int, depth: int, dtype: torch.dtype, exact_rows: bool) -> None:
    rng = torch.Generator().manual_seed(rows + width + depth)
    values, scales = quantise(torch.randn(width, depth, generator=rng) * 10 ** torch.rand(width, 1, generator=rng))
    order = torch.randperm(width, generator=rng)
    x, bias, residual = (torch.randn(n, generator=rng).to(dtype) for n in ((rows, depth), (width,), (rows, width)))
    for added in ((None, None), (bias, None), (bias, residual)):
        given = values[order], scales, (order // 128).int()
        exact = references.block_linear(x.double(), given[0].double(), scales.double(), given[2], *added)
        before = None if added[1] is None else added[1].clone()
        ours = blocks.block_product(x, *given, added[0], before, exact_rows=exact_rows)
        assert before is None or ours is before
        size = exact.abs().max()
        close(ours / size, exact / size, dtype)


@pytest.mark.parametrize("exact_rows", [False, True])
@pytest.mark.parametrize("rows,width,depth", [(1, 130, 260), (16, 16, 128), (17, 300, 129), (70, 65, 127), (5, 1, 3)])
def test_products_of_blocks(rows: int, width: int, depth: int, exact_rows: bool) -> None:
    """Rows of a weight in any order of their scales, as fused projections with RoPE pairs side by side have them."""
    for dtype in DTYPES:
        check_blocks(rows, width, depth, dtype, exact_rows)


def test_a_product_of_blocks_is_that_of_the_dequantised_weight() -> None:
    weight = torch.randn(200, 300)
    values, scales = quantise(weight)
    x = torch.randn(3, 300)
    ours = blocks.block_product(x, values, scales, (torch.arange(200) // 128).int())
    torch.testing.assert_close(ours, x @ dequantise(values, scales).T, atol=2e-5, rtol=2e-5)
    assert blocks.block_product(x[:0], values, scales, (torch.arange(200) // 128).int()).shape == (0, 200)


def test_exact_rows_of_blocks_do_not_depend_on_the_others() -> None:
    values, scales = quantise(torch.randn(100, 300))
    given = values, scales, torch.zeros(100, dtype=torch.int32)
    x = torch.randn(80, 300)
    together = blocks.block_product(x, *given, exact_rows=True)
    for rows in (slice(0, 1), slice(70, 80)):
        assert torch.equal(blocks.block_product(x[rows], *given, exact_rows=True), together[rows])


def test_tiles_fill_the_card() -> None:
    assert blocks.tile_of(1, 1024, 132, False) == (16, 16)
    assert blocks.tile_of(16, 4096 * 3, 132, False) == (16, 32)
    assert blocks.tile_of(8, 32768, 132, False) == (16, 64)
    assert blocks.tile_of(17, 1024, 132, False) == blocks.tile_of(1, 1024, 132, True) == (64, 64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_experts_in_blocks(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values, scales = quantise(torch.randn(3, 200, 260) * torch.tensor([1.0, 30.0, 0.1])[:, None, None])
    order, starts = torch.tensor([2, 0, 4, 1, 3]), torch.tensor([0, 2, 2, 5])
    x = torch.randn(5, 260).to(dtype)
    ours = experts.expert_products(x, values, order, starts, 1, scales)
    exact = references.expert_products(x.double(), values.double(), order, starts, 1, scales.double())
    close(ours / 64, exact / 64, dtype)
    whole = references.expert_products(x.double(), dequantise(values, scales).double(), order, starts, 1)
    torch.testing.assert_close(exact, whole, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("rows,width,depth", [(3, 70, 64), (20, 33, 192), (2, 31, 66), (65, 65, 128)])
@pytest.mark.parametrize("double", [True, False])
def test_products_of_nf4(rows: int, width: int, depth: int, double: bool) -> None:
    """Rows of whole blocks, and rows that end within one; scales in 8 bits and in float32."""
    weight = quantise_weight(torch.randn(width, depth) * depth**-0.5, "nf4", double=double)
    exact, bias = weight.dequantised(torch.float32).double(), torch.randn(width)
    for dtype in DTYPES:
        x, dy = torch.randn(rows, depth).to(dtype), torch.randn(rows, width).to(dtype)
        rounded = exact.to(dtype).double()
        close(
            nf4.nf4_product(x, weight, bias.to(dtype)) / 4,
            (x.double() @ rounded.T + bias.to(dtype).double()) / 4,
            dtype,
        )
        close(nf4.nf4_back(dy, weight) / 4, dy.double() @ rounded / 4, dtype)
    assert nf4.nf4_product(x[:0], weight).shape == (0, width)


ROWS = [pytest.param(row, id=row.operation) for row in KERNELS if row.name == TRITON]


@pytest.mark.parametrize("row", ROWS)
def test_every_row_of_the_table_is_its_operation(row: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases of the table, which a machine with a GPU runs on it."""
    monkeypatch.setattr(sampling, "ROWS_AT_ONCE", 64)
    for size, dtype in ((0, torch.float32), (1, torch.bfloat16), (2, torch.float32), (3, torch.float16)):
        if dtype in row.tolerance:
            check_row(row, torch.device("cpu"), dtype, size)


def large_inputs(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs of an operation with rows as large as those of a model, but few of them."""
    if name == "page_attention":
        positions = torch.tensor([299, 700])
        (keys, values), table = pages_of(positions, 64, 2, 64, torch.float16)
        return (torch.randn(2, 8, 64).half(), keys, values, table, positions), {"scale": 0.1}
    if name == "block_linear":
        values, scales = quantise(torch.randn(500, 1000))
        return (torch.randn(2, 1000).half(), values, scales, (torch.arange(500) // 128).int()), {}
    if name.startswith("quantised"):
        return (torch.randn(2, 512).half(), quantise_weight(torch.randn(512, 512), "nf4")), {}
    if name == "gated":
        return (torch.randn(3, 4000).half(), "silu"), {}
    if name == "sample":
        return (torch.randn(2, 20_000).half(), torch.ones(2), torch.rand(2, dtype=torch.float64)), {}
    if name == "truncate":
        logits, ones = torch.randn(2, 20_000).half(), torch.ones(2, dtype=torch.float64)
        return (logits, ones, torch.tensor([5, 9]), ones, 0 * ones), {}
    if name == "trained_rms_norm":
        return (torch.randn(5, 2000).half(), torch.randn(2000).half(), 1e-5), {}
    if name in ("logit_sums", "logit_gradients"):
        (z, targets, temperature, _), _ = CASES["logit_sums"].inputs(torch.Generator().manual_seed(1), 2, torch.float16)
        of_rows = () if name == "logit_sums" else torch.ones(4, 5)  # every row has a gradient
        return (z, targets, temperature, *of_rows), {}
    if name == "add_norm":
        return (*torch.randn(2, 5, 2000).half(), None, torch.randn(2000).half(), 1e-5), {}
    return CASES[name].inputs(torch.Generator().manual_seed(1), 3 if name == "rotate_and_store" else 1, torch.float16)


@pytest.mark.parametrize("row", ROWS)
def test_bytes_that_move_are_those_that_are_declared(row: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    args, rest = large_inputs(row.operation)
    cost = OPERATIONS[row.operation].cost(*args, **rest)
    call = row.load(Use(torch.device("cpu"), torch.float16))
    assert not isinstance(call, str)
    function, traffic = as_function(row.operation, call), Traffic(monkeypatch)
    function(*args, **rest)
    assert 0.95 * cost.bytes <= traffic.bytes <= row.traffic * cost.bytes, (traffic.bytes, cost.bytes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 67, 128, 2000])
def test_the_gradient_of_a_norm_is_summed_over_all_rows(width: int, dtype: torch.dtype, monkeypatch: Any) -> None:
    """More rows than programs: each has several steps, and the last ones have no row."""
    monkeypatch.setattr(training, "MAX_PROGRAMS", 3)
    torch.manual_seed(width)
    x, weight = torch.randn(77, width), torch.randn(width)
    x += x.sign()  # the gradient of a short row near 0 is a small difference of large numbers
    x, weight = (y.to(dtype).requires_grad_() for y in (x, weight))
    d_out = torch.randn(77, width).to(dtype)
    exact = [y.detach().double().requires_grad_() for y in (x, weight)]
    ours = torch.autograd.grad(training.fused_rms_norm(x, weight, 1e-5), (x, weight), d_out)
    theirs = torch.autograd.grad(trained.trained_rms_norm(*exact, 1e-5), exact, d_out.double())
    close(ours[0], theirs[0], dtype)
    close(ours[1] / 16, theirs[1] / 16, dtype)


@pytest.mark.parametrize("operation", ["trained_rms_norm", "trained_swiglu", "trained_rotation"])
def test_a_trained_operation_of_no_row_and_of_a_view(operation: str) -> None:
    """A rank may have no token; heads may be slices of a wider row."""
    wide = torch.randn(6, 4, 16, requires_grad=True)
    tables = torch.randn(2, 6, 1, 8)
    more = {"trained_rms_norm": (torch.randn(8), 1e-5), "trained_swiglu": (wide[..., 8:],)}
    for rows in (0, 6):
        args = (wide[:rows, :, :8], *more.get(operation, tables[:, :rows].unbind()))
        if operation == "trained_swiglu":
            args = (args[0], wide[:rows, :, 8:])
        found = []
        fused = operation.replace("trained", "fused")
        for function in (getattr(training, fused), getattr(trained, operation)):
            out = function(*args)
            found.append((out, torch.autograd.grad(out.square().sum(), wide)[0]))
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
