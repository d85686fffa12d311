"""Resource pools: how many processes on how many nodes, and what each of them holds. No Ray, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from verl.bounds import NonNegative, PositiveInt
from verl.workers.group import ClusterContext
from verl.workers.sections import ClusterConfig

MAIN = "main"


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


def pools_of(section: ClusterConfig, context: ClusterContext) -> tuple[dict[str, Pool], dict[str, str]]:
    """({name: pool}, {role: name}) as the section says; ValueError for what it cannot mean."""
    gpus = (1.0 if context.device == "cuda" else 0.0) if section.gpus_per_rank is None else section.gpus_per_rank
    pools = {
        MAIN: Pool(
            nodes=section.nodes,
            ranks_per_node=section.ranks_per_node,
            cpus_per_rank=section.cpus_per_rank,
            gpus_per_rank=gpus,
            resource=section.resource,
            env=section.env,
        )
    }
    for name, given in section.pools.items():
        try:
            pools[name] = msgspec.convert(given, Pool)
        except msgspec.ValidationError as e:
            raise ValueError(f"cluster.pools.{name}={given}: {e}") from None
    roles = {role: section.roles.get(role, MAIN) for role in (*context.roles, "rollout")}
    for role, name in section.roles.items():
        if role not in roles:
            raise ValueError(f"cluster.roles.{role}: no such role in this run; there are {', '.join(sorted(roles))}")
        if name not in pools:
            raise ValueError(f"cluster.roles.{role}={name}: no such pool; there are {', '.join(pools)}")
    if unused := sorted(pools.keys() - set(roles.values())):
        raise ValueError(f"cluster.pools.{unused[0]}: no role lives there; name one in cluster.roles, or leave it out")
    return pools, roles
