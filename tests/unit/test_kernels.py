"""The compiled decode kernels against torch's own operations."""

import subprocess
import sys
import zlib
from functools import partial

import numpy as np
import pytest
import torch
from each import check_each, each
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts import draws_of

from verl.accel.cpu import kernels as module
from verl.accel.cpu.kernels import Kernels, load_kernels
from verl.checkpoint.safetensors_file import host_bytes
from verl.rollout.embedded.sampler import sample
from verl.weight_sync.record import some_values

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)


@pytest.fixture(scope="module", params=DTYPES, ids=["float32", "bfloat16"])
def kernels(request):
    found = load_kernels(request.param)
    assert isinstance(found, Kernels), found  # this machine has gcc
    return found


def close(ours, theirs, dtype, factor=1.0):
    torch.testing.assert_close(
        ours.float(), theirs.float(), atol=factor * TOLERANCE[dtype], rtol=factor * TOLERANCE[dtype]
    )


@each("rows, width", [(5, 8), (5, 12), (5, 67), (5, 192), (400, 192)])
def test_norm_and_gates(kernels, rows, width):
    torch.manual_seed(0)
    x, weight = (3 * torch.randn(rows, width)).to(kernels.dtype), torch.randn(width)
    close(
        kernels.rms_norm(x, weight, 1e-5),
        torch.nn.functional.rms_norm(x.float(), (width,), weight, 1e-5),
        kernels.dtype,
    )
    both = (30 * torch.randn(rows, 2 * width)).to(kernels.dtype)
    gate, up = both.double().chunk(2, dim=1)  # 1 + tanh loses digits in float32
    close(kernels.gated(both, "silu"), torch.nn.functional.silu(gate) * up, kernels.dtype)
    close(kernels.gated(both, "gelu_tanh"), torch.nn.functional.gelu(gate, approximate="tanh") * up, kernels.dtype)


@each("rows, width", [(1, 5), (7, 48), (900, 192)])
def test_gradients_of_norm_and_gate_equal_autograd_in_float64(rows, width):
    found = load_kernels(torch.float32)
    assert isinstance(found, Kernels)
    torch.manual_seed(0)
    x, up, d, weight = (
        3 * torch.randn(rows, width),
        torch.randn(rows, width),
        torch.randn(rows, width),
        torch.randn(width),
    )
    x64, up64, weight64 = (t.double().requires_grad_() for t in (x, up, weight))
    torch.nn.functional.rms_norm(x64, (width,), weight64, 1e-6).backward(d.double())
    d_x, d_weight = found.rms_norm_backward(x, weight, d, 1e-6)
    torch.testing.assert_close(d_x.double(), x64.grad, atol=2e-6, rtol=1e-4)
    torch.testing.assert_close(d_weight, weight64.grad, atol=2e-5, rtol=1e-5)
    of_x, of_frozen = found.rms_norm_backward(x, weight, d, 1e-6, frozen=True)
    assert torch.equal(of_x, d_x) and of_frozen is None
    x64.grad = None
    gated = torch.nn.functional.silu(x64) * up64
    gated.backward(d.double())
    close(found.swiglu(x, up), gated.detach(), torch.float32)
    for ours, theirs in zip(found.swiglu_backward(x, up, d), (x64.grad, up64.grad), strict=True):
        close(ours, theirs, torch.float32, factor=2)


def attention(qkv, norm, turns, positions, keys, values, *, heads, eps, scale, window, cap):
    """The same by torch, one row after the other; writes into keys and values."""
    n, kv_heads, _, dim = keys.shape
    out = []
    for r, at in enumerate(positions.tolist()):
        row = qkv[r].float().view(-1, dim)
        qk, v = row[: heads + kv_heads], row[heads + kv_heads :]
        if norm is not None:
            qk = torch.nn.functional.rms_norm(qk, (dim,), None, eps) * norm
        if turns is not None:
            qk = torch.view_as_real(
                torch.view_as_complex(qk.reshape(-1, dim // 2, 2).contiguous()) * turns[at]
            ).flatten(1)
        keys[r, :, at], values[r, :, at] = qk[heads:].to(keys.dtype), v.to(values.dtype)
        lo = max(0, at + 1 - window) if window else 0
        k, v = (t[r, :, lo : at + 1].float().repeat_interleave(heads // kv_heads, dim=0) for t in (keys, values))
        scores = torch.einsum("hd,htd->ht", qk[:heads], k) * scale
        if cap:
            scores = cap * torch.tanh(scores / cap)
        out.append(torch.einsum("ht,htd->hd", torch.softmax(scores, dim=-1), v).flatten())
    return torch.stack(out)


def test_attention(kernels):
    heads = ((4, 4), (4, 2), (6, 1))
    check_each([(dim, *h) for dim in (12, 32, 48, 64, 128, 136) for h in heads], partial(attention_case, kernels))


def attention_case(kernels, sizes):
    dim, heads, kv_heads = sizes
    torch.manual_seed(dim + heads)
    positions = torch.tensor([0, 7, 63, 64, 150])
    capacity, n = 160, len(positions)
    for normed, window, cap in ((True, 0, 0.0), (False, 20, 0.0), (True, 65, 30.0), (False, 0, 5.0)):
        kv = torch.randn(2, n, kv_heads, capacity, dim).to(kernels.dtype)
        kv[:, :, :, 151:] = torch.nan  # nothing beyond a row's own end is ever read
        qkv = torch.randn(n, (heads + 2 * kv_heads) * dim).to(kernels.dtype)
        norm = torch.randn(heads + kv_heads, dim) if normed else None
        turns = torch.polar(torch.ones(capacity, dim // 2), torch.randn(capacity, dim // 2)) if normed else None
        keys, values = kv.clone()
        rest = {"heads": heads, "eps": 1e-6, "scale": dim**-0.5, "window": window, "cap": cap}
        ours = kernels.attend(qkv, norm, turns, positions, keys, values, **rest)
        theirs_k, theirs_v = kv.clone()
        theirs = attention(qkv, norm, turns, positions, theirs_k, theirs_v, **rest)
        close(ours, theirs, kernels.dtype, 4)
        for a, b in ((keys, theirs_k), (values, theirs_v)):
            close(a[:, :, :151], b[:, :, :151], kernels.dtype)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([2, 31, 256, 300, 513, 5000]),
    spread=st.sampled_from([0.0, 1.0, 30.0]),
)
def test_draws_equal_torchs(kernels, seed, vocab, spread):
    rng = np.random.default_rng(seed)
    n = 32
    logits = (spread * torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed))).to(kernels.dtype)
    draw = draws_of(np.concatenate([[0.0, 1 - 2**-53], rng.random(n - 2)]), rng.choice([0.0, 0.6, 1.0, 1.7], n))
    ids, logprobs = kernels.sample(logits, draw.temperature, draw.uniform)
    expected_ids, expected = sample(logits, draw)
    same = ids == expected_ids.numpy()
    assert same.mean() > 0.9  # a uniform may fall within the rounding of a boundary
    np.testing.assert_allclose(logprobs[same], expected.numpy()[same], atol=3e-5)
    scaled = torch.log_softmax(
        logits.float()
        / torch.from_numpy(np.where(draw.temperature == 0, 1, draw.temperature).astype(np.float32))[:, None],
        -1,
    )
    np.testing.assert_allclose(logprobs, scaled[torch.arange(n), torch.from_numpy(ids)].numpy(), atol=3e-5)


def test_frequencies_are_the_softmax(kernels):
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, -200.0]]).to(kernels.dtype)
    n = 20_000
    grid = (np.arange(n) + 0.5) / n
    ids, _ = kernels.sample(logits.expand(n, -1).contiguous(), np.ones(n, np.float32), grid)
    counts = np.bincount(ids, minlength=5) / n
    np.testing.assert_allclose(counts, torch.softmax(logits.float(), -1)[0].numpy(), atol=2 / n + 1e-6)
    assert counts[4] == 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_non_finite_logit_gives_a_non_finite_logprob(kernels, bad):
    logits = torch.zeros(2, 700).to(kernels.dtype)
    logits[1, 650] = bad
    ids, logprobs = kernels.sample(logits, np.ones(2, np.float32), np.full(2, 0.3))
    assert np.isfinite(logprobs).tolist() == [True, False] and (ids < 700).all()


@pytest.mark.slow
def test_without_a_compiler_the_reason_is_said_and_torch_does_it(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    fresh = load_kernels.__wrapped__
    assert "no C compiler" in fresh(torch.float32)
    monkeypatch.setenv("CC", "false")
    assert "exit 1" in fresh(torch.float32)
    monkeypatch.setenv("CC", "gcc")
    assert (
        isinstance(fresh(torch.float32), Kernels)
        and len(list((tmp_path / ".cache" / "verl").glob("kernels-*.so"))) == 1
    )


@pytest.mark.parametrize("rows", [1, 16, 31, 32, 100])
@pytest.mark.parametrize("depth", [1, 15, 16, 17, 40, 96])
@pytest.mark.parametrize("threads", [1, 2])
def test_panels_hold_the_rows_bit_for_bit(rows, depth, threads):
    found, before = load_kernels(torch.float32), torch.get_num_threads()
    assert isinstance(found, Kernels)
    weight = torch.randn(rows, depth)
    weight[0, 0] = float("nan")
    torch.set_num_threads(threads)
    try:
        panels = found.new_panels(rows, depth)
        found.pack(weight, panels)
    finally:
        torch.set_num_threads(before)
    assert panels.shape[1:] == (depth, found.panel_width)
    unpacked = panels.transpose(1, 2).reshape(-1, depth)
    assert torch.equal(unpacked[:rows].view(torch.int32), weight.view(torch.int32)) and not unpacked[rows:].any()


SHORT = """
import resource, torch
from verl.accel.cpu.kernels import load_kernels
kernels = load_kernels(torch.bfloat16)
x, panels, out = (torch.zeros(size, dtype=torch.bfloat16) for size in ((1 << 19, 33), (1, 32, 32, 2), (1 << 19, 1)))
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 24), -1))
kernels.linear(x, panels, None, out, add=False)
"""


@pytest.mark.slow
def test_a_product_without_memory_for_its_rows_is_an_error_and_not_the_end_of_the_process():
    """Rows of 33 values are copied into tiles of 64: 64 MB, where 16 are left."""
    half = load_kernels(torch.bfloat16)
    if isinstance(half, str) or not half.multiplies:
        pytest.skip("this CPU has no tiles (AMX)")
    done = subprocess.run([sys.executable, "-c", SHORT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "can't allocate memory" in done.stderr.splitlines()[-1], done.stderr


def test_a_scan_has_the_extremes_and_the_values_that_torch_has_and_the_checksums_of_zlib(kernels):
    """In one call for tensors of all these sizes, some longer than what is read at a time."""
    torch.manual_seed(0)
    tensors, checked = list[torch.Tensor](), list[bool]()
    for size in (1, 5, 15, 16, 17, 33, 64, 65, 128, 255, 257, 511, 513, 1003, 4096, 9001):
        for bad in (0.0, float("nan"), -float("nan"), float("inf"), -float("inf")):
            for at in {0, size // 2, size - 1}:
                x = torch.randn(size).to(kernels.dtype)
                x[at] = bad
                tensors.append(x)
                checked.append(len(tensors) % 3 != 0)
    tensors += [-torch.rand(100).to(kernels.dtype) - 1, torch.rand(100).to(kernels.dtype) + 1]
    checked = [kernels.folds_crc and one for one in (*checked, True, False)]
    ends, values, sums = kernels.scan(tensors, 64, checked=checked)
    _, again, _ = kernels.scan(tensors, 64, ends=False)
    exact = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
    exact(ends, torch.stack([torch.stack(x.aminmax()).double() for x in tensors]))
    crcs = [zlib.crc32(host_bytes(x)) for x in tensors]
    assert sums == [crc if check else 0 for crc, check in zip(crcs, checked, strict=True)]
    assert not kernels.folds_crc or kernels.crcs(tensors) == crcs
    for x, some, more in zip(tensors, values, again, strict=True):
        exact(some, some_values(x, 64))
        exact(more, some)


def test_weights_that_are_packed_in_one_call_are_those_that_are_packed_one_by_one(kernels):
    if kernels.dtype != torch.float32:
        pytest.skip("panels of float32")
    cases = [(96, 48, 32, 0), (64, 32, 0, 16), (7, 5, 3, 0), (32, 33, 32, 0), (128, 160, 0, 0), (40, 32, 24, 4)]
    weights = [torch.randn(rows, depth) for rows, depth, _, _ in cases]
    one_by_one, at_once = ([kernels.new_panels(256, depth).zero_() for _, depth, _, _ in cases] for _ in range(2))
    for weight, panels, (_, _, first, pairs) in zip(weights, one_by_one, cases, strict=True):
        kernels.pack(weight, panels, first, pairs)
    kernels.pack_each([(w, p, *case[2:]) for w, p, case in zip(weights, at_once, cases, strict=True)])
    for weight, panels, other, (rows, depth, first, pairs) in zip(weights, one_by_one, at_once, cases, strict=True):
        assert torch.equal(panels, other)
        if not pairs:
            held = panels.transpose(1, 2).reshape(-1, depth)
            assert torch.equal(held[first : first + rows], weight) and held.count_nonzero() == weight.count_nonzero()
