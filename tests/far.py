"""Tensors of a double of a device: their numbers are in host memory, but torch sees them on `meta`, and each operation
by which the host would read the device, and so wait for it, is counted."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_map_only

FAR = torch.device("meta")
READS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "_unique2", "masked_select"}


class FarTensor(torch.Tensor):
    """A tensor on the double. held: its numbers."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> FarTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=FAR
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {}, [])


class FarDevice(TorchDispatchMode):
    """Tensors that are made on `FAR` inside the context are of the double. reads: the operations by which the host read
    it."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {}, self.reads)


def computed(func: Any, args: Any, kwargs: dict[str, Any], reads: list[str]) -> Any:
    """Compute an operation on the numbers. The result is far if it is made there or of far tensors."""
    name = func.overloadpacket.__name__
    far = tree_any(lambda x: isinstance(x, FarTensor), (args, kwargs))
    to = kwargs.get("device")
    here = tree_map_only(FarTensor, lambda x: x.held, args)
    named = tree_map_only(FarTensor, lambda x: x.held, kwargs) | ({} if to is None else {"device": torch.device("cpu")})
    out = func(*here, **named)
    into_host = name == "copy_" and not isinstance(args[0], FarTensor)
    copied_to_host = far and ((to is not None and to.type == "cpu") or into_host)
    if far and (copied_to_host or name in READS):
        reads.append(name)
    if copied_to_host or not (far or to == FAR):
        return out
    if name.endswith("_") and name != "_to_copy" and isinstance(args[0], FarTensor):
        return args[0]
    return tree_map_only(torch.Tensor, FarTensor, out)
