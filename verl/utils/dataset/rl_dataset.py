"""As `verl.utils.dataset`."""

from typing import Any

from verl.data.user_dataset import RLHFDataset

__all__ = ["RLHFDataset"]


def __getattr__(name: str) -> Any:
    if name == "collate_fn":
        raise ImportError(
            "verl.utils.dataset.rl_dataset.collate_fn is not here: rows are packed one by one; leave it out"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
