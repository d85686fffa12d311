"""The computation of prompts, once for all requests with the same one: stored prompts, prompts in progress, and the
passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from verl.accel.cpu.lanes import Lanes, wide_pays
from verl.accel.devices import DeviceFacts
from verl.accel.transfer import to_device
from verl.rollout.embedded.features import EncodedImages, SeenImages
from verl.rollout.embedded.images import RequestImages
from verl.rollout.embedded.requests import ActiveRequest, PromptKey
from verl.rollout.native.architecture import Shape
from verl.rollout.native.delta import States
from verl.rollout.native.kv import Prefix, PrefixStore
from verl.rollout.native.model import Chunk, Model
from verl.rollout.native.options import Options
from verl.rollout.native.projections import weights_of_layer
from verl.rollout.native.routes import RowRoutes
from verl.rollout.native.sets import LiveSets

SHORT_PROMPT = 256  # tokens up to which reading the KV row by row costs less than blocks of it, with padding and copies
MIN_WIDTH = 32  # tokens; all shorter prompts are one batch, however much of it is padding
EVEN_SHARES = 1.25  # largest over mean share of tokens, up to which separate lanes are faster than all cores together


@dataclass(slots=True, eq=False)
class Job:
    """A prompt in progress, perhaps in several passes."""

    key: PromptKey
    ids: np.ndarray
    """The tokens [P]."""
    kv: Tensor
    """The KV [layers, 2, K, P, D], of which the first `done` tokens are computed."""
    done: int
    cached: int
    """The tokens that are not computed for the next request with this prompt: a stored prefix for the first request,
    all of them for others."""
    keep: bool
    """True if the prompt is put into the prefix store."""
    seen: SeenImages | None
    """Its images."""
    states: States | None
    """The states after the first `done` tokens."""
    routes: np.ndarray | None
    """The experts [P, layers, k] of the first `done` tokens, if they are recorded."""
    entry: Prefix | None = None
    """The computed prompt; None until the last pass."""

    def part(self, tokens: int) -> SeenImages | None:
        """Return the images of the next tokens."""
        return None if self.seen is None else self.seen.part(self.done, self.done + tokens)

    def add(self, kv: Tensor, hidden: Tensor, routes: np.ndarray | None = None) -> None:
        """Add the KV [layers, 2, K, t, D] of the next t tokens. hidden: the final state [hidden] of the last of them ·
        routes: their experts [t, layers, k], if they are recorded"""
        done, self.done = self.done, self.done + kv.shape[3]
        self.kv[:, :, :, done : self.done] = kv
        if self.routes is not None and routes is not None:
            self.routes[done : self.done] = routes
        if self.done == len(self.ids):
            self.entry = Prefix(self.key, self.ids, self.kv, hidden.clone(), self.states, self.routes)


Part = tuple[Job, int]
"""A prompt and the number of its next tokens that are computed at once."""
PromptSizes = tuple[Sequence[int], Sequence[int]]
"""The tokens to which the prompts of a step are padded, beside rows and without rows."""


def prompt_sizes(facts: DeviceFacts, shape: Shape) -> PromptSizes:
    """Return the sizes of prompts for a model: without rows those that a device computes in the time in which the host
    launches a pass."""
    idle = [n for n in facts.idle_tokens if n * weights_of_layer(shape) <= facts.launch_products]
    return facts.mixed_tokens, tuple(idle)


class Prefiller:
    """Computes the prompts of waiting requests, at most `max_prefill_tokens` per pass, and stores them for later
    requests."""

    def __init__(
        self,
        model: Model,
        sets: LiveSets,
        lanes: Lanes,
        dtype: torch.dtype,
        images: EncodedImages | None,
        routes: RowRoutes | None,
        options: Options,
        deterministic: bool,
    ) -> None:
        self._model, self._sets, self._lanes, self._dtype, self._images = model, sets, lanes, dtype, images
        self._routes = routes
        self._max_prefill_tokens, self._deterministic = options.max_prefill_tokens, deterministic
        self.store = PrefixStore(options.prefix_cache_tokens)
        self._jobs: dict[PromptKey, Job] = {}
        self.counts = {"prefill_tokens": 0, "reused_tokens": 0}

    def clear(self) -> None:
        self.store.clear()
        self._jobs.clear()
        if self._images is not None:
            self._images.clear()

    def forget(self, name: str) -> None:
        """Drop the prompts of a parameter set, computed or in progress."""
        self.store.forget(name)
        self._jobs = {key: job for key, job in self._jobs.items() if key[0] != name}

    def want(self, requests: Sequence[ActiveRequest], keys: Sequence[PromptKey]) -> None:
        """Make the prompts of these requests the ones that are computed. Prompts that no request waits for are
        dropped."""
        jobs: dict[PromptKey, Job] = {}
        for request, key in zip(requests, keys):
            if key not in jobs and (job := self._jobs.get(key)):
                jobs[key] = job
            elif key not in jobs and self.store.get(key) is None:
                jobs[key] = self._start(request, key)
        self._jobs = jobs

    def take(self, key: PromptKey) -> tuple[Prefix, int] | None:
        """Return the computed prompt and how many of its tokens were not computed for this request, or None if it is
        not ready."""
        if job := self._jobs.get(key):
            if job.entry is None:
                return None
            cached, job.cached = job.cached, len(job.ids)
            return job.entry, cached
        entry = self.store.get(key)
        return None if entry is None else (entry, len(entry.ids))

    def hidden_states(self, ids: Tensor, name: str, images: RequestImages | None) -> Iterator[Tensor]:
        """Yield the final hidden states of the sequence ids [t] under a parameter set, `max_prefill_tokens` tokens at a
        time. images: those of the whole sequence."""
        kv, seen, states = self._empty(0), self._seen(images, len(ids)), self._no_states()
        for chunk in ids.split(self._max_prefill_tokens):
            sets, done = self._sets.grouped(np.full(len(chunk), self._sets.number(name))), kv.shape[3]
            mine = Chunk(chunk, kv, None if seen is None else seen.part(done, done + len(chunk)), states)
            new, hidden = self._lanes.wide(partial(self._model.prefill, [mine], sets))
            kv = torch.cat([kv, new], dim=3)
            yield hidden

    def _seen(self, images: RequestImages | None, tokens: int) -> SeenImages | None:
        """Return the images of a prompt with the text after it, encoded."""
        if images is None:
            return None
        assert self._images is not None, "an engine without a vision tower refuses images"
        return self._lanes.wide(partial(self._images.seen, images, tokens))

    def _empty(self, tokens: int) -> Tensor:
        s = self._model.shape
        return torch.empty(s.kv_layers, 2, s.kv_heads, tokens, s.head_dim, dtype=self._dtype, device=self._model.device)

    def _no_states(self) -> States | None:
        """Return the states before a first token; None if the model has none."""
        s = self._model.shape
        return None if s.delta is None else States.empty(s, 1, self._dtype, self._model.device)

    def _start(self, request: ActiveRequest, key: PromptKey) -> Job:
        """Return the job of a prompt. It begins after the longest stored prefix, if results may depend on the cache."""
        ids = request.context()
        kv = self._empty(len(ids))
        # continuing a stored prefix rounds differently than computing the whole
        past = None if self._deterministic else self.store.longest(key, ids)
        done, states = 0, self._no_states()
        routes = None if self._routes is None else self._routes.empty(len(ids))
        if past is not None:
            done = past[0].shape[3]
            kv[:, :, :, :done] = past[0]
            states = None if past[1] is None else past[1].copy()
            if routes is not None and past[2] is not None:
                routes[:done] = past[2]
        self.counts["reused_tokens"] += done
        seen = self._seen(request.images, len(ids))
        return Job(key, ids, kv, done, cached=done, keep=not len(request.ids), seen=seen, states=states, routes=routes)

    def advance(self) -> None:
        """Run one pass, of at most `max_prefill_tokens` tokens."""
        batch = self.next_parts()
        for parts in [[part] for part in batch] if self._deterministic else [batch] if batch else []:
            self._compute(parts)

    def next_parts(self, most: int | None = None) -> list[Part]:
        """Return the next tokens of unfinished prompts, in order of arrival: those of a pass, at most `most`."""
        batch: list[Part] = []
        budget = self._max_prefill_tokens if most is None else min(most, self._max_prefill_tokens)
        for job in self._jobs.values():
            if job.entry is not None:
                continue
            # alone and cut at multiples of its own start: its bits then depend on nothing else
            tokens = min(len(job.ids) - job.done, self._max_prefill_tokens if self._deterministic else budget)
            if not budget or tokens > budget:
                break
            batch.append((job, tokens))
            budget -= tokens
        return batch

    def record(self, parts: Sequence[Part]) -> None:
        """Count the tokens of parts that were computed, and store the prompts that are complete."""
        for job, tokens in parts:
            self.counts["prefill_tokens"] += tokens
            if job.entry is not None and job.keep:
                self.store.put(job.entry)

    def _compute(self, part: list[Part]) -> None:
        """Compute the next tokens of these jobs (job, number of tokens), by separate lanes if that is faster."""
        model = self._model
        total = sum(n for _, n in part)
        model.rotary.reserve(max(job.done + n for job, n in part))
        lanes = min(self._lanes.useful(total * model.live.params / model.shape.layers), len(part))
        shares = [sorted(part, key=lambda item: -item[1])[lane::lanes] for lane in range(lanes)]
        if lanes > 1 and max(sum(n for _, n in share) for share in shares) * lanes <= EVEN_SHARES * total:
            self._lanes.map([partial(self._prefill, share) for share in shares])
        elif wide_pays(total, model.weights_per_product):
            self._lanes.wide(partial(self._prefill, part))
        else:
            self._prefill(part)
        self.record(part)

    @torch.inference_mode()  # the mode is per thread
    def _prefill(self, part: list[Part]) -> None:
        """Compute short prompts in groups of similar length, so that little of their KV is padding, and long prompts
        (width 0) separately."""
        model = self._model
        joined = model.live.joined

        def width(item: Part) -> int:
            end = item[0].done + item[1]
            return (
                0
                if joined is None or end > SHORT_PROMPT or item[0].seen is not None
                else max(MIN_WIDTH, 1 << (end - 1).bit_length())
            )

        for short, same in groupby(sorted(part, key=width), key=width):
            items = list(same)
            ids = [to_device(job.ids[job.done : job.done + n], model.device) for job, n in items]
            chunks = [
                Chunk(new, job.kv[:, :, :, : job.done], job.part(n), job.states) for new, (job, n) in zip(ids, items)
            ]
            numbers = [np.full(n, self._sets.number(job.key[0])) for job, n in items]
            sets = self._sets.grouped(np.concatenate(numbers))
            routes = None
            if joined is not None and short:
                kv, hidden = model.prefill_joined(joined, chunks, sets)
            else:
                found = None if self._routes is None else list[Tensor]()
                kv, hidden = model.prefill(chunks, sets, found)
                routes = self._routes.joined(found) if self._routes is not None and found is not None else None
            start = 0
            for job, tokens in items:
                start += tokens
                mine = slice(start - tokens, start)
                job.add(kv[:, :, :, mine], hidden[start - 1], None if routes is None else routes[mine])
