"""The tables of engines: the name of each, and the places of its parts as `module:name`. Importing this imports no
engine.

A backend is one file and one row here. It has `Options`, a dataclass of its own keys with their bounds (in a module
without torch); `build(options, context)`, which makes the engine; and `memory(options, ...)`, the estimate of its
memory for the plan. It may have `faults(config, pools, roles)`, which finds configurations that it cannot run, and name
the options that a resumed run may change. `SECTION.engine` selects the row, and `SECTION.engine_options` is checked
against the Options of that row.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import typing
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from verl.algorithms.presets import unknown_option
from verl.config.schema import Config
from verl.config.tree import convert, leaves, text_of
from verl.errors import Refused
from verl.model_engine.layout import Layout
from verl.model_engine.lora_spec import LoraSpec, lora_faults
from verl.names import did_you_mean

if TYPE_CHECKING:
    from verl.rollout.base import Traits
    from verl.workers.pools import Pool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoOptions:
    """The options of a backend without keys of its own."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One engine of a table: the places of its parts, and its properties."""

    build: str
    """`module:function`: (options, context) -> the engine."""
    options: str = "verl.config.backends:NoOptions"
    """`module:class`: the dataclass of its keys."""
    memory: str = ""
    """`module:function`: the bytes that the engine needs, for the plan. Empty: the function in MEMORY for its
    section."""
    across_processes: str = ""
    """The row that replaces it if workers have processes of their own."""
    across_machines: str = ""
    """The row that replaces it if workers are on several machines."""
    one_machine: bool = False
    """True if it serves only the processes of one machine."""
    each_host: bool = False
    """True if it brings weights into the shared memory of each machine."""
    for_sets: str = ""
    """The row that publishes LoRA sets in its place, since it cannot send a version whole."""
    traits: str = "verl.rollout.base:IN_PROCESS"
    """`module:name`: the abilities of a rollout engine."""
    sibling: str = ""
    """`module:function`: (engine, options, context) -> a second model engine on the frozen base of the first one.
    Empty: it has none."""
    package: str = ""
    """The pip requirement of a module that is not part of verl."""
    copies: bool = False
    """True for a model engine of which every data rank has the whole weights of its part."""
    replays_routes: bool = False
    """True for a model engine that computes tokens with the experts which the rollout chose."""
    routes_anywhere: bool = False
    """True if it does so also in padded rows and on pipeline stages."""
    worker_packages: tuple[tuple[str, str], ...] = ()
    """(package, start of the version) with which a model engine was run, in the environment of its workers."""
    requires: tuple[str, str] | None = None
    """(a Python module, the message if it is missing)."""
    faults: str = ""
    """`module:function`: (config, pools by name, pool of each role) -> a line for each fault of a configuration with
    this engine. Rollout engines, and all engines of a run in one process, get neither pools nor roles. Empty: none of
    its own."""
    may_change: tuple[str, ...] | None = None
    """The options that a resumed run may change. None: all of them."""


def _server(module: str, traits: str, **more: Any) -> Backend:
    """Return the row of a rollout engine that is a server, implemented in this module of verl/rollout."""
    at = f"verl.rollout.{module}"
    return Backend(build=f"{at}:build", options=f"{at}:Options", traits=f"verl.rollout.traits:{traits}", **more)


RAY = ("ray", "Ray is not installed: pip install '.[ray]' in verl's folder")
NIXL = ("nixl", "NIXL is missing: pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1")
PACKAGE = (
    "transfer_queue",
    "TransferQueue is missing: pip install --no-deps TransferQueue==0.1.11 tensordict==0.15.3 pyvers pyzmq "
    "prometheus_client cloudpickle",
)
Table = Mapping[str, Backend]
MODEL: Table = {
    "torch": Backend(
        build="verl.model_engine.torch_engine:build",
        options="verl.model_engine.options:Options",
        faults="verl.model_engine.faults:torch_faults",
        across_processes="sharded",
        replays_routes=True,
        sibling="verl.model_engine.sibling:build_sibling",
    ),
    "sharded": Backend(
        build="verl.model_engine.rank_engine:build",
        options="verl.model_engine.options:Options",
        faults="verl.model_engine.faults:sharded_faults",
        replays_routes=True,
        sibling="verl.model_engine.rank_engine:build_rank_sibling",
    ),
    "megatron": Backend(
        build="verl.model_engine.megatron:build",
        options="verl.model_engine.megatron_options:Options",
        memory="verl.model_engine.megatron_memory:megatron_memory",
        faults="verl.model_engine.megatron_options:megatron_faults",
        copies=True,
        replays_routes=True,
        routes_anywhere=True,
        worker_packages=(("megatron-core", "0.19."),),
    ),
    "veomni": Backend(
        build="verl.model_engine.veomni:build",
        options="verl.model_engine.options:Options",
        faults="verl.model_engine.veomni_options:veomni_faults",
        worker_packages=(("veomni", "0.1.12"), ("transformers", "5.9.")),
    ),
}
ROLLOUT: Table = {
    "native": Backend(
        build="verl.rollout.native.engine:build",
        options="verl.rollout.native.options:Options",
        memory="verl.rollout.native.options:memory",
        faults="verl.rollout.native.options:native_faults",
        traits="verl.rollout.native.options:NATIVE",
        may_change=("prefix_cache_tokens", "max_prefill_tokens", "max_kv_tokens"),
    ),
    "hf": Backend(build="verl.rollout.hf:build"),
    "vllm": _server("vllm", "VLLM", memory="verl.rollout.vllm:memory", faults="verl.rollout.vllm:vllm_faults"),
    "server": _server("server_url", "VERL_SERVE"),
    "sglang": _server("sglang", "SGLANG", faults="verl.rollout.sglang:sglang_faults"),
    "trtllm": _server("trtllm", "TRTLLM"),
    "openai": _server("openai", "OPENAI"),
}
QUEUE: Table = {
    "memory": Backend(build="verl.transfer_queue.memory:build", across_processes="shared", across_machines="ray"),
    "shared": Backend(
        build="verl.transfer_queue.shared:build", options="verl.transfer_queue.options:Shared", one_machine=True
    ),
    "ray": Backend(build="verl.transfer_queue.ray:build", options="verl.transfer_queue.options:Remote", requires=RAY),
    "package": Backend(
        build="verl.transfer_queue.package:build", options="verl.transfer_queue.options:Package", requires=PACKAGE
    ),
}
SYNC: Table = {
    "local": Backend(build="verl.weight_sync.local:build", across_processes="shm", across_machines="tcp"),
    "shm": Backend(build="verl.weight_sync.one_host:build", options="verl.weight_sync.options:Shm", one_machine=True),
    "ipc": Backend(
        build="verl.weight_sync.one_host:build",
        options="verl.weight_sync.options:Ipc",
        one_machine=True,
        faults="verl.weight_sync.faults:ipc_faults",
        for_sets="shm",
    ),
    "tcp": Backend(
        build="verl.weight_sync.tcp:build",
        options="verl.weight_sync.options:Tcp",
        each_host=True,
        faults="verl.weight_sync.faults:tcp_faults",
    ),
    "nixl": Backend(
        build="verl.weight_sync.nixl:build", options="verl.weight_sync.options:Nixl", each_host=True, requires=NIXL
    ),
    "collective": Backend(
        build="verl.weight_sync.collective:build",
        options="verl.weight_sync.options:Collective",
        each_host=True,
        faults="verl.weight_sync.faults:collective_faults",
    ),
    "disk": Backend(
        build="verl.weight_sync.disk:build",
        options="verl.weight_sync.options:Disk",
        faults="verl.weight_sync.faults:disk_faults",
    ),
}
CLUSTER: Table = {
    "inproc": Backend(build="verl.workers.inproc:build_cluster"),
    "processes": Backend(build="verl.workers.children.cluster:build"),
    "ray": Backend(build="verl.workers.ray.cluster:build", requires=RAY),
    "torchrun": Backend(build="verl.workers.spmd:build"),
}
MEMORY: Mapping[str, str] = MappingProxyType(
    {"model": "verl.model_engine.memory:memory", "rollout": "verl.config.backends:full_length_memory"}
)
"""Section -> the memory estimate for engines without their own."""
TABLES: Mapping[str, Table] = MappingProxyType({"model": MODEL, "rollout": ROLLOUT, "queue": QUEUE, "sync": SYNC})


def import_object(name: str) -> Any:
    """Return the object at `module:name`. Raise ValueError if the module has no such object."""
    module, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as exc:
        rows = (row for table in (*TABLES.values(), CLUSTER) for row in table.values())
        packages = [row.package for row in rows if row.build == name and row.package]
        pip = f"pip install {(packages or [str(exc.name).partition('.')[0]])[0]}"
        fix = "mend the row of verl/config/backends.py" if str(exc.name).startswith("verl.") else pip
        raise Refused(f"{name}: there is no module {exc.name}: {fix}, or choose another engine") from exc
    if not hasattr(found, attribute):
        fix = f"define it in {found.__file__}, or mend the row of verl/config/backends.py"
        raise Refused(f"{name}: the module has no {attribute}: {fix}")
    return getattr(found, attribute)


def traits_of(engine: str) -> Traits:
    """Return the abilities of a rollout engine, by its name in the table."""
    traits: Traits = import_object(ROLLOUT.get(engine, Backend(build="")).traits)
    return traits


def full_length_memory(
    options: NoOptions, *, max_concurrent_sequences: int, max_context_tokens: int, kv_bytes_per_token: int
) -> dict[str, int]:
    """Return the bytes of an engine that keeps every concurrent sequence at full length."""
    return {"KV cache": max_concurrent_sequences * max_context_tokens * kv_bytes_per_token}


def layout_of(config: Config) -> Layout:
    """Return how the ranks of a model divide it. Raise ValueError for an impossible layout."""
    c, p = config.cluster, config.parallel
    return Layout(
        world_size=c.nodes * c.ranks_per_node if c.backend != "inproc" else config.cluster.virtual_ranks,
        replicate=p.replicate,
        sequence=p.sequence,
        context=p.context,
        tensor=p.tensor,
        pipeline=p.pipeline,
        expert=p.expert,
    )


def backend_of(config: Config, section: str) -> Backend:
    """Return the row of the chosen engine; in a run over several processes, the row that replaces it there."""
    return TABLES[section][engine_name(config, section)]


def engine_name(config: Config, section: str) -> str:
    """Return the name of the engine that `backend_of` returns the row of."""
    c, engine, rollout = config.cluster, vars(config)[section].engine, config.rollout.engine
    return _row(section, engine, rollout, c.backend, c.nodes * c.ranks_per_node, ray_address(config))


def address_of(given: str | None, backend: str = "ray") -> str | None:
    """Return the address of a running Ray cluster that a run should use; None if it starts its own, or uses no Ray."""
    return (given or os.environ.get("RAY_ADDRESS") or None) if backend == "ray" else None


def ray_address(config: Config) -> str | None:
    """Return the `address_of` a run."""
    return address_of(config.cluster.address, config.cluster.backend)


def _row(section: str, engine: str, rollout: str, cluster: str, ranks: int, address: str | None) -> str:
    if section == "sync" and (traits := traits_of(rollout)).server:
        return traits.weights_from if engine == "local" else engine
    separate = cluster != "inproc" and (ranks > 1 if section == "model" else cluster != "torchrun")
    row = TABLES[section].get(engine, Backend(build=""))
    return (separate and ((address and row.across_machines) or row.across_processes)) or engine


def faults_of(config: Config, section: str, pools: Mapping[str, Pool], roles: Mapping[str, str]) -> Iterator[str]:
    """Yield the faults that the chosen engine itself finds, one per line."""
    if (found := backend_of(config, section).faults) != "":
        yield from import_object(found)(config, pools, roles)


def options_of(config: Config, section: str) -> Any:
    """Return the Options of the chosen engine. The configuration must be validated."""
    return import_object(backend_of(config, section).options)(**vars(vars(config)[section]).get("engine_options", {}))


def longest_sequence(config: Config) -> int:
    """Return the number of tokens of the longest prompt and response together, in training or evaluation."""
    return config.data.max_prompt_tokens + max(config.rollout.max_response_tokens, config.eval.max_response_tokens or 0)


def memory_of(config: Config, section: str) -> Callable[..., dict[str, int]]:
    """Return the function that estimates the memory of the chosen engine."""
    return import_object(backend_of(config, section).memory or MEMORY[section])


def rollout_caches(config: Config, *, bytes_per_token: int) -> dict[str, int]:
    """Return the bytes of the chosen rollout engine's KV memory, once it has grown to its full size."""
    return memory_of(config, "rollout")(
        options_of(config, "rollout"),
        max_concurrent_sequences=config.rollout.max_concurrent_sequences,
        max_context_tokens=longest_sequence(config),
        kv_bytes_per_token=bytes_per_token,
    )


def option_keys() -> Iterator[str]:
    """Yield every key of the engines' options."""
    for section, table in TABLES.items():
        for backend in table.values():
            fields = dataclasses.fields(import_object(backend.options))
            yield from (f"{section}.engine_options.{field.name}" for field in fields)


def has_option(row: Backend, name: str) -> bool:
    """Return True if an engine has an option of this name."""
    return name in {field.name for field in dataclasses.fields(import_object(row.options))}


def complete_options(values: dict[str, Any]) -> list[str]:
    """Add the defaults of each section's engine to its `engine_options`, in place. Return a line for each fault."""
    given = values.get("algorithm.options", {})
    faults = [unknown_option(name, text_of(given[name])) for name in given if f"algorithm.{name}" in leaves()]
    for section, table in TABLES.items():
        engine, key = values[f"{section}.engine"], f"{section}.engine_options"
        if engine not in table:
            faults.append(f"{section}.engine={engine}: {_no_engine(engine, section, table)}")
        elif key in values:
            ranks = values["cluster.nodes"] * values["cluster.ranks_per_node"]
            cluster = values["cluster.backend"]
            address = address_of(values["cluster.address"], cluster)
            row = _row(section, engine, values["rollout.engine"], cluster, ranks, address)
            cls = import_object(table[row].options)
            found, wrong = _converted(key, values[key], cls, f"The options of the {engine} engine")
            values[key] = {field.name: field.default for field in dataclasses.fields(cls)} | found
            faults += [_with_owners(section, key, line) for line in wrong]
    values["model.lora"], wrong = _converted("model.lora", values.get("model.lora", {}), LoraSpec, "The options")
    return faults + (wrong or [*lora_faults(values["model.lora"])])


def _with_owners(section: str, key: str, fault: str) -> str:
    """Return a line for an unknown option with the engines that have an option of its name."""
    name = fault.removeprefix(f"{key}.").partition("=")[0]
    owners = [] if "unknown; " not in fault else [e for e, row in TABLES[section].items() if has_option(row, name)]
    return f"{fault}; {name} is an option of {section}.engine={' or '.join(owners)}" if owners else fault


def _converted(key: str, given: Mapping[str, Any], cls: type, what: str) -> tuple[dict[str, Any], list[str]]:
    """Return the given options as the types of a dataclass's fields, and a line for each fault. what: names them in a
    line. A class may say in `absent` why it has not an option that others of its kind have."""
    names, absent = {field.name for field in dataclasses.fields(cls)}, getattr(cls, "absent", {})
    hints = {n: hint for n, hint in typing.get_type_hints(cls, include_extras=True).items() if n in names}
    found, faults = dict[str, Any](), list[str]()
    for name, value in given.items():
        try:
            found[name] = convert(value, hints[name])
        except KeyError:
            unknown = f"unknown; {did_you_mean(name, hints)}{what} are {', '.join(hints) or 'none'}"
            faults.append(f"{key}.{name}={text_of(value)}: {absent.get(name, unknown)}")
        except ValueError as exc:
            faults.append(f"{key}.{name}={value}: {exc}")
    return found, faults


def _no_engine(engine: str, section: str, table: Table) -> str:
    return f"unknown; {did_you_mean(engine, table)}There are: {', '.join(table)}"
