"""A trained reward model as a reward function: finished trajectories are scored in batches while the rollout
continues."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from verl.reward.base import RewardFn, RewardRequest
from verl.types import Invalid, Score, Segment

ScoreRows = Callable[[Sequence[tuple[Segment, ...]]], Awaitable[Sequence[float]]]
"""A function of rows that returns one number for each. It has a time limit."""


def combined(function: Score | Invalid | None, model: float, coef: float) -> Score | Invalid:
    """Return the sum of coef x the model's score and the function's score, if there is one, as a Score with the
    components `reward_model` and `function`."""
    if isinstance(function, Invalid):
        return function
    if not np.isfinite(model):
        return Invalid("bad_result", f"the reward model gave {model}")
    if function is None:
        return Score(coef * model, {"reward_model": model})
    parts = {"function": function.value, **function.components, "reward_model": model}
    return replace(function, value=function.value + coef * model, components=parts)


class Later:
    """A RewardFn for answers that are scored in the experience stage. It returns 0, which that stage replaces."""

    async def score(self, request: RewardRequest) -> Score | Invalid:
        return Score(0.0)

    async def close(self) -> None:
        """Do nothing: there are no workers or connections."""


@dataclass(eq=False)
class ModelReward:
    """A RewardFn that scores all waiting requests together whenever the model is free, at most `max_batch` at a
    time."""

    score_rows: ScoreRows
    coef: float
    function: RewardFn | None
    max_batch: int = 64
    _waiting: list[tuple[tuple[Segment, ...], asyncio.Future[float]]] = field(default_factory=list)
    _worker: asyncio.Task[None] | None = None

    async def score(self, request: RewardRequest) -> Score | Invalid:
        assert request.row, "a trajectory has a row"
        answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((request.row, answer))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.ensure_future(self._serve())
        if self.function is None:
            return combined(None, await answer, self.coef)
        function, model = await asyncio.gather(self.function.score(request), answer)
        return combined(function, model, self.coef)

    async def _serve(self) -> None:
        """Score waiting requests until none is left. A failure of the model is raised in all requests of its batch,
        since it is an error of verl and not of a reward function."""
        await asyncio.sleep(0)  # answers that end at the same moment are one batch
        while self._waiting:
            batch, self._waiting = self._waiting[: self.max_batch], self._waiting[self.max_batch :]
            try:
                found = await self.score_rows([row for row, _ in batch])
            except Exception as e:
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(e)
                continue
            for (_, answer), value in zip(batch, found, strict=True):
                if not answer.done():  # its trajectory may have been given up
                    answer.set_result(float(value))

    async def close(self) -> None:
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        if self.function is not None:
            await self.function.close()
