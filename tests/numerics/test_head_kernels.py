"""Log-probs, entropies and their gradients by the kernels that read a chunk of logits once, in Triton's interpreter,
against torch's operations on the same chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from facts import use_facts
from interpreted import recorded_launches
from test_no_waits import META, NoReads
from torch import Tensor
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton", reason="no Triton here (make triton-package)")
from verl.accel.cuda import head
from verl.accel.cuda.rows import KERNELS
from verl.accel.operations import Use
from verl.nn import linear_logprob as module
from verl.nn.head_kernels import LogitKernels
from verl.nn.linear_logprob import Banned, Vocabulary, linear_logprob

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
CPU, N, H = torch.device("cpu"), 13, 6
BLOCK = 16
SIZES = (3, 16, 17, 67)  # of the vocabulary: below, at and above a block, and several with a rest
IDS = torch.tensor([0, 5, 21])


def interpreted() -> LogitKernels:
    """The rows of Triton, which the interpreter runs on a CPU."""
    loaded = {row.operation: row.load(Use(CPU, torch.float32)) for row in KERNELS}
    return LogitKernels(loaded["logit_sums"], loaded["logit_gradients"])  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def sizes_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks and several blocks, and all rows computed, as on a GPU."""
    monkeypatch.setattr(head, "VOCAB_BLOCK", BLOCK)
    use_facts(monkeypatch, module, compacts_rows=False, logit_chunk_rows=5, logit_chunk_bytes=0)


def inputs(vocab: int, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """Leaves (hidden states, weight, bias), and targets with temperatures."""
    torch.manual_seed(vocab)
    hidden, weight, bias = torch.randn(N, H), 0.5 * torch.randn(vocab, H), torch.randn(vocab)
    leaves = [hidden.to(dtype), weight.to(dtype).float(), bias]
    return [x.requires_grad_() for x in leaves], (torch.randint(0, vocab, (N,)), torch.rand(N) + 0.5)


def both(patch: pytest.MonkeyPatch, call: Any) -> tuple[Any, Any]:
    """The results of a call with the kernels, each of which ran, and without them."""
    ran, kernels = set(), interpreted()

    def seen(name: str) -> Any:
        def run(*args: Any) -> Any:
            ran.add(name)
            return getattr(kernels, name)(*args)

        return run

    with patch.context() as within:
        within.setattr(module, "logit_kernels", lambda *use: LogitKernels(seen("sums"), seen("gradients")))
        ours = call()
    assert ran == {"sums", "gradients"}
    return ours, call()


def results(leaves: list[Tensor], given: tuple[Tensor, Tensor], upstream: Tensor, **options: Any) -> list[Tensor]:
    """Log-probs, entropies, sums of squares, and the gradients of the leaves."""
    hidden, weight, bias = leaves
    found = linear_logprob(hidden, weight, *given, bias=bias, entropy=True, sum_pi_squared=True, **options)[:3]
    lp, entropy, squares = found
    assert lp is not None and entropy is not None and squares is not None and not squares.requires_grad
    d_lp, d_entropy = (torch.where(u != 0, x, 0.0) * u for x, u in zip((lp, entropy), upstream, strict=True))
    return [*found, *torch.autograd.grad((d_lp + d_entropy).sum(), leaves)]  # type: ignore[list-item]


def compare(ours: list[Tensor], theirs: list[Tensor], error: float) -> None:
    """Relative to the largest value: small ones are differences of large ones."""
    for got, want in zip(ours, theirs, strict=True):
        assert got.dtype == want.dtype and torch.equal(got.isnan(), want.isnan())
        got, want = got.detach().nan_to_num(), want.detach().nan_to_num()
        assert float((got - want).abs().max()) <= error * float(want.abs().max()), (got, want)


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("cap", [0.0, 2.0, 30.0])
def test_float32_is_that_of_torchs_operations(vocab: int, cap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, given = inputs(vocab)
    upstream = torch.randn(2, N)
    ours, theirs = both(monkeypatch, lambda: results(leaves, given, upstream, cap=cap))
    compare(ours, theirs, 1e-6)


@pytest.mark.parametrize("dtype,error", [(torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)])
def test_half_precision_is_rounded_at_the_same_places(
    dtype: torch.dtype, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits are those of the same product, so their log-probs are equal in float32; gradients are rounded once."""
    leaves, given = inputs(67, dtype)
    ours, theirs = both(monkeypatch, lambda: results(leaves, given, torch.randn(2, N).fill_(0.7), cap=30.0))
    compare(ours[:3], theirs[:3], 1e-6)
    compare(ours[3:], theirs[3:], error)


@pytest.mark.parametrize("unused", [0, 1])
def test_a_loss_of_one_output_alone(unused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, given = inputs(67)
    hidden, weight, bias = leaves

    def run() -> Any:
        found = linear_logprob(hidden, weight, *given, bias=bias, entropy=True)
        return torch.autograd.grad(found[1 - unused].sum(), leaves)  # type: ignore[union-attr]

    compare(*both(monkeypatch, run), 1e-6)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_rows_without_a_gradient_reach_nothing(broken: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states of ignored rows are not finite."""
    leaves, given = inputs(67)
    ignored = torch.arange(N) % 3 == 1
    leaves[0] = torch.where(ignored[:, None], broken, leaves[0].detach()).requires_grad_()
    upstream = torch.where(ignored, 0.0, torch.randn(2, N))
    ours, theirs = both(monkeypatch, lambda: results(leaves, given, upstream))
    assert all(g.isfinite().all() for g in ours[3:]) and not ours[3][ignored].any()
    compare([x[~ignored] for x in ours[:3]], [x[~ignored] for x in theirs[:3]], 1e-6)
    compare(ours[3:], theirs[3:], 1e-6)


@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_banned_ids_have_no_probability_and_no_gradient(cap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, (targets, temperature) = inputs(67)
    rows = torch.arange(N) % 2 == 0
    targets = torch.where(torch.isin(targets, IDS), 1, targets)
    banned, upstream = Banned(IDS, rows), torch.randn(2, N)
    ours, theirs = both(monkeypatch, lambda: results(leaves, (targets, temperature), upstream, cap=cap, banned=banned))
    compare(ours, theirs, 1e-6)
    found = both(monkeypatch, lambda: results(leaves, (targets, temperature), upstream, cap=cap))[0]
    assert not torch.equal(found[0][rows], ours[0][rows]) and torch.equal(found[0][~rows], ours[0][~rows])


def test_slices_of_a_vocabulary_are_combined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with ids 0 to 32 and from there on: targets are in either slice."""
    (hidden, weight, _), given = inputs(67)
    spans = ((0, 33), (33, 67))

    def run() -> list[Tensor]:
        stacks: list[Tensor] = []

        def of(start: int, end: int, gather: Any) -> Any:
            part = Vocabulary(start, lambda x: x, gather)
            return linear_logprob(hidden, weight[start:end], *given, entropy=True, vocabulary=part)[:2]

        def keep(mine: Tensor) -> Tensor:
            stacks.append(mine)
            return torch.stack([mine, mine])

        for span in spans:
            of(*span, keep)
        parts = [of(*span, lambda _: torch.stack(stacks[:2])) for span in spans]
        loss = sum((x * w).sum() for part in parts for x, w in zip(part, (1.0, 0.3), strict=True))
        return [*parts[0], *parts[1], *torch.autograd.grad(loss, (hidden, weight))]

    ours, theirs = both(monkeypatch, run)
    compare(ours, theirs, 1e-6)
    whole = linear_logprob(hidden, weight, *given, entropy=True)
    for rank in range(2):
        compare(ours[2 * rank : 2 * rank + 2], [x.detach() for x in whole[:2]], 1e-6)  # type: ignore[union-attr]


def test_float64_and_a_cpu_are_computed_by_torch() -> None:
    assert module.logit_kernels(torch.device("cuda"), torch.float64) is None
    assert module.logit_kernels(CPU, torch.float32) is None, "torch's operations fill a CPU's caches"


def test_no_row_is_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, (targets, temperature) = inputs(17)
    with monkeypatch.context() as within:
        within.setattr(module, "logit_kernels", lambda *use: interpreted())
        lp = linear_logprob(leaves[0][:0], leaves[1], targets[:0], temperature[:0])[0]
        assert lp.shape == (0,)
        assert not torch.autograd.grad(lp.sum(), leaves[1])[0].any()
    assert head.logit_sums(torch.empty(0, 17), targets[:0], temperature[:0]).shape == (4, 0)


class OverLogits(NoReads):
    """Counts the operations of torch that read or write all logits of a chunk, of so many numbers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        sizes = [x.numel() for x in tree_leaves((args, out)) if isinstance(x, Tensor)]
        name = func.overloadpacket.__name__
        if max(sizes, default=0) >= self.size and name not in ("t", "permute", "gather", "scatter_add_"):
            self.calls["over logits"] += 1
        return out


VOCAB = 1000


def test_the_functions_around_the_kernels_read_nothing_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device `meta`, where they would launch them."""
    launched = recorded_launches(monkeypatch, head, ("_sum_logits", "_logit_gradients"))
    use_facts(monkeypatch, module, compacts_rows=False, logit_chunk_rows=N, logit_chunk_bytes=0)
    leaves = [torch.empty(*s, dtype=torch.bfloat16, device=META, requires_grad=True) for s in ((N, H), (VOCAB, H))]
    given = torch.empty(N, dtype=torch.int64, device=META), torch.empty(N, device=META)
    counted = []
    for kernels in (LogitKernels(head.logit_sums, head.logit_gradients), None):
        monkeypatch.setattr(module, "logit_kernels", lambda *use, kernels=kernels: kernels)
        modes = OverLogits(N * VOCAB), OverLogits(N * VOCAB)
        with modes[0]:
            lp, entropy, *_ = linear_logprob(*leaves, *given, entropy=True)
        with modes[1]:
            grads = torch.autograd.grad((lp + entropy).sum(), leaves)  # type: ignore[operator]
        assert [g.shape for g in grads] == [(N, H), (VOCAB, H)]
        counted.append([mode.calls["over logits"] for mode in modes])
    assert launched == ["_sum_logits", "_logit_gradients"]
    assert counted[0] == [1, 3], "the logits, and again in the backward pass with the products of their gradient"
    assert counted[1] == [1 + 8, 3 + 12], "besides products, each is at least a pass over the chunk"
