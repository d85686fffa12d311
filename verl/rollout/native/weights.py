"""The weights of the forward pass: HF-named tensors are fused into larger ones while they are received, with one copy
per version."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from verl.accel.linear import Blocks, DecoderSizes, FilledLinear, LayerParts, Layers, Linear, Products
from verl.nn.fp8 import SCALES, VALUES, in_blocks, scales_shape
from verl.rollout.embedded.receive import Destination
from verl.rollout.native.architecture import Shape
from verl.rollout.native.codes import CodedRows, CodesReader, PlainRows, RowsProduct, WeightRows
from verl.rollout.native.delta import DeltaNet
from verl.rollout.native.layers import Experts, FeedForward, Norm, SharedExpert, Stacked
from verl.rollout.native.ops import NativeOps
from verl.rollout.native.projections import (
    Projections,
    as_halves,
    expert_tensors,
    head_order,
    input_norms,
    interleaved,
    projections,
)
from verl.rollout.native.tower import Tower
from verl.wire import FP8_BLOCK

OF_BLOCKS = (".scales", ".scale_rows")  # ends of the keys of tensors that hold no weights


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one decoder layer."""

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
    kv: int  # its index among the layers of attention, or among the delta nets
    delta: DeltaNet | None  # in place of attention; `qkv` is then its product, and `out` its output


@dataclass(frozen=True, slots=True)
class Weights:
    """One version of the weights, as the forward pass reads them."""

    embed: Tensor  # [V, hidden]
    embed_scale: float
    layers: tuple[Layer, ...]
    norm: Norm
    head: Callable[[Tensor], Tensor]  # hidden states [T, hidden] to logits [T, V]
    logit_cap: float
    tensors: tuple[Tensor, ...]  # in the plain layout: all tensors that the ones above are views of
    params: int  # number of weights that one token is multiplied with: of the experts, only the chosen ones
    nbytes: int
    joined: Layers | None  # computes all layers in one call, if a kernel exists
    destinations: Mapping[str, Destination]  # for writing tensors of another version into this memory
    reloads: bool  # all of another version can be written there
    tied_head: FilledLinear | None  # the head, if it is a second layout of the tied embedding
    tower: Mapping[str, Tensor]  # the weights of the vision tower, by name; empty: the model reads text alone
    wide_residual: bool  # the residual stream is float32, whatever the dtype of products is

    def embedded(self, ids: Tensor) -> Tensor:
        """Return the scaled embeddings [T, hidden] of ids [T], in the dtype of the residual stream."""
        x = self.embed.index_select(0, ids)
        x = x if self.embed_scale == 1.0 else x.mul_(self.embed_scale)
        return x.float() if self.wide_residual else x

    def overwrite(self, fresh: Weights) -> None:
        """Copy the values of another version into the memory of this one."""
        for mine, new in zip(self.tensors, fresh.tensors, strict=True):
            mine.copy_(new)
        for name, tensor in self.tower.items():
            tensor.copy_(fresh.tower[name])

    def pack_tied_head(self) -> None:
        """Pack the head again after its tied embedding was overwritten."""
        if self.tied_head is not None:
            self.tied_head.fill(self.embed)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [T, V] of hidden states [T, hidden]."""
        logits = self.head(hidden)
        return logits if not self.logit_cap else logits.div_(self.logit_cap).tanh_().mul_(self.logit_cap)


@dataclass(frozen=True, slots=True)
class Part:
    """A projection of a product that is computed projection by projection, since some of them have codes."""

    key: str
    """Its HF name, or that of its own product if it has no codes."""
    coded: bool
    rows: int
    width: int
    pairs: int
    """The D/2 pairs of each head whose rows are put side by side; 0: none are."""
    order: Tensor | None
    """The order in which its rows are written, if it is another one."""


@dataclass(slots=True)
class Storage:
    """The memory of one version while it is received, and by HF name the destinations that fill it. A layout that can
    be filled is written directly, which saves a copy and, more costly, an allocation."""

    shape: Shape
    dtype: torch.dtype  # weights are rounded to it
    compute_dtype: torch.dtype  # weights are kept and multiplied in it
    device: torch.device
    layout: Products | None = None  # a layout that can be filled; None: tensors are received as they are
    blocks: bool = False  # projections arrive and are kept in blocks of 8 bits
    tower: Tower | None = None  # the model's vision tower
    seeing: dict[str, Tensor] = field(default_factory=dict)  # its weights
    coded: Set[str] = frozenset()  # the weights that arrive as codes, for which there is no memory here
    shared: Set[str] = frozenset()  # float32 tensors of the trainer that never change: embedding and head are kept
    adopted: set[str] = field(default_factory=set)  # the keys of these
    apart: dict[str, list[Part]] = field(default_factory=dict)  # the products that have some of them, by key
    exact_norms: bool = False  # norms are kept in float32
    float32_head: bool = False  # the head is multiplied in float32, and is therefore kept as it is received
    tensors: dict[str, Tensor] = field(default_factory=dict)
    products: dict[str, FilledLinear] = field(default_factory=dict)
    destinations: dict[str, Destination] = field(default_factory=dict)

    def __post_init__(self) -> None:
        s = self.shape
        assert not (self.blocks and self.layout), "blocks have a layout of their own"
        self._own("embed", (s.vocab, s.hidden), s.prefix + "embed_tokens.weight")
        self._norm("norm", s.prefix + "norm")
        if s.tied:  # one tensor under two names, of which one is enough
            self.destinations["lm_head.weight"] = self.destinations[s.prefix + "embed_tokens.weight"]
        elif "lm_head.weight" in self.shared or self.float32_head:
            self._own("head.weight", (s.vocab, s.hidden), "lm_head.weight")
        else:
            self._fuse(Projections("head", (("lm_head", s.vocab),), s.hidden))
        for i in range(s.layers):
            self._layer(i, f"{i}.", f"{s.prefix}layers.{i}.")
        if self.tower is not None:
            self.seeing = self.tower.empty()
            for name, into in self.seeing.items():
                self.destinations[f"model.{name}"] = Destination(into.shape, into, into.shape, self.dtype)

    @property
    def claimed(self) -> set[str]:
        """The weights of which the codes are used; others are dequantised."""
        return {part.key for parts in self.apart.values() for part in parts if part.coded}

    def params(self) -> int:
        """Return the number of weights that a token is multiplied with."""
        s = self.shape
        found = sum(tensor.numel() for key, tensor in self.tensors.items() if not key.endswith(OF_BLOCKS))
        found += sum(one.params for one in self.products.values())
        found += sum(part.rows * part.width for parts in self.apart.values() for part in parts if part.coded)
        return found - sum((n - s.chosen_experts) * 3 * s.expert_ffn * s.hidden for n in s.experts if n)

    def norm(self, key: str, ops: NativeOps) -> Norm:
        """Return the norm with a received weight."""
        return Norm(self.tensors[f"{key}.weight"], self.shape.eps, ops.rms_norm)

    def _layer(self, layer: int, key: str, at: str) -> None:
        """Allocate the tensors of a layer under names that begin with `key`, for HF names that begin with `at`."""
        s, dim = self.shape, self.shape.head_dim
        of_attention, of_mlp = input_norms(s, layer)
        self._norm(key + "norm", of_attention)
        self._norm(key + "mlp_norm", of_mlp)
        if s.arch.gemma:
            self._norm(key + "out_norm", at + "post_attention_layernorm")
            self._norm(key + "mlp_out_norm", at + "post_feedforward_layernorm")
        for one in projections(s, layer):
            self._fuse(one)
        for name, own, shape in expert_tensors(s, layer):
            self._each(own, shape, name)
        if not s.attends[layer]:
            return self._delta_net(key, at + "linear_attn.")
        if s.arch.qk_norm:
            table = self._new(key + "qk_norm", (s.heads + s.kv_heads, dim), norm=True)
            for name, rows in (("q", table[: s.heads]), ("k", table[s.heads :])):  # all heads share one norm
                settings = self.dtype, s.arch.norm_offset
                into = Destination((dim,), rows, (dim,), *settings, order=head_order(dim, s.rotated))
                self.destinations[f"{at}self_attn.{name}_norm.weight"] = into

    def _delta_net(self, key: str, at: str) -> None:
        """Allocate the tensors of a delta net besides its products."""
        sizes = self.shape.delta
        assert sizes is not None
        taps = self._new(key + "conv", (sizes.window + 1, sizes.channels))
        copied_as = (sizes.channels, sizes.window + 1)
        self.destinations[at + "conv1d.weight"] = Destination(
            (sizes.channels, 1, sizes.window + 1), taps.t(), copied_as, self.dtype
        )
        for name, own in (("A_log", "decays"), ("dt_bias", "steps")):
            into = self._new(key + own, (sizes.heads,), dtype=torch.float32)
            self.destinations[at + name] = Destination((sizes.heads,), into, (sizes.heads,), self.dtype)
        self._own(key + "gated_norm", (sizes.value_dim,), at + "norm.weight")

    def _norm(self, key: str, name: str) -> None:
        """Allocate the weight of a norm [hidden]."""
        size = (self.shape.hidden,)
        into = self._new(f"{key}.weight", size, norm=True)
        self.destinations[f"{name}.weight"] = Destination(size, into, size, self.dtype, self.shape.arch.norm_offset)

    def _fuse(self, one: Projections) -> None:
        """Allocate one matrix for several projections, one below the other."""
        key, parts, width, rotated = one.key, one.parts, one.width, one.rotated
        rows, half = sum(n for _, n in parts), self.shape.head_dim // 2
        apart = not self.coded.isdisjoint(f"{name}.weight" for name, _ in parts)
        if apart:
            self.apart[key] = [self._part(one, i) for i in range(len(parts))]
        elif self.layout is not None:
            product, start = self.layout.empty(rows, width), 0
            self.products[key] = product
            for i, (name, n) in enumerate(parts):
                pack = partial(product.fill, first=start, pairs=half if i < rotated else 0)
                shape, order = (n, width), one.order(i)
                made = Destination(shape, product.memory, shape, self.dtype, pack=pack, order=order)
                self.destinations[f"{name}.weight"] = made
                start += n
        kinds = [("weight", (width,))] if self.layout is None and not apart else []
        in_8_bits = self.blocks and in_blocks(parts[0][0], (rows, width))
        if in_8_bits:
            self._scales_of(key, parts, width, rotated)
        for kind, tail in [*kinds, ("bias", ())] if one.bias else kinds:
            dtype = VALUES if in_8_bits and kind == "weight" else self.dtype
            whole, start = self._new(f"{key}.{kind}", (rows, *tail), dtype=None if dtype == self.dtype else dtype), 0
            for i, (name, n) in enumerate(parts):
                into, copied_as = whole[start : start + n], (n, *tail)
                if i < rotated:
                    into = as_halves(into.unflatten(0, (-1, half, 2)))
                    copied_as = tuple(into.shape)
                self.destinations[f"{name}.{kind}"] = Destination(
                    (n, *tail), into, copied_as, dtype, order=one.order(i)
                )
                start += n

    def _part(self, one: Projections, i: int) -> Part:
        """Return the i-th projection of a product that is computed projection by projection. One without codes gets
        memory of its own."""
        (name, rows), key, rotated = one.parts[i], f"{one.key}.{i}", i < one.rotated
        coded = f"{name}.weight" in self.coded
        if not coded:
            orders = (one.order(i),)
            self._fuse(Projections(key, ((name, rows),), one.width, rotated=int(rotated), orders=orders))
        pairs = self.shape.head_dim // 2 if rotated else 0
        return Part(f"{name}.weight" if coded else key, coded, rows, one.width, pairs, one.order(i))

    def _scales_of(self, key: str, parts: Sequence[tuple[str, int]], width: int, rotated: int) -> None:
        """Allocate the scales of projections that are fused, and note the row of the scales of each of their rows, in
        the order that `_fuse` gives them."""
        half, start, of_rows = self.shape.head_dim // 2, 0, list[Tensor]()
        lines = sum(scales_shape((n, width))[0] for _, n in parts)
        whole = self._new(f"{key}.scales", (lines, scales_shape((1, width))[1]), dtype=torch.float32)
        for i, (name, n) in enumerate(parts):
            shape = scales_shape((n, width))
            into = whole[start : start + shape[0]]
            self.destinations[f"{name}.weight{SCALES}"] = Destination(shape, into, shape, torch.float32)
            of_row = start + _lines(n, self.device)
            of_rows.append(interleaved(of_row, half) if i < rotated else of_row)
            start += shape[0]
        self.tensors[f"{key}.scale_rows"] = torch.cat(of_rows)

    def _each(self, key: str, shape: tuple[int, ...], name: str) -> None:
        """Allocate the weights of one product [rows, width] for each expert; `shape` is [experts, rows, width]."""
        if self.blocks:
            self._own(f"{key}.scales", scales_shape(shape), name + SCALES, torch.float32)
        if self.layout is None:
            return self._own(key, shape, name, VALUES if self.blocks else None)
        experts, rows, width = shape
        made = [self.layout.empty(rows, width) for _ in range(experts)]
        self.products |= {f"{key}.{i}": one for i, one in enumerate(made)}
        pack = partial(_fill_each, products=made)
        self.destinations[name] = Destination(shape, made[0].memory, shape, self.dtype, pack=pack)

    def _own(self, key: str, shape: tuple[int, ...], name: str, dtype: torch.dtype | None = None) -> None:
        """Allocate a tensor that is filled by a single HF tensor, or keep that tensor itself."""
        if name in self.shared:
            self.adopted.add(key)
            keep, nothing = partial(self.tensors.__setitem__, key), torch.empty(0)
            self.destinations[name] = Destination(shape, nothing, shape, self.dtype, pack=keep)
            return
        self.destinations[name] = Destination(shape, self._new(key, shape, dtype=dtype), shape, dtype or self.dtype)

    def _new(self, key: str, shape: tuple[int, ...], norm: bool = False, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate a tensor in `dtype`; None: in the dtype of products. Norms are float32 with `exact_norms`, where 1
        is added to them, and on a CPU, for its kernels."""
        exact = norm and (self.exact_norms or bool(self.shape.arch.norm_offset) or self.device.type == "cpu")
        kept = torch.float32 if exact else dtype or self.compute_dtype
        self.tensors[key] = torch.empty(shape, dtype=kept, device=self.device)
        return self.tensors[key]


def _lines(rows: int, device: torch.device) -> Tensor:
    """Return for each row of a weight the row of the scales of its blocks, int32 [rows]."""
    return torch.arange(rows, dtype=torch.int32, device=device) // FP8_BLOCK


def _fill_each(weight: Tensor, products: list[FilledLinear]) -> None:
    """Write each expert's weights of weight [experts, N, K] into its product."""
    for one, into in zip(weight, products, strict=True):
        into.fill(one)


def _tied_head(storage: Storage) -> FilledLinear | None:
    """Return the head of tied embeddings in the layout that is filled, or None if the head reads the embeddings
    themselves."""
    if not storage.shape.tied or storage.layout is None or "embed" in storage.adopted:
        return None
    head = storage.layout.empty(storage.shape.vocab, storage.shape.hidden)
    head.fill(storage.tensors["embed"])
    return head


def _float32_head(storage: Storage, ops: NativeOps) -> Callable[[Tensor], Tensor] | None:
    """Return the head that multiplies in float32, or None if the operations have no such product. It reads the received
    tensor and keeps no copy, since that tensor is overwritten by later versions."""
    if ops.float32_linear is None:
        return None
    return partial(ops.float32_linear, weight=storage.tensors["embed" if storage.shape.tied else "head.weight"])


def _head_in_rows(storage: Storage, ops: NativeOps) -> Linear | None:
    """Return the head that reads the tensor of the trainer, None if that was not kept."""
    key = "embed" if storage.shape.tied else "head.weight"
    return ops.products.in_rows(storage.tensors[key]) if key in storage.adopted else None


class Maker:
    """Makes the products of a version from a filled storage. Tensors that change their layout are removed from the
    storage one by one."""

    def __init__(self, storage: Storage, ops: NativeOps, codes: CodesReader | None) -> None:
        """codes: those that were read beside the storage"""
        self.linears = list[Linear]()
        self._storage, self._ops, self._tensors, self._codes = storage, ops, storage.tensors, codes
        self._take = self._tensors.__getitem__ if ops.products.keeps else self._tensors.pop

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Return the product with a weight [N, K]."""
        return self._made(self._ops.products.make(weight, bias))

    def named(self, key: str) -> Linear:
        """Return the product of fused projections."""
        bias, scales = self._tensors.get(f"{key}.bias"), self._tensors.get(f"{key}.scales")
        if scales is not None:
            return self._blocks(self._tensors[f"{key}.weight"], scales, self._tensors[f"{key}.scale_rows"], bias)
        if (parts := self._storage.apart.get(key)) is not None:
            return self._made(RowsProduct([(self._rows(part), part.rows) for part in parts], bias))
        made = self._storage.products.get(key)
        if made is None:
            return self.linear(self._take(f"{key}.weight"), bias)
        made.bias = bias
        return self._made(made)

    def _rows(self, part: Part) -> WeightRows:
        if not part.coded:
            return PlainRows(self.named(part.key))
        assert self._codes is not None
        return CodedRows(self._ops.quantised_linear, self._codes.weight(part.key), part.pairs, part.order)

    def mlp(self, i: int) -> FeedForward | Experts:
        """Return the feed-forward block of layer i."""
        s, ops = self._storage.shape, self._ops
        if not s.experts[i]:
            return FeedForward(self.named(f"{i}.up"), self.named(f"{i}.down"), s.activation, ops.gated)
        (ups, up), (downs, down) = self._each(f"{i}.up", s.experts[i]), self._each(f"{i}.down", s.experts[i])
        each = tuple(FeedForward(a, b, s.activation, ops.gated) for a, b in zip(ups, downs, strict=True))
        stacked = (up, down) if up is not None and down is not None and ops.products.keeps else None
        given = each, s.chosen_experts, s.normalised_experts, stacked
        return Experts(self.named(f"{i}.router"), *given, self._shared(f"{i}.shared_") if s.shared_ffn else None)

    def _shared(self, key: str) -> SharedExpert:
        up, down, gate = (self.named(key + name) for name in ("up", "down", "gate"))
        return SharedExpert(FeedForward(up, down, self._storage.shape.activation, self._ops.gated), gate)

    def delta_net(self, i: int) -> DeltaNet | None:
        """Return the delta net of layer i; None: it is attention."""
        sizes, t = self._storage.shape.delta, self._tensors
        if sizes is None or self._storage.shape.attends[i]:
            return None
        taps, decays, steps, norm = (t[f"{i}.{name}"] for name in ("conv", "decays", "steps", "gated_norm"))
        return DeltaNet(sizes, taps, decays, steps, norm, self._storage.shape.eps, self._ops.delta_step)

    def _each(self, key: str, experts: int) -> tuple[list[Linear], Stacked | None]:
        """Return the products of each expert, and their weights as one tensor if they were received as one."""
        if self._storage.layout is not None:
            return [self.named(f"{key}.{e}") for e in range(experts)], None
        weights, scales = self._take(key), self._tensors.get(f"{key}.scales")
        if scales is None:
            return [self.linear(one) for one in weights], Stacked(weights, None)
        lines = _lines(weights.shape[1], weights.device)
        every = zip(weights, scales, strict=True)
        return [self._blocks(one, scale, lines, None) for one, scale in every], Stacked(weights, scales)

    def _blocks(self, values: Tensor, scales: Tensor, scale_rows: Tensor, bias: Tensor | None) -> Linear:
        assert self._ops.block_linear is not None, "a storage of blocks is for engines that have their product"
        return self._made(Blocks(self._ops.block_linear, values, scales, scale_rows, bias))

    def _made(self, product: Linear) -> Linear:
        self.linears.append(product)
        return product


def weights_of(storage: Storage, ops: NativeOps, codes: CodesReader | None = None) -> Weights:
    """Make the weights for the forward pass from a filled storage, and the codes that were read beside it."""
    t, s, layout = storage.tensors, storage.shape, ops.products
    params = storage.params()  # before tensors are removed
    writable = layout.keeps or storage.layout is not None
    if not writable:
        storage.destinations.clear()  # there are views of removed tensors
    make = Maker(storage, ops, codes)
    layers = tuple(
        Layer(
            norm=storage.norm(f"{i}.norm", ops),
            qkv=make.named(f"{i}.qkv"),
            qk_norm=t.get(f"{i}.qk_norm"),
            out=make.named(f"{i}.out"),
            out_norm=storage.norm(f"{i}.out_norm", ops) if s.arch.gemma else None,
            mlp_norm=storage.norm(f"{i}.mlp_norm", ops),
            mlp=make.mlp(i),
            mlp_out_norm=storage.norm(f"{i}.mlp_out_norm", ops) if s.arch.gemma else None,
            window=s.windows[i],
            rope=s.ropes[i],
            kv=sum(same == s.attends[i] for same in s.attends[:i]),
            delta=make.delta_net(i),
        )
        for i in range(s.layers)
    )
    tied_head = _tied_head(storage)
    head = _float32_head(storage, ops) or _head_in_rows(storage, ops) or tied_head
    head = head or (make.linear(t["embed"]) if s.tied else make.named("head"))
    whole = {key for key in t if layout.keeps or key in ("embed", "head.weight")} - storage.adopted
    kept = sum(t[key].nbytes for key in whole)
    kept += 0 if tied_head is None else tied_head.nbytes
    kept += sum(tensor.nbytes for tensor in storage.seeing.values())
    kept += 0 if codes is None else codes.copied_bytes
    return Weights(
        joined=None if storage.apart else join_layers(layers, s, layout),
        tied_head=tied_head,
        destinations=storage.destinations,
        reloads=writable and not storage.apart,  # codes are read anew
        embed=t["embed"],
        embed_scale=float(torch.tensor(s.embed_scale).to(storage.compute_dtype)),
        layers=layers,
        norm=storage.norm("norm", ops),
        head=head,
        logit_cap=s.logit_cap,
        tensors=tuple(t.values()) if layout.keeps and not storage.apart else (),
        params=params,
        nbytes=kept + sum(one.nbytes for one in make.linears),
        tower=storage.seeing,
        wide_residual=layout.wide_residual,
    )


def join_layers(layers: tuple[Layer, ...], s: Shape, layout: Products) -> Layers | None:
    """Return the function that computes all layers in one call, or None if this layout has none, or the model has
    experts, gates or delta nets."""
    parts = []
    if s.arch.gated or s.delta is not None:
        return None
    for layer in layers:
        if not isinstance(layer.mlp, FeedForward):
            return None
        products = {"qkv": layer.qkv, "out": layer.out, "up": layer.mlp.up, "down": layer.mlp.down}
        norms = {"norm": layer.norm, "out_norm": layer.out_norm}
        norms |= {"mlp_norm": layer.mlp_norm, "mlp_out_norm": layer.mlp_out_norm}
        read = {name: None if norm is None else norm.weight for name, norm in norms.items()}
        parts.append(LayerParts(products, {"qk_norm": layer.qk_norm, **read}, layer.window, layer.rope))
    sizes = (s.hidden, s.ffn, s.heads, s.kv_heads, s.head_dim, s.activation)
    return layout.joined(parts, DecoderSizes(*sizes, s.eps, s.query_scale, s.attention_cap))
