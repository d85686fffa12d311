"""Log-probs and gradients of the packed forest on the device of the tests, against padded rows in float64 on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from each import each
from on_device import DEVICE, ON_CPU
from test_attention import make, rows, run

from verl.batch import pack

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
