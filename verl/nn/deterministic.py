"""Attention whose backward pass is deterministic where a run is (`run.deterministic`)."""

from __future__ import annotations

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
    attention_backward.cu)."""
    if torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled():
        node: Any = out.grad_fn
        for _ in range(_STEPS):
            if node is None or any(name in type(node).__name__.lower() for name in _NAMES):
                break
            node = node.next_functions[0][0] if node.next_functions else None
        if node is not None:
            node.register_prehook(_strict)
            node.register_hook(_usual)
    return out


def _strict(gradients: tuple[Tensor, ...]) -> None:
    torch.use_deterministic_algorithms(True)


def _usual(gradients: tuple[Tensor, ...], given: tuple[Tensor, ...]) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
