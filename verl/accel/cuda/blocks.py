"""Matrix products with weights in blocks of 8 bits (`nn/fp8.py`): the values are widened to the dtype of the
activations, which is exact, and the sum over a block is multiplied by its scale in float32.

Needs Triton, which widens E4M3 on cards of compute capability 8.9 and above.
"""

import triton
import triton.language as tl
from torch import Tensor

from verl.accel.cuda.attention import processors_of
from verl.wire import FP8_BLOCK

FEW_ROWS, MANY_ROWS, BLOCK_OUT = 16, 64, 64
LEAST_OUT = 16  # outputs of a program at least


@triton.jit(do_not_specialize=["M"])
def _block_product(
    x,
    values,
    scales,
    scale_rows,
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
    """The kernel of `block_product`: ROWS rows times COLUMNS outputs, added up over C block by block, of DEPTH each."""
    n, m = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    c, rows, within = tl.arange(0, DEPTH), m.to(tl.int64)[:, None], n < N
    blocks = tl.cdiv(C, DEPTH)
    scale_at = scales + tl.load(scale_rows + n, mask=within, other=0) * blocks
    product = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(0, blocks):
        depth = block * DEPTH + c[None, :]
        left = tl.load(x + rows * C + depth, mask=(m[:, None] < M) & (depth < C), other=0.0)
        at = n.to(tl.int64)[:, None] * C + depth
        right = tl.load(values + at, mask=within[:, None] & (depth < C), other=0.0).to(x.dtype.element_ty)
        scale = tl.load(scale_at + block, mask=within, other=0.0)
        product += tl.dot(left, tl.trans(right), input_precision="ieee") * scale[None, :]
    if BIASED:
        product += tl.load(bias + n, mask=within, other=0.0).to(tl.float32)[None, :]
    to, written = rows * N + n[None, :], (m[:, None] < M) & within[None, :]
    if ADDED:
        product += tl.load(residual + to, mask=written, other=0.0).to(tl.float32)
    tl.store(out + to, product.to(out.dtype.element_ty), mask=written)


def tile_of(rows: int, width: int, on: int, exact_rows: bool) -> tuple[int, int]:
    """Return the rows and the outputs of a program, so that few rows are divided among the `on` processors of a card.
    With `exact_rows` they do not depend on the number of rows."""
    if exact_rows or rows > FEW_ROWS:
        return MANY_ROWS, BLOCK_OUT
    out = BLOCK_OUT
    while out > LEAST_OUT and triton.cdiv(width, out) < 2 * on:
        out //= 2
    return FEW_ROWS, out


def block_product(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    scale_rows: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    exact_rows: bool = False,
) -> Tensor:
    """Return x [M, C] times the weight [N, C] transposed, plus bias [N], plus residual [M, N], which is overwritten by
    the result; None: nothing is added. Row n of the weight is values[n] times the scales [R, ceil(C / 128)] of their
    blocks in row scale_rows[n]. With `exact_rows` the bits of a row of the result depend on that row alone."""
    (rows, depth), width = x.shape, len(values)
    out = x.new_empty(rows, width) if residual is None else residual
    if rows:
        tile, columns = tile_of(rows, width, processors_of(x.device), exact_rows)
        _block_product[triton.cdiv(width, columns), triton.cdiv(rows, tile)](
            x.contiguous(),
            values,
            scales,
            scale_rows,
            bias,
            residual,
            out,
            rows,
            width,
            depth,
            ROWS=tile,
            COLUMNS=columns,
            DEPTH=FP8_BLOCK,
            BIASED=bias is not None,
            ADDED=residual is not None,
            num_warps=4,
            num_stages=3,
        )
    return out
