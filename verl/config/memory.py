"""Bytes of a run on one device, by item and by phase of a step. Estimates, on the side of too much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from verl.algorithms.presets import find, settled
from verl.config.adapter import teacher_models
from verl.config.backends import backend_of, options_of, rollout_caches
from verl.config.model_files import ModelFacts, describe_model
from verl.config.schema import Config
from verl.model_engine.options import Options
from verl.weight_sync.options import Ipc
from verl.workers.pools import main_pool

DTYPE_BYTES: Mapping[str, int] = MappingProxyType({"bfloat16": 2, "float32": 4})
LOGPROB_CHUNK_BYTES = 16 << 20
"""The size of one chunk of float32 logits, as in nn/linear_logprob.py (a test compares the two)."""
KEPT_KV_BYTES = 64 << 20
"""The size of a KV cache that a CPU keeps during the update, as in rollout/native/kv.py (a test compares the two)."""
LOGPROB_COPIES = 4
"""Arrays of a chunk's size that its backward pass holds at once: logits, probabilities, gradient, product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """An estimate: bytes per item, and which items a device holds at once."""

    items: dict[str, int]
    """Bytes by item."""
    phases: dict[str, tuple[str, ...]]
    """The items that are held at once, by phase of a step."""
    peaks: dict[str, int]
    """The sum of each phase's items."""
    peak_phase: str
    peak_bytes: int


def compute_dtype(config: Config) -> str:
    """Return model.dtype, or for `auto` the dtype that this machine would choose, from the kernel's files (no torch
    here)."""
    if config.model.dtype != "auto":
        return config.model.dtype
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text() if cpuinfo.is_file() else ""
    return "bfloat16" if on_cuda(config) or "avx512_bf16" in flags or "amx_bf16" in flags else "float32"


def default_device(config: Config) -> str:
    """Return the device of models in this process and of pools without a resource; `auto` is read from the kernel's
    files."""
    if config.model.device != "auto":
        return config.model.device
    return "cuda" if Path("/dev/nvidia0").exists() else "cpu"


def on_cuda(config: Config) -> bool:
    """Return whether the models that are in no pool of their own compute on CUDA."""
    return main_pool(config.cluster, default_device(config)).computes_on == "cuda"


def rollout_dtype(config: Config) -> str:
    return compute_dtype(config) if config.rollout.dtype == "auto" else config.rollout.dtype


def kv_bytes_per_token(model: ModelFacts, dtype: str) -> int:
    return 2 * model.layers * model.kv_heads * model.head_dim * DTYPE_BYTES[dtype]


def layer_bytes_per_token(model: ModelFacts, dtype: str, tensor: int = 1) -> int:
    """Return the bytes that one decoder layer keeps per token for its backward pass: two float32 norms with their
    inputs, the inputs of the projections, q, k, v before and after rotation, the attention's output, four MLP arrays.
    Within 15% of Qwen2 and Llama under autocast. tensor: the ranks that share a layer."""
    q, kv = model.heads * model.head_dim, 2 * model.kv_heads * model.head_dim
    arrays = 2 * model.hidden + (2 * (q + kv) + q + 4 * model.intermediate) // tensor
    return DTYPE_BYTES[dtype] * arrays + 4 * 4 * model.hidden


def estimate_memory(config: Config, model: ModelFacts, reference: bool, update_tokens: int) -> Memory:
    """Estimate the memory of a run in one process. reference: the run holds a frozen copy of the policy. update_tokens:
    the most tokens of one optimizer step."""
    items = _items(config, model, reference, min(config.step.max_tokens_per_microbatch, update_tokens))
    flying: tuple[str, ...] = ()
    if config.pipeline.placement == "split" or config.pipeline.staleness > 0:
        flying = ("KV cache", "prefix cache")
    elif items["KV cache"] <= KEPT_KV_BYTES and not on_cuda(config):
        flying = ("KV cache",)
    own = ("master weights", "optimizer states", "reference policy", "critic with its optimizer", "teacher")
    gone = _offloaded_items(config)

    def held(*awake: str) -> tuple[str, ...]:
        here = (item for item in (*own, "rollout weights") if item in awake or item not in gone)
        return (*here, "teacher's head", "buckets of weights")

    weights, frozen = "master weights", ("reference policy", "teacher")
    named = {
        "rollout": (*held("rollout weights"), "KV cache", "prefix cache", "sampling logits"),
        "experience": (
            *(*held(weights, *frozen), "inference activations", "teacher's activations", "log-prob chunk", *flying),
        ),
        "update": (
            *held(weights, "optimizer states"),
            *("gradients", "compute copy of weights", "activations", "log-prob chunk", "head's gradient", *flying),
        ),
        "publish": (*held(weights), "incoming weights", *flying),
    }
    return summed(items, named)


def drops_rollout_weights(config: Config) -> bool:
    """Return whether a rollout engine frees its weights during training: where the model's own weights are offloaded
    too, and every step ends with a publish. A server keeps its weights."""
    given_way = "weights" in offloaded(config, trained=True) and config.pipeline.sync_every == 1
    shares = config.pipeline.staleness == 0 and config.pipeline.placement != "split"
    return given_way and shares and not backend_of(config, "rollout").apart


def offloaded(config: Config, *, trained: bool) -> tuple[str, ...]:
    """Return the parts of a model's state that are off the device between two uses."""
    options = options_of(config, "model")
    return options.offload(trained=trained) if isinstance(options, Options) else ()


def _offloaded_items(config: Config) -> set[str]:
    """Return the items that are off the device between two uses. A critic is one item, which is always counted."""
    gone = {"reference policy", "teacher"} if offloaded(config, trained=False) else set()
    gone |= {"rollout weights"} if drops_rollout_weights(config) else set()
    parts = {"weights": "master weights", "optimizer": "optimizer states"}
    return gone | {parts[part] for part in offloaded(config, trained=True)}


def summed(items: Mapping[str, int], named: Mapping[str, Sequence[str]]) -> Memory:
    """Return the sums of phases that name items; items that are absent or 0 are left out."""
    phases = {name: tuple(i for i in parts if items.get(i)) for name, parts in named.items()}
    used = {i for parts in phases.values() for i in parts}
    peaks = {name: sum(items[i] for i in parts) for name, parts in phases.items()}
    top = max(peaks, key=lambda name: peaks[name])
    kept = {name: size for name, size in items.items() if name in used}
    return Memory(items=kept, phases=phases, peaks=peaks, peak_phase=top, peak_bytes=peaks[top])


def _items(config: Config, model: ModelFacts, reference: bool, tokens: int) -> dict[str, int]:
    weights, dtype = model.parameters, compute_dtype(config)
    layer = layer_bytes_per_token(model, dtype)
    residual = 4 * model.hidden  # float32: embeddings are not autocast
    kept = model.layers * residual + layer if config.model.gradient_checkpointing else model.layers * layer
    copied = weights - model.embedding_parameters
    if config.model.gradient_checkpointing:  # one layer at a time is recomputed and freed
        copied = (model.body_parameters - model.embedding_parameters) // model.layers
    rows = min(tokens, max(16, LOGPROB_CHUNK_BYTES // (4 * model.vocab)))
    rollout = rollout_items(config, model)
    snapshot = 4 * weights if config.pipeline.staleness > 0 else 0  # training continues while the weights are sent
    return {
        "master weights": 4 * weights,
        "gradients": 4 * weights,
        "optimizer states": 8 * weights,
        "compute copy of weights": 2 * copied if dtype == "bfloat16" else 0,
        "reference policy": 4 * weights if reference else 0,
        "critic with its optimizer": 16 * weights if find(config.algorithm.name).critic else 0,
        **teacher_items(config, tokens),
        **device_buckets(config),
        **rollout,
        "incoming weights": rollout["incoming weights"] + snapshot,
        "activations": tokens * (kept + 2 * residual),
        "inference activations": tokens * (layer + 2 * residual),
        "log-prob chunk": LOGPROB_COPIES * rows * model.vocab * 4,
        "head's gradient": 4 * model.vocab * model.hidden,
    }


def teacher_items(config: Config, tokens: int = 0) -> dict[str, int]:
    """Return the bytes of the teachers: their weights, the activations of a pass over `tokens` tokens, and the head
    that the policy holds to compare whole distributions. For a policy that teaches itself: the average of its
    weights."""
    preset, dtype = settled(config.algorithm.name, config.algorithm.given()), compute_dtype(config)
    models = [describe_model(path) for path in teacher_models(config).values()]
    if config.teacher.ema:
        return {"teacher": 4 * describe_model(config.model.path).parameters}
    if not models or "teacher" not in preset.roles():
        return {}
    head = "divergence" in preset.loss.outputs
    return {
        "teacher": sum(4 * model.parameters for model in models),
        "teacher's activations": max(tokens * (layer_bytes_per_token(m, dtype) + 8 * m.hidden) for m in models),
        "teacher's head": DTYPE_BYTES[dtype] * models[0].vocab * models[0].hidden if head else 0,
    }


def teacher_share(config: Config) -> float | None:
    """Return the floating-point operations of the teachers that are computed in this run, as a share of those of the
    policy's update, per token of a step: a forward pass is 2 per parameter, forward and backward 6. None without a
    teacher. Attention is left out on both sides; with pick=task, where each row has one teacher, the largest counts."""
    preset, t = settled(config.algorithm.name, config.algorithm.given()), config.teacher
    if "teacher" not in preset.roles() or (t.path is None and not t.paths):
        return None
    policy, models = passed(describe_model(config.model.path)), teacher_models(config)
    passes = [passed(describe_model(path)) for path in models.values()] or ([] if t.roles() else [policy])
    update = (8 if config.model.gradient_checkpointing else 6) * config.step.epochs_per_step * policy
    return 2 * (max(passes, default=0) if t.pick == "task" else sum(passes)) / update


def passed(model: ModelFacts) -> int:
    """Return the parameters that a token is multiplied with: of the experts only the active ones, and no lookup
    table."""
    active = 3 * model.layers * model.hidden * model.intermediate if model.expert_parameters else 0
    return model.parameters - model.expert_parameters + active - (0 if model.tied else model.embedding_parameters)


def bucket_bytes(bucket_mb: int, model: ModelFacts) -> int:
    """Return the size of a bucket through which weights are sent. The largest tensor is not split."""
    return max(bucket_mb << 20, 4 * model.vocab * model.hidden)


def device_buckets(config: Config) -> dict[str, int]:
    """Return the bytes of the buckets on the trainer's device, which are allocated by the first publish."""
    options = options_of(config, "sync")
    if not isinstance(options, Ipc):
        return {}
    return {"buckets of weights": 2 * bucket_bytes(options.bucket_mb, describe_model(config.model.path))}


def rollout_items(config: Config, model: ModelFacts) -> dict[str, int]:
    """Return the bytes of one rollout engine."""
    copy = model.parameters * DTYPE_BYTES[rollout_dtype(config)]
    return {
        "rollout weights": copy,
        "incoming weights": copy,
        **rollout_caches(config, bytes_per_token=kv_bytes_per_token(model, rollout_dtype(config))),
        "sampling logits": 2 * 4 * config.rollout.max_concurrent_sequences * model.vocab,
    }
