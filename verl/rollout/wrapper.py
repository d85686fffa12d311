"""Rollout engines that pass their calls to another engine: a replica, or an engine in another process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from verl.parameter_set import POLICY_SET
from verl.rollout.base import (
    BaseEngine,
    Capabilities,
    Completion,
    GenerateRequest,
    Media,
    PauseMode,
    RolloutEngine,
    Scores,
    WeightReader,
)

FOLLOWED = frozenset(("pause", "resume", "abort", "sleep", "wake"))
"""Methods that a router calls on all replicas together, so that they are in the same state."""


class EngineWrapper(BaseEngine):
    """A rollout engine that passes its calls to another one by `forward`, except the methods that a subclass
    defines."""

    async def forward(self, method: str, *args: Any, **named: Any) -> Any:
        """Call the method with this name of the other engine and return its result."""
        raise NotImplementedError

    async def score(
        self, ids: np.ndarray, *, temperature: float = 1.0, parameters: str = POLICY_SET.id, media: Media = ()
    ) -> np.ndarray:
        named = {"temperature": temperature, "parameters": parameters, "media": tuple(media)}
        return np.asarray(await self.forward("score", ids, **named))

    async def score_top(self, ids: np.ndarray, top: int) -> Scores:
        found: Scores = await self.forward("score_top", ids, top)
        return found

    async def drop_set(self, name: str) -> None:
        await self.forward("drop_set", name)

    async def pause(self, mode: PauseMode = "keep") -> None:
        await self.forward("pause", mode)

    async def resume(self) -> None:
        await self.forward("resume")

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        return int(await self.forward("abort", None if request_ids is None else list(request_ids)) or 0)

    async def sleep(self, level: int = 1) -> int:
        return int(await self.forward("sleep", level) or 0)

    async def wake(self, tags: Sequence[str] = ("weights", "kv")) -> None:
        await self.forward("wake", tuple(tags))

    async def capabilities(self) -> Capabilities:
        able: Capabilities = await self.forward("capabilities")
        return able


class AfterPublish(EngineWrapper):
    """A replica with a `load_weights` that waits until a publish has ended: a LoRA set is loaded after the weights
    under it."""

    def __init__(self, inner: RolloutEngine, publish: asyncio.Future[Any]) -> None:
        self._inner, self._publish = inner, publish

    async def load_weights(self, source: WeightReader, *, on_inflight: PauseMode = "wait") -> int:
        await asyncio.wait({self._publish})
        return await self._inner.load_weights(source, on_inflight=on_inflight)

    async def generate(self, request: GenerateRequest) -> Completion:
        return await self._inner.generate(request)

    async def forward(self, method: str, *args: Any, **named: Any) -> Any:
        return await getattr(self._inner, method)(*args, **named)

    @property
    def replaceable(self) -> bool:  # type: ignore[override]
        return self._inner.replaceable

    @property
    def version(self) -> int:
        return self._inner.version

    @property
    def base(self) -> str:
        return self._inner.base

    async def close(self) -> None:
        await self._inner.close()

    def lose(self, why: BaseException) -> None:
        self._inner.lose(why)

    def mark_verified(self) -> None:
        self._inner.mark_verified()
