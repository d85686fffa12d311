"""The memory of tensors that are made inside a mode, counted by their storages; also on the device `meta`."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """now: the bytes that are alive of those made inside; peak: the most there were after any operation."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and (key := x.untyped_storage()._cdata) not in known:
                self._made[key] = StorageWeakRef(x.untyped_storage()), x.untyped_storage().nbytes()
        self.peak = max(self.peak, self.now)
        return out

    @property
    def now(self) -> int:
        self._made = {key: (ref, size) for key, (ref, size) in self._made.items() if not ref.expired()}
        return sum(size for _, size in self._made.values())
