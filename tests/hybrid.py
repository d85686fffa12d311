"""Tiny random models with gated delta nets between attention layers, and rows that share prompts, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from verl.types import Sample, Segment

VOCAB = 64
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=256,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    initializer_range=0.1,
)
_EXPERTS: dict[str, Any] = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16
)
_KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, {}),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, _EXPERTS),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM, _EXPERTS),
}
KINDS = tuple(_KINDS)


def model(kind: str, **more: Any) -> Any:
    """Return a model with random weights. more: further keys of its configuration."""
    config, make, own = _KINDS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = make(config(**SIZES | own | more)).float()
        for name, p in made.named_parameters():
            if name.endswith("dt_bias"):
                p.data.uniform_(-4, 1)  # states that last for some tokens, and for many
    return made


def rows() -> list[Sample]:
    """Return rows of unequal length: a group with a prompt that is longer than a chunk, rows of several turns that
    share more than their prompt, a prompt of one token, answers of one token, and a row alone."""
    rng = np.random.default_rng(0)

    def ids(count: int) -> np.ndarray:
        return rng.integers(3, VOCAB - 4, count)

    def text(count: int, source: Any = "prompt") -> Segment:
        return Segment(ids=ids(count), source=source)

    def drawn(count: int) -> Segment:
        return Segment(ids=ids(count), source="sampled", logprobs=np.zeros(count, np.float32), version=0)

    long, short, one, turn, screen = text(70), text(5), text(1), drawn(4), text(6, "env")
    given: list[tuple[str, tuple[Segment, ...]]] = [
        *(("a", (long, drawn(count))) for count in (2, 9, 1, 67)),
        ("b", (short, turn, screen, drawn(3))),
        ("b", (short, turn, screen, drawn(12))),
        ("b", (short, turn, text(2, "env"), drawn(5), text(1, "env"), drawn(2))),
        ("b", (short, drawn(8))),
        *(("c", (one, drawn(count))) for count in (3, 1)),
        ("d", (text(11), drawn(6))),
    ]
    names = [{"sample_id": str(i), "trajectory_id": str(i), "group_id": group} for i, (group, _) in enumerate(given)]
    return [Sample(**name, purpose="train", segments=row) for name, (_, row) in zip(names, given)]
