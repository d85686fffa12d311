"""Copies a stream of HF-named tensors into an engine's own memory. All of them must fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Destination:
    """The memory into which one HF tensor is written. Tied names share one destination."""

    shape: tuple[int, ...]
    """The shape that the HF tensor must have."""
    into: Tensor
    """The memory, as a view into the storage of the engine."""
    copied_as: tuple[int, ...]
    """The shape to which the tensor is reshaped before it is copied to `into`, which may be broadcast."""
    dtype: torch.dtype
    """Values are rounded to it before the copy."""
    plus: float = 0.0
    """A number that is added to all values."""
    pack: Callable[[Tensor], None] | None = None
    """Called in place of a copy, with the tensor in float32 and in `copied_as`, to write another layout."""
    order: Tensor | None = None
    """The order in which the rows of the tensor are written; None: in their own."""


def receive(tensors: Iterable[tuple[str, object]], destinations: Mapping[str, Destination]) -> None:
    """Write each tensor into its destination. Raise ValueError, with all their names, if tensors are missing,
    unexpected or of another shape, and if two tied tensors differ."""
    filled: set[Destination] = set()
    unexpected, misshapen = [], []
    for name, tensor in tensors:
        to = destinations.get(name)
        if to is None or not isinstance(tensor, Tensor):
            unexpected.append(name)
            continue
        filled_before = to in filled
        filled.add(to)
        if tuple(tensor.shape) != to.shape:
            misshapen.append(f"{name} {tuple(tensor.shape)}, model {to.shape}")
            continue
        if to.dtype.itemsize == 1 and tensor.dtype != to.dtype:  # without its scales it cannot be rounded to 8 bits
            raise ValueError(f"{name} is {tensor.dtype}: weights in blocks of FP8 were expected")
        value = tensor.detach().to(to.dtype)
        value = value if to.order is None else value.index_select(0, to.order.to(value.device))
        value = value.reshape(to.copied_as)
        if to.plus:
            value = value.float() + to.plus
        if filled_before and (to.pack is not None or not torch.equal(to.into, value.to(to.into))):
            raise ValueError(f"{name} differs from the tensor it is tied to (tie_word_embeddings), or came twice")
        if to.pack is not None:
            to.pack(value.to("cpu", torch.float32).contiguous())
        elif not filled_before:
            to.into.copy_(value)
    missing = sorted(name for name, to in destinations.items() if to not in filled)
    if missing or unexpected or misshapen:
        raise ValueError(
            f"weights do not fit the model: missing {missing}, unexpected {unexpected}, wrong shape {misshapen}"
        )
