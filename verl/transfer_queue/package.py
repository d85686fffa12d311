"""TransferQueue with its bytes in the TransferQueue package (0.1.11): in its storage units over ZeroMQ, Ray's direct
transport, or Mooncake or Yuanrong over RDMA, as configured in the package.

A put or write is one key of one partition, and our index, a Ray actor, records the content of each key. A key per
sample, as the package itself uses it, would cost its controller and its units a round of Python for each sample."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from verl.bounds import bounded_yaml
from verl.errors import Refused
from verl.transfer_queue.options import Package
from verl.transfer_queue.ray import RayQueue, start

FIELD = "packed"
ROOM_S = 10.0  # the time that Ray gets to update its count of free processors
SIMPLE, UNITS = "SimpleStorage", "backend.SimpleStorage.num_data_storage_units"


def build(options: Package) -> PackageQueue:
    """Return a new queue in the package's store of this cluster. The store is started with `config` (a YAML file that
    overrides the package's defaults) unless it is running already. Raise Refused without the package, or if Ray has too
    few free processors."""
    try:
        import transfer_queue
    except ImportError as exc:
        wanted = "pip install TransferQueue==0.1.11 tensordict==0.15.3"
        raise Refused(f"queue.engine=package needs the TransferQueue package ({exc}): {wanted}") from None
    from omegaconf import OmegaConf

    if options.config:
        bounded_yaml(Path(options.config).read_text(encoding="utf-8"))
    own = OmegaConf.load(options.config) if options.config else OmegaConf.create()
    simple = OmegaConf.select(own, "backend.storage_backend", default=SIMPLE) == SIMPLE
    cpus = 1 + (OmegaConf.select(own, UNITS, default=2) if simple else 0)  # one each for its controller and its units
    name, keeper = start(options.max_bytes or psutil.virtual_memory().available // 2, cpus)
    _check_room(cpus)
    transfer_queue.init(own)
    return PackageQueue(name, options.timeout_s, keeper)


def _check_room(cpus: int) -> None:
    """Raise Refused if Ray does not have `cpus` free processors: the package itself would wait for them without a
    limit."""
    import ray

    with contextlib.suppress(ValueError):  # it runs already and needs no further processors
        ray.get_actor("TransferQueueController", namespace="transfer_queue")
        return
    until_s = time.monotonic() + ROOM_S
    while (free := ray.available_resources().get("CPU", 0.0)) < cpus:
        if time.monotonic() > until_s:
            fix = f"lower {UNITS} in the YAML of queue.engine_options.config, or add CPUs"
            raise Refused(f"queue.engine=package: it takes {cpus} CPUs of Ray, of which {free:g} are free; {fix}")
        time.sleep(0.2)


class PackageQueue(RayQueue):
    """A `RayQueue` with its bytes in the package's store. A read result is a copy."""

    def _store(self, packed: np.ndarray) -> Any:
        import transfer_queue

        key = uuid.uuid4().hex
        some = packed if len(packed) else np.zeros(1, np.uint8)  # Mooncake stores no empty values
        transfer_queue.kv_put(key=key, partition_id=self._name, fields={FIELD: torch.from_numpy(some)})
        return key

    def _fetch(self, held: list[Any]) -> Sequence[np.ndarray] | None:
        import transfer_queue

        if not held:
            return []
        try:
            found = transfer_queue.kv_batch_get(keys=held, partition_id=self._name, select_fields=[FIELD])
        except (ValueError, RuntimeError):  # none exists: SimpleStorage; RayStore and Mooncake
            return None
        rows = [row.numpy() for row in found[FIELD].unbind()]
        return rows if len(rows) == len(held) else None  # missing rows are left out

    def _release(self, held: list[Any]) -> None:
        import transfer_queue

        transfer_queue.kv_clear(keys=held, partition_id=self._name)
