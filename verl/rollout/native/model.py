"""The forward pass of a Llama-family decoder, written for few, large operations: packed prefill and batched decode.

Shapes: n rows or T packed tokens, H query heads, K key-value heads, G = H / K, D head_dim, L resident KV width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from verl.rollout.native.compiled import Kernels, scratch_floats
from verl.rollout.native.kv import SlotCache
from verl.rollout.native.weights import Layer, Shape, Weights

QUERY_BLOCK = 1024  # query rows per masked attention call: bounds the mask of a long chunk
MAX_PADDING = 2.0  # padded over real tokens within one batched attention call of a prefill


class RotaryTable:
    """e^(i position frequency) as complex64 [positions, D/2], grown on demand."""

    def __init__(self, frequencies: Tensor, factor: float, device: torch.device) -> None:
        self._frequencies = frequencies.to(device)
        self._factor = factor
        self._table = torch.zeros(0, len(frequencies), dtype=torch.complex64, device=device)

    def reserve(self, positions: int) -> None:
        if positions > len(self._table):
            size = max(positions, 2 * len(self._table), 256)
            angles = torch.arange(size, device=self._frequencies.device).float()[:, None] * self._frequencies
            self._table = torch.complex(angles.cos() * self._factor, angles.sin() * self._factor)

    @property
    def turns(self) -> Tensor:
        """[reserved positions, D/2]."""
        return self._table

    def at(self, positions: Tensor) -> Tensor:
        """positions [T] -> [T, 1, D/2], the same for every head."""
        return self._table.index_select(0, positions)[:, None]


def rotate(heads: Tensor, rotary: Tensor) -> Tensor:
    """heads [T, h, D] with pairs interleaved, rotary [T, 1, D/2] -> [T, h, D]."""
    tokens, h, dim = heads.shape
    pairs = torch.view_as_complex(heads.float().view(tokens, h, dim // 2, 2))
    return torch.view_as_real(pairs * rotary).view(tokens, h, dim).to(heads.dtype)


def project(x: Tensor, layer: Layer, shape: Shape, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, hidden] -> q [T, H, D] and k [T, K, D], normed and rotated, v [T, K, D]."""
    hidden = rms_norm(x, (shape.hidden,), layer.norm, shape.eps)
    qkv = layer.qkv(hidden).view(len(x), -1, shape.head_dim)  # [T, H + 2K, D]
    qk, v = qkv[:, : shape.heads + shape.kv_heads], qkv[:, shape.heads + shape.kv_heads :]
    if layer.qk_norm is not None:
        qk = rms_norm(qk, (shape.head_dim,), None, shape.eps).mul_(layer.qk_norm)
    qk = rotate(qk, rotary)
    return qk[:, : shape.heads], qk[:, shape.heads :], v


def feed_forward(x: Tensor, layer: Layer, shape: Shape) -> Tensor:
    """x [T, hidden], consumed -> x + mlp(norm(x))."""
    gate_up = layer.gate_up(rms_norm(x, (shape.hidden,), layer.mlp_norm, shape.eps))  # [T, 2 ffn]
    return layer.down.add_to(x, silu(gate_up[:, : shape.ffn]).mul_(gate_up[:, shape.ffn :]))


# ---- decode: one token for each of n rows --------------------------------------------------------------------------


@torch.inference_mode()
def decode(
    weights: Weights, shape: Shape, cache: SlotCache, rotary: Tensor, tokens: Tensor, positions: Tensor, lo: int,
    blocks: Sequence[tuple[int, int, int]],
) -> Tensor:  # fmt: skip
    """tokens, positions [n] of slots lo..lo+n-1 -> final hidden states [n, hidden]; writes their KV at `positions`.

    blocks = (first row, end row, KV width that is read), which cover the rows in order; positions are below the width.
    """
    n, heads, width = len(tokens), shape.kv_heads, max(w for _, _, w in blocks)
    beyond = torch.arange(width, device=tokens.device) > positions[:, None]  # [n, L]
    bias = torch.zeros(beyond.shape, dtype=weights.embed.dtype, device=tokens.device).masked_fill_(beyond, -torch.inf)
    bias = bias[:, None, None].expand(n, heads, 1, width).flatten(0, 1)  # [n K, 1, L]
    place = cache.places(lo, positions)
    x = weights.embed.index_select(0, tokens)
    for i, layer in enumerate(weights.layers):
        q, k, v = project(x, layer, shape, rotary)
        cache.write(i, place, k, v)
        q = q.reshape(n * heads, -1, shape.head_dim)  # the G query heads of a key head are query rows: no repeats
        mixed = []
        for start, end, w in blocks:
            keys, values = cache.read(i, lo + start, lo + end, w)  # [rows K, w, D]
            rows = slice(start * heads, end * heads)
            mixed.append(attend(q[rows], keys, values, bias[rows, :, :w]))
        out = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        x = layer.out.add_to(x, out.view(n, -1))
        x = feed_forward(x, layer, shape)
    return rms_norm(x, (shape.hidden,), weights.norm, shape.eps)


@torch.inference_mode()
def decode_compiled(
    kernels: Kernels, weights: Weights, shape: Shape, cache: SlotCache, turns: Tensor, tokens: Tensor, positions: Tensor, lo: int
) -> Tensor:
    """As `decode`, with the compiled kernels between the matrix products: each row reads its own KV and no more."""
    n, longest = len(tokens), int(positions.max()) + 1
    scratch = torch.empty(scratch_floats(shape.heads, shape.kv_heads, shape.head_dim, longest))
    x = weights.embed.index_select(0, tokens)
    for i, layer in enumerate(weights.layers):
        keys, values = cache.slots(i, lo, lo + n)
        qkv = layer.qkv(kernels.rms_norm(x, layer.norm, shape.eps))
        mixed = kernels.attend(
            qkv, layer.qk_norm, turns, positions, keys, values, scratch, heads=shape.heads, eps=shape.eps, scale=shape.head_dim**-0.5
        )
        x = layer.out.add_to(x, mixed)
        gate_up = layer.gate_up(kernels.rms_norm(x, layer.mlp_norm, shape.eps))
        x = layer.down.add_to(x, kernels.gated(gate_up, "silu"))
    return kernels.rms_norm(x, weights.norm, shape.eps)


def attend(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """q [B, G, D], keys and values [B, L, D], bias [B, 1, L] -> [B, G, D]."""
    if q.dtype == torch.float32:  # the fused kernel is 2 to 3 times slower for one or two query rows on CPU
        scores = torch.baddbmm(bias, q, keys.transpose(1, 2), alpha=q.shape[-1] ** -0.5)
        return torch.bmm(torch.softmax(scores, dim=-1), values)
    return scaled_dot_product_attention(q[None], keys[None], values[None], attn_mask=bias[None])[0]


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
    device = weights.embed.device
    positions = torch.cat([torch.arange(c.past.shape[3], c.past.shape[3] + t) for c, t in zip(chunks, lengths)])
    table.reserve(int(positions.max()) + 1)
    rotary = table.at(positions.to(device))
    plan = PrefillAttention.of(chunks, device)
    x = weights.embed.index_select(0, torch.cat([c.ids for c in chunks]))
    kv = x.new_empty(shape.layers, 2, shape.kv_heads, len(x), shape.head_dim)
    for i, layer in enumerate(weights.layers):
        q, k, v = project(x, layer, shape, rotary)
        kv[i, 0].copy_(k.transpose(0, 1))
        kv[i, 1].copy_(v.transpose(0, 1))
        x = layer.out.add_to(x, plan.attend(i, q, k, v).flatten(1))
        x = feed_forward(x, layer, shape)
    return kv, rms_norm(x, (shape.hidden,), weights.norm, shape.eps)


@dataclass(frozen=True, slots=True)
class PrefillAttention:
    """Whole prompts are attended to in right-padded causal batches (a pad is never before a real token, so no mask is
    needed); a chunk with a past goes alone, against its past and itself."""

    batches: list[tuple[Tensor, Tensor]]  # (packed index of each padded place [B, t], packed index and place of tokens)
    alone: list[tuple[int, int, Tensor]]  # start, end, past

    @staticmethod
    def of(chunks: Sequence[Chunk], device: torch.device) -> PrefillAttention:
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
        return PrefillAttention(batches, alone)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H, D], k and v [T, K, D] -> [T, H, D]."""
        out = torch.empty_like(q)
        for padded, real in self.batches:
            qb, kb, vb = (t[padded].transpose(1, 2) for t in (q, k, v))  # [B, h, t, D]
            mixed = scaled_dot_product_attention(qb, kb, vb, is_causal=True, enable_gqa=True)
            packed = mixed.transpose(1, 2).flatten(0, 1)  # [B t, H, D]
            out.index_copy_(0, real[0], packed.index_select(0, real[1]))
        for start, end, past in self.alone:
            keys = torch.cat([past[layer, 0], k[start:end].transpose(0, 1)], dim=1)  # [K, P + t, D]
            values = torch.cat([past[layer, 1], v[start:end].transpose(0, 1)], dim=1)
            out[start:end] = _continue(q[start:end].transpose(0, 1), keys, values).transpose(0, 1)
        return out


def _pad_index(spans: list[tuple[int, int]], longest: int, device: torch.device) -> tuple[Tensor, Tensor]:
    starts = torch.tensor([s for s, _ in spans])[:, None]
    lengths = torch.tensor([e - s for s, e in spans])[:, None]
    offset = torch.arange(longest)[None]
    inside = offset < lengths  # [B, t]
    padded = torch.where(inside, starts + offset, starts)  # a pad repeats the first token
    return padded.to(device), torch.stack([padded[inside], inside.flatten().nonzero()[:, 0]]).to(device)


def _continue(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """q [H, t, D] are the last t of the P + t positions of keys, values [K, P + t, D] -> [H, t, D]."""
    t, total = q.shape[1], keys.shape[1]
    out = torch.empty_like(q)
    for lo in range(0, t, QUERY_BLOCK):
        hi = min(t, lo + QUERY_BLOCK)
        seen = total - t + hi
        mask = torch.ones(hi - lo, seen, dtype=torch.bool, device=q.device).tril(seen - (hi - lo))
        out[:, lo:hi] = scaled_dot_product_attention(
            q[None, :, lo:hi], keys[None, :, :seen], values[None, :, :seen], attn_mask=mask, enable_gqa=True
        )[0]
    return out
