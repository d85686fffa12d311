"""Families of decoders as data, and the sizes of one model, read from its HF config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from verl.errors import Refused
from verl.models.families import family_of
from verl.rollout.embedded.core import check_context
from verl.rollout.native.layers import ACTIVATIONS

PARTIAL = "partial_rotary_factor"  # of `rope_parameters`: the share of a head that RoPE rotates
DELTA_NET = "linear_attention"  # the kind of these layers in `layer_types`


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
    centred_norms: bool = False
    """Norms scale by 1 + weight."""
    gated: bool = False
    """The mixed values of each head are multiplied by the sigmoid of a gate, whose rows follow those of its query."""
    delta: Literal["none", "apart", "by key head"] = "none"
    """Some layers are gated delta nets. Their projections are apart, or two that have the rows of one key head after
    those of another."""
    experts: bool = False
    """Feed-forward blocks may consist of experts with a router."""
    shared_expert: bool = False
    """Beside them is one that computes every token, times the sigmoid of a gate."""
    same_window: bool = False
    """transformers applies config.sliding_window to all layers, and ignores layer_types."""
    axes: Literal["one", "in sections", "in turns"] = "one"
    """The positions of a token: one, or one for each axis of an image. The frequencies of RoPE are then divided among
    the axes by `mrope_section`: in sections, one after the other, or in turns. Text alone has one position."""

    @property
    def norm_offset(self) -> float:
        """The number that is added to the weights of norms."""
        return float(self.gemma or self.centred_norms)


_HYBRID = Architecture(qk_norm=True, centred_norms=True, gated=True, delta="apart", axes="in turns")

ARCHITECTURES: dict[str, Architecture] = {
    "gemma2": Architecture(gemma=True, attention_cap=True),
    "gemma3_text": Architecture(qk_norm=True, gemma=True),
    "llama": Architecture(mlp_bias="mlp_bias"),
    "mistral": Architecture(qkv_bias=False, out_bias=False, same_window=True),
    "qwen2": Architecture(qkv_bias=True, out_bias=False),
    "qwen2_5_omni_text": Architecture(qkv_bias=True, out_bias=False, axes="in sections"),
    "qwen2_5_vl_text": Architecture(qkv_bias=True, out_bias=False, axes="in sections"),
    "qwen2_vl_text": Architecture(qkv_bias=True, out_bias=False, axes="in sections"),
    "qwen3": Architecture(qk_norm=True),
    "qwen3_5_moe_text": replace(_HYBRID, experts=True, shared_expert=True),
    "qwen3_5_text": _HYBRID,
    "qwen3_moe": Architecture(qk_norm=True, experts=True, same_window=True),
    "qwen3_next": replace(_HYBRID, delta="by key head", experts=True, shared_expert=True, axes="one"),
    "qwen3_omni_moe_text": Architecture(qk_norm=True, experts=True, axes="in turns"),
    "qwen3_vl_moe_text": Architecture(qk_norm=True, experts=True, axes="in turns"),
    "qwen3_vl_text": Architecture(qk_norm=True, axes="in turns"),
}


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """The sizes of the gated delta nets of a decoder."""

    key_heads: int
    heads: int
    """The heads of values; several in a row read one key head."""
    key_dim: int
    value_dim: int
    window: int
    """The tokens before each one that its convolution reads."""

    @property
    def keys(self) -> int:
        """The width of all queries, and of all keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """The width of all values."""
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """The channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values


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
    attends: tuple[bool, ...]  # per layer: it is attention; else a gated delta net
    rotated: int  # the first values of a head that are rotated
    delta: DeltaSizes | None
    chosen_experts: int = 0
    expert_ffn: int = 0
    normalised_experts: bool = False
    shared_ffn: int = 0  # of the expert that computes every token; 0: there is none

    @property
    def kv_layers(self) -> int:
        """The number of layers with keys and values."""
        return sum(self.attends)


def shape_of(config: Any, max_context_tokens: int) -> Shape:
    """Return the shape from a HF config. Raise UnsupportedModel for a model that native does not compute."""
    family, whole, config = family_of(config), config, config.get_text_config()
    arch = ARCHITECTURES.get(config.model_type)
    axes = family.axes if family is not None else 1 if config is whole else 0
    if family is not None and family.attends(vars(config)):
        raise UnsupportedModel(f"model_type={whole.model_type!r}: tokens of an image attend to each other")
    if arch is None or axes not in ((1,) if arch.axes == "one" else (1, 3)):
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
    rotated = rotated_dim(config, head_dim)
    if rotated != head_dim and arch.delta == "none":
        raise UnsupportedModel(f"rope_parameters={config.rope_parameters}: native rotates whole heads of this family")
    kinds = rope_kinds(config)
    sparse: dict[str, Any] = {}
    if arch.experts:
        sparse = dict(chosen_experts=config.num_experts_per_tok, expert_ffn=config.moe_intermediate_size)
        sparse |= dict(normalised_experts=getattr(config, "norm_topk_prob", True))
    if arch.shared_expert:
        sparse |= dict(shared_ffn=config.shared_expert_intermediate_size)
    return Shape(
        arch,
        "model." if family is None else f"model.{family.language}.",
        layers,
        hidden,
        heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        ffn=getattr(config, "intermediate_size", 0),
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
        axes=_axes(config, arch, head_dim, rotated) if axes == 3 else (),
        attends=tuple(arch.delta == "none" or config.layer_types[i] != DELTA_NET for i in range(layers)),
        rotated=rotated,
        delta=_delta_sizes(config, activation) if arch.delta != "none" else None,
        **sparse,
    )


def _window(config: Any, arch: Architecture, layer: int) -> int:
    """Return how many of the newest tokens a query of this layer attends to; 0: all."""
    window = getattr(config, "sliding_window", None) or 0
    types = None if arch.same_window else getattr(config, "layer_types", None)
    return window if types is None or types[layer] == "sliding_attention" else 0


def _experts(config: Any, layer: int) -> int:
    """Return the number of experts of this layer; 0: it has one dense block."""
    step = getattr(config, "decoder_sparse_step", 1)
    sparse = layer not in getattr(config, "mlp_only_layers", ()) and (layer + 1) % step == 0
    return int(config.num_experts) if sparse else 0


def _delta_sizes(config: Any, activation: str) -> DeltaSizes:
    if activation != "silu":
        raise UnsupportedModel(f"{activation} in delta nets: native computes silu")
    return DeltaSizes(
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim - 1,
    )


def _axes(config: Any, arch: Architecture, head_dim: int, rotated: int) -> tuple[int, ...]:
    """Return the axis of each frequency of RoPE, of frame, row and column, that of what is not rotated included."""
    sections = config.rope_parameters.get("mrope_section")
    if sections is None or len(sections) != 3 or sum(sections) != rotated // 2:
        raise UnsupportedModel(f"mrope_section={sections}: native divides {rotated // 2} frequencies among 3 axes")
    if arch.axes == "in sections":
        found = tuple(axis for axis, frequencies in enumerate(sections) for _ in range(frequencies))
    else:
        found = tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(rotated // 2))
    return found + (0,) * ((head_dim - rotated) // 2)


def rotated_dim(config: Any, head_dim: int) -> int:
    """Return the number of the first values of a head that RoPE rotates."""
    rope = getattr(config, "rope_parameters", None) or {}
    dim = int(head_dim * rope.get(PARTIAL, 1.0))
    if dim % 2 or head_dim % 2:
        raise UnsupportedModel(f"rope_parameters={rope}: native rotates pairs of the {head_dim} values of a head")
    return dim


def rope_kinds(config: Any) -> list[str | None]:
    """Return the kinds of layers that have their own rotary tables, or [None] for one table."""
    rope = getattr(config, "rope_parameters", None) or {}
    return sorted(kind for kind, of in rope.items() if isinstance(of, dict)) or [None]


def rotary_frequencies(config: Any, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return RoPE as transformers defines it: frequencies float32 [kinds, head_dim / 2] and the factors [kinds] of cos
    and sin."""
    config = config.get_text_config()
    made = [_frequencies(config, head_dim, kind) for kind in rope_kinds(config)]
    if (rest := (head_dim - rotated_dim(config, head_dim)) // 2) and any(factor != 1.0 for _, factor in made):
        raise UnsupportedModel(f"rope_parameters={config.rope_parameters}: native scales whole heads alone")
    made = [(pad(f, (0, rest)), factor) for f, factor in made]  # a frequency of 0 does not rotate
    return torch.stack([f for f, _ in made]), torch.tensor([factor for _, factor in made])


def _frequencies(config: Any, head_dim: int, layer_type: str | None) -> tuple[Tensor, float]:
    rope = dict((config.rope_parameters[layer_type] if layer_type else config.rope_parameters) or {})
    kind = rope.get("rope_type", "default")
    dim = rotated_dim(config, head_dim)
    if kind not in ("default", "linear", "llama3", "yarn") or int(head_dim * rope.get(PARTIAL, 1.0)) != dim:
        raise UnsupportedModel(f"rope_parameters={rope}: native computes length-independent RoPE, of one width")
    if kind == "default":
        exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        return 1.0 / (rope["rope_theta"] ** exponent), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    of_layer = {"layer_type": layer_type} if layer_type else {}
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **of_layer)
    assert frequencies.shape == (dim // 2,), f"{kind} RoPE gave {tuple(frequencies.shape)}"
    return frequencies.float(), float(factor)
