"""Check where a run is placed (pools, roles, layout), without Ray and without loading a model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec

from verl.algorithms.presets import settled
from verl.algorithms.sections import TEACHER
from verl.config.backends import CLUSTER, TABLES, address_of, backend_of, faults_of, layout_of, ray_address
from verl.config.devices import default_device, offloaded
from verl.config.on_base import REWARD_MODEL, adapters_on_base
from verl.config.schema import Config
from verl.config.tree import leaves, text_of, values_of
from verl.config.worker_python import python_faults
from verl.model_engine.layout import Layout
from verl.model_engine.lora_spec import trained_by
from verl.workers.pools import MAIN, NO_MODEL, Pool, pools_of

TRAINS = ("train", "sft", "rm", "dpo")
DEVICES = ("xpu", "mtia")
"""Resources, besides cpu and cuda, that a pool may name and that torch supports without a plugin."""
OF_PROCESSES = (
    *("cluster.backend", "cluster.virtual_ranks", "cluster.ranks_per_node", "cluster.max_restarts"),
    "cluster.start_timeout_s",
)
ANYWHERE = ("cluster.backend", "cluster.virtual_ranks", "cluster.max_restarts", "cluster.start_timeout_s")


def roles_of_policy(config: Config) -> frozenset[str]:
    """Return the roles that the policy's workers compute on its frozen base, if the run has them. A role that is given
    a pool has workers of its own."""
    if trained_by(config.model.lora) is None:
        return frozenset()
    if not backend_of(config, "model").sibling or offloaded(config, trained=True):
        return frozenset({"ref"})
    same = config.critic.path in (None, config.model.path) and "critic" not in config.cluster.roles
    return frozenset({"ref", *({"critic"} if same else ()), *adapters_on_base(config)})


def _roles(config: Config) -> set[str]:
    """Return the roles of an RL run with a model, but the policy."""
    needs = settled(config.algorithm.name, config.algorithm.given()).needs(1)
    built = {need.role for need in needs if need.build} | ({REWARD_MODEL} if config.reward.model is not None else set())
    return built - {TEACHER} | {*config.teacher.roles()} if TEACHER in built else built


def roles_on_base(config: Config) -> tuple[str, ...]:
    """Return the roles of an RL run that have no model of their own: they compute on the policy's frozen base."""
    return tuple(sorted(_roles(config) & roles_of_policy(config)))


def placed_roles(config: Config) -> tuple[str, ...]:
    """Return the roles of an RL run that have workers of their own."""
    models = sorted(_roles(config) - roles_of_policy(config), key=lambda role: (role == REWARD_MODEL, role))
    return ("actor", *models, "compute", "recorder")


def places_of(config: Config, command: str = "train") -> tuple[dict[str, Pool], dict[str, str]]:
    """Return the pools by name, and the pool of each role. Raise ValueError for a contradictory section."""
    roles = placed_roles(config) if command in ("train", "eval") else ("trainer", "compute")
    return pools_of(config.cluster, roles, device=default_device(config))


def cluster_faults(config: Config, command: str) -> Iterator[str]:
    """Yield a line for each fault of keys that are each valid by themselves."""
    yield from _missing_modules(config)
    if config.cluster.backend == "inproc":
        yield from _in_one_process(config)
        missing = [*python_faults(config)]
        yield from missing
        for section in ("queue", "sync") if missing else ("model", "queue", "sync"):
            yield from faults_of(config, section, {}, {})
        return
    c = config.cluster
    if (virtual := config.cluster.virtual_ranks) > 1:
        fix = f"with cluster.backend={c.backend} set cluster.ranks_per_node={virtual} in its place"
        yield f"cluster.virtual_ranks={virtual} are ranks of one process: {fix}"
    yield from python_faults(config)
    if c.backend == "ray":
        yield from _address(config)
    if c.backend == "processes" and (apart := [*_on_this_machine(config)]):
        yield from apart
        return
    yield from placed_faults(config, command)


def placed_faults(config: Config, command: str) -> Iterator[str]:
    """Yield a line for each fault of the layout, the pools and the engines of a run over processes, whatever this
    machine has installed."""
    try:
        layout = layout_of(config)
        if command in TRAINS:
            yield from _rows_of_ranks(config, layout, command)
        pools, roles = places_of(config, command)
    except ValueError as e:
        yield from str(e).splitlines()
        return
    yield from _pools(config, layout, pools, roles)
    yield from _devices(config, pools, roles)
    yield from _transports(config, pools, roles)
    for section in ("model", "queue", "sync"):
        yield from faults_of(config, section, pools, roles)


def _missing_modules(config: Config) -> Iterator[str]:
    """Yield a line for each Python module that is not installed and that a chosen engine requires."""
    chosen = {"cluster.backend": CLUSTER[config.cluster.backend]}
    chosen |= {f"{section}.engine": TABLES[section][vars(config)[section].engine] for section in TABLES}
    found: dict[tuple[str, str], str] = {}
    for key, row in chosen.items():
        if row.requires is not None:
            found.setdefault(row.requires, key)
    for (module, message), key in found.items():
        if find_spec(module) is None:
            yield f"{key}={values_of(config)[key]}: {message}"


def _in_one_process(config: Config) -> Iterator[str]:
    values, fix = values_of(config), "everything runs in this process: set cluster.backend=ray, or leave it out"
    for key, leaf in leaves().items():
        if key.startswith(("cluster.", "parallel.")) and key not in ANYWHERE and values[key] != leaf.default:
            more = " (cluster.virtual_ranks plays many ranks in one process)" if key == "cluster.ranks_per_node" else ""
            yield f"{key}={text_of(values[key])} with cluster.backend=inproc: {fix}{more}"


def _on_this_machine(config: Config) -> Iterator[str]:
    """Yield a line for each key of several machines or pools, which child processes of this one do not have."""
    values = values_of(config)
    for key, leaf in leaves().items():
        if key.startswith("cluster.") and key not in OF_PROCESSES and values[key] != leaf.default:
            fix = "set cluster.backend=ray, or leave it out"
            yield f"{key}={text_of(values[key])} with cluster.backend=processes, which are of this machine: {fix}"


def _address(config: Config) -> Iterator[str]:
    given = config.cluster.address
    key, address = "RAY_ADDRESS" if given is None else "cluster.address", address_of(given)
    host, _, port = (address or "auto").rpartition(":")
    if address in (None, "auto") or (re.fullmatch(r"[\w.-]+", host) and port.isdecimal() and 0 < int(port) < 65536):
        return
    fix = f"{host or address}:6379" if re.fullmatch(r"[\w.-]+", host or str(address)) else "10.0.0.1:6379"
    yield f"{key}={address}: neither auto nor HOST:PORT; give {fix}, say, or null for a Ray of this machine alone"


def _rows_of_ranks(config: Config, layout: Layout, command: str) -> Iterator[str]:
    """Yield a fault if a data rank would have no row in an optimizer step."""
    groups = config.step.prompts_per_step // config.step.updates_per_step
    prefix = "groups of an optimizer step (step.prompts_per_step / step.updates_per_step)"
    if command in ("sft", "rm", "dpo"):
        groups = config.step.prompts_per_step
        prefix = f"rows of a step (step.prompts_per_step={groups})"
    if layout.data > groups:
        fix = "some would be idle: raise it, lower cluster.ranks_per_node, or share the model with parallel.tensor"
        yield f"{layout.world_size} ranks are {layout.data} data ranks, but there are {groups} {prefix}; {fix}"


def _pools(config: Config, layout: Layout, pools: dict[str, Pool], roles: dict[str, str]) -> Iterator[str]:
    """Yield a line for each pool that has too few or too many processes for its models and replicas. A model needs one
    process per rank, a replica needs one; all processes of a pool run at the same time."""
    for name, pool in pools.items():
        models = [role for role, at in roles.items() if at == name and role not in NO_MODEL]
        if pool.dtype and not models:
            yield f"cluster.pools.{name}.dtype={pool.dtype}: no model lives there (of rollout it is rollout.dtype)"
        if models and pool.ranks != layout.world_size:
            yield (
                f"cluster.pools.{name} has {pool.ranks} ranks, but {models[0]} has {layout.world_size}, as every model "
                f"(cluster.nodes x cluster.ranks_per_node): give the pool {layout.world_size}"
            )
    at, replicas = roles["rollout"], config.rollout.replicas
    if config.cluster.backend == "ray" and replicas > (room := pools[at].ranks):
        fix = "lower it, or give rollout a pool of its own (cluster.roles)"
        yield f"rollout.replicas={replicas} is above the {room} ranks of the pool {at}: {fix}"


def _devices(config: Config, pools: dict[str, Pool], roles: dict[str, str]) -> Iterator[str]:
    """Yield a fault for each pool with a device on which its models cannot compute. torch would report it only after
    Ray has started."""
    for name, pool in pools.items():
        models = [role for role, at in roles.items() if at == name and role not in ("compute", "recorder")]
        at, wanted, device = f"cluster.pools.{name}", config.model.device, pool.computes_on
        known = device in ("cpu", "cuda", *DEVICES) or (device.isidentifier() and find_spec(f"torch_{device}"))
        if models and not known:
            key = "device" if pool.device else "resource"
            fix = f"give one that it has ({', '.join(DEVICES)}, or NAME with torch_NAME installed), or device=cpu"
            yield f"{at}.{key}={device}: {models[0]} computes there, and torch has no device of this name; {fix}"
        elif models and device == "cuda" and not pool.gpus_per_rank:
            yield f"{at}.device=cuda: a rank holds no GPU there; give gpus_per_rank=1, or another device"
        elif models and name == MAIN and wanted != "auto" and wanted != device:
            held = f"resource={device}" if pool.resource else f"gpus_per_rank={pool.gpus_per_rank:g}"
            would = f"{models[0]} would compute on {device}"
            yield f"{at}.{held}: {would}, and model.device={wanted}; leave one of them out"


def _transports(config: Config, pools: dict[str, Pool], roles: dict[str, str]) -> Iterator[str]:
    """Yield a fault if rows or weights cannot reach every process."""
    far = ray_address(config)
    several = [name for name, pool in pools.items() if pool.nodes > 1]
    if far is None:
        for name in several if config.cluster.backend == "ray" else ():  # torchrun's nodes are started by hand
            key = "cluster.nodes" if name == MAIN else f"cluster.pools.{name}.nodes"
            fix = "start Ray on every node (docs/cluster.md) and set cluster.address=auto"
            yield f"{key}={pools[name].nodes}: a Ray that is started here has one node; {fix}"
        return
    if backend_of(config, "queue").one_machine:
        why = f"is the memory of one machine, and cluster.address={far} may have several"
        yield f"queue.engine={config.queue.engine} {why}: set queue.engine=ray"
    if backend_of(config, "sync").one_machine:
        fix = "set sync.engine=tcp"
        yield from needs_one_machine(config, pools, roles, "goes through the memory of one machine", fix)


def needs_one_machine(
    config: Config, pools: Mapping[str, Pool], roles: Mapping[str, str], why: str, fix: str
) -> Iterator[str]:
    """Yield a fault if the sync engine reaches one machine only and replicas may be on others."""
    at, home, address = roles["rollout"], roles["actor"], ray_address(config)
    if at != home:
        yield (
            f"cluster.roles.rollout={at}: sync.engine={config.sync.engine} {why}, and with cluster.address={address} "
            f"that pool may be on another; {fix}, or let rollout live with the actor, in {home}"
        )
    elif config.rollout.replicas > (held := pools[home].ranks_per_node):
        yield (
            f"rollout.replicas={config.rollout.replicas}: sync.engine={config.sync.engine} {why}, and the first node "
            f"of the pool {home} has {held} ranks: {fix}, or at most {held}"
        )
