"""The attention of a decode step over pages that is not fused: flash-attn's kernel, or torch's operations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from verl.nn.flash import flash_attn

WITH_CACHE = "flash_attn_with_kvcache"
Pages = tuple[Tensor, Tensor]  # block table int32 [n, W], tokens seen int32 [n]
PagedKernel = Callable[[Tensor, Tensor, Tensor, Pages, float, int], Tensor]
"""A function of (q [n, H, D], keys and values [pages, PAGE, K, D], pages of each row, scale, window) that returns the
mixed values [n, H, D]."""


def flash_attn_paged(q: Tensor, keys: Tensor, values: Tensor, pages: Pages, scale: float, window: int) -> Tensor:
    """Compute attention by the split-KV kernel of the flash-attn package over a block table."""
    kernel = flash_attn(WITH_CACHE)
    assert kernel is not None, "paged_kernel looked for it"
    read = {"block_table": pages[0], "cache_seqlens": pages[1], "softmax_scale": scale, "causal": True}
    span = (window - 1, 0) if window else (-1, -1)
    out: Tensor = kernel(q[:, None], keys, values, window_size=span, **read)
    return out[:, 0]


def gathered_paged(q: Tensor, keys: Tensor, values: Tensor, pages: Pages, scale: float, window: int) -> Tensor:
    """Compute attention by plain operations, which copy the pages. It is used if there is no kernel."""
    table, seen = pages
    k, v = (pool[table.long()].flatten(1, 2).transpose(1, 2) for pool in (keys, values))  # [n, K, W PAGE, D]
    place = torch.arange(k.shape[2], device=q.device)
    visible = place < seen[:, None]
    if window:
        visible &= place >= seen[:, None] - window
    mask, grouped = visible[:, None, None], q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)[:, :, 0]


def paged_kernel(device: torch.device, dtype: torch.dtype) -> PagedKernel:
    """Return the attention of a step that is not fused: flash-attn in half precision on CUDA if it is installed."""
    half = device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)
    return flash_attn_paged if half and flash_attn(WITH_CACHE) is not None else gathered_paged
