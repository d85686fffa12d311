from verl.reward.math import dapo_score as compute_score
from verl.reward.math import normalize_minerva as normalize_final_answer

__all__ = ["compute_score", "normalize_final_answer"]
