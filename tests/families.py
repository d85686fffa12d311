"""Tiny decoders of unlike families, for tests of the native engine's ways to decode."""

from __future__ import annotations

from typing import Any

from transformers import Gemma3TextConfig, Qwen3Config, Qwen3MoeConfig

VOCAB = 50
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=256,
    initializer_range=0.3,
    head_dim=8,
)
QWEN3 = Qwen3Config(**SIZES)
QWEN3_MOE = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
GEMMA3 = Gemma3TextConfig(
    **SIZES, sliding_window=12, query_pre_attn_scalar=8, layer_types=["sliding_attention", "full_attention"]
)
