"""run.deterministic=true through the Triton kernels, in Triton's interpreter: the bits of a row are the same alone and
in every batch, at every place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from decode_references import pages_of
from each import matrix
from interpreted import fix_bf16_products, interpreted_ops
from rollouts import finish, source_of
from test_rollout_numerics import CONFIGS, reference
from torch import Tensor

pytest.importorskip("triton", reason="no Triton here (make triton-package)")
from verl.accel.cuda import attention, experts, layers, products, rotary, sampling
from verl.accel.operations import Kernel, Use
from verl.accel.table import choose
from verl.rollout.base import GenerateRequest
from verl.rollout.embedded.core import EngineCore
from verl.rollout.embedded.requests import ActiveRequest
from verl.rollout.native import ops, paged
from verl.rollout.native.options import Options
from verl.rollout.native.runner import NativeRunner
from verl.types import Sampling

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BATCHES = (2, 3, 16, 17, 64)


@pytest.fixture(autouse=True)
def bf16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    fix_bf16_products(monkeypatch)


def same_rows(call: Callable[[Tensor], Tensor], rows: int = 64, step: int = 7) -> None:
    """`call` computes the rows of these indices; every `step`-th alone, in batches of 2 to 64, and at other places."""
    alone = [call(torch.tensor([row])) for row in range(0, rows, step)]
    rng = torch.Generator().manual_seed(0)
    for size in BATCHES:
        chosen = torch.randperm(rows, generator=rng)[:size]
        together = call(chosen)
        for place, row in enumerate(chosen.tolist()):
            if row % step == 0:
                assert torch.equal(together[place : place + 1], alone[row // step]), (size, place, row)


@pytest.mark.parametrize("dtype", DTYPES)
@matrix("width,depth", [(67, 130), (16, 64)])
def test_products(width: int, depth: int, dtype: torch.dtype) -> None:
    x, weight, residual = (torch.randn(n, m).to(dtype) for n, m in ((64, depth), (width, depth), (64, width)))
    bias = torch.randn(width).to(dtype)
    one = products.exact_products().make(weight, bias)
    same_rows(lambda rows: one(x[rows]))
    same_rows(lambda rows: one.add_to(residual[rows], x[rows]))
    assert products.exact_products().exact_rows


def test_a_product_adds_to_the_residual_in_place() -> None:
    x, weight, bias, residual = torch.randn(70, 33), torch.randn(65, 33), torch.randn(65), torch.randn(70, 65)
    before = residual.double()
    exact = before + x.double() @ weight.double().T + bias.double()
    assert products.Exact(weight, bias).add_to(residual, x) is residual
    torch.testing.assert_close(residual.double(), exact, atol=1e-5, rtol=1e-5)
    again = products.Exact(weight, None).add_to(residual.clone(), x)
    torch.testing.assert_close(again.double(), exact + (exact - bias.double() - before), atol=1e-5, rtol=1e-5)
    assert products.Exact(weight, None)(x[:0]).shape == (0, 65)


@matrix("window", [40, 0])
def test_attention(window: int) -> None:
    """Rows of one token up to several parts: the number of rows decides nothing."""
    at = torch.arange(64) * 9 - 1
    q, (pool, table) = torch.randn(64, 2, 16), pages_of(at, 64, 1, 16, torch.float32)
    read, attend = {"scale": 0.25, "window": window}, interpreted_ops().with_exact_rows().page_attention
    same_rows(lambda rows: attend(q[rows], *pool, table[rows], at[rows], **read), step=9)
    assert [attention.exact_splits_of(tokens) for tokens in (1, 600, 1100, 10**6)] == [1, 2, 4, 64]


def test_norms_gates_and_rotation() -> None:
    x, delta, weight = torch.randn(64, 40), torch.randn(64, 40), torch.randn(40)
    same_rows(lambda rows: layers.add_norm(x[rows], delta[rows], weight, weight, 1e-6))
    same_rows(lambda rows: layers.gated(x[rows], "silu"))
    at, table = torch.arange(64), torch.arange(1, 257).view(64, 4).int()
    qkv, turns, pool = torch.randn(64, 8 * 12), torch.randn(64, 6, 2), torch.zeros(2, 257, 16, 2, 12)

    def stored(rows: Tensor) -> Tensor:
        q = rotary.rotate_and_store(qkv[rows], torch.ones(6, 12), turns, at[rows], table[rows], *pool, 1e-6)
        lines = pool[:, table[rows, at[rows] // 16].long(), at[rows] % 16]
        return torch.cat([q.flatten(1), lines.transpose(0, 1).flatten(1)], 1)

    same_rows(stored)


def test_experts() -> None:
    x, weights, chosen, share = torch.randn(64, 40), torch.randn(5, 24, 40), torch.rand(64, 5), torch.rand(64, 2)
    chosen = chosen.topk(2).indices

    def mixed(rows: Tensor) -> Tensor:
        pairs = chosen[rows].flatten()
        order = pairs.argsort(stable=True)
        starts = torch.searchsorted(pairs[order], torch.arange(6))
        return experts.expert_sum(experts.expert_products(x[rows], weights, order, starts, 2), share[rows])

    same_rows(mixed)


@pytest.mark.slow
def test_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "VOCAB_BLOCK", 256)
    logits, temperature = torch.randn(64, 700) * 3, torch.arange(64) % 3 * 0.6
    uniform = torch.rand(64, dtype=torch.float64)
    same_rows(lambda rows: sampling.draw_tokens(logits[rows], temperature[rows], uniform[rows]).T)


# -- the whole engine --------------------------------------------------------------------------------------------------


def deterministic(name: str, module: Any, monkeypatch: pytest.MonkeyPatch, **sizes: Any) -> EngineCore:
    """An engine as it is built on CUDA, on a CPU: the layout of products is the one that the table has there."""
    from rollouts import context_of

    def chosen(operation: str, use: Use, *, without: tuple[str, ...] = ()) -> Any:
        cuda = Use(torch.device("cuda"), use.dtype, use.sizes)
        return choose(operation, cuda if operation == "exact_linear" else use, without=without)

    monkeypatch.setattr(ops, "choose", chosen)
    monkeypatch.setattr("verl.accel.cuda.rows.missing", lambda device, sizes, least=None: None)
    context = context_of(CONFIGS[name], sizes.get("rows", 5), max_context_tokens=128, dtype=torch.float32,
                         deterministic=True)  # fmt: skip
    options = Options(max_prefill_tokens=sizes.get("max_prefill_tokens", 64), prefix_cache_tokens=0)
    runner = NativeRunner(options, context, lanes=1, compiled=False, paged=True, decode_ops=interpreted_ops())
    assert runner._paged is not None and runner.ops.products.exact_rows
    assert runner._paged._ops is not None and runner._paged._ops.page_attention.keywords == {"exact_rows": True}
    core = EngineCore(runner, (), None)
    core.load(source_of(module))
    return core


def requests(names: Any, cut: bool = False) -> list[ActiveRequest]:
    """Prompts of 1 to 31 tokens; with `cut` the last one is drawn with top-p."""
    lengths = {"a": 31, "b": 5, "c": 1, "d": 16, "e": 23}
    made = []
    for name in names:
        prompt = np.random.default_rng(ord(name)).integers(0, 67, lengths[name])
        kept = {"top_p": 0.8} if cut and name == "e" else {}
        made.append(ActiveRequest(GenerateRequest(name, prompt, Sampling(max_tokens=4, seed=ord(name), **kept))))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3 moe"])
def test_a_completion_does_not_depend_on_the_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "PAGE", 16)
    module = reference(CONFIGS[name])
    alone = {n: finish(deterministic(name, module, monkeypatch, rows=1), requests(n))[n] for n in "ab"}
    for names, cut in (("edcba", True), ("cab", False)):
        done = finish(deterministic(name, module, monkeypatch), requests(names, cut))
        for n, expected in alone.items():
            assert done[n].ids.tolist() == expected.ids.tolist()
            assert done[n].logprobs.tobytes() == expected.logprobs.tobytes(), (names, n)


def test_without_the_kernels_no_pages_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads as many pages as the longest row has, which changes the bits of the others."""
    from rollouts import context_of

    context = context_of(CONFIGS["qwen3"], 4, deterministic=True)
    runner = NativeRunner(Options(), context, lanes=1, paged=True)
    assert runner._paged is None and not isinstance(runner.ops.products, Kernel)
