"""The memory of a chunk of logits, counted on the device `meta`, is that of the plan: one chunk at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from facts import use_facts
from live_bytes import LiveBytes
from test_no_waits import META
from torch import Tensor

from verl.model_engine import memory
from verl.model_engine.memory import RankWork, chunk_bytes
from verl.nn import linear_logprob as module
from verl.nn import linear_teacher
from verl.nn.linear_logprob import linear_logprob
from verl.nn.linear_teacher import HeadWeights, divergence, top_k
from verl.planner.memory import DIVERGENCE_COPIES

N, H, V, K = 64, 4, 10_000, 3
WANTED: dict[str, dict[str, Any]] = {
    "log-probs": {},
    "entropies": {"entropy": True},
    "squares": {"sum_pi_squared": True},
    "cap": {"cap": 30.0},
    "named": {"entropy": True, "ids": torch.empty(N, K, dtype=torch.int64, device=META)},
}
COPIES = {"squares": 3, "cap": 3, "named": 3, "whole": DIVERGENCE_COPIES}
"""Arrays of float32 that the plan counts without the kernels; of all others 2."""


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def peak(patch: pytest.MonkeyPatch, rows: int, dtype: torch.dtype, what: str, *, kernels: bool) -> int:
    """The most bytes that are alive in both passes, with chunks of so many rows."""
    use_facts(patch, module, compacts_rows=False, logit_chunk_rows=rows, logit_chunk_bytes=0)
    found = None
    if kernels:
        pytest.importorskip("triton", reason="no Triton here (make triton-package)")
        from verl.accel.cuda import head
        from verl.nn.head_kernels import LogitKernels

        class Nothing:
            def __getitem__(self, grid: Any) -> Any:
                return lambda *args, **sizes: None

        for name in ("_sum_logits", "_logit_gradients"):
            patch.setattr(head, name, Nothing())
        found = LogitKernels(head.logit_sums, head.logit_gradients)
    for where in (module, linear_teacher):
        patch.setattr(where, "logit_kernels", lambda *use: found)
    hidden, weight = (empty(*shape, dtype=dtype).requires_grad_() for shape in ((N, H), (V, H)))
    targets, temperature = empty(N, dtype=torch.int64), empty(N)
    with LiveBytes() as live:
        if what == "likeliest":
            top_k(hidden.detach(), HeadWeights(weight.detach()), temperature, K, targets)
            return live.peak
        if what == "whole":
            theirs = empty(N, H, dtype=dtype), HeadWeights(empty(V, H, dtype=dtype)), temperature
            outputs: Any = divergence(hidden, HeadWeights(weight), temperature, *theirs, 0.5, targets)
        else:
            outputs = linear_logprob(hidden, weight, targets, temperature, **WANTED[what])
        sum(x.sum() for x in outputs if x is not None and x.requires_grad).backward()
        return live.peak


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("what", [*WANTED, "likeliest", "whole"])
@pytest.mark.parametrize("kernels", [True, False])
def test_the_plan_counts_a_chunk_and_what_is_made_of_it(
    kernels: bool, what: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of a further row in each chunk. The sums inside of an operation are not seen: without kernels
    `logsumexp` makes a copy of the logits, which is within the two of the plan."""
    few, many = (peak(monkeypatch, rows, getattr(torch, dtype), what, kernels=kernels) for rows in (8, 16))
    compared = what == "whole"
    device = "cuda" if kernels else "cpu"
    use_facts(monkeypatch, memory, logit_chunk_rows=1, logit_chunk_bytes=0)
    work = RankWork(tokens=1, device=device, dtype=dtype, logit_copies=COPIES.get(what, 2), compares_logits=compared)
    measured, planned = (many - few) / 8, chunk_bytes(work, V)
    if kernels and not compared:
        assert planned == (2 if dtype == "bfloat16" else 4) * V, "one array"
    if kernels or compared:
        assert planned <= measured <= 1.02 * planned, "and few numbers of a row"
    else:
        assert planned / 2 <= measured <= 1.001 * planned
