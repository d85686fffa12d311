from verl.reward.math import last_boxed
from verl.reward.math import math_equal as is_equiv
from verl.reward.math import math_score as compute_score

__all__ = ["compute_score", "is_equiv", "last_boxed"]
