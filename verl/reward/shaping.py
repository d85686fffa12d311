"""The penalty on overlong answers: a pure function of floats or numpy arrays, and a RewardFn wrapper."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from verl.reward.base import RewardFn, RewardRequest
from verl.types import Invalid, Score

Number = TypeVar("Number", float, np.ndarray)


def overlong_penalty(
    response_tokens: Number, *, max_response_tokens: int, buffer_tokens: int, penalty: float = 1.0, cap: bool = True
) -> Number:
    """The DAPO penalty to add to a score: 0 up to `max - buffer` tokens, then linear to -`penalty` at `max` tokens.
    `cap`: never below -`penalty` (the paper, OpenRLHF). Without, it goes on beyond `max` tokens (verl, NeMo-RL)."""
    if not 0 < buffer_tokens <= max_response_tokens:
        said = (
            f"reward.overlong_buffer_tokens={buffer_tokens}: must be in 1..{max_response_tokens} (the response budget)"
        )
        raise ValueError(f"{said}; 0 in the configuration turns the penalty off")
    if penalty < 0:
        raise ValueError(f"reward.overlong_penalty={penalty}: must be >= 0; it is subtracted")
    over = (response_tokens - (max_response_tokens - buffer_tokens)) / buffer_tokens
    return -penalty * np.clip(over, 0.0, 1.0 if cap else None) + 0.0  # no -0.0


class Shaped:
    """A RewardFn that adds the overlong penalty to valid scores, as component `overlong_penalty`. The raw one stays in
    component `score`, which dynamic sampling looks at. Evaluation uses the inner function."""

    def __init__(self, inner: RewardFn, *, buffer_tokens: int, penalty: float = 1.0) -> None:
        self._inner, self._buffer_tokens, self._penalty = inner, buffer_tokens, penalty

    async def score(self, request: RewardRequest) -> Score | Invalid:
        """The inner score plus the penalty of its length. Raises ValueError if the buffer exceeds the budget."""
        got = await self._inner.score(request)
        if isinstance(got, Invalid):
            return got
        tokens, most = float(request.response_tokens), request.max_response_tokens
        penalty = overlong_penalty(
            tokens, max_response_tokens=most, buffer_tokens=self._buffer_tokens, penalty=self._penalty
        )
        parts = {"score": got.value, **got.components, "overlong_penalty": float(penalty)}
        return Score(float(got.value + penalty), parts)

    async def close(self) -> None:
        await self._inner.close()
