"""The placement of a run over processes, with the memory of one rank of each pool."""

from __future__ import annotations

from dataclasses import dataclass, replace

from verl.config.backends import backend_of, engine_name, layout_of, ray_address
from verl.config.cluster import places_of
from verl.config.model_files import describe_model
from verl.config.schema import Config
from verl.config.worker_python import environment_line
from verl.model_engine.layout import Layout
from verl.planner.memory import MemoryEstimate, pool_rank_memory, summed
from verl.planner.transport import SentWeights, sent_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """One pool of processes."""

    nodes: int
    ranks_per_node: int
    each: dict[str, float]
    """The resources of one rank, by Ray's names."""
    roles: tuple[str, ...]
    replicas: int
    """Rollout engines in this pool."""
    device: str
    memory: MemoryEstimate
    """The memory of its fullest rank, on `device`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """The placement of a run over processes."""

    backend: str
    address: str | None
    """The address of a running cluster; None: one is started for this run."""
    layout: str
    """The layout of a model, in words."""
    queue: str
    """The engine of the queue."""
    sync: str
    """The engine of the weight sync."""
    sent: SentWeights
    """The memory of weights that are being sent."""
    pools: dict[str, PoolPlan]
    workers: str | None
    """The versions with which the models are computed; None: those of this process."""

    @property
    def fullest(self) -> MemoryEstimate:
        return max((pool.memory for pool in self.pools.values()), key=lambda memory: memory.peak_bytes)


def cluster_plan(config: Config, update_tokens: int) -> ClusterPlan | None:
    """Return the placement; None if everything runs in this process. update_tokens: the most tokens of one optimizer
    step."""
    c, layout = config.cluster, layout_of(config)
    if c.backend == "inproc":
        return None
    pools, places = places_of(config)
    copies = backend_of(config, "model").copies
    sent, planned = sent_weights(config, describe_model(config.model.path), layout, pools, places), {}
    for name, pool in pools.items():
        roles = tuple(role for role, at in places.items() if at == name and role != "rollout")
        replicas = config.rollout.replicas if places["rollout"] == name else 0
        planned[name] = PoolPlan(
            nodes=pool.nodes,
            ranks_per_node=pool.ranks_per_node,
            each=pool.bundle,
            roles=roles,
            replicas=replicas,
            device=pool.computes_on,
            memory=pool_rank_memory(
                config,
                layout,
                roles,
                -(-replicas // pool.ranks),
                update_tokens,
                arriving_bytes=sent.arriving_bytes * (pool.computes_on == "cpu"),
            ),
        )
    return ClusterPlan(
        backend=c.backend,
        address=ray_address(config),
        layout=layout_text(replace(layout, replicate=layout.data, expert=1) if copies else layout),
        queue=engine_name(config, "queue"),
        sync=engine_name(config, "sync"),
        sent=sent,
        pools=planned,
        workers=environment_line(config),
    )


def memory_on_this_machine(placement: ClusterPlan) -> MemoryEstimate | None:
    """Return the host memory of all processes that this run starts on this machine; None for another Ray cluster, or
    processes that torchrun starts."""
    pools = {name: pool for name, pool in placement.pools.items() if pool.device == "cpu"}
    if placement.backend == "torchrun" or placement.address is not None or not pools:
        return None
    items = {"weights on their way": placement.sent.trainer_bytes}
    for name, pool in pools.items():
        of, ranks = pool.memory, pool.nodes * pool.ranks_per_node
        items |= {f"{item} of {name}": ranks * of.items[item] for item in of.phases[of.peak_phase]}
    return summed(items, {"every process at its peak": [*items]})


def layout_text(layout: Layout) -> str:
    """Return the layout in words: 4 ranks = 2 data x 2 tensor: a rank holds 1/4 of a model."""
    parts = {
        "pipeline": layout.pipeline,
        "data": layout.data,
        layout.tokens_key: layout.tokens,
        "tensor": layout.tensor,
    }
    product = " x ".join(f"{size} {name}" for name, size in parts.items() if size > 1) or "1 data"
    copies = f", in {layout.replicate} copies of the model" if layout.replicate > 1 else ""
    ranks = "1 rank" if layout.world_size == 1 else f"{layout.world_size} ranks"
    held = layout.pipeline * layout.shard * layout.tensor
    return f"{ranks} = {product}{copies}: a rank holds {'about ' * (layout.pipeline > 1)}1/{held} of a model"
