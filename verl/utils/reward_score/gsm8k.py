from verl.reward.math import gsm8k_answer as extract_solution
from verl.reward.math import gsm8k_score as compute_score

__all__ = ["compute_score", "extract_solution"]
