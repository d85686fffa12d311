"""The penalty on overlong answers (its golden values are in tests/numerics), and the wrapper around a RewardFn."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from verl.reward.base import RewardRequest
from verl.reward.model import combined
from verl.reward.shaping import Shaped, overlong_penalty, stop_properly
from verl.types import Invalid, Score


def test_overlong_beyond_the_budget() -> None:
    assert overlong_penalty(30.0, max_response_tokens=20, buffer_tokens=8) == -1.0
    assert overlong_penalty(36.0, max_response_tokens=20, buffer_tokens=8, cap=False) == -3.0
    # The paper: 16384 + 4096.
    lengths = np.array([16384.0, 18432.0, 20480.0, 30000.0])
    assert overlong_penalty(lengths, max_response_tokens=20480, buffer_tokens=4096).tolist() == [0.0, -0.5, -1.0, -1.0]


def test_overlong_refuses_nonsense() -> None:
    for buffer, penalty in ((0, 1.0), (-1, 1.0), (21, 1.0), (8, -1.0)):
        with pytest.raises(ValueError, match=r"reward\.overlong"):
            overlong_penalty(5.0, max_response_tokens=20, buffer_tokens=buffer, penalty=penalty)


class _Inner:
    def __init__(self, result: Score | Invalid) -> None:
        self.result, self.closed = result, False

    async def score(self, request: RewardRequest) -> Score | Invalid:
        return self.result

    async def close(self) -> None:
        self.closed = True


def _request(tokens: int) -> RewardRequest:
    return RewardRequest(
        request_id="r",
        data_source="s",
        solution_str="",
        ground_truth="",
        response_tokens=tokens,
        max_response_tokens=20,
    )


def test_shaped_keeps_the_raw_score() -> None:
    inner = _Inner(Score(1.0, {"acc": 1.0}))
    shaped = Shaped(inner, buffer_tokens=8, penalty=2.0)
    got = asyncio.run(shaped.score(_request(16)))
    assert got == Score(0.0, {"score": 1.0, "acc": 1.0, "overlong_penalty": -1.0})
    assert asyncio.run(shaped.score(_request(3))) == Score(1.0, {"score": 1.0, "acc": 1.0, "overlong_penalty": 0.0})
    twice = asyncio.run(Shaped(shaped, buffer_tokens=8).score(_request(16)))
    assert isinstance(twice, Score) and twice.components["score"] == 1.0
    asyncio.run(shaped.close())
    assert inner.closed


def test_the_length_of_the_overlong_penalty_may_be_another_than_the_budget() -> None:
    """12 tokens with a buffer of 4: whole at 12, twice as much at 16 of a budget of 20 where it is not capped."""
    for tokens, cap, expected in ((10, True, -1.0), (12, True, -2.0), (16, True, -2.0), (16, False, -4.0)):
        shaped = Shaped(_Inner(Score(1.0)), buffer_tokens=4, penalty=2.0, longest=12, cap=cap)
        got = asyncio.run(shaped.score(_request(tokens)))
        assert isinstance(got, Score) and got.value == 1.0 + expected, (tokens, cap)


def test_what_an_answer_said_outlives_shaping_and_a_reward_model() -> None:
    """Answers vote by it at the end, whatever was added to their score on the way."""
    shaped = asyncio.run(Shaped(_Inner(Score(1.0, {}, "42")), buffer_tokens=8).score(_request(16)))
    assert isinstance(shaped, Score) and shaped.pred == "42"
    both = combined(shaped, 0.5, 2.0)
    assert isinstance(both, Score) and both.pred == "42"


def test_shaped_leaves_invalid_alone() -> None:
    invalid = Invalid("timeout", "x")
    assert asyncio.run(Shaped(_Inner(invalid), buffer_tokens=8).score(_request(20))) is invalid


def test_a_cut_answer_loses_what_it_had_won_and_never_gains() -> None:
    for score, truncated, coef, expected in (
        (2.0, True, 0.25, 0.5),
        (2.0, False, 0.25, 2.0),
        (-2.0, True, 0.25, -2.0),
        (2.0, True, 0.0, 0.0),
        (2.0, True, -1.0, -1.0),
        (-2.0, False, -1.0, -2.0),
    ):
        assert stop_properly(score, truncated, coef=coef) == expected, (score, truncated, coef)
    shaped = Shaped(_Inner(Score(2.0, {})), buffer_tokens=4, penalty=1.0, stop_coef=0.25)
    got = asyncio.run(shaped.score(replace(_request(20), truncated=True)))
    assert isinstance(got, Score) and got.value == 0.5 - 1.0
    assert got.components == {"score": 2.0, "stop_properly": -1.5, "overlong_penalty": -1.0}
