"""Rewards. `verl.reward.compute_score` scores by data source; a user's own function runs in `verl.reward.pool`.
Importing this package costs milliseconds and pulls in neither torch nor math-verify: every grader process does it."""

from verl.reward.compute import check_data_source, compute_score

__all__ = ["check_data_source", "compute_score"]
