"""GPU memory that other processes of the machine read in place, through CUDA's IPC and torch.multiprocessing.

The owner must keep the memory allocated as long as any process may read it."""

from __future__ import annotations

from functools import lru_cache
from weakref import WeakValueDictionary

import msgspec
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor
from torch.storage import TypedStorage

from verl.errors import Refused
from verl.weight_sync.base import SyncError

_OWN = WeakValueDictionary[bytes, Tensor]()
"""Memory of this process by its handle: CUDA cannot open a handle in the process that exports it."""


def allocated(num_bytes: int) -> Tensor:
    """Allocate uint8 memory [num_bytes] on this thread's GPU. Raise Refused if torch sees no GPU."""
    if not torch.cuda.is_available():
        raise Refused(
            "sync.engine=ipc passes weights through the memory of a GPU, and torch sees none here: set sync.engine=shm"
        )
    return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")


def handle_of(memory: Tensor) -> bytes:
    """Return the handle with which another process opens this memory."""
    try:
        _, given = reduce_tensor(memory)
    except RuntimeError as e:
        fix = "leave expandable_segments out of PYTORCH_CUDA_ALLOC_CONF, or set sync.engine=shm"
        raise Refused(f"sync.engine=ipc: torch shares no memory of this GPU ({e}): {fix}") from e
    index, allocation, storage_bytes, storage_offset, _, counter, counter_offset, event, waits = given[6:]
    handle = (allocation, storage_bytes, storage_offset, counter, counter_offset, event, waits)
    found = msgspec.msgpack.encode([_name_of(index), memory.numel(), *handle])
    _OWN[found] = memory
    return found


def open_handle(handle: bytes) -> Tensor:
    """Return the memory of a handle, uint8. Read it after the owner has called `synchronize`; the owner writes to it
    again only after the reader has called it."""
    return own if (own := _OWN.get(handle)) is not None else _mapped(handle)


@lru_cache(maxsize=2)  # a sender has two buckets
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


def synchronize(memory: Tensor) -> None:
    """Wait until the copies from and to this memory have ended: copies of a GPU continue after the call that began
    them."""
    torch.cuda.synchronize(memory.device)


def _name_of(index: int) -> str:
    """Return the identity of a GPU, the same in all processes, whichever GPUs they see."""
    return str(torch.cuda.get_device_properties(index).uuid)
