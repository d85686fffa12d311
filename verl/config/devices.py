"""Determine the device, the dtype and the offloading of models from a configuration and this machine. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from verl.config.backends import options_of, traits_of
from verl.config.model_files import folder_format
from verl.config.schema import Config
from verl.model_engine.lora_spec import trained_by
from verl.model_engine.options import Offloading
from verl.wire import FP8
from verl.workers.pools import MAIN, main_pool, pool_of


def default_device(config: Config) -> str:
    """Return the device of models in this process, and of pools without a resource. For `auto`, GPUs are found by files
    of the kernel."""
    if config.model.device != "auto":
        return config.model.device
    return "cuda" if Path("/dev/nvidia0").exists() else "cpu"


def local_gpus() -> int:
    """Return the number of NVIDIA GPUs that this process may use, from files of the kernel."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len([*Path("/dev").glob("nvidia[0-9]*")])


def base_format(config: Config, path: str | None = None) -> str:
    """Return the format of the frozen base below LoRA's factors: that of the weights in the folder at `path` (the
    policy's without one), or else that of model.quantization; none for float32, and without LoRA."""
    if trained_by(config.model.lora) is None:
        return "none"
    own = folder_format(path or config.model.path)
    return config.model.quantization if own == "none" else own


def in_float32_alone(config: Config, device_type: str) -> bool:
    """Return True if the base below LoRA's factors has codes, whose products are compiled for float32 on a CPU."""
    return device_type == "cpu" and base_format(config) != "none"


def saves_memory(config: Config) -> bool:
    """Return True if a run trades time for memory: its base has codes, or its layers are computed again."""
    return base_format(config) != "none" or config.model.gradient_checkpointing in ("selective", "full")


def colocated(config: Config) -> bool:
    """Return True if rollout and training use the same devices in turn."""
    wanted = config.pipeline.placement
    return wanted == "colocated" or (wanted == "auto" and config.pipeline.staleness == 0)


def on_cuda(config: Config) -> bool:
    """Return True if models without a pool of their own compute on CUDA."""
    return main_pool(config.cluster, default_device(config)).computes_on == "cuda"


def compute_dtype(config: Config) -> str:
    """Return model.dtype; for `auto`, the dtype that suits this machine, from files of the kernel."""
    if config.model.dtype != "auto":
        return config.model.dtype
    if in_float32_alone(config, "cuda" if on_cuda(config) else "cpu"):
        return "float32"
    if on_cuda(config):
        return "bfloat16"
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text() if cpuinfo.is_file() else ""
    return "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags else "float32"


def dtype_of(config: Config, role: str) -> str:
    """Return the dtype in which a role's model computes: that of its pool, else model.dtype."""
    name = config.cluster.roles.get(role, MAIN)
    own = None if name == MAIN else config.cluster.pools.get(name, {}).get("dtype")
    return str(own or compute_dtype(config))


def device_type_of(config: Config, role: str) -> str:
    """Return the type of the device of a role's pool."""
    device, name = default_device(config), config.cluster.roles.get(role, MAIN)
    given = config.cluster.pools.get(name)
    pool = main_pool(config.cluster, device) if name == MAIN or given is None else pool_of(given, device)
    return pool.computes_on


def rollout_dtype(config: Config) -> str:
    """Return the dtype in which the rollout computes."""
    if config.rollout.dtype == FP8:
        return "bfloat16"
    return compute_dtype(config) if config.rollout.dtype == "auto" else config.rollout.dtype


def offloaded(config: Config, *, trained: bool) -> tuple[str, ...]:
    """Return the parts of a model's state that are off the device between two uses."""
    options = options_of(config, "model")
    return options.offload(trained=trained) if isinstance(options, Offloading) else ()


def streams_buckets(config: Config) -> bool:
    """Return True if weights pass to the rollout through two buckets, so that every version is sent whole."""
    return getattr(options_of(config, "sync"), "bucket_mb", None) is not None


def drops_rollout_weights(config: Config) -> bool:
    """Return True if the rollout engine frees its weights during training: the trained model's weights are offloaded,
    rollout and training share devices, and every step ends with a publish. A server keeps its weights."""
    given_way = "weights" in offloaded(config, trained=True) and config.pipeline.sync_every == 1
    shares = config.pipeline.staleness == 0 and config.pipeline.placement != "split"
    return given_way and shares and not traits_of(config.rollout.engine).server
