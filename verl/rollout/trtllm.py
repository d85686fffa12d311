"""TensorRT-LLM as a rollout engine: `trtllm-serve` in a Python environment of its own, as a child of this process.

Written from its documented completions API (1.x), and never run against it: it needs a GPU. Features that the API lacks
are refused. While it runs it takes only weights in its own GPU's memory, so every publish restarts it with the folder
of the new version (sync.engine=disk). It scores no prompts, so there is no canary. Its log-probs are those at
temperature 1, before truncation. No torch is imported at module level.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.bounds import Positive, PositiveInt, PositiveShare
from verl.errors import Refused
from verl.rollout.traits import TRTLLM

if TYPE_CHECKING:
    from verl.rollout.base import RolloutContext
    from verl.rollout.client import ServedEngine

AT_LEAST, BELOW = (1, 1), (2,)
INSTALL = "pip install tensorrt-llm in an environment of its own"
NOTE = (
    "rollout: this adapter was made from TensorRT-LLM's documented API and tested against doubles of it, never against "
    "it; it is started anew with every version of the weights"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of TensorRT-LLM (rollout.engine_options)."""

    tensor_parallel_size: PositiveInt = 1
    """Devices that share the model."""
    kv_cache_free_gpu_memory_fraction: PositiveShare = 0.5
    """The share of the GPU memory that is left after the weights."""
    max_batch_size: PositiveInt | None = None
    """Requests that are decoded together. None: rollout.max_concurrent_sequences."""
    start_timeout_s: Positive = 1800.0
    """Seconds within which the server must have started."""
    request_timeout_s: Positive = 3600.0
    """Seconds for one answer, the time in the queue included."""
    args: dict[str, Any] | None = None
    """More arguments of `trtllm-serve`: {max_num_tokens: 8192}; {trust_remote_code: true} becomes a flag without a
    value."""


def build(options: Options, context: RolloutContext) -> ServedEngine:
    """Return the engine. Its server starts with the first weights. Raise ValueError if it cannot start."""
    from verl.rollout.api import Deadlines, Expected
    from verl.rollout.base import capabilities_of
    from verl.rollout.client import ServedEngine
    from verl.rollout.launching import launcher, require
    from verl.rollout.openai_api import TrtllmApi
    from verl.rollout.weight_format import block_fp8

    place = context.place
    assert place is not None and place.url is None, "one that runs takes no weights: refused before"
    python = place.python or sys.executable
    require(python, "tensorrt_llm", "TensorRT-LLM", (AT_LEAST, BELOW), INSTALL)
    able = capabilities_of(TRTLLM, max_context_tokens=context.max_context_tokens, notes=(NOTE,))
    config, wanted = json.loads((Path(place.model) / "config.json").read_text()), str(context.dtype).partition(".")[2]
    if (found := config.get("dtype", config.get("torch_dtype"))) != wanted:
        why = f"TensorRT-LLM computes in what {place.model}/config.json says, {found}, and not in {wanted}"
        raise Refused(f"{why}: set rollout.dtype={found}")
    if context.fp8:  # in the config.json of each version's folder
        block_fp8(context.hf_config)
    deadlines = Deadlines(start_s=options.start_timeout_s, request_s=options.request_timeout_s)
    expected = Expected(name="TensorRT-LLM", versions=(AT_LEAST, BELOW))
    launch = launcher(place, partial(serve_command, python, options, context))
    return ServedEngine(context, expected, TrtllmApi(), launch, able, deadlines)


def serve_command(python: str, options: Options, context: RolloutContext, model: str, port: int) -> list[str]:
    from verl.rollout.launching import flags

    given: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": port,
        "backend": "pytorch",
        "max_batch_size": options.max_batch_size or context.max_concurrent_sequences,
        "max_seq_len": context.max_context_tokens,
        "tp_size": options.tensor_parallel_size,
        "kv_cache_free_gpu_memory_fraction": options.kv_cache_free_gpu_memory_fraction,
    }
    return [str(Path(python).with_name("trtllm-serve")), "serve", model, *flags(given, options.args, dash="_")]
