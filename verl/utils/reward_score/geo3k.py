from verl.reward.math import geometry3k_score as compute_score

__all__ = ["compute_score"]
