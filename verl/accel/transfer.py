"""Copies from the host to a device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def to_device(values: Tensor | np.ndarray, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return an array or a tensor of the host on a device, in `dtype` (None: its own). The host does not wait for what
    the device computes: it would before a copy from memory that is not pinned. Values of the device stay there."""
    given = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if device.type == "cuda" and given.device.type == "cpu":
        # of torch's cache, which keeps the memory until the copy has ended; with the strides of a view of few numbers
        # the pinned numbers would overlap too
        given = given.contiguous().pin_memory()
    return given.to(device, dtype, non_blocking=device.type in ("cuda", "meta"))
