"""The device, the dtype and the offloading of models, as a configuration and this machine imply them. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from verl.config.backends import options_of, traits_of
from verl.config.schema import Config
from verl.model_engine.options import Options
from verl.workers.pools import MAIN, main_pool, pool_of


def default_device(config: Config) -> str:
    """Return the device of models in this process and of pools without a resource; `auto` is read from the kernel's
    files."""
    if config.model.device != "auto":
        return config.model.device
    return "cuda" if Path("/dev/nvidia0").exists() else "cpu"


def local_gpus() -> int:
    """Return the number of NVIDIA GPUs of this machine that this process may use, from the kernel's files."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len([*Path("/dev").glob("nvidia[0-9]*")])


def on_cuda(config: Config) -> bool:
    """Return whether the models that are in no pool of their own compute on CUDA."""
    return main_pool(config.cluster, default_device(config)).computes_on == "cuda"


def compute_dtype(config: Config) -> str:
    """Return model.dtype, or for `auto` the dtype that this machine would choose, from the kernel's files."""
    if config.model.dtype != "auto":
        return config.model.dtype
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text() if cpuinfo.is_file() else ""
    return "bfloat16" if on_cuda(config) or "avx512_bf16" in flags or "amx_bf16" in flags else "float32"


def dtype_of(config: Config, role: str) -> str:
    """Return the dtype that a model computes in: that of the pool where it is placed, else model.dtype."""
    pool = config.cluster.pools.get(config.cluster.roles.get(role, MAIN), {})
    return str(pool.get("dtype") or compute_dtype(config))


def device_type_of(config: Config, role: str) -> str:
    """Return the type of the device that a model computes on: that of the pool where it is placed."""
    device, name = default_device(config), config.cluster.roles.get(role, MAIN)
    given = config.cluster.pools.get(name)
    pool = main_pool(config.cluster, device) if given is None else pool_of(given, device)
    return pool.computes_on


def rollout_dtype(config: Config) -> str:
    return compute_dtype(config) if config.rollout.dtype == "auto" else config.rollout.dtype


def offloaded(config: Config, *, trained: bool) -> tuple[str, ...]:
    """Return the parts of a model's state that are off the device between two uses."""
    options = options_of(config, "model")
    return options.offload(trained=trained) if isinstance(options, Options) else ()


def drops_rollout_weights(config: Config) -> bool:
    """Return whether a rollout engine frees its weights during training: where the model's own weights are offloaded
    too, and every step ends with a publish. A server keeps its weights."""
    given_way = "weights" in offloaded(config, trained=True) and config.pipeline.sync_every == 1
    shares = config.pipeline.staleness == 0 and config.pipeline.placement != "split"
    return given_way and shares and not traits_of(config.rollout.engine).server
