"""KV memory: the slots of sequences that are decoded, and the KV of prompts that is kept for later requests."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from verl.rollout.embedded.requests import PromptKey
from verl.rollout.native.architecture import Shape
from verl.rollout.native.delta import DeltaNet, States
from verl.rollout.native.options import KEPT_KV_BYTES
from verl.types import Medium

Count = TypeVar("Count", int, np.ndarray)
GROW_STEP = 32  # tokens; the capacity of a slot is a multiple
FAR_ABOVE = 4  # times the need; memory above that is given back when the cache grows
AHEAD_BYTES = 2**32  # KV that may be reserved for the final lengths of rows
REUSE_STEP = 64  # tokens; a stored prompt can be continued from every multiple of this, and from its end
Head = tuple[str, tuple[Medium, ...], bool, int, int]  # the first three of a `PromptKey`, length, hash
MIN_REUSE = 16  # tokens; a shorter head is cheaper to compute again in a batch than to continue alone


def round_up(tokens: Count, step: int) -> Count:
    """Return the next multiple of `step`."""
    return -(-tokens // step) * step


class SlotCache:
    """The KV of the sequences that are decoded: `kv` [layers, 2, slots, K, capacity, D], one slot per sequence. Live
    sequences have slots 0..n-1, so every read is one strided view. The layers are those of attention; `states` has the
    states of the others.

    Slots and capacity grow as needed, up to the given maxima; when one grows, the other is reduced to the need if it is
    far above it. With `exact_reads` nothing beyond a row's end is read, so memory is not touched before it is written.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, max_slots: int, max_tokens: int, exact_reads: bool
    ) -> None:
        self._shape, self._dtype, self._device, self._exact_reads = shape, dtype, device, exact_reads
        self._max_slots, self._max_capacity = max_slots, round_up(max_tokens, GROW_STEP)
        self.states: States | None = None
        self._bind(0, 0)

    def clear(self) -> int:
        """Free the memory unless it is small, and return the bytes."""
        freed = self.nbytes
        if self._device.type == "cpu" and freed <= KEPT_KV_BYTES:
            return 0
        self._bind(0, 0)
        return freed

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes + (0 if self.states is None else self.states.nbytes)

    def reserve(self, slots: int, tokens: int, live: int, ahead: int = 0) -> None:
        """Make room for `tokens` in each of `slots` slots. The first `live` slots keep their content. With
        `exact_reads` room for the final length `ahead` is reserved at once, up to `AHEAD_BYTES` in all."""
        if slots <= self._slots and tokens <= self._capacity:
            return
        assert slots <= self._max_slots and tokens <= self._max_capacity, f"{slots} slots x {tokens} tokens"
        old, kept = self.kv, min(tokens, self._capacity)
        new_slots = self._slots if slots <= self._slots <= FAR_ABOVE * slots else min(self._max_slots, slots * 3 // 2)
        grown = min(self._max_capacity, round_up(tokens * 3 // 2, GROW_STEP))
        whole = min(self._max_capacity, round_up(max(tokens, ahead), GROW_STEP))
        s = self._shape
        bytes_per_token = s.kv_layers * 2 * s.kv_heads * s.head_dim * self._dtype.itemsize
        if self._exact_reads and new_slots * whole * bytes_per_token <= AHEAD_BYTES:
            grown = max(grown, whole)
        elif tokens <= self._capacity <= FAR_ABOVE * tokens:
            grown = self._capacity
        before = self.states
        self._bind(new_slots, grown)
        self.kv[:, :, :live, :, :kept] = old[:, :, :live, :, :kept]
        if self.states is not None and before is not None and self.states is not before:
            self.states.write(slice(live), before, slice(live))

    def fill(self, lo: int, hi: int, kv: Tensor, states: States | None) -> None:
        """Write a prompt's KV [layers, 2, K, P, D], and the states after it, into each of slots lo..hi-1."""
        self.kv[:, :, lo:hi, :, : kv.shape[3]] = kv[:, :, None]
        if self.states is not None and states is not None:
            self.states.write(slice(lo, hi), states, 0)

    def move(self, sources: np.ndarray, holes: np.ndarray, tokens: int) -> None:
        """Copy the first `tokens` tokens of each slot of `sources` into the slot of `holes` at the same place."""
        for source, hole in zip(sources.tolist(), holes.tolist()):
            self.kv[:, :, hole, :, :tokens] = self.kv[:, :, source, :, :tokens]
            if self.states is not None:
                self.states.write(hole, self.states, source)

    def recurrence(self, lo: int, rows: int) -> Callable[[int, DeltaNet, Tensor], Tensor] | None:
        """Return the function that computes one token of the rows in slots lo.. by delta nets (`Recurrence`), and
        updates their states; None if there are none."""
        return None if self.states is None else partial(_next_token, self.states, slice(lo, lo + rows))

    def places(self, lo: int, positions: Tensor) -> Tensor:
        """Return the indices [n K] at which `write` puts the tokens at `positions` [n] of slots lo..lo+n-1, equal in
        all layers."""
        heads = self._shape.kv_heads
        first = torch.arange(lo * heads, (lo + len(positions)) * heads, device=positions.device) * self._capacity
        return first + positions.repeat_interleave(heads)

    def write(self, layer: int, places: Tensor, k: Tensor, v: Tensor) -> None:
        """Write keys and values k, v [n, K, D] of a layer at `places` [n K]."""
        for lines, new in zip(self._lines[layer], (k, v)):
            lines.index_copy_(0, places, new.reshape(-1, self._shape.head_dim))

    def read(self, layer: int, lo: int, hi: int, width: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [(hi - lo) K, width, D] of slots lo..hi-1, as views."""
        keys, values = self._heads[layer]
        heads = self._shape.kv_heads
        return keys[lo * heads : hi * heads, :width], values[lo * heads : hi * heads, :width]

    def _bind(self, slots: int, capacity: int) -> None:
        """Allocate the memory of this size, and views of it by layer."""
        s = self._shape
        if s.delta is not None and (self.states is None or slots != self.states.rows):
            self.states = States.empty(s, slots, self._dtype, self._device)
        self._slots, self._capacity = slots, capacity
        # zeros where masked positions are multiplied by an exact 0, since 0 x NaN is NaN
        self.kv = (torch.empty if self._exact_reads else torch.zeros)(
            s.kv_layers, 2, slots, s.kv_heads, capacity, s.head_dim, dtype=self._dtype, device=self._device
        )
        self._heads = [(layer[0].flatten(0, 1), layer[1].flatten(0, 1)) for layer in self.kv]  # [slots K, capacity, D]
        self._lines = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in self._heads]  # [slots K capacity, D]


def _next_token(states: States, rows: slice, layer: int, net: DeltaNet, given: Tensor) -> Tensor:
    return net.token(given, states.windows[layer, rows], states.sums[layer, rows])


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """A computed prompt: its KV and the hidden state from which its next token is sampled."""

    key: PromptKey
    ids: np.ndarray  # [P]
    kv: Tensor  # [layers, 2, K, P, D]
    hidden: Tensor  # [hidden], after the final norm
    states: States | None = None  # after its last token
    routes: np.ndarray | None = None  # [P, layers, k]: the experts of its tokens, if they are recorded

    @property
    def nbytes(self) -> int:
        beside = [part.nbytes for part in (self.states, self.routes) if part is not None]
        return self.kv.nbytes + self.hidden.nbytes + sum(beside)

    @property
    def cost(self) -> int:
        """The number of tokens that have as many bytes of KV."""
        tokens = len(self.ids)
        return tokens if self.states is None else tokens + -(-self.states.nbytes * tokens // max(1, self.kv.nbytes))

    def heads(self) -> Iterator[Head]:
        """Yield each beginning from which it can be continued, its whole length included. States are those after its
        last token alone."""
        if len(self.ids) >= MIN_REUSE:
            hashes, inner = _prefix_hashes(self.ids), range(REUSE_STEP, len(self.ids), REUSE_STEP)
            for n in (*(inner if self.states is None else ()), len(self.ids)):
                yield *self.key[:3], n, int(hashes[n - 1])


class PrefixStore:
    """Computed prompts of one weight version by parameter set, media, noise and ids. States take the room of the tokens
    that have as many bytes of KV. If there is no space, the least recently used ones are dropped. A lookup hashes all
    beginnings of a prompt at once, and compares the ids of a match.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.clear()

    def clear(self) -> None:
        self._entries: OrderedDict[PromptKey, Prefix] = OrderedDict()
        self._heads: dict[Head, Prefix] = {}
        self._lengths: Counter[int] = Counter()  # lengths of the heads
        self.tokens = self.nbytes = 0

    def get(self, key: PromptKey) -> Prefix | None:
        """Return the stored prompt with exactly this key, or None."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def longest(self, key: PromptKey, ids: np.ndarray) -> tuple[Tensor, States | None, np.ndarray | None] | None:
        """Return KV [layers, 2, K, P, D], states and routes [P, layers, k] of the longest stored proper prefix of `ids`
        that is worth continuing."""
        lengths = sorted((n for n in self._lengths if n < len(ids)), reverse=True)
        hashes = _prefix_hashes(ids) if lengths else ids
        for length in lengths:
            entry = self._heads.get((*key[:3], length, int(hashes[length - 1])))
            if entry is not None and np.array_equal(entry.ids[:length], ids[:length]):
                self._entries.move_to_end(entry.key)
                routes = None if entry.routes is None else entry.routes[:length]
                return entry.kv[:, :, :, :length], entry.states, routes
        return None

    def put(self, entry: Prefix) -> None:
        """Store a prompt, unless it is longer than the whole store."""
        assert entry.key not in self._entries, "a stored prompt was computed again"
        if entry.cost > self._max_tokens:
            return
        while self.tokens + entry.cost > self._max_tokens:
            self._drop(self._entries.popitem(last=False)[1])
        self._entries[entry.key] = entry
        self.tokens += entry.cost
        self.nbytes += entry.nbytes
        for head in entry.heads():
            if head not in self._heads:
                self._heads[head] = entry
                self._lengths[head[3]] += 1

    def forget(self, name: str) -> None:
        """Drop the prompts of a parameter set."""
        for key in [key for key in self._entries if key[0] == name]:
            self._drop(self._entries.pop(key))

    def _drop(self, entry: Prefix) -> None:
        self.tokens -= entry.cost
        self.nbytes -= entry.nbytes
        for head in entry.heads():
            if self._heads.get(head) is entry:
                del self._heads[head]
                self._lengths -= Counter([head[3]])  # a length without heads is removed


def _prefix_hashes(ids: np.ndarray) -> np.ndarray:
    """Return a polynomial hash of every beginning of ids [P], uint64 [P]."""
    powers = np.full(len(ids), 0x9E3779B97F4A7C15, np.uint64)
    powers[0] = 1
    return np.cumsum((ids.astype(np.uint64) + np.uint64(1)) * np.cumprod(powers))
