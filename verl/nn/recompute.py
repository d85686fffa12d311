"""Results of operations that are computed again in the backward pass, in place of being saved for it.

A product saves its input for the gradient of its weight. If the input is the result of a norm or a gate, the arguments
of that operation are saved anyway, and the result costs one pass over memory. Where a whole layer is checkpointed this
saves nothing more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

BY = "recomputed by"
"""The key of an autograd node's metadata."""


def can_recompute(out: Tensor, operation: Callable[..., Tensor], arguments: int) -> Tensor:
    """Mark `out` as the result of an operation, which is an autograd function whose first saved tensors are its
    `arguments` tensors, and return it. `operation` computes the same from them."""
    node: Any = out.grad_fn
    if node is not None:
        node.metadata[BY] = operation, arguments
    return out


@contextmanager
def without_saving(x: Tensor) -> Iterator[None]:
    """Inside the context operations do not save `x`, if it is marked by `can_recompute`. Other tensors are saved as
    usual."""
    node: Any = x.grad_fn
    if node is None or BY not in node.metadata:
        yield
        return
    # x is alive inside the context, so the address is its own; the function below must not keep x, since torch keeps it
    again, storage, dtype = _Recomputed(node), x.untyped_storage()._cdata, x.dtype

    def pack(t: Tensor) -> Tensor | _Use:
        if t.untyped_storage()._cdata != storage or t.dtype != dtype:
            return t
        again.uses += 1
        return _Use(again, t)

    with torch.autograd.graph.saved_tensors_hooks(pack, _unpacked):
        yield


class _Recomputed:
    """The result of the operation of an autograd node. It is computed when it is first read in a backward pass, and
    kept until it was read by each of its uses."""

    def __init__(self, node: Any) -> None:
        self._node, self.uses = node, 0
        self._value: Tensor | None = None
        self._left = 0

    def read(self) -> Tensor:
        if self._value is None:
            operation, arguments = self._node.metadata[BY]
            with torch.no_grad():
                self._value, self._left = operation(*self._node.saved_tensors[:arguments]), self.uses
        value, self._left = self._value, self._left - 1
        if not self._left:
            self._value = None
        return value


class _Use:
    """A view of a recomputed result, in place of a saved tensor `t` with the same storage."""

    def __init__(self, of: _Recomputed, t: Tensor) -> None:
        self._of, self._view = of, (t.size(), t.stride(), t.storage_offset())

    def read(self) -> Tensor:
        return self._of.read().as_strided(*self._view)


def _unpacked(saved: Tensor | _Use) -> Tensor:
    return saved.read() if isinstance(saved, _Use) else saved
