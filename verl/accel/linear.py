"""The matrix products of a rollout: layouts of their weights, behind one protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from verl.accel.operations import Call


class Layers(Protocol):
    """A function that computes all layers of a decoder in one call."""

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        slots: Tensor | None,
        turns: Tensor,
        kv: Tensor,
        lo: int,
        sets: Sequence[LowRankRows] = (),
    ) -> Tensor:
        """Compute x [n, hidden] float32 in place, and return it. positions [n] · slots [n] or None · turns complex64
        [kinds, positions, D/2] · kv [layers, 2, slots, K, capacity, D] · sets: rows to which factors are added. Row i
        uses slot lo + i, or lo + slots[i]."""
        ...

    def low_ranks(self, factors: LowRankParts) -> object:
        """Return the factors of a LoRA set in the layout that this function reads."""
        ...


@dataclass(frozen=True, slots=True)
class LowRankParts:
    """The factors of a LoRA set in all layers of a decoder."""

    layers: Sequence[Mapping[str, tuple[Linear, Sequence[Linear | None]]]]
    """For each layer, by product (`qkv`, `out`, `up`, `down`): the product with A, which has `rank` rows for each of
    its projections, and that with B [out, rank] of each projection, None for one without factors."""
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class LowRankRows:
    """The rows first .. end of a call, which have these factors."""

    first: int
    end: int
    factors: object
    """A result of `Layers.low_ranks`."""


class Linear(Protocol):
    """A matrix product y = x W^T + b for x [n, K], W [N, K]."""

    bias: Tensor | None
    nbytes: int
    """Bytes of its own, besides the tensors from which it was made."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return y [n, N]."""
        ...

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual + y, in place where the kernel allows; `residual` [n, N] has no other reader."""
        ...


class FilledLinear(Linear, Protocol):
    """A product that is created without weights; they are written in the kernel's layout when they arrive."""

    params: int
    """The number of weights."""
    memory: Tensor
    """The tensor into which the weights are written."""

    def fill(self, weight: Tensor, first: int = 0, pairs: int = 0) -> None:
        """Write a weight [n, K], float32 or in the dtype of `memory`, as the rows first .. first + n. pairs: reorder
        the D/2 pairs of each head so that the two halves are neighbours, as RoPE pairs them; 0: keep the order of
        rows."""
        ...


class Filling(NamedTuple):
    """The arguments of a call of `FilledLinear.fill`, and the product."""

    into: FilledLinear
    weight: Tensor
    first: int = 0
    pairs: int = 0


@dataclass(frozen=True, slots=True)
class LayerParts:
    """A layer of a decoder, for `Products.joined`."""

    products: Mapping[str, Linear]
    """The products `qkv`, `out`, `up` and `down`."""
    tensors: Mapping[str, Tensor | None]
    """The float32 norms [hidden] `norm` and `mlp_norm`, and, or None, `out_norm`, `mlp_out_norm` and `qk_norm`."""
    window: int
    """Tokens of the sliding window; 0: none."""
    rope: int
    """The kind of RoPE: an index of `turns`."""


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """Facts that all layers of a decoder share."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    activation: str
    """silu or gelu_tanh."""
    eps: float
    scale: float
    """Factor of the scores."""
    cap: float
    """Scores are cap tanh(score / cap); 0: no cap."""


class Products(Protocol):
    """A layout of weights, with the products that use it."""

    exact_rows: bool
    """The bits of a row of a result do not depend on the other rows."""
    keeps: bool
    """The product reads the tensors from which it was made; otherwise they can be freed."""
    fills: bool
    """`empty` is supported."""

    @property
    def wide_residual(self) -> bool:
        """`add_to` adds to a residual in float32, which the norms of the kernels read, whatever the dtype of x is."""
        ...

    def make(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Return the product with a weight [N, K]."""
        ...

    def in_rows(self, weight: Tensor) -> Linear:
        """Return the product with a weight [N, K] that is read where it is, without a layout of its own."""
        ...

    def empty(self, rows: int, depth: int) -> FilledLinear:
        """Return a product of N = rows and K = depth that is filled later."""
        ...

    def fill_each(self, fillings: Sequence[Filling]) -> None:
        """Fill products that `empty` returned, faster than one by one."""
        ...

    def joined(self, layers: Sequence[LayerParts], sizes: DecoderSizes) -> Layers | None:
        """Return the function that computes all layers in one call, or None if the layout has no such kernel."""
        ...


class Plain:
    """torch's own product, over a view of the weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.bias, self.transposed, self.nbytes = bias, weight.t(), 0

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.transposed) if self.bias is None else torch.addmm(self.bias, x, self.transposed)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return (residual if self.bias is None else residual.add_(self.bias)).addmm_(x, self.transposed)


class Blocks:
    """A product with a weight in blocks of 8 bits, by the operation `block_linear`, over views of its values [N, K],
    scales [R, ceil(K / 128)] and the row of the scales of each of its rows [N]."""

    nbytes = 0

    def __init__(self, product: Call, values: Tensor, scales: Tensor, scale_rows: Tensor, bias: Tensor | None) -> None:
        self.product, self.bias, self.weight = product, bias, (values, scales, scale_rows)

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self.product(x, *self.weight, self.bias)
        return out

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self.product(x, *self.weight, self.bias, residual)
        return out


@dataclass(frozen=True, slots=True)
class SingleProducts:
    """Products that are made one by one from whole tensors."""

    make: Callable[[Tensor, Tensor | None], Linear]
    keeps: bool
    exact_rows: bool = False
    fills: bool = False
    wide_residual: bool = False

    def in_rows(self, weight: Tensor) -> Linear:
        return Plain(weight, None)

    def empty(self, rows: int, depth: int) -> FilledLinear:
        raise TypeError("this layout is made from whole tensors")

    def fill_each(self, fillings: Sequence[Filling]) -> None:
        assert not fillings, "this layout is made from whole tensors"

    def joined(self, layers: Sequence[LayerParts], sizes: DecoderSizes) -> Layers | None:
        return None
