"""Decode on CUDA: KV in pages that siblings share, attention over block tables, a whole step captured as one graph.

A step of a small model is a few hundred kernels of microseconds each; replayed as a graph they are one launch. Everything
in it has a fixed shape: rows are padded to a bucket, and padding rows write to page 0, which belongs to nobody.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl
from torch.nn.functional import scaled_dot_product_attention

from verl.rollout.native.architecture import Shape
from verl.rollout.native.kv import round_up
from verl.rollout.native.model import RotaryTable, forward, split_heads
from verl.rollout.native.sampler import Draw, draw_ids, sample, to_host
from verl.rollout.native.weights import Layer, Weights

PAGE = 256  # tokens: flash attention asks for multiples of it
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)

PagedKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float, int], Tensor]
"""q [n, H, D], keys and values [pages, PAGE, K, D], block table int32 [n, W], tokens seen int32 [n], scale, window -> [n, H, D]."""


def flash_attn_paged(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, seen: Tensor, scale: float, window: int
) -> Tensor:
    """The flash-attn package: a split-KV kernel over a block table."""
    from flash_attn import flash_attn_with_kvcache

    span = (window - 1, 0) if window else (-1, -1)
    out: Tensor = flash_attn_with_kvcache(
        q[:, None],
        keys,
        values,
        cache_seqlens=seen,
        block_table=table,
        softmax_scale=scale,
        causal=True,
        window_size=span,
    )
    return out[:, 0]


def torch_paged(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, seen: Tensor, scale: float, window: int
) -> Tensor:
    """torch.nn.attention.varlen, which takes a block table where FlashAttention-3 is its implementation."""
    from torch.nn.attention.varlen import varlen_attn

    one_each = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    out = varlen_attn(
        q,
        keys,
        values,
        one_each,
        None,
        1,
        table.shape[1] * PAGE,
        scale=scale,
        window_size=(window - 1 if window else -1, 0),
        enable_gqa=q.shape[1] != keys.shape[2],
        seqused_k=seen,
        block_table=table,
    )
    assert isinstance(out, Tensor)
    return out


def gathered_paged(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, seen: Tensor, scale: float, window: int
) -> Tensor:
    """The same by plain operations, which copy the pages: what the kernels are compared with, and the way without one."""
    k, v = (pool[table.long()].flatten(1, 2).transpose(1, 2) for pool in (keys, values))  # [n, K, W PAGE, D]
    place = torch.arange(k.shape[2], device=q.device)
    visible = place < seen[:, None]
    if window:
        visible &= place >= seen[:, None] - window
    mask = visible[:, None, None]
    return scaled_dot_product_attention(
        q[:, :, None], k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )[:, :, 0]


def paged_kernel(device: torch.device, dtype: torch.dtype) -> PagedKernel:
    if device.type == "cuda" and dtype in (torch.float16, torch.bfloat16):
        if importlib.util.find_spec("flash_attn"):
            return flash_attn_paged
        if current_flash_attention_impl() == "FA3":
            return torch_paged
    return gathered_paged


def whole_pages(tokens: int) -> int:
    """In tokens."""
    return round_up(tokens, PAGE)


class PageCache:
    """[layers, 2, pages, PAGE, K, D] and which pages hold the tokens of slots 0..n-1, in order.

    The full pages of a prompt are held by every slot that continues it, and counted; only its rest is copied. Page 0 is
    where padding writes.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, max_slots: int, max_tokens: int, pool_tokens: int
    ) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._width = -(-max_tokens // PAGE)
        self._pages = 1 + min(max_slots * self._width, -(-pool_tokens // PAGE))
        self.table = torch.zeros(max_slots, self._width, dtype=torch.int32, device=device)
        self._host = torch.zeros(max_slots, self._width, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.pool: Tensor | None = None  # address and size never change while it exists: graphs read it
        self.clear()

    def clear(self) -> None:
        self.pool = None
        self._own, self._held = self._host.numpy(), np.zeros(len(self._host), np.int64)  # pages per slot
        self._own[:] = 0
        self._users = np.zeros(self._pages, np.int64)
        self._free = list(range(self._pages - 1, 0, -1))
        self._stale = True  # the device's table differs

    @property
    def nbytes(self) -> int:
        return self.pool.nbytes if self.pool is not None else 0

    def fill(self, lo: int, hi: int, kv: Tensor) -> None:
        """Slots lo..hi-1, which hold nothing, continue the prompt whose KV is [layers, 2, K, P, D]."""
        s, tokens = self._shape, kv.shape[3]
        if self.pool is None:  # zeros: what is masked is multiplied by 0, which must not meet a NaN
            self.pool = torch.zeros(
                s.layers, 2, self._pages, PAGE, s.kv_heads, s.head_dim, dtype=self._dtype, device=self._device
            )
        full, rest = divmod(tokens, PAGE)
        shared = [self._take() for _ in range(full)]
        rows = kv.transpose(2, 3)  # [layers, 2, P, K, D]
        if full:
            pages = torch.tensor(shared, device=self._device)
            self.pool[:, :, pages] = rows[:, :, : full * PAGE].unflatten(2, (full, PAGE))
        for slot in range(lo, hi):
            assert not self._held[slot], f"slot {slot} still holds pages"
            self._own[slot, :full] = shared
            self._held[slot] = full
            if rest:
                self._extend(slot, full + 1)
                self.pool[:, :, int(self._own[slot, full]), :rest] = rows[:, :, full * PAGE :]
        for page in shared:
            self._users[page] = hi - lo
        self._stale = True

    def extend(self, slots: np.ndarray, positions: np.ndarray) -> None:
        """Each of `slots` [m] gets the page of its token at `positions` [m]; the device's table is made current."""
        needed = positions // PAGE + 1
        for i in np.flatnonzero(needed > self._held[slots]):
            self._extend(int(slots[i]), int(needed[i]))
        if self._stale:
            self.table.copy_(self._host, non_blocking=True)
            self._stale = False

    def move(self, sources: np.ndarray, holes: np.ndarray, kept: int) -> None:
        """Slots `sources` become slots `holes`, whose content is dropped as that of all from `kept` on; no copies."""
        live = int(np.flatnonzero(self._held)[-1]) + 1  # a resident holds at least its prompt
        for slot in (*holes.tolist(), *(set(range(kept, live)) - set(sources.tolist()))):
            for page in self._own[slot, : self._held[slot]].tolist():
                self._users[page] -= 1
                if not self._users[page]:
                    self._free.append(page)
        self._own[holes], self._held[holes] = self._own[sources], self._held[sources]
        self._own[kept:live], self._held[kept:live] = 0, 0
        self._stale = True

    def _extend(self, slot: int, pages: int) -> None:
        while self._held[slot] < pages:
            self._own[slot, self._held[slot]] = self._take()
            self._held[slot] += 1
        self._stale = True

    def _take(self) -> int:
        assert self._free, "admission let more tokens in than there are pages"
        page = self._free.pop()
        self._users[page] = 1
        return page


class PagedDecode:
    """`step` for up to `max_tokens` tokens at once: by a graph per bucket on CUDA, directly elsewhere."""

    def __init__(
        self,
        shape: Shape,
        cache: PageCache,
        table: RotaryTable,
        dtype: torch.dtype,
        device: torch.device,
        max_tokens: int,
        max_context_tokens: int,
    ) -> None:
        self._shape, self.cache, self._table, self._device = shape, cache, table, device
        cuda = device.type == "cuda"
        self._kernel = paged_kernel(device, dtype)
        self._captures = cuda and not any(shape.experts)  # experts read on the host how many rows each of them got
        self._max_context_tokens = max_context_tokens
        self._sizes = [b for b in BUCKETS if b < max_tokens] + [max_tokens]
        # one transfer per step: tokens, positions, slots, temperatures, uniforms; float64 holds all of them exactly
        self._host = torch.zeros(5, max_tokens, dtype=torch.float64, pin_memory=cuda)
        self._inputs = torch.zeros(5, max_tokens, dtype=torch.float64, device=device)
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # by (rows, pages of the longest)
        self._memory: Any = None  # that the graphs share
        self._stream = (
            torch.cuda.Stream(device) if cuda else None
        )  # of all captures: a library's workspace belongs to a stream

    def forget(self) -> None:
        """Weights, pool or rotary table have moved."""
        self._graphs.clear()
        self._memory = None  # dies with the last graph

    @torch.inference_mode()
    def step(
        self, weights: Weights, slots: np.ndarray, tokens: np.ndarray, positions: np.ndarray, draw: Draw
    ) -> tuple[np.ndarray, np.ndarray]:
        """tokens, positions [n] of `slots` [n] -> ids, log-probs [n]."""
        n = len(tokens)
        self.cache.extend(slots, positions)
        self._table.reserve(self._max_context_tokens)
        size = next(b for b in self._sizes if b >= n)
        columns = self._host.numpy()
        columns[:] = 0.0
        columns[:, :n] = tokens, positions, slots, draw.temperature, draw.uniform
        columns[2, n:size] = -1  # padding rows
        columns[3, n:size] = 1.0
        self._inputs.copy_(self._host, non_blocking=True)
        width = min(self.cache.table.shape[1], 1 << (int(positions.max()) // PAGE).bit_length())
        if draw.truncated.any():
            return to_host(*sample(weights.logits(self._hidden(weights, self._inputs[:, :n], width)), draw))
        both = (self._replayed if self._captures else self._drawn)(weights, self._inputs[:, :size], width)
        ids, logprobs = both[:, :n].cpu().numpy()
        return ids.astype(np.int64), logprobs.astype(np.float32)

    def _replayed(self, weights: Weights, inputs: Tensor, width: int) -> Tensor:
        key = inputs.shape[1], width
        if key not in self._graphs:
            assert self._stream is not None
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):  # libraries allocate and choose their kernels before the capture
                for _ in range(2):
                    self._drawn(weights, inputs, width)
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # the trainer's thread may allocate on the same device meanwhile
            with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
                both = self._drawn(weights, inputs, width)
            self._memory = graph.pool()
            self._graphs[key] = graph, both
        graph, both = self._graphs[key]
        graph.replay()
        return both

    def _drawn(self, weights: Weights, inputs: Tensor, width: int) -> Tensor:
        """inputs [5, n] -> float64 [2, n], ids and log-probs. Nothing here may ask the host."""
        logits = weights.logits(self._hidden(weights, inputs, width))
        ids, logprobs = draw_ids(logits.float(), inputs[3].float(), inputs[4])
        return torch.stack((ids.double(), logprobs.double()))

    def _hidden(self, weights: Weights, inputs: Tensor, width: int) -> Tensor:
        shape, pool = self._shape, self.cache.pool
        assert pool is not None
        tokens, positions, slots = inputs[:3].long()
        pages = torch.where(
            slots[:, None] >= 0, self.cache.table[:, :width].index_select(0, slots.clamp(min=0)), 0
        )  # [n, W]
        place = pages.gather(1, (positions // PAGE)[:, None])[:, 0].long() * PAGE + positions % PAGE
        rotary, seen = self._table.at(positions), (positions + 1).int()

        def attention(i: int, layer: Layer, qkv: Tensor) -> Tensor:
            q, k, v = split_heads(qkv, layer, shape, rotary)
            for lines, new in ((pool[i, 0], k), (pool[i, 1], v)):
                lines.view(-1, *lines.shape[2:]).index_copy_(0, place, new)
            return self._kernel(q, pool[i, 0], pool[i, 1], pages, seen, shape.query_scale, layer.window).flatten(1)

        return forward(weights, tokens, positions, attention)
