"""A head that ranks have slices of gives what the whole one does: log-probs of named ids and of the rest, their
gradients, and the likeliest ids of a teacher."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from facts import use_chunks
from torch import Tensor

from verl.nn.linear_logprob import Banned, Vocabulary, linear_logprob
from verl.nn.linear_teacher import HeadWeights, top_k

N, H, V, RANKS = 11, 6, 15, 3
F64 = torch.float64
BANNED = Banned(torch.tensor([0, 6, 7, 14]), torch.arange(N) % 3 == 0)


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_chunks(monkeypatch, least_rows=4, at_once=1)


def on_ranks(compute: Callable[[Vocabulary, slice], Any]) -> list[Any]:
    """Call `compute` with each slice of the vocabulary, in threads that exchange what ranks would."""
    size, barrier, given = V // RANKS, Barrier(RANKS, timeout=60), [torch.empty(0)] * RANKS

    def on(rank: int) -> Any:
        def gather(mine: Tensor) -> Tensor:
            given[rank] = mine
            barrier.wait()
            found = torch.stack(given)
            barrier.wait()
            return found

        return compute(Vocabulary(rank * size, lambda x: x, gather), slice(rank * size, (rank + 1) * size))

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(on, range(RANKS)))


@pytest.fixture
def head() -> dict[str, Tensor]:
    torch.manual_seed(0)
    made = {"hidden": torch.randn(N, H), "weight": torch.randn(V, H), "bias": torch.randn(V)}
    return {name: x.to(F64).requires_grad_() for name, x in made.items()}


TARGETS = torch.tensor([1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13] * N)[:N]
TEMPERATURE = torch.linspace(0.5, 2, N, dtype=F64)


@pytest.mark.parametrize("banned", [None, BANNED])
@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize("k", [1, 4, V])
def test_named_ids_of_slices(head: dict[str, Tensor], k: int, cap: float, banned: Banned | None) -> None:
    ids = torch.stack([torch.randperm(V, generator=torch.Generator().manual_seed(n))[:k] for n in range(N)])
    hidden, weight, bias = head.values()
    given: dict[str, Any] = {"cap": cap, "ids": ids, "banned": banned, "entropy": True, "sum_pi_squared": True}
    whole = linear_logprob(hidden, weight, TARGETS, TEMPERATURE, bias=bias, **given)

    def of(part: Vocabulary, at: slice) -> Any:
        return linear_logprob(hidden, weight[at], TARGETS, TEMPERATURE, bias=bias[at], vocabulary=part, **given)

    ranks = on_ranks(of)
    for found in ranks:
        for got, want in zip(found, whole, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    torch.manual_seed(1)
    factors = [torch.randn(x.shape, dtype=F64) for x in (whole[0], whole[1], whole[3])]  # type: ignore[union-attr]

    def loss(found: Any) -> Tensor:
        at = found[3].where(found[3] > -1e20, 0)  # what has probability 0 has no gradient
        return sum((x * f).sum() for x, f in zip((found[0], found[1], at), factors, strict=True))  # type: ignore[return-value]

    leaves = list(head.values())
    wanted = torch.autograd.grad(loss(whole), leaves, retain_graph=True)
    for got, want in zip(torch.autograd.grad(sum(loss(found) for found in ranks), leaves), wanted, strict=True):
        assert want.abs().max() > 0
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("banned", [None, BANNED])
@pytest.mark.parametrize("k", [1, 4, 12, V])
def test_the_likeliest_ids_of_slices(head: dict[str, Tensor], k: int, banned: Banned | None) -> None:
    hidden, weight, bias = (x.detach() for x in head.values())
    ids, logprobs, own = top_k(hidden, HeadWeights(weight, bias), TEMPERATURE, k, TARGETS, banned)
    z = (hidden @ weight.T + bias) / TEMPERATURE[:, None]
    if banned is not None:
        z[banned.rows[:, None] & torch.isin(torch.arange(V), banned.ids)] = -torch.inf
    dense = z.log_softmax(-1)
    possible = dense.gather(-1, ids) > -torch.inf
    torch.testing.assert_close(dense.topk(k, -1).values, logprobs[:, :-1], rtol=1e-9, atol=1e-9)
    rest = 1 - logprobs[:, :-1].exp().sum(-1)
    torch.testing.assert_close(logprobs[:, -1].exp(), rest, rtol=0, atol=1e-9)
    torch.testing.assert_close(own, dense.gather(-1, TARGETS[:, None])[:, 0], rtol=1e-9, atol=1e-9)

    def of(part: Vocabulary, at: slice) -> Any:
        return top_k(hidden, HeadWeights(weight[at], bias[at]), TEMPERATURE, k, TARGETS, banned, part)

    for got in on_ranks(of):
        assert torch.equal(got[0][possible], ids[possible]), "ids without probability have no order"
        assert all(len(set(row.tolist())) == k for row in got[0])
        torch.testing.assert_close(got[1], logprobs, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(got[2], own, rtol=1e-9, atol=1e-9)
