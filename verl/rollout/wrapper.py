"""An engine in front of another one: a replica, or an engine in another process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from verl.parameter_set import POLICY_SET
from verl.rollout.base import BaseEngine, Capabilities, PauseMode, Scores

FOLLOWED = frozenset(("pause", "resume", "abort", "sleep", "wake"))
"""Methods that a router calls on all replicas together, so that they are in the same state."""


class EngineWrapper(BaseEngine):
    """An engine in front of another one. It passes all methods on by `forward`, except those that it defines itself."""

    async def forward(self, method: str, *args: Any, **named: Any) -> Any:
        raise NotImplementedError

    async def score(
        self, ids: np.ndarray, *, temperature: float = 1.0, parameters: str = POLICY_SET.id, media: Sequence[str] = ()
    ) -> np.ndarray:
        named = {"temperature": temperature, "parameters": parameters, "media": tuple(media)}
        return np.asarray(await self.forward("score", ids, **named))

    async def score_top(self, ids: np.ndarray, top: int) -> Scores:
        found: Scores = await self.forward("score_top", ids, top)
        return found

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
