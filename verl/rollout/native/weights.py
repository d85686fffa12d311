"""Architectures as data, and HF-named tensors fused into what the forward pass reads: one copy per version."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from verl.rollout.native.compiled import Kernels
from verl.rollout.native.linear import Layout, Linear, make_linear


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one family differs from Llama. A `*_bias` names the config flag that turns it on, or says always/never."""

    qkv_bias: str | bool = False
    out_bias: str | bool = False
    mlp_bias: str | bool = False
    qk_norm: bool = False


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Architecture(),
    "qwen2": Architecture(qkv_bias=True),
    "qwen3": Architecture(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True),
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
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool

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
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act={config.hidden_act!r}: native computes silu; set rollout.engine=hf")
    _refuse_sliding_window(config, max_context_tokens)
    if max_context_tokens > config.max_position_embeddings:
        raise ValueError(
            f"max_context_tokens={max_context_tokens} exceeds the model's max_position_embeddings="
            f"{config.max_position_embeddings}: shorten prompt or response, or use a model with a longer context"
        )

    def flag(value: str | bool) -> bool:
        return bool(getattr(config, value, False)) if isinstance(value, str) else value

    heads = config.num_attention_heads
    return Shape(
        layers=config.num_hidden_layers, hidden=config.hidden_size, heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        ffn=config.intermediate_size, vocab=config.vocab_size, eps=config.rms_norm_eps,
        qkv_bias=flag(arch.qkv_bias), out_bias=flag(arch.out_bias), mlp_bias=flag(arch.mlp_bias),
        qk_norm=arch.qk_norm, tied=bool(config.tie_word_embeddings),
    )  # fmt: skip


def _refuse_sliding_window(config: Any, max_context_tokens: int) -> None:
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    if set(layer_types) <= {"full_attention"} or (window and max_context_tokens <= window):
        return  # a window that the context never outgrows is full attention
    raise ValueError(
        f"sliding_window={window} is active in {config.model_type} for max_context_tokens={max_context_tokens}: native "
        "computes full attention; keep the context within the window, or set rollout.engine=hf"
    )


def inverse_frequencies(config: Any, head_dim: int) -> tuple[Tensor, float]:
    """RoPE as transformers defines it -> (float32 [head_dim / 2], factor on cos and sin)."""
    rope = dict(config.rope_parameters or {})
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "linear", "llama3", "yarn") or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"rope_parameters={rope}: native computes full, length-independent RoPE; set rollout.engine=hf"
        )
    if kind == "default":
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        return 1.0 / (rope["rope_theta"] ** exponent), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    assert frequencies.shape == (head_dim // 2,), f"{kind} RoPE gave {tuple(frequencies.shape)}"
    return frequencies.float(), float(factor)


@dataclass(frozen=True, slots=True)
class Layer:
    norm: Tensor  # [hidden]
    qkv: Linear  # q, k, v heads in this order; q and k with RoPE pairs interleaved
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim], interleaved as q and k are
    out: Linear
    mlp_norm: Tensor  # [hidden]
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    embed: Tensor  # [V, hidden]
    layers: tuple[Layer, ...]
    norm: Tensor  # [hidden]
    head: Linear
    params: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Target:
    """Where one HF tensor goes: a view into fused storage, and the shape in which it is copied there."""

    shape: tuple[int, ...]
    into: Tensor
    copied_as: tuple[int, ...]


@dataclass(slots=True)
class Storage:
    """The fused tensors of one version being received, and the HF names that fill them."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device
    tensors: dict[str, Tensor] = field(default_factory=dict)
    targets: dict[str, Target] = field(default_factory=dict)

    def __post_init__(self) -> None:
        s = self.shape
        self._own("embed", (s.vocab, s.hidden), "model.embed_tokens.weight")
        self._own("norm", (s.hidden,), "model.norm.weight")
        if s.tied:  # one tensor under two names, of which one is enough
            self.targets["lm_head.weight"] = self.targets["model.embed_tokens.weight"]
        else:
            self._own("head", (s.vocab, s.hidden), "lm_head.weight")
        for i in range(s.layers):
            self._layer(f"{i}.", f"model.layers.{i}.")

    def _layer(self, key: str, at: str) -> None:
        s, dim = self.shape, self.shape.head_dim
        q, kv, hid = s.heads * dim, s.kv_heads * dim, s.hidden
        self._own(key + "norm", (hid,), at + "input_layernorm.weight")
        self._own(key + "mlp_norm", (hid,), at + "post_attention_layernorm.weight")
        attention = [(at + "self_attn.q_proj", q), (at + "self_attn.k_proj", kv), (at + "self_attn.v_proj", kv)]
        self._fuse(key + "qkv", attention, hid, s.qkv_bias, rotated=2)
        self._fuse(key + "out", [(at + "self_attn.o_proj", hid)], q, s.out_bias)
        self._fuse(key + "gate_up", [(at + "mlp.gate_proj", s.ffn), (at + "mlp.up_proj", s.ffn)], hid, s.mlp_bias)
        self._fuse(key + "down", [(at + "mlp.down_proj", hid)], s.ffn, s.mlp_bias)
        if s.qk_norm:
            table = self._new(key + "qk_norm", (s.heads + s.kv_heads, dim))
            for name, rows in (("q", table[: s.heads]), ("k", table[s.heads :])):
                halves = _as_halves(rows.view(-1, dim // 2, 2))  # every head has the same norm
                self.targets[f"{at}self_attn.{name}_norm.weight"] = Target((dim,), halves, (2, dim // 2))

    def _fuse(self, key: str, parts: list[tuple[str, int]], width: int, bias: bool, rotated: int = 0) -> None:
        """Rows of several projections as one matrix; the first `rotated` of them hold RoPE pairs, interleaved."""
        rows = sum(n for _, n in parts)
        for kind, tail in (("weight", (width,)), ("bias", ())) if bias else (("weight", (width,)),):
            whole, start = self._new(f"{key}.{kind}", (rows, *tail)), 0
            for i, (name, n) in enumerate(parts):
                into, copied_as = whole[start : start + n], (n, *tail)
                if i < rotated:
                    into = _as_halves(into.unflatten(0, (-1, self.shape.head_dim // 2, 2)))
                    copied_as = tuple(into.shape)
                self.targets[f"{name}.{kind}"] = Target((n, *tail), into, copied_as)
                start += n

    def _own(self, key: str, shape: tuple[int, ...], name: str) -> None:
        self.targets[name] = Target(shape, self._new(key, shape), shape)

    def _new(self, key: str, shape: tuple[int, ...]) -> Tensor:
        self.tensors[key] = torch.empty(shape, dtype=self.dtype, device=self.device)
        return self.tensors[key]


def _as_halves(pairs: Tensor) -> Tensor:
    """[heads, D/2, 2, ...] -> the view [heads, 2, D/2, ...] in which HF stores a head.

    HF rotates (i, i + D/2); stored as neighbours the pair is one complex number. Query and key are permuted alike, so
    every dot product is unchanged.
    """
    return pairs.transpose(1, 2)


def receive(
    tensors: Iterable[tuple[str, object]], shape: Shape, *, dtype: torch.dtype, compute_dtype: torch.dtype,
    device: torch.device, layout: Layout, kernels: Kernels | None,
) -> Weights:  # fmt: skip
    """Copy a stream of HF-named tensors into fresh fused storage; ValueError lists everything that does not fit.

    `dtype` is what the weights are rounded to, `compute_dtype` what they are kept and multiplied in.
    """
    storage = Storage(shape, compute_dtype, device)
    filled: set[int] = set()
    unexpected, misshapen = [], []
    for name, tensor in tensors:
        target = storage.targets.get(name)
        if target is None or not isinstance(tensor, Tensor):
            unexpected.append(name)
            continue
        filled_before = id(target) in filled
        filled.add(id(target))
        if tuple(tensor.shape) != target.shape:
            misshapen.append(f"{name} {tuple(tensor.shape)}, model {target.shape}")
            continue
        value = tensor.detach().to(dtype).reshape(target.copied_as)
        if not filled_before:
            target.into.copy_(value)
        elif not torch.equal(target.into, value.to(target.into)):
            raise ValueError(f"{name} differs from the tensor it is tied to (tie_word_embeddings), or came twice")
    missing = sorted(name for name, target in storage.targets.items() if id(target) not in filled)
    refuse_mismatch(missing, unexpected, misshapen)
    return _finish(storage, layout, kernels)


def refuse_mismatch(missing: list[str], unexpected: list[str], misshapen: list[str]) -> None:
    if missing or unexpected or misshapen:
        raise ValueError(
            f"weights do not fit the model (the old ones stay live): missing {missing}, unexpected {unexpected}, "
            f"wrong shape {misshapen}"
        )


def _finish(storage: Storage, layout: Layout, kernels: Kernels | None) -> Weights:
    t, shape = storage.tensors, storage.shape

    def linear(key: str) -> Linear:
        return make_linear(t[f"{key}.weight"], t.get(f"{key}.bias"), layout, kernels)

    layers = tuple(
        Layer(
            norm=t[f"{i}.norm"], qkv=linear(f"{i}.qkv"), qk_norm=t.get(f"{i}.qk_norm"), out=linear(f"{i}.out"),
            mlp_norm=t[f"{i}.mlp_norm"], gate_up=linear(f"{i}.gate_up"), down=linear(f"{i}.down"),
        )
        for i in range(shape.layers)
    )  # fmt: skip
    head = make_linear(t["embed" if shape.tied else "head"], None, layout, kernels)
    linears = [head, *(one for layer in layers for one in (layer.qkv, layer.out, layer.gate_up, layer.down))]
    params, kept = sum(tensor.numel() for tensor in t.values()), t["embed"].nbytes
    if layout == "plain":
        kept = sum(tensor.nbytes for tensor in t.values())
    return Weights(t["embed"], layers, t["norm"], head, params, kept + sum(one.nbytes for one in linears))
