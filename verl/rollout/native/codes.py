"""Weights of a frozen base in 4 or 8 bits: their codes arrive as a checkpoint of bitsandbytes has them, and products
compute with them. Codes that the trainer's process shares are kept without a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from verl.accel.linear import Linear
from verl.accel.operations import Call
from verl.config.model_files import quantised_in
from verl.nn.quant import QuantisedTensor, read_quantised
from verl.rollout.base import WeightReader, lasting_of


class CodesReader:
    """The codes in a publish, which are kept aside from its other tensors."""

    def __init__(self, source: WeightReader, device: torch.device) -> None:
        self._lasting, self._device = lasting_of(source), device
        parts = quantised_in(self._lasting)
        self.weights = frozenset(parts)
        """The names of the weights that arrive as codes."""
        self.copied_bytes = 0
        """The bytes of codes and scales that are a copy of this engine's own."""
        self.shared = frozenset(name for name, lasts in self._lasting.items() if lasts and self.weights)
        """The names of the tensors that are the trainer's own beside its codes, and may be kept too."""
        self._names = self.weights.union(*parts.values())
        self._tensors: dict[str, Tensor] = {}

    def rest(self, tensors: Iterator[tuple[str, object]], used: Set[str]) -> Iterator[tuple[str, object]]:
        """Yield the tensors of the publish that are no codes or scales, and keep those. used: the weights of which the
        codes are used; others, as of a vision tower, are dequantised at the end."""
        for name, tensor in tensors:
            if name in self._names:
                assert isinstance(tensor, Tensor), name
                self._tensors[name] = self._kept(name, tensor.detach())
            else:
                yield name, tensor
        for name in sorted(self.weights - used):
            yield name, self.weight(name).dequantised(torch.float32)

    def weight(self, name: str) -> QuantisedTensor:
        """Return a weight, after all tensors were read."""
        return read_quantised(name.removesuffix(".weight"), self._tensors.__getitem__, self._tensors)

    def _kept(self, name: str, tensor: Tensor) -> Tensor:
        if self._lasting[name] and tensor.device == self._device:
            return tensor
        self.copied_bytes += tensor.nbytes
        return tensor.to(self._device, copy=True)


class WeightRows(Protocol):
    """Some rows of the weight of a product."""

    def write(self, x: Tensor, bias: Tensor | None, out: Tensor, *, add: bool) -> None:
        """Write the product of x [n, K] with these rows, plus bias, into out [n, rows], or add it."""
        ...


@dataclass(frozen=True, slots=True)
class CodedRows:
    """Rows of a quantised weight, by the operation `quantised_linear`. pairs: as in that operation · order: of the
    rows, if it is another one than theirs."""

    product: Call
    weight: QuantisedTensor
    pairs: int
    order: Tensor | None

    def write(self, x: Tensor, bias: Tensor | None, out: Tensor, *, add: bool) -> None:
        if self.order is not None:
            own = self.product(x, self.weight, None, None).index_select(1, self.order.to(x.device))
            own = own if bias is None else own.add_(bias)
            out.add_(own) if add else out.copy_(own)
            return
        self.product(x, self.weight, bias, out, pairs=self.pairs, add=add)


@dataclass(frozen=True, slots=True)
class PlainRows:
    """Rows of a weight that is not quantised."""

    linear: Linear

    def write(self, x: Tensor, bias: Tensor | None, out: Tensor, *, add: bool) -> None:
        product = self.linear(x) if bias is None else self.linear(x).add_(bias)
        out.add_(product) if add else out.copy_(product)


class RowsProduct:
    """A product over several weights, one below the other (`Linear`)."""

    nbytes = 0

    def __init__(self, parts: Sequence[tuple[WeightRows, int]], bias: Tensor | None) -> None:
        """parts: the weights, and the number of rows of each"""
        self.bias, self._parts, self._width = bias, parts, sum(rows for _, rows in parts)

    def __call__(self, x: Tensor) -> Tensor:
        return self._write(x, x.new_empty(len(x), self._width), add=False)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._write(x, residual, add=True)

    def _write(self, x: Tensor, out: Tensor, *, add: bool) -> Tensor:
        start = 0
        for part, rows in self._parts:
            end = start + rows
            part.write(x, None if self.bias is None else self.bias[start:end], out[:, start:end], add=add)
            start = end
        return out
