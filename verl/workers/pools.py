"""Resource pools: how many processes on how many nodes, and what each of them holds. No Ray, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from verl.bounds import NonNegative, PositiveInt


class Shortage(ValueError):
    """No node, or not enough nodes, can hold what a pool asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Processes that share nothing but their devices. resource: the name of an accelerator that is not a GPU, as the
    cluster knows it (`ray start --resources='{"NAME": 8}'`) · env: variables of its processes."""

    nodes: PositiveInt = 1
    ranks_per_node: PositiveInt = 1
    cpus_per_rank: NonNegative = 1.0
    gpus_per_rank: NonNegative = 0.0
    resource: str = ""
    resource_per_rank: NonNegative = 1.0
    env: dict[str, str] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def bundle(self) -> dict[str, float]:
        """What one rank holds, by Ray's names."""
        asked = {"CPU": self.cpus_per_rank, "GPU": self.gpus_per_rank}
        if self.resource:
            asked[self.resource] = self.resource_per_rank
        return {name: amount for name, amount in asked.items() if amount > 0}


def fit(name: str, pool: Pool, nodes: Mapping[str, Mapping[str, float]]) -> str | None:
    """None if these nodes ({address: {resource: amount}}) can hold the pool, else what each of them lacks."""
    room = {node: _ranks_on(pool, has) for node, has in nodes.items()}
    if sum(min(ranks, pool.ranks) for ranks in room.values()) >= pool.ranks:
        return None
    lacks = []
    for node, has in nodes.items():
        of = ", ".join(f"{has.get(what, 0):g} {what}" for what in pool.bundle)
        lacks.append(f"{node} has {of}: room for {room[node]}")
    wanted = " and ".join(f"{amount:g} {what}" for what, amount in pool.bundle.items())
    return (
        f"cluster.pools.{name} asks for {pool.ranks} ranks with {wanted} each, and no nodes hold that: "
        f"{'; '.join(lacks)}; lower cluster.nodes or cluster.ranks_per_node, or add nodes"
    )


def _ranks_on(pool: Pool, has: Mapping[str, float]) -> int:
    return min((int(has.get(what, 0.0) / amount + 1e-9) for what, amount in pool.bundle.items()), default=pool.ranks)
