"""The operations of a decode step by Triton kernels: whether they run here, and the bytes that each has to move."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_CAPABILITY = (8, 0)
MAX_HEAD_DIM = 256
MAX_HIDDEN = 16384  # a row of a norm is one block
STATISTICS_BYTES = 8  # of one part of one row and head: float32 maximum and sum
INTERPRETED_PROCESSORS = 16  # in place of a card's, in Triton's interpreter


@dataclass(frozen=True, slots=True)
class DecodeOps:
    """The kernels of one decode step, by name. Their modules import Triton."""

    attend: Callable[..., Tensor]
    """Attention of one token per row over pages."""
    rotate_and_store: Callable[..., Tensor]
    """Norm and rotation of queries and keys; keys and values into their pages."""
    add_norm: Callable[..., Tensor]
    """Residual and RMS norm."""
    gated: Callable[..., Tensor]
    """Activation and gate of a feed-forward block."""
    sample: Callable[..., Tensor]
    """A draw and its log-prob."""
    splits_of: Callable[[int, int, int, int], int]
    """The most parts into which the keys of a row are split."""
    processors: int
    """Multiprocessors of the card."""


def missing(device: torch.device, head_dim: int, hidden: int, page: int) -> str | None:
    """Return why the kernels do not run on `device` for heads of `head_dim`, rows of `hidden` and pages of `page`
    tokens; None if they do. On a CPU they run in Triton's interpreter, if the variable TRITON_INTERPRET is 1."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: it is part of every CUDA build of torch on Linux"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "the device is a CPU"
    if device.type == "cuda":
        found = torch.cuda.get_device_capability(device)
        if found < LEAST_CAPABILITY:
            return f"the card has compute capability {found[0]}.{found[1]}, below {LEAST_CAPABILITY[0]}.0"
        if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
            return "Triton finds no C compiler: install gcc or set CC"
    if head_dim > MAX_HEAD_DIM or head_dim % 2:
        return f"head_dim={head_dim}: the kernels compute even sizes up to {MAX_HEAD_DIM}"
    if hidden > MAX_HIDDEN:
        return f"hidden_size={hidden}: the kernels compute up to {MAX_HIDDEN}"
    if page < 16 or page & (page - 1):
        return f"pages of {page} tokens: the kernels read powers of two from 16"
    return None


def decode_ops(device: torch.device) -> DecodeOps:
    """Return the kernels for a device for which `missing` is None."""
    from verl.accel.cuda import attention, layers, rotary, sampling

    cuda = device.type == "cuda"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else INTERPRETED_PROCESSORS
    return DecodeOps(
        attend=attention.attend_pages,
        rotate_and_store=rotary.rotate_and_store,
        add_norm=layers.add_norm,
        gated=layers.gated,
        sample=sampling.draw_tokens,
        splits_of=attention.splits_of,
        processors=processors,
    )


def attend_bytes(
    lengths: Sequence[int], heads: int, kv_heads: int, dim: int, itemsize: int, *, window: int, parts: Sequence[int]
) -> int:
    """Return the bytes that `attend` reads and writes for rows of these lengths, of which row i is read in parts[i]
    parts: the keys and values that are seen, queries, results, and partial results in float32 twice."""
    seen = sum(min(length, window or length) for length in lengths)
    ends = 2 * len(lengths) * heads * dim * itemsize
    partial = sum(n for n in parts if n > 1) * heads * 2 * (4 * dim + STATISTICS_BYTES)
    return 2 * seen * kv_heads * dim * itemsize + ends + partial


def rotate_and_store_bytes(rows: int, heads: int, kv_heads: int, dim: int, itemsize: int, norm_itemsize: int) -> int:
    """Return the bytes that `rotate_and_store` reads and writes; a `norm_itemsize` of 0 is no norm."""
    every, normed = heads + 2 * kv_heads, heads + kv_heads
    return 2 * rows * every * dim * itemsize + normed * dim * norm_itemsize + rows * dim * 4


def add_norm_bytes(rows: int, hidden: int, itemsize: int, weight_itemsize: int, *, added: bool, normed: bool) -> int:
    """Return the bytes that `add_norm` reads and writes, with something `added` to the residual, which is `normed`."""
    return rows * hidden * itemsize * (4 if added else 2) + hidden * weight_itemsize * (2 if normed else 1)


def gated_bytes(rows: int, ffn: int, itemsize: int) -> int:
    """Return the bytes that `gated` reads and writes."""
    return 3 * rows * ffn * itemsize


def sample_bytes(rows: int, vocab: int, itemsize: int, block: int) -> int:
    """Return the bytes that `sample` reads and writes: the logits once, and one `block` of them again."""
    return rows * (vocab + block) * itemsize


def linear_bytes(rows: int, inputs: int, outputs: int, itemsize: int) -> int:
    """Return the bytes that a product of [rows, inputs] with weights [outputs, inputs] has to move."""
    return (rows * inputs + inputs * outputs + rows * outputs) * itemsize
