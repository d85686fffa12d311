"""Length penalties on rewards (algorithms.md 6.1). Pure functions of floats or numpy arrays, and a RewardFn wrapper."""

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

    `cap`: never below -`penalty` (the paper, OpenRLHF). Without, it goes on beyond `max` tokens (verl, NeMo-RL).
    """
    check_overlong(max_response_tokens=max_response_tokens, buffer_tokens=buffer_tokens, penalty=penalty)
    over = (response_tokens - (max_response_tokens - buffer_tokens)) / buffer_tokens
    return -penalty * np.clip(over, 0.0, 1.0 if cap else None) + 0.0  # no -0.0


def check_overlong(*, max_response_tokens: int, buffer_tokens: int, penalty: float) -> None:
    """Raise ValueError for a buffer or a penalty that makes no sense."""
    if not 0 < buffer_tokens <= max_response_tokens:
        raise ValueError(
            f"reward.overlong_buffer_tokens={buffer_tokens}: must be in 1..{max_response_tokens} (the response "
            "budget); 0 in the configuration turns the penalty off"
        )
    if penalty < 0:
        raise ValueError(f"reward.overlong_penalty={penalty}: must be >= 0; it is subtracted")


def stop_properly(score: Number, truncated: Number | bool, *, coef: float, scale_negative: bool = False) -> Number:
    """ProRL's "stop properly": a truncated answer's score times `coef` in [0, 1], or, with coef < 0, set to `coef`.

    Scaling a negative score would make it better, so only the positive part is scaled; `scale_negative` gives the
    form of NeMo-RL and OpenRLHF, which scale both.
    """
    if coef > 1:
        raise ValueError(f"stop-properly coef={coef}: must be <= 1 (below 0: the score of a truncated answer)")
    values = np.asarray(score)
    if coef < 0:
        penalised = np.full_like(values, coef)
    else:
        penalised = values * coef if scale_negative else np.minimum(values, values * coef)
    out = np.where(truncated, penalised, values)
    return out if isinstance(score, np.ndarray) else float(out)


class Shaped:
    """A RewardFn that adds the overlong penalty to valid scores.

    The raw score stays in component `score` (dynamic sampling looks at the raw metric); the penalty is component
    `overlong_penalty`. Evaluation uses the inner function.
    """

    def __init__(self, inner: RewardFn, *, buffer_tokens: int, penalty: float = 1.0, cap: bool = True) -> None:
        self._inner, self._buffer_tokens, self._penalty, self._cap = inner, buffer_tokens, penalty, cap

    async def score(self, request: RewardRequest) -> Score | Invalid:
        """The inner score plus the penalty of its length. Raises ValueError if the buffer exceeds the budget."""
        got = await self._inner.score(request)
        if isinstance(got, Invalid):
            return got
        penalty = float(
            overlong_penalty(
                float(request.response_tokens),
                max_response_tokens=request.max_response_tokens,
                buffer_tokens=self._buffer_tokens,
                penalty=self._penalty,
                cap=self._cap,
            )
        )
        return Score(got.value + penalty, {"score": got.value, **got.components, "overlong_penalty": penalty})

    async def close(self) -> None:
        await self._inner.close()
