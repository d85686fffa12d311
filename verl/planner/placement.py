"""`verl plan cluster_file=FILE`: the roles of a configured run on the devices of a cluster that need not exist.

All models of a run have the same number of ranks and one layout (`parallel.*`), so each layout is tried
(`fitting.py`), and `mapping.py` finds the sets of roles that share devices, each on devices of one kind. Rows are at
the limits of prompt and answer, unless the mean of an answer is given."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl.algorithms.presets import settled
from verl.config.adapter import teacher_models
from verl.config.backends import backend_of, traits_of
from verl.config.cluster import REWARD_MODEL, placed_roles, roles_on_base
from verl.config.devices import base_format, colocated, compute_dtype, rollout_dtype
from verl.config.lora_layers import reads_codes, served_factors, trained_factors
from verl.config.model_files import ModelFacts, describe_model
from verl.config.schema import Config
from verl.config.tree import changed
from verl.model_engine.memory import DTYPE_BYTES, MATRIX_BYTES, quantised_values
from verl.model_engine.optimizer_table import OPTIMIZERS
from verl.planner.hardware import DEVICES, Nodes, scaled
from verl.planner.latency import TENSOR, Division, ModelSize, StepWork, Stored, divisions, engine_pace, published_s
from verl.planner.mapping import (
    Aim,
    PlacedSet,
    PlannedRole,
    RolePlacement,
    Rules,
    SetTimes,
    Times,
    stages_of,
    step_of,
    times_of,
)
from verl.planner.memory import wire_bytes
from verl.planner.simulate import Lengths
from verl.planner.sizes import expert_parameters_used, parameters_used
from verl.planner.what_if import RESUME, Replayed, replayed, workload_of
from verl.wire import FP8
from verl.workers.pools import MAIN, NO_MODEL, placed_by_load

OTHERS = 5
"""The placements that are printed beside the best one."""
SIMULATED_PUBLISHES = 8
"""Publishes of a placement under the virtual clock, of which the first two do not count."""
MASTER_BYTES = 4
AIMS: tuple[Aim, ...] = ("time", "cost")
NO_GPU = ("Ascend-910B",)
"""Devices of the built-in table whose name in torch is another than cuda."""


@dataclass(frozen=True, slots=True)
class PassSizes:
    """How an update is cut into passes (`step.max_tokens_per_microbatch`, `model.gradient_checkpointing`)."""

    micro_tokens: int
    checkpointing: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetMemory:
    """The memory of the fullest rank of a set of roles, by the plan's counter of bytes."""

    peak_bytes: int
    phase: str
    """The phase of a step in which it is fullest."""
    room_bytes: int
    """The bytes that the devices of a rank have for a run."""
    at_once: int = 0
    """The answers that an engine of the set decodes at once; 0: it has none."""
    share: float = 0.0
    """The share of a device that a server takes for its weights, keys and values; 0: the set has no server."""
    phases: Mapping[str, int] = field(default_factory=dict)
    """The bytes of each phase of a step."""

    @property
    def lacks_bytes(self) -> int:
        """The bytes that its devices have too few; below 0 if they have enough."""
        return self.peak_bytes - self.room_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRun:
    """A placement of a run."""

    layout: Division
    """The division of every model."""
    passes: PassSizes
    placement: RolePlacement
    memory: tuple[SetMemory, ...]
    """By set."""
    cluster: tuple[Nodes, ...]
    """The node groups of which its sets have devices, by `PlacedSet.group`."""
    simulated: Replayed | None = None
    """Its pace with the staleness of the run, where rollout and training work beside each other."""
    without_room: tuple[str, ...] = ()
    """A line for each set of roles that fits on no devices with which it was tried; the best placement has them."""

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

    @property
    def engines(self) -> tuple[SetTimes, SetMemory]:
        """The set that has the rollout engines."""
        return next(
            (one.times, memory)
            for one, memory in zip(self.placement.sets, self.memory, strict=True)
            if "rollout" in one.roles
        )


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
    roles = [PlannedRole(name="rollout", model=policy, calls=(("rollout", "generate"),), weights_of="actor")]
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
        expert_parameters=model.expert_parameters,
        active_expert_parameters=expert_parameters_used(model),
    )


def stored_of(config: Config) -> Stored:
    """Return the bytes of a trained parameter. Under LoRA they are those of the factors, per parameter of the base,
    which is in float32 or in codes."""
    share, weight, decoded = 1.0, 0.0, 0.0
    model = describe_model(config.model.path)
    if (factors := trained_factors(config)) is not None:
        coded, code = quantised_values(model) / model.parameters, MATRIX_BYTES[base_format(config)]
        share, weight = factors.parameters / model.parameters, MASTER_BYTES * (1 - coded) + code * coded
        # a pass reads the codes, writes the weights in the dtype that it computes in, and reads them
        decoded = coded * (code + 2 * DTYPE_BYTES[compute_dtype(config)]) if base_format(config) != "none" else 0.0
    states = MASTER_BYTES + OPTIMIZERS[config.optim.name].matrix_bytes
    return Stored(
        gradient=4 * share, states=states * share, reduced=4 * share, sharded=True, weight=weight, decoded=decoded
    )


def version_bytes(config: Config) -> float:
    """Return the bytes of the weights that reach rollout engines in a publish: the factors alone where engines add
    them."""
    model, factors = describe_model(config.model.path), served_factors(config)
    if factors is not None:
        return DTYPE_BYTES[rollout_dtype(config)] * (factors.parameters + factors.whole())
    return wire_bytes(config, model)


def rules_of(config: Config, work: StepWork, layout: Division) -> Rules:
    """Return how the models of this run may be divided, if those that infer or train have this layout. A rollout that
    works beside the other stages does not wait for tools and rewards: other answers take the places."""
    engines = TENSOR if traits_of(config.rollout.engine).server else (1,)
    if not colocated(config):
        work = replace(work, reward_s=0.0, tool_calls=0.0)
    if reads_codes(config) or config.rollout.dtype == FP8:
        model = describe_model(config.model.path)
        coded = wire_bytes(config, model) / model.parameters
        work = replace(work, weight_bytes=coded, fp8=config.rollout.dtype == FP8)
    sent = version_bytes(config) / config.pipeline.sync_every
    return Rules(work=work, stored=stored_of(config), layout=layout, engines=engines, version_bytes=sent)


def run_times(
    roles: Sequence[PlannedRole],
    cluster: Sequence[Nodes],
    rules: Rules,
    passes: PassSizes,
    engine: tuple[int, int] | None = None,
) -> Times:
    """Return the seconds of sets of a run's roles, whatever they hold: `fitting.py` counts their bytes. An engine that
    shares the device of a model has this one alone. engine: its devices, and the answers that it decodes at once; None:
    the best, and all."""
    recomputed, (devices, at_once) = passes.checkpointing != "none", engine or (0, 0)
    work = replace(rules.work, micro_tokens=passes.micro_tokens, recomputed=recomputed, at_once=at_once)
    rules, own = replace(rules, work=work, limited=False), (devices,) if devices else rules.engines
    alone, shared = (times_of(roles, cluster, replace(rules, engines=sizes)) for sizes in (own, (1,)))
    return lambda names, group, n: (alone if names == ("rollout",) else shared)(names, group, n)


def seconds_on(config: Config, placed: PlacedRun, cluster: Sequence[Nodes], work: StepWork) -> float:
    """Return the seconds of a step of this placement on nodes with other figures."""
    slowest = [max(column) for column in zip(*set_seconds_on(config, placed, cluster, work))]
    return step_of(planned_roles(config), not colocated(config))(slowest)


def set_seconds_on(
    config: Config, placed: PlacedRun, cluster: Sequence[Nodes], work: StepWork
) -> list[tuple[float, ...]]:
    """Return the seconds of each set of this placement by stage on nodes with other figures."""
    roles, (engines, memory) = planned_roles(config), placed.engines
    engine = (engines.engine_devices, memory.at_once)
    times = run_times(roles, cluster, rules_of(config, work, placed.layout), placed.passes, engine)
    found = [times(one.roles, one.group, one.times.devices) for one in placed.placement.sets]
    return [one.seconds for one in found if one is not None]


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
    (engines, memory), at = placed.engines, placed.nodes_of("rollout")
    at_once = rules_of(config, replace(work, at_once=memory.at_once), placed.layout).work
    pace = engine_pace(policy, engines.devices, engines.engine_devices, at, at_once, math.inf)
    assert pace is not None, "it decodes one answer or more at once"
    replicas = engines.devices // engines.engine_devices
    share = math.ceil(work.sequences / replicas) * work.response_tokens
    decode_s = (pace.full_s - pace.empty_s) / pace.batch  # reading keys and values, or products
    one = replace(config, rollout=replace(config.rollout, replicas=replicas, max_concurrent_sequences=pace.batch))
    times = {
        "token_s": pace.empty_s,
        "sequence_s": decode_s + pace.prompts_s / share,
        "update_s": sum(slowest) - slowest[generation],
        "publish_s": sent_s(config, placed),
        RESUME: pace.resume_s,
        "reward_s": work.reward_s,
        "tool_calls": work.tool_calls,
        "tool_s": work.tool_s,
    }
    return replayed(one, workload_of(one, times, lengths), SIMULATED_PUBLISHES)


def sent_s(config: Config, placed: PlacedRun) -> float:
    """Return the seconds of a publish to engines on devices of their own; 0 for those on the trainer's."""
    if any({"rollout", "actor"} <= {*one.roles} for one in placed.placement.sets):
        return 0.0
    far = len(placed.cluster) > 1 or any(at.nodes > 1 for at in placed.cluster)
    return published_s(version_bytes(config), placed.engines[0].engine_devices, placed.nodes_of("rollout"), far)


def corners(placed: PlacedRun) -> tuple[list[Nodes], list[Nodes]]:
    """Return the nodes of a placement with devices that reach as much, and as little, as they may."""
    more = [scaled(at, at.device.spread) for at in placed.cluster]
    return more, [scaled(at, 1 / at.device.spread) for at in placed.cluster]


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


# -- as arguments ------------------------------------------------------------------------------------------------------


def on_devices(config: Config, cluster: Sequence[Nodes]) -> Config:
    """Return the configuration on the devices of a cluster: with GPUs of the built-in table, model.device=auto is not
    what this machine has."""
    gpus = any(at.device.name in DEVICES and at.device.name not in NO_GPU for at in cluster)
    return changed(config, {"model.device": "cuda"}) if gpus and config.model.device == "auto" else config


def placement_settings(config: Config, placed: PlacedRun) -> dict[str, Any]:
    """Return the keys that configure a placement with their values; engine options have keys of their own. Devices of
    several kinds are resources of Ray with the names of the cluster file."""
    home = next(one for one in placed.placement.sets if "actor" in one.roles)
    own = placed_roles(config)  # a role on the base of another is where this is
    out: dict[str, Any] = {"cluster.backend": "ray"}
    if sum(one.times.devices for one in placed.placement.sets) > placed.at.devices_per_node or placed.mixed:
        out |= {"cluster.address": config.cluster.address or "auto"}
    out |= {f"cluster.{key}": n for key, n in _ranks(placed, home).items()}
    out |= {"model.device": config.model.device} if config.model.device != "auto" else {}
    parts = {"tensor": placed.layout.tensor, "pipeline": placed.layout.pipeline}
    out |= {f"parallel.{name}": n for name, n in parts.items() if n > 1 or getattr(config.parallel, name) != n}
    pools: dict[str, Any] = {MAIN: _kind(placed, home)} if placed.mixed else {}
    names = pool_names(placed)
    pools |= {
        name: {**_ranks(placed, one), **(_kind(placed, one) if placed.mixed else {})}
        for name, one in zip(names, placed.placement.sets, strict=True)
        if name != MAIN
    }
    several = len(names) > 1
    roles = {
        role: name
        for name, one in zip(names, placed.placement.sets, strict=True)
        for role in one.roles
        if name != MAIN or (several and role in own and placed_by_load(role))
    }
    out |= ({"cluster.pools": pools} if pools else {}) | ({"cluster.roles": roles} if roles else {})
    out |= _sizes(config, placed)
    if "cluster.address" in out and backend_of(applied(config, out), "sync").one_machine:
        out["sync.engine"] = "tcp"
    return out


def _sizes(config: Config, placed: PlacedRun) -> dict[str, Any]:
    """Return the keys of the engines and of the passes."""
    (engines, memory), passes = placed.engines, placed.passes
    out: dict[str, Any] = {"rollout.replicas": engines.devices // engines.engine_devices}
    wanted = {
        "rollout.max_concurrent_sequences": (config.rollout.max_concurrent_sequences, memory.at_once),
        "step.max_tokens_per_microbatch": (config.step.max_tokens_per_microbatch, passes.micro_tokens),
        "model.gradient_checkpointing": (config.model.gradient_checkpointing, passes.checkpointing),
    }
    out |= {key: value for key, (known, value) in wanted.items() if value != known}
    if engines.engine_devices > 1:
        out["rollout.engine_options.tensor_parallel_size"] = engines.engine_devices
    option = share_option(config)
    if memory.share and memory.share != config.rollout.engine_options.get(str(option)):
        out[f"rollout.engine_options.{option}"] = memory.share
    return out


def share_option(config: Config) -> str | None:
    """Return the option of a server for the share of a GPU that it takes; None if the engine has none."""
    return traits_of(config.rollout.engine).public_keys.get("gpu_memory_utilization")


def applied(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return the configuration with these settings, as `placement_settings` returns them."""
    prefix = "rollout.engine_options."
    options = {key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)}
    values = {key: value for key, value in settings.items() if not key.startswith(prefix)}
    if options:
        values["rollout.engine_options"] = {**config.rollout.engine_options, **options}
    return changed(config, values)


def overrides(config: Config, placed: PlacedRun) -> list[str]:
    """Return the arguments of verl that configure a placement."""
    return [shlex.quote(f"{key}={_text(value)}") for key, value in placement_settings(config, placed).items()]


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_text(one)}' for key, one in value.items())}}}"
    return str(value)


def pool_names(placed: PlacedRun) -> list[str]:
    """Return the name of the pool of each set: main for that of the policy."""
    sets = placed.placement.sets
    return [
        MAIN if "actor" in one.roles else one.roles[0] if len(one.roles) == 1 else f"pool{i}"
        for i, one in enumerate(sets)
    ]


def _ranks(placed: PlacedRun, one: PlacedSet) -> dict[str, Any]:
    """Return the fields of a pool on the devices of a set. A rank has one device, or those of an engine."""
    nodes, each = max(1, one.times.devices // placed.cluster[one.group].devices_per_node), one.times.engine_devices
    ranks = {**({"nodes": nodes} if nodes > 1 else {}), "ranks_per_node": one.times.devices // nodes // max(1, each)}
    return ranks | ({"gpus_per_rank": each} if each > 1 else {})


def _kind(placed: PlacedRun, one: PlacedSet) -> dict[str, Any]:
    """Return the fields of a pool on nodes of one kind: `ray start --resources='{"H100": 8}'` on each of them. The
    second group of the same device has the name H100-2, since its nodes differ."""
    names, each = [at.device.name for at in placed.cluster], max(1, one.times.engine_devices)
    name, before = names[one.group], names[: one.group].count(names[one.group])
    several = {"resource_per_rank": each} if each > 1 else {}
    return {"gpus_per_rank": each, "resource": f"{name}-{before + 1}" if before else name, **several}
