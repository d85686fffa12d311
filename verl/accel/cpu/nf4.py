"""Products with weights in NF4 and int8 by the compiled kernels, float32."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.accel.cpu.kernels import Codes, Kernels
from verl.nn.quant import AT_ONCE, Int8, QuantisedTensor

ROWS_AT_ONCE = 48  # as in nf4.c


def quantised_back(dy: Tensor, weight: QuantisedTensor, *, kernels: Kernels) -> Tensor:
    """Return dy [n, N] times a quantised weight [N, K], which is dequantised a few rows at a time."""
    (rows, depth), pointers = weight.shape, _pointers(weight)
    out, step = dy.new_zeros(len(dy), depth), max(1, AT_ONCE // depth)
    tile = torch.empty(min(step, rows), depth, dtype=torch.float32)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        kernels.functions["nf4_rows"](pointers, tile, first, count, torch.get_num_threads())
        out.addmm_(dy[:, first : first + count], tile[:count])
    return out


def quantised_linear(
    x: Tensor,
    weight: QuantisedTensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    kernels: Kernels,
    pairs: int = 0,
    add: bool = False,
) -> Tensor:
    """Return x [n, K] times a quantised weight [N, K] transposed, plus bias [N]. Codes of NF4 are looked up during the
    product, or for many rows before it, as those of int8 are.

    out, pairs, add: as in `plain_quantised_linear`"""
    out = x.new_empty(len(x), weight.shape[0]) if out is None else out
    return _multiply(x, _pointers(weight), bias, out, kernels=kernels, pairs=pairs, add=add)


def rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, kernels: Kernels, add: bool) -> Tensor:
    """Write x [n, K] W^T + bias into out [n, N], or with `add` add it, and return out. The float32 weight [N, K] is
    read where it is. The bits of a row of the result do not depend on the other rows."""
    assert weight.dtype == torch.float32 and weight.is_contiguous()
    pointers = Codes(weight.data_ptr(), None, None, None, 0.0, *weight.shape, 32)
    return _multiply(x, pointers, bias, out, kernels=kernels, pairs=0, add=add)


def _multiply(
    x: Tensor, weight: Codes, bias: Tensor | None, out: Tensor, *, kernels: Kernels, pairs: int, add: bool
) -> Tensor:
    x = x.contiguous()
    assert x.dtype == out.dtype == torch.float32 and x.shape[1] == weight.depth and out.stride(1) == 1
    assert out.shape == (len(x), weight.width) and (not pairs or weight.width % (2 * pairs) == 0)
    scratch = x.new_empty(min(len(x), ROWS_AT_ONCE), x.shape[1])
    settings = (len(x), out.stride(0), pairs, add, torch.get_num_threads())
    kernels.functions["nf4_linear"](x, weight, bias, out, scratch, *settings)
    return out


def _pointers(weight: QuantisedTensor) -> Codes:
    nested, bits = (None, 8) if isinstance(weight, Int8) else (weight.nested, 4)
    tensors = (weight.codes, weight.absmax, *((None, None) if nested is None else (nested.absmax, nested.values)))
    assert all(t is None or t.is_contiguous() for t in tensors)
    addresses = (None if t is None else t.data_ptr() for t in tensors)
    return Codes(*addresses, 0.0 if nested is None else nested.offset, *weight.shape, bits)
