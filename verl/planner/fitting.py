"""The best placements of a run that fit: the plan's own counter of bytes judges the arguments that are printed.

`mapping.py` has the seconds of sets of roles whatever they hold. The search looks at placements in the order of these
seconds. A set that it meets for the first time gets the seconds that it has with the answers at once and the passes for
which its devices have memory, and its placement is put back into the order; sets without room have none."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from verl.bounds import size_text
from verl.config.backends import layout_of, traits_of
from verl.config.cluster import placed_faults, placed_roles
from verl.config.devices import base_format, colocated, device_type_of, rollout_dtype
from verl.config.model_files import describe_model
from verl.config.schema import Config
from verl.config.tree import changed
from verl.errors import Refused
from verl.model_engine.lora_spec import trained_by
from verl.planner.checkpointing import AUTO
from verl.planner.cluster import cluster_plan
from verl.planner.hardware import Nodes, some_devices, total
from verl.planner.latency import RESERVE, Division, StepWork
from verl.planner.mapping import (
    Aim,
    RolePlacement,
    Rules,
    SetTimes,
    Times,
    best_devices,
    device_counts,
    divided,
    step_of,
)
from verl.planner.memory import CACHES, MemoryEstimate, kv_bytes_per_token, pool_rank_memory
from verl.planner.placement import (
    PassSizes,
    PlacedRun,
    SetMemory,
    applied,
    layouts,
    placement_settings,
    planned_roles,
    pool_names,
    rules_of,
    run_times,
    share_option,
)

KEPT = 24
"""Placements after which the search ends: those that are printed, and others for the virtual clock."""
SLOWER = 10
"""It ends too where all others take this many times as long as the best one, or cost as much more."""
ROLLOUT = "rollout"
ENGINE = ("rollout weights", *CACHES, "sampling logits")
"""The items of an engine in the phase of the rollout."""
ANSWERS, TOKENS = "rollout.max_concurrent_sequences", "step.max_tokens_per_microbatch"
CHECKPOINTING = "model.gradient_checkpointing"
"""The keys that change so that a placement fits, unless the command line has them."""
LORA = "model.lora.rank=32"


def best_placements(
    config: Config, cluster: Sequence[Nodes], work: StepWork, aim: Aim = "time", given: Collection[str] = ()
) -> list[PlacedRun]:
    """Return the best layout and devices of each division of the roles into sets, best first; where the rollout works
    beside the other stages, of each number of devices for it too. Raise Refused with the memory that is missing if no
    division fits. given: keys that keep their values."""
    if not colocated(config) and total(cluster) < 2:
        raise Refused(
            f"pipeline.placement={config.pipeline.placement}, pipeline.staleness={config.pipeline.staleness:g}: the"
            " rollout has devices of its own, and the cluster file has one device. Fix: two or more, or"
            " pipeline.staleness=0 with pipeline.placement=auto"
        )
    search = _Search(config, cluster, work, aim, given)
    found = search.run()
    if not found:
        raise Refused(search.nothing_fits())
    return found


def smallest_cluster(
    config: Config, cluster: Sequence[Nodes], work: StepWork, deadline_s: float, given: Collection[str] = ()
) -> list[PlacedRun]:
    """Return the placements on the fewest devices of a node group on which the best step takes at most `deadline_s`,
    for the group where these devices cost least. Raise Refused with the seconds of the fastest step if none does."""
    if len({at.price_per_hour > 0 for at in cluster}) > 1:
        raise Refused("deadline_s: some groups of the cluster file have a price_per_hour; give it to all or none")
    found = list[tuple[float, int, list[PlacedRun]]]()
    for at in cluster:
        for n in device_counts(at):
            best = _Search(config, [some_devices(at, n)], work, "time", given).run()
            if best and best[0].placement.step_s <= deadline_s:
                found.append((n * at.price_per_hour, n, best))
                break
    if not found:
        step_s = best_placements(config, cluster, work, given=given)[0].placement.step_s
        devices = " or ".join(f"{at.devices} x {at.device.name}" for at in cluster)
        raise Refused(f"deadline_s={deadline_s:g}: the fastest step on {devices} takes about {step_s:.3g} s")
    return min(found, key=lambda one: one[:2])[2]


def passes_of(config: Config, given: Collection[str] = ()) -> list[PassSizes]:
    """Return the passes of an update that are tried, from those of the configuration to the smallest ones: half as many
    tokens, down to those of the longest row, and then with all layers computed again. model.gradient_checkpointing=auto
    begins with none, whatever memory this machine has."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    how, kept = config.model.gradient_checkpointing, CHECKPOINTING in given
    if how == AUTO:
        how, kept = "none", False
    tokens = [config.step.max_tokens_per_microbatch]
    while tokens[-1] > longest and TOKENS not in given:
        tokens.append(max(longest, tokens[-1] // 2))
    ways = [how] if kept or how == "full" else [how, "full"]
    return [PassSizes(n, way) for way in ways for n in tokens]


class MemoryCounter:
    """Counts the memory of sets of roles as the plan does, each once."""

    def __init__(self, config: Config, given: Collection[str] = ()) -> None:
        self._config, self._models = config, frozenset(placed_roles(config))
        s, row = config.step, config.data.max_prompt_tokens + config.rollout.max_response_tokens
        self.update_tokens = s.prompts_per_step * s.samples_per_prompt * row // s.updates_per_step
        self._most = config.rollout.max_concurrent_sequences if ANSWERS in given else math.inf
        on_gpu = device_type_of(config, ROLLOUT) != "cpu"
        self._server = traits_of(config.rollout.engine).server and on_gpu and share_option(config) is not None
        option, options = share_option(config), config.rollout.engine_options
        kept = f"rollout.engine_options.{option}" in given
        self._share = float(options[option]) if option is not None and kept else None  # else the default gives way
        self._kept = dict[tuple[Division, PassSizes, tuple[str, ...], int], MemoryEstimate]()

    def of_rank(self, by: Division, passes: PassSizes, roles: tuple[str, ...], at_once: int) -> MemoryEstimate:
        """Return the memory of the fullest rank of a pool with these roles and an engine that decodes so many answers
        at once."""
        key = (by, passes, roles, at_once)
        if key not in self._kept:
            settings = {
                "cluster.backend": "ray",
                "cluster.ranks_per_node": by.devices,
                "parallel.tensor": by.tensor,
                "parallel.pipeline": by.pipeline,
                TOKENS: passes.micro_tokens,
                CHECKPOINTING: passes.checkpointing,
                ANSWERS: max(1, at_once),
            }
            config, models = changed(self._config, settings), [role for role in roles if role in self._models]
            engines = int(ROLLOUT in roles)
            self._kept[key] = pool_rank_memory(config, layout_of(config), models, engines, self.update_tokens)
        return self._kept[key]

    def of_set(
        self, by: Division, passes: PassSizes, roles: tuple[str, ...], at: Nodes, work: StepWork, engine: int, most: int
    ) -> SetMemory:
        """Return the memory of a set with the most answers at once that fit, `most` at most; with one if none fits. A
        rank has `engine` devices."""
        room = engine * int((1 - RESERVE) * 1e9 * at.device.memory_gb)
        if ROLLOUT not in roles:
            found = self.of_rank(by, passes, roles, 0)
            return _memory_of(found, room)
        most = int(min(most, self._most))
        if self._server:
            return self._of_server(by, passes, roles, at, work, engine, most, room)

        at_once = self._most_that_fit(by, passes, roles, most, room)
        found = self.of_rank(by, passes, roles, at_once)
        return replace(_memory_of(found, room), at_once=at_once)

    def _most_that_fit(self, by: Division, passes: PassSizes, roles: tuple[str, ...], most: int, room: int) -> int:
        """Return the most answers at once that fit, `most` at most; 1 if none does. The bytes of each phase grow with
        them along a straight line, unless an engine rounds them up."""
        one = self.of_rank(by, passes, roles, 1)
        if one.peak_bytes > room:
            return 1
        all_ = self.of_rank(by, passes, roles, most)
        if all_.peak_bytes <= room:
            return most
        grows = {phase: (all_.peaks[phase] - size) / (most - 1) for phase, size in one.peaks.items()}
        high = min(1 + int((room - one.peaks[phase]) / each) for phase, each in grows.items() if each > 0)
        low, high = 1, min(high, most - 1) + 1
        tried = high - 1
        while low < high - 1:
            fits = self.of_rank(by, passes, roles, tried).peak_bytes <= room
            low, high = (tried, high) if fits else (low, tried)
            tried = (low + high) // 2
        return low

    def _of_server(
        self,
        by: Division,
        passes: PassSizes,
        roles: tuple[str, ...],
        at: Nodes,
        work: StepWork,
        engine: int,
        most: int,
        room: int,
    ) -> SetMemory:
        """Return the memory of a set with a server, which takes a share of its devices whatever it decodes: all that
        the others leave in the rollout, or the share that is given."""
        found, whole = self.of_rank(by, passes, roles, 1), engine * 1e9 * at.device.memory_gb
        others = sum(found.items[item] for item in found.phases[ROLLOUT] if item not in ENGINE)
        share = self._share or max(0.01, math.floor(100 * (room - others) / whole) / 100)
        model = describe_model(self._config.model.path)
        answer = kv_bytes_per_token(model, rollout_dtype(self._config)) * work.row_tokens
        at_once = min(most, int((share * whole - found.items["rollout weights"]) / answer))
        taken = others + int(max(share * whole, found.items["rollout weights"] + answer))
        phases = {**found.peaks, ROLLOUT: taken}
        phase = max(phases, key=lambda name: phases[name])
        return SetMemory(
            peak_bytes=phases[phase], phase=phase, room_bytes=room, at_once=max(1, at_once), share=share, phases=phases
        )


def _memory_of(found: MemoryEstimate, room: int) -> SetMemory:
    """Return the memory of a rank with its phases."""
    return SetMemory(peak_bytes=found.peak_bytes, phase=found.peak_phase, room_bytes=room, phases=found.peaks)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A division of the roles into sets with a layout and passes, of which the best devices are looked for."""

    by: Division
    level: int
    """The number of its passes in `passes_of`."""
    sets: tuple[tuple[str, ...], ...]
    devices: int
    """The devices of the engines; 0: any number."""


class _Search:
    """The search of `best_placements`."""

    def __init__(
        self, config: Config, cluster: Sequence[Nodes], work: StepWork, aim: Aim, given: Collection[str]
    ) -> None:
        self._config, self._cluster, self._work, self._aim = config, tuple(cluster), work, aim
        self._roles, self._overlap = planned_roles(config), not colocated(config)
        self._rules = rules_of(config, work, Division(1, 1, 1))
        self._step, self._passes = step_of(self._roles, self._overlap), passes_of(config, given)
        self._counter, self._given, self._fault = MemoryCounter(config, given), given, ""
        self._bounds = dict[tuple[Division, int], Times]()
        self._looked = dict[tuple[Division, int, tuple[str, ...], int, int], tuple[SetTimes | None, SetMemory]]()
        self._order, self._heap = itertools.count(), list[tuple[tuple[float, float], int, _Candidate, RolePlacement]]()

    def run(self) -> list[PlacedRun]:
        """Return the best placements that fit, best first."""
        counts = sorted({n for at in self._cluster for n in device_counts(at)}) if self._overlap else [0]
        for by in dict.fromkeys(by for at in self._cluster for by in layouts(self._config, at)):
            for sets in divided(self._roles, self._cluster, self._overlap):
                for devices in counts:
                    self._push(_Candidate(by, 0, sets, devices))
        found = dict[tuple[frozenset[tuple[str, ...]], int], PlacedRun]()
        best = math.inf
        while self._heap and len(found) < KEPT:
            worth, _, one, placement = heapq.heappop(self._heap)
            if worth[0] > SLOWER * best:
                break
            key = frozenset(one.sets), one.devices
            if key in found:
                continue
            looked = [self._look(one, each.roles, each.group, each.times.devices) for each in placement.sets]
            if any(times != each.times for times, each in zip(looked, placement.sets, strict=True)):
                self._push(one, smaller=True)  # it was put there before this was known
            elif (placed := self._checked(one, placement)) is not None:
                found[key], best = placed, min(best, worth[0])
        out = sorted(found.values(), key=lambda one: (one.placement.key(self._aim), len(one.placement.sets)))
        return [replace(out[0], without_room=tuple(self._without_room())), *out[1:]] if out else []

    def _push(self, one: _Candidate, smaller: bool = False) -> None:
        """Put the best devices of a candidate into the order. smaller: with smaller passes if it has none."""
        levels = range(one.level, len(self._passes) if smaller else one.level + 1)
        for level in levels:
            tried = replace(one, level=level)
            best = best_devices(one.sets, self._cluster, self._times(tried), self._aim, self._step)
            if best is not None:
                heapq.heappush(self._heap, (best.key(self._aim), next(self._order), tried, best))
                return

    def _rules_of(self, by: Division) -> Rules:
        return replace(self._rules, layout=by)

    def _bound(self, by: Division, level: int) -> Times:
        if (by, level) not in self._bounds:
            passes = self._passes[level]
            self._bounds[by, level] = run_times(self._roles, self._cluster, self._rules_of(by), passes)
        return self._bounds[by, level]

    def _times(self, one: _Candidate) -> Times:
        """Return the seconds of sets: those with what fits where this is known, and else a lower bound."""
        bound = self._bound(one.by, one.level)

        def times(names: tuple[str, ...], group: int, n: int) -> SetTimes | None:
            if one.devices and ROLLOUT in names and n != one.devices:
                return None  # the virtual clock tries each number of devices
            known = self._looked.get((one.by, one.level, names, group, n))
            return bound(names, group, n) if known is None else known[0]

        return times

    def _look(self, one: _Candidate, names: tuple[str, ...], group: int, n: int) -> SetTimes | None:
        """Return the seconds of a set with what fits; None without room. A set without room with the smallest passes
        has none with larger ones."""
        by, level, last = one.by, one.level, len(self._passes) - 1
        if (by, level, names, group, n) not in self._looked:
            self._looked[by, level, names, group, n] = found = self._fitting(by, level, names, group, n)
            if found[0] is None and level < last:
                smallest = self._fitting(by, last, names, group, n)
                if smallest[0] is None:
                    self._looked |= {(by, at, names, group, n): smallest for at in range(level, last + 1)}
        return self._looked[by, level, names, group, n][0]

    def _fitting(
        self, by: Division, level: int, names: tuple[str, ...], group: int, n: int
    ) -> tuple[SetTimes | None, SetMemory]:
        at, passes, count = self._cluster[group], self._passes[level], self._counter.of_set
        if ROLLOUT not in names:
            memory = count(by, passes, names, at, self._work, 1, 0)
            return (None if memory.lacks_bytes > 0 else self._bound(by, level)(names, group, n)), memory
        out = list[tuple[SetTimes | None, SetMemory]]()
        sizes = self._rules.engines if names == (ROLLOUT,) else (1,)
        for size in (size for size in sizes if min(n, at.devices_per_node) % size == 0):
            memory = count(by, passes, names, at, self._work, size, math.ceil(self._work.sequences / (n // size)))
            engine = (size, memory.at_once)
            times = run_times(self._roles, self._cluster, self._rules_of(by), passes, engine)(names, group, n)
            out.append((None if memory.lacks_bytes > 0 else times, memory))
        fits = [(times, memory) for times, memory in out if times is not None]
        if fits:
            return min(fits, key=lambda one: sum(one[0].seconds))
        return min(out, key=lambda one: one[1].lacks_bytes)

    def _checked(self, one: _Candidate, placement: RolePlacement) -> PlacedRun | None:
        """Return a placement of which the plan of its arguments fits its devices; None if it does not, or if a run
        cannot have this layout."""
        looked = [self._looked[one.by, one.level, s.roles, s.group, s.times.devices][1] for s in placement.sets]
        placed = PlacedRun(
            layout=one.by,
            passes=self._passes[one.level],
            placement=placement,
            memory=tuple(looked),
            cluster=self._cluster,
        )
        config = applied(self._config, placement_settings(self._config, placed))
        if faults := [*placed_faults(config, "train")]:
            self._fault = faults[0]
            return None
        made = cluster_plan(config, self._counter.update_tokens)
        assert made is not None, "it has processes"
        pools = [made.pools[name].memory for name in pool_names(placed)]
        memory = [
            of if of.share else replace(of, peak_bytes=pool.peak_bytes, phase=pool.peak_phase, phases=pool.peaks)
            for of, pool in zip(looked, pools, strict=True)
        ]
        if any(pool.peak_bytes > of.room_bytes for pool, of in zip(pools, memory, strict=True)):
            return None
        return replace(placed, memory=tuple(memory))

    def _shortest(self) -> dict[tuple[str, ...], tuple[int, int, SetMemory]]:
        """Return (devices, node group, memory) of each set of roles that fits on no devices, where it lacks least."""
        fits = {names for (_, _, names, _, _), (times, _) in self._looked.items() if times is not None}
        out = dict[tuple[str, ...], tuple[int, int, SetMemory]]()
        for (_, _, names, group, n), (_, memory) in self._looked.items():
            if names not in fits and (names not in out or memory.lacks_bytes < out[names][2].lacks_bytes):
                out[names] = (n, group, memory)
        return out

    def _without_room(self) -> Iterator[str]:
        for names, (n, group, memory) in self._shortest().items():
            yield (
                f"{' + '.join(names)} on {n} {self._cluster[group].device.name}: {size_text(memory.peak_bytes)} in "
                f"{memory.phase}, of {size_text(memory.room_bytes)}"
            )

    def nothing_fits(self) -> str:
        """Return a line with the role that lacks memory, how much of it, and what helps."""
        names, n, at, memory = min(self._floors(), key=lambda of: of[3].lacks_bytes)
        phase = memory.phase
        if memory.lacks_bytes <= 0:
            return f"no placement has room and can run: {self._fault or 'no layout divides the devices'}"
        if phase.startswith(("update ", "infer ")):
            role = phase.split()[-1]
        else:
            role = ROLLOUT if phase == ROLLOUT or "actor" not in names else "actor"
        each = "its device" if n == 1 else f"each of {n} devices"
        where = " or ".join(f"{one.devices} x {one.device.name}" for one in self._cluster)
        return (
            f"no placement fits {where}: {role} needs {size_text(memory.lacks_bytes)} more on {each} "
            f"({size_text(memory.peak_bytes)} in the phase {phase}, with the smallest passes and one answer at a time; "
            f"{1 - RESERVE:.0%} of a {at.device.name} are {size_text(memory.room_bytes)}). "
            f"Fix: {', or '.join(itertools.islice(self._ways(at, memory), 3))}"
        )

    def _floors(self) -> Iterator[tuple[tuple[str, ...], int, Nodes, SetMemory]]:
        """Yield (roles, devices, nodes, memory) of the set that lacks most, for each layout and division of the roles
        on nodes of one kind, with the smallest passes and one answer at a time."""
        for at in self._cluster:
            for by, sets in itertools.product(layouts(self._config, at), divided(self._roles, [at], self._overlap)):
                devices = [1 if one == (ROLLOUT,) else by.devices for one in sets]
                if sum(devices) <= at.devices:
                    each = [self._counter.of_set(by, self._passes[-1], one, at, self._work, 1, 1) for one in sets]
                    found = zip(sets, devices, each, strict=True)
                    names, n, memory = max(found, key=lambda of: of[2].lacks_bytes)
                    yield names, n, at, memory

    def _ways(self, at: Nodes, memory: SetMemory) -> Iterator[str]:
        """Yield ways to make room, those with a number first."""
        least = memory.peak_bytes / (1 - RESERVE) / 1e9
        for gb in (math.ceil(factor * least) for factor in (1, 1.25, 1.5, 2, 3)):
            larger = [replace(one, device=replace(one.device, memory_gb=gb)) for one in self._cluster]
            if self._fits_on(larger):
                yield f"devices of {gb} GB"
                break
        yield from self._more(at)
        if trained_by(self._config.model.lora) is None:
            yield f"{LORA}, which trains few parameters"
        elif base_format(self._config) == "none":
            yield "model.quantization=nf4, on one device"
        yield "a shorter rollout.max_response_tokens"
        yield "a smaller model"

    def _fits_on(self, cluster: Sequence[Nodes]) -> bool:
        """Return True if a placement fits on other devices."""
        return bool(_Search(self._config, cluster, self._work, self._aim, self._given).run())

    def _more(self, at: Nodes) -> Iterator[str]:
        """Yield the number of devices on which a placement fits, as the smallest power of two of the nodes."""
        whole = base_format(self._config) != "none"  # codes are not divided among ranks
        for factor in () if whole else (2, 4, 8, 16, 32):
            more = replace(at, nodes=factor * at.nodes)
            if self._fits_on([more]):
                yield f"more devices ({more.devices} x {at.device.name} hold it)"
                return
