"""The arrangements of the ranks of a model, with their process groups: of its weights, of its experts, and of the ranks
that share tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl.model_engine.layout import Layout


@dataclass(frozen=True, slots=True)
class Meshes:
    """The meshes of one model. Models that compute in turn can have the same."""

    weights: DeviceMesh
    experts: DeviceMesh | None
    """The mesh of the parameters of experts; None: that of all weights."""
    sharers: dist.ProcessGroup
    """The ranks that share the tokens of a micro-batch with this one."""


def meshes_of(layout: Layout, device_type: str) -> Meshes:
    """Create the meshes of a layout. All ranks call this in the same order."""
    weights = arranged(device_type, mesh_sizes(layout))
    experts = arranged(device_type, expert_mesh_sizes(layout)) if layout.expert > 1 else None
    sizes = {"data": layout.data, "tokens": layout.tokens, "tensor": layout.tensor}
    return Meshes(weights, experts, arranged(device_type, _stages(layout) | sizes).get_group("tokens"))


def host_meshes(layout: Layout) -> list[DeviceMesh]:
    """Create the meshes, of weights and of experts, for tensors in host memory."""
    every = (mesh_sizes(layout), expert_mesh_sizes(layout))
    return [arranged("cpu", sizes, dict.fromkeys(sizes, "gloo")) for sizes in every]


def arranged(device_type: str, sizes: Mapping[str, int], backends: Any = None) -> DeviceMesh:
    """Arrange all ranks in these dimensions; the last varies fastest. Its groups get the timeout of the default group;
    torch would give them half an hour."""
    names = tuple(sizes)
    made = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=names, backend_override=backends)
    for group in made.get_all_groups():
        dist.distributed_c10d._set_pg_timeout(patience(), group)
    return made


def _stages(layout: Layout) -> dict[str, int]:
    return {"pipeline": layout.pipeline} if layout.pipeline > 1 else {}


def mesh_sizes(layout: Layout) -> dict[str, int]:
    """Return the dimensions over which parameters are spread, the last varying fastest."""
    return _stages(layout) | {"replicate": layout.replicate, "shard": layout.shard, "tensor": layout.tensor}


def expert_mesh_sizes(layout: Layout) -> dict[str, int]:
    """Return the dimensions over which the parameters of experts are spread, the last varying fastest."""
    part = layout.shard // layout.expert
    sizes = {"replicate": layout.replicate, "part": part, "expert": layout.expert, "tensor": layout.tensor}
    return _stages(layout) | sizes


def patience() -> timedelta:
    whole: Any = dist.group.WORLD
    found: timedelta = whole._get_backend(whole._device_types[0]).options._timeout
    return found
