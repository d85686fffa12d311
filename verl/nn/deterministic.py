"""Attention whose backward pass is deterministic where a run is (`run.deterministic`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_NAMES = ("attention", "attn")
_STEPS = 4  # between the node of a kernel and that of a result: slices of padded heads, views


def exact_backward(out: Tensor) -> Tensor:
    """Return the result of an attention kernel of torch after its backward pass was made deterministic, if torch's
    setting wants that.

    Torch has kernels that add the gradients of keys in a fixed order, but uses them only where the setting is not
    `warn_only`. It is here, since other operations of a run have no deterministic form; so it is changed while the node
    of the kernel runs (`_flash_attention_backward` and `_efficient_attention_backward` in torch's
    attention_backward.cu). The setting is that of the process: meanwhile an operation of another thread that has no
    deterministic form is an error, not a warning. A CPU has one kernel, which is deterministic."""
    if out.device.type != "cpu" and _only_warns() and (node := _attention_node(out.grad_fn)) is not None:
        node.register_prehook(_strict)
        node.register_hook(_usual)
    return out


@contextmanager
def setting_restored() -> Iterator[None]:
    """Restore torch's setting at the end of the context, also after a backward pass that failed in such a node."""
    warns = _only_warns()
    try:
        yield
    finally:
        if warns:
            torch.use_deterministic_algorithms(True, warn_only=True)


def _only_warns() -> bool:
    return torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()


def _attention_node(node: Any) -> Any:
    """Return the node of an attention kernel, at most a few steps before `node`; None if there is none, as of attention
    by products and a softmax."""
    for _ in range(_STEPS):
        if node is None or any(name in type(node).__name__.lower() for name in _NAMES):
            return node
        node = node.next_functions[0][0] if node.next_functions else None
    return None


def _strict(gradients: tuple[Tensor, ...]) -> None:
    torch.use_deterministic_algorithms(True)


def _usual(gradients: tuple[Tensor, ...], given: tuple[Tensor, ...]) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
