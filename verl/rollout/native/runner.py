"""The native mechanism under `EngineCore`: fused weights, slot KV, prompts computed once, decode split over lanes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.nn.compiled import Kernels, load_kernels
from verl.nn.precision import native_bf16
from verl.rollout.base import WeightSource
from verl.rollout.native.architecture import rotary_frequencies, shape_of
from verl.rollout.native.core import Admission
from verl.rollout.native.kv import READ_STEP, Prefix, PrefixStore, SlotCache, round_up
from verl.rollout.native.lanes import Lanes
from verl.rollout.native.linear import Layout, best_layout
from verl.rollout.native.model import (
    SHORT_PROMPT,
    Chunk,
    RotaryTable,
    decode,
    decode_compiled,
    prefill,
    prefill_compiled,
)
from verl.rollout.native.paged import PageCache, PagedDecode, whole_pages
from verl.rollout.native.request import Request
from verl.rollout.native.sampler import Draw, sample, score_logits, to_host
from verl.rollout.native.weights import Weights, receive

FIXED_ROWS = 32  # rows of one decode call when deterministic and a product's bits depend on its number of rows
LANE_WORK = 5e6  # multiply-adds per layer that take as long as dispatching the layer, which lanes cannot do at once
WIDE_OPERATION = 2e7  # multiply-adds of a mean matmul from which all cores together finish it sooner
MAX_LOGITS = 2**25  # that exist at once in a lane when sampling; fewer rows would read the head's weights more often
SCORE_BLOCK = 1024  # tokens whose logits exist at once when scoring
BLOCK_ROWS, BLOCKS_PAY = 16, 0.6  # attention goes in blocks of rows where these read less than this share of the KV
MIN_LANE_ROWS = 8
EVEN_SHARES = 1.25  # of a mean share: the most that a lane may have to do, if all shall be done sooner than one by one on all cores
MIN_PREFILL_WIDTH = 32  # tokens; prompts below it are one batch, whatever they leave empty
SPARE_ROWS, SPARE_ROWS_CUDA = (
    6,
    64,
)  # tokens of a step whose products take about as long as one token's: waiting for weights


@dataclass(slots=True, eq=False)
class Job:
    """A prompt being computed, perhaps in several passes."""

    ids: np.ndarray  # [P]
    kv: Tensor  # [layers, 2, K, P, D], the first `done` tokens computed
    done: int
    cached: int  # what the next request that is admitted from this job did not have to compute
    keep: bool  # in the prefix store
    entry: Prefix | None = None  # once all is computed

    @property
    def left(self) -> int:
        return len(self.ids) - self.done


class NativeRunner:
    def __init__(
        self,
        config: Any,
        *,
        max_context_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        max_prefill_tokens: int,
        prefix_cache_tokens: int,
        deterministic: bool,
        lanes: int,
        layout: Layout | None = None,
        emulate_bf16: bool | None = None,
        compiled: bool = True,
        max_kv_tokens: int | None = None,
        paged: bool | None = None,
    ) -> None:
        self.max_rows, self.max_context_tokens = max_rows, max_context_tokens
        self._shape = shape_of(config, max_context_tokens)
        self.vocab_size = self._shape.vocab
        self._dtype, self._device, self._deterministic = dtype, device, deterministic
        # a CPU that emulates bf16 keeps the rounded weights in fp32: the same numbers, ten times sooner
        emulate = dtype == torch.bfloat16 and not native_bf16(device) if emulate_bf16 is None else emulate_bf16
        self.compute_dtype = torch.float32 if emulate else dtype
        kernels = load_kernels(self.compute_dtype) if compiled and device.type == "cpu" else None
        self._kernels = kernels if isinstance(kernels, Kernels) else None
        self.without_kernels = kernels if isinstance(kernels, str) else None
        self._layout = layout or best_layout(self.compute_dtype, device, self._kernels)
        self._fixed_rows = deterministic and self._layout != "panels"  # panels do not depend on the other rows
        self._table = RotaryTable(rotary_frequencies(config, self._shape.head_dim), device)
        slots = round_up(max_rows, FIXED_ROWS) if self._fixed_rows else max_rows
        self._cache = SlotCache(
            self._shape, self.compute_dtype, device, slots, max_context_tokens, exact_reads=self._kernels is not None
        )
        self._needs = np.zeros(max_rows, np.int64)  # tokens of KV that each resident row can come to hold
        self._paged: PagedDecode | None = None
        # where bits depend on the number of rows, and for capped scores, which not every kernel knows: slots
        in_pages = (
            (device.type == "cuda" if paged is None else paged)
            and not self._fixed_rows
            and not self._shape.attention_cap
        )
        longest = whole_pages(max_context_tokens) if in_pages else max_context_tokens
        self._max_kv_tokens = max_rows * longest if max_kv_tokens is None else max_kv_tokens
        if self._max_kv_tokens < longest:
            raise ValueError(
                f"max_kv_tokens={max_kv_tokens} holds no sequence of max_context_tokens={max_context_tokens}"
                f"{' in whole pages' if in_pages else ''}: give at least {longest}"
            )
        if in_pages:
            pages = PageCache(
                self._shape, self.compute_dtype, device, max_rows, max_context_tokens, self._max_kv_tokens
            )
            self._paged = PagedDecode(
                self._shape,
                pages,
                self._table,
                self.compute_dtype,
                device,
                max(max_rows, SPARE_ROWS_CUDA),
                max_context_tokens,
            )
        self._prefixes = PrefixStore(prefix_cache_tokens)
        self._longest = 0  # tokens of KV of the longest resident row, at least
        self._ahead = 0  # of the row that can become longest
        self._jobs: dict[bytes, Job] = {}
        self._lanes = Lanes(lanes if device.type == "cpu" else 1)
        self._max_prefill_tokens = max_prefill_tokens
        self._weights: Weights | None = None
        self._counts = {"prefill_tokens": 0, "decode_tokens": 0, "reused_tokens": 0}

    @property
    def ready(self) -> bool:
        return self._weights is not None

    def enter_thread(self) -> None:
        self._lanes.enter()

    def load(self, source: WeightSource) -> None:
        fresh = receive(
            source.tensors(),
            self._shape,
            dtype=self._dtype,
            compute_dtype=self.compute_dtype,
            device=self._device,
            layout=self._layout,
            kernels=self._kernels,
        )
        if self._paged is not None and self._weights is not None and self._weights.tensors:
            self._weights.overwrite(fresh)  # graphs read the memory that they were captured with
        else:
            self._weights = fresh
        self._prefixes.clear()
        self._jobs.clear()

    def stats(self) -> dict[str, int]:
        return {
            **self._counts,
            "kv_bytes": self._kv_bytes(),
            "prefix_bytes": self._prefixes.nbytes,
            "prefix_tokens": self._prefixes.tokens,
        }

    def _kv_bytes(self) -> int:
        return self._cache.nbytes + (self._paged.cache.nbytes if self._paged else 0)

    def drop_kv(self) -> int:
        freed = self._prefixes.nbytes + self._cache.clear()
        if self._paged is not None:
            freed += self._paged.cache.nbytes
            self._paged.forget()
            self._paged.cache.clear()
        self._prefixes.clear()
        self._jobs.clear()
        return freed

    def drop_weights(self) -> int:
        freed = self._weights.nbytes if self._weights else 0
        self._weights = None
        if self._paged is not None:
            self._paged.forget()
        return freed

    def close(self) -> None:
        self._lanes.close()

    # ---- admission -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def admit(self, waiting: Sequence[Request], resident: int) -> Admission | None:
        candidates = self._that_fit(waiting, resident)
        keys = [request.context().tobytes() for request in candidates]
        self._open_jobs(candidates, keys)
        self._prefill_pass()
        ready: list[Prefix] = []
        cached: list[int] = []
        self._ahead = self._ahead if resident else 0
        for key, request in zip(keys, candidates):
            job = self._jobs.get(key)
            entry = job.entry if job else self._prefixes.get(key)
            if entry is None:
                break  # first come, first served
            need = self._need(request)
            self._needs[resident + len(ready)] = need
            self._ahead = max(self._ahead, need)
            cached.append(job.cached if job else len(entry.ids))
            ready.append(entry)
            if job:
                job.cached = len(entry.ids)
        if not ready:
            return None
        hidden, owner = self._fill_slots(ready, resident)
        return Admission(cached, partial(self._sample_first, hidden, owner))

    def _that_fit(self, waiting: Sequence[Request], resident: int) -> list[Request]:
        """Requests from the front whose KV fits beside that of the residents, however long all of them become."""
        room, fit = self._max_kv_tokens - int(self._needs[:resident].sum()), list[Request]()
        for request in islice(waiting, self.max_rows - resident):
            room -= self._need(request)
            if room < 0:
                break
            fit.append(request)
        return fit

    def _need(self, request: Request) -> int:
        tokens = min(self.max_context_tokens, len(request.prompt_ids) + request.sampling.max_tokens)
        return whole_pages(tokens) if self._paged is not None else tokens

    def _open_jobs(self, candidates: list[Request], keys: list[bytes]) -> None:
        """A job for every distinct prompt that is not stored; jobs that nobody waits for are dropped."""
        jobs: dict[bytes, Job] = {}
        for request, key in zip(candidates, keys):
            if key not in jobs and (job := self._jobs.get(key)):
                jobs[key] = job
            elif key not in jobs and self._prefixes.get(key) is None:
                jobs[key] = self._start(request)
        self._jobs = jobs

    def _start(self, request: Request) -> Job:
        s, ids = self._shape, request.context()
        kv = torch.empty(s.layers, 2, s.kv_heads, len(ids), s.head_dim, dtype=self.compute_dtype, device=self._device)
        # continuing a stored prefix rounds differently than computing the whole
        past = None if self._deterministic else self._prefixes.longest(ids)
        done = past.shape[3] if past is not None else 0
        if past is not None:
            kv[:, :, :, :done] = past
        self._counts["reused_tokens"] += done
        return Job(ids, kv, done, cached=done, keep=not len(request.ids))

    def _prefill_pass(self) -> None:
        """At most `max_prefill_tokens` tokens of unfinished jobs, in order of arrival."""
        batch: list[tuple[Job, int]] = []
        budget = self._max_prefill_tokens
        for job in self._jobs.values():
            if not job.left:
                continue
            # alone and cut at multiples of its own start: its bits then depend on nothing else
            tokens = min(job.left, self._max_prefill_tokens if self._deterministic else budget)
            if not budget or tokens > budget:
                break
            batch.append((job, tokens))
            budget -= tokens
        for part in [[item] for item in batch] if self._deterministic else [batch] if batch else []:
            self._compute(part)

    def _compute(self, part: list[tuple[Job, int]]) -> None:
        assert self._weights is not None
        total = sum(n for _, n in part)
        self._table.reserve(max(job.done + n for job, n in part))
        lanes = min(self._useful_lanes(total), len(part))
        shares = [sorted(part, key=lambda item: -item[1])[lane::lanes] for lane in range(lanes)]
        if lanes > 1 and max(sum(n for _, n in share) for share in shares) * lanes <= EVEN_SHARES * total:
            self._lanes.map([partial(self._prefill, share) for share in shares])
        elif self._wide_pays(total):
            self._lanes.wide(partial(self._prefill, part))
        else:
            self._prefill(part)
        for job, _ in part:
            if job.entry is not None and job.keep:
                self._prefixes.put(job.entry)
        self._counts["prefill_tokens"] += total

    @torch.inference_mode()  # a lane has a mode of its own
    def _prefill(self, part: list[tuple[Job, int]]) -> None:
        """Short prompts by their length, rounded up so that little of their KV is padding; long ones, width 0, apart."""
        assert self._weights is not None
        compiled = self._kernels if self._weights.stack is not None else None

        def width(item: tuple[Job, int]) -> int:
            end = item[0].done + item[1]
            return 0 if compiled is None or end > SHORT_PROMPT else max(MIN_PREFILL_WIDTH, 1 << (end - 1).bit_length())

        for short, same in groupby(sorted(part, key=width), key=width):
            items = list(same)
            chunks = [Chunk(self._on_device(j.ids[j.done : j.done + n]), j.kv[:, :, :, : j.done]) for j, n in items]
            if short and compiled is not None:
                kv, hidden = prefill_compiled(compiled, self._weights, self._shape, self._table, chunks)
            else:
                kv, hidden = prefill(self._weights, self._shape, self._table, chunks)
            start = 0
            for job, tokens in items:
                job.kv[:, :, :, job.done : job.done + tokens] = kv[:, :, :, start : start + tokens]
                job.done += tokens
                start += tokens
                if not job.left:
                    job.entry = Prefix(job.ids, job.kv, hidden[start - 1].clone())

    def _fill_slots(self, ready: list[Prefix], resident: int) -> tuple[Tensor, np.ndarray]:
        """-> hidden states of the distinct prompts [u, hidden], which of them each admitted row continues [m]."""
        self._longest = max(self._longest if resident else 0, *(len(entry.ids) for entry in ready))
        if self._paged is None:
            self._reserve(resident + len(ready), live=resident)
        cache = self._cache if self._paged is None else self._paged.cache
        lo = resident
        for entry, run in groupby(ready):  # a group's requests come in a row: one copy for all of them
            hi = lo + sum(1 for _ in run)
            cache.fill(lo, hi, entry.kv)
            lo = hi
        distinct = {id(entry): entry for entry in ready}
        place = {key: i for i, key in enumerate(distinct)}
        hidden = torch.stack([entry.hidden for entry in distinct.values()])
        return hidden, np.asarray([place[id(entry)] for entry in ready])

    @torch.inference_mode()
    def _sample_first(self, hidden: Tensor, owner: np.ndarray, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        assert self._weights is not None
        rows = hidden.split(1) if self._deterministic else [hidden]
        logits = torch.cat([self._weights.logits(part) for part in rows])  # [u, V]
        if len(hidden) < len(owner):
            logits = logits.index_select(0, self._on_device(owner))
        return self._sample(logits, draw)

    # ---- decode ----------------------------------------------------------------------------------------------------

    def decode(self, tokens: np.ndarray, positions: np.ndarray, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        n = len(tokens)
        if self._paged is not None:
            return self._decode_pages(np.arange(n), tokens, positions, draw)
        self._make_room(n, int(positions.max()) + 1, live=n)
        jobs = [
            partial(self._decode_rows, lo, tokens[lo:hi], positions[lo:hi], draw.rows(lo, hi))
            for lo, hi in self._split(n)
        ]
        return self._run_lanes(jobs, n)

    def spare_tokens(self, rows: int) -> int:
        if self._fixed_rows:
            return 0  # another number of tokens in a product is other bits
        return -rows % SPARE_ROWS if self._device.type == "cpu" else max(0, SPARE_ROWS_CUDA - rows)

    def verify(
        self, rows: np.ndarray, tokens: np.ndarray, positions: np.ndarray, draw: Draw
    ) -> tuple[np.ndarray, np.ndarray]:
        if self._paged is not None:
            return self._decode_pages(rows, tokens, positions, draw)
        self._make_room(int(rows[-1]) + 1, int(positions.max()) + 1, live=int(rows[-1]) + 1)
        # a row's tokens stay in one lane: each attends to the keys of those before it
        bounds = sorted(
            {
                (
                    int(np.searchsorted(rows, rows[lo])),
                    len(rows) if hi == len(rows) else int(np.searchsorted(rows, rows[hi])),
                )
                for lo, hi in self._split(len(rows))
            }
        )
        jobs = [
            partial(self._decode_rows, 0, tokens[lo:hi], positions[lo:hi], draw.rows(lo, hi), rows[lo:hi])
            for lo, hi in bounds
            if lo < hi
        ]
        return self._run_lanes(jobs, len(tokens))

    def _decode_pages(
        self, slots: np.ndarray, tokens: np.ndarray, positions: np.ndarray, draw: Draw
    ) -> tuple[np.ndarray, np.ndarray]:
        assert self._paged is not None and self._weights is not None
        self._counts["decode_tokens"] += len(tokens)
        return self._paged.step(self._weights, slots, tokens, positions, draw)

    def _make_room(self, rows: int, tokens: int, live: int) -> None:
        with torch.inference_mode():
            self._longest = tokens
            self._reserve(rows, live=live)
            self._table.reserve(tokens)

    def _run_lanes(
        self, jobs: Sequence[Callable[[], tuple[np.ndarray, np.ndarray]]], tokens: int
    ) -> tuple[np.ndarray, np.ndarray]:
        wide = len(jobs) == 1 and not self._fixed_rows and self._wide_pays(tokens)
        done = [self._lanes.wide(jobs[0])] if wide else self._lanes.map(jobs)
        self._counts["decode_tokens"] += tokens
        return np.concatenate([ids for ids, _ in done]), np.concatenate([logprobs for _, logprobs in done])

    def _split(self, n: int) -> list[tuple[int, int]]:
        """Row ranges of one step, one per lane that pays; of fixed size where bits depend on it."""
        if self._fixed_rows:
            return [(lo, min(n, lo + FIXED_ROWS)) for lo in range(0, n, FIXED_ROWS)]
        parts = max(1, min(self._useful_lanes(n), n // MIN_LANE_ROWS))
        edges = [n * i // parts for i in range(parts + 1)]
        return list(pairwise(edges))

    def _useful_lanes(self, tokens: int) -> int:
        """p lanes compute work / p each while p dispatches queue up: best at p = sqrt(work / dispatch)."""
        assert self._weights is not None
        useful = math.isqrt(int(tokens * self._weights.params / (self._shape.layers * LANE_WORK)))
        return max(1, min(self._lanes.count, useful))

    @torch.inference_mode()
    def _decode_rows(
        self, lo: int, tokens: np.ndarray, positions: np.ndarray, draw: Draw, rows: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Slots lo.. take one token each, or where `rows` says the slot of each token, some of them several."""
        assert self._weights is not None
        n = len(tokens)
        if self._fixed_rows:  # idle rows write into free slots
            tokens, positions = (np.pad(column, (0, FIXED_ROWS - n)) for column in (tokens, positions))
        at, ids, slots = (
            self._on_device(positions),
            self._on_device(tokens),
            None if rows is None else self._on_device(rows),
        )
        if self._kernels is not None:
            hidden = decode_compiled(
                self._kernels, self._weights, self._shape, self._cache, self._table, ids, at, lo, slots
            )
        else:
            blocks = [(0, FIXED_ROWS, self.max_context_tokens)] if self._fixed_rows else read_blocks(positions)
            hidden = decode(self._weights, self._shape, self._cache, self._table, ids, at, lo, blocks, slots)
        return self._head_and_sample(hidden, n, draw)

    def _head_and_sample(self, hidden: Tensor, n: int, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        """hidden [rows >= n, hidden] -> ids [n], log-probs [n]; never all logits of a large vocabulary at once."""
        assert self._weights is not None
        block = max(MIN_LANE_ROWS, MAX_LOGITS // self.vocab_size)
        drawn = []
        for lo in range(0, n, block):
            hi = min(n, lo + block)
            drawn.append(self._sample(self._weights.logits(hidden[lo : lo + block])[: hi - lo], draw.rows(lo, hi)))
        return np.concatenate([ids for ids, _ in drawn]), np.concatenate([logprobs for _, logprobs in drawn])

    def _sample(self, logits: Tensor, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        """A row is drawn by the same code whatever its neighbours ask for: its bits depend on it alone."""
        cut = np.flatnonzero(draw.truncated)
        if self._kernels is None or len(cut) == len(logits):
            return to_host(*sample(logits, draw))
        ids, logprobs = self._kernels.sample(logits, draw.temperature, draw.uniform)
        if len(cut):
            ids[cut], logprobs[cut] = to_host(*sample(logits[torch.from_numpy(cut)], draw.of(cut)))
        return ids, logprobs

    def move(self, sources: np.ndarray, holes: np.ndarray, kept: int, tokens: int) -> None:
        self._needs[holes] = self._needs[sources]
        if self._paged is not None:
            return self._paged.cache.move(sources, holes, kept)
        with torch.inference_mode():
            self._cache.move(sources, holes, tokens)

    def _reserve(self, rows: int, live: int) -> None:
        if self._fixed_rows:
            self._cache.reserve(round_up(rows, FIXED_ROWS), self.max_context_tokens, live)
        else:
            self._cache.reserve(rows, self._longest, live, self._ahead)

    # ---- shared ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def score(self, ids: np.ndarray, temperature: float) -> np.ndarray:
        assert self._weights is not None
        s, step = self._shape, self._max_prefill_tokens
        kv = torch.empty(s.layers, 2, s.kv_heads, 0, s.head_dim, dtype=self.compute_dtype, device=self._device)
        logprobs = []
        for lo in range(0, len(ids) - 1, step):
            chunk = Chunk(self._on_device(ids[lo : min(lo + step, len(ids) - 1)]), kv)
            new, hidden = self._lanes.wide(partial(prefill, self._weights, s, self._table, [chunk]))
            kv = torch.cat([kv, new], dim=3)
            for at in range(0, len(hidden), SCORE_BLOCK):
                logits = self._weights.logits(hidden[at : at + SCORE_BLOCK])  # [t, V]
                given = self._on_device(ids[lo + at + 1 : lo + at + 1 + len(logits)])
                logprobs.append(score_logits(logits, given, temperature))
        return torch.cat(logprobs).cpu().numpy()

    def _wide_pays(self, tokens: int) -> bool:
        assert self._weights is not None
        matmuls = 4 * self._shape.layers + 1
        # below about 20 tokens a matmul waits for its weights
        return max(tokens, 20) * self._weights.params / matmuls >= WIDE_OPERATION

    def _on_device(self, column: np.ndarray) -> Tensor:
        return torch.from_numpy(column).to(self._device)


def read_blocks(positions: np.ndarray) -> list[tuple[int, int, int]]:
    """(first row, end row, KV width) per attention call: one for all rows, unless a few long ones would make most of
    them read far beyond their own end."""
    n = len(positions)
    widths = round_up(positions + 1, READ_STEP)
    starts = range(0, n, BLOCK_ROWS)
    blocks = [(lo, min(n, lo + BLOCK_ROWS), int(widths[lo : lo + BLOCK_ROWS].max())) for lo in starts]
    longest = max(width for _, _, width in blocks)
    if sum((hi - lo) * width for lo, hi, width in blocks) > BLOCKS_PAY * n * longest:
        return [(0, n, longest)]
    return blocks
