"""Families of decoders as data, and the sizes of one model, read from its HF config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from verl.errors import Refused
from verl.models.families import family_of
from verl.rollout.embedded.core import check_context
from verl.rollout.native.layers import ACTIVATIONS


class UnsupportedModel(Refused):
    """Raised for a model that the native forward pass does not compute. The hf engine is used for it."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The differences of one family from Llama. A `*_bias` is the config flag that enables the bias, or True or False
    if the family always or never has it."""

    qkv_bias: str | bool = "attention_bias"
    out_bias: str | bool = "attention_bias"
    mlp_bias: str | bool = False
    qk_norm: bool = False
    """Query and key heads are normalised (RMS norm)."""
    gemma: bool = False
    """Norms scale by 1 + weight and are also applied to the outputs of blocks; embeddings are scaled; queries have a
    scale of their own."""
    attention_cap: bool = False
    """Attention scores are replaced by cap tanh(score / cap)."""
    experts: bool = False
    """Feed-forward blocks may consist of experts with a router."""
    same_window: bool = False
    """transformers applies config.sliding_window to all layers, and ignores layer_types."""
    axes: Literal["one", "in sections", "in turns"] = "one"
    """The positions of a token: one, or one for each axis of an image. The frequencies of RoPE are then divided among
    the axes by `mrope_section`: in sections, one after the other, or in turns."""


ARCHITECTURES: dict[str, Architecture] = {
    "gemma2": Architecture(gemma=True, attention_cap=True),
    "gemma3_text": Architecture(qk_norm=True, gemma=True),
    "llama": Architecture(mlp_bias="mlp_bias"),
    "mistral": Architecture(qkv_bias=False, out_bias=False, same_window=True),
    "qwen2": Architecture(qkv_bias=True, out_bias=False),
    "qwen2_5_vl_text": Architecture(qkv_bias=True, out_bias=False, axes="in sections"),
    "qwen2_vl_text": Architecture(qkv_bias=True, out_bias=False, axes="in sections"),
    "qwen3": Architecture(qk_norm=True),
    "qwen3_moe": Architecture(qk_norm=True, experts=True, same_window=True),
    "qwen3_vl_moe_text": Architecture(qk_norm=True, experts=True, axes="in turns"),
    "qwen3_vl_text": Architecture(qk_norm=True, axes="in turns"),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes and switches of a decoder, read once from its HF config."""

    arch: Architecture
    prefix: str  # of the names of its weights, besides those of the head
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
    query_scale: float
    attention_cap: float  # 0: none
    logit_cap: float  # 0: none
    embed_scale: float
    windows: tuple[int, ...]  # per layer: how many of the newest tokens a query attends to, its own included; 0: all
    ropes: tuple[int, ...]  # per layer: the index of its kind in `rotary_frequencies`
    experts: tuple[int, ...]  # per layer: the number of experts; 0: one dense block
    axes: tuple[int, ...]  # per frequency of RoPE: the axis of its position; (): a token has one position
    chosen_experts: int = 0
    expert_ffn: int = 0
    normalised_experts: bool = False


def shape_of(config: Any, max_context_tokens: int) -> Shape:
    """Return the shape from a HF config. Raise UnsupportedModel for a model that native does not compute."""
    family, whole, config = family_of(config), config, config.get_text_config()
    arch = ARCHITECTURES.get(config.model_type)
    axes = family.axes if family is not None else 1 if config is whole else 0
    if family is not None and family.mutual:
        raise UnsupportedModel(f"model_type={whole.model_type!r}: tokens of an image attend to each other")
    if arch is None or (1 if arch.axes == "one" else 3) != axes:
        known = sorted(name.removesuffix("_text") for name in ARCHITECTURES)
        raise UnsupportedModel(f"model_type={whole.model_type!r}: the native rollout engine computes {known}")
    name = "hidden_activation" if arch.gemma else "hidden_act"
    activation = ACTIVATIONS.get(getattr(config, name))
    if activation is None:
        raise UnsupportedModel(f"{name}={getattr(config, name)!r}: native computes {', '.join(ACTIVATIONS)}")
    for switch in ("use_bidirectional_attention", "add_cross_attention"):
        if value := getattr(config, switch, None):
            raise UnsupportedModel(f"{switch}={value} of {config.model_type}: native does not compute it")
    check_context(max_context_tokens, config.max_position_embeddings)

    def flag(value: str | bool) -> bool:
        return bool(getattr(config, value, False)) if isinstance(value, str) else value

    layers, heads, hidden = config.num_hidden_layers, config.num_attention_heads, config.hidden_size
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    kinds = rope_kinds(config)
    sparse: dict[str, Any] = {}
    if arch.experts:
        sparse = dict(chosen_experts=config.num_experts_per_tok, expert_ffn=config.moe_intermediate_size)
        sparse |= dict(normalised_experts=getattr(config, "norm_topk_prob", True))
    return Shape(
        arch,
        "model." if family is None else f"model.{family.language}.",
        layers,
        hidden,
        heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        ffn=config.intermediate_size,
        vocab=config.vocab_size,
        eps=config.rms_norm_eps,
        activation=activation,
        qkv_bias=flag(arch.qkv_bias),
        out_bias=flag(arch.out_bias),
        mlp_bias=flag(arch.mlp_bias),
        tied=bool(whole.tie_word_embeddings),
        query_scale=float((config.query_pre_attn_scalar if arch.gemma else head_dim) ** -0.5),
        attention_cap=(config.attn_logit_softcapping or 0.0) if arch.attention_cap else 0.0,
        logit_cap=(config.final_logit_softcapping or 0.0) if arch.gemma else 0.0,
        embed_scale=hidden**0.5 if arch.gemma else 1.0,
        windows=tuple(_window(config, arch, i) for i in range(layers)),
        ropes=tuple(kinds.index(config.layer_types[i]) if len(kinds) > 1 else 0 for i in range(layers)),
        experts=tuple(_experts(config, i) if arch.experts else 0 for i in range(layers)),
        axes=_axes(config, arch, head_dim),
        **sparse,
    )


def _window(config: Any, arch: Architecture, layer: int) -> int:
    """Return how many of the newest tokens a query of this layer attends to; 0: all."""
    window = getattr(config, "sliding_window", None) or 0
    types = None if arch.same_window else getattr(config, "layer_types", None)
    return window if types is None or types[layer] == "sliding_attention" else 0


def _experts(config: Any, layer: int) -> int:
    """Return the number of experts of this layer; 0: it has one dense block."""
    sparse = layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
    return int(config.num_experts) if sparse else 0


def _axes(config: Any, arch: Architecture, head_dim: int) -> tuple[int, ...]:
    """Return the axis of each frequency of RoPE, of frame, row and column; () if a token has one position."""
    if arch.axes == "one":
        return ()
    sections = config.rope_parameters.get("mrope_section")
    if sections is None or len(sections) != 3 or sum(sections) != head_dim // 2:
        raise UnsupportedModel(f"mrope_section={sections}: native divides {head_dim // 2} frequencies among 3 axes")
    if arch.axes == "in sections":
        return tuple(axis for axis, frequencies in enumerate(sections) for _ in range(frequencies))
    return tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(head_dim // 2))


def rope_kinds(config: Any) -> list[str | None]:
    """Return the kinds of layers that have their own rotary tables, or [None] for one table."""
    rope = getattr(config, "rope_parameters", None) or {}
    return sorted(kind for kind, of in rope.items() if isinstance(of, dict)) or [None]


def rotary_frequencies(config: Any, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return RoPE as transformers defines it: frequencies float32 [kinds, head_dim / 2] and the factors [kinds] of cos
    and sin."""
    config = config.get_text_config()
    made = [_frequencies(config, head_dim, kind) for kind in rope_kinds(config)]
    return torch.stack([f for f, _ in made]), torch.tensor([factor for _, factor in made])


def _frequencies(config: Any, head_dim: int, layer_type: str | None) -> tuple[Tensor, float]:
    rope = dict((config.rope_parameters[layer_type] if layer_type else config.rope_parameters) or {})
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "linear", "llama3", "yarn") or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"rope_parameters={rope}: native computes full, length-independent RoPE")
    if kind == "default":
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        return 1.0 / (rope["rope_theta"] ** exponent), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    of_layer = {"layer_type": layer_type} if layer_type else {}
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **of_layer)
    assert frequencies.shape == (head_dim // 2,), f"{kind} RoPE gave {tuple(frequencies.shape)}"
    return frequencies.float(), float(factor)
