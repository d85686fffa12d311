"""The reward protocol: a RewardRequest is scored as a Score or as Invalid. Invalid is never treated as a score of 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from verl.reward.result import MAX_FEEDBACK_CHARS as MAX_FEEDBACK_CHARS
from verl.reward.result import score_and_components
from verl.sandbox.messages import BadResult
from verl.types import Invalid, Score, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRequest:
    """A finished trajectory to be scored. Only reward managers need the ids, and reward models the row."""

    request_id: str
    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    response_tokens: int = 0
    """Number of tokens of the response, including those of the environment."""
    max_response_tokens: int = 0
    """The limit of `response_tokens`."""
    truncated: bool = False
    """True if the response ended because the limit was reached."""
    prompt_ids: np.ndarray | None = None  # [P] int64
    response_ids: np.ndarray | None = None  # [R] int64
    row: tuple[Segment, ...] = ()
    """The segments of prompt and response, with their images."""


class RewardFn(Protocol):
    async def score(self, request: RewardRequest) -> Score | Invalid:
        """Return the reward of one trajectory. Bounded in time; never raises for an error of a grader."""
        ...

    async def close(self) -> None:
        """Free workers and connections. Idempotent."""
        ...


def parse_result(value: Any) -> Score | Invalid:
    """Return the result of a user's reward function as a Score, or as Invalid("bad_result") with the reason."""
    try:
        return Score(*score_and_components(value))
    except BadResult as error:
        return Invalid("bad_result", str(error))
