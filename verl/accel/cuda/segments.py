"""Attention of segments, and of prompts, by variable-length flash kernels, in half precision: flash-attn's where it is
installed, else torch's own. It is differentiable, and needs no Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.accel.cuda.decode import LEAST_CAPABILITY
from verl.accel.operations import Call, Use
from verl.nn.flash import flash_attn
from verl.nn.torch_compat import varlen_attention

MAX_HEAD_DIM = 256
NO_GRADIENT = range(193, 225)  # head sizes that the kernels refuse in a backward pass on some cards
HEAD_DIM_STEP = 8  # torch's kernel takes multiples of it; flash-attn pads
FUNCTION = "flash_attn_varlen_func"


def load_torch(use: Use) -> Call | str:
    """Return the function, or why it cannot run: the row of torch's kernel."""
    return _missing(use) or _uneven(use) or _without_gradient(use) or torch_segments


def load_flash_attn(use: Use) -> Call | str:
    """Return the function, or why it cannot run: the row of flash-attn."""
    if flash_attn(FUNCTION) is None:
        return "flash-attn 2 is not installed"
    return _missing(use) or _without_gradient(use) or flash_attn_segments


def load_torch_prompts(use: Use) -> Call | str:
    """Return what `load_torch` returns, for prompts, which have no gradients."""
    return _capped(use) or _missing(use) or _uneven(use) or torch_segments


def load_flash_attn_prompts(use: Use) -> Call | str:
    """Return what `load_flash_attn` returns, for prompts, which have no gradients."""
    if flash_attn(FUNCTION) is None:
        return "flash-attn 2 is not installed"
    return _capped(use) or _missing(use) or flash_attn_segments


def torch_segments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: tuple[int, int],
    *,
    scale: float,
    window: int = 0,
    index: Tensor | None = None,
) -> Tensor:
    k, v = _copied(k, v, index)
    span = (window - 1 if window else -1, 0)
    return varlen_attention(q, k, v, (starts, key_starts, *longest), scale=scale, window_size=span)


def flash_attn_segments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: tuple[int, int],
    *,
    scale: float,
    window: int = 0,
    index: Tensor | None = None,
) -> Tensor:
    k, v = _copied(k, v, index)
    kernel = flash_attn(FUNCTION)
    assert kernel is not None, "load_flash_attn looked for it"
    out: Tensor = kernel(
        q,
        k,
        v,
        starts,
        key_starts,
        *longest,
        softmax_scale=scale,
        causal=True,
        window_size=(window - 1 if window else -1, 0),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out


def _copied(k: Tensor, v: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the keys and values of all segments one after the other: those that several have are copied."""
    return (k, v) if index is None else (k.index_select(0, index), v.index_select(0, index))


def _capped(use: Use) -> str | None:
    """Return why flash kernels do not compute the attention of a model whose scores are capped."""
    return "variable-length kernels do not cap scores" if use.sizes.get("capped") else None


def _uneven(use: Use) -> str | None:
    """Return why torch's kernel does not compute heads of this size. On the device `meta` it has shapes alone."""
    dim = use.sizes.get("head_dim", HEAD_DIM_STEP)
    if use.device.type == "cuda" and dim % HEAD_DIM_STEP:
        return f"head_dim={dim}: torch's flash kernel computes multiples of {HEAD_DIM_STEP}"
    return None


def _without_gradient(use: Use) -> str | None:
    """Return why flash kernels have no gradient of this; None if they have. Theirs of these sizes runs on the cards of
    data centres alone (8.0, 9.0, 10.0)."""
    dim = use.sizes.get("head_dim", HEAD_DIM_STEP)
    if use.device.type != "cuda" or dim not in NO_GRADIENT:
        return None
    major, minor = torch.cuda.get_device_capability(use.device)
    if (major, minor > 0) == (8, True) or major == 12:
        return f"head_dim={dim}: flash kernels have no gradient of it on compute capability {major}.{minor}"
    return None


def _missing(use: Use) -> str | None:
    """Return why flash kernels do not compute this; None if they do."""
    dim = use.sizes.get("head_dim", 8)
    if dim > MAX_HEAD_DIM:
        return f"head_dim={dim}: flash kernels compute up to {MAX_HEAD_DIM}"
    if use.device.type == "cuda":
        found = torch.cuda.get_device_capability(use.device)
        if found < LEAST_CAPABILITY:
            return f"the card has compute capability {found[0]}.{found[1]}, below {LEAST_CAPABILITY[0]}.0"
    return None
