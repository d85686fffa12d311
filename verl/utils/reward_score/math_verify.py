from verl.reward.math import math_score as compute_score

__all__ = ["compute_score"]
