"""Layouts of weights for a CPU: panels for the compiled kernels, and oneDNN's.

In float32, and in bf16 on AMX, the panels are the fastest at every number of rows. oneDNN's layout is for bf16 on other
hardware, and for AVX-512 without a C compiler. The machine decides, never a timing, so that a run repeats bitwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.accel.cpu.kernels import ACTIVATIONS, Kernels, LayerPointers, LowRankPointers, SetRowsPointers, Stack
from verl.accel.cpu.nf4 import rows_linear
from verl.accel.linear import DecoderSizes, Filling, LayerParts, Layers, Linear, LowRankParts, LowRankRows


class Packed:
    """A product in oneDNN's layout. It uses private operations of torch; tests compare them with the plain ones."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        # one packed layout serves every number of rows
        self.bias, self.weight, self.nbytes = bias, torch.ops.mkldnn._reorder_linear_weight(weight, None), weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")


class Panels:
    """A product over panels. The bits of a row of the result do not depend on the other rows."""

    def __init__(self, width: int, depth: int, kernels: Kernels) -> None:
        self.width, self.kernels = width, kernels
        self.memory = kernels.new_panels(width, depth)
        self.nbytes, self.params = self.memory.nbytes, width * depth
        self.bias: Tensor | None = None

    def fill(self, weight: Tensor, first: int = 0, pairs: int = 0) -> None:
        self.kernels.pack(weight, self.memory, first, pairs)

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.linear(x, self.memory, self.bias, x.new_empty(len(x), self.width), add=False)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self.kernels.linear(x, self.memory, self.bias, residual, add=True)


class InRows:
    """A product over a weight as it is in memory. The bits of a row of the result do not depend on the other rows."""

    nbytes = 0

    def __init__(self, weight: Tensor, kernels: Kernels) -> None:
        self.weight, self.kernels = weight, kernels
        self.bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(len(x), len(self.weight))
        return rows_linear(x, self.weight, self.bias, out, kernels=self.kernels, add=False)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return rows_linear(x, self.weight, self.bias, residual, kernels=self.kernels, add=True)


@dataclass(frozen=True, slots=True)
class PanelProducts:
    """The layout of panels: single products, and all layers of a decoder in one call."""

    kernels: Kernels
    exact_rows: bool = True
    keeps: bool = False
    fills: bool = True

    @property
    def wide_residual(self) -> bool:
        return self.kernels.dtype != torch.float32

    def make(self, weight: Tensor, bias: Tensor | None) -> Linear:
        made = self.empty(*weight.shape)
        made.fill(weight)
        made.bias = bias
        return made

    def in_rows(self, weight: Tensor) -> Linear:
        return InRows(weight, self.kernels)

    def empty(self, rows: int, depth: int) -> Panels:
        return Panels(rows, depth, self.kernels)

    def fill_each(self, fillings: Sequence[Filling]) -> None:
        if self.kernels.dtype == torch.float32:
            self.kernels.pack_each([(one.weight, one.into.memory, one.first, one.pairs) for one in fillings])
        else:
            for one in fillings:
                one.into.fill(one.weight, one.first, one.pairs)

    def joined(self, layers: Sequence[LayerParts], sizes: DecoderSizes) -> Layers:
        array = (LayerPointers * len(layers))(*map(_pointers, layers))
        s = sizes
        widths = (s.hidden, s.ffn, s.heads, s.kv_heads, s.head_dim, ACTIVATIONS[s.activation])
        return PanelLayers(self.kernels, Stack(array, len(layers), *widths, s.eps, s.scale, s.cap))


class PanelFactors:
    """The factors of a LoRA set as panels."""

    def __init__(self, parts: LowRankParts) -> None:
        self.rank, self.scale, self._kept = parts.rank, parts.scale, list[Tensor]()
        self.layers = (LowRankPointers * len(parts.layers))()
        for layer, products in zip(self.layers, parts.layers, strict=True):
            for name, each in products.items():
                for i, product in enumerate((each[0], *each[1])):
                    if product is not None:
                        assert isinstance(product, Panels), "of the same layout"
                        self._kept.append(product.memory)
                        getattr(layer, name)[i] = product.memory.data_ptr()


@dataclass(frozen=True, slots=True)
class PanelLayers:
    """All layers of a decoder over panels, as one function."""

    kernels: Kernels
    stack: Stack

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
        rows = []
        for one in sets:
            factors = one.factors
            assert isinstance(factors, PanelFactors), "made by `low_ranks`"
            rows.append(SetRowsPointers(factors.layers, one.first, one.end, factors.rank, factors.scale))
        return self.kernels.layers(self.stack, x, positions, slots, turns, kv, lo, rows)

    def low_ranks(self, factors: LowRankParts) -> PanelFactors:
        return PanelFactors(factors)


def _pointers(layer: LayerParts) -> LayerPointers:
    read = dict(layer.tensors)
    assert all(t is None or t.dtype == torch.float32 for t in read.values())
    for name, product in layer.products.items():
        assert isinstance(product, Panels), "of the same layout"
        assert product.bias is None or product.bias.dtype == product.memory.dtype
        read |= {name: product.memory, f"{name}_bias": product.bias}
    assert all(t is None or t.is_contiguous() for t in read.values())
    addresses = {name: None if t is None else t.data_ptr() for name, t in read.items()}
    return LayerPointers(**addresses, window=layer.window, rope=layer.rope)
