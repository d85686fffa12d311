"""The ranks of a layout as process groups of torch.distributed, whose default group exists."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl.model_engine.layout import Layout

T = TypeVar("T")


def mesh(device_type: str, **sizes: int) -> DeviceMesh:
    """All ranks in these dimensions, the last varies fastest. Its groups have the deadline of the default group: torch
    gives them half an hour, whatever that one was told."""
    made = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for group in made.get_all_groups():
        _as_patient_as_the_default(group, device_type)
    return made


class GroupRanks:
    """See `Ranks`: the ranks that have rows of their own, seen from one of them. `primary`: of the ranks that compute
    the same rows, this is the one that reports and writes. Values are pickled and pass over the host."""

    def __init__(self, layout: Layout, rank: int) -> None:
        place = layout.place(rank)
        self.rank, self.world_size, self.primary = place.data, layout.data, place.primary
        peers: dict[tuple[int, ...], list[int]] = {}
        for other in range(layout.world_size):
            at = layout.place(other)
            peers.setdefault((at.sequence, at.tensor, at.pipeline), []).append(other)
        for members in peers.values():  # every rank makes every group, in one order
            group = dist.new_group(members, backend="gloo")
            if rank in members:
                _as_patient_as_the_default(group, "cpu")
                self._group = group

    def all_gather(self, value: T) -> list[T]:
        found: list[T] = [value] * self.world_size
        dist.all_gather_object(found, value, group=self._group)
        return found


def _as_patient_as_the_default(group: dist.ProcessGroup, device_type: str) -> None:
    assert dist.group.WORLD is not None
    whole = dist.group.WORLD._get_backend(torch.device(device_type))
    dist.distributed_c10d._set_pg_timeout(whole.options._timeout, group)
