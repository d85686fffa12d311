"""The precisions that the hardware computes natively."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn


def native_bf16(device: torch.device) -> bool:
    """True if bf16 matmuls run on the hardware. A CPU that emulates them takes ten times as long as in float32."""
    return device.type != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def computing_in(dtype: torch.dtype, master: torch.dtype, device: torch.device) -> AbstractContextManager[None]:
    """Autocast of weights that are kept in `master`. Nothing is cached: a pass reads a weight once, and a cache would
    hold a copy of every layer to the end of a pass that has no gradients too."""
    return nullcontext() if dtype == master else torch.autocast(device.type, dtype=dtype, cache_enabled=False)


@contextmanager
def rounded(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> Iterator[None]:
    """Inside, the parameters hold their values rounded to `dtype`, in their own dtype; gradients go to the masters.
    It trains bf16 on a CPU that only emulates it, and agrees with a rollout engine that does the same."""
    kept = [(p, p.data) for p in parameters]
    for p, master in kept:
        p.data = master.to(dtype).to(master.dtype)
    try:
        yield
    finally:
        for p, master in kept:
            p.data = master


@contextmanager
def rounded_in_place(tensors: Iterable[Tensor], dtype: torch.dtype) -> Iterator[None]:
    """As `rounded`, for shards that others gather from: inside the context their storage holds values rounded to
    `dtype`."""
    kept = [(t, t.clone()) for t in tensors]
    for t, _ in kept:
        t.copy_(t.to(dtype))
    try:
        yield
    finally:
        for t, master in kept:
            t.copy_(master)
