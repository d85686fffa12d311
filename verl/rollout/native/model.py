"""The forward pass of a decoder, written for few, large operations: packed prefill and batched decode.

Shapes: n rows or T packed tokens, H query heads, K key-value heads, G = H / K, D head_dim, L resident KV width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from verl.accel.devices import device_facts
from verl.accel.linear import Layers
from verl.accel.operations import Call
from verl.rollout.embedded.features import SeenImages, packed
from verl.rollout.native.architecture import Shape, rotary_frequencies, shape_of
from verl.rollout.native.delta import DeltaNet, PromptStates, States
from verl.rollout.native.kv import SlotCache, round_up
from verl.rollout.native.layers import add_normed
from verl.rollout.native.routes import recording
from verl.rollout.native.sets import GroupedRows, SetRows, adapted
from verl.rollout.native.weights import Layer, Weights

READ_STEP = 8  # tokens; the width that attention reads is a multiple: one vector register of float32
BLOCK_ROWS, BLOCKS_PAY = 16, 0.6  # rows per block of attention; the share of KV reads below which blocks are used
MAX_PADDING = 2.0  # padded over real tokens within one batched attention call of a prefill
Attention = Callable[[int, Layer, Tensor], Tensor]
"""A function of (index of the layer's KV, the layer, qkv [T, (H + 2K) D]) that returns the mixed values [T, H D]."""
Recurrence = Callable[[int, DeltaNet, Tensor], Tensor]
"""A function of (index of the net's states, the net, what its product returns) that returns its outputs [T, H V]."""


class RotaryTable:
    """The rotations of RoPE: e^(i position frequency) as complex64 [kinds, positions, D/2], computed for more positions
    when they are needed."""

    def __init__(self, frequencies: tuple[Tensor, Tensor], axes: Sequence[int], device: torch.device) -> None:
        self._frequencies, self._factors = (t.to(device) for t in frequencies)
        self._axes = torch.tensor(axes, dtype=torch.int64, device=device)  # of the position of each frequency
        self.table = torch.zeros(len(self._factors), 0, self._frequencies.shape[1], dtype=torch.complex64).to(device)

    def reserve(self, positions: int) -> None:
        """Compute the table for at least this number of positions."""
        if positions > self.table.shape[1]:
            size = max(positions, 2 * self.table.shape[1], 256)
            angles = torch.arange(size, device=self.table.device).float()[:, None] * self._frequencies[:, None]
            factors = self._factors[:, None, None]
            self.table = torch.complex(angles.cos() * factors, angles.sin() * factors)

    def at(self, positions: Tensor) -> Tensor:
        """Return the rotations [kinds, T, 1, D/2] at positions [T] or [axes, T], the same for every head."""
        if positions.dim() == 1:
            return self.table.index_select(1, positions)[:, :, None]
        of_frequencies = positions.index_select(0, self._axes).t()  # [T, D/2]
        return self.table.gather(1, of_frequencies.expand(len(self.table), -1, -1))[:, :, None]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one prompt. `past` is the KV [layers, 2, K, P, D] of all tokens before them, of the layers
    with KV."""

    ids: Tensor  # [t]
    past: Tensor
    seen: SeenImages | None = None  # the images of these tokens
    states: States | None = None  # those after all tokens before them, which become those after these

    @property
    def span(self) -> tuple[int, int]:
        """The position of the first token, and the one after the last token."""
        return self.past.shape[3], self.past.shape[3] + len(self.ids)


class Model:
    """The forward passes of a decoder (prefill and decode) with replaceable weights."""

    def __init__(self, config: Any, max_context_tokens: int, device: torch.device) -> None:
        self.shape, self.device = shape_of(config, max_context_tokens), device
        self.prompt_attention: Call | None = None  # of a prefill; None: in padded batches
        self.rotary = RotaryTable(rotary_frequencies(config, self.shape.head_dim), self.shape.axes, device)
        self.weights: Weights | None = None

    @property
    def live(self) -> Weights:
        """The weights, which must be loaded."""
        assert self.weights is not None, "no weights are loaded"
        return self.weights

    @property
    def weights_per_product(self) -> float:
        """The number of weights of an average matrix product."""
        return self.live.params / (4 * self.shape.layers + 1)

    def forward(
        self,
        ids: Tensor,
        attention: Attention,
        sets: SetRows | None,
        seen: SeenImages | None = None,
        recurrence: Recurrence | None = None,
        routes: list[Tensor] | None = None,
    ) -> Tensor:
        """Return the final hidden states [T, hidden] of ids [T]. Prefill and decode differ only in `attention` and
        `recurrence`. sets: the LoRA sets of these tokens, if any has one · seen: their images · recurrence: None if no
        layer is a delta net · routes: gets the experts [T, k] that each layer chooses"""
        weights = self.live
        x = weights.embedded(ids)
        if seen is not None:
            seen.replace_in(x)
        for i, layer in enumerate(adapted(layer, i, sets) for i, layer in enumerate(weights.layers)):
            layer = recording(layer, routes)
            given = layer.qkv(layer.norm(x))
            if layer.delta is None:
                mixed = self._attended(attention, layer, given)
            else:
                assert recurrence is not None
                mixed = recurrence(layer.kv, layer.delta, given)
            x = add_normed(x, layer.out, mixed, layer.out_norm)
            x = add_normed(x, layer.mlp, layer.mlp_norm(x), layer.mlp_out_norm)
            if seen is not None and i < len(seen.deeper):
                seen.add_to(x, i)
        return weights.norm(x)

    def _attended(self, attention: Attention, layer: Layer, given: Tensor) -> Tensor:
        """Return the mixed values [T, H D], each head times its gate if there are gates."""
        if not self.shape.arch.gated:
            return attention(layer.kv, layer, given)
        values = self.shape.heads * self.shape.head_dim
        q, gate, kv = given.split((values, values, given.shape[1] - 2 * values), 1)
        return attention(layer.kv, layer, torch.cat([q, kv], 1)).mul_(gate.sigmoid())

    def split_heads(self, qkv: Tensor, layer: Layer, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [T, H, D] and k [T, K, D], normalised and rotated, and v [T, K, D] from qkv [T, (H + 2K) D]."""
        s, tokens = self.shape, len(qkv)
        heads = qkv.view(tokens, -1, s.head_dim)
        qk, v = heads[:, : s.heads + s.kv_heads], heads[:, s.heads + s.kv_heads :]
        if layer.qk_norm is not None:
            qk = rms_norm(qk.float(), (s.head_dim,), None, s.eps).mul_(layer.qk_norm).to(qkv.dtype)
        pairs = torch.view_as_complex(qk.float().reshape(tokens, -1, s.head_dim // 2, 2))
        qk = torch.view_as_real(pairs * rotary[layer.rope]).view(tokens, -1, s.head_dim).to(qkv.dtype)
        return qk[:, : s.heads], qk[:, s.heads :], v

    def decode(
        self,
        cache: SlotCache,
        tokens: Tensor,
        positions: Tensor,
        lo: int,
        blocks: Sequence[tuple[int, int, int]],
        sets: SetRows | None = None,
        routes: list[Tensor] | None = None,
    ) -> Tensor:
        """Return the final hidden states [n, hidden] of tokens at positions, both [n], in slots lo..lo+n-1, and write
        their KV. `blocks` are (first row, end row, KV width that is read, more than its positions); they cover the rows
        in order."""
        s, n, dtype = self.shape, len(tokens), self.live.embed.dtype
        heads, width = s.kv_heads, max(w for _, _, w in blocks)
        biases = {window: _decode_bias(positions, width, window, heads, dtype) for window in set(s.windows)}
        rotary, places = self.rotary.at(positions), cache.places(lo, positions)

        def attention(i: int, layer: Layer, qkv: Tensor) -> Tensor:
            q, k, v = self.split_heads(qkv, layer, rotary)
            cache.write(i, places, k, v)
            q = q.reshape(n * heads, -1, s.head_dim)  # the G query heads of a key head are query rows: no repeats
            mixed = []
            for start, end, w in blocks:
                keys, values = cache.read(i, lo + start, lo + end, w)  # [rows K, w, D]
                rows = slice(start * heads, end * heads)
                bias = biases[layer.window][rows, :, :w]
                mixed.append(_attend_rows(q[rows], keys, values, bias, s.query_scale, s.attention_cap))
            return (mixed[0] if len(mixed) == 1 else torch.cat(mixed)).view(n, -1)

        return self.forward(tokens, attention, sets, recurrence=cache.recurrence(lo, n), routes=routes)

    def decode_exact(
        self,
        slot_attention: Call,
        cache: SlotCache,
        tokens: Tensor,
        positions: Tensor,
        lo: int,
        sets: GroupedRows | None = None,
        routes: list[Tensor] | None = None,
    ) -> Tensor:
        """Do the same as `decode` by the operation `slot_attention`, with which each row reads only its own KV. All
        layers are computed by one call if a kernel supports that."""
        s, turns, joined = self.shape, self.rotary.table, self.live.joined
        if joined is not None:
            return self._all_layers(joined, tokens, positions, None, cache.kv, lo, sets)
        attend = partial(slot_attention, heads=s.heads, eps=s.eps, scale=s.query_scale, cap=s.attention_cap)

        def attention(i: int, layer: Layer, qkv: Tensor) -> Tensor:
            keys, values = cache.kv[i, 0, lo:], cache.kv[i, 1, lo:]
            given = qkv, layer.qk_norm, turns[layer.rope], positions, keys, values
            mixed: Tensor = attend(*given, window=layer.window)
            return mixed

        return self.forward(tokens, attention, sets, recurrence=cache.recurrence(lo, len(tokens)), routes=routes)

    @torch.inference_mode()
    def prefill(
        self, chunks: Sequence[Chunk], sets: SetRows | None = None, routes: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return KV [layers, 2, K, T, D] and final hidden states [T, hidden] of the packed tokens, in the order of the
        chunks. routes: as in `forward`"""
        s = self.shape
        spans = [chunk.span for chunk in chunks]
        self.rotary.reserve(max(end for _, end in spans))
        seen = packed([chunk.seen for chunk in chunks], spans, self.device)
        positions = torch.cat([torch.arange(*span) for span in spans]).to(self.device)
        rotary = self.rotary.at(seen.positions if seen is not None and s.axes else positions)
        plan = PrefillAttention(chunks, s, self.device, self.prompt_attention)
        kv = self.live.embed.new_empty(s.kv_layers, 2, s.kv_heads, len(positions), s.head_dim)
        states, before = None, [chunk.states for chunk in chunks if chunk.states is not None]
        if s.delta is not None:
            states = PromptStates([len(chunk.ids) for chunk in chunks], before, self.device).run

        def attention(i: int, layer: Layer, qkv: Tensor) -> Tensor:
            q, k, v = self.split_heads(qkv, layer, rotary)
            kv[i, 0].copy_(k.transpose(0, 1))
            kv[i, 1].copy_(v.transpose(0, 1))
            return plan.attend(i, layer.window, q, k, v).flatten(1)

        return kv, self.forward(torch.cat([c.ids for c in chunks]), attention, sets, seen, states, routes)

    @torch.inference_mode()
    def prefill_joined(
        self, joined: Layers, chunks: Sequence[Chunk], sets: GroupedRows | None
    ) -> tuple[Tensor, Tensor]:
        """Do the same as `prefill` for short prompts, in one call for all layers. Every token is a row that reads the
        KV of the tokens before it, so neither other prompts nor the cut into passes change its bits."""
        s = self.shape
        spans = [chunk.span for chunk in chunks]
        longest = max(end for _, end in spans)
        self.rotary.reserve(longest)
        kv = self.live.embed.new_empty(s.layers, 2, len(chunks), s.kv_heads, longest, s.head_dim)
        for slot, chunk in enumerate(chunks):
            kv[:, :, slot, :, : spans[slot][0]] = chunk.past
        positions = torch.cat([torch.arange(*span) for span in spans])
        slots = torch.arange(len(chunks)).repeat_interleave(torch.tensor([end - start for start, end in spans]))
        hidden = self._all_layers(joined, torch.cat([c.ids for c in chunks]), positions, slots, kv, 0, sets)
        new = [kv[:, :, slot, :, start:end] for slot, (start, end) in enumerate(spans)]
        return torch.cat(new, dim=3), hidden

    def _all_layers(
        self,
        joined: Layers,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor | None,
        kv: Tensor,
        lo: int,
        sets: GroupedRows | None,
    ) -> Tensor:
        """Return the final hidden states [n, hidden] of ids [n] by one call for all layers. It computes the rows of a
        LoRA set together, and tokens of one prompt in their order."""
        weights, turns = self.live, self.rotary.table
        x = weights.embedded(ids)
        if sets is None:
            return weights.norm(joined(x, positions, slots, turns, kv, lo))
        order, hidden = sets.order, torch.empty_like(x)
        slots = order if slots is None else slots[order]
        hidden[order] = joined(x[order], positions[order], slots, turns, kv, lo, sets.spans)
        return weights.norm(hidden)


def _decode_bias(positions: Tensor, width: int, window: int, heads: int, dtype: torch.dtype) -> Tensor:
    """Return the bias [n K, 1, width] of attention scores for rows at positions [n]: 0 for keys that a row attends to,
    else -inf."""
    key = torch.arange(width, device=positions.device)
    hidden = key > positions[:, None]  # [n, L]
    if window:
        hidden |= key <= positions[:, None] - window
    bias = torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, -torch.inf)
    return bias[:, None, None].expand(-1, heads, 1, width).flatten(0, 1)


def _attend_rows(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float, cap: float) -> Tensor:
    """Return the attention [B, G, D] of q [B, G, D] over keys and values [B, L, D] with bias [B, 1, L]."""
    if cap:
        scores = torch.bmm(q, keys.transpose(1, 2)).float().mul_(scale / cap).tanh_().mul_(cap).add_(bias)
        return torch.bmm(torch.softmax(scores, dim=-1).to(q.dtype), values)
    if q.dtype == torch.float32:  # the fused kernel is 2 to 3 times slower for one or two query rows on CPU
        scores = torch.baddbmm(bias, q, keys.transpose(1, 2), alpha=scale)
        return torch.bmm(torch.softmax(scores, dim=-1), values)
    return scaled_dot_product_attention(q[None], keys[None], values[None], attn_mask=bias[None], scale=scale)[0]


def read_blocks(positions: np.ndarray) -> list[tuple[int, int, int]]:
    """Return (first row, end row, KV width) of each attention call for rows at positions [n]: one call for all rows,
    unless a few long rows would make most others read far beyond their end."""
    n, widths = len(positions), round_up(positions + 1, READ_STEP)
    blocks = [(lo, min(n, lo + BLOCK_ROWS), int(widths[lo : lo + BLOCK_ROWS].max())) for lo in range(0, n, BLOCK_ROWS)]
    longest = max(width for _, _, width in blocks)
    if sum((hi - lo) * width for lo, hi, width in blocks) > BLOCKS_PAY * n * longest:
        return [(0, n, longest)]
    return blocks


class PrefillAttention:
    """The attention of a prefill. A kernel of the operation `prompt_attention` computes all chunks in one call, without
    padding, each over its past and itself. Without one, whole prompts are padded on the right to causal batches (no
    real token follows a pad, so no mask is needed), and a chunk with a past is computed separately."""

    def __init__(self, chunks: Sequence[Chunk], shape: Shape, device: torch.device, kernel: Call | None) -> None:
        self._scale, self._cap = shape.query_scale, shape.attention_cap
        self._together = None if kernel is None else ChunksTogether(chunks, shape, device, kernel)
        self._alone: list[tuple[int, int, Tensor]] = []  # start, end, past
        # packed index [B, t] of padded places, [2, tokens] of real ones
        self._batches: list[tuple[Tensor, Tensor]] = []
        whole, start = [], 0
        for chunk in chunks if kernel is None else ():
            end = start + len(chunk.ids)
            if chunk.past.shape[3]:
                self._alone.append((start, end, chunk.past))
            else:
                whole.append((start, end))
            start = end
        whole.sort(key=lambda span: span[0] - span[1])  # longest first
        while whole:
            longest, real, size = whole[0][1] - whole[0][0], 0, 0
            for s, e in whole:
                if longest * (size + 1) > MAX_PADDING * (real + e - s):
                    break
                real, size = real + e - s, size + 1
            self._batches.append(_pad_index(whole[:size], longest, device))
            whole = whole[size:]

    def attend(self, layer: int, window: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention [T, H, D] of a layer from q [T, H, D], k and v [T, K, D]."""
        if self._together is not None:
            return self._together.attend(layer, window, q, k, v)
        out = torch.empty_like(q)
        for padded, real in self._batches:
            qb, kb, vb = (t[padded].transpose(1, 2) for t in (q, k, v))  # [B, h, t, D]
            mixed = attend_causal(qb, kb, vb, window, self._scale, self._cap)
            packed = mixed.transpose(1, 2).flatten(0, 1)  # [B t, H, D]
            out.index_copy_(0, real[0], packed.index_select(0, real[1]))
        for start, end, past in self._alone:
            both = zip(past[layer], (k, v))
            keys, values = (torch.cat([old, new[start:end].transpose(0, 1)], dim=1)[None] for old, new in both)
            query = q[None, start:end].transpose(1, 2)
            out[start:end] = attend_causal(query, keys, values, window, self._scale, self._cap)[0].transpose(0, 1)
        return out


class ChunksTogether:
    """The attention of all chunks of a prefill by one call of `kernel`, of the operation `prompt_attention`."""

    def __init__(self, chunks: Sequence[Chunk], shape: Shape, device: torch.device, kernel: Call) -> None:
        self._kernel, self._sizes = kernel, [len(chunk.ids) for chunk in chunks]
        self._read = {"scale": shape.query_scale, **({"cap": shape.attention_cap} if shape.attention_cap else {})}
        ends = [chunk.span[1] for chunk in chunks]
        self._pasts = [chunk.past for chunk in chunks] if ends != self._sizes else None
        spans = torch.tensor([(0, 0), *zip(self._sizes, ends)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self._starts = spans.T.contiguous().to(device)
        self._longest = max(self._sizes), max(ends)

    def attend(self, layer: int, window: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention [T, H, D] of a layer from q [T, H, D], k and v [T, K, D]."""
        if self._pasts is not None:
            k, v = (self._after_pasts(layer, kind, new) for kind, new in enumerate((k, v)))
        mixed: Tensor = self._kernel(q, k, v, *self._starts, self._longest, window=window, **self._read)
        return mixed

    def _after_pasts(self, layer: int, kind: int, new: Tensor) -> Tensor:
        """Return the keys (kind 0) or values of all chunks, each after those of its past."""
        parts = zip(self._pasts or (), new.split(self._sizes), strict=True)
        return torch.cat([x for past, own in parts for x in (past[layer, kind].transpose(0, 1), own)])


def _pad_index(spans: list[tuple[int, int]], longest: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the indices of a padded batch: the packed token of each padded place [B, t], and for each real token its
    packed index and its place in the batch, [2, tokens]."""
    starts = torch.tensor([s for s, _ in spans])[:, None]
    lengths = torch.tensor([e - s for s, e in spans])[:, None]
    offset = torch.arange(longest)[None]
    inside = offset < lengths  # [B, t]
    padded = torch.where(inside, starts + offset, starts)  # a pad repeats the first token
    return padded.to(device), torch.stack([padded[inside], inside.flatten().nonzero()[:, 0]]).to(device)


def attend_causal(q: Tensor, keys: Tensor, values: Tensor, window: int, scale: float, cap: float) -> Tensor:
    """Return the causal attention of q [B, H, t, D], the last t of the P + t positions, over keys and values [B, K, P +
    t, D]."""
    t, total = q.shape[2], keys.shape[2]
    if t == total and not cap and not 0 < window < t:
        return scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True, scale=scale)
    out, at_once = torch.empty_like(q), device_facts(q.device.type).masked_queries
    for lo in range(0, t, at_once):
        hi = min(t, lo + at_once)
        end, start = total - t + hi, max(0, total - t + lo + 1 - window) if window else 0  # keys that the block sees
        offset = total - t + lo - start  # position of the block's first query
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
    """Return the attention of q [B, H, t, D] over keys and values [B, K, L, D] with mask [t, L], with scores cap
    tanh(score / cap)."""
    groups = q.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)  # [B, K, G t, D]
    scores = (groups @ keys.transpose(2, 3)).float().mul_(scale / cap).tanh_().mul_(cap).unflatten(2, (-1, len(mask)))
    shares = scores.masked_fill_(~mask, -torch.inf).softmax(-1).to(q.dtype).flatten(2, 3)  # [B, K, G t, L]
    return (shares @ values).view(q.shape)
