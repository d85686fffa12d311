"""KV memory: the slots that sequences decode in, and the prompts whose KV is kept for the next request."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from verl.rollout.native.architecture import Shape

Count = TypeVar("Count", int, np.ndarray)
GROW_STEP = 32  # tokens; the capacity of a slot is a multiple
FAR_ABOVE = 4
AHEAD_BYTES = 2**32  # of KV that may be reserved for what rows can still become
READ_STEP = 8  # tokens; so is the width that attention reads: one vector register of float32
KEPT_BYTES = 64 << 20  # of KV on a CPU that sleep does not free: a short step would pay for faulting its pages in again
REUSE_STEP = 64  # tokens; a stored prompt can be continued from every multiple of this, and from its end
MIN_REUSE = 16  # tokens; a shorter head is cheaper to compute again in a batch than to continue alone


def round_up(tokens: Count, step: int) -> Count:
    return -(-tokens // step) * step


class SlotCache:
    """[layers, 2, slots, K, capacity, D]. Live sequences hold slots 0..n-1, so every read is one strided view.

    Slots and capacity grow as the work needs them, up to the maxima given at construction; when one grows, the other
    falls back to the need if it is far above it, so that a few long sequences do not cost what many would.
    `exact_reads`: nothing beyond a row's end is ever read, so memory is left untouched until it is written.
    """

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device,
        max_slots: int,
        max_tokens: int,
        *,
        exact_reads: bool,
    ) -> None:
        self._shape, self._dtype, self._device, self._exact_reads = shape, dtype, device, exact_reads
        self._max_slots, self._max_capacity = max_slots, round_up(max_tokens, GROW_STEP)
        self._bind(0, 0)

    def clear(self) -> int:
        """Give the memory back, unless it is little -> bytes."""
        freed = self.nbytes
        if self._device.type == "cpu" and freed <= KEPT_BYTES:
            return 0
        self._bind(0, 0)
        return freed

    @property
    def nbytes(self) -> int:
        return self._kv.nbytes

    def reserve(self, slots: int, tokens: int, live: int, ahead: int = 0) -> None:
        """Room for `tokens` in each of `slots` slots; the first `live` slots keep their content up to there. `ahead`:
        what rows can still become, reserved at once where that is address space and little of it."""
        if slots <= self._slots and tokens <= self._capacity:
            return
        assert slots <= self._max_slots and tokens <= self._max_capacity, f"{slots} slots x {tokens} tokens"
        old, kept = self._kv, min(tokens, self._capacity)
        new_slots = self._slots if slots <= self._slots <= FAR_ABOVE * slots else min(self._max_slots, slots * 3 // 2)
        grown = min(self._max_capacity, round_up(tokens * 3 // 2, GROW_STEP))
        whole = min(self._max_capacity, round_up(max(tokens, ahead), GROW_STEP))
        if (
            self._exact_reads
            and new_slots * whole * self._shape.kv_values_per_token * self._dtype.itemsize <= AHEAD_BYTES
        ):
            grown = max(grown, whole)
        elif tokens <= self._capacity <= FAR_ABOVE * tokens:
            grown = self._capacity
        self._bind(new_slots, grown)
        self._kv[:, :, :live, :, :kept] = old[:, :, :live, :, :kept]

    def fill(self, lo: int, hi: int, kv: Tensor) -> None:
        """Put a prompt's KV [layers, 2, K, P, D] into each of slots lo..hi-1."""
        self._kv[:, :, lo:hi, :, : kv.shape[3]] = kv[:, :, None]

    def move(self, sources: np.ndarray, holes: np.ndarray, tokens: int) -> None:
        """Copy the first `tokens` of each source slot into a hole."""
        for source, hole in zip(sources.tolist(), holes.tolist()):
            self._kv[:, :, hole, :, :tokens] = self._kv[:, :, source, :, :tokens]

    def places(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Where the token at `positions` [n] of `slots` [n] is kept in every layer, for `write` [n K]."""
        return (self._heads_of(slots) * self._capacity + positions[:, None]).view(-1)

    def write(self, layer: int, places: Tensor, k: Tensor, v: Tensor) -> None:
        """places [n K]; k, v [n, K, D]."""
        keys, values = self._lines[layer]
        keys.index_copy_(0, places, k.reshape(-1, self._shape.head_dim))
        values.index_copy_(0, places, v.reshape(-1, self._shape.head_dim))

    def read(self, layer: int, lo: int, hi: int, width: int) -> tuple[Tensor, Tensor]:
        """Keys and values [(hi - lo) K, width, D] of slots lo..hi-1, as views."""
        keys, values = self._flat[layer]
        heads = self._shape.kv_heads
        return keys[lo * heads : hi * heads, :width], values[lo * heads : hi * heads, :width]

    def gather(self, layer: int, slots: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Copies of keys and values [n K, width, D] of `slots` [n]."""
        keys, values = (flat[:, :width].index_select(0, self._heads_of(slots).view(-1)) for flat in self._flat[layer])
        return keys, values

    @property
    def whole(self) -> Tensor:
        """[layers, 2, slots, K, capacity, D]."""
        return self._kv

    def slots(self, layer: int, lo: int) -> tuple[Tensor, Tensor]:
        """All keys and values [slots, K, capacity, D] of the slots from lo on, contiguous views."""
        return self._kv[layer, 0, lo:], self._kv[layer, 1, lo:]

    def _heads_of(self, slots: Tensor) -> Tensor:
        """slots [n] -> [n, K], the index of each key head of each slot."""
        heads = self._shape.kv_heads
        return slots[:, None] * heads + torch.arange(heads, device=slots.device)

    def _bind(self, slots: int, capacity: int) -> None:
        s = self._shape
        self._slots, self._capacity = slots, capacity
        # zeros where masked positions are multiplied by an exact 0, which must not meet a stray NaN
        self._kv = (torch.empty if self._exact_reads else torch.zeros)(
            s.layers, 2, slots, s.kv_heads, capacity, s.head_dim, dtype=self._dtype, device=self._device
        )
        self._flat = [(layer[0].flatten(0, 1), layer[1].flatten(0, 1)) for layer in self._kv]  # [slots K, capacity, D]
        self._lines = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in self._flat]  # [slots K capacity, D]


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """A computed prompt: its KV and the hidden state from which its next token is sampled."""

    ids: np.ndarray  # [P]
    kv: Tensor  # [layers, 2, K, P, D]
    hidden: Tensor  # [hidden], after the final norm

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes + self.hidden.nbytes


class PrefixStore:
    """Prompts by content, least recently used out first; all of one weight version (cleared at every change).

    Lookups hash every prefix of a prompt at once, and compare the ids before they trust a hash.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.clear()

    def clear(self) -> None:
        self._entries: OrderedDict[bytes, Prefix] = OrderedDict()  # by the bytes of the ids
        self._heads: dict[tuple[int, int], Prefix] = {}  # (length, hash of the first `length` ids)
        self._lengths: Counter[int] = Counter()  # of the heads
        self.tokens = self.nbytes = 0

    def get(self, key: bytes) -> Prefix | None:
        """The entry of exactly the ids with these bytes."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def longest(self, ids: np.ndarray) -> Tensor | None:
        """KV [layers, 2, K, P, D] of the longest stored proper prefix of `ids` that is worth continuing."""
        lengths = sorted((n for n in self._lengths if n < len(ids)), reverse=True)
        hashes = _prefix_hashes(ids) if lengths else ids
        for length in lengths:
            entry = self._heads.get((length, int(hashes[length - 1])))
            if entry is not None and np.array_equal(entry.ids[:length], ids[:length]):
                self._entries.move_to_end(entry.ids.tobytes())
                return entry.kv[:, :, :, :length]
        return None

    def put(self, entry: Prefix) -> None:
        key = entry.ids.tobytes()
        assert key not in self._entries, "a stored prompt was computed again"
        if len(entry.ids) > self._max_tokens:
            return
        while self.tokens + len(entry.ids) > self._max_tokens:
            self._drop(self._entries.popitem(last=False)[1])
        self._entries[key] = entry
        self.tokens += len(entry.ids)
        self.nbytes += entry.nbytes
        for head in _head_keys(entry.ids):
            if head not in self._heads:
                self._heads[head] = entry
                self._lengths[head[0]] += 1

    def _drop(self, entry: Prefix) -> None:
        self.tokens -= len(entry.ids)
        self.nbytes -= entry.nbytes
        for head in _head_keys(entry.ids):
            if self._heads.get(head) is entry:
                del self._heads[head]
                self._lengths[head[0]] -= 1
                if not self._lengths[head[0]]:
                    del self._lengths[head[0]]


def _head_keys(ids: np.ndarray) -> list[tuple[int, int]]:
    """(length, hash) of every prefix from which a stored prompt can be continued, its whole length included."""
    if len(ids) < MIN_REUSE:
        return []
    hashes = _prefix_hashes(ids)
    return [(n, int(hashes[n - 1])) for n in (*range(REUSE_STEP, len(ids), REUSE_STEP), len(ids))]


def _prefix_hashes(ids: np.ndarray) -> np.ndarray:
    """ids [P] -> uint64 [P], a polynomial hash of every prefix."""
    powers = np.full(len(ids), 0x9E3779B97F4A7C15, np.uint64)
    powers[0] = 1
    return np.cumsum((ids.astype(np.uint64) + np.uint64(1)) * np.cumprod(powers))
