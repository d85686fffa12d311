"""What the hardware computes natively."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


def native_bf16(device: torch.device) -> bool:
    """True if bf16 matmuls run on the hardware. A CPU that emulates them takes ten times as long as in float32."""
    return device.type != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


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
