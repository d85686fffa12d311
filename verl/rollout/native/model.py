"""The forward pass of a decoder, written for few, large operations: packed prefill and batched decode.

Shapes: n rows or T packed tokens, H query heads, K key-value heads, G = H / K, D head_dim, L resident KV width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from verl.nn.compiled import Kernels, scratch_floats
from verl.rollout.native.architecture import Shape
from verl.rollout.native.kv import SlotCache
from verl.rollout.native.layers import add_normed
from verl.rollout.native.weights import Layer, Weights

QUERY_BLOCK = 1024  # query rows per masked attention call: bounds the mask of a long chunk
MAX_PADDING = 2.0  # padded over real tokens within one batched attention call of a prefill
SHORT_PROMPT = (
    256  # tokens up to which reading the KV row by row costs less than blocks of it, with their padding and copies
)


class RotaryTable:
    """e^(i position frequency) as complex64 [kinds, positions, D/2], grown on demand. Without frequencies: empty."""

    def __init__(self, frequencies: tuple[Tensor, Tensor] | None, device: torch.device) -> None:
        self._frequencies = frequencies and (frequencies[0].to(device), frequencies[1].to(device))
        self._table = (
            torch.zeros(len(frequencies[0]), 0, frequencies[0].shape[1], dtype=torch.complex64, device=device)
            if frequencies
            else None
        )

    def reserve(self, positions: int) -> None:
        if self._frequencies is not None and self._table is not None and positions > self._table.shape[1]:
            frequencies, factors = self._frequencies
            size = max(positions, 2 * self._table.shape[1], 256)
            angles = torch.arange(size, device=frequencies.device).float()[:, None] * frequencies[:, None]
            self._table = torch.complex(angles.cos() * factors[:, None, None], angles.sin() * factors[:, None, None])

    @property
    def table(self) -> Tensor | None:
        """[kinds, reserved positions, D/2]."""
        return self._table

    def turns(self, kind: int) -> Tensor | None:
        """[reserved positions, D/2] for the layers of this kind."""
        return None if self._table is None else self._table[kind]

    def at(self, positions: Tensor) -> Tensor | None:
        """positions [T] -> [kinds, T, 1, D/2], the same for every head."""
        return None if self._table is None else self._table.index_select(1, positions)[:, :, None]


def rotate(heads: Tensor, rotary: Tensor) -> Tensor:
    """heads [T, h, D] with pairs interleaved, rotary [T, 1, D/2] -> [T, h, D]."""
    tokens, h, dim = heads.shape
    pairs = torch.view_as_complex(heads.float().reshape(tokens, h, dim // 2, 2))
    return torch.view_as_real(pairs * rotary).view(tokens, h, dim).to(heads.dtype)


def split_heads(qkv: Tensor, layer: Layer, shape: Shape, rotary: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [T, (H + 2K) D] -> q [T, H, D] and k [T, K, D], normed and rotated, v [T, K, D]."""
    heads = qkv.view(len(qkv), -1, shape.head_dim)
    qk, v = heads[:, : shape.heads + shape.kv_heads], heads[:, shape.heads + shape.kv_heads :]
    if layer.qk_norm is not None:
        qk = rms_norm(qk.float(), (shape.head_dim,), None, shape.eps).mul_(layer.qk_norm).to(qkv.dtype)
    if rotary is not None:
        qk = rotate(qk, rotary[layer.rope])
    return qk[:, : shape.heads], qk[:, shape.heads :], v


Attention = Callable[[int, Layer, Tensor], Tensor]
"""(index of the layer, the layer, qkv [T, (H + 2K) D]) -> mixed values [T, H D]."""


def forward(weights: Weights, ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
    """ids, positions [T] -> final hidden states [T, hidden]: all that prefill and decode have in common."""
    x = weights.embedded(ids, positions)
    for i, layer in enumerate(weights.layers):
        x = add_normed(x, layer.out, attention(i, layer, layer.qkv(layer.norm(x))), layer.out_norm)
        x = add_normed(x, layer.mlp, layer.mlp_norm(x), layer.mlp_out_norm)
    return weights.norm(x)


# ---- decode: one token for each of n rows --------------------------------------------------------------------------


@torch.inference_mode()
def decode(
    weights: Weights,
    shape: Shape,
    cache: SlotCache,
    table: RotaryTable,
    tokens: Tensor,
    positions: Tensor,
    lo: int,
    blocks: Sequence[tuple[int, int, int]],
    slots: Tensor | None = None,
) -> Tensor:
    """tokens, positions [n] of slots lo..lo+n-1, or of `slots` [n] -> final hidden states [n, hidden]; writes their KV at
    `positions`, which for the tokens of one slot ascend.

    blocks = (first row, end row, KV width that is read), which cover the rows in order; positions are below the width.
    """
    n, heads, width = len(tokens), shape.kv_heads, max(w for _, _, w in blocks)
    biases = {
        window: _decode_bias(positions, width, window, heads, weights.embed.dtype) for window in set(shape.windows)
    }
    rotary = table.at(positions)
    place = cache.places(torch.arange(lo, lo + n, device=tokens.device) if slots is None else slots, positions)

    def attention(i: int, layer: Layer, qkv: Tensor) -> Tensor:
        q, k, v = split_heads(qkv, layer, shape, rotary)
        cache.write(i, place, k, v)
        q = q.reshape(n * heads, -1, shape.head_dim)  # the G query heads of a key head are query rows: no repeats
        mixed = []
        for start, end, w in blocks:  # keys, values [rows K, w, D]
            keys, values = (
                cache.read(i, lo + start, lo + end, w) if slots is None else cache.gather(i, slots[start:end], w)
            )
            rows = slice(start * heads, end * heads)
            mixed.append(
                attend(q[rows], keys, values, biases[layer.window][rows, :, :w], shape.query_scale, shape.attention_cap)
            )
        return (mixed[0] if len(mixed) == 1 else torch.cat(mixed)).view(n, -1)

    return forward(weights, tokens, positions, attention)


def _decode_bias(positions: Tensor, width: int, window: int, heads: int, dtype: torch.dtype) -> Tensor:
    """positions [n] -> [n K, 1, width]: 0 where a row sees a key, else -inf."""
    key = torch.arange(width, device=positions.device)
    hidden = key > positions[:, None]  # [n, L]
    if window:
        hidden |= key <= positions[:, None] - window
    bias = torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, -torch.inf)
    return bias[:, None, None].expand(-1, heads, 1, width).flatten(0, 1)


@torch.inference_mode()
def decode_compiled(
    kernels: Kernels,
    weights: Weights,
    shape: Shape,
    cache: SlotCache,
    table: RotaryTable,
    tokens: Tensor,
    positions: Tensor,
    lo: int,
    slots: Tensor | None = None,
) -> Tensor:
    """As `decode`, with the compiled kernels: each row reads its own KV and no more. All layers are one call if they can."""
    longest = int(positions.max()) + 1
    if weights.stack is not None:
        x = weights.embedded(tokens, positions)
        return weights.norm(kernels.layers(weights.stack, x, positions, slots, table.table, cache.whole, lo, longest))
    scratch = torch.empty(scratch_floats(shape.heads, shape.kv_heads, shape.head_dim, longest), dtype=torch.float32)

    def attention(i: int, layer: Layer, qkv: Tensor) -> Tensor:
        keys, values = cache.slots(i, lo)
        return kernels.attend(
            qkv,
            layer.qk_norm,
            table.turns(layer.rope),
            positions,
            slots,
            keys,
            values,
            scratch,
            heads=shape.heads,
            eps=shape.eps,
            scale=shape.query_scale,
            window=layer.window,
            cap=shape.attention_cap,
        )

    return forward(weights, tokens, positions, attention)


def attend(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float, cap: float) -> Tensor:
    """q [B, G, D], keys and values [B, L, D], bias [B, 1, L] -> [B, G, D]."""
    if cap:
        scores = torch.bmm(q, keys.transpose(1, 2)).float().mul_(scale / cap).tanh_().mul_(cap).add_(bias)
        return torch.bmm(torch.softmax(scores, dim=-1).to(q.dtype), values)
    if q.dtype == torch.float32:  # the fused kernel is 2 to 3 times slower for one or two query rows on CPU
        scores = torch.baddbmm(bias, q, keys.transpose(1, 2), alpha=scale)
        return torch.bmm(torch.softmax(scores, dim=-1), values)
    return scaled_dot_product_attention(q[None], keys[None], values[None], attn_mask=bias[None], scale=scale)[0]


# ---- prefill: T packed tokens of several prompts -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one prompt; `past` is the KV of everything before them, [layers, 2, K, P, D]."""

    ids: Tensor  # [t]
    past: Tensor


@torch.inference_mode()
def prefill(weights: Weights, shape: Shape, table: RotaryTable, chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor]:
    """-> KV [layers, 2, K, T, D] and final hidden states [T, hidden] of the packed tokens, in the order of chunks."""
    lengths = [len(c.ids) for c in chunks]
    device, total = weights.embed.device, sum(lengths)
    positions = torch.cat([torch.arange(c.past.shape[3], c.past.shape[3] + t) for c, t in zip(chunks, lengths)])
    table.reserve(int(positions.max()) + 1)
    positions = positions.to(device)
    rotary, plan = table.at(positions), PrefillAttention.of(chunks, shape, device)
    kv = weights.embed.new_empty(shape.layers, 2, shape.kv_heads, total, shape.head_dim)

    def attention(i: int, layer: Layer, qkv: Tensor) -> Tensor:
        q, k, v = split_heads(qkv, layer, shape, rotary)
        kv[i, 0].copy_(k.transpose(0, 1))
        kv[i, 1].copy_(v.transpose(0, 1))
        return plan.attend(i, layer.window, q, k, v).flatten(1)

    return kv, forward(weights, torch.cat([c.ids for c in chunks]), positions, attention)


@torch.inference_mode()
def prefill_compiled(
    kernels: Kernels, weights: Weights, shape: Shape, table: RotaryTable, chunks: Sequence[Chunk]
) -> tuple[Tensor, Tensor]:
    """As `prefill`, in one call for all layers: every token is a row that reads the KV of those before it, so that neither
    the other prompts nor the passes that a prompt is cut into change its bits. For short prompts."""
    assert weights.stack is not None
    spans = [(c.past.shape[3], c.past.shape[3] + len(c.ids)) for c in chunks]
    longest = max(end for _, end in spans)
    table.reserve(longest)
    kv = weights.embed.new_empty(shape.layers, 2, len(chunks), shape.kv_heads, longest, shape.head_dim)
    for slot, chunk in enumerate(chunks):
        kv[:, :, slot, :, : spans[slot][0]] = chunk.past
    positions = torch.cat([torch.arange(*span) for span in spans])
    slots = torch.arange(len(chunks)).repeat_interleave(torch.tensor([end - start for start, end in spans]))
    x = weights.embedded(torch.cat([c.ids for c in chunks]), positions)
    hidden = weights.norm(kernels.layers(weights.stack, x, positions, slots, table.table, kv, 0, longest))
    return torch.cat([kv[:, :, slot, :, start:end] for slot, (start, end) in enumerate(spans)], dim=3), hidden


@dataclass(frozen=True, slots=True)
class PrefillAttention:
    """Whole prompts are attended to in right-padded causal batches (a pad is never before a real token, so no mask is
    needed); a chunk with a past goes alone, against its past and itself."""

    batches: list[tuple[Tensor, Tensor]]  # (packed index of each padded place [B, t], packed index and place of tokens)
    alone: list[tuple[int, int, Tensor]]  # start, end, past
    scale: float
    cap: float

    @staticmethod
    def of(chunks: Sequence[Chunk], shape: Shape, device: torch.device) -> PrefillAttention:
        alone, whole, start = [], [], 0
        for chunk in chunks:
            end = start + len(chunk.ids)
            if chunk.past.shape[3]:
                alone.append((start, end, chunk.past))
            else:
                whole.append((start, end))
            start = end
        whole.sort(key=lambda span: span[0] - span[1])  # longest first
        batches: list[tuple[Tensor, Tensor]] = []
        while whole:
            longest, real, size = whole[0][1] - whole[0][0], 0, 0
            for s, e in whole:
                if longest * (size + 1) > MAX_PADDING * (real + e - s):
                    break
                real, size = real + e - s, size + 1
            batches.append(_pad_index(whole[:size], longest, device))
            whole = whole[size:]
        return PrefillAttention(batches, alone, shape.query_scale, shape.attention_cap)

    def attend(self, layer: int, window: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H, D], k and v [T, K, D] -> [T, H, D]."""
        out = torch.empty_like(q)
        for padded, real in self.batches:
            qb, kb, vb = (t[padded].transpose(1, 2) for t in (q, k, v))  # [B, h, t, D]
            mixed = attend_causal(qb, kb, vb, window, self.scale, self.cap)
            packed = mixed.transpose(1, 2).flatten(0, 1)  # [B t, H, D]
            out.index_copy_(0, real[0], packed.index_select(0, real[1]))
        for start, end, past in self.alone:
            keys = torch.cat([past[layer, 0], k[start:end].transpose(0, 1)], dim=1)  # [K, P + t, D]
            values = torch.cat([past[layer, 1], v[start:end].transpose(0, 1)], dim=1)
            mixed = attend_causal(
                q[None, start:end].transpose(1, 2), keys[None], values[None], window, self.scale, self.cap
            )
            out[start:end] = mixed[0].transpose(0, 1)
        return out


def _pad_index(spans: list[tuple[int, int]], longest: int, device: torch.device) -> tuple[Tensor, Tensor]:
    starts = torch.tensor([s for s, _ in spans])[:, None]
    lengths = torch.tensor([e - s for s, e in spans])[:, None]
    offset = torch.arange(longest)[None]
    inside = offset < lengths  # [B, t]
    padded = torch.where(inside, starts + offset, starts)  # a pad repeats the first token
    return padded.to(device), torch.stack([padded[inside], inside.flatten().nonzero()[:, 0]]).to(device)


def attend_causal(q: Tensor, keys: Tensor, values: Tensor, window: int, scale: float, cap: float) -> Tensor:
    """q [B, H, t, D] are the last t of the P + t positions of keys, values [B, K, P + t, D] -> [B, H, t, D]."""
    t, total = q.shape[2], keys.shape[2]
    if t == total and not cap and not 0 < window < t:
        return scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True, scale=scale)
    out = torch.empty_like(q)
    for lo in range(0, t, QUERY_BLOCK):
        hi = min(t, lo + QUERY_BLOCK)
        end, start = total - t + hi, max(0, total - t + lo + 1 - window) if window else 0  # keys that the block sees
        offset = total - t + lo - start  # of the block's first query
        mask = torch.ones(hi - lo, end - start, dtype=torch.bool, device=q.device).tril_(offset)
        if window:
            mask = mask.triu_(offset + 1 - window)
        block = q[:, :, lo:hi], keys[:, :, start:end], values[:, :, start:end]
        if cap:
            out[:, :, lo:hi] = _capped(*block, mask, scale, cap)
        else:
            out[:, :, lo:hi] = scaled_dot_product_attention(*block, attn_mask=mask, enable_gqa=True, scale=scale)
    return out


def _capped(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, cap: float) -> Tensor:
    """q [B, H, t, D], keys and values [B, K, L, D], mask [t, L] -> [B, H, t, D]; scores are cap tanh(score / cap)."""
    groups = q.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)  # [B, K, G t, D]
    scores = (groups @ keys.transpose(2, 3)).float().mul_(scale / cap).tanh_().mul_(cap).unflatten(2, (-1, len(mask)))
    shares = scores.masked_fill_(~mask, -torch.inf).softmax(-1).to(q.dtype).flatten(2, 3)  # [B, K, G t, L]
    return (shares @ values).view(q.shape)
