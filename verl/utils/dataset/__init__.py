"""verl's datasets under its names: what a class of the user's is built on is verl/data/user_dataset.py."""

from verl.data.user_dataset import RLHFDataset

__all__ = ["RLHFDataset"]
