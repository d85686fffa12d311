"""Rollout engines: tokens in, tokens out. An engine knows no chat, reward or group. No torch is imported here."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np

from verl.types import Sampling, StopReason, as_ids

if TYPE_CHECKING:
    import torch

PauseMode = Literal["keep", "wait", "abort"]
DecodeFn = Callable[[Sequence[int]], str]
OnTokens = Callable[[np.ndarray, np.ndarray], object]  # ids [t] int64, log-probs [t] float32


class ReplicaLost(RuntimeError):
    """An engine is gone, or must not speak any more: what was asked of it may be asked of another one."""


@dataclass(frozen=True, slots=True)
class Completion:
    """ids [t] int64 and logprobs [t] float32, the stop token included; spans = ((version, start, end), ...) cover ids.

    `logprobs` are those of the distribution that was drawn from (temperature and truncation applied); greedy tokens
    carry the log-prob at temperature 1. stop_reason `abort` keeps the tokens so far. `side`: {name: [t, ...]}.
    """

    request_id: str
    ids: np.ndarray
    logprobs: np.ndarray
    spans: tuple[tuple[int, int, int], ...]
    stop_reason: StopReason
    stop: str | None = None
    cached_tokens: int = 0
    side: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine can do; asked at start. stop_strings: an answer ends at them · seeds: one gives its tokens
    whatever the batch · score_temperatures: at which it scores prompts; None: any · spans: every token says which
    weights drew it, so that they may change while a request runs."""

    logprobs: Literal["processed", "raw"]  # processed: temperature and truncation applied
    max_context_tokens: int
    prefix_cache: bool = False
    in_flight_update: bool = False
    lora_rank: int = 0  # of adapters that it takes, at most; 0: none (`Adapting`)
    media: bool = False
    sleep_levels: tuple[int, ...] = ()
    stop_strings: bool = True
    seeds: bool = True
    score_temperatures: tuple[float, ...] | None = None
    spans: bool = True
    notes: tuple[str, ...] = ()  # lines that the user is told at start


@dataclass(frozen=True, slots=True)
class Peers:
    """What the connections to the servers of one run know of each other. Each has a mark. urls: of all servers that
    there ever were · marks: their URLs · verified: the latest version that was; none of those that are given up ·
    lost: those, but where another connection to that server came after · heard: what came of it through a router."""

    urls: set[str] = field(default_factory=set)
    marks: dict[str, str] = field(default_factory=dict)
    verified: dict[str, int] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    heard: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlace:
    """Where an engine that is a server lives. model: its folder · python: of the environment that starts it (None:
    this one) · url: it runs already, and is not started · log: file for what it says."""

    model: str
    log: Path
    python: str | None = None
    url: str | None = None
    peers: Peers = field(default_factory=Peers)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """What every backend is built from, besides its own options. place: for those that are servers."""

    hf_config: Any
    max_context_tokens: int
    dtype: torch.dtype
    eos_token_ids: Sequence[int] = ()
    decode: DecodeFn | None = None  # for stop strings
    device: torch.device | str = "cpu"
    max_concurrent_sequences: int = 256
    deterministic: bool = False  # what a sequence gets is bitwise independent of what else is in the batch
    place: ServerPlace | None = None

    def __post_init__(self) -> None:
        check_positive(max_context_tokens=self.max_context_tokens)
        check_positive(max_concurrent_sequences=self.max_concurrent_sequences)


def check_positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")


NO_ADAPTERS = "this rollout engine loads no adapters"


def check_inputs(able: Capabilities, what: str, adapter: str | None, media: Sequence[str]) -> None:
    """ValueError for an adapter or media that the engine does not take."""
    if adapter is not None and not able.lora_rank:
        raise ValueError(f"{what}: adapter={adapter!r}, but {NO_ADAPTERS}; leave it out")
    if media and not able.media:
        raise ValueError(f"{what}: media={list(media)}, but this rollout engine takes no media; remove them")


def checked_ids(what: str, ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """One sequence [t] int64 of ids that the vocabulary has, or ValueError."""
    ids = as_ids(ids)
    if ids.ndim != 1:
        raise ValueError(f"{what}: ids must be one sequence [t], got shape {ids.shape}")
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise ValueError(f"{what}: ids in [{ids.min()}, {ids.max()}], vocabulary is [0, {vocab_size})")
    return ids


@dataclass(slots=True, kw_only=True)
class SoFar:
    """What engines that were lost have drawn of an answer, as in `Completion`; nothing of it ends the answer.

    mixes: an answer may hold tokens of several versions."""

    mixes: bool = False
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        if ids:
            self.spans.append((version, len(self.ids), len(self.ids) + len(ids)))
            self.ids += ids
            self.logprobs += logprobs

    def cut(self, end: int) -> None:
        """Forget the tokens from there on."""
        self.spans = [(version, a, min(b, end)) for version, a, b in self.spans if a < end]
        del self.ids[end:], self.logprobs[end:]

    def keep(self, least: int, most: int) -> None:
        """Forget the tokens from the first one on that another version has drawn."""
        ok = list(itertools.takewhile(lambda span: least <= span[0] <= most, self.spans))
        self.cut(ok[-1][2] if ok else 0)


class WeightReader(Protocol):
    """What a replica reads of a publish: its version and a stream of HF-named tensors."""

    version: int

    def tensors(self) -> Iterable[tuple[str, object]]: ...


@runtime_checkable
class Timed(Protocol):
    """A `WeightReader` that wants to know where the time goes. transfer: until the tensors were here · load: into the
    engine · pause: for which its requests stood still."""

    seconds: dict[str, float]


@runtime_checkable
class Passing(Protocol):
    """A `WeightReader` whose tensors may lie nowhere as a whole: if it `passes`, they are written over the live ones
    while nothing is drawn, and their end says whether all were of one version."""

    @property
    def passes(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Scores:
    """Of ids [t]: logprobs [t-1] float32 of ids[1:], and the k likeliest ids there [t-1, k] int64, the likeliest first,
    with their log-probs."""

    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


class Generates(Protocol):
    """The one verb that a trajectory needs."""

    async def generate(
        self,
        request_id: str,
        prompt_ids: np.ndarray,
        sampling: Sampling,
        *,
        prefix_key: str | None = None,
        adapter: str | None = None,
        media: Sequence[str] = (),
    ) -> Completion:
        """Requests with one `prefix_key` have a common prompt. `media`: content hashes, in the order of the prompt."""
        ...


class RolloutEngine(Generates, Protocol):
    async def score(
        self, ids: np.ndarray, *, temperature: float = 1.0, adapter: str | None = None, media: Sequence[str] = ()
    ) -> np.ndarray:
        """Log-probs [t-1] float32 of ids[1:] given their prefix, under the live weights."""
        ...

    async def load_weights(self, source: WeightReader, *, on_inflight: PauseMode = "wait") -> int:
        """Make `source` live and return its version. keep: running requests continue under it · wait: they finish
        first · abort: they return with their partial tokens. Every prefix computed under older weights is dropped."""
        ...

    async def pause(self, mode: PauseMode = "keep") -> None: ...
    async def resume(self) -> None: ...
    async def abort(self, request_ids: Sequence[str] | None = None) -> int: ...
    async def sleep(self, level: int = 1) -> int: ...
    async def wake(self, tags: Sequence[str] = ("weights", "kv")) -> None: ...
    async def capabilities(self) -> Capabilities: ...
    async def close(self) -> None: ...

    @property
    def version(self) -> int: ...


@runtime_checkable
class Replaceable(Protocol):
    """One of several, which go on without it."""

    def lose(self, why: BaseException) -> None:
        """Give up the engine that was asked to load weights last."""
        ...


@runtime_checkable
class Vouched(Protocol):
    """An engine whose answers count once its weights are verified."""

    def vouch(self) -> None:
        """Those that were loaded last are."""
        ...


@runtime_checkable
class Resuming(Protocol):
    """An engine that goes on with an answer that another one has begun."""

    goes_on: bool

    async def generate(
        self,
        request_id: str,
        prompt_ids: np.ndarray,
        sampling: Sampling,
        *,
        prefix_key: str | None = None,
        adapter: str | None = None,
        media: Sequence[str] = (),
        so_far: SoFar | None = None,
    ) -> Completion:
        """The whole answer. When the call ends, in whatever way, `so_far` holds what is sure of it."""
        ...


@runtime_checkable
class Adapting(Protocol):
    """An engine into which LoRA adapters are loaded while it draws."""

    async def load_adapter(self, name: str, folder: str) -> None:
        """From a folder in PEFT's layout that the engine sees, for later requests with `adapter=name`, in place of one
        of that name. Every later publish is of its base. ValueError for one of another base or above the engine's rank,
        and while requests of that name run."""
        ...

    async def drop_adapter(self, name: str) -> None: ...


@runtime_checkable
class Preparing(Protocol):
    """An engine that reads new weights while it draws with those that it has."""

    async def prepare_weights(self, source: WeightReader) -> Callable[[PauseMode], Awaitable[int]]:
        """Nothing of `source` is live before what is returned is called, which does the rest of `load_weights`."""
        ...


@runtime_checkable
class Streaming(Protocol):
    """An engine that tells of tokens as they are drawn."""

    async def stream(
        self,
        request_id: str,
        prompt_ids: np.ndarray,
        sampling: Sampling,
        on_tokens: OnTokens | None,
        *,
        prefix_key: str | None = None,
        adapter: str | None = None,
        media: Sequence[str] = (),
    ) -> Completion:
        """As `generate`. on_tokens is called in the event loop with the tokens since its last call; those after its
        last call stand in the completion alone."""
        ...


@runtime_checkable
class Ranking(Protocol):
    """An engine that knows which tokens are likeliest."""

    async def score_top(self, ids: np.ndarray, top: int) -> Scores: ...
