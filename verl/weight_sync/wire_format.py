"""Conversion of weights to the format that the replicas read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from verl.nn.fp8 import SCALES, VALUES, in_blocks, quantise, scales_shape
from verl.nn.quant import FLOAT_PARTS
from verl.wire import WireFormat, holds


def wire_dtype(form: WireFormat, name: str, held: torch.dtype) -> torch.dtype:
    """Return the dtype in which the tensor `name` is sent, which the trainer has in the dtype `held`. Only
    floating-point tensors are converted, and only to a narrower dtype: a replica widens without loss. Scales of codes
    are never converted: they would be those of other weights."""
    wanted = form.dtype_of(name)
    if form.codes and name.endswith(FLOAT_PARTS):
        return held
    if wanted is None or not held.is_floating_point or not holds(str(held).removeprefix("torch."), wanted):
        return held
    to: torch.dtype = vars(torch)[wanted]
    return to


def converted(form: WireFormat, name: str, tensor: Tensor) -> Tensor:
    """Return the tensor in the dtype of the format; the tensor itself if it has that dtype already."""
    return tensor.detach().to(wire_dtype(form, name, tensor.dtype))


def wire_tensors(form: WireFormat, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors as which a tensor is sent: itself in the dtype of the format, or its scales and its values in 8
    bits. The scales are first, so that a reader keeps the smaller one."""
    if not (form.fp8 and in_blocks(name, tensor.shape)):
        yield name, converted(form, name, tensor)
        return
    values, scales = quantise(tensor)
    yield name + SCALES, scales
    yield name, values


def wire_shapes(
    form: WireFormat, name: str, shape: Sequence[int], held: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return name -> (shape, dtype) of the tensors that `wire_tensors` yields, in its order."""
    if form.fp8 and in_blocks(name, shape):
        return {name + SCALES: (scales_shape(shape), torch.float32), name: (tuple(shape), VALUES)}
    return {name: (tuple(shape), wire_dtype(form, name, held))}
