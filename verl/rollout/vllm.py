"""vLLM as a rollout engine: `vllm serve` in its own Python environment, as a child of this process or at a URL.

Its command line and environment were tested with 0.32.0 on a CPU. Comments give the reason for each setting. Weights
are loaded by `vllm_plugin/verl_weights.py`, which runs inside vLLM. No torch is imported at module level.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from verl.bounds import Positive, PositiveInt, PositiveShare, one_of
from verl.errors import Refused
from verl.wire import FP8, cut_block

if TYPE_CHECKING:
    from verl.config.schema import Config
    from verl.rollout.api import Expected
    from verl.rollout.base import RolloutContext, ServerPlace
    from verl.rollout.client import ServedEngine
    from verl.rollout.process import ServerProcess
    from verl.workers.pools import Pool

AT_LEAST, BELOW = (0, 32), (0, 34)
PLUGIN = Path(__file__).parent / "vllm_plugin"
TRANSFER = '--weight-transfer-config \'{"backend":"verl"}\' --worker-extension-cls verl_weights.Extension'
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the adapter ranks that vLLM can be started with
RUNTIME = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
INSTALL = (
    "pip install vllm==0.32.0 in an environment of its own; without a GPU, the lines under vLLM in docs/engines.md "
    "(in a checkout: make vllm-env)"
)
LEAST_BATCHED_TOKENS = 4096
NO_NORM = "no-mm-device-do-normalize"
MAX_KV_GIB = 4  # of a CPU's memory, unless kv_cache_gib is given


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of vLLM (rollout.engine_options)."""

    tensor_parallel_size: PositiveInt = 1
    """Processes (on a GPU: devices) that share the model."""
    gpu_memory_utilization: PositiveShare = 0.5
    """The share of a GPU for weights and KV cache together."""
    kv_cache_gib: PositiveInt | None = None
    """Memory for KV on a CPU. None: enough for max_concurrent_sequences at full length, at most 4."""
    max_num_seqs: PositiveInt | None = None
    """Requests that are decoded together. None: rollout.max_concurrent_sequences."""
    block_size: PositiveInt | None = None
    """Tokens per block of the KV cache; prefixes are shared in whole blocks. None: 32 on a CPU, else vLLM's default."""
    enforce_eager: bool | None = None
    """Run without CUDA graphs. None: true on a CPU."""
    max_lora_rank: PositiveInt | None = None
    """The highest rank of adapters (docs/engines.md). None: that of a policy that LoRA trains, else no adapters. For a
    server at a URL: the rank that it was started with; None: none."""
    lora_policy: Annotated[str, one_of("adapter|merged")] = "adapter"
    """How it gets a policy that LoRA trains. adapter: the base once, then the factors of each version. merged: in each
    version all weights, with the factors added."""
    max_loras: PositiveInt = 4
    """The number of adapters in one batch, versions of the policy among them; requests of others wait. More if
    pipeline.staleness lets more versions have running requests."""
    load_format: Annotated[str, one_of("dummy|auto|safetensors")] = "dummy"
    """The weights that the server starts with. dummy: none are read, since the trainer's weights replace them before
    the first request."""
    threads: PositiveInt | None = None
    """CPU threads of each process of the server. None: torch's number here, divided by the processes."""
    start_timeout_s: Positive = 600.0
    """Seconds within which the server must have started."""
    request_timeout_s: Positive = 3600.0
    """Seconds for one answer, the time in the queue included."""
    stream_answers: bool = False
    """With several replicas: answers are streamed, so the tokens of a lost replica are not sampled again. Costs an
    event per token."""
    args: dict[str, Any] | None = None
    """More arguments of `vllm serve`: {max-logprobs: 5} becomes --max-logprobs 5, {trust-remote-code: true} a flag
    without a value."""


def memory(
    options: Options, *, max_concurrent_sequences: int, max_context_tokens: int, kv_bytes_per_token: int
) -> dict[str, int]:
    """Return bytes for the plan. On a GPU vLLM takes its share of the device instead (gpu_memory_utilization)."""
    needed = (options.max_num_seqs or max_concurrent_sequences) * max_context_tokens * kv_bytes_per_token
    return {"KV cache": kv_gib(options, needed) << 30}


def kv_gib(options: Options, needed_bytes: int) -> int:
    """Return the GiB of the KV cache on a CPU: the option, or as many as `needed_bytes` takes, at most `MAX_KV_GIB`."""
    return options.kv_cache_gib or min(MAX_KV_GIB, -(-needed_bytes // (1 << 30)))


def build(options: Options, context: RolloutContext) -> ServedEngine:
    """Return the engine without weights, while its server starts: the first call waits for it. Raise ValueError if it
    cannot start."""
    from verl.rollout.api import Deadlines
    from verl.rollout.base import capabilities_of
    from verl.rollout.client import ServedEngine
    from verl.rollout.vllm_api import VllmApi
    from verl.rollout.vllm_images import takes_images

    place = context.place
    assert place is not None, "a server has a place"
    if context.deterministic:
        why = "what vLLM gives a sequence depends on what else is in the batch"
        raise Refused(f"run.deterministic=true: {why}; set it to false, or rollout.engine=native")
    on_cpu = str(context.device) == "cpu"
    rank = lora_rank(options, context)
    reads = takes_images(context.hf_config) and context.pictures is not None
    lora_policy = options.lora_policy == "adapter"
    api = VllmApi(resumable_stream=options.stream_answers, lora_policy=lora_policy, media=reads)
    able = capabilities_of(
        api.traits,
        max_context_tokens=context.max_context_tokens,
        lora_rank=rank,
        # at level 2 vLLM drops adapters too
        sleep_levels=() if on_cpu or place.url is not None else (1,) if rank else (1, 2),
        notes=() if on_cpu else ("rollout: vLLM on a GPU was never run by those who wrote this adapter",),
    )
    deadlines = Deadlines(start_s=options.start_timeout_s, request_s=options.request_timeout_s)
    if place.url is not None:
        return ServedEngine(context, expected(), api, place.url, able, deadlines)
    python = place.python or sys.executable
    require_vllm(python)
    return ServedEngine(context, expected(), api, lambda _: _launch(python, options, context, place), able, deadlines)


def vllm_faults(config: Config, pools: Mapping[str, Pool], roles: Mapping[str, str]) -> Iterator[str]:
    """Yield the reasons why vLLM cannot have the model: as an adapter, or in blocks of 8 bits that its ranks divide."""
    yield from _adapter_faults(config)
    ranks = config.rollout.engine_options.get("tensor_parallel_size", 1)
    if config.rollout.dtype == FP8 and ranks > 1 and (why := _cut_block(config.model.path, ranks)):
        fix = "set rollout.engine_options.tensor_parallel_size=1, or rollout.dtype=bfloat16"
        yield f"rollout.dtype=fp8 with rollout.engine_options.tensor_parallel_size={ranks}: {why}; {fix}"


def _cut_block(path: str, ranks: int) -> str:
    """Return why that many ranks would cut a block of the model in a folder, or "", also if it cannot be read."""
    from verl.config.model_files import describe_model, find_model_folder, read_weight_headers

    try:
        heads, tensors = describe_model(path).kv_heads, read_weight_headers(find_model_folder(path))
    except ValueError:
        return ""
    return next(filter(None, (cut_block(name, of.shape, ranks, heads) for name, of in tensors.items())), "")


def _adapter_faults(config: Config) -> Iterator[str]:
    """Yield the reason why vLLM cannot load the adapter of a policy that LoRA trains."""
    from verl.config.lora_layers import served_factors, unreachable_layers

    try:
        factors = served_factors(config)
    except ValueError:  # reported with the settings of LoRA
        return
    at, fix = "model.lora with rollout.engine=vllm", "set rollout.engine_options.lora_policy=merged"
    if factors is not None and factors.rank > RANKS[-1]:
        yield f"{at}: rank {factors.rank}, and it loads adapters of at most {RANKS[-1]}; {fix}"
    yield from unreachable_layers(config, "vllm")


def lora_rank(options: Options, context: RolloutContext) -> int:
    """Return the highest rank of adapters that the server loads, 0 without adapters."""
    return max(options.max_lora_rank or 0, context.lora_rank)


def expected() -> Expected:
    """Return the requirements on a vLLM server: its versions, and how to start it so that it has each path."""
    from verl.rollout.api import Expected
    from verl.rollout.vllm_api import ABORT, GENERATE

    dev, transfer = "start it with VLLM_SERVER_DEV_MODE=1", f"start it with {TRANSFER}, and PYTHONPATH={PLUGIN}"
    control = ("/pause", "/resume", "/reset_prefix_cache")
    needs = dict.fromkeys((*control, "/init_weight_transfer_engine", "/collective_rpc"), dev)
    needs |= dict.fromkeys((GENERATE, ABORT), "start it with --enable-scale-out")
    needs["adapters"] = f"start it with --enable-lora, --max-lora-rank and {RUNTIME}"
    needs |= {"logprobs": "start it with --logprobs-mode processed_logprobs", "transfer": transfer}
    return Expected(name="vLLM", versions=(AT_LEAST, BELOW), needs=needs)


def require_vllm(python: str) -> None:
    """Raise ValueError unless this interpreter has a vLLM version that is supported here."""
    from verl.rollout.launching import require

    require(python, "vllm", "vLLM", (AT_LEAST, BELOW), INSTALL)


def _launch(python: str, options: Options, context: RolloutContext, place: ServerPlace) -> tuple[ServerProcess, str]:
    from verl.rollout.process import ServerProcess, free_port

    port = free_port()
    command = serve_command(python, options, context, place.model, port)
    env = environment(os.environ, options, context)
    return ServerProcess(command, env=env, log=place.log), f"http://127.0.0.1:{port}"


def serve_command(python: str, options: Options, context: RolloutContext, model: str, port: int) -> list[str]:
    from verl.config.adapter import text_layers
    from verl.nn.rope import first_lengths
    from verl.rollout.api import positions_of
    from verl.rollout.launching import flags
    from verl.rollout.vllm_images import takes_images
    from verl.rollout.weight_format import block_fp8

    on_cpu = str(context.device) == "cpu"
    room = context.max_context_tokens
    length = min(room + 1, positions_of(context) or room)  # scoring a full context samples one more token
    if room in first_lengths(context.hf_config.get_text_config()):
        length = room  # one more token would give all rows the RoPE of long sequences
    given: dict[str, Any] = {
        "served-model-name": "policy",
        "host": "127.0.0.1",
        "port": port,
        "dtype": str(context.dtype).removeprefix("torch."),
        "max-model-len": length,
        "max-num-seqs": options.max_num_seqs or context.max_concurrent_sequences,
        "tensor-parallel-size": options.tensor_parallel_size,
        "load-format": options.load_format,
        "generation-config": "vllm",  # no sampling defaults of the model folder
        "logprobs-mode": "processed_logprobs",  # of the distribution that was sampled from
        "skip-tokenizer-init": True,  # tokens in, tokens out; a character tokenizer would end it
        "enable-scale-out": True,  # the endpoint with token ids
        "enable-prompt-tokens-details": True,
        "weight-transfer-config": json.dumps({"backend": "verl"}),
        "worker-extension-cls": "verl_weights.Extension",
        "enforce-eager": on_cpu if options.enforce_eager is None else options.enforce_eager,
    }
    if takes_images(context.hf_config):
        del given["skip-tokenizer-init"]  # its classes of these models want a tokenizer, which no request uses
        given |= _image_flags(options)
    overrides: dict[str, Any] = {"head_dtype": "float32"} if context.float32_head else {}
    if context.fp8:
        overrides["quantization_config"] = block_fp8(context.hf_config)
    if overrides:
        given["hf-overrides"] = json.dumps(overrides)
    if wanted := lora_rank(options, context):
        if (rank := next((r for r in RANKS if r >= wanted), None)) is None:
            raise Refused(f"rollout.engine_options.max_lora_rank={wanted}: vLLM takes at most {RANKS[-1]}")
        at_once = max(options.max_loras, context.lora_versions)
        given |= {"enable-lora": True, "max-lora-rank": rank, "max-loras": at_once + 1}  # and the adapter of zeros
        # not the head: with that, a score beside other requests ends vLLM on a CPU
        given["lora-target-modules"] = tuple(sorted({name.rpartition(".")[2] for name in text_layers(Path(model))}))
    if on_cpu:  # a prefill that is split over steps ends the engine if requests have seeds
        if requested := [
            name for name in options.args or () if name.replace("_", "-").endswith("enable-chunked-prefill")
        ]:
            why = (
                "on a CPU a seeded request whose prefill is split ends vLLM, and all requests have seeds; leave it out"
            )
            raise Refused(f"rollout.engine_options.args.{requested[0]}={(options.args or {})[requested[0]]}: {why}")
        given |= {"no-enable-chunked-prefill": True, "max-num-batched-tokens": max(LEAST_BATCHED_TOKENS, length)}
        given["block-size"] = options.block_size or 32
    else:
        given |= {"gpu-memory-utilization": options.gpu_memory_utilization, "enable-sleep-mode": True}
        given |= {} if options.block_size is None else {"block-size": options.block_size}
    return [python, "-m", "vllm.entrypoints.cli.main", "serve", model, *flags(given, options.args)]


def _image_flags(options: Options) -> dict[str, Any]:
    """Return the flags of a server for a model that reads images, which come processed."""
    if requested := [name for name in options.args or () if name.replace("_", "-").endswith("mm-device-do-normalize")]:
        what = f"rollout.engine_options.args.{requested[0]}={(options.args or {})[requested[0]]}"
        raise Refused(f"{what}: vLLM would normalise the patches of images, which verl did, once more; leave it out")
    return {NO_NORM: True, "mm-processor-cache-gb": 0, "skip-mm-profiling": True}


def environment(ours: Mapping[str, str], options: Options, context: RolloutContext) -> dict[str, str]:
    """Return the environment of the server: ours without our Python's variables, plus vLLM's settings."""
    import torch

    from verl.rollout.launching import environment_of

    env = environment_of(ours) | {"PYTHONPATH": str(PLUGIN), "PYTHONSAFEPATH": "1", "VLLM_NO_USAGE_STATS": "1"}
    env["VLLM_SERVER_DEV_MODE"] = "1"  # the control plane: pause, update, resume
    if context.fp8:  # or DeepGEMM rounds weights and scales again, to scales that are powers of two
        env.setdefault("VLLM_USE_DEEP_GEMM_E8M0", "0")
    env |= dict([RUNTIME.split("=")]) if lora_rank(options, context) else {}
    if str(context.device) == "cpu":
        threads = options.threads or max(1, torch.get_num_threads() // options.tensor_parallel_size)
        text = context.hf_config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        token_bytes = 2 * text.num_hidden_layers * heads * head_dim * context.dtype.itemsize
        rows = options.max_num_seqs or context.max_concurrent_sequences
        env |= {
            "VLLM_CPU_KVCACHE_SPACE": str(kv_gib(options, rows * context.max_context_tokens * token_bytes)),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # its own choice leaves a core idle
            "OMP_NUM_THREADS": str(threads),
        }
    return env
