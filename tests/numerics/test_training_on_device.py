"""Log-probs and gradients of the packed forest on the device of the tests, against padded rows in float64 on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from each import each
from on_device import DEVICE, ON_CPU
from test_attention import make, rows, run
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from verl.accel.cuda.segments import torch_segments
from verl.batch import pack
from verl.model_engine.passes import _backward
from verl.nn import deterministic as deterministic_attention
from verl.nn.attention import Varlen, attend_varlen

NAMES = ("qwen3", "qwen2", "llama", "mistral", "gemma2", "gpt2")
PRECISIONS: dict[str, tuple[dict[str, Any], float]] = {
    "float32": ({"dtype": "float32"}, 2e-5),
    "float32, checkpointing": ({"dtype": "float32", "gradient_checkpointing": "full"}, 2e-5),
    "float32, micro-batches": ({"dtype": "float32", "max_tokens_per_microbatch": 40}, 2e-5),
    "bfloat16": ({"dtype": "bfloat16", "emulate_bf16": False}, 0.1),
    "bfloat16, selective": ({"dtype": "bfloat16", "emulate_bf16": False, "gradient_checkpointing": "selective"}, 0.1),
}
"""Options of the engine, and the largest error of a gradient as a share of its largest value."""


def flat(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradients[name].double().cpu().flatten() for name in sorted(gradients)])


@pytest.mark.on_device
@each("name, precision", [(name, precision) for name in NAMES for precision in PRECISIONS])
def test_training_equals_float64_on_a_cpu(name: str, precision: str) -> None:
    options, error = PRECISIONS[precision]
    model, batch = make(name), pack(rows())
    exact_logprobs, exact = run(model, batch, attention_mode="padded")
    logprobs, found = run(model, batch, device=str(DEVICE), **options)
    assert found.keys() == exact.keys()
    within = 0.3 if options["dtype"] == "bfloat16" else 2e-5
    assert float((logprobs.double() - exact_logprobs).abs().max()) < within
    ours, theirs = flat(found), flat(exact)
    assert float((ours - theirs).norm() / theirs.norm()) < error
    if precision == "float32":
        worst = {n: float((found[n].cpu() - g).abs().max() / g.abs().max().clamp_min(1e-12)) for n, g in exact.items()}
        assert max(worst.values()) < 1e-3, worst
    assert all(g.device.type == DEVICE.type for g in found.values())


@pytest.mark.skipif(ON_CPU, reason="the variable-length kernel is one of GPUs")
@pytest.mark.on_device
def test_bfloat16_reaches_the_variable_length_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only where it is timed: a residual stream in float32 once kept all attention away from it."""
    from verl.nn import attention

    calls, chosen = [], attention.segment_kernel

    def counted(*use: Any) -> Any:
        calls.append((use[1], chosen(*use) is not None))
        return chosen(*use)

    monkeypatch.setattr(attention, "segment_kernel", counted)
    run(make("qwen3"), pack(rows()), device=str(DEVICE), dtype="bfloat16", emulate_bf16=False)
    assert calls and set(calls) == {(torch.bfloat16, True)}


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.on_device
@each("dtype", ["float32", "bfloat16"])
def test_deterministic_gradients_of_long_rows_have_the_same_bits_again(dtype: str, deterministic: None) -> None:
    """Of rows with many blocks of keys, whose gradients are summed over programs."""
    batch = pack(rows(((300, (400, 500)), (20, (700,)))))
    options: dict[str, Any] = {"device": str(DEVICE), "dtype": dtype, "emulate_bf16": False}
    found = [flat(run(make("qwen3"), batch, **options)[1]) for _ in range(3)]
    assert found[0].abs().max() > 0
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


class Settings(TorchDispatchMode):
    """Records for each operation whether torch would take a kernel that is not deterministic, with a warning."""

    def __init__(self) -> None:
        super().__init__()
        self.warns = dict[str, bool]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.warns[function.overloadpacket.__name__] = torch.is_deterministic_algorithms_warn_only_enabled()
        return function(*args, **(kwargs or {}))


def test_the_backward_pass_of_attention_alone_is_strict(deterministic: None) -> None:
    """Torch uses its deterministic kernels of this pass only where its setting is strict."""
    q, bounds = torch.randn(8, 2, 16, device="meta", dtype=torch.bfloat16, requires_grad=True), [0, 8]
    ends = torch.tensor(bounds, dtype=torch.int32, device="meta")
    with Settings() as mode:
        lengths = Varlen((ends, ends, 8, 8), None)
        (attend_varlen(lengths, q, q, q, 1.0, None, torch_segments) * 2).sum().backward()
    assert {name for name, warns in mode.warns.items() if not warns and "att" in name} == {"_varlen_attn_backward"}
    assert torch.is_deterministic_algorithms_warn_only_enabled() and mode.warns["mul"]

    def fails(*given: Any) -> Any:
        raise RuntimeError("out of memory")

    out = attend_varlen(lengths, q, q, q, 1.0, None, torch_segments)
    out.grad_fn.register_prehook(fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        _backward((out * 2).sum())
    assert torch.is_deterministic_algorithms_warn_only_enabled(), "also after a pass that failed"


def test_the_node_of_an_attention_kernel_is_found() -> None:
    """Through what torch does to its result; attention by products and a softmax has none."""
    x, padded = torch.randn(1, 2, 8, 16, requires_grad=True), torch.randn(1, 2, 8, 12, requires_grad=True)
    for one in (x, padded):
        out = F.scaled_dot_product_attention(one, one, one, is_causal=True)
        found = deterministic_attention._attention_node((out.transpose(1, 2)[..., :8]).grad_fn)
        assert "ScaledDotProduct" in type(found).__name__
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    assert deterministic_attention._attention_node(out.grad_fn) is None
