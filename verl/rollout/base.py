"""Rollout engines: tokens in, tokens out. An engine knows no chat, reward or group (DESIGN section 5)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from verl.types import Sampling, StopReason

PauseMode = Literal["keep", "wait", "abort"]


@dataclass(frozen=True, slots=True)
class Completion:
    """ids [t] int64 and logprobs [t] float32, the stop token included; spans = ((version, start, end), ...) cover ids.

    `logprobs` are those of the distribution that was drawn from (temperature and truncation applied); greedy tokens
    carry the log-prob at temperature 1. stop_reason `abort` keeps the tokens so far.
    """

    request_id: str
    ids: np.ndarray
    logprobs: np.ndarray
    spans: tuple[tuple[int, int, int], ...]
    stop_reason: StopReason
    stop: str | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Capabilities:
    logprobs: Literal["processed", "raw"]
    prefix_cache: bool
    in_flight_update: bool
    architectures: tuple[str, ...]
    max_context_tokens: int


class WeightSource(Protocol):
    """What a checkpoint engine hands to a rollout replica: a version and a stream of HF-named tensors."""

    version: int

    def tensors(self) -> Iterable[tuple[str, object]]: ...


class RolloutEngine(Protocol):
    async def generate(
        self, request_id: str, prompt_ids: np.ndarray, sampling: Sampling, *, prefix_key: str | None = None
    ) -> Completion: ...

    async def score(self, ids: np.ndarray, *, temperature: float = 1.0) -> np.ndarray:
        """Log-probs [t-1] float32 of ids[1:] given their prefix, under the live weights."""
        ...

    async def load_weights(self, source: WeightSource, *, on_inflight: PauseMode = "wait") -> int:
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


DecodeFn = Callable[[Sequence[int]], str]
