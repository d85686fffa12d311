"""The native engine's own keys and the memory that they need. No torch is imported here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from verl.errors import Refused
from verl.rollout.base import IN_PROCESS, check_positive

if TYPE_CHECKING:
    from verl.config.schema import Config
    from verl.workers.pools import Pool

NATIVE = replace(IN_PROCESS, float32_head=True, fp8=True, codes=True, noise=True, lora_experts_on=frozenset({"cpu"}))
"""The traits of the native engine."""
KEPT_KV_BYTES = 64 << 20
"""KV up to this size is not freed by sleep: allocating its pages again would slow down a short step on a CPU, and on a
GPU all decode steps would be captured again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of the native engine (rollout.engine_options)."""

    prefix_cache_tokens: Annotated[int, Meta(ge=0)] = 65536
    """The number of prompt tokens with KV that is kept for later requests (0: none)."""
    max_prefill_tokens: Annotated[int, Meta(ge=1)] = 8192
    """The number of prompt tokens that one prefill pass computes; rows are decoded between passes."""
    max_kv_tokens: Annotated[int, Meta(ge=1)] | None = None
    """The tokens that the KV cache has room for; requests beyond them wait. None: max_concurrent_sequences x (prompt +
    response)."""
    noise_sigma_start: Annotated[float, Meta(gt=0)] | None = None
    """The standard deviation of exploration noise on the norms before attention and feed-forward, in the first stage of
    the run; each stage is a tenth of run.total_steps. None: answers are sampled without noise."""
    noise_sigma_end: Annotated[float, Meta(gt=0)] | None = None
    """That in the last stage; it falls exponentially from stage to stage. None: the same as in the first one."""

    replay_routes: bool = False
    """Record the experts of every token of prompts and answers, and train the policy with them (router replay, R3). The
    weights of the experts are those of the trainer's own router. Reference and critic choose themselves."""

    def __post_init__(self) -> None:
        check_positive(max_prefill_tokens=self.max_prefill_tokens)
        if self.prefix_cache_tokens < 0:
            raise Refused(f"prefix_cache_tokens={self.prefix_cache_tokens}: must be 0 (keep none) or more")


def native_faults(config: Config, pools: Mapping[str, Pool], roles: Mapping[str, str]) -> Iterator[str]:
    """Yield a fault if the KV slots have no room for one whole sequence, and those of exploration noise and of router
    replay."""
    from verl.config.backends import longest_sequence
    from verl.config.noise import noise_faults
    from verl.config.routes import route_faults

    yield from noise_faults(config)
    yield from route_faults(config)
    held, longest = config.rollout.engine_options.get("max_kv_tokens"), longest_sequence(config)
    if held is not None and held < longest:
        key = "rollout.engine_options.max_kv_tokens"
        yield f"{key}={held} holds no sequence of {longest} tokens (prompt + response): raise it, or set null"


def memory(
    options: Options, *, max_concurrent_sequences: int, max_context_tokens: int, kv_bytes_per_token: int
) -> dict[str, int]:
    """Return the bytes that the engine uses besides weights, when its caches have their full size."""
    tokens = options.max_kv_tokens or max_concurrent_sequences * max_context_tokens
    return {"KV cache": tokens * kv_bytes_per_token, "prefix cache": options.prefix_cache_tokens * kv_bytes_per_token}
