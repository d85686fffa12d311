"""Rules of placement: verl's model engines, nodes, devices and parallel sizes. They never change the objective, so on a
machine without the requested devices the run is one process, and a message reports that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from verl.config.backends import MODEL, address_of, has_option
from verl.config.backends import ROLLOUT as SAMPLERS
from verl.config.compat.given import ACTOR, ROLLOUT, Given, Result
from verl.config.devices import local_gpus
from verl.config.served import reachable
from verl.errors import Refused

ONE_PROCESS = (
    "layout: the actor's is that of all, over processes where its devices are or with cluster.backend=ray or "
    "processes, else in one; the maths does not depend on it"
)
NODES, DEVICES, SHARDS = "trainer.nnodes", "trainer.n_gpus_per_node", f"{ACTOR}fsdp_config.fsdp_size"
_ENGINE = f"{ACTOR}engine."
TENSOR = (
    *(f"{ACTOR}megatron.tensor_model_parallel_size", "engine.tensor_model_parallel_size"),
    *(f"{_ENGINE}{key}" for key in ("tp_size", "tensor_parallel_size", "tensor_model_parallel_size")),
)
PIPELINE = (
    *(f"{ACTOR}megatron.pipeline_model_parallel_size", "engine.pipeline_model_parallel_size"),
    *(f"{_ENGINE}{key}" for key in ("pp_size", "pipeline_parallel_size", "pipeline_model_parallel_size")),
)
EXPERT = (
    *(f"{ACTOR}megatron.expert_model_parallel_size", "engine.expert_model_parallel_size"),
    *(f"{_ENGINE}{key}" for key in ("ep_size", "expert_parallel_size", "expert_model_parallel_size")),
)
OF_MEGATRON = {
    option: tuple(f"{of}{key}" for of in (f"{ACTOR}megatron.", "engine."))
    for option, key in (
        ("virtual_stages", "virtual_pipeline_model_parallel_size"),
        ("expert_tensor", "expert_tensor_parallel_size"),
    )
}
SEQUENCE = (
    *(f"{_ENGINE}{key}" for key in ("cp_size", "context_parallel_size", "ulysses_parallel_size")),
    f"{_ENGINE}ulysses_sequence_parallel_size",
    *(f"{ACTOR}{key}" for key in ("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size")),
    *(f"{ACTOR}{key}" for key in ("veomni.ulysses_parallel_size", "megatron.context_parallel_size")),
    "ulysses_sequence_parallel_size",
    *("engine.ulysses_sequence_parallel_size", "engine.ulysses_parallel_size", "engine.context_parallel_size"),
)
"""verl's keys for the number of devices that share a sequence."""

SHARES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"parallel.tensor": TENSOR, "parallel.sequence": SEQUENCE, "parallel.pipeline": PIPELINE, "parallel.expert": EXPERT}
)
OF_FILE = "model_engine@_here_"
"""The key under which the engine of one of verl's own configuration files is read; Hydra puts it below all others."""
SHARES_OF_ENGINE: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"megatron": {f"model.engine_options.{option}": keys for option, keys in OF_MEGATRON.items()}}
)
"""Sizes that are options of one model engine."""
POLICY_ENGINES = (
    *("model_engine", OF_FILE, "engine", "engine@engine", "engine.strategy", "model.strategy"),
    *(f"{ACTOR}strategy", f"{ACTOR}model_engine", "actor@actor_rollout_ref.actor"),
)
"""verl's keys for the engine of the policy; those of other roles are read after them."""
NO_ENGINE = ("mindspeed", "torchtitan", "automodel")
"""Engines of verl that are not here."""
OFFLOAD: Mapping[str, str] = MappingProxyType(
    {
        f"{ACTOR}fsdp_config.param_offload": "offload_weights",
        f"{ACTOR}fsdp_config.optimizer_offload": "offload_optimizer",
        "actor_rollout_ref.ref.fsdp_config.param_offload": "offload_frozen",
    }
)
"""verl's keys of what leaves the device, which FSDP reads, and the options that they are."""
OFFLOAD_OF_ENGINE: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {name: {key.replace("fsdp_config", name): own for key, own in OFFLOAD.items()} for name in ("megatron", "veomni")}
)
"""The same for an engine with a section of its own."""


def offload(given: Given) -> Result:
    """Return the settings of offloading; none on a CPU, where the tensors are in host memory already."""
    every = (*OFFLOAD, *(key for keys in OFFLOAD_OF_ENGINE.values() for key in keys))
    if local_gpus() == 0 or given.native.get("model.device", "auto") == "cpu":
        given.ignore("a CPU's are in host memory already (model.engine_options.offload_* puts them into files)", *every)
        return {}
    engine = _engine(given)
    keys = OFFLOAD_OF_ENGINE.get(engine, OFFLOAD)
    given.ignore(f"not read with model.engine={engine}", *(key for key in every if key not in keys))
    found = {f"model.engine_options.{own}": given.value(key) for key, own in keys.items()}
    return {target: value for target, value in found.items() if value is not None}


def model_engine(given: Given) -> Result:
    """Return the model engine of all models, which is that of the policy: Megatron-Core and VeOmni themselves, and for
    each other engine of verl that of torch."""
    named = _named_engines(given)
    for key in (key for key in given.values if key not in POLICY_ENGINES and given.reads(key, "model_engine")):
        if given.value(key) not in named.values():
            given.ignore("every model is computed by the engine of the policy", key)
    if len({*named.values()}) > 1:
        both = " and ".join(f"{key}={given.values[key]}" for key in named)
        raise Refused(f"{both} contradict each other: all models are computed by one engine; leave one out")
    for key in named:
        if (name := str(given.values[key]).removesuffix("_actor")) in NO_ENGINE:
            given.remarks[key] = f"{name} is not here, and computes the same"
    engine = _policy_engine(given)
    return {} if engine is None else {"model.engine": engine}


def _named_engines(given: Given) -> dict[str, Any]:
    """Return the engines of the policy by key: that of a file of verl's only if no key differs from it."""
    named = {key: given.value(key) for key in POLICY_ENGINES if given.value(key) is not None}
    other = [key for key in named if named[key] != named.get(OF_FILE)]
    if OF_FILE in named and other:
        given.ignore(f"the file's engine; {other[0]}={given.values[other[0]]} replaces it", OF_FILE)
        del named[OF_FILE]
    return named


def _engine(given: Given) -> str:
    """Return the model engine of all models: ours if it is given, else that of verl's keys."""
    return str(given.native.get("model.engine", _policy_engine(given)) or "torch")


def _policy_engine(given: Given) -> Any:
    return next(iter(_named_engines(given).values()), None)


def layout(given: Given) -> Result:
    """Return cluster.* and parallel.* if a cluster.backend of several processes or model.python is given, or if the
    devices exist: on this machine, or in the cluster at cluster.address or RAY_ADDRESS."""
    wanted, keys = _backend(given), tuple(key for of in SHARES.values() for key in of)
    of_engines = {key: None for options in SHARES_OF_ENGINE.values() for of in options.values() for key in of}
    of_engine = SHARES_OF_ENGINE.get(_engine(given), {})
    if wanted in (None, "inproc") and not over_ray(given):
        given.ignore(ONE_PROCESS, NODES, DEVICES, SHARDS, *keys, *of_engines)
        return {}
    read = {key for of in of_engine.values() for key in of}
    given.ignore(f"not read with model.engine={_engine(given)}", *(key for key in of_engines if key not in read))
    nodes, ranks = int(given.own("cluster.nodes", _size(given, NODES))), _size(given, DEVICES)
    ranks = int(given.own("cluster.ranks_per_node", ranks))
    _refuse_python_of_many(given, nodes)
    sizes = {target: max(_size(given, key) for key in of) for target, of in {**SHARES, **of_engine}.items()}
    out: Result = {"cluster.backend": wanted or "ray"}
    if NODES in given.values:
        out["cluster.nodes"] = nodes
    if DEVICES in given.values:
        out |= {"cluster.ranks_per_node": ranks, "rollout.replicas": ranks}
        given.remarks[DEVICES] = "a rollout engine on every device of the first node"
    out |= {target: size for target, size in sizes.items() if size > 1}
    cut = [int(given.own(target, sizes[target])) for target in ("parallel.tensor", "parallel.pipeline")]
    shards, over = _size(given, SHARDS), nodes * ranks // math.prod(cut)
    if over % shards:
        raise Refused(f"{SHARDS}={shards} does not divide the {over} ranks that shard the model: use a divisor")
    if shards > 1:
        out["parallel.replicate"] = over // shards
    given.ignore("has no effect at this value", *(key for key in (*keys, *read, SHARDS) if _size(given, key) == 1))
    return out


def device(given: Given) -> Result:
    """Return the devices of this machine, with a remark if the script names another kind."""
    name = given.value("trainer.device")
    if name in ("cuda", "cpu"):
        return {"model.device": name}
    if name == "npu" or (name == "gpu" and local_gpus() == 0):
        found = "CUDA devices" if local_gpus() else "its CPU"
        given.remarks["trainer.device"] = f"{name} is not here: the run is on what this machine has, {found}"
    return {"model.device": "auto"}


def _backend(given: Given) -> Any:
    """Return the cluster.backend that is given, or that model.python implies; None if neither is."""
    implied = None if given.native.get("model.python") is None else "processes"
    return given.native.get("cluster.backend", implied)


def _refuse_python_of_many(given: Given, nodes: int) -> None:
    """Raise Refused if model.python, which implies processes of this machine, is given for several machines."""
    address, python = given.native.get("cluster.address"), given.native.get("model.python")
    if python is None or _backend(given) != "processes" or (nodes == 1 and address is None):
        return
    where = f"{nodes} nodes" if nodes > 1 else f"cluster.address={address}"
    raise Refused(
        f"model.python={python} with {where}: it means processes of this machine; set cluster.backend=ray, whose nodes "
        "have that interpreter too, or model.engine=torch without model.python"
    )


def over_ray(given: Given) -> bool:
    """Return True if the run uses Ray, by the same decision as in `layout`."""
    wanted = _backend(given)
    return wanted == "ray" or (wanted is None and _there(given))


def _there(given: Given) -> bool:
    """Return True if the requested devices exist, on this machine or in the Ray cluster with a given address."""
    sizes = [given.values.get(key, 1) for key in (NODES, DEVICES)]
    if not all(isinstance(size, int) for size in sizes) or find_spec("ray") is None:
        return False
    nodes, ranks = sizes
    if given.native.get("model.device", "auto") == "cpu" or nodes * ranks <= 1:
        return False
    named = address_of(given.native.get("cluster.address"))
    return named is not None or (nodes == 1 and ranks <= local_gpus())


def _size(given: Given, key: str) -> int:
    """Return a parallel size: 1 if it is not given or not enabled."""
    size = given.values.get(key)
    if size is None or size == -1:
        return 1
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise Refused(f"{key}={size}: expected a number")
    return max(1, size)


def own_size(given: Given) -> Result:
    """Refuse a size among Megatron's overrides that differs from the layout's own key for it."""
    inner = ".override_transformer_config."
    for key in (key for key in given.values if inner in key and given.reads(key, "own_size")):
        beside = key.replace(inner, ".")
        if given.value(key) not in (None, _size(given, beside)):
            raise Refused(f"{key}={given.value(key)}: the layout is {beside}={_size(given, beside)}: write it there")
        given.ignore(f"{beside} says it", key)
    return {}


def engine_of_rollout(given: Given) -> tuple[Any, bool]:
    """Return the rollout engine (None: ours), and whether the one that verl names is here. Ours runs in its place."""
    name = given.value(f"{ROLLOUT}name")
    here = name is None or reachable(name, given.native.get("rollout.python"), given.native.get("rollout.url"))
    return given.native.get("rollout.engine", name if here else "native"), here


def router_replay(given: Given) -> Result:
    """Map the mode of router replay: R3, with the routes of the rollout, for the engines that record and take them."""
    found: Result = {}
    engine, sampler = _engine(given), engine_of_rollout(given)[0] or "native"
    for key in (key for key in given.values if given.reads(key, "router_replay")):
        mode = given.value(key)
        if mode in (None, "disabled"):
            given.ignore("router replay is off", key)
        elif mode != "R3":
            fix = "set R3, which replays the experts of the rollout itself, or leave it out"
            raise Refused(f"{key}={mode}: only R3 is supported; {fix}")
        elif sampler in SAMPLERS and not has_option(SAMPLERS[sampler], "replay_routes"):
            fix = "set rollout.engine=native, or leave it out"
            raise Refused(f"{key}=R3: rollout.engine={sampler} records no routes; {fix}")
        elif engine in MODEL and not MODEL[engine].replays_routes:
            able = " or ".join(name for name, row in MODEL.items() if row.replays_routes)
            raise Refused(f"{key}=R3: router replay with model.engine={engine} is not here; set model.engine={able}")
        else:
            found["rollout.engine_options.replay_routes"] = True
    return found


RULES = (model_engine, layout, offload, device, own_size, router_replay)
