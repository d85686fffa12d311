"""Decoder families as data, and what one model's HF config says of its shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.rollout.native.layers import ACTIVATIONS


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one family differs from Llama. A `*_bias` names the config flag that turns it on, or says always/never."""

    qkv_bias: str | bool = False
    out_bias: str | bool = False
    mlp_bias: str | bool = False
    qk_norm: bool = False
    gemma: bool = False  # norms scale by 1 + weight and follow the blocks too; scaled embeddings; its own query scale
    attention_cap: bool = False  # scores pass through cap tanh(score / cap)
    experts: bool = False
    same_window: bool = False  # transformers applies config.sliding_window to all layers, whatever layer_types says
    gpt2: bool = False  # layer norms, learned positions, one matrix before the activation, weights stored transposed


ARCHITECTURES: dict[str, Architecture] = {
    "gemma2": Architecture(qkv_bias="attention_bias", out_bias="attention_bias", gemma=True, attention_cap=True),
    "gemma3_text": Architecture(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True, gemma=True),
    "gpt2": Architecture(qkv_bias=True, out_bias=True, mlp_bias=True, gpt2=True),
    "llama": Architecture(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Architecture(same_window=True),
    "qwen2": Architecture(qkv_bias=True),
    "qwen3": Architecture(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True),
    "qwen3_moe": Architecture(
        qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True, experts=True, same_window=True
    ),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes and switches of a decoder, read once from its HF config."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    eps: float
    activation: str
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tied: bool
    arch: Architecture
    query_scale: float
    attention_cap: float  # 0: none
    logit_cap: float  # 0: none
    embed_scale: float
    windows: tuple[int, ...]  # per layer: the newest tokens that a query sees, itself included; 0: all
    ropes: tuple[int, ...]  # per layer: which of `rotary_frequencies`
    learned_positions: int  # 0: rotary
    experts: tuple[int, ...]  # per layer: how many experts, 0 is one dense block
    chosen_experts: int
    expert_ffn: int
    normalised_experts: bool

    @property
    def kv_values_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim


def shape_of(config: Any, max_context_tokens: int) -> Shape:
    """HF config -> Shape, or ValueError for whatever the native forward pass does not compute."""
    arch = ARCHITECTURES.get(config.model_type)
    if arch is None:
        raise ValueError(
            f"model_type={config.model_type!r}: the native rollout engine computes {sorted(ARCHITECTURES)}; "
            "set rollout.engine=hf for any other architecture"
        )
    name = "activation_function" if arch.gpt2 else "hidden_activation" if arch.gemma else "hidden_act"
    activation = ACTIVATIONS.get(getattr(config, name))
    if activation is None:
        raise ValueError(
            f"{name}={getattr(config, name)!r}: native computes {', '.join(ACTIVATIONS)}; set rollout.engine=hf"
        )
    for switch in ("use_bidirectional_attention", "add_cross_attention", "scale_attn_by_inverse_layer_idx"):
        if getattr(config, switch, None):
            raise ValueError(
                f"{switch}={getattr(config, switch)} of {config.model_type}: native does not compute it; set rollout.engine=hf"
            )
    if max_context_tokens > config.max_position_embeddings:
        raise ValueError(
            f"max_context_tokens={max_context_tokens} exceeds the model's max_position_embeddings="
            f"{config.max_position_embeddings}: shorten prompt or response, or use a model with a longer context"
        )

    def flag(value: str | bool) -> bool:
        return bool(getattr(config, value, False)) if isinstance(value, str) else value

    layers, heads, hidden = config.num_hidden_layers, config.num_attention_heads, config.hidden_size
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    ffn = (config.n_inner or 4 * hidden) if arch.gpt2 else config.intermediate_size
    kinds = rope_kinds(config)
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=config.vocab_size,
        activation=activation,
        eps=config.layer_norm_epsilon if arch.gpt2 else config.rms_norm_eps,
        qkv_bias=flag(arch.qkv_bias),
        out_bias=flag(arch.out_bias),
        mlp_bias=flag(arch.mlp_bias),
        tied=bool(config.tie_word_embeddings),
        arch=arch,
        query_scale=_query_scale(config, arch, head_dim),
        attention_cap=(config.attn_logit_softcapping or 0.0) if arch.attention_cap else 0.0,
        logit_cap=(config.final_logit_softcapping or 0.0) if arch.gemma else 0.0,
        embed_scale=hidden**0.5 if arch.gemma else 1.0,
        windows=tuple(_window(config, arch, i) for i in range(layers)),
        ropes=tuple(kinds.index(config.layer_types[i]) if len(kinds) > 1 else 0 for i in range(layers)),
        learned_positions=config.max_position_embeddings if arch.gpt2 else 0,
        experts=tuple(_experts(config, i) if arch.experts else 0 for i in range(layers)),
        chosen_experts=config.num_experts_per_tok if arch.experts else 0,
        expert_ffn=config.moe_intermediate_size if arch.experts else 0,
        normalised_experts=arch.experts and config.norm_topk_prob,
    )


def _query_scale(config: Any, arch: Architecture, head_dim: int) -> float:
    if arch.gemma:
        return float(config.query_pre_attn_scalar**-0.5)
    return 1.0 if arch.gpt2 and not config.scale_attn_weights else float(head_dim**-0.5)


def _window(config: Any, arch: Architecture, layer: int) -> int:
    window = getattr(config, "sliding_window", None) or 0
    types = None if arch.same_window else getattr(config, "layer_types", None)
    return window if types is None or types[layer] == "sliding_attention" else 0


def _experts(config: Any, layer: int) -> int:
    sparse = layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
    return int(config.num_experts) if sparse else 0


def rope_kinds(config: Any) -> list[str | None]:
    """The kinds of layers that have rotary tables of their own; [None]: one table for all."""
    rope = getattr(config, "rope_parameters", None) or {}
    return sorted(kind for kind, of in rope.items() if isinstance(of, dict)) or [None]


def rotary_frequencies(config: Any, head_dim: int) -> tuple[Tensor, Tensor] | None:
    """RoPE as transformers defines it -> float32 [kinds, head_dim / 2], factors on cos and sin [kinds]; None without."""
    if ARCHITECTURES[config.model_type].gpt2:
        return None
    made = [_frequencies(config, head_dim, kind) for kind in rope_kinds(config)]
    return torch.stack([f for f, _ in made]), torch.tensor([factor for _, factor in made])


def _frequencies(config: Any, head_dim: int, layer_type: str | None) -> tuple[Tensor, float]:
    rope = dict((config.rope_parameters[layer_type] if layer_type else config.rope_parameters) or {})
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "linear", "llama3", "yarn") or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"rope_parameters={rope}: native computes full, length-independent RoPE; set rollout.engine=hf"
        )
    if kind == "default":
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        return 1.0 / (rope["rope_theta"] ** exponent), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](
        config, torch.device("cpu"), **({"layer_type": layer_type} if layer_type else {})
    )
    assert frequencies.shape == (head_dim // 2,), f"{kind} RoPE gave {tuple(frequencies.shape)}"
    return frequencies.float(), float(factor)
