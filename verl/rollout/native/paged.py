"""Decode on CUDA: KV in pages that requests with one prompt share, attention over block tables, a whole step captured
as one CUDA graph, which may compute a bounded number of prompt tokens beside its rows, or without any.

A step of a small model is a few hundred kernels of microseconds each; replayed as a graph they are one launch. All its
shapes are fixed: rows are padded to a bucket. Padding rows write to page 0, which no sequence uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.accel.plain import plain_sample, plain_truncate
from verl.accel.transfer import to_device
from verl.accel.uniforms import plain_uniforms
from verl.rollout.embedded.core import DecodeRows, Sampled
from verl.rollout.embedded.sampler import close_banned, split_draws
from verl.rollout.native.architecture import Shape
from verl.rollout.native.fused import PromptRows, decode_hidden
from verl.rollout.native.kv import round_up
from verl.rollout.native.model import Model
from verl.rollout.native.ops import DecodeOps
from verl.rollout.native.options import KEPT_KV_BYTES
from verl.rollout.native.page_attention import paged_kernel
from verl.rollout.native.prefill import Job, Part, PromptSizes
from verl.rollout.native.sets import NO_SET, LiveSets, SetRows
from verl.rollout.native.weights import Layer

PAGE = 256  # tokens per page: flash attention requires multiples of it
# the inputs of a padding row: its position is -1
ONE = np.float64(1).view(np.int64)
PADDING = np.array([[0], [0], [-1], [0], [0], [0], [ONE], [ONE], [0], [NO_SET], [0]])
MIXED_PROMPTS = 16  # prompts that one step computes tokens of
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)

Outputs = tuple[Tensor, Tensor | None]
"""Ids and log-probs of the rows of a step, float64 [2, n], and the final hidden states of the prompts beside them."""


def whole_pages(tokens: int) -> int:
    """Round a number of tokens up to whole pages."""
    return round_up(tokens, PAGE)


def why_slots(device: torch.device, shape: Shape, *, routes: bool) -> str | None:
    """Return why rows of a model are decoded without pages and captured steps on a CUDA device; None on other devices,
    and if they are not. routes: experts are recorded."""
    if device.type != "cuda":
        return None
    if shape.delta is not None:
        return "delta nets: a state per row, in slots; torch's operations compute each of its tokens"
    return "replay_routes=true: it records experts" if routes else None


class PageCache:
    """KV in pages [layers, 2, pages, PAGE, K, D], and the table of the pages of slots 0..n-1, in the order of their
    tokens. Slots that continue the same prompt share its full pages, which are counted, and have copies of the rest.
    Padding rows write into page 0. After the `max_slots` slots of rows follow MIXED_PROMPTS of prompts in progress,
    whose pages are among those that admission reserves for their requests."""

    def __init__(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, max_slots: int, max_tokens: int, pool_tokens: int
    ) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._width = -(-max_tokens // PAGE)
        self._pages = 1 + min(max_slots * self._width, -(-pool_tokens // PAGE))
        self.max_slots = max_slots
        self.table = torch.zeros(max_slots + MIXED_PROMPTS, self._width, dtype=torch.int32, device=device)
        self.pool: Tensor | None = None  # address and size never change while it exists: graphs read it
        self.clear()

    @torch.inference_mode()
    def clear(self, *, keep: bool = False) -> None:
        """Free all pages, and the memory unless it is kept."""
        self.pool = self.pool.zero_() if keep and self.pool is not None else None
        self._own = np.zeros(self.table.shape, np.int32)
        self._held = np.zeros(len(self._own), np.int64)  # pages per slot
        self._users = np.zeros(self._pages, np.int64)
        self._free = list(range(self._pages - 1, 0, -1))
        self._stale = True  # the table on the device is outdated

    @property
    def nbytes(self) -> int:
        return self.pool.nbytes if self.pool is not None else 0

    def allocate(self) -> Tensor:
        """Return the memory of all pages, which exists from now on."""
        s = self._shape
        if self.pool is None:  # zeros: masked values are multiplied by 0, and 0 x NaN is NaN
            size = s.layers, 2, self._pages, PAGE, s.kv_heads, s.head_dim
            self.pool = torch.zeros(size, dtype=self._dtype, device=self._device)
        return self.pool

    def fill(self, lo: int, hi: int, kv: Tensor) -> None:
        """Let the empty slots lo..hi-1 continue a prompt with KV [layers, 2, K, P, D]."""
        pool, tokens = self.allocate(), kv.shape[3]
        full, rest = divmod(tokens, PAGE)
        shared = [self._take() for _ in range(full)]
        rows = kv.transpose(2, 3)  # [layers, 2, P, K, D]
        if full:
            pages = to_device(np.array(shared), self._device)
            pool[:, :, pages] = rows[:, :, : full * PAGE].unflatten(2, (full, PAGE))
        for slot in range(lo, hi):
            assert not self._held[slot], f"slot {slot} still holds pages"
            self._own[slot, :full] = shared
            self._held[slot] = full
            if rest:
                self._extend(slot, full + 1)
                pool[:, :, int(self._own[slot, full]), :rest] = rows[:, :, full * PAGE :]
        for page in shared:
            self._users[page] = hi - lo
        self._stale = True

    def extend(self, positions: np.ndarray, staged: Tensor) -> None:
        """Give each of slots 0..n-1 the page of its token at `positions` [n], and update the table on the device by way
        of `staged`, memory of the host that does not change before the copy has ended."""
        needed = positions // PAGE + 1
        for slot in np.flatnonzero(needed > self._held[: len(needed)]).tolist():
            self._extend(slot, int(needed[slot]))
        if self._stale:
            staged.numpy()[:] = self._own
            self.table.copy_(staged, non_blocking=True)
            self._stale = False

    def move(self, sources: np.ndarray, holes: np.ndarray, kept: int) -> None:
        """Move the pages of each slot of `sources` to the slot of `holes` at the same place, without copies. The pages
        of `holes` and of all slots from `kept` on are freed."""
        # a resident row has at least the pages of its prompt
        live = int(np.flatnonzero(self._held[: self.max_slots])[-1]) + 1
        for slot in (*holes.tolist(), *(set(range(kept, live)) - set(sources.tolist()))):
            self._release(slot)
        self._own[holes], self._held[holes] = self._own[sources], self._held[sources]
        self._own[kept:live], self._held[kept:live] = 0, 0
        self._stale = True

    def hold(self, slot: int, tokens: int) -> None:
        """Give a slot pages for this number of tokens."""
        self._extend(slot, -(-tokens // PAGE))

    def free(self, slot: int) -> None:
        """Free the pages of a slot."""
        self._release(slot)
        self._held[slot] = 0

    def read(self, slot: int, start: int, end: int) -> Tensor:
        """Return a copy of the KV [layers, 2, K, t, D] of tokens start..end-1 of a slot. The table on the device must
        have its pages; the host does not wait."""
        assert self.pool is not None
        return self.pool.flatten(2, 3).index_select(2, self._places(slot, start, end)).transpose(2, 3)

    def write(self, slot: int, kv: Tensor) -> None:
        """Write the KV [layers, 2, K, t, D] of the first tokens of a slot, as `read` reads it."""
        assert self.pool is not None
        self.pool.flatten(2, 3).index_copy_(2, self._places(slot, 0, kv.shape[3]), kv.transpose(2, 3))

    def _places(self, slot: int, start: int, end: int) -> Tensor:
        """Return the places of tokens start..end-1 of a slot among those of all pages."""
        tokens = torch.arange(start, end, device=self._device)
        return self.table[slot].index_select(0, tokens // PAGE).long() * PAGE + tokens % PAGE

    def _release(self, slot: int) -> None:
        """Give back the pages of a slot: those without another user are free."""
        for page in self._own[slot, : self._held[slot]].tolist():
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)

    def _extend(self, slot: int, pages: int) -> None:
        """Give a slot free pages until it has this number of pages."""
        while self._held[slot] < pages:
            self._own[slot, self._held[slot]] = self._take()
            self._held[slot] += 1
        self._stale = True

    def _take(self) -> int:
        """Return a free page, which has one user now."""
        assert self._free, "admission let more tokens in than there are pages"
        page = self._free.pop()
        self._users[page] = 1
        return page


class Transfers:
    """The host's memory for what one step gets and returns. The next step but one uses it again."""

    def __init__(self, columns: int, cache: PageCache, prompts: Tensor) -> None:
        table, pinned = cache.table, cache.table.device.type == "cuda"
        self.prompts = torch.zeros(prompts.shape, dtype=prompts.dtype, pin_memory=pinned)
        self.inputs = torch.zeros(columns, cache.max_slots, dtype=torch.int64, pin_memory=pinned)
        self.table = torch.zeros(table.shape, dtype=table.dtype, pin_memory=pinned)
        self._drawn = torch.zeros(2 * cache.max_slots, dtype=torch.float64, pin_memory=pinned)
        self._ended = torch.cuda.Event() if pinned else None

    def receive(self, both: Tensor) -> None:
        """Copy ids and log-probs, float64 [2, rows], to the host after the step has computed them. Both sides are one
        block of memory: of others torch makes a copy that is not pinned first, and the host would wait for the step."""
        assert both.is_contiguous()
        self._drawn[: both.numel()].view(both.shape).copy_(both, non_blocking=True)
        if self._ended is not None:
            self._ended.record()

    def drawn(self, rows: int) -> Tensor:
        """Return what the last step of so many rows drew, float64 [2, rows], after `wait`."""
        return self._drawn[: 2 * rows].view(2, rows)

    def wait(self) -> None:
        """Wait for the last step that used this memory, but not for steps that were launched after it."""
        if self._ended is not None:
            self._ended.synchronize()


class PromptsBeside:
    """The prompts with tokens that steps compute beside their rows, or without rows: at most the last size per step,
    padded to one of the sizes. Each has a slot of the cache from its first such step to its last token; `Job.kv` has
    its KV as well."""

    def __init__(self, cache: PageCache, sizes: PromptSizes, sets: LiveSets) -> None:
        self.parts: Sequence[Part] = ()
        """The parts that the next step computes."""
        self._cache, (self._sizes, self._idle), self._sets = cache, sizes, sets
        self.most = self._sizes[-1] if self._sizes else 0
        self._slots: dict[Job, int] = {}
        # tokens, positions, slots; the first token of each prompt, and the tokens of each up to its last one; sets
        shape = 6, max((*self._sizes, *self._idle, MIXED_PROMPTS + 1))
        self.inputs = torch.zeros(shape, dtype=torch.int64, device=cache.table.device)

    def take(self, parts: Sequence[Part], rows: int) -> bool:
        """Let the next step, of this number of rows, compute these parts: beside rows the first ones, without rows all
        of them. Return False if it does not: without rows they may be too many, and some may have images."""
        short = bool(self._idle) and sum(tokens for _, tokens in parts) <= self._idle[-1]
        fits = rows > 0 or (short and len(parts) <= MIXED_PROMPTS)
        taken = fits and bool(parts) and all(job.seen is None for job, _ in parts)  # a step embeds tokens alone
        self.plan(parts if taken else ())
        return taken

    def plan(self, parts: Sequence[Part]) -> None:
        """Let the next step compute these parts, or the first of them. The slots of all other prompts are freed."""
        self.parts = parts[:MIXED_PROMPTS]
        kept = {job for job, _ in self.parts}
        for job in [job for job in self._slots if job not in kept]:
            self._cache.free(self._slots.pop(job))

    def stage(self, host: Transfers, positions: np.ndarray) -> int:
        """Give the rows at `positions` and the prompts their pages, and send what the step reads about them to the
        device. Return the number of prompt tokens with padding."""
        fresh, first = [job for job, _ in self.parts if job not in self._slots], self._cache.max_slots
        places = sorted({*range(first, first + MIXED_PROMPTS)} - {*self._slots.values()})
        self._slots |= dict(zip(fresh, places))
        for job, tokens in self.parts:
            self._cache.hold(self._slots[job], job.done + tokens)
        self._cache.extend(positions, host.table)
        for job in fresh:
            if job.done:
                self._cache.write(self._slots[job], job.kv[:, :, :, : job.done])
        if not self.parts:
            return 0
        columns, counts, start = host.prompts.numpy(), np.zeros(MIXED_PROMPTS, np.int64), 0
        columns[:] = [[0], [-1], [0], [0], [0], [NO_SET]]
        # in the order of their slots: prompt i has slot first + i
        for job, tokens in sorted(self.parts, key=lambda part: self._slots[part[0]]):
            slot, end = self._slots[job], job.done + tokens
            columns[:2, start : start + tokens] = job.ids[job.done : end], np.arange(job.done, end)
            columns[2, start : start + tokens], columns[5, start : start + tokens] = slot, self._sets.number(job.key[0])
            counts[slot - first], columns[4, slot - first] = tokens, end
            start += tokens
        columns[3, 1 : MIXED_PROMPTS + 1] = counts.cumsum()
        self.inputs.copy_(host.prompts, non_blocking=True)
        return next(size for size in (self._sizes if len(positions) else self._idle) if size >= start)

    @property
    def adapted(self) -> bool:
        """True if a prompt of the next step has a LoRA set."""
        return any(self._sets.number(job.key[0]) != NO_SET for job, _ in self.parts)

    def rows(self, tokens: int) -> PromptRows:
        """Return the inputs about prompts of a step with this number of prompt tokens."""
        first = self._cache.max_slots
        starts, lengths = self.inputs[3, : MIXED_PROMPTS + 1], self.inputs[4, :MIXED_PROMPTS]
        return PromptRows(tokens, starts, lengths, self._cache.table[first : first + MIXED_PROMPTS])

    def finish(self, ends: Tensor) -> None:
        """Add what a step has computed to its prompts; `ends` [prompts, hidden] are the final states of their last
        tokens."""
        for job, tokens in self.parts:
            slot = self._slots[job]
            job.add(self._cache.read(slot, job.done, job.done + tokens), ends[slot - self._cache.max_slots])
            if job.entry is not None:
                self._cache.free(self._slots.pop(job))
        self.parts = ()


@dataclass(frozen=True, slots=True)
class StepShape:
    """The shape of a decode step, by which its graph is found."""

    rows: int
    width: int
    """The pages per row that are read by a step that is not fused."""
    beside: int
    """Prompt tokens that are computed beside the rows."""
    adapted: bool
    """True if a row or a prompt has a LoRA set."""


class PagedDecode:
    """The decode step (`launch`) of up to `max_rows` rows: a CUDA graph per bucket of rows, direct calls on other
    devices. `ops` are the kernels of a fused step; without them torch computes it, over as many pages as the longest
    row has. The drawn ids stay on the device, where the next step takes them. A fused step computes
    prompts too, up to the last of their `sizes` in tokens, with a graph for each; `compute_prompts` is one without
    rows."""

    def __init__(
        self,
        model: Model,
        cache: PageCache,
        dtype: torch.dtype,
        max_rows: int,
        max_context_tokens: int,
        ops: DecodeOps | None,
        sets: LiveSets,
        sizes: PromptSizes = ((), ()),
        banned: Tensor | None = None,
    ) -> None:
        self._model, self.cache, self._ops, self._sets, device = model, cache, ops, sets, model.device
        self._banned = banned
        cuda = device.type == "cuda"
        self._kernel = paged_kernel(device, dtype)
        # without the operations of a fused step, experts read on the host how many rows each of them got
        self._captures = cuda and (ops is not None or not any(model.shape.experts))
        self._max_context_tokens = max_context_tokens
        self._sizes = [b for b in BUCKETS if b < max_rows] + [max_rows]
        # one transfer per step, below the ids that the last step drew: tokens, the places of the tokens in the first
        # two rows, positions, stream and position of the draw, top-k; as bits of float64 temperature, top-p, min-p;
        # the numbers of LoRA sets; and 1 for rows with banned ids
        self._inputs = torch.zeros(1 + len(PADDING), max_rows, dtype=torch.int64, device=device)
        self.prompts = PromptsBeside(cache, sizes if ops is not None else ((), ()), sets)
        self._transfers = [Transfers(len(PADDING), cache, self.prompts.inputs) for _ in range(2)]
        self._graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, Outputs]] = {}
        self._idle_shapes = set[StepShape]()  # of steps without rows since there were no graphs
        self._memory: Any = None  # shared by the graphs
        # one stream for all captures: a library's workspace belongs to a stream
        self._stream = torch.cuda.Stream(device) if cuda else None

    def forget(self) -> None:
        """Drop the graphs, after the addresses of weights, pool or rotary table have changed."""
        self._graphs.clear()
        self._idle_shapes.clear()
        self._memory = None  # freed with the last graph

    def drop_kv(self) -> int:
        """Free all pages, and their memory, with the graphs that read it, unless it is small. Return the bytes."""
        size = self.cache.nbytes
        keep = size <= KEPT_KV_BYTES
        self.cache.clear(keep=keep)
        if not keep:
            self.forget()
        return 0 if keep else size

    @torch.inference_mode()
    def launch(self, rows: DecodeRows, sets: np.ndarray) -> Callable[[], Sampled]:
        """Decode one token in each of slots 0..n-1, and sample the next ones; `sets` [n] are the numbers of their LoRA
        sets. Return a function that waits for them."""
        n, sampling, host = len(rows.tokens), rows.sampling, self._next_transfers()
        adapted = self.prompts.adapted or bool((sets != NO_SET).any())
        beside = self.prompts.stage(host, rows.positions)
        self._model.rotary.reserve(self._max_context_tokens)
        size = next(b for b in self._sizes if b >= n)
        columns, given = host.inputs.numpy(), np.arange(n) + self._inputs.shape[1]
        places = given if rows.drawn_by is None else np.where(rows.drawn_by < 0, given, rows.drawn_by)
        draws = sampling.stream.view(np.int64), sampling.position, sampling.top_k
        columns[:6, :n] = rows.tokens, places, rows.positions, *draws
        columns[6:9, :n].view(np.float64)[:] = sampling.temperature, sampling.top_p, sampling.min_p
        columns[9, :n] = sets
        columns[10, :n] = 0 if sampling.banned is None else sampling.banned
        columns[:, n:size] = PADDING
        self._inputs[1:].copy_(host.inputs, non_blocking=True)
        width = self.cache.table.shape[1]
        if self._ops is None:
            width = min(width, 1 << (max(0, int(rows.positions.max())) // PAGE).bit_length())
        # without the operations of a fused step, top-k and others are a sort, which no other step should contain
        cuts = self._ops is None and bool(sampling.truncated.any())
        step = StepShape(size, width, beside, adapted)
        both, ends = self._replay(step) if self._captures and not cuts else self._sample(step, cuts)
        self._inputs[0, :n].copy_(both[0, :n])
        host.receive(both)
        if ends is not None:
            self.prompts.finish(ends)

        def read() -> Sampled:
            host.wait()
            return split_draws(host.drawn(size)[:, :n])

        return read

    @torch.inference_mode()
    def compute_prompts(self) -> None:
        """Compute the planned parts of prompts in a step without rows. The host does not wait for it."""
        self.cache.allocate()
        host, adapted = self._next_transfers(), self.prompts.adapted
        beside = self.prompts.stage(host, np.zeros(0, np.int64))
        self._model.rotary.reserve(self._max_context_tokens)
        step = StepShape(0, self.cache.table.shape[1], beside, adapted)
        # a capture is three steps: an engine that sleeps after each batch, which drops its graphs, needs none
        again = step in self._idle_shapes
        self._idle_shapes.add(step)
        both, ends = self._replay(step) if self._captures and again else self._sample(step)
        host.receive(both)
        assert ends is not None
        self.prompts.finish(ends)

    def _next_transfers(self) -> Transfers:
        """Return the memory for what the next step gets and returns, after its last use has ended."""
        self._transfers.reverse()
        self._transfers[0].wait()
        return self._transfers[0]

    def _replay(self, step: StepShape) -> Outputs:
        """Run `_sample` as a graph, which is captured at the first step of this shape."""
        if step not in self._graphs:
            assert self._stream is not None
            self._stream.wait_stream(torch.cuda.current_stream(self._model.device))
            with torch.cuda.stream(self._stream):  # libraries allocate and choose their kernels before the capture
                for _ in range(2):
                    self._sample(step)
            torch.cuda.current_stream(self._model.device).wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # the trainer's thread may allocate on the same device meanwhile
            with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
                outputs = self._sample(step)
            self._memory = graph.pool()
            self._graphs[step] = graph, outputs
        graph, outputs = self._graphs[step]
        graph.replay()
        return outputs

    def _sample(self, step: StepShape, cuts: bool = False) -> Outputs:
        """Return ids and log-probs as float64 [2, rows] for the first rows of the inputs, and the final states of the
        last tokens of the prompts beside them. Nothing here may synchronise with the host or change the inputs. With
        `cuts` a step that is not fused applies top-k, top-p and min-p."""
        hidden, size = self._hidden(step), step.rows
        ends = hidden[size:].index_select(0, self.prompts.rows(step.beside).ends) if step.beside else None
        if not size:
            return hidden.new_empty(2, 0, dtype=torch.float64), ends
        return self._draw(self._model.live.logits(hidden[:size]), cuts), ends

    def _draw(self, logits: Tensor, cuts: bool) -> Tensor:
        size = len(logits)
        stream, position, top_k = self._inputs[4:7, :size]
        temperature, top_p, min_p = self._inputs[7:10, :size].view(torch.float64)
        if self._banned is not None:
            close_banned(logits, self._inputs[11, :size] == 1, self._banned)
        if self._ops is not None:
            logits = self._ops.truncate(logits, temperature, top_k, top_p, min_p)
            return self._ops.sample(logits, temperature, self._ops.uniforms(stream, position))
        if cuts:
            logits = plain_truncate(logits.float(), temperature, top_k, top_p, min_p)
        return plain_sample(logits.float(), temperature.float(), plain_uniforms(stream, position))

    def _hidden(self, step: StepShape) -> Tensor:
        """Return the final hidden states [rows + beside, hidden] of rows and prompt tokens."""
        model, pool, n, beside = self._model, self.cache.pool, step.rows, step.beside
        assert pool is not None
        places, positions = self._inputs[2:4, :n]
        tokens = self._inputs.view(-1).index_select(0, places)
        if self._ops is not None:
            table, prompts = self.cache.table[:n], None
            if beside:
                prompts, given = self.prompts.rows(beside), self.prompts.inputs[:, :beside]
                tokens, positions = torch.cat([tokens, given[0]]), torch.cat([positions, given[1]])
                table = torch.cat([table, self.cache.table.index_select(0, given[2])])
            return decode_hidden(self._ops, model, pool, table, tokens, positions, prompts, self._rows_of(step))
        pages = torch.where(positions[:, None] >= 0, self.cache.table[:n, : step.width], 0)  # [n, W]
        positions = positions.clamp(min=0)
        place = pages.gather(1, (positions // PAGE)[:, None])[:, 0].long() * PAGE + positions % PAGE
        rotary, seen = model.rotary.at(positions), (positions + 1).int()

        def attention(i: int, layer: Layer, qkv: Tensor) -> Tensor:
            q, k, v = model.split_heads(qkv, layer, rotary)
            for lines, new in ((pool[i, 0], k), (pool[i, 1], v)):
                lines.view(-1, *lines.shape[2:]).index_copy_(0, place, new)
            scale, window = model.shape.query_scale, layer.window
            return self._kernel(q, pool[i, 0], pool[i, 1], (pages, seen), scale, window).flatten(1)

        return model.forward(tokens, attention, self._rows_of(step))

    def _rows_of(self, step: StepShape) -> SetRows | None:
        """Return the LoRA sets of the rows and prompt tokens of a step, if any has one."""
        if not step.adapted:
            return None
        numbers = self._inputs[10, : step.rows]
        return self._sets.masked(torch.cat([numbers, self.prompts.inputs[5, : step.beside]]))
