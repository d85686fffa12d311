"""Products with weights in NF4: codes are read in place of values, and looked up tile by tile. Needs Triton."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.accel.plain import placed, plain_quantised_back, plain_quantised_linear
from verl.nn.quant import BLOCK, NESTED_BLOCK, NF4_LEVELS, Int8, Nf4, QuantisedTensor

FEW_ROWS, MANY_ROWS, COLUMNS = 16, 64, 64


@triton.jit
def _scales(scales, nested, values, offset, block, inside, NESTED: tl.constexpr, DOUBLE: tl.constexpr):
    """Return the scales of blocks. DOUBLE: they are codes of `values`, in blocks of NESTED."""
    found = tl.load(scales + block, mask=inside, other=0)
    if DOUBLE:
        of_block = tl.load(nested + block // NESTED, mask=inside, other=0.0)
        found = tl.load(values + found.to(tl.int32), mask=inside, other=0.0) * of_block + offset
    return found


@triton.jit
def _tile(
    codes,
    scales,
    nested,
    values,
    levels,
    offset,
    n,
    k,
    N,
    K,
    NESTED: tl.constexpr,
    DOUBLE: tl.constexpr,
    WHOLE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Return the values [rows n, columns k] of a weight [N, K], 0 outside. WHOLE: the columns are one block of each
    row."""
    inside = (n[:, None] < N) & (k[None, :] < K)
    at = n.to(tl.int64)[:, None] * K + k[None, :]
    both = tl.load(codes + at // 2, mask=inside, other=0).to(tl.int32)
    found = tl.load(levels + tl.where(at % 2 == 0, both >> 4, both & 15))
    if WHOLE:
        first = (n.to(tl.int64) * K + tl.min(k, 0)) // DEPTH
        scale = _scales(scales, nested, values, offset, first, n < N, NESTED, DOUBLE)[:, None]
    else:
        scale = _scales(scales, nested, values, offset, at // DEPTH, inside, NESTED, DOUBLE)
    return tl.where(inside, found * scale, 0.0)


@triton.jit(do_not_specialize=["M"])
def _nf4_product(
    x,
    bias,
    out,
    codes,
    scales,
    nested,
    values,
    levels,
    offset,
    M,
    N,
    K,
    ROWS: tl.constexpr,
    SIDE: tl.constexpr,
    DEPTH: tl.constexpr,
    NESTED: tl.constexpr,
    DOUBLE: tl.constexpr,
    WHOLE: tl.constexpr,
    BIASED: tl.constexpr,
    BACK: tl.constexpr,
):
    """The kernel of both products: ROWS rows of x [M, K] W^T [M, N], or with BACK of x [M, N] W [M, K], times SIDE
    rows, or with BACK DEPTH columns, of W."""
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    rows = m.to(tl.int64)[:, None]
    if BACK:
        k = tl.program_id(0) * DEPTH + tl.arange(0, DEPTH)
        product = tl.zeros([ROWS, DEPTH], tl.float32)
        for first in range(0, N, SIDE):
            n = first + tl.arange(0, SIDE)
            tile = _tile(codes, scales, nested, values, levels, offset, n, k, N, K, NESTED, DOUBLE, WHOLE, DEPTH)
            left = tl.load(x + rows * N + n[None, :], mask=(m[:, None] < M) & (n[None, :] < N), other=0.0)
            product += tl.dot(left, tile.to(x.dtype.element_ty), input_precision="ieee")
        to, written = rows * K + k[None, :], (m[:, None] < M) & (k[None, :] < K)
    else:
        n = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
        product = tl.zeros([ROWS, SIDE], tl.float32)
        for first in range(0, K, DEPTH):
            k = first + tl.arange(0, DEPTH)
            tile = _tile(codes, scales, nested, values, levels, offset, n, k, N, K, NESTED, DOUBLE, WHOLE, DEPTH)
            left = tl.load(x + rows * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
            product += tl.dot(left, tl.trans(tile.to(x.dtype.element_ty)), input_precision="ieee")
        if BIASED:
            product += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        to, written = rows * N + n[None, :], (m[:, None] < M) & (n[None, :] < N)
    tl.store(out + to, product.to(out.dtype.element_ty), mask=written)


def nf4_product(
    x: Tensor,
    weight: QuantisedTensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    pairs: int = 0,
    add: bool = False,
) -> Tensor:
    """Return x [M, K] times a quantised weight [N, K] transposed, plus bias [N]. The weight is rounded to the dtype of
    x, and sums are float32. An int8 weight is dequantised tile by tile.

    out, pairs, add: as in `plain_quantised_linear`"""
    if isinstance(weight, Int8):
        return plain_quantised_linear(x, weight, bias, out, pairs=pairs, add=add)
    mine, after = (None, bias) if pairs else (bias, None)  # a bias is of the columns as they are placed
    product = _launch(x, weight, mine, x.new_empty(len(x), weight.shape[0]), back=False)
    return placed(product, after, out, pairs=pairs, add=add)


def nf4_back(dy: Tensor, weight: QuantisedTensor) -> Tensor:
    """Return dy [M, N] times a quantised weight [N, K]."""
    if isinstance(weight, Int8):
        return plain_quantised_back(dy, weight)
    return _launch(dy, weight, None, dy.new_empty(len(dy), weight.shape[1]), back=True)


def _launch(x: Tensor, weight: Nf4, bias: Tensor | None, out: Tensor, *, back: bool) -> Tensor:
    (rows, (width, depth)), nested = (len(x), weight.shape), weight.nested
    if rows:
        tile = FEW_ROWS if rows <= FEW_ROWS else MANY_ROWS
        _nf4_product[triton.cdiv(depth if back else width, COLUMNS), triton.cdiv(rows, tile)](
            x.contiguous(),
            bias,
            out,
            weight.codes,
            weight.absmax,
            None if nested is None else nested.absmax,
            None if nested is None else nested.values,
            _levels(x.device),
            0.0 if nested is None else nested.offset,
            rows,
            width,
            depth,
            ROWS=tile,
            SIDE=COLUMNS,
            DEPTH=BLOCK,
            NESTED=NESTED_BLOCK,
            DOUBLE=nested is not None,
            WHOLE=depth % BLOCK == 0,
            BIASED=bias is not None,
            BACK=back,
            num_warps=4,
        )
    return out


@cache
def _levels(device: torch.device) -> Tensor:
    return torch.tensor(NF4_LEVELS, dtype=torch.float32, device=device)
