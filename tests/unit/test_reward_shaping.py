"""Length penalties against the golden values of verl, OpenRLHF and NeMo-RL, and the wrapper around a RewardFn."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from verl.reward.base import RewardRequest
from verl.reward.shaping import Shaped, overlong_penalty, stop_properly
from verl.types import Invalid, Score

GOLDEN = Path(__file__).parents[1] / "numerics" / "golden"


def _golden(name: str) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    arrays = dict(np.load(GOLDEN / f"{name}.npz"))
    return arrays, json.loads(str(arrays["hyperparameters"]))


def test_overlong_as_verl() -> None:
    arrays, hyper = _golden("reward_overlong")
    penalty = overlong_penalty(
        arrays["in_response_lengths"].astype(np.float64),
        max_response_tokens=int(hyper["max_resp_len"]),
        buffer_tokens=int(hyper["overlong_buffer_len"]),
        penalty=hyper["penalty_factor"],
        cap=False,
    )
    np.testing.assert_allclose(penalty, arrays["out_overlong_reward"], atol=1e-12)
    np.testing.assert_allclose(arrays["in_scores"] + penalty, arrays["out_rewards"], atol=1e-6)


def test_overlong_as_openrlhf() -> None:
    arrays, hyper = _golden("reward_overlong_capped")
    penalty = overlong_penalty(
        arrays["in_response_lengths"].astype(np.float64),
        max_response_tokens=int(hyper["max_new_tokens"]),
        buffer_tokens=int(hyper["overlong_buffer_len"]),
        penalty=hyper["overlong_penalty_factor"],
    )
    np.testing.assert_allclose(arrays["in_scores"] + penalty, arrays["out_rewards"], atol=1e-6)


def test_stop_properly_as_nemo() -> None:
    arrays, hyper = _golden("reward_stop_properly")
    coef = hyper["stop_properly_penalty_coef"]
    shaped = stop_properly(arrays["in_rewards"], arrays["in_truncated"], coef=coef, scale_negative=True)
    np.testing.assert_allclose(shaped, arrays["out_rewards"], atol=1e-6)


def test_stop_properly_never_improves_a_negative_score() -> None:
    scores, truncated = np.array([2.0, -2.0, 1.0]), np.array([True, True, False])
    np.testing.assert_array_equal(stop_properly(scores, truncated, coef=0.25), [0.5, -2.0, 1.0])
    np.testing.assert_array_equal(stop_properly(scores, truncated, coef=-0.5), [-0.5, -0.5, 1.0])
    assert stop_properly(2.0, True, coef=0.25) == 0.5
    with pytest.raises(ValueError, match="<= 1"):
        stop_properly(1.0, True, coef=2.0)


def test_overlong_beyond_the_budget() -> None:
    assert overlong_penalty(30.0, max_response_tokens=20, buffer_tokens=8) == -1.0
    assert overlong_penalty(36.0, max_response_tokens=20, buffer_tokens=8, cap=False) == -3.0
    # The paper: 16384 + 4096.
    lengths = np.array([16384.0, 18432.0, 20480.0, 30000.0])
    assert overlong_penalty(lengths, max_response_tokens=20480, buffer_tokens=4096).tolist() == [0.0, -0.5, -1.0, -1.0]


@pytest.mark.parametrize(("buffer", "penalty"), [(0, 1.0), (-1, 1.0), (21, 1.0), (8, -1.0)])
def test_overlong_refuses_nonsense(buffer: int, penalty: float) -> None:
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


def test_shaped_leaves_invalid_alone() -> None:
    invalid = Invalid("timeout", "x")
    assert asyncio.run(Shaped(_Inner(invalid), buffer_tokens=8).score(_request(20))) is invalid
