"""The chunked head against dense logits, and what it keeps in memory."""

import pytest
import torch
from facts import use_chunks, use_facts
from on_device import DEVICE, ON_CPU
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verl.accel.devices import DEVICES
from verl.accel.linear import Plain
from verl.accel.plain import plain_wide_product
from verl.nn import linear_logprob as module
from verl.nn.linear_logprob import HeadGradients, linear_logprob

F64 = torch.float64


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(*s, dtype=F64, requires_grad=True) for s in ((150, 6), (23, 6), (23,)))
    return hidden, weight, bias, torch.randint(0, 23, (150,)), torch.rand(150, dtype=F64) + 0.3


def dense(hidden, weight, bias, targets, temperature, cap=0.0):
    logits = hidden @ weight.T + (0 if bias is None else bias)
    logits = cap * torch.tanh(logits / cap) if cap else logits
    logp = torch.log_softmax(logits / temperature[:, None], -1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1), logp.exp().square().sum(-1)


def grads(outputs, upstream, leaves):
    return torch.autograd.grad(sum((o * u).sum() for o, u in zip(outputs, upstream, strict=True)), leaves)


@pytest.mark.parametrize("rows", [1, 7, 64, 150, 1000])
@pytest.mark.parametrize("with_bias, cap", [(True, 0.0), (False, 0.0), (True, 2.0)])
def test_values_and_gradients_equal_dense_at_any_chunk(inputs, rows, with_bias, cap, monkeypatch):
    use_chunks(monkeypatch, least_rows=rows, at_once=0)
    hidden, weight, bias, targets, temperature = inputs
    bias, leaves = (bias, (hidden, weight, bias)) if with_bias else (None, (hidden, weight))
    lp, entropy, pi2, _ = linear_logprob(
        hidden, weight, targets, temperature, bias=bias, cap=cap, entropy=True, sum_pi_squared=True
    )
    expected = dense(hidden, weight, bias, targets, temperature, cap)
    for got, want in zip((lp, entropy, pi2), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert not pi2.requires_grad
    upstream = torch.randn(2, 150, dtype=F64)
    upstream[:, ::3] = 0  # rows without a gradient are left out of the backward pass
    for got, want in zip(grads((lp, entropy), upstream, leaves), grads(expected[:2], upstream, leaves), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_gradcheck():
    torch.manual_seed(1)
    hidden, weight, bias = (torch.randn(*s, dtype=F64, requires_grad=True) for s in ((4, 3), (5, 3), (5,)))
    targets, temperature = torch.tensor([0, 4, 2, 2]), torch.tensor([1.0, 0.7, 0.3, 1.5], dtype=F64)

    def outputs(h, w, b, cap=0.0):
        return linear_logprob(h, w, targets, temperature, bias=b, cap=cap, entropy=True)[:2]

    assert torch.autograd.gradcheck(outputs, (hidden, weight, bias))
    assert torch.autograd.gradcheck(lambda *x: outputs(*x, cap=1.3), (hidden, weight, bias))


@pytest.mark.parametrize("used", [0, 1])
def test_an_output_that_no_loss_uses_changes_no_gradient(inputs, used):
    hidden, weight, bias, targets, temperature = inputs
    both = linear_logprob(hidden, weight, targets, temperature, bias=bias, entropy=True)
    expected = dense(hidden, weight, bias, targets, temperature)
    got = torch.autograd.grad(both[used].sum(), (hidden, weight, bias))
    for g, e in zip(got, torch.autograd.grad(expected[used].sum(), (hidden, weight, bias)), strict=True):
        torch.testing.assert_close(g, e, rtol=1e-10, atol=1e-12)


def test_a_broken_row_without_gradient_reaches_nothing(inputs):
    """A masked token's hidden state is NaN, and one of its logits -inf: the other rows' gradients are as without it."""
    hidden, weight, bias, targets, temperature = inputs
    broken = hidden.detach().clone()
    broken[3] = float("nan")
    broken.requires_grad_()
    upstream = torch.ones(150, dtype=F64)
    upstream[3] = 0
    closed = bias.detach().clone()
    closed[targets[5]] = -torch.inf
    upstream[targets == targets[5]] = 0
    closed.requires_grad_()
    lp, entropy, *_ = linear_logprob(broken, weight, targets, temperature, bias=closed, entropy=True)
    assert lp[3].isnan() and lp[5] == -torch.inf and entropy[torch.arange(150) != 3].isfinite().all()
    got = grads((lp, entropy), (upstream, upstream), (broken, weight, closed))
    assert all(g.isfinite().all() for g in got) and not got[0][3].any()
    keep = torch.arange(150) != 3
    lp, entropy, *_ = linear_logprob(hidden[keep], weight, targets[keep], temperature[keep], bias=closed, entropy=True)
    clean = grads((lp, entropy), (upstream[keep], upstream[keep]), (weight, closed))
    for g, e in zip(got[1:], clean, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-10, atol=1e-12)


def test_bfloat16_hidden_states_give_float32_log_probs(inputs):
    hidden, weight, bias, targets, temperature = (x.detach() if x.is_floating_point() else x for x in inputs)
    lp, entropy, *_ = linear_logprob(
        hidden.bfloat16(), weight.float().requires_grad_(), targets, temperature.float(), entropy=True
    )
    assert lp.dtype == entropy.dtype == torch.float32
    reference = dense(hidden.bfloat16().double(), weight.bfloat16().double(), None, targets, temperature)
    torch.testing.assert_close(lp.double(), reference[0], rtol=0.02, atol=0.1)
    assert (lp <= 0).all() and (entropy >= 0).all()


def error_of_a_head_gradient(device="cpu"):
    """The relative error of a gradient of the head, against float64 of the same bfloat16 numbers."""
    torch.manual_seed(0)
    dz, hidden = (torch.randn(256, n, device=device).bfloat16() for n in (400, 64))
    head = torch.zeros(400, 64, dtype=torch.bfloat16, device=device)
    sums = HeadGradients(hidden, head.float(), None, torch.float32, (True, False))
    sums.add(slice(0, 0), dz[:0].float(), hidden[:0], head, torch.ones(0, dtype=torch.bool, device=device))
    sums.add(slice(0, 256), dz.float(), hidden, head, torch.ones(256, dtype=torch.bool, device=device))
    found = sums.found(head.float(), None)[1]
    exact = dz.double().T @ hidden.double()
    return float((found - exact).norm() / exact.norm())


def test_gradients_of_a_half_precision_head_are_float32_by_a_kernel_that_does_so(monkeypatch):
    rounded = error_of_a_head_gradient()

    def wide(a, b):
        assert a.shape[1], "the device's product was not run with no rows"
        return plain_wide_product(a, b)

    monkeypatch.setattr(module, "wide_kernel", lambda device, dtype: wide if dtype == torch.bfloat16 else None)
    assert error_of_a_head_gradient() < 1e-6 < 1e-3 < rounded


def test_half_precision_logits_are_those_of_the_rollout_whatever_the_device_has(monkeypatch):
    """A sampler of bfloat16 logits draws from another distribution than that of float32 ones."""
    monkeypatch.setattr(module, "wide_kernel", lambda device, dtype: plain_wide_product)
    hidden, weight = torch.randn(256, 64).bfloat16(), torch.randn(400, 64).bfloat16()
    sampled = Plain(weight, None)(hidden).float()  # the head of a rollout without a kernel of its own, as on a GPU
    assert torch.equal(module.chunk_logits(hidden, weight, None, torch.ones(256), 0.0), sampled)


@pytest.mark.skipif(ON_CPU, reason="a CPU converts both factors")
@pytest.mark.on_device
def test_a_half_precision_head_has_float32_gradients_on_a_gpu():
    assert error_of_a_head_gradient(str(DEVICE)) < 1e-4


class LargestTensor(TorchDispatchMode):
    """The most bytes of any one result, and of all results, while it is on."""

    def __init__(self, ignored: int) -> None:
        super().__init__()
        self.largest, self.ignored = 0, ignored

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.numel() != self.ignored:  # the head's own weight and its gradient
                self.largest = max(self.largest, t.numel() * t.element_size())
        return out


def memory_of(n: int, vocab: int, width: int = 8) -> tuple[int, int]:
    """(bytes saved for backward besides the head's weight, largest single tensor of both passes)."""
    saved = []
    hidden, weight = torch.randn(n, width, requires_grad=True), torch.randn(vocab, width, requires_grad=True)
    targets, temperature = torch.randint(0, vocab, (n,)), torch.full((n,), 0.7)
    with LargestTensor(ignored=vocab * width) as mode:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            lp, entropy, *_ = linear_logprob(hidden, weight, targets, temperature, entropy=True)
        (lp.sum() + entropy.sum()).backward()
    return sum(t.numel() * t.element_size() for t in saved if t is not weight and t.shape != weight.shape), mode.largest


def test_memory_does_not_depend_on_the_vocabulary(monkeypatch):
    use_chunks(monkeypatch, least_rows=1, at_once=64 << 10)
    n = 700
    found = {vocab: memory_of(n, vocab) for vocab in (50, 500, 5000)}
    assert len({saved for saved, _ in found.values()}) == 1, f"saved bytes by vocabulary: {found}"
    assert found[50][0] <= n * 4 * (8 + 2 + 2 + 2), "hidden, targets, temperature, lse, entropy"
    for vocab, (_, largest) in found.items():
        assert largest <= max(64 << 10, 8 * n * 4), f"vocabulary {vocab}: a tensor of {largest} bytes"
    assert n * 5000 * 4 > 100 * max(largest for _, largest in found.values()), "full logits would have been seen"


def test_a_frozen_head_has_no_gradient_in_memory_and_changes_no_other(monkeypatch):
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 8, requires_grad=True), torch.randn(50, 8)
    given, found, made, zeros = (torch.randint(0, 50, (300,)), torch.full((300,), 0.7)), [], [], torch.zeros
    monkeypatch.setattr(module.torch, "zeros", lambda *a, **named: made.append(a[0]) or zeros(*a, **named))
    for frozen in (False, True):
        made.clear()
        head = weight.clone().requires_grad_(not frozen)
        lp, *_ = linear_logprob(hidden, head, *given)
        found.append(torch.autograd.grad(lp.sum(), [hidden] if frozen else [hidden, head])[0])
        assert (weight.shape in made) != frozen
    assert torch.equal(*found)


def test_no_row_and_one_row():
    weight = torch.randn(7, 3, requires_grad=True)
    lp, *_ = linear_logprob(torch.zeros(0, 3), weight, torch.zeros(0, dtype=torch.long), torch.zeros(0))
    lp.sum().backward()
    assert lp.shape == (0,) and not weight.grad.any()
    one, *_ = linear_logprob(torch.ones(1, 3), weight, torch.tensor([2]), torch.ones(1))
    torch.testing.assert_close(one, weight.sum(1).log_softmax(0)[2:3])


@pytest.mark.parametrize("kind", [kind for kind in DEVICES if kind != "cpu"])
def test_the_sizes_of_a_device_change_no_result(kind, monkeypatch):
    """A chunk of the CPU and one of a GPU give the same numbers, to the order of a sum in float32."""
    torch.manual_seed(0)
    n, vocab = 900, 16 << 10
    hidden, weight = torch.randn(n, 8, requires_grad=True), torch.randn(vocab, 8, requires_grad=True)
    targets, temperature = torch.randint(0, vocab, (n,)), torch.full((n,), 0.7)
    found = []
    for facts in (DEVICES["cpu"], DEVICES[kind]):
        sizes = {"logit_chunk_rows": facts.logit_chunk_rows, "logit_chunk_bytes": facts.logit_chunk_bytes}
        use_facts(monkeypatch, module, **sizes)
        cut = module.chunks(n, weight)
        assert len(cut) == {"cpu": 4, "cuda": 1}[kind if facts is DEVICES[kind] else "cpu"]
        lp, entropy, *_ = linear_logprob(hidden, weight, targets, temperature, entropy=True)
        found.append((lp, entropy, *grads((lp, entropy), torch.ones(2, n), (hidden, weight))))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
