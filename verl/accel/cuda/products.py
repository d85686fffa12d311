"""Matrix products in which the result of a row depends on that row alone: one tiling and one order of additions for any
number of rows. Needs Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.accel.linear import SingleProducts

BLOCK_ROWS, BLOCK_OUT, BLOCK_BYTES = 64, 64, 128  # of a block: rows, outputs, and bytes of each row that is read


@triton.jit(do_not_specialize=["M"])
def _exact_product(
    x,
    weight,
    bias,
    residual,
    out,
    M,
    N,
    C,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
):
    """The kernel of `exact_product`: ROWS rows times COLUMNS outputs, added up over C in steps of DEPTH."""
    n, m = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    c, rows = tl.arange(0, DEPTH), m.to(tl.int64)[:, None]
    product = tl.zeros([ROWS, COLUMNS], tl.float32)
    for depth in range(0, C, DEPTH):
        inside = depth + c[None, :] < C
        left = tl.load(x + rows * C + depth + c[None, :], mask=(m[:, None] < M) & inside, other=0.0)
        at = n.to(tl.int64)[:, None] * C + depth + c[None, :]
        right = tl.load(weight + at, mask=(n[:, None] < N) & inside, other=0.0)
        product += tl.dot(left, tl.trans(right), input_precision="ieee")
    if BIASED:
        product += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    to, written = rows * N + n[None, :], (m[:, None] < M) & (n[None, :] < N)
    if ADDED:
        product += tl.load(residual + to, mask=written, other=0.0).to(tl.float32)
    tl.store(out + to, product.to(out.dtype.element_ty), mask=written)


def exact_product(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """Return x [M, C] times weight [N, C] transposed, plus bias [N], plus residual [M, N], which is overwritten by the
    result; None: nothing is added."""
    out = x.new_empty(len(x), len(weight)) if residual is None else residual
    _launch(x, weight, bias, residual, out)
    return out


def float32_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [M, C] times weight [N, C] transposed in float32. Products of bfloat16 numbers are exact in it."""
    out = x.new_empty(len(x), len(weight), dtype=torch.float32)
    _launch(x, weight, None, None, out)
    return out


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> None:
    """Launch the kernel of `exact_product`, which writes `out`."""
    (rows, depth), width = x.shape, len(weight)
    if rows:
        _exact_product[triton.cdiv(width, BLOCK_OUT), triton.cdiv(rows, BLOCK_ROWS)](
            x.contiguous(),
            weight,
            bias,
            residual,
            out,
            rows,
            width,
            depth,
            ROWS=BLOCK_ROWS,
            COLUMNS=BLOCK_OUT,
            DEPTH=BLOCK_BYTES // x.element_size(),
            BIASED=bias is not None,
            ADDED=residual is not None,
            num_warps=4,
            num_stages=3,
        )


class Exact:
    """A product that is computed by `exact_product`, over a view of the weight [N, C]."""

    nbytes = 0

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return exact_product(x, self.weight, self.bias, None)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return exact_product(x, self.weight, self.bias, residual)


def exact_products() -> SingleProducts:
    """Return the layout of these products: the tensors as they are."""
    return SingleProducts(Exact, keeps=True, exact_rows=True)
