"""HF-named tensors fused into what the forward pass reads: one copy per version."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from verl.nn.compiled import ACTIVATIONS, Kernels, LayerPointers, Stack
from verl.rollout.native.architecture import Shape
from verl.rollout.native.layers import Experts, FeedForward, Norm
from verl.rollout.native.linear import Layout, Linear, Panels, make_linear


@dataclass(frozen=True, slots=True)
class Layer:
    norm: Norm
    qkv: Linear  # q, k, v heads in this order; q and k with RoPE pairs interleaved
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim], interleaved as q and k are
    out: Linear
    out_norm: Norm | None
    mlp_norm: Norm
    mlp: FeedForward | Experts
    mlp_out_norm: Norm | None
    window: int
    rope: int


@dataclass(frozen=True, slots=True)
class Weights:
    embed: Tensor  # [V, hidden]
    embed_scale: float
    positions: Tensor | None  # [P, hidden]
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear
    logit_cap: float
    tensors: tuple[Tensor, ...]  # all that the above are views of, in the plain layout
    params: int  # that a token is multiplied with: of the experts, the chosen
    nbytes: int
    stack: Stack | None  # all layers, for the kernel that does them in one call; it points into them

    def embedded(self, ids: Tensor, positions: Tensor) -> Tensor:
        """ids, positions [T] -> [T, hidden]."""
        x = self.embed.index_select(0, ids)
        if self.embed_scale != 1.0:
            x *= self.embed_scale
        return x if self.positions is None else x.add_(self.positions.index_select(0, positions))

    def overwrite(self, fresh: Weights) -> None:
        """Take over the values of another version in the memory of this one."""
        for mine, new in zip(self.tensors, fresh.tensors, strict=True):
            mine.copy_(new)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden] -> [T, V]."""
        logits = self.head(hidden)
        return logits if not self.logit_cap else logits.div_(self.logit_cap).tanh_().mul_(self.logit_cap)


@dataclass(frozen=True, slots=True)
class Target:
    """Where one HF tensor goes: a view into fused storage, the shape in which it is copied there, what is added."""

    shape: tuple[int, ...]
    into: Tensor
    copied_as: tuple[int, ...]
    plus: float = 0.0


@dataclass(slots=True)
class Storage:
    """The fused tensors of one version being received, and the HF names that fill them."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device
    tensors: dict[str, Tensor] = field(default_factory=dict)
    targets: dict[str, Target] = field(default_factory=dict)

    def __post_init__(self) -> None:
        s, gpt2 = self.shape, self.shape.arch.gpt2
        root, embed = ("transformer.", "wte") if gpt2 else ("model.", "embed_tokens")
        self._own("embed", (s.vocab, s.hidden), f"{root}{embed}.weight")
        self._norm("norm", f"{root}{'ln_f' if gpt2 else 'norm'}")
        if s.learned_positions:
            self._own("positions", (s.learned_positions, s.hidden), f"{root}wpe.weight")
        if s.tied:  # one tensor under two names, of which one is enough
            self.targets["lm_head.weight"] = self.targets[f"{root}{embed}.weight"]
        else:
            self._own("head", (s.vocab, s.hidden), "lm_head.weight")
        for i in range(s.layers):
            if gpt2:
                self._gpt2_layer(f"{i}.", f"{root}h.{i}.")
            else:
                self._layer(i, f"{i}.", f"{root}layers.{i}.")

    def _layer(self, layer: int, key: str, at: str) -> None:
        s, dim = self.shape, self.shape.head_dim
        q, kv, hid = s.heads * dim, s.kv_heads * dim, s.hidden
        self._norm(key + "norm", at + "input_layernorm")
        if s.arch.gemma:
            self._norm(key + "out_norm", at + "post_attention_layernorm")
            self._norm(key + "mlp_norm", at + "pre_feedforward_layernorm")
            self._norm(key + "mlp_out_norm", at + "post_feedforward_layernorm")
        else:
            self._norm(key + "mlp_norm", at + "post_attention_layernorm")
        attention = [(at + "self_attn.q_proj", q), (at + "self_attn.k_proj", kv), (at + "self_attn.v_proj", kv)]
        self._fuse(key + "qkv", attention, hid, s.qkv_bias, rotated=2)
        self._fuse(key + "out", [(at + "self_attn.o_proj", hid)], q, s.out_bias)
        if s.experts[layer]:
            self._own(key + "router", (s.experts[layer], hid), at + "mlp.gate.weight")
            self._own(key + "up", (s.experts[layer], 2 * s.expert_ffn, hid), at + "mlp.experts.gate_up_proj")
            self._own(key + "down", (s.experts[layer], hid, s.expert_ffn), at + "mlp.experts.down_proj")
        else:
            self._fuse(key + "up", [(at + "mlp.gate_proj", s.ffn), (at + "mlp.up_proj", s.ffn)], hid, s.mlp_bias)
            self._fuse(key + "down", [(at + "mlp.down_proj", hid)], s.ffn, s.mlp_bias)
        if s.arch.qk_norm:
            table = self._new(key + "qk_norm", (s.heads + s.kv_heads, dim), norm=True)
            for name, rows in (("q", table[: s.heads]), ("k", table[s.heads :])):
                halves = _as_halves(rows.view(-1, dim // 2, 2))  # every head has the same norm
                self.targets[f"{at}self_attn.{name}_norm.weight"] = Target(
                    (dim,), halves, (2, dim // 2), self._norm_offset
                )

    def _gpt2_layer(self, key: str, at: str) -> None:
        hid, ffn = self.shape.hidden, self.shape.ffn
        self._norm(key + "norm", at + "ln_1")
        self._norm(key + "mlp_norm", at + "ln_2")
        for name, source, inner, outer in (
            ("qkv", "attn.c_attn", hid, 3 * hid),
            ("out", "attn.c_proj", hid, hid),
            ("up", "mlp.c_fc", hid, ffn),
            ("down", "mlp.c_proj", ffn, hid),
        ):
            into = self._new(f"{key}{name}.weight", (outer, inner)).t()
            self.targets[f"{at}{source}.weight"] = Target((inner, outer), into, (inner, outer))
            self._own(f"{key}{name}.bias", (outer,), f"{at}{source}.bias")

    @property
    def _norm_offset(self) -> float:
        return float(self.shape.arch.gemma)

    def _norm(self, key: str, name: str) -> None:
        hid = self.shape.hidden
        self.targets[f"{name}.weight"] = Target(
            (hid,), self._new(f"{key}.weight", (hid,), norm=True), (hid,), self._norm_offset
        )
        if self.shape.arch.gpt2:
            self.targets[f"{name}.bias"] = Target((hid,), self._new(f"{key}.bias", (hid,), norm=True), (hid,))

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

    def _new(self, key: str, shape: tuple[int, ...], norm: bool = False) -> Tensor:
        """Norms stay in float32 where 1 is added to them, and on a CPU, whose kernels compute in it."""
        exact = norm and (self.shape.arch.gemma or self.device.type == "cpu")
        self.tensors[key] = torch.empty(shape, dtype=torch.float32 if exact else self.dtype, device=self.device)
        return self.tensors[key]


def _as_halves(pairs: Tensor) -> Tensor:
    """[heads, D/2, 2, ...] -> the view [heads, 2, D/2, ...] in which HF stores a head.

    HF rotates (i, i + D/2); stored as neighbours the pair is one complex number. Query and key are permuted alike, so
    every dot product is unchanged.
    """
    return pairs.transpose(1, 2)


def receive(
    tensors: Iterable[tuple[str, object]],
    shape: Shape,
    *,
    dtype: torch.dtype,
    compute_dtype: torch.dtype,
    device: torch.device,
    layout: Layout,
    kernels: Kernels | None,
) -> Weights:
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
        if target.plus:
            value = value.float() + target.plus
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
    t, s = storage.tensors, storage.shape
    linears: list[Linear] = []

    def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
        linears.append(make_linear(weight, bias, layout, kernels))
        return linears[-1]

    def named(key: str) -> Linear:
        return linear(t[f"{key}.weight"], t.get(f"{key}.bias"))

    def norm(key: str) -> Norm:
        return Norm(t[f"{key}.weight"], t.get(f"{key}.bias"), s.eps, kernels)

    def mlp(i: int) -> FeedForward | Experts:
        gated = not s.arch.gpt2
        if not s.experts[i]:
            return FeedForward(named(f"{i}.up"), named(f"{i}.down"), s.activation, gated, kernels)
        each = (
            FeedForward(linear(u), linear(d), s.activation, gated, kernels)
            for u, d in zip(t[f"{i}.up"], t[f"{i}.down"])
        )
        return Experts(linear(t[f"{i}.router"]), tuple(each), s.chosen_experts, s.normalised_experts)

    layers = tuple(
        Layer(
            norm=norm(f"{i}.norm"),
            qkv=named(f"{i}.qkv"),
            qk_norm=t.get(f"{i}.qk_norm"),
            out=named(f"{i}.out"),
            out_norm=norm(f"{i}.out_norm") if s.arch.gemma else None,
            mlp_norm=norm(f"{i}.mlp_norm"),
            mlp=mlp(i),
            mlp_out_norm=norm(f"{i}.mlp_out_norm") if s.arch.gemma else None,
            window=s.windows[i],
            rope=s.ropes[i],
        )
        for i in range(s.layers)
    )
    head = linear(t["embed" if s.tied else "head"])
    idle = sum((n - s.chosen_experts) * 3 * s.expert_ffn * s.hidden for n in s.experts if n)
    kept = sum(tensor.nbytes for key, tensor in t.items() if layout == "plain" or key in ("embed", "positions"))
    return Weights(
        stack=_stack(layers, s),
        embed=t["embed"],
        embed_scale=float(torch.tensor(s.embed_scale).to(storage.dtype)),
        positions=t.get("positions"),
        layers=layers,
        norm=norm("norm"),
        head=head,
        logit_cap=s.logit_cap,
        tensors=tuple(t.values()) if layout == "plain" else (),
        params=sum(tensor.numel() for tensor in t.values()) - idle,
        nbytes=kept + sum(one.nbytes for one in linears),
    )


def _stack(layers: tuple[Layer, ...], s: Shape) -> Stack | None:
    """None if a layer has something that the kernel does not know."""
    pointers = [_pointers(layer) for layer in layers]
    known = [one for one in pointers if one is not None]
    if len(known) < len(pointers):
        return None
    return Stack(
        (LayerPointers * len(known))(*known),
        len(known),
        s.hidden,
        s.ffn,
        s.heads,
        s.kv_heads,
        s.head_dim,
        ACTIVATIONS[s.activation],
        s.eps,
        s.query_scale,
        s.attention_cap,
    )


def _pointers(layer: Layer) -> LayerPointers | None:
    norms = {
        "norm": layer.norm,
        "out_norm": layer.out_norm,
        "mlp_norm": layer.mlp_norm,
        "mlp_out_norm": layer.mlp_out_norm,
    }
    if (
        not isinstance(layer.mlp, FeedForward)
        or not layer.mlp.gated
        or any(norm and norm.bias is not None for norm in norms.values())
    ):
        return None
    read: dict[str, Tensor | None] = {name: None if norm is None else norm.weight for name, norm in norms.items()} | {
        "qk_norm": layer.qk_norm
    }
    for name, product in (("qkv", layer.qkv), ("out", layer.out), ("up", layer.mlp.up), ("down", layer.mlp.down)):
        if not isinstance(product, Panels):
            return None
        read |= {name: product.panels, f"{name}_bias": product.bias}
    assert all(t is None or (t.is_contiguous() and t.dtype == torch.float32) for t in read.values())
    return LayerPointers(
        **{name: None if t is None else t.data_ptr() for name, t in read.items()}, window=layer.window, rope=layer.rope
    )
