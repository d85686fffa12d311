"""The products of a decoder: which weights of a Hugging Face model each is made of, and in which order of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from verl.parameter_set import DOWN, GATE_UP
from verl.rollout.native.architecture import DeltaSizes, Shape


@dataclass(frozen=True, slots=True)
class Projections:
    """Linear layers of a model with one input, which are one product here."""

    key: str
    """The name of the product."""
    parts: tuple[tuple[str, int], ...]
    """The HF name and the number of rows of each, one below the other."""
    width: int
    bias: bool = False
    rotated: int = 0
    """The rows of the first ones are RoPE pairs, which are interleaved."""
    orders: tuple[Tensor | None, ...] = ()
    """For each the order in which its rows are written; None: in their own."""

    def order(self, part: int) -> Tensor | None:
        """Return the order in which the rows of a part are written; None: in their own, or as RoPE pairs."""
        return self.orders[part] if self.orders else None


def projections(s: Shape, layer: int) -> Iterator[Projections]:
    """Yield the products of a decoder layer, in the order of its computation, without those of experts."""
    key, at = f"{layer}.", f"{s.prefix}layers.{layer}."
    if not s.attends[layer]:
        assert s.delta is not None
        yield _into_delta_net(s, s.delta, key, at + "linear_attn.")
        yield Projections(key + "out", ((at + "linear_attn.out_proj", s.hidden),), s.delta.values)
    else:
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        parts = (at + "self_attn.q_proj", 2 * q if s.arch.gated else q), (at + "self_attn.k_proj", kv)
        orders = gated_orders(s.heads, s.kv_heads, s.head_dim, s.rotated) if s.arch.gated else ()
        pairs = 0 if orders else 2
        three = (*parts, (at + "self_attn.v_proj", kv))
        yield Projections(key + "qkv", three, s.hidden, s.qkv_bias, rotated=pairs, orders=orders)
        yield Projections(key + "out", ((at + "self_attn.o_proj", s.hidden),), q, s.out_bias)
    if s.experts[layer]:
        yield Projections(key + "router", ((at + "mlp.gate", s.experts[layer]),), s.hidden)
        if s.shared_ffn:
            yield from _fed_forward(key + "shared_", at + "mlp.shared_expert.", s.hidden, s.shared_ffn, bias=False)
            yield Projections(key + "shared_gate", ((at + "mlp.shared_expert_gate", 1),), s.hidden)
        return
    yield from _fed_forward(key, at + "mlp.", s.hidden, s.ffn, bias=s.mlp_bias)


def weights_of_layer(s: Shape) -> int:
    """Return the number of weights that a token is multiplied with in an average layer: of experts, the chosen ones."""
    found = sum(rows * one.width for i in range(s.layers) for one in projections(s, i) for _, rows in one.parts)
    return (found + sum(s.chosen_experts * 3 * s.expert_ffn * s.hidden for n in s.experts if n)) // s.layers


def _fed_forward(key: str, at: str, hidden: int, ffn: int, *, bias: bool) -> Iterator[Projections]:
    """Yield the two products of a feed-forward block."""
    yield Projections(key + "up", ((at + "gate_proj", ffn), (at + "up_proj", ffn)), hidden, bias)
    yield Projections(key + "down", ((at + "down_proj", hidden),), ffn, bias)


def _into_delta_net(s: Shape, sizes: DeltaSizes, key: str, at: str) -> Projections:
    """Return the product of queries, keys, values, gates, rates and decays of a delta net, in this order."""
    both = sizes.channels + sizes.values, 2 * sizes.heads
    if s.arch.delta == "by key head":
        parts = (at + "in_proj_qkvz", both[0]), (at + "in_proj_ba", both[1])
        return Projections(key + "qkv", parts, s.hidden, orders=key_head_orders(sizes))
    names = ("qkv", sizes.channels), ("z", sizes.values), ("b", sizes.heads), ("a", sizes.heads)
    return Projections(key + "qkv", tuple((f"{at}in_proj_{name}", rows) for name, rows in names), s.hidden)


@cache
def gated_orders(heads: int, kv_heads: int, dim: int, rotated: int) -> tuple[Tensor, Tensor, None]:
    """Return the orders of the rows of queries, keys and values. Each head of HF's queries has its gate after it; here
    all queries are before all gates. Of a head the first `rotated` rows are RoPE pairs, which are interleaved."""
    one = head_order(dim, rotated)
    query = 2 * dim * torch.arange(heads)[:, None]
    orders = torch.cat([(query + one).flatten(), (query + dim + torch.arange(dim)).flatten()])
    return orders, (dim * torch.arange(kv_heads)[:, None] + one).flatten(), None


@cache
def head_order(dim: int, rotated: int) -> Tensor:
    """Return the order of the rows of a head: its RoPE pairs as neighbours, then what is not rotated."""
    return torch.cat([torch.arange(rotated).view(2, -1).t().flatten(), torch.arange(rotated, dim)])


@cache
def key_head_orders(sizes: DeltaSizes) -> tuple[Tensor, Tensor]:
    """Return the orders of the rows of two projections that have all parts of one key head after those of another:
    queries, keys, values and gates, then rates and decays."""
    each = sizes.heads // sizes.key_heads
    qkvz = sizes.key_dim, sizes.key_dim, each * sizes.value_dim, each * sizes.value_dim

    def order(widths: tuple[int, ...]) -> Tensor:
        rows = torch.arange(sizes.key_heads * sum(widths)).view(sizes.key_heads, -1)
        return torch.cat([part.flatten() for part in rows.split(widths, 1)])

    return order(qkvz), order((each, each))


def input_norms(s: Shape, layer: int) -> tuple[str, str]:
    """Return the names of the norms on the input of attention and of the feed-forward block."""
    at = f"{s.prefix}layers.{layer}."
    return at + "input_layernorm", at + ("pre_feedforward_layernorm" if s.arch.gemma else "post_attention_layernorm")


def expert_tensors(s: Shape, layer: int) -> Iterator[tuple[str, str, tuple[int, int, int]]]:
    """Yield (HF name, name of the products, shape [experts, rows, width]) of the tensors of a layer's experts."""
    if experts := s.experts[layer]:
        at = f"{s.prefix}layers.{layer}.mlp.experts."
        yield at + GATE_UP, f"{layer}.up", (experts, 2 * s.expert_ffn, s.hidden)
        yield at + DOWN, f"{layer}.down", (experts, s.hidden, s.expert_ffn)


def as_halves(pairs: Tensor) -> Tensor:
    """Return the view [heads, 2, D/2, ...] of pairs [heads, D/2, 2, ...], in which HF stores a head: it rotates (i, i +
    D/2). As neighbours a pair is one complex number; query and key are permuted alike, so dot products are
    unchanged."""
    return pairs.transpose(1, 2)


def interleaved(rows: Tensor, half: int) -> Tensor:
    """Return rows [n, ...] of a projection, in the order of HF, in the order of the fused weights: the two halves of
    each head as pairs. half: D/2."""
    return rows.unflatten(0, (-1, 2, half)).transpose(1, 2).flatten(0, 2)
