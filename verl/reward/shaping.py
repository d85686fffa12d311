"""Penalties for the length or the end of an answer: pure functions of floats or numpy arrays, and a RewardFn that
applies them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from verl.errors import Refused
from verl.reward.base import RewardFn, RewardRequest
from verl.types import Invalid, Score

Number = TypeVar("Number", float, np.ndarray)


def overlong_penalty(
    response_tokens: Number, *, max_response_tokens: int, buffer_tokens: int, penalty: float = 1.0, cap: bool = True
) -> Number:
    """Return the DAPO penalty to add to a score: 0 up to `max - buffer` tokens, then linear to -`penalty` at `max`
    tokens.

    cap: True: the result is never below -`penalty` (the paper, OpenRLHF); False: it continues to fall beyond `max`
        tokens (verl, NeMo-RL)
    """
    if not 0 < buffer_tokens <= max_response_tokens:
        prefix = (
            f"reward.overlong_buffer_tokens={buffer_tokens}: must be in 1..{max_response_tokens} (the response budget)"
        )
        raise Refused(f"{prefix}; 0 in the configuration turns the penalty off")
    if penalty < 0:
        raise Refused(f"reward.overlong_penalty={penalty}: must be >= 0; it is subtracted")
    over = (response_tokens - (max_response_tokens - buffer_tokens)) / buffer_tokens
    return -penalty * np.clip(over, 0.0, 1.0 if cap else None) + 0.0  # no -0.0


def stop_properly(score: Number, truncated: bool | np.ndarray, *, coef: float, positive_only: bool = True) -> Number:
    """Return the score, which for a truncated answer is multiplied by `coef` (ProRL, 2505.24864; NeMo-RL), or is `coef`
    itself if `coef` is below 0 (OpenRLHF).

    positive_only: leave negative scores unchanged, since the factor would raise them (ProRL and NeMo-RL multiply them
        too)
    """
    scaled = np.where((np.asarray(score) < 0) & positive_only, score, np.asarray(score) * coef)
    found = np.where(truncated, coef if coef < 0 else scaled, score)
    return found if isinstance(score, np.ndarray) else float(found)


@dataclass(eq=False)
class Shaped:
    """A RewardFn that adds penalties for the end of an answer to valid scores of another RewardFn.

    The changes by `stop_properly` and `overlong_penalty` are components of these names. The unchanged score is the
    component `score`, which dynamic sampling reads. Evaluation uses the inner function.
    """

    inner: RewardFn
    buffer_tokens: int = 0
    """The number of tokens at the end of the budget over which the penalty grows. 0: no penalty."""
    penalty: float = 1.0
    stop_coef: float | None = None
    """The factor of `stop_properly`. None: off."""
    longest: int | None = None
    """The length at which the penalty reaches `penalty`. None: the budget of the request."""
    cap: bool = True
    """The penalty never exceeds `penalty` (`overlong_penalty`)."""

    async def score(self, request: RewardRequest) -> Score | Invalid:
        """Return the inner score with the penalties. Raise ValueError if the buffer exceeds the budget."""
        got = await self.inner.score(request)
        if isinstance(got, Invalid):
            return got
        added: dict[str, float] = {}
        if self.stop_coef is not None:
            added["stop_properly"] = stop_properly(got.value, request.truncated, coef=self.stop_coef) - got.value
        if self.buffer_tokens:
            longest = request.max_response_tokens if self.longest is None else self.longest
            penalty = overlong_penalty(
                float(request.response_tokens),
                max_response_tokens=longest,
                buffer_tokens=self.buffer_tokens,
                penalty=self.penalty,
                cap=self.cap,
            )
            added["overlong_penalty"] = float(penalty)
        value, parts = float(got.value + sum(added.values())), {"score": got.value, **got.components, **added}
        return replace(got, value=value, components=parts)

    async def close(self) -> None:
        await self.inner.close()
