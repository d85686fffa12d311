"""A package of the public verl that does not exist here: importing it raises an ImportError with the alternative."""

FIX = "give its scoring function as reward.path=FILE.py, one compute_score per answer"

raise ImportError(f"verl.workers.reward_manager is not in this version: {FIX}")
