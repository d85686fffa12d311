"""A micro-batch of the packed path does not wait for the device: on the device `meta`, of which no number can be read,
its forward pass, its loss with all metrics, and its backward pass run to the end, and what they get from the host is
sent without waiting."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from each import each
from facts import use_facts
from test_attention import TERMS, make, rows
from test_split import EVERY, fake_outputs, prepared, samples
from torch.utils._python_dispatch import TorchDispatchMode

from verl.accel.devices import DEVICES, device_facts
from verl.accel.transfer import to_device
from verl.batch import pack
from verl.model_engine import pending as module
from verl.model_engine.objective import reduce_terms
from verl.model_engine.optim import OptimSpec
from verl.model_engine.pending import PendingMetric, read_pending, reduced
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.nn import fused
from verl.nn import linear_logprob as head
from verl.nn.linear_logprob import linear_logprob
from verl.types import Metric

META = torch.device("meta")
COPIES = {"_to_copy", "copy_"}
WAITS = {"_local_scalar_dense", "nonzero", "item", "equal", "is_nonzero", "unique_consecutive", "_unique2"}


class NoReads(TorchDispatchMode):
    """Fails on an operation for which the host has to read a result or a shape from the device: `meta` itself refuses
    most. Also on a copy from the host that would end before the host continues, which is after all that the device has
    to do before. calls: the operations by name."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        far = any(isinstance(x, torch.Tensor) and x.device == META for x in args)
        name = func.overloadpacket.__name__
        self.calls[name] += 1
        assert not (far and name in WAITS), f"{name} waits for the device"
        out = func(*args, **(kwargs or {}))
        if name in COPIES and isinstance(out, torch.Tensor) and out.device == META:
            source = args[name == "copy_"]
            sent = isinstance(source, torch.Tensor) and source.device.type == "cpu" and source.dim() > 0
            later = (kwargs or {}).get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
            assert not sent or later, f"{name} of {tuple(source.shape)} from the host waits for the device"
        assert not (far and isinstance(out, torch.Tensor) and out.device.type == "cpu"), f"{name} copies to the host"
        return out


FAMILIES = ("qwen3", "llama", "mistral")
DTYPES = ("float32", "bfloat16")
POLICIES = ("none", "selective", "full")


@each("name, dtype, policy", list(product(FAMILIES, DTYPES, POLICIES)))
def test_the_passes_of_a_packed_micro_batch_read_nothing(name, dtype, policy):
    check_passes(name, dtype, policy)


def check_passes(name, dtype, policy):
    """On `meta` bfloat16 is computed as on a GPU: with a copy of the weights, and with variable-length attention, also
    of answers that share a prompt."""
    batch = pack(rows())
    settings = EngineSettings(optim=OptimSpec(lr=1.0), dtype=dtype, device="meta", gradient_checkpointing=policy)
    engine = TorchEngine(make(name), settings)
    assert (engine.passes._copy is not None) == (dtype == "bfloat16")
    batch = batch.with_columns({"w/loss": torch.linspace(-1, 1, batch.num_loss_tokens)})
    with NoReads() as mode, engine.passes._compute_weights():
        passes = 0
        for _, part, outputs, take in engine.passes._ready(batch, TERMS, 2, ("logprobs", "entropy")):
            loss, pending = reduce_terms(TERMS, part, outputs)
            take(loss)
            passes += 1
    assert passes == 2 and pending["loss"].total.device == META
    grads = [p.grad for p in engine.local.model.parameters()]
    assert all(g is not None and g.device == META and g.dtype == torch.float32 for g in grads)
    layers, attended = engine.local.model.config.num_hidden_layers, mode.calls["_varlen_attn"]
    assert attended == (passes * layers * (1 + (policy == "full")) if dtype == "bfloat16" else 0)


@each("name, dtype, policy", list(product(FAMILIES, DTYPES, POLICIES)))
def test_the_kernels_of_triton_are_launched_without_a_read(name, dtype, policy, monkeypatch):
    """The functions around the kernels, which would launch them here, on tensors without numbers."""
    pytest.importorskip("triton", reason="no Triton here (make triton-package)")
    from interpreted import recorded_launches

    from verl.accel.cuda import training

    kernels = ("_norm", "_norm_backward", "_swiglu", "_swiglu_backward", "_rotate")
    launched = recorded_launches(monkeypatch, training, kernels)
    by_dtype = [dict.fromkeys(fused._DTYPES, f) for f in (training.fused_rms_norm, training.fused_swiglu)]
    rotation = dict.fromkeys(fused._DTYPES, training.fused_rotation)
    monkeypatch.setattr(
        fused,
        "trained_ops",
        lambda device, hidden, *, recomputes, joint: fused.TrainedOps(*by_dtype, rotation, recomputes, {}),
    )
    check_passes(name, dtype, policy)
    assert {*launched} == {*kernels}


@each("name", EVERY)
def test_the_loss_of_every_preset_reads_nothing(name):
    batch, terms = prepared(samples(0), name)
    outputs = {n: v.to(META).requires_grad_() for n, v in fake_outputs(batch, 0).items()}
    terms = [t for t in terms if not t.two_pass]  # these are once per step
    with NoReads():
        loss, pending = reduce_terms(terms, batch, outputs)
        loss.backward()
    assert pending.keys() >= {t.name for t in terms if not t.silent}


def test_the_mode_sees_a_read():
    numbers = torch.ones(3)
    reads = (lambda x: x.sum().item(), lambda x: x.cpu(), lambda x: x[x > 0], lambda x: (x > 0).nonzero())
    for read in (*reads, lambda x: numbers.to(x.device), lambda x: x.copy_(numbers)):
        with pytest.raises((AssertionError, NotImplementedError, RuntimeError)), NoReads():
            read(torch.ones(3, device=META))


@pytest.mark.parametrize("shape, dim", [((1, 8), 0), ((8, 1), 1)])
def test_views_of_few_numbers_are_sent_whole(shape, dim, monkeypatch):
    """Pinned memory has the strides of its source, with those of an expanded tensor it would overlap itself."""

    def pinned(tensor):
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        return copy.copy_(tensor)

    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    few = torch.arange(8.0).view(shape)
    every = few.expand(*(3 if d == dim else n for d, n in enumerate(shape)))
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *where, non_blocking: tensor if non_blocking else None)
    assert torch.equal(to_device(every, torch.device("cuda")), every)
    assert to_device(every, torch.device("xpu")) is None, "memory that is not pinned is copied before the host goes on"


# -- without a choice of rows the numbers are the same -----------------------------------------------------------------


@pytest.mark.parametrize("garbage", [0.0, torch.nan, torch.inf])
def test_all_rows_with_zeros_give_the_gradients_of_the_chosen_rows(garbage, monkeypatch):
    found = []
    for compacts in (True, False):
        use_facts(monkeypatch, head, compacts_rows=compacts, logit_chunk_rows=7, logit_chunk_bytes=0)
        torch.manual_seed(0)
        leaves = [torch.randn(s, dtype=torch.float64) for s in ((40, 5), (11, 5), (11,))]
        needed = torch.arange(40) % 3 > 0
        leaves[0] = torch.where(needed[:, None], leaves[0], garbage)
        hidden, weight, bias = (x.requires_grad_() for x in leaves)
        targets, temperature = torch.randint(0, 11, (40,)), torch.rand(40, dtype=torch.float64) + 0.5
        lp, entropy, *_ = linear_logprob(hidden, weight, targets, temperature, bias=bias, entropy=True)
        loss = torch.where(needed, lp + 0.3 * entropy, 0.0).sum()
        found.append(torch.autograd.grad(loss, (hidden, weight, bias)))
    assert all(g.isfinite().all() for grads in found for g in grads)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", ["sum", "mean", "max"])
def test_a_metric_that_stays_on_the_device_is_the_metric(kind, monkeypatch):
    values = torch.from_numpy(np.random.default_rng(0).normal(size=5000).astype(np.float32))
    mask = values > 0.3
    values[:3], mask[:3] = torch.nan, False
    inside = values[mask]
    exact = float(inside.max()) if kind == "max" else float(inside.double().sum())
    parts = [{"a": reduced(values, mask, kind, "token")}, {"a": reduced(values, mask & False, kind, "token")}]
    (metric,) = read_pending(parts[:1]).values()
    assert metric == Metric(exact, float(len(inside)), "token", kind), "bit for bit on a CPU"
    assert read_pending(parts)["a"].count == len(inside)
    use_facts(monkeypatch, module, compacts_rows=False)
    far = read_pending([{"a": reduced(values, mask, kind, "token")}])["a"]
    assert far.count == metric.count and far.total == pytest.approx(exact, rel=1e-12)
    empty = reduced(values[:0], mask[:0], kind, "token")
    assert read_pending([{"a": empty}])["a"] == Metric(0.0, 0.0, "token", kind)


def test_all_metrics_of_a_step_are_one_transfer(monkeypatch):
    reads = []
    real = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: reads.append(x.shape) or real(x))
    one = PendingMetric(torch.tensor(2.0), torch.tensor(3), "token", "sum")
    loss = PendingMetric(torch.tensor(0.5), 1.0, "update", "sum")
    assert read_pending([{"a": one, "loss": loss}] * 4) == {
        "a": Metric(8.0, 12.0, "token", "sum"),
        "loss": Metric(2.0, 4.0, "update", "sum"),
    }
    assert reads == [(12,)]
    assert read_pending([]) == {}


def test_a_type_of_device_without_a_row_is_taken_for_a_gpu():
    assert device_facts("meta") is device_facts("npu") is DEVICES["cuda"]
    assert DEVICES["cpu"].compacts_rows
