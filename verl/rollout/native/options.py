"""The options of the native engine and the KV memory that they ask for. No torch: configuration and plan read this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    num_speculative_tokens: Annotated[int, Meta(ge=0, le=64)] = 0
    """Guessed per row and step from texts that repeat, and kept where the row's own draws confirm them. 0: none."""
    max_kv_tokens: Annotated[int, Meta(ge=1)] | None = None
    """KV slots in tokens. Null: every concurrent sequence at full length."""
    prefix_cache_tokens: Annotated[int, Meta(ge=0)] = 65536
    """KV of prompts that is kept for the next request."""
    max_prefill_tokens: Annotated[int, Meta(ge=1)] = 8192
    """Prompt tokens per prefill pass; decode goes on between passes."""


def memory(
    options: Options, *, max_concurrent_sequences: int, max_context_tokens: int, kv_bytes_per_token: int
) -> dict[str, int]:
    """Bytes that the engine comes to hold besides weights, once its caches have grown to their full size."""
    tokens = options.max_kv_tokens
    if tokens is None:
        tokens = max_concurrent_sequences * max_context_tokens
    return {"KV cache": tokens * kv_bytes_per_token, "prefix cache": options.prefix_cache_tokens * kv_bytes_per_token}
