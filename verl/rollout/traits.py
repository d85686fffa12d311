"""The abilities of each kind of server, as data. No torch is imported here."""

from __future__ import annotations

from dataclasses import replace

from verl.rollout.base import Traits

VLLM_IMAGES = ("qwen2_5_vl",)
"""The model types of which vLLM was given images."""
VLLM = Traits(
    server=True,
    package="vllm",
    public_keys={
        "gpu_memory_utilization": "gpu_memory_utilization",
        "tensor_model_parallel_size": "tensor_parallel_size",
        "enforce_eager": "enforce_eager",
        "load_format": "load_format",
    },
    score_temperatures=(0.0, 1.0),
    prefix_cache=True,
    media=True,
    bans=True,
    continues=True,
    resumable_stream=True,
    pause_modes=frozenset(("keep", "wait", "abort")),
    aborts_requests=True,
    sleep_keeps_weights=True,
    in_flight_update=True,
    streams_weights=True,
    takes_weight_version=True,
    tensor_names="saved",
    float32_head=True,
    fp8=True,
    lora_policy=True,
    lora_experts_on=frozenset(),
)

VERL_SERVE = replace(
    VLLM,
    package="",
    public_keys={},
    media=False,
    bans=False,
    float32_head=False,
    fp8=False,
    lora_policy=False,
    draws_by_position=True,
    prepares_weights=True,
    tensor_names="model",
)
"""The traits of `verl serve`: those of vLLM's API, and it samples by position and reads new weights while it
samples."""

SGLANG = Traits(
    server=True,
    package="sglang",
    public_keys={"gpu_memory_utilization": "mem_fraction_static", "tensor_model_parallel_size": "tensor_parallel_size"},
    max_candidates=4096,
    score_temperatures=(0.0, 1.0),
    prefix_cache=True,
    continues=True,
    pause_modes=frozenset(("keep",)),
    aborts_requests=True,
    weights_from="disk",
    in_flight_update=True,
    takes_weight_version=True,
    float32_head=True,
    fp8=True,
    lora_policy=True,
    lora_experts_on=frozenset(),
)

TRTLLM = Traits(
    server=True,
    package="tensorrt_llm",
    public_keys={
        "gpu_memory_utilization": "kv_cache_free_gpu_memory_fraction",
        "tensor_model_parallel_size": "tensor_parallel_size",
    },
    raw_logprobs_only=True,
    score_temperatures=(),
    prefix_cache=True,
    continues=True,
    validates_token_ids=False,
    weights_from="disk",
    updates_weights=False,
    fp8=True,
)

OPENAI = Traits(
    server=True, score_temperatures=(0.0, 1.0), continues=True, validates_token_ids=False, updates_weights=False
)
"""The traits of a server that scores prompts. If the checks at its start find that it does not, only requests with raw
log-probs are sent to it (`CompletionsApi`)."""
