"""Weights to replicas of the trainer's machine: builds the engines of whole versions (shm.py) and of buckets
(buckets.py)."""

from __future__ import annotations

import os
import uuid

from verl.weight_sync.base import SyncContext
from verl.weight_sync.buckets import BucketOutlet
from verl.weight_sync.local import LocalCheckpointEngine, engine_of
from verl.weight_sync.options import Ipc, Shm
from verl.weight_sync.shm import PREFIX, ShmOutlet, end, remove_stale_segments


def build(options: Shm | Ipc, context: SyncContext) -> LocalCheckpointEngine:
    """Build the engine of sync.engine=shm or ipc. The buckets of ipc are on a GPU, and files of shared memory describe
    them."""
    remove_stale_segments()
    name = f"{PREFIX}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
    if options.bucket_mb is None:
        return engine_of(ShmOutlet(name), context, end, name)
    outlet = BucketOutlet(name, options.bucket_mb << 20, on_gpu=isinstance(options, Ipc))
    return engine_of(outlet, context, end, name)
