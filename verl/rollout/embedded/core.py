"""The synchronous half of an engine: the waiting and the resident requests, and the steps that sample tokens.

It uses no asyncio and no model. The native and the HF engine differ only in their `Runner` (weights, KV, forward pass).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict, runtime_checkable

import numpy as np
from torch import Tensor

from verl.errors import Refused
from verl.parameter_set import POLICY_SET, ParameterSet, check_base, set_of
from verl.rollout.base import Completion, DecodeFn, Scores, WeightReader, check_live
from verl.rollout.embedded.images import RequestImages
from verl.rollout.embedded.requests import REASONS, ActiveRequest, News, RunningRequests
from verl.rollout.embedded.sampler import SamplingMetadata
from verl.rollout.policy_reader import PolicyReader
from verl.wire import WireFormat

Finished = tuple[ActiveRequest, Completion]
Sampled = tuple[np.ndarray, np.ndarray]  # ids [n] int64, log-probs [n] float32


@dataclass(frozen=True, slots=True)
class Admitted:
    """The first waiting requests that have become resident, one per element of `cached`, at least one."""

    cached: Sequence[int]
    """Per request: the prompt tokens that were not computed for it."""
    sample: Callable[[SamplingMetadata], Sampled]
    """Samples the next token of each of them."""


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The rows of a decode step: all resident ones, in their order."""

    tokens: np.ndarray
    """The last token of each row [n], where `drawn_by` does not name its draw."""
    positions: np.ndarray
    """The context position of that token [n]; -1 for a row that ends with it: the results of this row are not used."""
    drawn_by: np.ndarray | None
    """The row of the previous step that samples this token [n]; -1 if the token is in `tokens`. None: all are in
    `tokens`."""
    sampling: SamplingMetadata
    """The settings with which the next token is sampled."""


@dataclass(slots=True)
class Launched:
    """A decode step with tokens that are not read yet."""

    rows: np.ndarray
    """The place where the request of each of its rows is resident now [n]; -1: its token is dropped, since the request
    has ended."""
    read: Callable[[], Sampled]
    """Waits for the step."""

    def moved(self, resident: int, removed: np.ndarray, sources: np.ndarray, holes: np.ndarray) -> int:
        """Update `rows` after some of the `resident` rows were removed and others moved into the holes. Return the
        number of tokens of the step that are dropped."""
        places = np.arange(resident)
        places[removed] = -1
        places[sources] = holes
        before, self.rows = self.rows, np.where(self.rows < 0, -1, places[self.rows])
        return int(((before >= 0) & (self.rows < 0)).sum())


@runtime_checkable
class ReadsFormat(Protocol):
    """A `Runner` that reads weights in a format of its own. Any other runner gets them in the trainer's own dtypes."""

    @property
    def weight_format(self) -> WireFormat:
        """The format in which `load` and `prepare` read weights."""
        ...


@runtime_checkable
class TakesSets(Protocol):
    """A `Runner` that computes with LoRA sets on top of its weights."""

    lora_rank: int
    """The highest rank of a set that it takes."""
    lora_experts: bool
    """A set may have factors of experts."""

    @property
    def lora_whole(self) -> bool:
        """True if the policy may have weights that are trained whole beside its factors."""
        ...

    def overwrite(self, weights: Mapping[str, Tensor]) -> None:
        """Write these weights of the full set over the live ones, by their Hugging Face names, and drop all prefixes.
        If it fails the runner is not ready."""
        ...

    def add_set(self, parameters: ParameterSet, tensors: Mapping[str, Tensor]) -> None:
        """Compute with these factors for requests of the set from now on, in place of an earlier version of it. The
        tensors are valid during this call: they may be the trainer's own."""
        ...

    def drop_set(self, name: str) -> None:
        """Forget the factors of a set."""
        ...


class SetAbilities(TypedDict):
    """The capabilities of a runner that are about LoRA sets."""

    lora_rank: int
    lora_experts: bool
    lora_whole: bool


def set_abilities(runner: object) -> SetAbilities:
    """Return the abilities of a runner with LoRA sets; one that takes none has rank 0."""
    if isinstance(runner, TakesSets):
        rank, experts, whole = runner.lora_rank, runner.lora_experts, runner.lora_whole
        return {"lora_rank": rank, "lora_experts": experts, "lora_whole": whole}
    return {"lora_rank": 0, "lora_experts": False, "lora_whole": False}


@runtime_checkable
class Explores(Protocol):
    """A `Runner` that may have exploration noise."""

    @property
    def noise_sigma(self) -> float | None:
        """The standard deviation of the noise on the live version; None for a runner without noise."""
        ...

    def start_version(self, version: int) -> None:
        """Draw the noise of this version, which has just become live, for requests that explore."""
        ...


@runtime_checkable
class RecordsRoutes(Protocol):
    """A `Runner` that may record the experts of its tokens."""

    def routes_of(self, row: int, tokens: int) -> np.ndarray | None:
        """Return the experts [tokens, layers, k] of the first tokens of a row, `NO_ROUTE` for a token that was not
        computed; None if they are not recorded."""
        ...


class Runner(Protocol):
    """The weights, KV and forward pass of an embedded engine.

    Row i of the runner is row i of the core. All methods except `prepare` run on the engine's one thread.
    """

    max_rows: int
    max_context_tokens: int
    vocab_size: int
    looks_ahead: bool
    """True if the next step is launched before the tokens of the last one are read, so that the device does not wait
    for the host."""

    @property
    def ready(self) -> bool:
        """True if weights are loaded."""
        ...

    def enter_thread(self) -> None:
        """Prepare the calling thread for this runner."""
        ...

    def prepare(self, source: WeightReader) -> Callable[[], None]:
        """Read new weights into new memory, in any thread, and return a function that makes them live. That function
        drops prefixes and keeps the KV of live rows."""
        ...

    def load(self, source: WeightReader) -> None:
        """Read new weights over the live ones. The runner is not ready until all tensors are read."""
        ...

    def admit(self, waiting: Sequence[ActiveRequest], resident: int) -> Admitted | None:
        """Make some of the first waiting requests resident in rows `resident`.., or return None if none is ready."""
        ...

    def decode(self, rows: DecodeRows) -> Callable[[], Sampled]:
        """Compute one token of each of the first n rows, and sample the next ones. Return a function that waits for
        them."""
        ...

    def move(self, sources: np.ndarray, holes: np.ndarray, kept: int, tokens: int) -> None:
        """Move each row of `sources` to the row of `holes` at the same place. Then the rows from `kept` on are free. No
        remaining row has more than `tokens` tokens of KV."""
        ...

    def score(
        self,
        ids: np.ndarray,
        temperature: float,
        top: int = 0,
        parameters: str = POLICY_SET.id,
        images: RequestImages | None = None,
    ) -> Scores:
        """Return the scores of a sequence with these images under a parameter set, with the `top` most likely ids."""
        ...

    def drop_kv(self) -> int:
        """Free KV and prefixes, and return the number of bytes."""
        ...

    def drop_weights(self) -> int:
        """Free the weights, and return the number of bytes."""
        ...

    def stats(self) -> dict[str, int]:
        """Return counters and sizes by name."""
        ...

    def close(self) -> None: ...


class EngineCore:
    """The requests of an engine and its runner. Apart from `prepare`, only one of its methods runs at a time."""

    def __init__(self, runner: Runner, eos_token_ids: Sequence[int], decode: DecodeFn | None) -> None:
        self.runner = runner
        self.version = -1
        self.identity = ""  # of the full set; "": unknown
        self._policy_has_factors = False
        self.sets: dict[str, int] = {}  # the versions of the LoRA sets on top of it, by id
        self.waiting: deque[ActiveRequest] = deque()
        self.running = RunningRequests(runner.max_rows, eos_token_ids, decode)
        self._submitted = self._steps = self._sampled = self._surplus = 0
        self._launched: Launched | None = None

    @property
    def busy(self) -> bool:
        """True if requests are waiting or resident."""
        return bool(self.waiting) or self.running.n > 0

    def add(self, request: ActiveRequest) -> None:
        """Add a request to the waiting ones."""
        request.order = self._submitted
        self._submitted += 1
        self.waiting.append(request)

    def requests(self) -> list[ActiveRequest]:
        """Return all requests, the waiting ones first."""
        return [*self.waiting, *self.running.requests]

    def run(
        self, deliver: Callable[[list[Finished], list[News]], object], every_s: float, interrupted: Callable[[], bool]
    ) -> list[Finished]:
        """Run steps, at least one, until the work ends or the run is interrupted. About every `every_s` seconds
        `deliver` is called with the finished requests and the new tokens of streamed ones. The remaining finished
        requests are returned. The point of an interruption changes no result."""
        done: list[Finished] = []
        since = time.perf_counter()
        while True:
            done += self.step()
            if not self.busy or interrupted():
                return done + self.settle()
            if (done or self.running.followed) and time.perf_counter() - since >= every_s:
                deliver(done, self.running.news())
                done, since = [], time.perf_counter()

    def step(self) -> list[Finished]:
        """Run one bounded prefill pass for requests that can be admitted, then launch a token for every row. Read it at
        once, or if the runner looks ahead, read that of the step before."""
        done: list[Finished] = []
        running = self.running
        self._steps += 1
        if self.waiting and running.n < self.runner.max_rows:
            admission = self.runner.admit(self.waiting, running.n)
            if admission is not None:
                done += self._admit(admission)
        before, self._launched = self._launched, self._launch()
        if before is not None:
            done += self._read(before)
        if not (self.runner.looks_ahead and running.n):
            done += self.settle()
        return done

    def settle(self) -> list[Finished]:
        """Read the launched step, if there is one, and return the requests that end with it. Between steps, weights and
        requests may be changed only after this call."""
        launched, self._launched = self._launched, None
        return self._read(launched) if launched is not None else []

    def _launch(self) -> Launched | None:
        """Launch a decode step of all resident rows. If the last token of a row is not on the host yet, the row takes
        it on the device from the step that is launched already, unless the row is known to end with that token. Return
        None if there is nothing to compute."""
        running, before = self.running, self._launched
        n, positions, drawn_by = running.n, running.positions(), None
        ahead: np.ndarray | int = 0
        if not n:
            return None
        if before is not None:
            drawn_by = np.full(n, -1)
            live = np.flatnonzero(before.rows >= 0)
            drawn_by[before.rows[live]] = live
            ahead = drawn_by >= 0
            positions += ahead
            positions[running.count[:n] + ahead >= running.limit[:n]] = -1
            if positions.max() < 0:
                return None
        sampling = running.sampling(0, n, ahead)
        read = self.runner.decode(DecodeRows(running.last[:n].copy(), positions, drawn_by, sampling))
        return Launched(np.where(positions < 0, -1, np.arange(n)), read)

    def _read(self, launched: Launched) -> list[Finished]:
        """Append the tokens of a launched step to the requests that are still resident, and return those that end."""
        ids, logprobs = launched.read()
        order = np.argsort(launched.rows)[int((launched.rows < 0).sum()) :]
        return self._append(0, ids[order], logprobs[order]) if len(order) else []

    def abort(self, requests: set[ActiveRequest] | None) -> list[Finished]:
        """Stop these requests (None: all) and return them with their tokens."""
        assert self._launched is None, "a step is settled first"
        stopped = set(self.requests()) if requests is None else requests
        done = [(request, request.completion("abort")) for request in self.waiting if request in stopped]
        self.waiting = deque(request for request in self.waiting if request not in stopped)
        rows = [row for row, request in enumerate(self.running.requests) if request in stopped]
        done += [(request, request.completion("abort")) for request in map(self._saved, rows)]
        self._remove(np.asarray(rows, np.int64))
        return done

    def prepare(self, source: WeightReader) -> Callable[[], int]:
        """Read new weights, in any thread, while steps are run, and return a function that makes them live. Tokens
        sampled after that have the new version. Live rows keep their KV (stale by design)."""
        policy = self._policy(source)
        switch = self.runner.prepare(policy) if policy.has_base else None
        if switch is None:
            policy.read_factors()

        def live() -> int:
            if switch is not None:
                switch()
            return self._now(policy)

        return live

    def load(self, source: WeightReader) -> int:
        """Read new weights over the live ones while no step is run. If it fails the engine has no weights: nothing is
        sampled before a complete load."""
        policy = self._policy(source)
        if policy.has_base:
            self.runner.load(policy)
        else:
            policy.read_factors()
        return self._now(policy)

    def _policy(self, source: WeightReader) -> PolicyReader:
        """Return a reader of the policy. Raise ValueError for factors without their base, if it is not the present
        one."""
        policy = PolicyReader(source)
        if not policy.parameters.whole:
            held = policy.identity or self.identity
            check_base(policy.parameters, held, **set_abilities(self.runner))
        return policy

    def _now(self, policy: PolicyReader) -> int:
        """Make the factors of the policy live after its base, and return the version. LoRA sets of another base are
        dropped."""
        assert self._launched is None, "a step is settled first"
        if policy.has_base:
            assert not self.in_sets(), "requests of LoRA sets finish before their base changes"
            for name in list(self.sets):
                self.drop_set(name)
            self.identity = policy.identity
        if not policy.parameters.whole:
            assert isinstance(self.runner, TakesSets)
            if policy.whole:
                self.runner.overwrite(policy.whole)
            self.runner.add_set(policy.parameters, policy.factors)
        elif self._policy_has_factors:
            assert isinstance(self.runner, TakesSets)
            self.runner.drop_set(POLICY_SET.id)
        self._policy_has_factors = not policy.parameters.whole
        self.version = policy.version
        if isinstance(self.runner, Explores):
            self.runner.start_version(policy.version)
        self._start_spans(POLICY_SET.id, policy.version)
        return policy.version

    def load_set(self, source: WeightReader) -> int:
        """Read a version of a LoRA set and make it live. Later tokens of its requests have the new version."""
        parameters, runner = set_of(source), self.runner
        check_base(parameters, self.identity, **set_abilities(runner))
        assert isinstance(runner, TakesSets)
        tensors = {name: t.detach().clone() for name, t in source.tensors() if isinstance(t, Tensor)}
        runner.add_set(parameters, tensors)
        self.sets[parameters.id] = source.version
        self._start_spans(parameters.id, source.version)
        return source.version

    def drop_set(self, name: str) -> None:
        if self.sets.pop(name, None) is not None:
            assert isinstance(self.runner, TakesSets)
            self.runner.drop_set(name)

    def check_set(self, what: str, name: str) -> None:
        """Raise ValueError for a LoRA set that is not live."""
        check_live(what, name, self.sets)

    def in_sets(self, name: str | None = None) -> bool:
        """Return True if requests of this LoRA set (None: of any) are waiting or resident."""
        found = {request.given.parameters for request in self.requests()} - {POLICY_SET.id}
        return bool(found) if name is None else name in found

    def _start_spans(self, name: str, version: int) -> None:
        """Start a new span of tokens in the resident requests of a parameter set."""
        for row, request in enumerate(self.running.requests):
            if request.given.parameters == name:
                request.start_span(version, int(self.running.count[row]), self._sigma(request))

    def _sigma(self, request: ActiveRequest) -> float:
        """Return the standard deviation of the noise under which a request is sampled now."""
        if not request.explores:
            return 0.0
        assert isinstance(self.runner, Explores) and self.runner.noise_sigma is not None, "checked by `generate`"
        return self.runner.noise_sigma

    def sleep(self, level: int) -> int:
        """Free KV (level 1) and weights (level 2), and return the number of bytes. Resident requests become waiting
        ones again, and keep their tokens."""
        assert self._launched is None, "a step is settled first"
        preempted = [*map(self._saved, range(self.running.n))]
        self.running.remove(np.arange(self.running.n))
        self.waiting.extendleft(sorted(preempted, key=lambda request: -request.order))
        freed = self.runner.drop_kv()
        if level >= 2:
            self.identity = ""  # the next publish needs the base too
        return freed + self.runner.drop_weights() if level >= 2 else freed

    def stats(self) -> dict[str, int]:
        counts = {"steps": self._steps, "sampled_tokens": self._sampled, "surplus_tokens": self._surplus}
        return {**counts, "resident": self.running.n, "waiting": len(self.waiting), **self.runner.stats()}

    def _admit(self, admission: Admitted) -> list[Finished]:
        """Turn admitted requests into resident ones and sample the next token of each. Return those that end with
        it."""
        first = self.running.n
        for cached in admission.cached:
            request = self.waiting.popleft()
            if not len(request.ids):  # a preempted request keeps the number of its first admission
                request.cached_tokens = cached
            version = self.sets.get(request.given.parameters, self.version)
            request.start_span(version, len(request.ids), self._sigma(request))
            self.running.add(request, self.runner.max_context_tokens)
        return self._append(first, *admission.sample(self.running.sampling(first, self.running.n)))

    def _append(self, first: int, ids: np.ndarray, logprobs: np.ndarray) -> list[Finished]:
        """Append a token to each of the rows from `first` on. Remove and return the requests that end with it."""
        running = self.running
        self._sampled += len(ids)
        if not np.isfinite(logprobs).all():
            bad = [running.requests[first + i].given.id for i in np.flatnonzero(~np.isfinite(logprobs))]
            raise FloatingPointError(f"version {self.version} gave non-finite logits for requests {bad[:8]}")
        code, stops = running.append(first, first + len(ids), ids, logprobs)
        ended = first + np.flatnonzero(code)
        done: list[Finished] = []
        for row in ended.tolist():
            reason = REASONS[code[row - first]]
            assert reason is not None
            request = self._saved(row)
            done.append((request, request.completion(reason, stops.get(row) if reason == "stop" else None)))
        self._remove(ended)
        return done

    def _saved(self, row: int) -> ActiveRequest:
        """Return the request of a row, with all tokens sampled until now, and their routes."""
        request = self.running.save(row)
        if request.given.routes and isinstance(self.runner, RecordsRoutes):
            request.add_routes(self.runner.routes_of(row, len(request.given.prompt_ids) + len(request.ids)))
        return request

    def _remove(self, rows: np.ndarray) -> None:
        if len(rows):
            resident = self.running.n
            sources, holes = self.running.remove(rows)
            if self._launched is not None:
                self._surplus += self._launched.moved(resident, rows, sources, holes)
            tokens = int(self.running.positions().max()) + 1 if self.running.n else 0
            self.runner.move(sources, holes, self.running.n, tokens)


def check_context(max_context_tokens: int, longest: int | None) -> None:
    """Raise ValueError if sequences would be longer than the model's own limit `longest`."""
    if longest is not None and max_context_tokens > longest:
        raise Refused(
            f"max_context_tokens={max_context_tokens} exceeds the model's max_position_embeddings={longest}: "
            "shorten prompt or response, or use a model with a longer context"
        )
