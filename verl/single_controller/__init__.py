"""A place of verl's that has no counterpart here: importing it is refused with what to write."""

FIX = "workers are driven by verl/workers; a run from Python is verl.GRPOTrainer or verl.Trainer"

raise ImportError(f"verl.single_controller is not in this version: {FIX}")
