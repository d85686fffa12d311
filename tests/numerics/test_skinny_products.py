"""Products of few rows with a split depth, in Triton's interpreter, and the choice between them and torch's product."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from interpreted import fix_bf16_products
from torch import Tensor

pytest.importorskip("triton", reason="no Triton here (make triton-package)")
from verl.accel.cuda import skinny
from verl.accel.linear import Plain

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny, "COLUMNS", 16)
    monkeypatch.setattr(skinny, "BLOCK_BYTES", 64)
    monkeypatch.setattr(skinny, "BLOCK_SUM", 32)
    fix_bf16_products(monkeypatch)


def operands(rows: int, width: int, depth: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(rows + width + depth)
    x, weight = torch.randn(rows, depth), torch.randn(width, depth) / depth**0.5
    return x.to(dtype), weight.to(dtype), torch.randn(width).to(dtype), torch.randn(rows, width).to(dtype)


def close(ours: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rows,width,depth,parts", [(1, 16, 64, 1), (3, 33, 70, 2), (16, 40, 129, 4), (5, 7, 31, 3)])
def test_a_split_product_is_the_product(rows: int, width: int, depth: int, parts: int, dtype: torch.dtype) -> None:
    """Sizes at and off the ends of blocks; with 3 parts of a depth of 31 in float16 one is empty and left out."""
    x, weight, bias, residual = operands(rows, width, depth, dtype)
    exact = x.double() @ weight.double().T
    close(skinny.skinny_product(x, weight, None, None, parts), exact, dtype)
    close(skinny.skinny_product(x, weight, bias, None, parts), exact + bias, dtype)
    added = residual.clone()
    ours = skinny.skinny_product(x, weight, bias, added, parts)
    close(ours, exact + bias + residual, dtype)
    assert ours is added, "the residual is overwritten"


def test_parts_fill_the_card_and_stay_above_their_least_depth() -> None:
    assert skinny.depth_parts_of(64, 4096, 132) == 16  # at most
    assert skinny.depth_parts_of(1024, 2048, 132) == 5  # 64 blocks of outputs: 320 programs
    assert skinny.depth_parts_of(1024, 1024, 132) == 4  # 256 of the depth in each
    assert skinny.depth_parts_of(151936, 1024, 132) == skinny.depth_parts_of(16, 100, 132) == 1


def clock_of(seconds: Callable[[str, int], float], asked: Counter[tuple[str, int]]) -> skinny.Clock:
    """A clock that runs each call and returns the given seconds of a product, ours or torch's, and a number of rows."""

    def clock(call: Callable[[], object]) -> float:
        with pytest.MonkeyPatch.context() as patch:
            rows, kind = [], ["plain"]
            plain = skinny.skinny_product
            patch.setattr(skinny, "skinny_product", lambda *args: (kind.append("ours"), plain(*args))[1])
            rows = len(call())  # type: ignore[arg-type]
        asked[kind[-1], rows] += 1
        return seconds(kind[-1], rows)

    return clock


def test_the_faster_product_is_used_for_each_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours is faster for 2 and 4 rows, not by enough for 8, and slower for others. A shape is measured once."""
    ours, asked = {1: 2.0, 2: 0.5, 4: 0.9, 8: 0.96, 16: 1.5}, Counter[tuple[str, int]]()
    made = skinny.Measured(clock_of(lambda kind, rows: ours[rows] if kind == "ours" else 1.0, asked))
    x, weight, bias, residual = operands(17, 24, 40, torch.float32)
    product = made.make(weight, None)
    assert product.faster == {2, 4}
    assert asked == Counter({(kind, rows): 1 for kind in ("ours", "plain") for rows in skinny.MEASURED_ROWS})
    assert made.make(weight + 1, None).faster == {2, 4} and asked.total() == 10
    made.make(weight, bias)
    assert asked.total() == 20, "a bias makes another shape"
    used, plain = list[int](), skinny.skinny_product
    monkeypatch.setattr(skinny, "skinny_product", lambda x, *rest: (used.append(len(x)), plain(x, *rest))[1])
    for rows in (0, *range(1, 18)):
        exact = x[:rows].double() @ weight.double().T
        torch.testing.assert_close(product(x[:rows]).double(), exact, atol=2e-6, rtol=2e-6)
        both = product.add_to(residual[:rows].clone(), x[:rows]).double()
        torch.testing.assert_close(both, exact + residual[:rows], atol=2e-6, rtol=2e-6)
    assert used == [2, 2, 3, 3, 4, 4], "3 rows are as 4"


def test_a_process_measures_a_shape_once_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both products take the same time the choice is noise: engines that load one after the other, or at once in
    threads of their own, have the same products. Another device is measured by its own clock."""
    seconds, clocks, asked = iter(range(10**6, 0, -1)), list[torch.device](), Counter[tuple[str, int]]()

    def clock_on(device: torch.device) -> skinny.Clock:
        time.sleep(0.05)  # so that all threads are there before the first has a clock
        clocks.append(device)
        return clock_of(lambda kind, rows: float(next(seconds)) if kind == "plain" or rows % 4 else 2e6, asked)

    monkeypatch.setattr(skinny, "device_clock", clock_on)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    skinny._products_on.cache_clear()
    weight = torch.randn(24, 40)
    try:
        start = threading.Barrier(8)

        def made(name: str) -> Any:
            start.wait(30)
            return skinny.measured_products(torch.device(name)).make(weight, None)

        with ThreadPoolExecutor(8) as threads:
            first, *others = threads.map(made, ["cuda", "cuda:0"] * 4)
        assert all(isinstance(one, skinny.Narrow) and one.faster == first.faster for one in others)
        assert clocks == [torch.device("cuda:0")] and asked.total() == 2 * len(skinny.MEASURED_ROWS)
        skinny.measured_products(torch.device("cuda:1"))
        assert clocks[1:] == [torch.device("cuda:1")]
    finally:
        skinny._products_on.cache_clear()


def test_without_a_clock_every_number_of_rows_that_fits_is_split() -> None:
    """In the interpreter; the table's tests then compare the kernel."""
    product = skinny.measured_products(torch.device("cpu")).make(torch.randn(8, 64), None)
    assert isinstance(product, skinny.Narrow) and product.faster == frozenset(skinny.MEASURED_ROWS)
    x = torch.randn(20, 64)
    assert torch.equal(product(x), Plain(product.weight, None)(x))
