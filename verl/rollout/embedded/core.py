"""The synchronous half of an engine: who waits, who is resident, what one step does. Knows no asyncio and no model: the
native and the HF engine differ in the `Runner` underneath (weights, KV, forward pass) alone."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from verl.rollout.base import Completion, DecodeFn, Scores, WeightReader
from verl.rollout.embedded.requests import REASONS, News, Request, RunningRequests
from verl.rollout.embedded.sampler import SamplingMetadata

Finished = tuple[Request, Completion]
Sampled = tuple[np.ndarray, np.ndarray]  # ids [n] int64, log-probs [n] float32


@dataclass(frozen=True, slots=True)
class Admission:
    """The first `len(cached)` waiting requests, at least one, are resident; `sample` draws the next token of each."""

    cached: Sequence[int]  # prompt tokens that were not computed for the request
    sample: Callable[[SamplingMetadata], Sampled]


class Runner(Protocol):
    """Row i of the runner is row i of the core. All methods but `prepare` run on the engine's one thread.

    ready: weights are loaded · prepare: read new weights into memory of their own, beside the live ones and in any
    thread -> what makes them live; that drops prefixes, and keeps the KV of live rows · load: the same in the memory of
    the live ones, which are gone with the first tensor: it is ready again when all have come · admit: make some
    requests from the front of `waiting` resident in rows `resident`.., None if none is ready · decode: feed one token
    to each of n rows and draw the next ones · move: rows `sources` become rows `holes`, then rows from `kept` on are
    free.
    """

    max_rows: int
    max_context_tokens: int
    vocab_size: int

    @property
    def ready(self) -> bool: ...
    def enter_thread(self) -> None: ...
    def prepare(self, source: WeightReader) -> Callable[[], None]: ...
    def load(self, source: WeightReader) -> None: ...
    def admit(self, waiting: Sequence[Request], resident: int) -> Admission | None: ...
    def decode(self, tokens: np.ndarray, positions: np.ndarray, sampling: SamplingMetadata) -> Sampled: ...
    def move(self, sources: np.ndarray, holes: np.ndarray, kept: int, tokens: int) -> None: ...
    def score(self, ids: np.ndarray, temperature: float, top: int = 0) -> Scores: ...
    def drop_kv(self) -> int: ...
    def drop_weights(self) -> int: ...
    def stats(self) -> dict[str, int]: ...
    def close(self) -> None: ...


class EngineCore:
    def __init__(self, runner: Runner, eos_token_ids: Sequence[int], decode: DecodeFn | None) -> None:
        self.runner = runner
        self.version = -1
        self.waiting: deque[Request] = deque()
        self.running = RunningRequests(runner.max_rows, eos_token_ids, decode)
        self._submitted = self._steps = self._sampled = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or self.running.n > 0

    def add(self, request: Request) -> None:
        request.order = self._submitted
        self._submitted += 1
        self.waiting.append(request)

    def requests(self) -> list[Request]:
        return [*self.waiting, *self.running.requests]

    def run(
        self, deliver: Callable[[list[Finished], list[News]], object], every_s: float, interrupted: Callable[[], bool]
    ) -> list[Finished]:
        """Steps until work ends or somebody wants the engine, at least one; `deliver` is given what has finished and
        what followed requests have drawn, about `every_s`, and the rest of what has finished is returned. Where a run
        is interrupted changes no result."""
        done: list[Finished] = []
        since = time.perf_counter()
        while True:
            done += self.step()
            if not self.busy or interrupted():
                return done
            if (done or self.running.followed) and time.perf_counter() - since >= every_s:
                deliver(done, self.running.news())
                done, since = [], time.perf_counter()

    def step(self) -> list[Finished]:
        """One bounded prefill pass for who can be admitted, then one token for every resident row."""
        done: list[Finished] = []
        running = self.running
        self._steps += 1
        if self.waiting and running.n < self.runner.max_rows:
            admission = self.runner.admit(self.waiting, running.n)
            if admission is not None:
                done += self._admit(admission)
        if n := running.n:
            drawn = self.runner.decode(running.last[:n].copy(), running.positions(), running.sampling(0, n))
            done += self._append(0, *drawn)
        return done

    def abort(self, requests: set[Request] | None) -> list[Finished]:
        """Stop these requests (None: all) and return them with the tokens they have."""
        stopped = set(self.requests()) if requests is None else requests
        done = [(request, request.completion("abort")) for request in self.waiting if request in stopped]
        self.waiting = deque(request for request in self.waiting if request not in stopped)
        rows = [row for row, request in enumerate(self.running.requests) if request in stopped]
        done += [(request, request.completion("abort")) for request in map(self.running.save, rows)]
        self._remove(np.asarray(rows, np.int64))
        return done

    def prepare(self, source: WeightReader) -> Callable[[], int]:
        """Read new weights, in any thread, while steps go on -> what makes them live: tokens sampled after that carry
        the new version; live rows keep their KV (stale by design)."""
        version = source.version
        switch = self.runner.prepare(source)

        def live() -> int:
            switch()
            return self._now(version)

        return live

    def load(self, source: WeightReader) -> int:
        """The same while nothing runs, with no memory but that of the live ones. If it fails there are none: nothing is
        drawn before all have come."""
        version = source.version
        self.runner.load(source)
        return self._now(version)

    def _now(self, version: int) -> int:
        self.version = version
        for row, request in enumerate(self.running.requests):
            request.start_span(version, int(self.running.count[row]))
        return version

    def sleep(self, level: int) -> int:
        """Free KV (level 1) and weights (level 2). Live requests go back to waiting with the tokens they have."""
        preempted = [self.running.save(row) for row in range(self.running.n)]
        self.running.remove(np.arange(self.running.n))
        self.waiting.extendleft(sorted(preempted, key=lambda request: -request.order))
        freed = self.runner.drop_kv()
        return freed + self.runner.drop_weights() if level >= 2 else freed

    def stats(self) -> dict[str, int]:
        counts = {"steps": self._steps, "sampled_tokens": self._sampled}
        return {**counts, "resident": self.running.n, "waiting": len(self.waiting), **self.runner.stats()}

    def _admit(self, admission: Admission) -> list[Finished]:
        first = self.running.n
        for cached in admission.cached:
            request = self.waiting.popleft()
            if not len(request.ids):  # a preempted request keeps what its first admission found
                request.cached_tokens = cached
            request.start_span(self.version, len(request.ids))
            self.running.add(request, self.runner.max_context_tokens)
        return self._append(first, *admission.sample(self.running.sampling(first, self.running.n)))

    def _append(self, first: int, ids: np.ndarray, logprobs: np.ndarray) -> list[Finished]:
        """One more token for the rows from `first` on; those that end with it are removed and returned."""
        running = self.running
        self._sampled += len(ids)
        if not np.isfinite(logprobs).all():
            bad = [running.requests[first + i].request_id for i in np.flatnonzero(~np.isfinite(logprobs))]
            raise FloatingPointError(f"version {self.version} gave non-finite logits for requests {bad[:8]}")
        code, stops = running.append(first, first + len(ids), ids, logprobs)
        ended = first + np.flatnonzero(code)
        done: list[Finished] = []
        for row in ended.tolist():
            reason = REASONS[code[row - first]]
            assert reason is not None
            request = running.save(row)
            done.append((request, request.completion(reason, stops.get(row) if reason == "stop" else None)))
        self._remove(ended)
        return done

    def _remove(self, rows: np.ndarray) -> None:
        if len(rows):
            sources, holes = self.running.remove(rows)
            tokens = int(self.running.positions().max()) + 1 if self.running.n else 0
            self.runner.move(sources, holes, self.running.n, tokens)


def check_context(max_context_tokens: int, longest: int | None) -> None:
    """`longest`: the model's own limit, if it has one."""
    if longest is not None and max_context_tokens > longest:
        raise ValueError(
            f"max_context_tokens={max_context_tokens} exceeds the model's max_position_embeddings={longest}: "
            "shorten prompt or response, or use a model with a longer context"
        )
