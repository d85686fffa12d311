"""SGLang as a rollout engine: its server in a Python environment of its own, as a child of this process or at a URL.

Written from the HTTP API of 0.5.23, and never run against it: its kernels need hardware that was not available. It
reads weights from a folder (sync.engine=disk). It does not report which tensors it loaded. The content of the folder is
checked before, and the canary checks the loaded weights. No torch is imported at module level.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from verl.bounds import Positive, PositiveInt, PositiveShare, one_of
from verl.rollout.traits import SGLANG

if TYPE_CHECKING:
    from verl.config.schema import Config
    from verl.rollout.base import RolloutContext
    from verl.rollout.client import ServedEngine
    from verl.workers.pools import Pool

AT_LEAST, BELOW = (0, 5, 23), (0, 6)
INSTALL = "pip install sglang==0.5.23 in an environment of its own"
NOTE = "rollout: this adapter was made from SGLang's documented API and tested against doubles of it, never against it"
SEEDS = (
    "rollout: SGLang looks at seeds where it was started with --enable-deterministic-inference alone "
    "(rollout.engine_options.deterministic_inference=true)"
)
BLACKWELL = (
    "rollout: with rollout.dtype=fp8 on a card after Hopper set rollout.engine_options.args={fp8-gemm-backend: "
    "triton}: DeepGEMM rounds scales to powers of two there, and only those of the first weights"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of SGLang (rollout.engine_options)."""

    tensor_parallel_size: PositiveInt = 1
    """Devices that share the model."""
    mem_fraction_static: PositiveShare = 0.5
    """The share of a GPU for weights and KV cache together."""
    max_running_requests: PositiveInt | None = None
    """Requests that are decoded together. None: rollout.max_concurrent_sequences."""
    deterministic_inference: bool = False
    """A seed gives the same tokens whatever is in the batch. Without it SGLang ignores seeds. For a server at a URL:
    the server was started with it."""
    lora_policy: Annotated[str, one_of("adapter|merged")] = "merged"
    """How it gets a policy that LoRA trains. merged: in each version all weights, with the factors added. adapter: the
    base once, then the factors of each version."""
    max_lora_rank: PositiveInt | None = None
    """The highest rank of adapters. None: that of such a policy. For a server at a URL: the rank that it was started
    with; None: none."""
    max_loras: PositiveInt = 4
    """The number of adapters in one batch; more if pipeline.staleness lets more versions have running requests."""
    router: str | None = None
    """The URL of an sglang-router in front of the servers of rollout.url. Requests are sent through it; updates, scores
    and requests with top_p, top_k or min_p (which it would drop) are sent to each server directly."""
    start_timeout_s: Positive = 600.0
    """Seconds within which the server must have started."""
    request_timeout_s: Positive = 3600.0
    """Seconds for one answer, the time in the queue included."""
    args: dict[str, Any] | None = None
    """More arguments of `sglang.launch_server`: {attention-backend: triton}; {enable-torch-compile: true} becomes a
    flag without a value."""


def sglang_faults(config: Config, pools: Mapping[str, Pool], roles: Mapping[str, str]) -> Iterator[str]:
    """Yield the faults of adapters, and of a router in front of servers that run already."""
    from verl.config.lora_layers import unreachable_layers

    yield from unreachable_layers(config, "sglang")
    if (url := config.rollout.engine_options.get("router")) is None:
        return
    at, parts = f"rollout.engine_options.router={url}", urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        yield f"{at}: expected http://HOST:PORT"
    if config.rollout.url is None:
        yield f"{at}: it stands before servers that run already; name them in rollout.url, or leave it out"
    if config.rollout.engine_options.get("lora_policy") == "adapter":
        yield f"{at} with lora_policy=adapter: it drops the name of an adapter from requests; use merged"
    if config.cluster.backend != "inproc":
        why = "who connects to one server has to know what those of the others have verified"
        yield f"{at} with cluster.backend={config.cluster.backend}: {why}; set cluster.backend=inproc"
    if config.pipeline.staleness > 0 and not config.pipeline.partial_rollout:
        why = "an update waits for a replica's own requests, and the router sends it those of others"
        yield f"{at} with pipeline.staleness={config.pipeline.staleness:g}: {why}; set pipeline.partial_rollout=true"


def build(options: Options, context: RolloutContext) -> ServedEngine:
    """Return the engine without weights, while its server starts. Raise ValueError if it cannot start."""
    from verl.rollout.api import Deadlines, Expected
    from verl.rollout.base import capabilities_of
    from verl.rollout.client import ServedEngine
    from verl.rollout.launching import launcher, require
    from verl.rollout.sglang_api import SglangApi

    place = context.place
    assert place is not None, "a server has a place"
    rank, by_adapter = _rank_of_adapters(options, context), options.lora_policy == "adapter"
    api = SglangApi(replace(SGLANG, seeds=options.deterministic_inference, lora_policy=by_adapter))
    able = capabilities_of(
        api.traits,
        max_context_tokens=context.max_context_tokens,
        lora_rank=rank,
        # adapters are in the memory of weights
        sleep_levels=() if str(context.device) == "cpu" or place.url is not None else (1,) if rank else (1, 2),
        notes=(NOTE, *(() if options.deterministic_inference else (SEEDS,)), *((BLACKWELL,) if context.fp8 else ())),
    )
    needs = {"logprobs": "start it without SGLANG_RETURN_ORIGINAL_LOGPROB"}
    needs["adapters"] = "start it with --enable-lora, --max-lora-rank and --lora-target-modules"
    expected = Expected(name="SGLang", versions=(AT_LEAST, BELOW), needs=needs)
    deadlines = Deadlines(start_s=options.start_timeout_s, request_s=options.request_timeout_s)
    if place.url is not None:
        return ServedEngine(context, expected, api, place.url, able, deadlines, router=options.router)
    python = place.python or sys.executable
    require(python, "sglang", "SGLang", (AT_LEAST, BELOW), INSTALL)
    launch = launcher(place, partial(serve_command, python, options, context))
    return ServedEngine(context, expected, api, launch, able, deadlines)


def _rank_of_adapters(options: Options, context: RolloutContext) -> int:
    """Return the highest rank of adapters that the server loads, 0 without adapters."""
    return max(options.max_lora_rank or 0, context.lora_rank)


def serve_command(python: str, options: Options, context: RolloutContext, model: str, port: int) -> list[str]:
    from verl.config.adapter import text_layers
    from verl.rollout.api import positions_of
    from verl.rollout.launching import flags
    from verl.rollout.weight_format import block_fp8

    room = context.max_context_tokens
    given: dict[str, Any] = {
        "model-path": model,
        "served-model-name": "policy",
        "host": "127.0.0.1",
        "port": port,
        "dtype": str(context.dtype).removeprefix("torch."),
        "context-length": min(room + 1, positions_of(context) or room),  # a prompt must be shorter than it
        "max-running-requests": options.max_running_requests or context.max_concurrent_sequences,
        "tp-size": options.tensor_parallel_size,
        "mem-fraction-static": options.mem_fraction_static,
        "enable-memory-saver": str(context.device) != "cpu",  # it can sleep
        "skip-tokenizer-init": True,  # tokens in, tokens out
        "sampling-mask-max-tokens": SGLANG.max_candidates,
        "enable-deterministic-inference": options.deterministic_inference,
    }
    if context.float32_head:
        given["enable-fp32-lm-head"] = True
    if rank := _rank_of_adapters(options, context):
        layers = tuple(sorted({name.rpartition(".")[2] for name in text_layers(Path(model))}))
        at_once = max(options.max_loras, context.lora_versions) + 1  # and the adapter of zeros
        given |= {"enable-lora": True, "max-lora-rank": rank, "max-loras-per-batch": at_once}
        given["lora-target-modules"] = layers
    if context.fp8:  # the folder of the model has no scales
        quantised = {"quantization_config": block_fp8(context.hf_config)}
        given |= {"json-model-override-args": json.dumps(quantised), "load-format": "dummy"}
    return [python, "-m", "sglang.launch_server", *flags(given, options.args)]
