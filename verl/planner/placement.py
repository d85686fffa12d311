"""`verl plan cluster_file=FILE`: the roles of a configured run on the devices of a cluster that need not exist.

All models of a run have the same number of ranks and one layout (`parallel.*`), so each layout is tried, and
`mapping.py` finds the sets of roles that share devices, each on devices of one kind. Rows are at the limits of prompt
and answer, unless the mean of an answer is given."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from verl.algorithms.presets import settled
from verl.bounds import size_text
from verl.config.adapter import teacher_models
from verl.config.backends import traits_of
from verl.config.cluster import REWARD_MODEL, placed_roles, roles_on_base
from verl.config.devices import colocated
from verl.config.lora_layers import trained_factors
from verl.config.model_files import ModelFacts, describe_model
from verl.config.schema import Config
from verl.errors import Refused
from verl.model_engine.optimizer_table import OPTIMIZERS
from verl.planner.columns import aligned
from verl.planner.disk import checkpoint_bytes, checkpoints_kept
from verl.planner.hardware import Nodes, scaled, some_devices, total
from verl.planner.latency import (
    RESERVE,
    TENSOR,
    Division,
    ModelSize,
    StepWork,
    Stored,
    divisions,
    engine_pace,
    held_bytes,
)
from verl.planner.mapping import (
    Aim,
    PlacedSet,
    PlannedRole,
    RolePlacement,
    Rules,
    Times,
    device_counts,
    placements,
    stages_of,
    step_of,
    times_of,
)
from verl.planner.simulate import Lengths
from verl.planner.sizes import parameters_used
from verl.planner.what_if import Replayed, replayed, workload_of
from verl.workers.pools import NO_MODEL

OTHERS = 5
"""The placements that are printed beside the best one."""
SIMULATED_PUBLISHES = 8
"""Publishes of a placement under the virtual clock, of which the first two do not count."""
MASTER_BYTES = 4
AIMS: tuple[Aim, ...] = ("time", "cost")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRun:
    """A placement of a run."""

    layout: Division
    """The division of every model."""
    placement: RolePlacement
    cluster: tuple[Nodes, ...]
    """The node groups of which its sets have devices, by `PlacedSet.group`."""
    simulated: Replayed | None = None
    """Its pace with the staleness of the run, where rollout and training work beside each other."""

    def nodes_of(self, role: str) -> Nodes:
        """Return the node group on which a role is."""
        return self.cluster[next(one.group for one in self.placement.sets if role in one.roles)]

    @property
    def at(self) -> Nodes:
        """The node group of the policy."""
        return self.nodes_of("actor")

    @property
    def mixed(self) -> bool:
        """True if its sets are on devices of several kinds."""
        return len({one.group for one in self.placement.sets}) > 1

    def seconds(self, config: Config) -> float:
        """Return the seconds of a step."""
        if self.simulated is None:
            return self.placement.step_s
        return self.simulated.pace.period_s / config.pipeline.sync_every


def work_of(config: Config, answer_tokens: float | None = None) -> StepWork:
    """Return the work of a step. answer_tokens: the mean of an answer, if it is known."""
    s, shared = config.step, config.model.engine_options.get("share_prefix", True)
    return StepWork(
        sequences=s.prompts_per_step * s.samples_per_prompt,
        prompt_tokens=config.data.max_prompt_tokens,
        response_tokens=answer_tokens or config.rollout.max_response_tokens,
        updates=s.updates_per_step * s.epochs_per_step,
        micro_tokens=s.max_tokens_per_microbatch,
        prompt_shares=s.samples_per_prompt if shared else 1,
        recomputed=config.model.gradient_checkpointing != "none",
        weight_gradients=trained_factors(config) is None,
    )


def planned_roles(config: Config) -> tuple[PlannedRole, ...]:
    """Return the models of a step with their calls; the rollout engines are a role of their own."""
    policy, on_base = size_of(describe_model(config.model.path)), roles_on_base(config)
    own = {"critic": config.critic.path, REWARD_MODEL: config.reward.model, **teacher_models(config)}
    needs = settled(config.algorithm.name, config.algorithm.given()).needs(config.step.updates_per_step)
    infers = {need.role for need in needs}
    roles = [PlannedRole(name="rollout", model=policy, calls=(("rollout", "generate"),))]
    for name in (*(role for role in placed_roles(config) if role not in NO_MODEL), *on_base):
        trained = name in ("actor", "critic")
        infer = (("experience", "infer"),) if name in infers or not trained else ()
        path = None if name in on_base else own.get(name)
        roles.append(
            PlannedRole(
                name=name,
                model=policy if path is None else size_of(describe_model(path)),
                calls=(*infer, *((("update", "train"),) if trained else ())),
                base="actor" if name in on_base else None,
            )
        )
    return tuple(sorted(roles, key=lambda role: role.trained))  # in the order of their stages


def size_of(model: ModelFacts) -> ModelSize:
    return ModelSize(
        parameters=model.parameters,
        active_parameters=parameters_used(model),
        layers=model.layers,
        hidden=model.hidden,
        kv_width=model.kv_heads * model.head_dim * (model.layers - model.states.layers) // model.layers,
    )


def stored_of(config: Config) -> Stored:
    """Return the bytes of a trained parameter. Under LoRA they are those of the factors, per parameter of the base."""
    share = 1.0
    if (factors := trained_factors(config)) is not None:
        share = factors.parameters / describe_model(config.model.path).parameters
    states = MASTER_BYTES + OPTIMIZERS[config.optim.name].matrix_bytes
    return Stored(gradient=4 * share, states=states * share, reduced=4 * share, sharded=True)


def best_placements(config: Config, cluster: Sequence[Nodes], work: StepWork, aim: Aim = "time") -> list[PlacedRun]:
    """Return the best layout and devices of each division of the roles into sets, best first; where the rollout works
    beside the other stages, of each number of devices for it too. Raise Refused with the memory that is missing if no
    division fits."""
    roles, overlap = planned_roles(config), not colocated(config)
    if overlap and total(cluster) < 2:
        raise Refused(
            f"pipeline.placement={config.pipeline.placement}, pipeline.staleness={config.pipeline.staleness:g}: the"
            " rollout has devices of its own, and the cluster file has one device. Fix: two or more, or"
            " pipeline.staleness=0 with pipeline.placement=auto"
        )
    best = dict[tuple[frozenset[tuple[str, ...]], int], PlacedRun]()
    counts = sorted({n for at in cluster for n in device_counts(at)}) if overlap else (0,)
    for layout in dict.fromkeys(by for at in cluster for by in layouts(config, at)):
        every = times_of(roles, cluster, rules_of(config, work, layout))
        for devices in counts:
            times = _generated_on(every, devices) if overlap else every
            for one in placements(roles, cluster, times, aim, overlap):
                key = frozenset(each.roles for each in one.sets), devices
                if key not in best or _key(one, aim) < _key(best[key].placement, aim):
                    best[key] = PlacedRun(layout=layout, placement=one, cluster=tuple(cluster))
    if not best:
        raise Refused(_nothing_fits(config, roles, cluster, stored_of(config)))
    return sorted(best.values(), key=lambda placed: _key(placed.placement, aim))


def _generated_on(times: Times, devices: int) -> Times:
    """Return the seconds of sets if the engines have this number of devices: a share of its own that the virtual clock
    tries."""
    return lambda roles, group, n: times(roles, group, n) if "rollout" not in roles or n == devices else None


def rules_of(config: Config, work: StepWork, layout: Division) -> Rules:
    """Return how the models of this run may be divided, if those that infer or train have this layout. A rollout that
    works beside the other stages does not wait for tools and rewards: other answers take the places."""
    engines = TENSOR if traits_of(config.rollout.engine).server else (1,)
    if not colocated(config):
        work = replace(work, reward_s=0.0, tool_calls=0.0)
    return Rules(work=work, stored=stored_of(config), layout=layout, engines=engines)


def seconds_on(config: Config, placed: PlacedRun, cluster: Sequence[Nodes], work: StepWork) -> float:
    """Return the seconds of a step of this placement on nodes with other figures."""
    roles = planned_roles(config)
    times = times_of(roles, cluster, rules_of(config, work, placed.layout))
    found = [times(one.roles, one.group, one.times.devices) for one in placed.placement.sets]
    slowest = [max(column) for column in zip(*(one.seconds for one in found if one is not None))]
    return step_of(roles, not colocated(config))(slowest)


def paced(config: Config, found: Sequence[PlacedRun], work: StepWork, lengths: Lengths) -> list[PlacedRun]:
    """Return the best placements with their pace under the virtual clock, for answers of these lengths, fastest
    first."""
    out = [replace(placed, simulated=_simulated(config, placed, work, lengths)) for placed in found[: OTHERS + 1]]
    return sorted(out, key=lambda placed: placed.seconds(config))


def _simulated(config: Config, placed: PlacedRun, work: StepWork, lengths: Lengths) -> Replayed:
    """Return the pace of a placement with the staleness of the run."""
    policy, sets = size_of(describe_model(config.model.path)), placed.placement.sets
    generation = stages_of(planned_roles(config)).index("rollout")
    slowest = [max(column) for column in zip(*(one.times.seconds for one in sets))]
    engines = next(one.times for one in sets if "rollout" in one.roles)
    at = placed.nodes_of("rollout")
    room = (1 - RESERVE) * 1e9 * at.device.memory_gb - engines.held_bytes
    pace = engine_pace(policy, engines.devices, engines.engine_devices, at, work, room)
    assert pace is not None, "it was placed with the same room"
    replicas = engines.devices // engines.engine_devices
    share = math.ceil(work.sequences / replicas) * work.response_tokens
    decode_s = (pace.full_s - pace.empty_s) / pace.batch  # reading keys and values, or products
    one = replace(config, rollout=replace(config.rollout, replicas=replicas, max_concurrent_sequences=pace.batch))
    times = {
        "token_s": pace.empty_s,
        "sequence_s": decode_s + pace.prompts_s / share,
        "update_s": sum(slowest) - slowest[generation],
        "publish_s": 0.0,
        "reward_s": work.reward_s,
        "tool_calls": work.tool_calls,
        "tool_s": work.tool_s,
    }
    return replayed(one, workload_of(one, times, lengths), SIMULATED_PUBLISHES)


def corners(placed: PlacedRun) -> tuple[list[Nodes], list[Nodes]]:
    """Return the nodes of a placement with devices that reach as much, and as little, as they may."""
    more = [scaled(at, at.device.spread) for at in placed.cluster]
    return more, [scaled(at, 1 / at.device.spread) for at in placed.cluster]


def smallest_cluster(config: Config, cluster: Sequence[Nodes], work: StepWork, deadline_s: float) -> list[PlacedRun]:
    """Return the placements on the fewest devices of a node group on which the best step takes at most `deadline_s`,
    for the group where these devices cost least. Raise Refused with the seconds of the fastest step if none does."""
    if len({at.price_per_hour > 0 for at in cluster}) > 1:
        raise Refused("deadline_s: some groups of the cluster file have a price_per_hour; give it to all or none")
    found = list[tuple[float, int, list[PlacedRun]]]()
    for at in cluster:
        counts = device_counts(at)
        first = next((n for n in counts if _fastest_s(config, some_devices(at, n), work) <= deadline_s), None)
        if first is not None:
            best = best_placements(config, [some_devices(at, first)], work)
            found.append((first * at.price_per_hour, first, best))
    if not found:
        step_s = best_placements(config, cluster, work)[0].placement.step_s
        devices = " or ".join(f"{at.devices} x {at.device.name}" for at in cluster)
        raise Refused(f"deadline_s={deadline_s:g}: the fastest step on {devices} takes about {step_s:.3g} s")
    return min(found, key=lambda one: one[:2])[2]


def _fastest_s(config: Config, at: Nodes, work: StepWork) -> float:
    """Return the seconds of the fastest step on these nodes; infinity if no placement fits."""
    try:
        return best_placements(config, [at], work)[0].placement.step_s
    except Refused:
        return math.inf


def _key(one: RolePlacement, aim: Aim) -> tuple[float, float, int]:
    return (one.price, one.step_s, len(one.sets)) if aim == "cost" else (one.step_s, one.price, len(one.sets))


def layouts(config: Config, at: Nodes) -> Iterator[Division]:
    """Yield the layouts that a model of this run can have: ranks fill nodes, tensor ranks divide the heads, and each
    data rank has a group of an update."""
    model = describe_model(config.model.path)
    groups = config.step.prompts_per_step // config.step.updates_per_step
    inside = [n for n in range(1, at.devices_per_node) if at.devices_per_node % n == 0]
    for ranks in (*inside, *(n * at.devices_per_node for n in range(1, at.nodes + 1))):
        for by in divisions(ranks, size_of(model), at, groups):
            if model.heads % by.tensor == 0 and model.kv_heads % by.tensor == 0:
                yield by


def _nothing_fits(config: Config, roles: Sequence[PlannedRole], cluster: Sequence[Nodes], stored: Stored) -> str:
    """Return a line with the largest role, the memory that it lacks on all devices, and what helps."""
    largest = max(
        roles, key=lambda role: role.model.parameters * (2 + role.trained * (stored.gradient + stored.states))
    )
    at = max(cluster, key=lambda one: one.devices * one.device.memory_gb)
    whole = held_bytes(largest.model, Division(1, 1, at.devices), largest.trained, stored)
    missing = whole - (1 - RESERVE) * 1e9 * at.device.memory_gb
    lacks = f"{size_text(int(missing))} more" if missing > 0 else "more, for activations, keys and values,"
    return (
        f"no placement fits {at.devices} x {at.device.name}: {largest.name} needs {lacks} on each device."
        " Fix: more devices, model.lora.rank=32, or a shorter rollout.max_response_tokens"
    )


def beside_devices(config: Config, placed: PlacedRun) -> list[str]:
    """Return a line for the disk and for the host memory of the policy's nodes if a run needs more of it than the
    cluster file gives: for its checkpoints, and for the weights that a node publishes."""
    kept = checkpoint_bytes(config) * checkpoints_kept(config, config.run.total_steps)
    ranks = next(one.times.devices for one in placed.placement.sets if "actor" in one.roles)
    here = min(ranks, placed.at.devices_per_node) / ranks  # the share of the shards that one node writes
    staged = here * placed.at.device.item_bytes * describe_model(config.model.path).parameters
    wants = {"disk_gb": ("checkpoints", kept), "host_memory_gb": ("the weights that a node publishes", staged)}
    return [
        f"warning   {key}={given:g} of {placed.at.device.name} is less than {size_text(int(size))} for {what}"
        for key, (what, size) in wants.items()
        if (given := getattr(placed.at, key)) and given * 1e9 < size
    ]


# -- as text -----------------------------------------------------------------------------------------------------------


def render(config: Config, found: Sequence[PlacedRun], work: StepWork) -> str:
    """Return the best placement as a table, with the range of its seconds, the overrides that configure it, and why the
    next ones are slower."""
    best = found[0]
    one, stages, ends = best.placement, stages_of(planned_roles(config)), corners(best)
    low_s, high_s = (seconds_on(config, best, end, work) for end in ends)
    price = f", {one.price:.2f} per step" if one.price else ""
    used = {best.cluster[placed.group].device: None for placed in one.sets}
    spreads = " and ".join(f"{spread:g}" for spread in sorted({device.spread for device in used}))
    lines = [
        f"placement about {one.step_s:.3g} s per step ({low_s:.3g} to {high_s:.3g}){price} on "
        + " and ".join(f"{device.name} ({device.source})" for device in used),
        *_pace_lines(config, best),
        f"          range: if its devices reach {spreads} times the shares of the cluster file, or less by this factor",
    ]
    rows = [("devices", "roles", "GiB held by each", *(f"{stage}, s" for stage in stages))]
    for placed in one.sets:
        seconds = [f"{s:.3g}" if s else "-" for s in placed.times.seconds]
        kind = f" {best.cluster[placed.group].device.name}" if best.mixed else ""
        held = f"{placed.times.held_bytes / 2**30:.1f}"
        rows.append((f"{placed.times.devices}{kind}", " + ".join(placed.roles), held, *seconds))
    lines += [f"          {row}" for row in aligned(rows)]
    lines += [f"configure {' '.join(overrides(config, best))}", *beside_devices(config, best)]
    for other in found[1 : OTHERS + 1]:
        gaps = [seconds_on(config, other, end, work) / s - 1 for end, s in zip(ends, (low_s, high_s))]
        between = f" ({min(gaps):+.0%} to {max(gaps):+.0%})"
        if other.simulated is not None:
            between += f", simulated {other.seconds(config) / best.seconds(config) - 1:+.0%}"
        lines.append(f"slower    {_sets_text(other)}: {_why(one, other.placement, stages, between)}")
    return "\n".join(lines)


def as_data(config: Config, found: Sequence[PlacedRun], work: StepWork) -> list[dict[str, object]]:
    """Return the placements as data for JSON, best first: the seconds with their range, the devices of each set, and
    the arguments that configure them."""
    stages = stages_of(planned_roles(config))
    return [
        {
            "device": placed.at.device.name,
            "step_s": placed.placement.step_s,
            "step_s_range": [seconds_on(config, placed, end, work) for end in corners(placed)],
            "price": placed.placement.price,
            "simulated": None if placed.simulated is None else asdict(placed.simulated.pace),
            "layout": asdict(placed.layout),
            "warnings": beside_devices(config, placed),
            "sets": [
                {
                    "roles": one.roles,
                    "devices": one.times.devices,
                    "device": placed.cluster[one.group].device.name,
                    "held_bytes": one.times.held_bytes,
                    "seconds": dict(zip(stages, one.times.seconds)),
                }
                for one in placed.placement.sets
            ],
            "configure": overrides(config, placed),
        }
        for placed in found[: OTHERS + 1]
    ]


def _pace_lines(config: Config, placed: PlacedRun) -> list[str]:
    """Return a line with the simulated pace of a placement, if it has one."""
    if (pace := placed.simulated) is None:
        return []
    steps, ahead = config.pipeline.sync_every, f"pipeline.staleness={config.pipeline.staleness:g}"
    step_s = pace.text(lambda one: one.period_s / steps, ".3g", ".1g")
    waits = pace.text(lambda one: one.wait_s / one.period_s, ".0%")
    idle = pace.text(lambda one: one.idle_share, ".0%")
    return [
        f"          simulated with {ahead}: {step_s} s per step, in which the trainer waits {waits} and the rollout"
        f" {idle} of the time"
    ]


def _sets_text(one: PlacedRun) -> str:
    kinds = [f" {one.cluster[placed.group].device.name}" if one.mixed else "" for placed in one.placement.sets]
    every = zip(one.placement.sets, kinds)
    return " | ".join(f"{' + '.join(placed.roles)} on {placed.times.devices}{kind}" for placed, kind in every)


def _why(best: RolePlacement, other: RolePlacement, stages: Sequence[str], between: str) -> str:
    """Return how much longer a placement takes, with its range, and in which stage most of it."""
    by_stage = [
        max(placed.times.seconds[i] for placed in other.sets) - max(placed.times.seconds[i] for placed in best.sets)
        for i in range(len(stages))
    ]
    worst = max(range(len(by_stage)), key=lambda i: by_stage[i])
    longer = f"{other.step_s / best.step_s - 1:+.0%}{between}"
    return f"{longer}, {by_stage[worst]:+.3g} s in {stages[worst]}"


def overrides(config: Config, placed: PlacedRun) -> list[str]:
    """Return the arguments of verl that configure a placement. Devices of several kinds are resources of Ray with the
    names of the cluster file."""
    home = next(one for one in placed.placement.sets if "actor" in one.roles)
    main = _ranks(placed, home)
    out = ["cluster.backend=ray", *(f"cluster.{key}={n}" for key, n in main.items())]
    if placed.mixed:
        out += [shlex.quote(f"cluster.pools.main.{key}={value}") for key, value in _kind(placed, home).items()]
    out += [
        f"parallel.{name}={n}"
        for name, n in (("tensor", placed.layout.tensor), ("pipeline", placed.layout.pipeline))
        if n > 1
    ]
    pools, roles = list[str](), list[str]()
    for i, one in enumerate(other for other in placed.placement.sets if other is not home):
        name = one.roles[0] if len(one.roles) == 1 else f"pool{i}"
        fields = _ranks(placed, one) | (_kind(placed, one) if placed.mixed else {})
        pools.append(f"{name}: {{{', '.join(f'{key}: {value}' for key, value in fields.items())}}}")
        roles += [f"{role}: {name}" for role in one.roles]
    if pools:
        out += [f"'cluster.pools={{{', '.join(pools)}}}'", f"'cluster.roles={{{', '.join(roles)}}}'"]
    engines = next(one.times for one in placed.placement.sets if "rollout" in one.roles)
    out.append(f"rollout.replicas={engines.devices // engines.engine_devices}")
    if engines.engine_devices > 1:
        out.append(f"rollout.engine_options.tensor_parallel_size={engines.engine_devices}")
    return out


def _ranks(placed: PlacedRun, one: PlacedSet) -> dict[str, int]:
    """Return the fields of a pool on the devices of a set."""
    nodes = max(1, one.times.devices // placed.cluster[one.group].devices_per_node)
    return {**({"nodes": nodes} if nodes > 1 else {}), "ranks_per_node": one.times.devices // nodes}


def _kind(placed: PlacedRun, one: PlacedSet) -> dict[str, object]:
    """Return the fields of a pool on nodes of one kind: `ray start --resources='{"H100": 8}'` on each of them. The
    second group of the same device has the name H100-2, since its nodes differ."""
    names = [at.device.name for at in placed.cluster]
    name, before = names[one.group], names[: one.group].count(names[one.group])
    return {"gpus_per_rank": 1, "resource": f"{name}-{before + 1}" if before else name}
