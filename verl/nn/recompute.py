"""Results of operations that are computed again in the backward pass, in place of being saved for it: those of norms
and gates, or most of a layer.

A product saves its input for the gradient of its weight. If the input is the result of a norm or a gate, the arguments
of that operation are saved anyway, and the result costs one pass over memory. Where a whole layer is checkpointed this
saves nothing more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from verl.errors import Refused
from verl.nn.transformers_compat import enable_checkpointing

BY = "recomputed by"
"""The key of an autograd node's metadata."""


def can_recompute(out: Tensor, operation: Callable[..., Tensor], arguments: int) -> Tensor:
    """Mark `out` as the result of an operation, which is an autograd function whose first saved tensors are its
    `arguments` tensors, and return it. `operation` computes the same from them."""
    node: Any = out.grad_fn
    if node is not None:
        node.metadata[BY] = operation, arguments
    return out


KEPT = (
    *("aten.mm", "aten.addmm", "aten._grouped_mm"),
    *("aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_flash_attention_for_cpu"),
    *("aten._scaled_dot_product_efficient_attention", "aten._scaled_dot_product_cudnn_attention"),
    *("torch_attn._varlen_attn", "flash_attn._flash_attn_varlen_forward"),
)
"""Matrix products and attention, by their names in torch.ops: selective checkpointing keeps their results. A release of
torch may lack some."""


def checkpoint_layers(model: Any, how: str) -> None:
    """Let the layers of a model compute again in the backward pass what they did in the forward pass. how: none;
    selective (all but the operations of KEPT) or full."""
    if how == "none":
        return
    if how not in ("selective", "full"):
        raise Refused(f"gradient_checkpointing={how}: an engine has none, selective and full")
    given: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # no pass has random numbers
    if how == "selective":
        given["context_fn"] = partial(create_selective_checkpoint_contexts, _operations(KEPT))
    enable_checkpointing(model, given)


def _operations(names: Iterable[str]) -> list[torch._ops.OpOverload]:
    """Return those of the operations that exist here."""
    found = []
    for namespace, _, name in (full.partition(".") for full in names):
        packet = getattr(getattr(torch.ops, namespace), name, None)
        if packet is not None:
            found.append(packet.default)
    return found


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
