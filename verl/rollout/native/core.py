"""The synchronous half of an engine: who waits, who is resident, what one step does. Knows no asyncio and no model.

A `Runner` is the mechanism underneath (weights, KV, forward pass); the native and the HF engine differ in that alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from verl.rollout.base import Completion, DecodeFn, WeightSource
from verl.rollout.native.draft import Drafter
from verl.rollout.native.request import REASONS, Request, Rows
from verl.rollout.native.sampler import Draw

Done = tuple[Request, Completion]
FirstTokens = Callable[[Draw], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True, slots=True)
class Admission:
    """The first `len(cached)` waiting requests, at least one, are resident; `sample` draws the next token of each."""

    cached: Sequence[int]  # prompt tokens that were not computed for the request
    sample: FirstTokens


class Runner(Protocol):
    """Row i of the runner is row i of the core. All methods run on the engine's one thread."""

    max_rows: int
    max_context_tokens: int
    vocab_size: int

    @property
    def ready(self) -> bool:
        """Weights are loaded."""
        ...

    def enter_thread(self) -> None: ...
    def load(self, source: WeightSource) -> None:
        """Replace the weights, or raise and leave the old ones live. Drops prefixes, keeps the KV of live rows."""
        ...

    def admit(self, waiting: Sequence[Request], resident: int) -> Admission | None:
        """Make some requests from the front of `waiting` resident in rows `resident`.. ; None if none is ready."""
        ...

    def decode(self, tokens: np.ndarray, positions: np.ndarray, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        """Feed one token to each of n rows -> next ids [n], log-probs [n]."""
        ...

    def move(self, sources: np.ndarray, holes: np.ndarray, kept: int, tokens: int) -> None:
        """Rows `sources` become rows `holes`; then rows from `kept` on are free."""
        ...

    def score(self, ids: np.ndarray, temperature: float) -> np.ndarray: ...
    def drop_kv(self) -> int: ...
    def drop_weights(self) -> int: ...
    def stats(self) -> dict[str, int]: ...
    def close(self) -> None: ...


class Verifier(Protocol):
    """What a runner adds if it can take several tokens of a row in one step."""

    def spare_tokens(self, rows: int) -> int:
        """How many more tokens a step of so many rows can take for nearly no time."""
        ...

    def verify(
        self, rows: np.ndarray, tokens: np.ndarray, positions: np.ndarray, draw: Draw
    ) -> tuple[np.ndarray, np.ndarray]:
        """Feed each of `rows` [m] (ascending, repeated) several tokens at consecutive positions -> the id that is drawn
        after each of them [m], its log-prob [m]."""
        ...


class EngineCore:
    def __init__(
        self,
        runner: Runner,
        eos_token_ids: Sequence[int],
        decode: DecodeFn | None,
        speculation: tuple[Drafter, Verifier] | None = None,
    ) -> None:
        self.runner = runner
        self._speculation = speculation
        self.version = -1
        self.waiting: deque[Request] = deque()
        self.rows = Rows(runner.max_rows, eos_token_ids, decode)
        self._submitted = 0
        self._steps = 0
        self._sampled = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or self.rows.n > 0

    def add(self, request: Request) -> None:
        request.order = self._submitted
        self._submitted += 1
        self.waiting.append(request)

    def requests(self) -> list[Request]:
        return [*self.waiting, *self.rows.requests]

    def run(
        self, deliver: Callable[[list[Done]], object], every_s: float, interrupted: Callable[[], bool]
    ) -> list[Done]:
        """Steps until work ends or somebody wants the engine, at least one -> what has ended and was not delivered.

        `deliver` is given what has ended, about `every_s`. Where a run is interrupted changes no result.
        """
        done: list[Done] = []
        since = time.perf_counter()
        while True:
            done += self.step()
            if not self.busy or interrupted():
                return done
            if done and time.perf_counter() - since >= every_s:
                deliver(done)
                done, since = [], time.perf_counter()

    def step(self) -> list[Done]:
        """One bounded prefill pass for who can be admitted, then one token for every resident row."""
        done: list[Done] = []
        self._steps += 1
        if self.waiting and self.rows.n < self.runner.max_rows:
            admission = self.runner.admit(self.waiting, self.rows.n)
            if admission is not None:
                done += self._seat(admission)
        if n := self.rows.n:
            if self._speculation is not None:
                drafter, verifier = self._speculation
                guesses = drafter.propose(self.rows, verifier.spare_tokens(n))
                if guesses is not None:
                    return done + self._verify(guesses, drafter, verifier)
            ids, logprobs = self.runner.decode(self.rows.last[:n], self.rows.positions(), self.rows.draw(0, n))
            done += self._append(0, ids, logprobs)
        return done

    def abort(self, requests: set[Request] | None) -> list[Done]:
        """Stop these requests (None: all) and return them with the tokens they have."""
        gone = set(self.requests()) if requests is None else requests
        done = [(request, request.complete("abort")) for request in self.waiting if request in gone]
        self.waiting = deque(request for request in self.waiting if request not in gone)
        rows = [row for row, request in enumerate(self.rows.requests) if request in gone]
        done += [(request, request.complete("abort")) for request in map(self.rows.save, rows)]
        self._remove(np.asarray(rows, np.int64))
        return done

    def load(self, source: WeightSource) -> int:
        """Tokens sampled after this carry the new version; live rows keep their KV (stale by design)."""
        version = source.version
        self.runner.load(source)
        self.version = version
        for row, request in enumerate(self.rows.requests):
            request.mark(version, int(self.rows.count[row]))
        return version

    def sleep(self, level: int) -> int:
        """Free KV (level 1) and weights (level 2). Live requests go back to waiting with the tokens they have."""
        preempted = [self.rows.save(row) for row in range(self.rows.n)]
        self.rows.remove(np.arange(self.rows.n))
        if self._speculation is not None:
            self._speculation[0].moved(np.arange(0), np.arange(0), 0)
        self.waiting.extendleft(sorted(preempted, key=lambda request: -request.order))
        freed = self.runner.drop_kv()
        return freed + self.runner.drop_weights() if level >= 2 else freed

    def stats(self) -> dict[str, int]:
        return {
            "steps": self._steps,
            "sampled_tokens": self._sampled,
            "resident": self.rows.n,
            "waiting": len(self.waiting),
            **self.runner.stats(),
            **(self._speculation[0].stats() if self._speculation is not None else {}),
        }

    def _seat(self, admission: Admission) -> list[Done]:
        first = self.rows.n
        for cached in admission.cached:
            request = self.waiting.popleft()
            if not len(request.ids):  # a preempted request keeps what its first admission found
                request.cached_tokens = cached
            request.mark(self.version, len(request.ids))
            self.rows.add(request, self.runner.max_context_tokens)
        ids, logprobs = admission.sample(self.rows.draw(first, self.rows.n))
        return self._append(first, ids, logprobs)

    def _verify(self, guesses: list[np.ndarray], drafter: Drafter, verifier: Verifier) -> list[Done]:
        """One step in which a row is fed its last token and what may follow it; draws that differ end a row's step."""
        lengths = np.asarray([1 + len(guess) for guess in guesses])
        starts = np.cumsum(lengths) - lengths
        rows = np.repeat(np.arange(len(guesses)), lengths)
        ahead = np.arange(len(rows)) - starts[rows]
        fed = np.concatenate(
            [part for row, guess in enumerate(guesses) for part in (self.rows.last[row : row + 1], guess)]
        )
        ids, logprobs = verifier.verify(
            rows, fed, self.rows.positions()[rows] + ahead, self.rows.draw_ahead(rows, ahead)
        )
        code = np.zeros(len(guesses), np.int8)
        stops: dict[int, str] = {}
        for row, guess in enumerate(guesses):
            for at in range(starts[row], starts[row] + lengths[row]):
                one, stop = self._advance(row, ids[at : at + 1], logprobs[at : at + 1])
                code[row] = one[0]
                stops |= stop
                if code[row] or at + 1 == starts[row] + lengths[row] or ids[at] != fed[at + 1]:
                    drafter.learn(row, len(guess), int(at - starts[row]))
                    break
        return self._finish(0, code, stops)

    def _append(self, first: int, ids: np.ndarray, logprobs: np.ndarray) -> list[Done]:
        return self._finish(first, *self._advance(first, ids, logprobs))

    def _advance(self, first: int, ids: np.ndarray, logprobs: np.ndarray) -> tuple[np.ndarray, dict[int, str]]:
        """One more token for the rows from `first` on -> their codes, the stop strings of some."""
        self._sampled += len(ids)
        if not np.isfinite(logprobs).all():
            bad = [self.rows.requests[first + i].request_id for i in np.flatnonzero(~np.isfinite(logprobs))]
            raise FloatingPointError(f"version {self.version} gave non-finite logits for requests {bad[:8]}")
        return self.rows.advance(first, first + len(ids), ids, logprobs)

    def _finish(self, first: int, code: np.ndarray, stops: dict[int, str]) -> list[Done]:
        gone = first + np.flatnonzero(code)
        if not len(gone):
            return []
        done: list[Done] = []
        for row in gone.tolist():
            reason = REASONS[code[row - first]]
            assert reason is not None
            request = self.rows.save(row)
            if self._speculation is not None:
                self._speculation[0].keep(request.prompt_ids, request.ids)
            done.append((request, request.complete(reason, stops.get(row) if reason == "stop" else None)))
        self._remove(gone)
        return done

    def _remove(self, gone: np.ndarray) -> None:
        if len(gone):
            sources, holes = self.rows.remove(gone)
            tokens = int(self.rows.positions().max()) + 1 if self.rows.n else 0
            self.runner.move(sources, holes, self.rows.n, tokens)
            if self._speculation is not None:
                self._speculation[0].moved(sources, holes, self.rows.n)
