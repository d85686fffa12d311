"""The operations of the native engine, chosen from the table for a device and a dtype."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial

import torch

from verl.accel.linear import Products
from verl.accel.operations import COMPILED, Call, Use
from verl.accel.table import choose, kernels_of


@dataclass(frozen=True, slots=True)
class NativeOps:
    """The kernels of the operations with these names in `accel/table.py`."""

    rms_norm: Call
    gated: Call
    sample: Call
    slot_attention: Call | None
    """None if no kernel exists: torch computes attention for blocks of rows then."""
    products: Products
    """The layout of the weights of matrix products, with its kernel."""
    missing: str | None
    """The reason why better kernels for this device are not used; None if they are."""


@dataclass(frozen=True, slots=True)
class DecodeOps:
    """The kernels of the operations of a fused decode step over pages."""

    page_attention: Call
    rotate_and_store: Call
    add_norm: Call
    gated: Call
    sample: Call
    expert_products: Call
    expert_sum: Call

    def with_exact_rows(self) -> DecodeOps:
        """Return the kernels with which the bits of a row do not depend on the other rows or their number."""
        return replace(self, page_attention=partial(self.page_attention, exact_rows=True))


def choose_decode_ops(use: Use) -> DecodeOps | str:
    """Return the kernels of a fused decode step, or the reason why one of its operations has none."""
    found = {}
    for name in (field.name for field in fields(DecodeOps)):
        choice = choose(name, use)
        if choice is None:
            reasons = {str(kernel.load(use)) for kernel in kernels_of(name, use)}
            return "; ".join(reasons) or f"{use.device.type} has no kernel of {name} in {use.dtype}"
        found[name] = choice.call
    return DecodeOps(**found)


def choose_ops(
    device: torch.device,
    dtype: torch.dtype,
    *,
    compiled: bool = True,
    products: Products | None = None,
    exact_rows: bool = False,
) -> NativeOps:
    """Choose the kernels for activations of `dtype`. Without `compiled` those of kernels.c are left out. `products` is
    the layout of weights, None: the best one, or with `exact_rows` one whose rows do not depend on each other, if there
    is any."""
    use, without = Use(device, dtype), () if compiled else (COMPILED,)
    norm, gated, sample, linear = (choose(n, use, without=without) for n in ("rms_norm", "gated", "sample", "linear"))
    attention = choose("slot_attention", use, without=without)
    assert norm and gated and sample and linear, "torch computes these in every dtype"
    layout: Products = products or linear.call()
    exact = choose("exact_linear", use) if exact_rows and products is None and not layout.exact_rows else None
    return NativeOps(
        rms_norm=norm.call,
        gated=gated.call,
        sample=sample.call,
        slot_attention=None if attention is None else attention.call,
        products=layout if exact is None else exact.call(),
        missing="; ".join(norm.passed_over.values()) or None,
    )
