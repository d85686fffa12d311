"""The runner of the native engine: fused weights, KV in slots or in pages, decoding by several lanes (CPU threads)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby, islice

import numpy as np
import torch
from torch import Tensor

from verl.accel.cpu.lanes import Lanes, wide_pays
from verl.accel.devices import device_facts
from verl.accel.linear import Products
from verl.accel.operations import Call, Use
from verl.accel.table import choose
from verl.accel.transfer import to_device
from verl.errors import Refused
from verl.media_tokens import Picture
from verl.nn.fp8 import dequantised
from verl.nn.precision import native_bf16
from verl.parameter_set import POLICY_SET, ParameterSet
from verl.rollout.base import RolloutContext, Scores, WeightReader
from verl.rollout.embedded.core import Admitted, DecodeRows, Sampled
from verl.rollout.embedded.features import EncodedImages, Features
from verl.rollout.embedded.images import RequestImages
from verl.rollout.embedded.receive import receive
from verl.rollout.embedded.requests import ActiveRequest, PromptKey
from verl.rollout.embedded.sampler import (
    SamplingMetadata,
    banned_of,
    close_banned,
    concat_draws,
    draw_rows,
    score_logits,
    scores_of,
    split_draws,
)
from verl.rollout.native.codes import CodesReader
from verl.rollout.native.kv import Prefix, SlotCache, round_up
from verl.rollout.native.model import Model, read_blocks
from verl.rollout.native.noise import NormNoise
from verl.rollout.native.ops import DecodeOps, choose_block_linear, choose_decode_ops, choose_ops
from verl.rollout.native.options import Options
from verl.rollout.native.paged import PAGE, PageCache, PagedDecode, whole_pages
from verl.rollout.native.prefill import Prefiller, PromptSizes, prompt_sizes
from verl.rollout.native.routes import RowRoutes
from verl.rollout.native.sets import NO_SET, LiveSets
from verl.rollout.native.tower import tower_of
from verl.rollout.native.weights import Storage, Weights, weights_of
from verl.wire import WireFormat

FIXED_ROWS = 32  # rows of one decode call when deterministic and a product's bits depend on its number of rows
MIN_LANE_ROWS = 8  # rows of a decode step that one lane gets at least


class NativeRunner:
    """The runner of the native engine. `products` (the layout of weights), `emulate_bf16` (compute bf16 weights in
    float32), `paged` (KV in pages), `decode_ops`, `look_ahead`, `prompts` (tokens of them in steps) and `block_linear`
    (the product with weights in blocks of 8 bits) are chosen for the machine if they are None."""

    _explores = False  # the resident rows are sampled under noise
    _decoded = 0  # tokens
    _longest = _ahead = 0  # length of the longest resident row now, and the longest possible at the end
    _torn: Weights | None = None  # weights that are partly overwritten by a failed load

    def __init__(
        self,
        options: Options,
        context: RolloutContext,
        *,
        lanes: int | None = None,
        compiled: bool = True,
        products: Products | None = None,
        emulate_bf16: bool | None = None,
        paged: bool | None = None,
        decode_ops: DecodeOps | None = None,
        look_ahead: bool | None = None,
        prompts: PromptSizes | None = None,
        block_linear: Call | None = None,
    ) -> None:
        device = self._device = torch.device(context.device)
        self._facts = device_facts(device.type)
        self.max_rows, self.max_context_tokens = context.max_concurrent_sequences, context.max_context_tokens
        self._dtype, self._fp8, self._deterministic = context.dtype, context.fp8, context.deterministic
        # a CPU that emulates bf16 keeps the rounded weights in fp32: the same numbers, ten times sooner
        emulates = context.dtype == torch.bfloat16 and not native_bf16(device) if emulate_bf16 is None else emulate_bf16
        self.compute_dtype = torch.float32 if emulates else context.dtype
        self.model = Model(context.hf_config, self.max_context_tokens, device)
        self.vocab_size, self._banned = self.model.shape.vocab, banned_of(context, device)
        self._tower = tower_of(context.hf_config, self.compute_dtype, device)
        attention = choose("prompt_attention", self._use())  # of CUDA: a CPU's blocks of padded prompts cost less
        self.model.prompt_attention = None if attention is None else attention.call
        in_pages = (device.type == "cuda" if paged is None else paged) and self.model.shape.delta is None
        self._routes = RowRoutes(self.model.shape, self.max_rows) if options.replay_routes else None
        in_pages = in_pages and self._routes is None  # steps over slots alone are recorded
        chosen = (
            choose_decode_ops(self._use()) if in_pages and device.type == "cuda" and decode_ops is None else decode_ops
        )
        self.without_fused = chosen if isinstance(chosen, str) else None
        fused = chosen if isinstance(chosen, DecodeOps) else None
        self.ops = choose_ops(
            device,
            self.compute_dtype,
            compiled=compiled,
            products=products,
            exact_rows=self._deterministic and fused is not None,
            float32_head=context.float32_head,
            block_linear=block_linear or self._block_linear(),
        )
        self._fixed_rows = self._deterministic and not self.ops.products.exact_rows
        self._lanes = Lanes((lanes or torch.get_num_threads()) if device.type == "cpu" else 1)
        if fused is None:  # over the pages of the longest row, and not every paged kernel supports capped scores
            in_pages = in_pages and not self._deterministic and not self.model.shape.attention_cap
        elif self._deterministic:
            fused, in_pages = fused.with_exact_rows(), not self._fixed_rows
        self.lora_rank, self.lora_experts = self.model.shape.hidden, not in_pages
        kept = self._dtype, self.compute_dtype, device
        self._sets = LiveSets(self.model.shape, self.ops.products, *kept, stacks=in_pages)
        self._row_sets = np.full(self.max_rows, NO_SET)  # of each resident row
        self._images = None if self._tower is None else EncodedImages(self._encode)
        made = self._sets, self._lanes, self.compute_dtype, self._images, self._routes, options
        self._prompts = Prefiller(self.model, *made, self._deterministic)
        sizes = prompt_sizes(self._facts, self.model.shape) if prompts is None else prompts
        # the bits of a prompt would depend on the free places of the steps
        self._make_cache(options.max_kv_tokens, in_pages, fused, ((), ()) if self._deterministic else sizes)
        # a step on a CPU ends before the host continues, so a surplus token would be computed for nothing
        self.looks_ahead = device.type == "cuda" and in_pages if look_ahead is None else look_ahead
        self._noise = None if context.noise is None else NormNoise(context.noise, self.model.shape)
        self._drawn = np.zeros(0, np.int64)  # the ids of the last step over slots
        self._needs = np.zeros(self.max_rows, np.int64)  # tokens of KV that each resident row can have at its end

    def _use(self) -> Use:
        s = self.model.shape
        sizes = {"head_dim": s.head_dim, "hidden": s.hidden, "page": PAGE, "capped": int(s.attention_cap > 0)}
        return Use(self._device, self.compute_dtype, sizes)

    def _block_linear(self) -> Call | None:
        """Return the product with weights in blocks of 8 bits, if there are any. A CPU dequantises them."""
        if not self._fp8 or self._device.type == "cpu":
            return None
        found = choose_block_linear(self._use())
        if isinstance(found, str):
            raise Refused(f"rollout.dtype=fp8 on {self._device}: {found}; set rollout.dtype=bfloat16")
        if self._tower is not None:
            raise Refused("rollout.dtype=fp8: the vision tower is not computed in 8 bits; set rollout.dtype=bfloat16")
        if self.model.shape.delta is not None:
            raise Refused("rollout.dtype=fp8: delta nets are not computed in 8 bits; set rollout.dtype=bfloat16")
        return found

    def _make_cache(
        self, max_kv_tokens: int | None, in_pages: bool, ops: DecodeOps | None, prompts: PromptSizes
    ) -> None:
        rows, longest = self.max_rows, self.max_context_tokens
        kind = (self.model.shape, self.compute_dtype, self._device)
        slots = round_up(rows, FIXED_ROWS) if self._fixed_rows else rows
        self._cache = SlotCache(*kind, slots, longest, exact_reads=self.ops.slot_attention is not None)
        whole = whole_pages(longest) if in_pages else longest
        self._max_kv_tokens = rows * whole if max_kv_tokens is None else max_kv_tokens
        if self._max_kv_tokens < whole:
            need = f"max_context_tokens={longest}{' in whole pages' if in_pages else ''}: give at least {whole}"
            raise Refused(f"max_kv_tokens={max_kv_tokens} holds no sequence of {need}")
        self._paged: PagedDecode | None = None
        if in_pages:
            pages = PageCache(*kind, rows, longest, self._max_kv_tokens)
            sizes = self.compute_dtype, rows, longest
            self._paged = PagedDecode(self.model, pages, *sizes, ops, self._sets, prompts, self._banned)

    @property
    def weight_format(self) -> WireFormat:
        # on a GPU the bits of a product with codes depend on its number of rows
        codes = not self._fp8 and not (self._deterministic and self._device.type == "cuda")
        return WireFormat(str(self._dtype).removeprefix("torch."), fp8=self._fp8, codes=codes)

    @property
    def lora_whole(self) -> bool:
        return self.ops.products.keeps or self.ops.products.fills

    @property
    def ready(self) -> bool:
        return self.model.weights is not None

    @property
    def noise_sigma(self) -> float | None:
        return None if self._noise is None else self._noise.sigma

    def start_version(self, version: int) -> None:
        if self._noise is not None:
            self._noise.draw(version)

    def _use_noise(self, acts: bool) -> None:
        """Compute with the noise of the live version from now on, or without it."""
        if self._noise is not None:
            self._noise.use(acts)

    def enter_thread(self) -> None:
        self._lanes.enter()

    def close(self) -> None:
        self._lanes.close()

    def load(self, source: WeightReader) -> None:
        live = self.model.weights or self._torn
        self.model.weights = self._torn = None  # until all tensors are loaded
        if live is None or not live.reloads or CodesReader(source, self._device).weights:
            del live  # frees the memory for the new weights
            return self.prepare(source)()
        self._torn = live  # graphs read it, and there is room for no other
        receive(self._read(source.tensors()), live.destinations)
        live.pack_tied_head()
        self._torn = None
        self._start(live)

    def overwrite(self, weights: Mapping[str, Tensor]) -> None:
        self._use_noise(False)  # else norms that are not written would keep it
        live = self.model.live
        self.model.weights, self._torn = None, live  # until all of them are written
        receive(self._read(weights.items()), {n: to for n, to in live.destinations.items() if n in weights})
        self._torn = None
        self._start(live)

    def _read(self, tensors: Iterable[tuple[str, object]]) -> Iterable[tuple[str, object]]:
        dequantises = self._fp8 and self.ops.block_linear is None
        return dequantised(tensors) if dequantises else tensors

    def prepare(self, source: WeightReader) -> Callable[[], None]:
        layout = self.ops.products if self.ops.products.fills else None
        kept, wide = self.ops.block_linear is not None, self.ops.float32_linear is not None
        codes = CodesReader(source, self._device)
        kinds = self._dtype, self.compute_dtype, self._device
        exact = self._dtype == self.compute_dtype == torch.float32 and self._device.type == "cpu"
        shared = codes.shared if exact else frozenset[str]()
        given, noisy = (*kinds, layout, kept, self._tower), self._noise is not None
        storage = Storage(
            self.model.shape, *given, coded=codes.weights, shared=shared, exact_norms=noisy, float32_head=wide
        )
        receive(codes.rest(iter(self._read(source.tensors())), storage.claimed), storage.destinations)
        return partial(self._switch, weights_of(storage, self.ops, codes))

    def _switch(self, fresh: Weights) -> None:
        """Make the weights `fresh` live and drop all prompts of older ones."""
        before, self._torn = self.model.weights or self._torn, None
        if self._paged is not None and before is not None and before.tensors and fresh.tensors:
            before.overwrite(fresh)  # graphs read the memory that they were captured with
            self._start(before)
        else:
            self._start(fresh)
            if self._paged is not None:
                self._paged.forget()

    def _start(self, weights: Weights) -> None:
        """Compute with these weights from now on, which have no noise. All prompts of older ones are dropped."""
        self.model.weights = weights
        if self._noise is not None:
            self._noise.attach(weights)
        self._forget_prompts()

    def _forget_prompts(self, name: str | None = None) -> None:
        """Drop the KV of the prompts of a parameter set (None: of all), computed or in progress."""
        if name is None:
            self._prompts.clear()
        else:
            self._prompts.forget(name)
        if self._paged is not None:
            self._paged.prompts.plan(())

    def _encode(self, picture: Picture) -> Features:
        assert self._tower is not None
        return self._tower.encode(picture, self.model.live.tower)

    def add_set(self, parameters: ParameterSet, tensors: Mapping[str, Tensor]) -> None:
        moved = self._sets.add(parameters, tensors, self.model.live.joined)
        if parameters.id == POLICY_SET.id:  # the policy's rows go on with its factors
            self._row_sets[self._row_sets == NO_SET] = self._sets.number(parameters.id)
        self._forget_prompts(parameters.id)
        if self._paged is not None and moved:
            self._paged.forget()

    def drop_set(self, name: str) -> None:
        self._row_sets[self._row_sets == self._sets.number(name)] = NO_SET
        self._sets.drop(name)
        self._forget_prompts(name)

    def stats(self) -> dict[str, int]:
        store, paged = self._prompts.store, self._paged.cache.nbytes if self._paged else 0
        kept = {"prefix_bytes": store.nbytes, "prefix_tokens": store.tokens, "kv_bytes": self._cache.nbytes + paged}
        if self._images is not None:
            kept |= {"encoded_images": self._images.encoded, "image_bytes": self._images.nbytes}
        return {**self._prompts.counts, "decode_tokens": self._decoded, **kept}

    def drop_kv(self) -> int:
        freed = self._prompts.store.nbytes + self._cache.clear()
        freed += 0 if self._images is None else self._images.nbytes
        self._forget_prompts()
        if self._paged is not None:
            freed += self._paged.drop_kv()
        return freed

    def drop_weights(self) -> int:
        freed = self.model.weights.nbytes if self.model.weights else 0
        self.model.weights = self._torn = None
        if self._paged is not None:
            self._paged.forget()
        return freed

    @torch.inference_mode()
    def admit(self, waiting: Sequence[ActiveRequest], resident: int) -> Admitted | None:
        if not resident:
            self._explores = waiting[0].explores
        self._use_noise(self._explores)
        candidates = self._that_fit(waiting, resident)
        keys = [request.key() for request in candidates]
        self._compute_prompts(candidates, keys, resident)
        ready: list[Prefix] = []
        cached: list[int] = []
        self._ahead = self._ahead if resident else 0
        for key, request in zip(keys, candidates):
            found = self._prompts.take(key)
            if found is None:
                break  # requests are admitted in their order
            need = self._need(request)
            self._needs[resident + len(ready)] = need
            self._row_sets[resident + len(ready)] = self._sets.number(request.given.parameters)
            if self._routes is not None and found[0].routes is not None:
                self._routes.fill(resident + len(ready), found[0].routes)
            self._ahead = max(self._ahead, need)
            ready.append(found[0])
            cached.append(found[1])
        if not ready:
            return None
        return Admitted(cached, partial(self._sample_first, *self._fill_slots(ready, resident)))

    def _compute_prompts(self, waiting: Sequence[ActiveRequest], keys: Sequence[PromptKey], resident: int) -> None:
        """Compute a bounded number of tokens of the prompts of waiting requests: in the next step beside its rows, in a
        step of their own if they are few and there are no rows, or in a pass."""
        steps = self._paged
        self._prompts.want(waiting, keys)
        parts = [] if steps is None else self._prompts.next_parts(steps.prompts.most if resident else None)
        if steps is None or not steps.prompts.take(parts, resident):
            self._prompts.advance()
        elif not resident:
            steps.compute_prompts()
            self._prompts.record(parts)

    def _that_fit(self, waiting: Sequence[ActiveRequest], resident: int) -> list[ActiveRequest]:
        """Return the first waiting requests with KV that fits beside that of the resident ones, both at their final
        lengths. All of them, and the resident ones, are sampled under noise, or none is."""
        room, fit = self._max_kv_tokens - int(self._needs[:resident].sum()), list[ActiveRequest]()
        for request in islice(waiting, self.max_rows - resident):
            room -= self._need(request)
            if room < 0 or request.explores != self._explores:
                break
            fit.append(request)
        return fit

    def _need(self, request: ActiveRequest) -> int:
        """Return the tokens of KV that a request can have at its end, in whole pages if the KV is in pages."""
        tokens = min(self.max_context_tokens, len(request.given.prompt_ids) + request.given.sampling.max_tokens)
        return whole_pages(tokens) if self._paged is not None else tokens

    def _fill_slots(self, ready: list[Prefix], resident: int) -> tuple[Tensor, np.ndarray]:
        """Write the KV of prompts into the slots from `resident` on. Return the hidden states of the distinct prompts
        [u, hidden] and the index of the prompt of each admitted row [m]."""
        self._longest = max(self._longest if resident else 0, *(len(entry.ids) for entry in ready))
        if self._paged is None:
            self._reserve(resident + len(ready), live=resident)
        lo = resident
        for entry, run in groupby(ready):  # the requests of a group are neighbours: one copy for all of them
            hi = lo + sum(1 for _ in run)
            if self._paged is None:
                self._cache.fill(lo, hi, entry.kv, entry.states)
            else:
                self._paged.cache.fill(lo, hi, entry.kv)
            lo = hi
        distinct = {id(entry): entry for entry in ready}
        place = {key: i for i, key in enumerate(distinct)}
        hidden = torch.stack([entry.hidden for entry in distinct.values()])
        return hidden, np.asarray([place[id(entry)] for entry in ready])

    @torch.inference_mode()
    def _sample_first(self, hidden: Tensor, owner: np.ndarray, sampling: SamplingMetadata) -> Sampled:
        """Sample the first token of each row from hidden states [u, hidden] of prompts; `owner` [m] is the prompt of
        each row."""
        rows = hidden.split(1) if self._deterministic else [hidden]
        logits = torch.cat([self.model.live.logits(part) for part in rows])  # [u, V]
        if len(hidden) < len(owner):
            logits = logits.index_select(0, self._on_device(owner))
        return self._sample(logits, sampling)

    def decode(self, rows: DecodeRows) -> Callable[[], Sampled]:
        n = len(rows.tokens)
        self._decoded += n
        self._use_noise(self._explores)
        if self._paged is not None:
            computed, read = self._paged.prompts.parts, self._paged.launch(rows, self._row_sets[:n])
            self._prompts.record(computed)
            return read
        tokens, positions = rows.tokens, rows.positions
        if rows.drawn_by is not None:
            tokens = np.where(rows.drawn_by < 0, tokens, self._drawn[rows.drawn_by])
        drawn = self._decode_slots(tokens, positions, rows.sampling)
        self._drawn = drawn[0]
        return lambda: drawn

    def _decode_slots(self, tokens: np.ndarray, positions: np.ndarray, sampling: SamplingMetadata) -> Sampled:
        n = len(tokens)
        with torch.inference_mode():
            self._longest = int(positions.max()) + 1
            self._reserve(n, live=n)
            self.model.rotary.reserve(self._longest)
        if self._routes is not None:
            self._routes.reserve(self._longest)
        jobs = [
            partial(self._decode_rows, part.start, tokens[part], positions[part], sampling.of(part))
            for part in self._split(n)
        ]
        wide = len(jobs) == 1 and not self._fixed_rows and wide_pays(n, self.model.weights_per_product)
        return concat_draws([self._lanes.wide(jobs[0])] if wide else self._lanes.map(jobs))

    def _split(self, n: int) -> list[slice]:
        """Return the row ranges of one step, one per useful lane, or of fixed size if bits depend on the size."""
        if self._fixed_rows:
            return [slice(lo, min(n, lo + FIXED_ROWS)) for lo in range(0, n, FIXED_ROWS)]
        useful = self._lanes.useful(n * self.model.live.params / self.model.shape.layers)
        parts = max(1, min(useful, n // MIN_LANE_ROWS))
        return [slice(n * i // parts, n * (i + 1) // parts) for i in range(parts)]

    @torch.inference_mode()
    def _decode_rows(self, lo: int, tokens: np.ndarray, positions: np.ndarray, sampling: SamplingMetadata) -> Sampled:
        """Decode one token in each of slots lo..lo+n-1, and sample the next one."""
        n, routes = len(tokens), None if self._routes is None else list[Tensor]()
        places, positions = positions, positions.clip(min=0)  # a row that ends writes KV that is not read
        if self._fixed_rows:  # idle rows write into free slots
            tokens, positions = (np.pad(column, (0, FIXED_ROWS - n)) for column in (tokens, positions))
        ids, at = self._on_device(tokens), self._on_device(positions)
        sets = self._sets.grouped(self._row_sets[lo : lo + n], whole=self._fixed_rows)
        if self.ops.slot_attention is not None:
            hidden = self.model.decode_exact(self.ops.slot_attention, self._cache, ids, at, lo, sets, routes)
        else:
            blocks = [(0, FIXED_ROWS, self.max_context_tokens)] if self._fixed_rows else read_blocks(positions)
            hidden = self.model.decode(self._cache, ids, at, lo, blocks, sets, routes)
        if self._routes is not None and routes is not None:
            self._routes.write(lo, places, routes)
        # never all logits of a large vocabulary at once
        block = max(MIN_LANE_ROWS, self._facts.sampled_logits // self.vocab_size)
        drawn = []
        for lo in range(0, n, block):
            logits = self.model.live.logits(hidden[lo : lo + block])[: n - lo]
            drawn.append(self._sample(logits, sampling.of(slice(lo, lo + block))))
        return concat_draws(drawn)

    def _sample(self, logits: Tensor, sampling: SamplingMetadata) -> Sampled:
        if sampling.banned is not None and self._banned is not None:
            close_banned(logits, self._on_device(sampling.banned), self._banned)
        separately = self._deterministic and self._device.type == "cuda"
        return split_draws(draw_rows(logits, sampling, self.ops.sample, separately=separately))

    def move(self, sources: np.ndarray, holes: np.ndarray, kept: int, tokens: int) -> None:
        self._needs[holes], self._row_sets[holes] = self._needs[sources], self._row_sets[sources]
        if self._routes is not None:
            self._routes.move(sources, holes)
        if self._paged is not None:
            return self._paged.cache.move(sources, holes, kept)
        with torch.inference_mode():
            self._cache.move(sources, holes, tokens)

    def routes_of(self, row: int, tokens: int) -> np.ndarray | None:
        return None if self._routes is None else self._routes.of(row, tokens)

    def _reserve(self, rows: int, live: int) -> None:
        if self._fixed_rows:
            self._cache.reserve(round_up(rows, FIXED_ROWS), self.max_context_tokens, live)
        else:
            self._cache.reserve(rows, self._longest, live, self._ahead)

    @torch.inference_mode()
    def score(
        self,
        ids: np.ndarray,
        temperature: float,
        top: int = 0,
        parameters: str = POLICY_SET.id,
        images: RequestImages | None = None,
    ) -> Scores:
        self._use_noise(False)
        given, parts, at = self._on_device(ids), [], 0
        for hidden in self._prompts.hidden_states(given[:-1], parameters, images):
            for block in hidden.split(self._facts.scored_tokens):
                at += len(block)
                logits = self.model.live.logits(block)  # [t, V]
                parts.append(score_logits(logits, given[at - len(block) + 1 : at + 1], temperature, top))
        return scores_of(parts)

    def _on_device(self, column: np.ndarray) -> Tensor:
        return to_device(column, self._device)
