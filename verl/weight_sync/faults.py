"""Faults of configurations with each sync engine. No torch is imported here.

`pools` are the pools of a run by name, and `roles` the pool of each role; both are empty for a run in one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from verl.config.backends import ray_address
from verl.config.cluster import needs_one_machine
from verl.config.devices import on_cuda
from verl.config.schema import Config
from verl.workers.pools import Pool

Pools = Mapping[str, Pool]
Roles = Mapping[str, str]
ON_GPU = (
    "sync.engine=ipc: weights pass through a GPU's memory, and {models} of this run are on CPUs; set sync.engine=shm"
)


def tcp_faults(config: Config, pools: Pools, roles: Roles) -> Iterator[str]:
    """Yield the faults of sync.engine=tcp: `delta` compares whole versions, which buckets never form."""
    given = config.sync.engine_options
    if given.get("delta") and given.get("bucket_mb") is not None:
        why = "what changed is told of whole versions, which no host has where they pass through buckets"
        yield f"sync.engine_options.delta=true with sync.engine_options.bucket_mb={given['bucket_mb']}: {why}; take one"


def ipc_faults(config: Config, pools: Pools, roles: Roles) -> Iterator[str]:
    """Yield the faults of sync.engine=ipc. Its buckets are on the GPU of the actor's first rank, and Ray shows a
    process only its own GPUs."""
    if config.cluster.backend != "ray" and not on_cuda(config):
        yield ON_GPU.format(models="the models")
    if far := _off_gpu(pools, roles):
        yield ON_GPU.format(models=" and ".join(far))
    elif {"actor", "rollout"} <= roles.keys() and config.rollout.url is None:
        why = "the weights lie on the GPU of the actor's first rank, and Ray shows each process its own alone"
        if (at := roles["rollout"]) == (home := roles["actor"]):
            if (replicas := config.rollout.replicas) > 1:
                yield f"rollout.replicas={replicas} with sync.engine=ipc: {why}; set sync.engine=shm, or one"
        elif ray_address(config) is None:  # otherwise it may be on another machine: another fault
            fix = f"set sync.engine=shm, or let rollout live with the actor, in {home}"
            yield f"cluster.roles.rollout={at} with sync.engine=ipc: {why}; {fix}"


def collective_faults(config: Config, pools: Pools, roles: Roles) -> Iterator[str]:
    """Yield the faults of sync.engine=collective: NCCL needs the actor and the rollout on GPUs."""
    if config.sync.engine_options.get("backend") != "nccl":
        return
    if config.cluster.backend == "inproc" and not on_cuda(config):
        yield "sync.engine_options.backend=nccl: the models of this run are on CPUs; leave it out (gloo)"
    if far := _off_gpu(pools, roles):
        yield f"sync.engine_options.backend=nccl: {' and '.join(far)} of this run are not on GPUs; leave it out (gloo)"


def disk_faults(config: Config, pools: Pools, roles: Roles) -> Iterator[str]:
    """Yield a fault if the folder of versions is on this machine's disk and replicas may be on another machine."""
    if roles and ray_address(config) is not None and config.sync.engine_options.get("folder") is None:
        fix = "set sync.engine_options.folder to one that all machines see"
        yield from needs_one_machine(config, pools, roles, "lies on the disk of one machine", fix)


def _off_gpu(pools: Pools, roles: Roles) -> list[str]:
    """Return the roles, of actor and rollout, with pools that do not compute on GPUs."""
    return [role for role in ("actor", "rollout") if role in roles and pools[roles[role]].computes_on != "cuda"]
