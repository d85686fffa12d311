"""Attention over a packed forest of segments: each query sees its ancestors' tokens and its own, up to itself.

A plan of index tensors is made once per micro-batch and used by every layer. Segments of like shape are computed as one
padded block, so nothing is quadratic in the pack and a shared prompt is never projected twice (engines.md, parts 1 and 5).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from verl.batch import Batch, chains_of

PACKED = "verl_packed"
# Blocks up to this many keys keep their probabilities for the backward pass (bmm is faster than SDPA there on CPU).
_SMALL_KEYS = 256


@dataclass(slots=True)
class Block:
    """Segments computed together. Row i has queries q_index[i] (padded with 0) and keys k_index[i]."""

    q_index: Tensor  # [b, Q]
    k_index: Tensor  # [b, K]
    offset: Tensor  # [b] keys before the first query: query t sees keys 0..offset+t
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def allowed(self, window: int | None) -> Tensor:
        """[b, 1, Q, K] bool; `window` is a sliding window in tokens."""
        if window not in self.masks:
            q = self.offset[:, None] + torch.arange(self.q_index.shape[1], device=self.offset.device)  # [b, Q]
            k = torch.arange(self.k_index.shape[1], device=self.offset.device)
            mask = k <= q[..., None]
            if window is not None:
                mask &= k > q[..., None] - window
            self.masks[window] = mask[:, None]
        return self.masks[window]


@dataclass(slots=True)
class AttentionPlan:
    blocks: list[Block]
    inverse: Tensor  # [T] place of each token in the concatenated block outputs


def make_plan(batch: Batch, device: torch.device, *, max_waste: float = 0.25) -> AttentionPlan:
    """Group the segments of `batch` into blocks whose padding is at most `max_waste` of their area."""
    lengths = np.diff(batch.seg_start)
    chains = chains_of(batch)
    keys = np.array([sum(int(lengths[s]) for s in c) for c in chains])
    order = np.lexsort((lengths, keys))[::-1]
    blocks: list[Block] = []
    inverse = np.zeros(batch.num_tokens, np.int64)
    placed = 0
    i = 0
    while i < len(order):
        members = _block_members(order, i, lengths, keys, max_waste)
        i += len(members)
        width, depth = int(lengths[members].max()), int(keys[members].max())
        q_index = np.zeros((len(members), width), np.int64)
        k_index = np.zeros((len(members), depth), np.int64)
        for row, s in enumerate(members):
            own = np.arange(batch.seg_start[s], batch.seg_start[s + 1])
            q_index[row, : len(own)] = own
            k_index[row, : keys[s]] = np.concatenate([np.arange(batch.seg_start[a], batch.seg_start[a + 1]) for a in chains[s]])
            inverse[own] = placed + row * width + np.arange(len(own))
        placed += q_index.size
        offset = torch.from_numpy(keys[members] - lengths[members])
        blocks.append(Block(torch.from_numpy(q_index).to(device), torch.from_numpy(k_index).to(device), offset.to(device)))
    return AttentionPlan(blocks, torch.from_numpy(inverse).to(device))


def _block_members(order: np.ndarray, first: int, lengths: np.ndarray, keys: np.ndarray, max_waste: float) -> np.ndarray:
    """The longest run of `order` from `first` on whose padded area stays within the bound."""
    width = depth = area = 0
    end = first
    for s in order[first:]:
        width, depth = max(width, int(lengths[s])), max(depth, int(keys[s]))
        area += int(lengths[s]) * int(keys[s])
        n = end - first + 1
        small = width * depth <= 4096  # padding of short rows costs less than another block
        if n > 1 and area < (1 - max_waste) * n * width * depth and not small:
            break
        end += 1
    return order[first:end]


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    verl_plan: AttentionPlan | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The function transformers calls. query [1, H, T, D], key and value [1, KV, T, D] -> [1, T, H, D]."""
    if softcap is not None or s_aux is not None:
        raise ValueError("this model's attention caps its scores or has sinks; use model.attention=padded")
    assert verl_plan is not None and attention_mask is None, "packed attention is driven by a plan, never by a mask"
    scale = scaling if scaling is not None else 1 / math.sqrt(query.shape[-1])
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
    parts = [_block_attention(block, q, k, v, scale, sliding_window) for block in verl_plan.blocks]
    flat = parts[0] if len(parts) == 1 else torch.cat(parts)  # [sum b*Q, H, D]
    return flat.index_select(0, verl_plan.inverse)[None], None


def _block_attention(block: Block, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    b, width = block.q_index.shape
    depth = block.k_index.shape[1]
    heads, groups = q.shape[1], q.shape[1] // k.shape[1]
    q_b = _take(q, block.q_index).view(b, width, k.shape[1], groups, -1).permute(0, 2, 3, 1, 4)  # [b, KV, G, Q, D]
    k_b, v_b = (_take(x, block.k_index).transpose(1, 2) for x in (k, v))  # [b, KV, K, D]
    q_b = q_b.reshape(b, k.shape[1], groups * width, -1)  # the heads of a group are more query rows: keys are not repeated
    allowed = block.allowed(window).repeat(1, 1, groups, 1)  # [b, 1, G*Q, K]
    if depth <= _SMALL_KEYS and q.device.type == "cpu":
        scores = torch.matmul(q_b * scale, k_b.transpose(-1, -2)).masked_fill(~allowed, float("-inf"))
        out = torch.matmul(torch.softmax(scores, -1), v_b)
    else:
        out = F.scaled_dot_product_attention(q_b, k_b, v_b, attn_mask=allowed, scale=scale)
    out = out.view(b, k.shape[1], groups, width, -1).permute(0, 3, 1, 2, 4)  # [b, Q, KV, G, D]
    return out.reshape(b * width, heads, -1)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x [T, H, D], index [b, n] -> [b, n, H, D]."""
    return x.index_select(0, index.reshape(-1)).view(*index.shape, *x.shape[1:])


def register() -> None:
    """Make the packed attention known to transformers; idempotent."""
    AttentionInterface.register(PACKED, packed_attention)
    AttentionMaskInterface.register(PACKED, _no_mask)


def _no_mask(*args: object, **kwargs: object) -> None:
    return None
