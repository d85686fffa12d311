"""The processes that torchrun started, read from the environment. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from verl.errors import Refused
from verl.workers.sections import ClusterConfig

BACKEND = "torchrun"


@dataclass(frozen=True, slots=True)
class Launch:
    """This process among the `world_size` processes of torchrun, `local_world_size` of which run on this node."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def launched() -> Launch | None:
    """Return the launch of this process, or None if torchrun started no other process."""
    env = os.environ
    if "TORCHELASTIC_RUN_ID" not in env or env.get("WORLD_SIZE", "1") == "1":
        return None
    rank, world = env.get("RANK", "0"), env["WORLD_SIZE"]
    return Launch(int(rank), int(world), int(env.get("LOCAL_RANK", rank)), int(env.get("LOCAL_WORLD_SIZE", world)))


def is_spare() -> bool:
    """Return True if another process prints the messages of the run."""
    launch = launched()
    return launch is not None and launch.rank > 0


def take_part(section: ClusterConfig) -> ClusterConfig:
    """Return the section with one rank for each process of torchrun. Raise Refused if `cluster.backend` contradicts how
    this process was started."""
    launch = launched()
    if launch is None:
        if section.backend == BACKEND:
            fix = "torchrun --nproc_per_node=N -m verl.cli sft ..., or leave cluster.backend out"
            raise Refused(f"cluster.backend=torchrun, but torchrun did not start several processes: {fix}")
        return section
    if section.backend == "ray":
        raise Refused(
            f"cluster.backend=ray, but torchrun started {launch.world_size} processes: start one without torchrun, or "
            "leave cluster.backend out"
        )
    nodes = launch.world_size // launch.local_world_size
    return replace(section, backend=BACKEND, ranks_per_node=launch.local_world_size, nodes=nodes)
