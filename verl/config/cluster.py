"""Faults of where a run is placed (pools, roles, layout), found without Ray and without loading a model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from verl.algorithms.presets import settled
from verl.algorithms.sections import TEACHER
from verl.config.adapter import teacher_models
from verl.config.backends import address_of, backend_of, engine_name, layout_of, options_of
from verl.config.devices import default_device, on_cuda
from verl.config.model_files import describe_model, read_model_config, text_config
from verl.config.schema import Config
from verl.config.tree import leaves, text_of, values_of
from verl.model_engine.layout import Layout
from verl.model_engine.options import EXPERT_PLANS, PIPELINE_PLANS, TENSOR_PLANS, cannot
from verl.workers.pools import MAIN, Pool, pools_of

NO_MODEL = ("rollout", "compute", "recorder")
"""Roles that have no ranks of a model."""
PIP = "not installed: pip install '.[ray]' in verl's folder"
DEVICES = ("xpu", "mtia")
"""Resources that a pool may name and that torch knows by itself, beside cpu and cuda."""
ON_GPU = "sync.engine=ipc: weights pass through a GPU's memory, and {who} of this run are on CPUs; set sync.engine=shm"
ANYWHERE = ("cluster.backend", "cluster.virtual_ranks", "cluster.max_restarts", "cluster.start_timeout_s")


def placed_roles(config: Config) -> tuple[str, ...]:
    """Return the roles of an RL run that have workers of their own."""
    needs = settled(config.algorithm.name, config.algorithm.given()).needs(1)
    built = {need.role for need in needs if need.build}
    if TEACHER in built:
        built = built - {TEACHER} | {*config.teacher.roles()}
    models = ("actor", *sorted(built))
    return (*models, *(("reward_model",) if config.reward.model is not None else ()), "compute", "recorder")


def places_of(config: Config, command: str = "train") -> tuple[dict[str, Pool], dict[str, str]]:
    """Return the pools by their names, and the pool of each role. ValueError for a section that is contradictory."""
    roles = placed_roles(config) if command in ("train", "eval") else ("trainer", "compute")
    return pools_of(config.cluster, roles, device=default_device(config))


def cluster_faults(config: Config, command: str) -> Iterator[str]:
    """Yield a line per fault of keys that are each valid alone."""
    engines = {"cluster.backend": config.cluster.backend, "queue.engine": config.queue.engine}
    needs_ray = [key for key, name in engines.items() if name == "ray"]
    if needs_ray and find_spec("ray") is None:
        yield f"{needs_ray[0]}=ray: Ray is {PIP}"
    if config.sync.engine == "nixl" and find_spec("nixl") is None:
        yield "sync.engine=nixl: NIXL is missing: pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1"
    if config.queue.engine == "package" and find_spec("transfer_queue") is None:
        packages = "TransferQueue==0.1.11 tensordict==0.15.3 pyvers pyzmq prometheus_client cloudpickle"
        yield f"queue.engine=package: TransferQueue is missing: pip install --no-deps {packages}"
    given = config.sync.engine_options
    if given.get("delta") and given.get("bucket_mb") is not None:
        why = "what changed is told of whole versions, which no host has where they pass through buckets"
        yield f"sync.engine_options.delta=true with sync.engine_options.bucket_mb={given['bucket_mb']}: {why}; take one"
    if config.sync.engine == "ipc" and config.cluster.backend != "ray" and not on_cuda(config):
        yield ON_GPU.format(who="the models")
    if config.cluster.backend == "inproc":
        yield from _in_one_process(config)
        return
    c, ranks = config.cluster, config.cluster.nodes * config.cluster.ranks_per_node
    if (virtual := config.cluster.virtual_ranks) > 1:
        fix = f"with cluster.backend={c.backend} set cluster.ranks_per_node={virtual} in its place"
        yield f"cluster.virtual_ranks={virtual} are ranks of one process: {fix}"
    if config.model.engine == "sharded" and ranks == 1:
        yield "model.engine=sharded wants several ranks: set cluster.ranks_per_node, or model.engine=torch"
    if c.backend == "ray":
        yield from _address(config)
    try:
        layout = layout_of(config)
        yield from _layout(config, layout, command)
        pools, roles = places_of(config, command)
    except ValueError as e:
        yield from str(e).splitlines()
        return
    yield from _pools(config, layout, pools, roles)
    yield from _devices(config, pools, roles)
    yield from _transports(config, pools, roles)


def _in_one_process(config: Config) -> Iterator[str]:
    if _nccl(config) and not on_cuda(config):
        yield "sync.engine_options.backend=nccl: the models of this run are on CPUs; leave it out (gloo)"
    values, fix = values_of(config), "everything runs in this process: set cluster.backend=ray, or leave it out"
    for key, leaf in leaves().items():
        if key.startswith(("cluster.", "parallel.")) and key not in ANYWHERE and values[key] != leaf.default:
            more = " (cluster.virtual_ranks plays many ranks in one process)" if key == "cluster.ranks_per_node" else ""
            yield f"{key}={text_of(values[key])} with cluster.backend=inproc: {fix}{more}"
    if config.model.engine == "sharded":
        yield "model.engine=sharded with cluster.backend=inproc: this process has no others; set model.engine=torch"


def _address(config: Config) -> Iterator[str]:
    given = config.cluster.address
    key, address = "RAY_ADDRESS" if given is None else "cluster.address", address_of(given)
    host, _, port = (address or "auto").rpartition(":")
    if address in (None, "auto") or (re.fullmatch(r"[\w.-]+", host) and port.isdecimal() and 0 < int(port) < 65536):
        return
    fix = f"{host or address}:6379" if re.fullmatch(r"[\w.-]+", host or str(address)) else "10.0.0.1:6379"
    yield f"{key}={address}: neither auto nor HOST:PORT; give {fix}, say, or null for a Ray of this machine alone"


def _layout(config: Config, layout: Layout, command: str) -> Iterator[str]:
    if impossible := [*cannot(layout)]:
        yield from impossible
        return
    groups = config.step.prompts_per_step // config.step.updates_per_step
    prefix = "groups of an optimizer step (step.prompts_per_step / step.updates_per_step)"
    if command in ("sft", "rm", "dpo"):
        groups = config.supervised.rows_per_step
        prefix = f"rows of a step (supervised.rows_per_step={groups})"
    if layout.data > groups and command in ("train", "sft", "rm", "dpo"):
        fix = "some would be idle: raise it, lower cluster.ranks_per_node, or share the model with parallel.tensor"
        yield f"{layout.world_size} ranks are {layout.data} data ranks, but there are {groups} {prefix}; {fix}"
    for name, size in (("sequence", layout.sequence), ("pipeline", layout.pipeline)):
        if size > 1 and options_of(config, "model").attention == "padded":
            yield f"parallel.{name}={size} shares packed rows: set model.engine_options.attention=auto"
    if layout.sequence * layout.tensor * layout.expert * layout.pipeline > 1:
        critic = config.critic.path if "critic" in placed_roles(config) else None
        folders = {"model.path": config.model.path, "critic.path": critic, "reward.model": config.reward.model}
        folders |= {f"teacher ({role})": path for role, path in teacher_models(config).items()}
        for key, path in folders.items():
            if path is not None:
                yield from _shared(f"{key}={path}", path, layout)


def _shared(what: str, path: str, layout: Layout) -> list[str]:
    """Return why the ranks cannot share this model, from its config.json."""
    try:
        facts = describe_model(path)
    except ValueError:
        return []  # another check reports it
    config = read_model_config(Path(facts.folder))
    text, planned = text_config(config), "auto_map" in config
    sizes = {"tensor": layout.tensor, "sequence": layout.sequence}
    asked = " x ".join(f"parallel.{name}={size}" for name, size in sizes.items() if size > 1)
    kind, both = str(text.get("model_type")), layout.tensor * layout.sequence
    alone = "(parameters are sharded over the data ranks then)"
    if layout.tensor > 1 and not (planned or kind in TENSOR_PLANS):
        return [f"{asked}: {what} is a {kind}, which cannot be cut over ranks here; use parallel.tensor=1 {alone}"]
    if layout.pipeline > 1 and not (planned or kind in PIPELINE_PLANS):
        fix = f"use parallel.pipeline=1 {alone}"
        return [f"parallel.pipeline={layout.pipeline}: {what} is a {kind}, which cannot be cut into stages here; {fix}"]
    if layout.pipeline > facts.layers:
        few = f"{what} has {facts.layers} layers, and each stage wants one; use at most {facts.layers}"
        return [f"parallel.pipeline={layout.pipeline}: {few}"]
    if layout.expert > 1 and not (planned or kind in EXPERT_PLANS):
        fix = f"use parallel.expert=1 (those of {', '.join(EXPERT_PLANS)} can be)"
        return [f"parallel.expert={layout.expert}: {what} is a {kind}, whose experts cannot be given to ranks; {fix}"]
    if (experts := text.get("num_experts") or text.get("num_local_experts") or 0) % layout.expert:
        fix = f"which its ranks cannot share equally; use {math.gcd(experts, layout.expert)}"
        return [f"parallel.expert={layout.expert}: {what} has {experts} experts, {fix}"]
    for name, number in (("attention heads", facts.heads), ("key-value heads", facts.kv_heads)):
        if number % both:
            fix = f"use {math.gcd(number, both)} in all"
            return [f"{asked}: {what} has {number} {name}, which {both} ranks cannot share equally; {fix}"]
    cut = {"a vocabulary": facts.vocab, "an MLP": text.get("intermediate_size") or 0}
    cut["a shared expert"] = text.get("shared_expert_intermediate_size") or 0
    odd = [f"{name} of {number}" for name, number in cut.items() if number % layout.tensor]
    fix = "which its ranks cannot share equally; use a divisor of it"
    return [f"parallel.tensor={layout.tensor}: {what} has {size}, {fix}" for size in odd]


def _pools(config: Config, layout: Layout, pools: dict[str, Pool], roles: dict[str, str]) -> Iterator[str]:
    """Check the size of each pool. A model has one process per rank and a replica has one; a pool runs them side by
    side."""
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
    if replicas > (room := pools[at].ranks):
        fix = "lower it, or give rollout a pool of its own (cluster.roles)"
        yield f"rollout.replicas={replicas} is above the {room} ranks of the pool {at}: {fix}"


def _devices(config: Config, pools: dict[str, Pool], roles: dict[str, str]) -> Iterator[str]:
    """Check that the models of each pool can compute on its device. torch would report it only after Ray has
    started."""
    for name, pool in pools.items():
        models = [role for role, at in roles.items() if at == name and role not in ("compute", "recorder")]
        at, asked, device = (
            "cluster" if name == MAIN else f"cluster.pools.{name}",
            config.model.device,
            pool.computes_on,
        )
        known = device in ("cpu", "cuda", *DEVICES) or (device.isidentifier() and find_spec(f"torch_{device}"))
        if models and not known:
            key = "device" if pool.device else "resource"
            fix = f"give one that it has ({', '.join(DEVICES)}, or NAME with torch_NAME installed), or device=cpu"
            yield f"{at}.{key}={device}: {models[0]} computes there, and torch has no device of this name; {fix}"
        elif models and device == "cuda" and not pool.gpus_per_rank:
            yield f"{at}.device=cuda: a rank holds no GPU there; give gpus_per_rank=1, or another device"
        elif models and name == MAIN and asked != "auto" and asked != device:
            held = f"resource={device}" if pool.resource else f"gpus_per_rank={pool.gpus_per_rank:g}"
            yield f"{at}.{held}: {models[0]} would compute on {device}, and model.device={asked}; leave one of them out"
    far = [role for role in ("actor", "rollout") if role in roles and pools[roles[role]].computes_on != "cuda"]
    if far and config.sync.engine == "ipc":
        yield ON_GPU.format(who=" and ".join(far))
    elif config.sync.engine == "ipc" and {"actor", "rollout"} <= roles.keys() and config.rollout.url is None:
        yield from _one_gpu(config, roles)
    if far and _nccl(config):
        yield f"sync.engine_options.backend=nccl: {' and '.join(far)} of this run are not on GPUs; leave it out (gloo)"


def _one_gpu(config: Config, roles: dict[str, str]) -> Iterator[str]:
    """Check the GPUs of the buckets: Ray shows a process only its own GPUs, and the buckets are on that of the actor's
    first rank."""
    why = "the weights lie on the GPU of the actor's first rank, and Ray shows each process its own alone"
    if (at := roles["rollout"]) != (home := roles["actor"]):
        if address_of(config.cluster.address) is not None:
            return  # it may even be on another machine, which is another fault
        fix = f"set sync.engine=shm, or let rollout live with the actor, in {home}"
        yield f"cluster.roles.rollout={at} with sync.engine=ipc: {why}; {fix}"
    elif config.rollout.replicas > 1:
        yield f"rollout.replicas={config.rollout.replicas} with sync.engine=ipc: {why}; set sync.engine=shm, or one"


def _nccl(config: Config) -> bool:
    return config.sync.engine == "collective" and config.sync.engine_options.get("backend") == "nccl"


def _transports(config: Config, pools: dict[str, Pool], roles: dict[str, str]) -> Iterator[str]:
    """Check that rows and weights reach every process."""
    replicas, far = config.rollout.replicas, address_of(config.cluster.address)
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
    alone = engine_name(config, "sync") == "disk" and config.sync.engine_options.get("folder") is None
    if not (alone or backend_of(config, "sync").one_machine):
        return
    at, home, why = roles["rollout"], roles["actor"], "goes through the memory of one machine"
    fix = "set sync.engine=tcp"
    if alone:
        why, fix = "lies on the disk of one machine", "set sync.engine_options.folder to one that all machines see"
    if at != home:
        yield (
            f"cluster.roles.rollout={at}: sync.engine={config.sync.engine} {why}, and with cluster.address={far} that "
            f"pool may be on another; {fix}, or let rollout live with the actor, in {home}"
        )
    elif replicas > (held := pools[home].ranks_per_node):
        yield (
            f"rollout.replicas={replicas}: sync.engine={config.sync.engine} {why}, and the first node of the pool "
            f"{home} has {held} ranks: {fix}, or at most {held}"
        )
