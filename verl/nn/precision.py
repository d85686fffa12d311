"""The precisions that the hardware computes natively."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


def native_bf16(device: torch.device) -> bool:
    """Return True if bf16 matmuls run on the hardware. A CPU that emulates them takes ten times as long as in
    float32."""
    return device.type != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def computing_in(dtype: torch.dtype, master: torch.dtype, device: torch.device) -> AbstractContextManager[None]:
    """Return an autocast context to `dtype` for weights that are stored in `master`; it does nothing if both are the
    same. Its cache is off: a pass reads each weight once, and the cache would keep a copy of every layer to the end of
    a pass without gradients too."""
    return nullcontext() if dtype == master else torch.autocast(device.type, dtype=dtype, cache_enabled=False)


def rounded_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight with its values rounded to `dtype`, in its own dtype. The gradient of the result is that of the
    weight, exactly."""
    found: Tensor = _Rounded.apply(weight, dtype)
    return found


class _Rounded(torch.autograd.Function):
    """The autograd function of `rounded_weight`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return weight.to(dtype).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None]:
        return d_out, None


@contextmanager
def rounded(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> Iterator[None]:
    """Inside the context the parameters have values rounded to `dtype`, in their own dtype; afterwards their exact
    values again, to which the gradients of the pass are applied. A CPU that only emulates bf16 trains in it this way,
    and a rollout engine on such a CPU rounds in the same way."""
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
    """Round as `rounded` does, but in the storage of the tensors: for shards from which FSDP gathers weights."""
    kept = [(t, t.clone()) for t in tensors]
    for t, _ in kept:
        t.copy_(t.to(dtype))
    try:
        yield
    finally:
        for t, master in kept:
            t.copy_(master)
