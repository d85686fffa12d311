"""Conversion of weights to the format that the replicas read."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.rollout.base import WireFormat, holds


def wire_dtype(form: WireFormat, name: str, held: torch.dtype) -> torch.dtype:
    """Return the dtype in which the tensor `name` is sent, which the trainer has in the dtype `held`. Only
    floating-point tensors are converted, and only to a narrower dtype: a replica widens without loss."""
    wanted = form.dtype_of(name)
    if wanted is None or not held.is_floating_point or not holds(str(held).removeprefix("torch."), wanted):
        return held
    to: torch.dtype = vars(torch)[wanted]
    return to


def converted(form: WireFormat, name: str, tensor: Tensor) -> Tensor:
    """Return the tensor in the dtype of the format; the tensor itself if it has that dtype already."""
    return tensor.detach().to(wire_dtype(form, name, tensor.dtype))
