"""verl's graders under the names by which users' reward functions import them; they are in `verl.reward`."""

from __future__ import annotations

from typing import Any

from verl.reward.compute import compute_score
from verl.utils.reward_score import geo3k, gsm8k, math_dapo, math_reward, math_verify

__all__ = ["default_compute_score", "geo3k", "gsm8k", "math_dapo", "math_reward", "math_verify"]


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **_: Any
) -> float | dict[str, object]:
    """The score by `data_source`. Further arguments (a sandbox's address) are for sources that are refused here."""
    return compute_score(data_source, solution_str, ground_truth, extra_info)
