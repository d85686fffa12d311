"""Attention over a packed forest of segments: each query sees its ancestors' tokens and its own, up to itself.

A plan of index tensors is made once per micro-batch and used by every layer. Segments of like shape are computed as one
padded block, so nothing is quadratic in the pack and a shared prompt is never projected twice (engines.md, parts 1 and 5).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface

from verl.batch import Batch, ranges

PACKED = "verl_packed"
# Blocks up to this many keys keep their probabilities for the backward pass (bmm is faster than SDPA there on CPU).
_SMALL_KEYS = 256
# Score elements of padding that cost less than the dozen kernel launches of another block.
_FREE_PADDING = 1 << 15


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the heads of a block's slots stand in q [T, H, D] and k, v [T, KV, D] seen as rows of D."""

    q: Tensor  # [b * H * Q] the heads of a group are neighbours: they are more query rows over the same keys
    k: Tensor  # [b * KV * K]


@dataclass(slots=True)
class Block:
    """Segments computed together. Row i has queries q_index[i] and keys k_index[i], both padded with token 0."""

    q_index: Tensor  # [b, Q]
    k_index: Tensor  # [b, K]
    offset: Tensor  # [b] keys before the first query: query t sees keys 0..offset+t
    pad: Tensor  # [p] flat places of q_index that are padding
    rooted: bool  # no row has keys before its queries: plain causal attention
    _rows: dict[tuple[int, int], Rows] = field(default_factory=dict)
    _masks: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)

    def rows(self, heads: int, kv_heads: int) -> Rows:
        if (heads, kv_heads) not in self._rows:
            h, kv = (torch.arange(n, device=self.offset.device)[:, None] for n in (heads, kv_heads))
            q = self.q_index[:, None] * heads + h  # [b, H, Q]
            k = self.k_index[:, None] * kv_heads + kv  # [b, KV, K]
            self._rows[heads, kv_heads] = Rows(q.flatten(), k.flatten())
        return self._rows[heads, kv_heads]

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[b, 1, Q, K]: True where allowed (dtype bool), or what to add to the scores. `window`: of a sliding window."""
        if (window, dtype) not in self._masks:
            depth = self.k_index.shape[1]
            q = self.offset[:, None] + torch.arange(self.q_index.shape[1], device=self.offset.device)  # [b, Q]
            q = q.clamp(max=depth - 1)[..., None]  # a padded query still sees something: no NaN anywhere
            k = torch.arange(depth, device=self.offset.device)
            allowed = (k <= q) if window is None else (k <= q) & (k > q - window)
            mask = allowed if dtype == torch.bool else torch.zeros(allowed.shape, dtype=dtype, device=q.device)
            self._masks[window, dtype] = (mask if mask is allowed else mask.masked_fill_(~allowed, -torch.inf))[:, None]
        return self._masks[window, dtype]


@dataclass(slots=True)
class AttentionPlan:
    """Blocks with few keys come first. Slots are the places of all q_index of all blocks, in order."""

    small: list[Block]
    large: list[Block]
    base: Tensor  # [T] first slot of the row in which each token is a query
    within: Tensor  # [T] its place in that row
    width: Tensor  # [T] slots of that row
    _inverse: dict[int, Tensor] = field(default_factory=dict)

    def inverse(self, heads: int) -> Tensor:
        """[T * H] row of each token's head in the blocks' concatenated outputs [sum b * H * Q, D]."""
        if heads not in self._inverse:
            h = torch.arange(heads, device=self.base.device)
            self._inverse[heads] = ((self.base * heads + self.within)[:, None] + h * self.width[:, None]).flatten()
        return self._inverse[heads]


# -- plan ------------------------------------------------------------------------------------------------------------


def make_plan(batch: Batch, device: torch.device, *, max_waste: float = 0.2) -> AttentionPlan:
    """Group the segments of `batch` into blocks whose padding is at most about `max_waste` of their area."""
    lengths = np.diff(batch.seg_start)
    depths = _depths(batch.parent, lengths)
    keys = depths + lengths
    members = _group_segments(lengths, keys, max_waste)
    is_small = [device.type == "cpu" and int(keys[m].max()) <= _SMALL_KEYS for m in members]
    base, within, width = (np.zeros(batch.num_tokens, np.int64) for _ in range(3))
    small: list[Block] = []
    large: list[Block] = []
    slots = 0
    for m in [m for m, s in zip(members, is_small) if s] + [m for m, s in zip(members, is_small) if not s]:
        q_index, k_index = _block_index(batch, m, lengths, depths)
        real = np.arange(q_index.shape[1]) < lengths[m, None]  # [b, Q]
        tokens = q_index[real]
        base[tokens] = np.repeat(slots + np.arange(len(m)) * q_index.shape[1], lengths[m])
        within[tokens] = ranges(np.zeros(len(m), np.int64), lengths[m])
        width[tokens] = q_index.shape[1]
        slots += q_index.size
        into = small if len(small) < sum(is_small) else large
        arrays = (q_index, k_index, depths[m], np.flatnonzero(~real))
        into.append(Block(*(torch.from_numpy(a).to(device) for a in arrays), rooted=not depths[m].any()))
    return AttentionPlan(small, large, *(torch.from_numpy(a).to(device) for a in (base, within, width)))


def _depths(parent: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[S] tokens before each segment."""
    depths = np.zeros(len(parent), np.int64)
    at = np.where(parent >= 0, parent, -1)
    while (at >= 0).any():  # climb all chains at once
        depths += np.where(at >= 0, lengths[at], 0)
        at = np.where(at >= 0, parent[at], -1)
    return depths


def _group_segments(lengths: np.ndarray, keys: np.ndarray, max_waste: float) -> list[np.ndarray]:
    """Segments of each block: runs of like numbers of queries, then of keys, cut where the padding outgrows its bound."""
    likeness = np.round(np.log(lengths) / np.log(1.5))
    order = np.lexsort((-lengths, -keys, -likeness))
    blocks, first = [], 0
    width = depth = area = 0
    for i, s in enumerate(order):
        q, k = int(lengths[s]), int(keys[s])
        wider, deeper = max(width, q), max(depth, k)
        waste = (i - first + 1) * wider * deeper - area - q * k
        if i > first and waste > max(_FREE_PADDING, max_waste * (area + q * k + waste)):
            blocks.append(order[first:i])
            first, width, depth, area = i, q, k, q * k
        else:
            width, depth, area = wider, deeper, area + q * k
    return [*blocks, order[first:]]


def _block_index(batch: Batch, members: np.ndarray, lengths: np.ndarray, depths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """q_index [b, Q] and k_index [b, K]: each member's own tokens, and those of its ancestors before them."""
    depth = int((depths + lengths)[members].max())
    q_index = np.zeros((len(members), int(lengths[members].max())), np.int64)
    k_index = np.zeros((len(members), depth if depth <= 8 else -(-depth // 8) * 8), np.int64)  # GEMMs like multiples of 8
    row, at, own = np.arange(len(members)), members, True
    while len(at):
        tokens = ranges(batch.seg_start[at], lengths[at])
        rows = np.repeat(row, lengths[at])
        k_index[rows, ranges(depths[at], lengths[at])] = tokens
        if own:
            q_index[rows, ranges(np.zeros(len(at), np.int64), lengths[at])] = tokens
        at, own = batch.parent[at], False
        row, at = row[at >= 0], at[at >= 0]
    return q_index, k_index


# -- attention -------------------------------------------------------------------------------------------------------


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
    if not verl_plan.large:
        return _SmallBlocks.apply(q, k, v, verl_plan, scale, sliding_window, True).to(value.dtype)[None], None
    parts = [_large_block(block, q, k, v, scale, sliding_window) for block in verl_plan.large]
    if verl_plan.small:
        parts.insert(0, _SmallBlocks.apply(q, k, v, verl_plan, scale, sliding_window, False).to(parts[0].dtype))
    inverse = verl_plan.inverse(q.shape[1])
    return torch.cat(parts).index_select(0, inverse).view(1, *q.shape[:2], v.shape[-1]), None


def _large_block(block: Block, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """[b * H * Q, Dv] by SDPA, which keeps no probabilities."""
    (_, heads, dim), kv_heads = q.shape, k.shape[1]
    b, width = block.q_index.shape
    at = block.rows(heads, kv_heads)
    q_b = q.reshape(-1, dim).index_select(0, at.q).view(b, heads, width, dim)
    k_b, v_b = (x.reshape(-1, x.shape[-1]).index_select(0, at.k).view(b, kv_heads, -1, x.shape[-1]) for x in (k, v))
    if block.rooted and window is None:  # padding comes last, so that plain causal attention never sees it
        out = F.scaled_dot_product_attention(q_b, k_b[:, :, :width], v_b[:, :, :width], is_causal=True, scale=scale, enable_gqa=True)
    else:
        allowed = block.mask(window, torch.bool).repeat(1, 1, heads // kv_heads, 1)  # [b, 1, G * Q, K]
        out = F.scaled_dot_product_attention(q_b.view(b, kv_heads, -1, dim), k_b, v_b, attn_mask=allowed, scale=scale)
    return out.reshape(-1, v.shape[-1])


class _SmallBlocks(torch.autograd.Function):
    """q [T, H, D], k [T, KV, D], v [T, KV, Dv] -> rows [sum b*H*Q, Dv] of the small blocks, or [T, H, Dv] if `whole`.

    In float32 (float64 stays) whatever the inputs are: the scores are few, and as bf16 they would be off by percents.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float, window: int | None, whole: bool) -> Tensor:
        heads, kv_heads = q.shape[1], k.shape[1]
        q_rows, k_rows, v_rows = (_rows_of(x) for x in (q, k, v))
        saved, outputs = [], []
        for block in plan.small:
            b, width = block.q_index.shape
            at = block.rows(heads, kv_heads)
            q_b = q_rows.index_select(0, at.q).view(b * kv_heads, -1, q.shape[2])  # [b * KV, G * Q, D]
            k_b, v_b = (x.index_select(0, at.k).view(b * kv_heads, -1, x.shape[1]) for x in (k_rows, v_rows))
            bias = block.mask(window, q_rows.dtype).expand(b, heads, -1, -1)
            scores = bias.reshape(b * kv_heads, -1, k_b.shape[1]).baddbmm_(q_b, k_b.transpose(1, 2), alpha=scale)
            p = torch.softmax(scores, -1)
            outputs.append(torch.bmm(p, v_b).view(-1, v.shape[2]))
            saved += [q_b, k_b, v_b, p]
        ctx.save_for_backward(*saved)
        ctx.plan, ctx.scale, ctx.whole = plan, scale, whole
        ctx.shapes, ctx.dtypes = (q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype)
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return out.index_select(0, plan.inverse(heads)).view(*q.shape[:2], v.shape[2]) if whole else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        (tokens, heads, dim), (_, kv_heads, _), (_, _, v_dim) = ctx.shapes
        saved = ctx.saved_tensors
        d_rows = _rows_of(d_out) if ctx.whole else d_out
        d_k, d_v = saved[1].new_zeros(tokens * kv_heads, dim), saved[2].new_zeros(tokens * kv_heads, v_dim)
        d_q, placed = [], 0
        for block, (q_b, k_b, v_b, p) in zip(ctx.plan.small, (saved[i : i + 4] for i in range(0, len(saved), 4)), strict=True):
            b, width = block.q_index.shape
            at = block.rows(heads, kv_heads)
            if ctx.whole:
                d_b = d_rows.index_select(0, at.q)
                d_b.view(b, heads, width, v_dim).transpose(1, 2)[block.pad // width, block.pad % width] = 0
            else:
                d_b = d_rows[placed : placed + len(at.q)]
                placed += len(at.q)
            d_b = d_b.view(p.shape[0], p.shape[1], v_dim)
            d_v.index_add_(0, at.k, torch.bmm(p.transpose(1, 2), d_b).view(-1, v_dim))
            d_s = torch._softmax_backward_data(torch.bmm(d_b, v_b.transpose(1, 2)), p, -1, p.dtype)
            d_k.index_add_(0, at.k, _scaled_bmm(d_s.transpose(1, 2), q_b, ctx.scale).view(-1, dim))
            d_q.append(_scaled_bmm(d_s, k_b, ctx.scale).view(-1, dim))
        d_q_rows = d_q[0] if len(d_q) == 1 else torch.cat(d_q)
        if ctx.whole:
            d_query = d_q_rows.index_select(0, ctx.plan.inverse(heads))
        else:
            d_query = d_q_rows.new_zeros(tokens * heads, dim)
            for block in ctx.plan.small: ...
        return d_query, d_k, d_v, None, None, None, None


def _rows_of(x: Tensor) -> Tensor:
    """[T, n, D] -> [T * n, D] in at least float32."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.dtype == torch.float64 else rows.float()


def _scaled_bmm(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=scale)


def register() -> None:
    """Make the packed attention known to transformers; idempotent."""
    AttentionInterface.register(PACKED, packed_attention)
    AttentionMaskInterface.register(PACKED, _no_mask)


def _no_mask(*args: object, **kwargs: object) -> None:
    return None
