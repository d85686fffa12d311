"""Log-probs of named ids, of the rest together, and the likeliest ids of a teacher, by the kernels that read a chunk of
logits once, in Triton's interpreter, against torch's operations in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from facts import use_facts
from interpreted import recorded_launches
from test_no_waits import META
from torch import Tensor

pytest.importorskip("triton", reason="no Triton here (make triton-package)")
from test_head_kernels import BLOCK, OverLogits, interpreted

from verl.accel.cuda import head
from verl.nn import linear_logprob as module
from verl.nn import linear_teacher
from verl.nn.head_kernels import LogitKernels
from verl.nn.linear_logprob import Banned, Vocabulary, linear_logprob
from verl.nn.linear_teacher import HeadWeights, top_k
from verl.nn.logit_chunks import NONE

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
N, H, V, K, RANKS = 13, 6, 45, 4, 3
BANNED = Banned(torch.tensor([0, 5, 21, 44]), torch.arange(N) % 3 == 0)
CASES = ((1, 0.0, BANNED), (K, 3.0, BANNED), (K, 0.0, None), (V - 1, 0.0, BANNED), (V, 3.0, None))
of_cases = pytest.mark.parametrize("k,cap,banned", CASES, ids=["one", "cap", "few", "all but one", "all"])


@pytest.fixture(autouse=True)
def sizes_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks and several blocks, and all rows computed, as on a GPU."""
    monkeypatch.setattr(head, "VOCAB_BLOCK", BLOCK)
    use_facts(monkeypatch, module, compacts_rows=False, logit_chunk_rows=5, logit_chunk_bytes=0)


@pytest.fixture
def leaves() -> list[Tensor]:
    """Hidden states, weight and bias of a head."""
    torch.manual_seed(0)
    return [x.requires_grad_() for x in (torch.randn(N, H), 0.7 * torch.randn(V, H), torch.randn(V))]


def wider(leaves: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in leaves]


def rows(k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Targets, of which half are named and none is banned, temperatures and k named ids of each row."""
    rng = torch.Generator().manual_seed(k)
    ids = torch.stack([torch.randperm(V, generator=rng)[:k] for _ in range(N)])
    targets = torch.where(torch.arange(N) % 2 == 0, ids[:, k // 2], torch.randint(0, V, (N,), generator=rng))
    return targets.where(~torch.isin(targets, BANNED.ids), 7), torch.rand(N, generator=rng) + 0.5, ids


def outputs(leaves: list[Tensor], k: int, at: slice = slice(None), **options: Any) -> list[Tensor]:
    """Log-probs of targets, entropies, sums of squares and log-probs of named ids, by the slice `at` of a head."""
    (hidden, weight, bias), (targets, temperature, ids) = leaves, rows(k)
    wanted: dict[str, Any] = {"ids": ids, "entropy": True, "sum_pi_squared": True, **options}
    return list(linear_logprob(hidden, weight[at], targets, temperature, bias=bias[at], **wanted))  # type: ignore[arg-type]


def gradients(found: list[Tensor], upstream: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """upstream [n, k + 3]: factors of log-probs, entropies and log-probs of named ids."""
    columns = torch.cat([found[0][:, None], found[1][:, None], found[3]], 1)
    used = torch.where((upstream != 0) & (columns > NONE / 2), columns, 0.0)  # what has probability 0 has no gradient
    return list(torch.autograd.grad((used * upstream).sum(), leaves))


def by_kernels(patch: pytest.MonkeyPatch, call: Callable[[], Any]) -> Any:
    with patch.context() as within:
        for where in (module, linear_teacher):
            within.setattr(where, "logit_kernels", lambda *use: interpreted())
        return call()


def near(ours: Sequence[Tensor], exact: Sequence[Tensor], error: float) -> None:
    """Relative to the largest value: small ones are differences of large ones. Probabilities of 0 are the same."""
    for got, want in zip(ours, exact, strict=True):
        assert torch.equal(got < NONE / 2, want < NONE / 2)
        got, want = (torch.where(x < NONE / 2, 0, x.detach().double()) for x in (got, want))
        assert float((got - want).abs().max()) <= error * float(want.abs().max()), (got, want)


@of_cases
def test_float32_is_exact(
    leaves: list[Tensor], k: int, cap: float, banned: Banned | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream, exact = torch.randn(N, k + 3), wider(leaves)
    wanted = outputs(exact, k, cap=cap, banned=banned)

    def run() -> list[list[Tensor]]:
        found = outputs(leaves, k, cap=cap, banned=banned)
        return [found, gradients(found, upstream, leaves)]

    values, grads = by_kernels(monkeypatch, run)
    near(values, wanted, 1e-6)
    near(grads, gradients(wanted, upstream, exact), 2e-6)


@pytest.mark.parametrize("unused", ["0", "1", "named", "rest", "0 1", "1 named", "named rest", "0 1 rest"])
def test_a_loss_of_some_outputs(leaves: list[Tensor], unused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """0: log-probs, 1: entropies."""
    upstream, exact = torch.randn(N, K + 3), wider(leaves)
    columns = {"0": slice(1), "1": slice(1, 2), "named": slice(2, K + 2), "rest": slice(K + 2, None)}
    for name in unused.split():
        upstream[:, columns[name]] = 0
    found = by_kernels(monkeypatch, lambda: gradients(outputs(leaves, K), upstream, leaves))
    near(found, gradients(outputs(exact, K), upstream, exact), 2e-6)


def test_named_ids_that_no_loss_reads(leaves: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(of: list[Tensor]) -> list[Tensor]:
        lp, entropy, *_ = outputs(of, K)
        return list(torch.autograd.grad((lp + entropy).sum(), of))

    near(by_kernels(monkeypatch, lambda: run(leaves)), run(wider(leaves)), 2e-6)


@pytest.mark.parametrize("dtype,error", [(torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)])
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_half_precision_is_as_near_to_float64_as_torchs_operations(
    leaves: list[Tensor], dtype: torch.dtype, error: float, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """scale 8: some ids have almost the whole probability, and their gradients are small differences."""
    hidden, weight, bias = leaves[0].detach().to(dtype), (scale * leaves[1].detach()).to(dtype), leaves[2]
    half, upstream = [hidden.requires_grad_(), weight.requires_grad_(), bias], torch.randn(N, K + 3)
    z = (hidden @ weight.T).detach()  # as both round it

    def run() -> list[list[Tensor]]:
        found = outputs(half, K)
        return [found, gradients(found, upstream, half)]

    (values, ours), (_, theirs) = by_kernels(monkeypatch, run), run()
    exact = wider([z, torch.eye(V), bias])
    found = outputs(exact, K)
    near(values, found, 2e-6 * scale)
    dz, _, d_bias = gradients(found, upstream, exact)
    wanted = [dz @ weight.detach().double(), dz.T @ hidden.detach().double(), d_bias]
    for got, same, want in zip(ours, theirs, wanted, strict=True):
        assert got.dtype == same.dtype
        mine, usual = (float((x.double() - want).norm() / want.norm()) for x in (got, same))
        # the interpreter cuts to bfloat16 where a card rounds; without the kernels a bias sums unrounded gradients
        assert mine <= error and (mine <= (1.2 if dtype == torch.float16 else 2) * usual or got.dim() == 1), (
            mine,
            usual,
        )


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_rows_without_a_gradient_reach_nothing(
    leaves: list[Tensor], broken: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states of ignored rows are not finite."""
    ignored = (torch.arange(N) % 3 == 1)[:, None]
    upstream, exact = torch.where(ignored, 0.0, torch.randn(N, K + 3)), wider(leaves)
    leaves[0] = torch.where(ignored, broken, leaves[0].detach()).requires_grad_()
    found = by_kernels(monkeypatch, lambda: gradients(outputs(leaves, K), upstream, leaves))
    near(found, gradients(outputs(exact, K), upstream, exact), 2e-6)


@pytest.mark.parametrize("target", range(5))
def test_a_rest_that_is_almost_nothing_keeps_its_digits(target: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log-prob, and the shares of its ids: in float32, 1 - the sum of the others is 0 or noise."""
    z = torch.tensor([[3.0, 2.0, -95.0, -95.6, -97.0]])
    (exact,), (leaf,) = wider([z]), [z.requires_grad_()]
    rest = exact[0, 2:].logsumexp(0) - exact[0].logsumexp(0)
    (want,) = torch.autograd.grad(rest, exact)

    def run() -> tuple[Tensor, Tensor]:
        ids = torch.tensor([[0, 1]])
        found: Any = linear_logprob(leaf, torch.eye(5), torch.tensor([target]), torch.ones(1), ids=ids)[3]
        return found[0, 2], torch.autograd.grad(found[0, 2], leaf)[0]

    got, grad = by_kernels(monkeypatch, run)
    torch.testing.assert_close(got.double(), rest, rtol=1e-6, atol=0)
    torch.testing.assert_close(grad.double(), want, rtol=1e-5, atol=1e-7)


def in_turn(compute: Callable[[Vocabulary, slice], Any]) -> list[Any]:
    """What `compute` returns for each slice of the vocabulary, one after the other, since the interpreter has one
    thread: first to note what each gathers, then to read what all do."""
    size, noted = V // RANKS, [list[Tensor]() for _ in range(RANKS)]

    def on(rank: int, gather: Callable[[Tensor], Tensor]) -> Any:
        part = Vocabulary(rank * size, lambda x: x, gather)
        return compute(part, slice(rank * size, (rank + 1) * size))

    def note(mine: Tensor, rank: int) -> Tensor:
        noted[rank].append(mine.clone())
        return torch.stack([mine] * RANKS)

    for rank in range(RANKS):
        on(rank, lambda mine, rank=rank: note(mine, rank))  # type: ignore[misc]
    together = [[torch.stack(parts) for parts in zip(*noted, strict=True)] for _ in range(RANKS)]
    return [on(rank, lambda mine, rank=rank: together[rank].pop(0)) for rank in range(RANKS)]  # type: ignore[misc]


@of_cases
def test_slices_of_a_vocabulary_are_combined(
    leaves: list[Tensor], k: int, cap: float, banned: Banned | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream, exact = torch.randn(N, k + 3), wider(leaves)
    whole = outputs(exact, k, cap=cap, banned=banned)

    def run() -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        ranks = in_turn(lambda part, at: outputs(leaves, k, at, cap=cap, banned=banned, vocabulary=part))
        return ranks, [gradients(found, upstream, leaves) for found in ranks]

    ranks, grads = by_kernels(monkeypatch, run)
    for found in ranks:
        near(found, whole, 1e-6)
    near([torch.stack(parts).sum(0) for parts in zip(*grads, strict=True)], gradients(whole, upstream, exact), 2e-6)


@of_cases
@pytest.mark.parametrize("biased", [False, True])
def test_the_likeliest_ids_of_a_teacher(
    leaves: list[Tensor], biased: bool, k: int, cap: float, banned: Banned | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of slices. A bias changes the order of the ids, so torch's operations compute a head that has one."""
    targets, temperature, _ = rows(k)

    def of(side: Sequence[Tensor], part: Vocabulary | None = None, at: slice = slice(None)) -> Any:
        hidden, weight, bias = (x.detach() for x in side)
        its = HeadWeights(weight[at], bias[at] if biased else None, cap)
        return top_k(hidden, its, temperature, k, targets, banned, part)

    ids, logprobs, own = of(wider(leaves))
    possible = logprobs[:, :-1] > -torch.inf
    whole = by_kernels(monkeypatch, lambda: of(leaves))
    for found in (whole, *by_kernels(monkeypatch, lambda: in_turn(lambda part, at: of(leaves, part, at)))):
        assert torch.equal(found[0][possible], ids[possible]) and all(len(set(row.tolist())) == k for row in found[0])
        near(found[1:], (logprobs, own), 1e-6)
    hidden, weight, _ = (x.detach() for x in leaves)
    without = by_kernels(monkeypatch, lambda: top_k(hidden, HeadWeights(weight), temperature, k))
    assert without[2] is None


def test_launches_and_passes_over_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device `meta`, from which nothing can be read."""
    launched, vocab = recorded_launches(monkeypatch, head, ("_sum_logits", "_logit_gradients")), 1000
    use_facts(monkeypatch, module, compacts_rows=False, logit_chunk_rows=N, logit_chunk_bytes=0)
    leaves = [torch.empty(*s, dtype=torch.bfloat16, device=META, requires_grad=True) for s in ((N, H), (vocab, H))]
    targets, ids = (torch.empty(*s, dtype=torch.int64, device=META) for s in ((N,), (N, K)))
    temperature, counted = torch.empty(N, device=META), []
    for kernels in (LogitKernels(head.logit_sums, head.logit_gradients), None):
        for where in (module, linear_teacher):
            monkeypatch.setattr(where, "logit_kernels", lambda *use, kernels=kernels: kernels)
        modes = [OverLogits(N * vocab) for _ in range(3)]
        with modes[0]:
            lp, entropy, _, at = linear_logprob(*leaves, targets, temperature, ids=ids, entropy=True)
        with modes[1]:
            torch.autograd.grad((lp + entropy).sum() + at.sum(), leaves)  # type: ignore[operator, union-attr]
        with modes[2]:
            top_k(leaves[0].detach(), HeadWeights(leaves[1].detach()), temperature, K)
        counted.append([mode.calls["over logits"] for mode in modes])
    assert launched == ["_sum_logits", "_logit_gradients", "_sum_logits"]
    assert counted[0] == [1, 3, 2], "the logits; again, and the products of their gradient; the logits and their order"
    assert counted[1] == [1 + 10, 3 + 17, 2 + 5], "besides products and the order, each is at least a pass"
