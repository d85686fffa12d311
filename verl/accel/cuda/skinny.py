"""Matrix products of few rows, whose depth is split over programs: a step of few rows reads each weight once, and many
programs are needed to read it fast. It is used for the shapes and numbers of rows at which it was faster than torch's
product, measured once in a process, at the first load of weights of that shape. Needs Triton."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from threading import Lock

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.accel.cuda.attention import processors_of
from verl.accel.linear import Plain, SingleProducts

MEASURED_ROWS = (1, 2, 4, 8, 16)
"""The numbers of rows at which it is measured; above the last one torch's product is used."""
ROWS, COLUMNS, BLOCK_BYTES = 16, 64, 256  # of a block: rows, outputs, and bytes of each weight row
LEAST_DEPTH = 256  # of a part: with less, adding the parts costs more than they save
MAX_PARTS = 16
BLOCK_SUM = 1024
GAIN = 0.95  # of the time of torch's product: a smaller difference may be noise
REPEATS = 5

Clock = Callable[[Callable[[], object]], float]
"""A function that runs a call and returns its seconds, with operands that are in no cache."""


@triton.jit(do_not_specialize=["M"])
def _product_part(
    x,
    weight,
    bias,
    residual,
    out,
    partial,
    M,
    N,
    C,
    DEPTH_EACH,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
):
    """Multiply all M rows with COLUMNS outputs over one part of the depth. If there is one part only, this is the final
    result."""
    n, part = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1)
    m, c = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    begin = part * DEPTH_EACH
    end = tl.minimum(begin + DEPTH_EACH, C)
    product = tl.zeros([ROWS, COLUMNS], tl.float32)
    for depth in range(begin, end, DEPTH):
        inside = depth + c[None, :] < end
        left = tl.load(x + m[:, None] * C + depth + c[None, :], mask=(m[:, None] < M) & inside, other=0.0)
        at = n.to(tl.int64)[:, None] * C + depth + c[None, :]
        right = tl.load(weight + at, mask=(n[:, None] < N) & inside, other=0.0)
        product += tl.dot(left, tl.trans(right), input_precision="ieee")
    to, written = m[:, None] * N + n[None, :], (m[:, None] < M) & (n[None, :] < N)
    if PARTS == 1:
        if BIASED:
            product += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if ADDED:
            product += tl.load(residual + to, mask=written, other=0.0).to(tl.float32)
        tl.store(out + to, product.to(out.dtype.element_ty), mask=written)
    else:
        tl.store(partial + part * M * N + to, product, mask=written)


@triton.jit(do_not_specialize=["M"])
def _sum_parts(
    bias,
    residual,
    out,
    partial,
    M,
    N,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
):
    """Add the parts of BLOCK results, in their order."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < M * N
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(0, PARTS):
        total += tl.load(partial + part * M * N + i, mask=inside, other=0.0)
    if BIASED:
        total += tl.load(bias + i % N, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        total += tl.load(residual + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + i, total.to(out.dtype.element_ty), mask=inside)


def depth_parts_of(width: int, depth: int, processors: int) -> int:
    """Return the parts into which a depth is split: enough to fill the card's `processors` twice with `width` outputs,
    and no shorter than LEAST_DEPTH."""
    wanted = -(-2 * processors // triton.cdiv(width, COLUMNS))
    return max(1, min(wanted, depth // LEAST_DEPTH, MAX_PARTS))


def skinny_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, parts: int | None = None
) -> Tensor:
    """Return x [M, C] times weight [N, C] transposed, for at most 16 rows, plus bias [N], plus residual [M, N], which
    the result overwrites; None: nothing is added. The depth is split into at most `parts` (None: as `depth_parts_of`
    chooses)."""
    (rows, depth), width = x.shape, len(weight)
    assert 0 < rows <= ROWS, f"{rows} rows"
    block = BLOCK_BYTES // x.element_size()
    parts = depth_parts_of(width, depth, processors_of(x.device)) if parts is None else parts
    each = triton.cdiv(triton.cdiv(depth, parts), block) * block
    parts = triton.cdiv(depth, each)  # none of them is empty
    out = x.new_empty(rows, width) if residual is None else residual
    partial = x.new_empty(parts if parts > 1 else 0, rows, width, dtype=torch.float32)
    added = {"BIASED": bias is not None, "ADDED": residual is not None, "PARTS": parts}
    _product_part[triton.cdiv(width, COLUMNS), parts](
        x.contiguous(),
        weight,
        bias,
        residual,
        out,
        partial,
        rows,
        width,
        depth,
        each,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        DEPTH=block,
        **added,
        num_warps=4,
        num_stages=3,
    )
    if parts > 1:
        grid = (triton.cdiv(rows * width, BLOCK_SUM),)
        _sum_parts[grid](bias, residual, out, partial, rows, width, BLOCK=BLOCK_SUM, **added, num_warps=4)
    return out


class Narrow:
    """A product that is computed by `skinny_product` for the numbers of rows at which that is faster, and else by
    torch. The result at a number of MEASURED_ROWS also holds for the numbers between it and the next smaller one."""

    nbytes = 0

    def __init__(self, weight: Tensor, bias: Tensor | None, faster: frozenset[int]) -> None:
        self.weight, self.bias, self.faster = weight, bias, faster
        self._plain = Plain(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return skinny_product(x, self.weight, self.bias, None) if self._splits(len(x)) else self._plain(x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if self._splits(len(x)):
            return skinny_product(x, self.weight, self.bias, residual)
        return self._plain.add_to(residual, x)

    def _splits(self, rows: int) -> bool:
        return rows > 0 and next((n for n in MEASURED_ROWS if n >= rows), 0) in self.faster


class Measured:
    """Makes products, and measures each shape once by `clock`; without one, `skinny_product` computes all numbers of
    rows that it can. Several threads may load weights: one of them measures, and the others take what it found."""

    def __init__(self, clock: Clock | None) -> None:
        self._clock, self._measuring = clock, Lock()
        self._faster: dict[tuple[torch.Size, torch.dtype, bool], frozenset[int]] = {}

    def make(self, weight: Tensor, bias: Tensor | None) -> Narrow:
        """Return the product with a weight [N, C]."""
        kind = weight.shape, weight.dtype, bias is not None
        with self._measuring:
            if kind not in self._faster:
                self._faster[kind] = frozenset(rows for rows in MEASURED_ROWS if self._is_faster(rows, weight, bias))
        return Narrow(weight, bias, self._faster[kind])

    def _is_faster(self, rows: int, weight: Tensor, bias: Tensor | None) -> bool:
        if self._clock is None:
            return True
        x, plain = weight.new_ones(rows, weight.shape[1]), Plain(weight, bias)
        ours = self._clock(lambda: skinny_product(x, weight, bias, None))
        return ours < GAIN * self._clock(lambda: plain(x))


def device_clock(device: torch.device) -> Clock:
    """Return the clock of a card: the shortest of several runs, each after other data have filled its caches."""
    caches = torch.cuda.get_device_properties(device).L2_cache_size

    def seconds(call: Callable[[], object]) -> float:
        other = torch.empty(2 * caches, dtype=torch.uint8, device=device)
        call()  # compiles it, or lets a library choose its kernel
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for _ in range(REPEATS):
            for _ in range(4):  # long enough for the host to enqueue the call meanwhile
                other.zero_()
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1000)
        return min(times)

    return seconds


_ONE_AT_A_TIME = Lock()
"""`cache` computes a value in each thread that wants it first."""


def measured_products(device: torch.device) -> SingleProducts:
    """Return the layout of these products: the tensors as they are. All engines of a process on one device get the same
    one: measured again, a shape for which both products take the same time could get the other one, and the engines
    would differ by rounding."""
    index = device.index if device.index is not None or device.type != "cuda" else torch.cuda.current_device()
    with _ONE_AT_A_TIME:
        return _products_on(device.type, index)


@cache
def _products_on(kind: str, index: int | None) -> SingleProducts:
    """Return the layout of a device, by its type and number."""
    clock = device_clock(torch.device(kind, index or 0)) if kind == "cuda" else None
    return SingleProducts(Measured(clock).make, keeps=True)
