"""Rules of placement: verl's nodes, devices and parallel sizes. They never change the objective, so on a machine
without the requested devices the run is one process, and a message reports that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType

from verl.config.backends import address_of
from verl.config.compat.given import ACTOR, Given, Result
from verl.config.devices import local_gpus
from verl.errors import Refused

ONE_PROCESS = (
    "layout: the actor's is that of all, over processes where its devices are or with cluster.backend=ray, else in "
    "one; the maths does not depend on it"
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
OFFLOAD: Mapping[str, str] = MappingProxyType(
    {
        f"{ACTOR}fsdp_config.param_offload": "offload_weights",
        f"{ACTOR}fsdp_config.optimizer_offload": "offload_optimizer",
        "actor_rollout_ref.ref.fsdp_config.param_offload": "offload_frozen",
    }
)


def offload(given: Given) -> Result:
    """Return the settings of offloading; none on a CPU, where the tensors are in host memory already."""
    if local_gpus() == 0 or given.native.get("model.device", "auto") == "cpu":
        given.ignore(
            "a CPU's are in host memory already (model.engine_options.offload_* puts them into files)", *OFFLOAD
        )
        return {}
    found = {f"model.engine_options.{own}": given.value(key) for key, own in OFFLOAD.items()}
    return {target: value for target, value in found.items() if value is not None}


def layout(given: Given) -> Result:
    """Return cluster.* and parallel.* if cluster.backend=ray is given, or if the devices exist: on this machine, or in
    the cluster at cluster.address or RAY_ADDRESS."""
    wanted, keys = given.native.get("cluster.backend"), tuple(key for of in SHARES.values() for key in of)
    if wanted in (None, "inproc") and not over_ray(given):
        given.ignore(ONE_PROCESS, NODES, DEVICES, SHARDS, *keys)
        return {}
    nodes, ranks = int(given.own("cluster.nodes", _size(given, NODES))), _size(given, DEVICES)
    ranks = int(given.own("cluster.ranks_per_node", ranks))
    sizes = {target: max(_size(given, key) for key in of) for target, of in SHARES.items()}
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
    given.ignore("has no effect at this value", *(key for key in (*keys, SHARDS) if _size(given, key) == 1))
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


def over_ray(given: Given) -> bool:
    """Return True if the run uses Ray, by the same decision as in `layout`."""
    wanted = given.native.get("cluster.backend")
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


RULES = (layout, offload, device, own_size)
