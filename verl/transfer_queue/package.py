"""TransferQueue whose bytes are in the TransferQueue package (0.1.11): its storage units over ZeroMQ, or Mooncake or
Yuanrong over RDMA, as its own configuration says.

A put or write is one key of one partition: a key per sample, the package's own way, costs its controller and its units
a round of Python each. What is in which key is known to our index, in an actor of Ray, beside which the package runs.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil
import torch

from verl.transfer_queue.options import Package
from verl.transfer_queue.ray import RayQueue, start

FIELD = "packed"


def build(options: Package) -> PackageQueue:
    """A new queue in the package's store of this cluster, which is started with `config` (a YAML file that goes over
    the package's own) unless it runs."""
    try:
        import transfer_queue
    except ImportError as exc:
        wanted = "pip install TransferQueue==0.1.11 tensordict==0.15.3"
        raise ValueError(f"queue.engine=package needs the TransferQueue package ({exc}): {wanted}") from None
    from omegaconf import OmegaConf

    name, keeper = start(options.max_bytes or psutil.virtual_memory().available // 2)
    transfer_queue.init(OmegaConf.load(options.config) if options.config else None)
    return PackageQueue(name, options.timeout_s, keeper)


class PackageQueue(RayQueue):
    """See `TransferQueue`. What was read is the reader's own."""

    def _store(self, packed: np.ndarray) -> Any:
        import transfer_queue

        key = uuid.uuid4().hex
        transfer_queue.kv_put(key=key, partition_id=self._name, fields={FIELD: torch.from_numpy(packed)})
        return key

    def _fetch(self, held: list[Any]) -> Sequence[np.ndarray] | None:
        import transfer_queue

        if not held:
            return []
        try:
            found = transfer_queue.kv_batch_get(keys=held, partition_id=self._name, select_fields=[FIELD])
        except ValueError:  # none of them is there
            return None
        rows = [row.numpy() for row in found[FIELD].unbind()]
        return rows if len(rows) == len(held) else None  # it leaves out those that are not there

    def _release(self, held: list[Any]) -> None:
        import transfer_queue

        transfer_queue.kv_clear(keys=held, partition_id=self._name)
