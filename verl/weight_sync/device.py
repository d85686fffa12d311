"""Memory of a GPU that other processes of its machine read where it lies: CUDA's IPC, by way of torch.multiprocessing.

Its owner keeps it for as long as anybody may read it.
"""

from __future__ import annotations

from functools import lru_cache
from weakref import WeakValueDictionary

import msgspec
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor
from torch.storage import TypedStorage

from verl.weight_sync.base import SyncError

_OWN = WeakValueDictionary[bytes, Tensor]()
"""By what was told of them: CUDA opens none in the process that has it."""


def allocated(num_bytes: int) -> Tensor:
    """uint8, on this thread's GPU."""
    if not torch.cuda.is_available():
        raise ValueError(
            "sync.engine=ipc passes weights through the memory of a GPU, and torch sees none here: set sync.engine=shm"
        )
    return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")


def told(memory: Tensor) -> bytes:
    """What another process opens it by."""
    try:
        _, given = reduce_tensor(memory)
    except RuntimeError as e:
        fix = "leave expandable_segments out of PYTORCH_CUDA_ALLOC_CONF, or set sync.engine=shm"
        raise ValueError(f"sync.engine=ipc: torch shares no memory of this GPU ({e}): {fix}") from e
    index, allocation, storage_bytes, storage_offset, _, counter, counter_offset, event, waits = given[6:]
    handle = (allocation, storage_bytes, storage_offset, counter, counter_offset, event, waits)
    found = msgspec.msgpack.encode([_name_of(index), memory.numel(), *handle])
    _OWN[found] = memory
    return found


def opened(handle: bytes) -> Tensor:
    """uint8, the owner's: it is read after the owner's `settle`, and written no more by it until ours."""
    return own if (own := _OWN.get(handle)) is not None else _mapped(handle)


@lru_cache(maxsize=2)  # as many as there are of a sender
def _mapped(handle: bytes) -> Tensor:
    gpu, num_bytes, allocation, storage_bytes, storage_offset, *rest = msgspec.msgpack.decode(handle)
    seen = [_name_of(index) for index in range(torch.cuda.device_count())]
    if gpu not in seen:
        raise SyncError(
            f"the weights lie on GPU {gpu}, and this process sees {', '.join(seen) or 'none'}: sync.engine=ipc is for "
            "replicas that see the GPU of the trainer's first rank; set sync.engine=shm"
        )
    shared = (seen.index(gpu), allocation, storage_bytes, storage_offset, False, *rest)
    return rebuild_cuda_tensor(Tensor, (num_bytes,), (1,), 0, TypedStorage, torch.uint8, *shared)


def settle(memory: Tensor) -> None:
    """What was begun with it has ended: copies of a GPU go on after the call that asked for them."""
    torch.cuda.synchronize(memory.device)


def _name_of(index: int) -> str:
    """Of a GPU, the same in all processes, whichever of them they see."""
    return str(torch.cuda.get_device_properties(index).uuid)
