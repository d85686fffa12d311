"""Which roles share devices, and how many devices each set of roles gets: Algorithm 1 of HybridFlow (arXiv 2409.19256).

The roles are divided into sets in every way. Each set gets devices of its own, on which its models compute one after
the other, while other sets compute at the same time. The seconds of a step are the sum over its stages of the slowest
set. `latency.py` has the seconds of a call; this file knows roles, stages and calls, and no algorithm."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import le
from typing import Literal

from verl.errors import Refused
from verl.planner.hardware import Nodes, total
from verl.planner.latency import (
    RESERVE,
    TENSOR,
    Division,
    Kind,
    ModelSize,
    StepWork,
    Stored,
    activation_bytes,
    divisions,
    generate_s,
    held_bytes,
    infer_s,
    moved_per_s,
    published_s,
    resharded_bytes,
    update_s,
)

Aim = Literal["time", "cost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRole:
    """A model of a step."""

    name: str
    model: ModelSize
    calls: tuple[tuple[str, Kind], ...]
    """(stage, what it computes there), in the order of the step."""
    base: str | None = None
    """The role that owns the weights with which it computes; it is then in that role's set."""
    weights_of: str | None = None
    """The role that trains the weights with which it only generates: on other devices they are sent there."""
    parts: tuple[tuple[int, int], ...] = ()
    """(tensor, pipeline) of the divisions that it may have; empty: all."""

    @property
    def trained(self) -> bool:
        return any(kind == "train" for _, kind in self.calls)

    @property
    def generates_only(self) -> bool:
        return all(kind == "generate" for _, kind in self.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimes:
    """A set of roles on a number of devices."""

    devices: int
    seconds: tuple[float, ...]
    """By stage."""
    divisions: dict[str, Division] = field(default_factory=dict)
    """How the devices divide each role's model."""
    engine_devices: int = 0
    """The devices of one rollout engine; 0: no role of the set generates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedSet:
    """A set of roles with its devices."""

    roles: tuple[str, ...]
    group: int
    """The index of its nodes in the cluster."""
    times: SetTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlacement:
    """The best devices of one division of the roles into sets."""

    sets: tuple[PlacedSet, ...]
    step_s: float
    price: float
    """The price of a step; 0 if the cluster has no prices."""

    def key(self, aim: Aim) -> tuple[float, float]:
        """Return what placements are ordered by: the first number is to be small."""
        return (self.price, self.step_s) if aim == "cost" else (self.step_s, self.price)


Times = Callable[[tuple[str, ...], int, int], SetTimes | None]
"""(roles of a set, index of the node group, devices) -> the set on them; None: it does not fit."""


def stages_of(roles: Sequence[PlannedRole]) -> tuple[str, ...]:
    """Return the stages of a step in order. Raise Refused if two roles have them in opposite orders."""
    before = {(a, b) for role in roles for a, b in itertools.pairwise(_distinct(stage for stage, _ in role.calls))}
    names, out = list(_distinct(stage for role in roles for stage, _ in role.calls)), list[str]()
    while names:
        free = [name for name in names if not any(a in names for a, b in before if b == name)]
        if not free:
            raise Refused(f"the stages {', '.join(names)} wait for each other: the calls of the roles are a cycle")
        out.append(free[0])
        names.remove(free[0])
    return tuple(out)


def _distinct(names: Iterator[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def partitions(names: Sequence[str]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yield every division of the names into sets: 1, 2, 5, 15, 52, ... of them (Bell numbers)."""
    if not names:
        yield ()
        return
    first, *rest = names
    for sets in partitions(rest):
        yield ((first,), *sets)
        for i, one in enumerate(sets):
            yield (*sets[:i], (first, *one), *sets[i + 1 :])


def device_counts(at: Nodes) -> list[int]:
    """Return the numbers of devices that a set can get: divisors of a node, then whole nodes."""
    inside = [n for n in range(1, at.devices_per_node) if at.devices_per_node % n == 0]
    return [*inside, *(n * at.devices_per_node for n in range(1, at.nodes + 1))]


StepOf = Callable[[Sequence[float]], float]
"""The seconds of the slowest set by stage -> the seconds of a step."""


def step_of(roles: Sequence[PlannedRole], overlap: bool) -> StepOf:
    """Return how the stages of a step add up. overlap: the stages of roles that only generate are beside the others,
    so that a step takes as long as the slower of the two."""
    if not overlap:
        return sum
    others = {stage for role in roles if not role.generates_only for stage, _ in role.calls}
    beside = [i for i, stage in enumerate(stages_of(roles)) if stage not in others]

    def slower(seconds: Sequence[float]) -> float:
        generated = sum(seconds[i] for i in beside)
        return max(generated, sum(seconds) - generated)

    return slower


def placements(
    roles: Sequence[PlannedRole], cluster: Sequence[Nodes], times: Times, aim: Aim = "time", overlap: bool = False
) -> list[RolePlacement]:
    """Return the best placement of each division of the roles into sets that fits, best first; with `overlap` those in
    which roles that only generate have devices of their own, and work beside the others."""
    step = step_of(roles, overlap)
    every = (best_devices(sets, cluster, times, aim, step) for sets in divided(roles, cluster, overlap))
    return sorted((best for best in every if best is not None), key=lambda best: (best.key(aim), len(best.sets)))


def divided(
    roles: Sequence[PlannedRole], cluster: Sequence[Nodes], overlap: bool = False
) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yield the divisions of the roles into sets that are possible: a role is with its base, and with `overlap` roles
    that only generate are by themselves."""
    base = {role.name: role.base for role in roles if role.base is not None}
    alone = {role.name for role in roles if role.generates_only} if overlap else set[str]()
    for sets in partitions([role.name for role in roles]):
        at = {name: i for i, one in enumerate(sets) for name in one}
        if any(at[name] != at.get(of) for name, of in base.items()) or len(sets) > total(cluster):
            continue
        if not any(alone & {*one} and not alone >= {*one} for one in sets):
            yield sets


def best_devices(
    sets: Sequence[tuple[str, ...]], cluster: Sequence[Nodes], times: Times, aim: Aim, step: StepOf
) -> RolePlacement | None:
    """Return the best devices of these sets; None if they have no place. It is a depth-first search over the devices of
    one set after the other, without branches that cannot become better than the best one."""
    choices = [_useful(one, cluster, times) for one in sets]
    if not all(choices):
        return None
    order = sorted(range(len(sets)), key=lambda i: -min(sum(t.seconds) for _, t in choices[i]))
    search = _Search(cluster, [choices[i] for i in order], aim, step)
    search.descend(0, [group.devices for group in cluster], (0.0,) * len(choices[0][0][1].seconds), 0.0, [])
    if search.best is None:
        return None
    placed = dict(zip(order, search.best))
    return RolePlacement(
        sets=tuple(PlacedSet(roles=one, group=placed[i][0], times=placed[i][1]) for i, one in enumerate(sets)),
        step_s=search.best_s,
        price=search.best_price,
    )


def _useful(roles: tuple[str, ...], cluster: Sequence[Nodes], times: Times) -> list[tuple[int, SetTimes]]:
    """Return (node group, the set on some of its devices) for each number of devices on which the set fits, without
    those that are in no stage faster than some fewer devices of the group."""
    out = list[tuple[int, SetTimes]]()
    for group, at in enumerate(cluster):
        kept = list[SetTimes]()
        for devices in device_counts(at):
            found = times(roles, group, devices)
            if found is None or any(all(map(le, one.seconds, found.seconds)) for one in kept):
                continue
            kept.append(found)
        out += ((group, one) for one in kept)
    return out


class _Search:
    """The depth-first search of `best_devices`."""

    def __init__(
        self, cluster: Sequence[Nodes], choices: Sequence[list[tuple[int, SetTimes]]], aim: Aim, step: StepOf
    ) -> None:
        self._cluster, self._choices, self._aim, self._step = cluster, choices, aim, step
        self.best: list[tuple[int, SetTimes]] | None = None
        self.best_s = self.best_price = math.inf

    def descend(
        self, at: int, left: list[int], slowest: tuple[float, ...], hourly: float, chosen: list[tuple[int, SetTimes]]
    ) -> None:
        """Try all devices of the sets from number `at` on. left: devices that are free, by group · slowest: seconds of
        the slowest chosen set, by stage · hourly: the price of the chosen devices."""
        if at == len(self._choices):
            step_s, price = self._step(slowest), self._step(slowest) * hourly / 3600
            if self.best is None or self._key(step_s, price) < self._key(self.best_s, self.best_price):
                self.best, self.best_s, self.best_price = list(chosen), step_s, price
            return
        for group, times in self._choices[at]:
            if times.devices > left[group]:
                continue
            left[group] -= times.devices
            stages = tuple(map(max, slowest, times.seconds))
            paid = hourly + times.devices * self._cluster[group].price_per_hour
            if self._may_win(at + 1, left, stages, paid):
                chosen.append((group, times))
                self.descend(at + 1, left, stages, paid, chosen)
                chosen.pop()
            left[group] += times.devices

    def _may_win(self, at: int, left: Sequence[int], stages: tuple[float, ...], hourly: float) -> bool:
        """Return False if no devices of the sets from `at` on can make the best placement: each needs at least the
        seconds of each stage that it has on all devices that are left."""
        for choices in self._choices[at:]:
            fitting = [times.seconds for group, times in choices if times.devices <= left[group]]
            if not fitting:
                return False
            stages = tuple(map(max, stages, map(min, *fitting) if len(fitting) > 1 else fitting[0]))
        if self.best is None:
            return True
        step_s = self._step(stages)
        return self._key(step_s, step_s * hourly / 3600) < self._key(self.best_s, self.best_price)

    def _key(self, step_s: float, price: float) -> tuple[float, float]:
        return (price, step_s) if self._aim == "cost" else (step_s, price)


# -- the seconds of a set of models ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The work of a step, and how models may be divided."""

    work: StepWork
    stored: Stored = field(default_factory=Stored)
    layout: Division | None = None
    """The division of every model that infers or trains; None: each has the best one."""
    engines: tuple[int, ...] = TENSOR
    """The numbers of devices that a rollout engine can have."""
    limited: bool = True
    """Sets that do not fit into the memory have no seconds; False: the caller counts the memory."""
    version_bytes: float = 0.0
    """The bytes of the weights that reach engines which other roles train; 0: an item for each parameter."""


def times_of(roles: Sequence[PlannedRole], cluster: Sequence[Nodes], rules: Rules) -> Times:
    """Return the function of the seconds of a set: the best division of each model over the devices of the set, of
    those that fit into the memory together, and the best size of the engines that generate."""
    by_name, stages = {role.name: role for role in roles}, stages_of(roles)
    far = len(cluster) > 1 or any(at.nodes > 1 for at in cluster)
    kept: dict[tuple[tuple[str, ...], int, int], SetTimes | None] = {}
    ways: dict[tuple[str, int, int], list[_Way]] = {}

    def ways_of(name: str, group: int, devices: int) -> list[_Way]:
        key = (name, group, devices)
        if key not in ways:
            ways[key] = _ways(by_name[name], stages, devices, cluster[group], rules)
        return ways[key]

    def times(names: tuple[str, ...], group: int, devices: int) -> SetTimes | None:
        key = (names, group, devices)
        if key not in kept:
            found = [ways_of(name, group, devices) for name in names]
            together = [by_name[name] for name in names]
            sent = far if any(role.weights_of not in (None, *names) for role in together) else None
            kept[key] = _together(together, found, stages, devices, cluster[group], rules, sent)
        return kept[key]

    return times


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to divide a role's model."""

    division: Division
    held: float
    """Bytes of a device between calls."""
    passing: float
    """Bytes of a device during its calls."""
    seconds: tuple[float, ...]
    """By stage, without what it generates."""


def _ways(role: PlannedRole, stages: Sequence[str], devices: int, at: Nodes, rules: Rules) -> list[_Way]:
    """Return the ways to divide a role's model, without those that are slower and larger than another."""
    work, stored, item_bytes, out = rules.work, rules.stored, at.device.item_bytes, list[_Way]()
    if role.generates_only:  # its copy of the weights is that of the engines
        sizes = [n for n in rules.engines if min(devices, at.devices_per_node) % n == 0]
        nothing, copied = (0.0,) * len(stages), item_bytes * role.model.parameters
        return [_Way(Division(n, 1, devices // n), copied / n, 0.0, nothing) for n in sizes]
    sequences = work.sequences // work.updates if role.trained else work.sequences
    for by in divisions(devices, role.model, at, sequences):
        if rules.layout not in (None, by) or (role.parts and (by.tensor, by.pipeline) not in role.parts):
            continue
        seconds = dict.fromkeys(stages, 0.0)
        for stage, kind in role.calls:
            if kind == "infer":
                seconds[stage] += infer_s(role.model, by, at, work, stored)
            elif kind == "train":
                seconds[stage] += update_s(role.model, by, at, work, stored)
        held = 0.0 if role.base else held_bytes(role.model, by, role.trained, stored, item_bytes)
        passing = activation_bytes(role.model, by, work, item_bytes) if role.trained else 0.0
        out.append(_Way(by, held, passing, tuple(seconds.values())))
    out.sort(key=lambda way: (sum(way.seconds), way.held + way.passing))
    kept, least = list[_Way](), math.inf
    for way in out:
        if way.held + way.passing < least:
            kept.append(way)
            least = way.held + way.passing
    return kept


def _together(
    roles: Sequence[PlannedRole],
    ways: Sequence[Sequence[_Way]],
    stages: Sequence[str],
    devices: int,
    at: Nodes,
    rules: Rules,
    far: bool | None,
) -> SetTimes | None:
    """Return the set with the ways of its roles that fit together and take the least time, None if none fit. far: the
    weights with which it only generates are trained on other nodes; None: on its own devices."""
    room = (1 - RESERVE) * 1e9 * at.device.memory_gb if rules.limited else math.inf
    generate = [(i, stages.index(s)) for i, role in enumerate(roles) for s, kind in role.calls if kind == "generate"]
    best: SetTimes | None = None
    for chosen in itertools.product(*ways):
        held = sum(way.held for way in chosen)
        seconds = [sum(times) for times in zip(*(way.seconds for way in chosen))]
        fits = held + max(way.passing for way in chosen) <= room
        if not fits or (best is not None and sum(seconds) >= sum(best.seconds)):
            continue
        engine_devices, found = (
            0,
            [_generated(roles[i], chosen[i], devices, at, rules, room - held, far) for i, _ in generate],
        )
        for (_, stage), one in zip(generate, found):
            engine_devices, took = one or (0, math.inf)
            seconds[stage] += took
        if sum(seconds) < (math.inf if best is None else sum(best.seconds)):
            best = SetTimes(
                devices=devices,
                seconds=tuple(seconds),
                divisions={role.name: way.division for role, way in zip(roles, chosen)},
                engine_devices=engine_devices,
            )
    return best


def _generated(
    role: PlannedRole, way: _Way, devices: int, at: Nodes, rules: Rules, free: float, far: bool | None
) -> tuple[int, float] | None:
    """Return the best size of an engine and the seconds in which all answers are generated, with the copy of the
    weights to the engines; None if no answer's keys and values fit. free: bytes of a device."""
    model, by, out = role.model, way.division, list[tuple[float, int]]()
    for tensor in (by.tensor,) if role.generates_only else rules.engines:
        if tensor > at.devices_per_node or devices % tensor:
            continue
        gathered = copied_s = 0.0
        if far is not None and role.generates_only:
            version = rules.version_bytes or at.device.item_bytes * model.parameters
            copied_s = published_s(version, tensor, at, far)
        elif not role.generates_only:
            gathered = resharded_bytes(model.parameters, by, tensor, item_bytes=at.device.item_bytes)
            copied_s = gathered / moved_per_s(by, at)
        took = generate_s(model, devices, tensor, at, rules.work, free - gathered)
        if took is not None:
            out.append((took + copied_s, tensor))
    return min(out)[::-1] if out else None
