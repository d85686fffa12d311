"""The sections of the configuration about processes: where they run, and how they share a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from verl.bounds import NonNegativeInt, Positive, PositiveInt, one_of


@dataclass(frozen=True)
class ClusterConfig:
    """The processes of a run: where they run, and the resources of each."""

    backend: Annotated[str, one_of("inproc|processes|ray|torchrun")] = "inproc"
    """inproc: everything in this process · processes: the ranks of models in child processes on this machine · ray:
    workers and rollout replicas in processes of their own · torchrun: SFT, RM and DPO in the processes that torchrun
    started, where it is set automatically."""
    virtual_ranks: PositiveInt = 1
    """inproc: data-parallel ranks that take turns at one engine; must divide the groups of an optimizer step."""
    address: str | None = None  # A running Ray cluster (`auto`, or HOST:PORT). Null: a new one on this machine.
    nodes: PositiveInt = 1
    ranks_per_node: PositiveInt = 1  # Ranks of every model on each node; all of them train together.
    pools: dict[str, Any] = field(default_factory=dict)
    """{NAME: {nodes, ranks_per_node, cpus_per_rank (1), gpus_per_rank, resource, resource_per_rank, device, env,
    dtype}}. The pool `main` is always there; its nodes, ranks, device and dtype are cluster.nodes,
    cluster.ranks_per_node, model.device and model.dtype. Where model.device is cuda, gpus_per_rank is 1 in a pool that
    names neither a resource nor a device; models compute on a GPU if it is above 0."""
    roles: dict[str, str] = field(default_factory=dict)  # {ROLE: POOL}; `rollout` is a role; the rest lives in `main`.
    start_timeout_s: Positive = 60.0  # The longest wait for the nodes of the pools, or for a child process to start.
    max_restarts: NonNegativeInt = 3  # Restarts from the last checkpoint after a process has died.


@dataclass(frozen=True)
class ParallelConfig:
    """How the ranks of a model divide it; the remaining dimension is data parallelism. See model_engine/layout.py."""

    replicate: PositiveInt = 1  # Copies of the sharded model (HSDP).
    sequence: PositiveInt = 1  # Ranks that share the tokens of a row (Ulysses).
    context: PositiveInt = 1  # Ranks that share the tokens of a row, with the keys and values of all.
    tensor: PositiveInt = 1  # Ranks that share every matrix.
    pipeline: PositiveInt = 1  # Stages: ranks that share the layers.
    expert: PositiveInt = 1  # Ranks that share the experts of a mixture.
