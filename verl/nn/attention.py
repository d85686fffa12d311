"""Attention over a packed forest of segments: each query sees its ancestors' tokens and its own, up to itself.

A plan of index tensors is made once per micro-batch and used by every layer. Segments of like shape are computed as one
padded block, so nothing is quadratic in the pack and a shared prompt is never projected twice.
Where the operation `trained_attention` has a kernel (on CUDA in half precision, on a CPU for short segments), one call
computes the whole forest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface

from verl.accel.devices import device_facts
from verl.accel.operations import Call, Use
from verl.accel.plain import PLAIN
from verl.accel.table import choose
from verl.accel.transfer import to_device
from verl.batch import Batch, ranges
from verl.errors import Refused
from verl.nn.deterministic import exact_backward

PACKED = "verl_packed"
WAY_OUT = "use model.engine_options.attention=padded"


@dataclass(slots=True)
class Block:
    """Segments computed together. Row i has queries q_index[i] and keys k_index[i], both padded with token 0."""

    q_index: Tensor  # [b, Q]
    k_index: Tensor  # [b, K]
    offset: Tensor  # [b] keys before the first query: query t sees keys 0..offset+t
    real: Tensor  # [b, Q] bool: not padding
    rooted: bool  # no row has keys before its queries, and none attends ahead: plain causal attention
    ahead: Tensor | None = None  # [b, Q] how many keys after its own each query sees; None: no query sees any
    windows: bool = False  # queries see them in layers with a sliding window alone
    masks: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the mask [b, 1, Q, K] of the block: the attended positions (bool), or the values to add to the scores.
        window: size of the sliding window; None: no window."""
        if (window, dtype) not in self.masks:
            depth, device = self.k_index.shape[1], self.offset.device
            q = self.offset[:, None] + torch.arange(self.q_index.shape[1], device=device)  # [b, Q]
            q = q.clamp(max=depth - 1)[..., None]  # a padded query attends to some key too, so that no NaN occurs
            k = torch.arange(depth, device=device)
            last = q if self.ahead is None or (self.windows and window is None) else q + self.ahead[..., None]
            mask = (k <= last) if window is None else (k <= last) & (k > q - window)
            if dtype != torch.bool:
                mask = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill_(~mask, -torch.inf)
            self.masks[window, dtype] = mask[:, None]
        return self.masks[window, dtype]


@dataclass(frozen=True, slots=True)
class Rows:
    """Indices that gather the heads of q [T, H, D], k and v [T, KV, D], seen as rows of D, into the slots of all blocks
    in order."""

    q: Tensor  # [sum b * H * Q] the heads of a group are neighbours: more query rows over the same keys
    k: Tensor  # [sum b * KV * K]
    pad: Tensor  # [P] which of q are padding
    inverse: Tensor  # [T * H] slot of each token's head


@dataclass(frozen=True, slots=True)
class Varlen:
    """The forest as variable-length sequences: segment i has queries cu_q[i]:cu_q[i+1] of the pack, and as keys its
    ancestors' tokens and its own. Bottom-right causal alignment is then exactly the forest's attention."""

    bounds: tuple[Tensor, Tensor, int, int]  # cu_q, cu_k [S + 1] int32, and the most queries and keys of a segment
    k_index: Tensor | None  # [sum keys] rows of k and v; None: the pack itself, no segment has ancestors


class Exchange(Protocol):
    """The exchange, before and after attention, between ranks that share the tokens of a pack."""

    def attend(self, attention: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention output [t, H, D] for this rank's t tokens from their q, k, v [t, heads, D]. attention:
        the attention of this rank's plan."""
        ...


@dataclass(slots=True)
class AttentionPlan:
    """The index tensors for attention over one micro-batch, the same for every layer."""

    blocks: list[Block]
    real: list[np.ndarray]
    """For each block, which of its query slots [b, Q] are not padding; on the host."""
    varlen: Varlen | None = None
    exchange: Exchange | None = None
    by_heads: dict[tuple[int, int], Rows] = field(default_factory=dict)

    def rows(self, heads: int, kv_heads: int) -> Rows:
        if (heads, kv_heads) not in self.by_heads:
            device = self.blocks[0].offset.device
            h, kv = (torch.arange(n, device=device)[:, None] for n in (heads, kv_heads))
            q = torch.cat([(b.q_index[:, None] * heads + h).flatten() for b in self.blocks])  # for each block [b, H, Q]
            k = torch.cat([(b.k_index[:, None] * kv_heads + kv).flatten() for b in self.blocks])
            real = np.concatenate([np.repeat(r[:, None], heads, 1).ravel() for r in self.real])  # on the host
            slots, pad = (to_device(np.flatnonzero(x), device) for x in (real, ~real))
            inverse = torch.empty_like(slots)
            inverse[q[slots]] = slots
            self.by_heads[heads, kv_heads] = Rows(q, k, pad, inverse)
        return self.by_heads[heads, kv_heads]


def plan_attention(
    batch: Batch,
    device: torch.device,
    *,
    max_waste: float = 0.2,
    queries: tuple[int, int] | None = None,
    ahead: np.ndarray | None = None,
    windows: bool = False,
) -> AttentionPlan:
    """Group the segments of `batch` into blocks with padding of at most about `max_waste` of their area.

    queries: the first token and the end of a run of tokens; only its queries are computed, with the keys of all tokens.
    None: all tokens · ahead [T]: how many tokens of its segment after itself each one attends to; None: none ·
    windows: it does in layers with a sliding window alone."""
    assert ahead is None or queries is None, "a segment that is cut has no tokens ahead"
    forest = _Forest(batch.seg_start, batch.parent).cut(queries)
    lengths, depths = forest.lengths, forest.depths
    blocks, places = [], []
    mine = np.arange(len(lengths)) if queries is None else forest.inside(queries)
    free = device_facts(device.type).free_padding
    for group in group_segments(lengths[mine], (depths + lengths)[mine], max_waste, free) if len(mine) else ():
        members = mine[group]
        q_index, k_index = _block_index(forest, members)
        real = np.arange(q_index.shape[1]) < lengths[members, None]
        if queries is not None:
            q_index = np.where(real, q_index - queries[0], 0)
        q, k, offset, real_q = (to_device(a, device) for a in (q_index, k_index, depths[members], real))
        later = None if ahead is None else to_device(ahead[q_index], device)
        rooted = ahead is None and not depths[members].any()
        blocks.append(Block(q, k, offset, real_q, rooted=rooted, ahead=later, windows=windows))
        places.append(real)
    most = device_facts(device.type).segment_keys
    in_one_call = len(mine) and ahead is None and (not most or (depths + lengths)[mine].max() <= most)
    return AttentionPlan(blocks, places, _varlen(forest, mine, device) if in_one_call else None)


def make_varlen(batch: Batch, device: torch.device, *, queries: tuple[int, int] | None = None) -> Varlen:
    """Return the index tensors of one variable-length kernel call over `batch`; queries: as in `plan_attention`."""
    forest = _Forest(batch.seg_start, batch.parent).cut(queries)
    return _varlen(forest, np.arange(len(forest.parent)) if queries is None else forest.inside(queries), device)


def _varlen(forest: _Forest, members: np.ndarray, device: torch.device) -> Varlen:
    """Return the index tensors for the neighbouring segments `members`; their queries attend to all their ancestors."""
    lengths, depths = forest.lengths, forest.depths
    keys = (depths + lengths)[members]
    cu_k = np.concatenate([[0], np.cumsum(keys)])
    index = None
    if depths[members].any() or len(members) < len(lengths):
        index = np.zeros(int(cu_k[-1]), np.int64)
        row, at = np.arange(len(members)), members
        while len(at):
            index[ranges(cu_k[row] + depths[at], lengths[at])] = ranges(forest.seg_start[at], lengths[at])
            at = forest.parent[at]
            row, at = row[at >= 0], at[at >= 0]
    cu = (np.concatenate([[0], np.cumsum(lengths[members])]), cu_k)
    cu_q, cu_keys = (to_device(x.astype(np.int32), device) for x in cu)
    k_index = None if index is None else to_device(index, device)
    return Varlen((cu_q, cu_keys, int(lengths[members].max()), int(keys.max())), k_index)


class _Forest:
    """The segments of a pack: the first token of each, and the index of its parent, an earlier segment (-1: no
    parent)."""

    def __init__(self, seg_start: np.ndarray, parent: np.ndarray) -> None:
        self.seg_start, self.parent = seg_start, parent
        self.lengths = np.diff(seg_start)
        self.depths = _depths(parent, self.lengths)

    def cut(self, at: tuple[int, int] | None) -> _Forest:
        """Return the same forest with the segments cut at these token positions. The rear part of a segment becomes the
        child of its front part, so that every token attends to the same tokens as before."""
        added = {*(at or ())} - {*self.seg_start.tolist()}
        if not added:
            return self
        starts = np.unique(np.concatenate([self.seg_start, sorted(added)]))
        first = np.searchsorted(starts, self.seg_start)  # [S + 1] the first part of each segment
        parent = np.arange(len(starts) - 1) - 1  # the part before this one
        parent[first[:-1]] = np.where(self.parent >= 0, first[self.parent + 1] - 1, -1)
        return _Forest(starts, parent)

    def inside(self, queries: tuple[int, int]) -> np.ndarray:
        """Return the indices of the segments between these two token positions, at which the forest was cut."""
        first, end = np.searchsorted(self.seg_start, queries)
        return np.arange(first, end)


def _depths(parent: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the number of tokens [S] of all ancestors of each segment."""
    depths = np.zeros(len(parent), np.int64)
    at = parent
    while (at >= 0).any():  # climbs all chains at once
        depths += np.where(at >= 0, lengths[at], 0)
        at = np.where(at >= 0, parent[at], -1)
    return depths


def group_segments(lengths: np.ndarray, keys: np.ndarray, max_waste: float, free: int) -> list[np.ndarray]:
    """Divide segments into blocks of similar numbers of queries, then of keys; a new block begins where padding would
    exceed `max_waste`. Return the indices of each block. free: score elements of padding that are always accepted."""
    likeness = np.round(np.log(lengths) / np.log(1.5))
    order = np.lexsort((-lengths, -keys, -likeness))
    blocks, first = [], 0
    width = depth = area = 0
    for i, s in enumerate(order):
        q, k = int(lengths[s]), int(keys[s])
        total = (i + 1 - first) * max(width, q) * max(depth, k)
        if total - area - q * k > max(free, max_waste * total):
            blocks.append(order[first:i])
            first, width, depth, area = i, q, k, q * k
        else:
            width, depth, area = max(width, q), max(depth, k), area + q * k
    return [*blocks, order[first:]]


def _block_index(forest: _Forest, members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return q_index [b, Q], the tokens of each member, and k_index [b, K], the tokens of its ancestors and its own."""
    lengths, depths = forest.lengths, forest.depths
    own, depth = lengths[members], int((depths + lengths)[members].max())
    q_index = np.zeros((len(members), int(own.max())), np.int64)
    k_index = np.zeros((len(members), depth if depth <= 8 else -(-depth // 8) * 8), np.int64)  # for fast GEMMs
    row, at = np.arange(len(members)), members
    q_index[np.repeat(row, own), ranges(0 * row, own)] = ranges(forest.seg_start[members], own)
    while len(at):
        k_index[np.repeat(row, lengths[at]), ranges(depths[at], lengths[at])] = ranges(
            forest.seg_start[at], lengths[at]
        )
        at = forest.parent[at]
        row, at = row[at >= 0], at[at >= 0]
    return q_index, k_index


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    verl_plan: AttentionPlan | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Compute attention in transformers' interface: query [1, H, T, D], key and value [1, KV, T, D] -> ([1, T, H, D],
    None)."""
    if s_aux is not None:
        raise Refused(f"this model's attention has sinks; {WAY_OUT}")
    if verl_plan is None:
        raise Refused(f"{type(module).__name__} does not take what packed attention needs; {WAY_OUT}")
    window = window_of(attention_mask, sliding_window)
    scale = scaling if scaling is not None else 1 / math.sqrt(query.shape[-1])
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
    return attend(verl_plan, q, k, v, scale, window, softcap or 0.0)[None], None


def attend(
    plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None, cap: float = 0.0
) -> Tensor:
    """Compute attention over a packed forest: q [T, H, D], k and v [T, KV, D] -> [T, H, D]. With cap > 0 the scores are
    cap tanh(score / cap)."""
    if plan.exchange is None:
        return _attend(plan, q, k, v, scale, window, cap)
    return plan.exchange.attend(lambda q, k, v: _attend(plan, q, k, v, scale, window, cap), q, k, v)


def _attend(
    plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, cap: float
) -> Tensor:
    if plan.varlen is not None and not cap and q.shape[-1] == v.shape[-1]:
        kernel = segment_kernel(q.device, q.dtype, q.shape[-1])
        if kernel is not None:
            return attend_varlen(plan.varlen, q, k, v, scale, window, kernel)
    heads, kv_heads, blocks = q.shape[1], k.shape[1], plan.blocks
    rows = plan.rows(heads, kv_heads)
    q_slots = _Gather.apply(q.reshape(-1, q.shape[-1]), rows.q, rows.inverse, None)
    k_slots, v_slots = (x.reshape(-1, x.shape[-1]).index_select(0, rows.k) for x in (k, v))
    q_sizes, k_sizes = ([b.q_index.numel() * heads for b in blocks], [b.k_index.numel() * kv_heads for b in blocks])
    split = zip(blocks, q_slots.split(q_sizes), k_slots.split(k_sizes), v_slots.split(k_sizes), strict=True)
    parts = []
    for block, *of_block in split:
        counts = (heads, kv_heads, kv_heads)
        q_b, k_b, v_b = (x.view(len(block.offset), n, -1, x.shape[-1]) for x, n in zip(of_block, counts))
        parts.append(_attend_block(block, q_b, k_b, v_b, scale, window, cap))
    out = _Gather.apply(parts[0] if len(parts) == 1 else torch.cat(parts), rows.inverse, rows.q, rows.pad)
    return out.view(-1, heads, v.shape[-1])


def attend_varlen(
    lengths: Varlen, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, kernel: Call
) -> Tensor:
    """Compute the same as `attend` by one call of a kernel of the operation `trained_attention`."""
    starts, key_starts, *longest = lengths.bounds
    given: Any = {"scale": scale, "window": window or 0, "index": lengths.k_index}
    return exact_backward(kernel(q, k, v, starts, key_starts, tuple(longest), **given))


@cache
def segment_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> Call | None:
    """Return the kernel that computes the segments of a forest in one call; None: they are computed in blocks."""
    found = choose("trained_attention", Use(device, dtype, {"head_dim": head_dim}), without=(PLAIN,))
    return None if found is None else found.call


def _attend_block(
    block: Block, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, cap: float
) -> Tensor:
    """Compute the attention of one block: q [b, H, Q, D], k and v [b, KV, K, D] -> [b*H*Q, D]."""
    b, heads, width, _ = q.shape
    kv_heads, depth = k.shape[1:3]
    grouped = q.view(b, kv_heads, -1, q.shape[-1])  # [b, KV, G * Q, D]
    if cap:
        scores = (grouped @ k.transpose(2, 3)).to(torch.promote_types(q.dtype, torch.float32))
        scores = torch.tanh(scores * (scale / cap)).mul(cap).view(b, heads, width, depth)
        shares = torch.softmax(scores + block.mask(window, scores.dtype), -1).to(v.dtype)
        return (shares.view(b, kv_heads, -1, depth) @ v).reshape(-1, v.shape[-1])
    if depth <= device_facts(q.device.type).kept_score_keys:
        exact = torch.promote_types(q.dtype, torch.float32)
        bias = block.mask(window, exact).expand(b, heads, width, depth).clone(memory_format=torch.contiguous_format)
        q, k, v = (x.flatten(0, 1) for x in (grouped, k, v))
        return _BatchedAttention.apply(q, k, v, bias.view(b * kv_heads, -1, depth), scale).flatten(0, 1)
    if block.rooted and window is None:  # padding is at the end, which causal attention does not read
        k, v = k[:, :, :width], v[:, :, :width]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=heads != kv_heads)
    else:
        allowed = block.mask(window, torch.bool).repeat(1, 1, heads // kv_heads, 1)  # [b, 1, G * Q, K]
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=allowed, scale=scale)
    return exact_backward(out).reshape(-1, v.shape[-1])


class _BatchedAttention(torch.autograd.Function):
    """Attention as two batched products: q [B, Q, D], k and v [B, K, D], bias [B, Q, K] -> [B, Q, D]. The bias is added
    to the scores and overwritten. The products are in float32 (float64 stays) whatever the inputs are: the scores are
    few, and in bf16 their errors would be some percent."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
        ctx.dtypes, ctx.scale = (q.dtype, k.dtype, v.dtype), scale
        q, k, v = (x.to(bias.dtype) for x in (q, k, v))
        with torch.autocast(q.device.type, enabled=False):
            p = torch.softmax(bias.baddbmm_(q, k.transpose(1, 2), alpha=scale), -1)
            out = torch.bmm(p, v)
        ctx.save_for_backward(q, k, v, p)
        return out.to(ctx.dtypes[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, p = ctx.saved_tensors
        d_out = d_out.to(p.dtype)
        d_v = torch.bmm(p.transpose(1, 2), d_out)
        d_s = torch._softmax_backward_data(torch.bmm(d_out, v.transpose(1, 2)), p, -1, p.dtype)
        sides = ((d_s, k), (d_s.transpose(1, 2), q))
        d_q, d_k = (torch.baddbmm(p.new_empty(()), a, b, beta=0, alpha=ctx.scale) for a, b in sides)
        return *(d.to(dtype) for d, dtype in zip((d_q, d_k, d_v), ctx.dtypes, strict=True)), None, None


class _Gather(torch.autograd.Function):
    """Gather the rows `index` of x. Besides padding each row of x is in exactly one slot, so the gradient is a gather
    by `inverse`, with 0 for the rows `pad`, and not a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, pad: Tensor | None) -> Tensor:
        ctx.inverse, ctx.pad = inverse, pad
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        d_x = d_out.index_select(0, ctx.inverse)
        return d_x if ctx.pad is None else d_x.index_fill_(0, ctx.pad, 0), None, None, None


def register_attention() -> None:
    """Register the packed attention, and the function for its masks, with transformers."""
    AttentionInterface.register(PACKED, packed_attention)
    AttentionMaskInterface.register(PACKED, _mask)


def _mask(*, config: Any, local_size: int | None = None, use_vmap: bool = False, **_: object) -> Tensor:
    """Return a tensor [1, 1, 1, 1] in place of a layer's mask: the size of its sliding window, 0 without one. Some
    model families give the window to the attention function as well, others only to the mask. Raise ValueError for a
    mask that packed attention does not support."""
    if use_vmap:
        raise Refused(f"this model adds to the causal mask; {WAY_OUT}")
    if local_size and local_size == getattr(config, "attention_chunk_size", None):
        raise Refused(f"this model attends within chunks of {local_size} tokens; {WAY_OUT}")
    return torch.full((1, 1, 1, 1), local_size or 0)


def window_of(mask: Tensor | None, given: int | None = None) -> int | None:
    """Return the sliding window of a layer, as `_mask` stores it in place of a mask; None: no window. given: the window
    in the arguments of the attention function, returned if the model makes no mask."""
    if mask is None:
        return given
    if mask.numel() != 1 or mask.dtype != torch.int64:
        raise Refused(f"this model makes an attention mask of its own; {WAY_OUT}")
    return int(mask) or None
