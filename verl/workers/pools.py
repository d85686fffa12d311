"""Resource pools: how many processes run on how many nodes, and the devices of each. No Ray, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Literal

import msgspec

from verl.bounds import NonNegative, PositiveInt
from verl.errors import Refused
from verl.names import did_you_mean
from verl.workers.sections import ClusterConfig

MAIN = "main"
ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        **{key: f"cluster.{key}" for key in ("nodes", "ranks_per_node")},
        **{key: f"model.{key}" for key in ("device", "dtype")},
    }
)
"""The fields of the pool `main` that are keys of their own."""
NO_MODEL = ("rollout", "compute", "recorder")
"""Roles without the ranks of a model."""
FROZEN = ("ref", "reward_model")
LOAD: Mapping[str, int] = MappingProxyType(
    {"actor": 4, "critic": 4, "trainer": 4, "rollout": 2, "compute": 0, "recorder": 0}
)
"""The number of arrays of the size of a model that each role has on its pool; 1 for a role that is not listed."""
TRIES = 10_000  # placements that are tried before the pools are assumed to fit; the cluster decides then


class Shortage(Refused):
    """There are no nodes, or not enough of them, with the resources of a pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A pool: processes on nodes, each with the same resources."""

    nodes: PositiveInt = 1
    ranks_per_node: PositiveInt = 1
    cpus_per_rank: NonNegative = 1.0
    gpus_per_rank: NonNegative = 0.0
    resource: str = ""  # A non-GPU accelerator, by its Ray name (`ray start --resources='{"NAME": 8}'`).
    resource_per_rank: NonNegative = 1.0
    device: str = ""  # torch's name of the device of its models. Empty: derived from the resources of a rank.
    env: dict[str, str | int | float] = field(default_factory=dict)  # Variables of its processes.
    dtype: Literal["", "bfloat16", "float32"] = (
        ""  # The dtype of models that `cluster.roles` sends there. Empty: model.dtype.
    )

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def computes_on(self) -> str:
        """torch's name of the device: `device` if given, cuda for a GPU share, else the name of the resource."""
        return self.device or ("cuda" if self.gpus_per_rank > 0 else self.resource or "cpu")

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one rank, by Ray's names."""
        wanted = {"CPU": self.cpus_per_rank, "GPU": self.gpus_per_rank}
        if self.resource:
            wanted[self.resource] = self.resource_per_rank
        return {name: amount for name, amount in wanted.items() if amount > 0}


def fit_alone(name: str, pool: Pool, nodes: Mapping[str, Mapping[str, float]]) -> str | None:
    """Return None if these nodes ({address: {resource: amount}}) have room for the pool, else an error text with the
    resources that each of them lacks. The `ranks_per_node` ranks of a node stay together."""
    room = {node: _ranks_on(pool, has) for node, has in nodes.items()}
    if sum(min(ranks // pool.ranks_per_node, pool.nodes) for ranks in room.values()) >= pool.nodes:
        return None
    lacks = []
    for node, has in nodes.items():
        of = ", ".join(f"{has.get(what, 0):g} {what}" for what in pool.bundle)
        lacks.append(f"{node} has {of}: room for {room[node]}")
    wanted = " and ".join(f"{amount:g} {what}" for what, amount in pool.bundle.items())
    return (
        f"cluster.pools.{name} asks for {pool.nodes} nodes with {pool.ranks_per_node} ranks of {wanted} each, and no "
        f"nodes hold that: {'; '.join(lacks)}; lower cluster.nodes or cluster.ranks_per_node, or add nodes"
    )


def fit_together(pools: Mapping[str, Pool], nodes: Mapping[str, Mapping[str, float]]) -> str | None:
    """Return None if these nodes have room for all pools at once, else an error text: of the first pool that is too
    large by itself, or of all pools together."""
    for name, pool in pools.items():
        if (short := fit_alone(name, pool, nodes)) is not None:
            return short
    groups = [{what: each * p.ranks_per_node for what, each in p.bundle.items()} for p in pools.values()]
    requested = [group for group, pool in zip(groups, pools.values(), strict=True) for _ in range(pool.nodes)]
    kinds = sorted({what for group in groups for what in group})
    has = {node: {what: of.get(what, 0.0) for what in kinds} for node, of in nodes.items()}
    if _placed(sorted(requested, key=lambda group: -sum(group.values())), [*has.values()]):
        return None
    sums = [(what, sum(g.get(what, 0.0) for g in requested), sum(of[what] for of in has.values())) for what in kinds]
    lacking = ", ".join(
        f"{wanted:g} {what} where there are {there:g}" for what, wanted, there in sums if wanted > there
    )
    held = "; ".join(f"{node} has {', '.join(f'{of[what]:g} {what}' for what in kinds)}" for node, of in has.items())
    return (
        f"{' and '.join(f'cluster.pools.{name}' for name in pools)} fit one by one, but not together: they ask for "
        f"{lacking or 'more on one node than others leave there'} ({held}); let roles share a pool (cluster.roles), "
        "lower ranks_per_node or what a rank holds, or add nodes"
    )


def seen(pools: Mapping[str, Pool], nodes: Mapping[str, Mapping[str, float]]) -> str:
    """Return one line of text with the nodes, their resources, and the pools on them."""
    kinds = dict.fromkeys(["GPU", "CPU", *(what for pool in pools.values() for what in pool.bundle)])
    has = [f"{node} has {', '.join(f'{of[k]:g} {k}' for k in kinds if of.get(k))}" for node, of in nodes.items()]
    wanted = [f"{name} ({pool.nodes} x {pool.ranks_per_node} ranks)" for name, pool in pools.items()]
    return f"cluster: {len(nodes)} nodes ({'; '.join(has)}) hold pools {', '.join(wanted)}"


def _placed(groups: Sequence[Mapping[str, float]], nodes: Sequence[dict[str, float]]) -> bool:
    """Return True if all groups of ranks fit on the nodes together, and also after TRIES failed states: then the
    cluster decides."""
    hopeless: set[object] = set()

    def place(first: int) -> bool:
        state = (first, *sorted(tuple(node.values()) for node in nodes))
        if first == len(groups) or len(hopeless) >= TRIES:
            return True
        if state not in hopeless:
            for node in nodes:
                if all(node[what] + 1e-9 >= amount for what, amount in groups[first].items()):
                    before = dict(node)
                    node.update({what: node[what] - amount for what, amount in groups[first].items()})
                    found = place(first + 1)
                    node.update(before)
                    if found:
                        return True
            hopeless.add(state)
        return False

    return place(0)


def _ranks_on(pool: Pool, has: Mapping[str, float]) -> int:
    return min((int(has.get(what, 0.0) / amount + 1e-9) for what, amount in pool.bundle.items()), default=pool.ranks)


def main_pool(section: ClusterConfig, device: str) -> Pool:
    """Return the pool `main`, with as many ranks as every model."""
    given, ranks = section.pools.get(MAIN, {}), {key: getattr(section, key) for key in ("nodes", "ranks_per_node")}
    return pool_of({**given, **ranks} if isinstance(given, Mapping) else given, device)


def pool_of(given: object, device: str) -> Pool:
    """Return the pool of one entry of `cluster.pools`. If `device` is cuda, each of its ranks has a GPU, unless the
    entry gives another number or names another device."""
    own = isinstance(given, Mapping) and not (given.get("resource") or given.get("device"))
    default = {"gpus_per_rank": 1.0 if device == "cuda" else 0.0}
    return msgspec.convert({**default, **given} if own and isinstance(given, Mapping) else given, Pool)


def placed_by_load(role: str) -> bool:
    """Return True for a role that has the least loaded pool where `cluster.roles` does not name it."""
    return role in FROZEN or role.startswith("teacher")


def pools_of(section: ClusterConfig, roles: Sequence[str], *, device: str) -> tuple[dict[str, Pool], dict[str, str]]:
    """Return ({name: pool}, {role: name of its pool}) for these roles and `rollout`. Raise Refused with one line for
    each contradiction in the section."""
    pools: dict[str, Pool] = {}
    faults = []
    keys = [field.name for field in fields(Pool)]
    for name in dict.fromkeys((MAIN, *section.pools)):
        at, given = f"cluster.pools.{name}", section.pools.get(name, {})
        unknown = [key for key in given if key not in keys] if isinstance(given, Mapping) else []
        faults += [f"{at}.{key}: unknown; {did_you_mean(key, keys)}There are: {', '.join(keys)}" for key in unknown]
        try:
            pools[name] = main_pool(section, device) if name == MAIN else pool_of(given, device)
        except msgspec.ValidationError as e:
            faults.append(f"{at}={given}: {e}")
            pools[name] = Pool()
        if name == MAIN and isinstance(given, Mapping):
            faults += [f"{at}.{key}: of this pool it is {other}" for key, other in ELSEWHERE.items() if key in given]
    faults += [
        f"cluster.pools.{name}: its ranks hold nothing; give cpus_per_rank, gpus_per_rank or resource"
        for name, pool in pools.items()
        if not pool.bundle
    ]
    lives = {role: section.roles.get(role, MAIN) for role in (*roles, "rollout")}
    for role in filter(placed_by_load, roles):
        if role not in section.roles:
            lives[role] = _least_loaded(pools, {other: at for other, at in lives.items() if other != role})
    for role, name in section.roles.items():
        at = f"cluster.roles.{role}"
        if role not in lives:
            faults.append(f"{at}: no such role in this run; {did_you_mean(role, lives)}There are: {', '.join(lives)}")
        if name not in pools:
            faults.append(f"{at}={name}: no such pool; {did_you_mean(name, pools)}There are: {', '.join(pools)}")
    faults += _devices(pools, lives)
    unused = [name for name in pools if name not in section.roles.values() and name not in lives.values()]
    faults += [
        f"cluster.pools.{name}: no role lives there; name one in cluster.roles, or leave it out" for name in unused
    ]
    if faults:
        raise Refused("\n".join(faults))
    return pools, lives


def _devices(pools: Mapping[str, Pool], lives: Mapping[str, str]) -> Iterator[str]:
    """Yield an error text for each pool in which a rank has a fraction above one device, or several devices that
    several roles would share."""
    for name, pool in pools.items():
        here = [role for role, at in lives.items() if at == name]
        for key, amount in (("gpus_per_rank", pool.gpus_per_rank), ("resource_per_rank", pool.resource_per_rank)):
            at = f"cluster.pools.{name}.{key}"
            if amount > 1 and amount != int(amount):
                fix = f"use {math.floor(amount)} or {math.ceil(amount)}"
                yield f"{at}={amount:g}: above 1 a rank holds whole devices; {fix}"
            elif amount > 1 and len(here) > 1:
                yield (
                    f"{at}={amount:g}: the roles of a pool share its devices, and several cannot be shared: "
                    f"{', '.join(here)}; use 1, or give each of them a pool in cluster.roles"
                )


def _least_loaded(pools: Mapping[str, Pool], lives: Mapping[str, str]) -> str:
    """Return the name of the pool with the least load among those with as many ranks, the devices and the dtype of
    `main`; `main` itself if loads are equal."""
    main = pools[MAIN]
    wanted = (main.ranks, main.gpus_per_rank, main.resource, main.dtype)
    able = [name for name, p in pools.items() if (p.ranks, p.gpus_per_rank, p.resource, p.dtype) == wanted]
    return min(able, key=lambda name: sum(LOAD.get(role, 1) for role, at in lives.items() if at == name))
