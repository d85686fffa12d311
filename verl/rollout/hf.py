"""Rollout with transformers' own forward pass and cache, for any causal LM. Simple and correct, not fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl.errors import Refused
from verl.rollout.base import RolloutContext

if TYPE_CHECKING:
    from torch import nn

    from verl.rollout.embedded.front import EmbeddedEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of the hf engine (rollout.engine_options). It has none."""


def memory(
    options: Options, *, max_concurrent_sequences: int, max_context_tokens: int, kv_bytes_per_token: int
) -> dict[str, int]:
    """Return the bytes that the engine uses besides weights: the KV of all rows at full length."""
    return {"KV cache": max_concurrent_sequences * max_context_tokens * kv_bytes_per_token}


def build(
    options: Options,
    context: RolloutContext,
    *,
    module: nn.Module | None = None,
    max_prefill_tokens: int = 8192,
    notes: tuple[str, ...] = (),
) -> EmbeddedEngine:
    """Return the engine without weights. `module` is for a model that AutoModelForCausalLM cannot build from the
    config; the engine then owns it."""
    if context.float32_head:
        raise Refused("model.head_dtype=float32: the hf engine multiplies the head as the rest; leave it out")
    from verl.rollout.embedded.front import EmbeddedEngine  # not above: a plan reads the options without torch
    from verl.rollout.embedded.hf_runner import HfRunner

    if context.fp8:
        raise Refused("rollout.dtype=fp8: the hf engine reads no weights in 8 bits; set rollout.dtype=bfloat16")
    runner = HfRunner(context, module, max_prefill_tokens=max_prefill_tokens)
    return EmbeddedEngine(runner, context, prefix_cache=False, notes=notes)
