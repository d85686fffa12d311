"""A place of verl's that has no counterpart here: importing it is refused with what to write."""

FIX = "give its scoring function as reward.path=FILE.py, one compute_score per answer"

raise ImportError(f"verl.workers.reward_manager is not in this version: {FIX}")
