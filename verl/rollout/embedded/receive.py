"""A stream of HF-named tensors copied into an engine's own memory: all, or an error that lists what did not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Destination:
    """The memory of one HF tensor. Tied names share one destination."""

    shape: tuple[int, ...]
    into: Tensor
    """A view into storage."""
    copied_as: tuple[int, ...]
    """The shape in which it is copied there."""
    dtype: torch.dtype
    """Values are rounded to it before."""
    plus: float = 0.0
    """This is added to all values."""
    pack: Callable[[Tensor], None] | None = None
    """Called in place of a copy, with float32 of `shape`, to write another layout."""


def receive(tensors: Iterable[tuple[str, object]], destinations: Mapping[str, Destination]) -> None:
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
        value = tensor.detach().to(to.dtype).reshape(to.copied_as)
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
