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
    delta_step: Call
    products: Products
    """The layout of the weights of matrix products, with its kernel."""
    float32_linear: Call | None
    """The head's matrix product in float32, if all other weights are in half precision; else None."""
    block_linear: Call | None
    """The product with weights in blocks of 8 bits; None: such weights are dequantised when they arrive."""
    quantised_linear: Call
    """The product with the codes of a base in 4 or 8 bits."""
    missing: str | None
    """The reason why better kernels for this device are not used; None if they are."""


@dataclass(frozen=True, slots=True)
class DecodeOps:
    """The kernels of the operations of a fused decode step over pages."""

    page_attention: Call
    page_prompt_attention: Call
    rotate_and_store: Call
    add_norm: Call
    gated: Call
    truncate: Call
    uniforms: Call
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


def choose_block_linear(use: Use) -> Call | str:
    """Return the product with weights in blocks of 8 bits, or the reason why there is none."""
    choice = choose("block_linear", use)
    if choice is not None:
        return choice.call
    reasons = [str(kernel.load(use)) for kernel in kernels_of("block_linear", use)]
    return "; ".join(reasons) or f"{use.device.type} has no product with such weights in {use.dtype}"


def choose_ops(
    device: torch.device,
    dtype: torch.dtype,
    *,
    compiled: bool = True,
    products: Products | None = None,
    exact_rows: bool = False,
    float32_head: bool = False,
    block_linear: Call | None = None,
) -> NativeOps:
    """Choose the kernels for activations of `dtype`. Without `compiled` the kernels of kernels.c are left out.
    `products` is the layout of the weights; None: the best one. With `exact_rows` a layout is preferred in which the
    result of a row does not depend on the other rows. `float32_head`: the head's product and the logits are float32.
    `block_linear`: the product with projections in blocks of 8 bits."""
    use, without = Use(device, dtype), () if compiled else (COMPILED,)
    names = ("rms_norm", "gated", "linear", "quantised_linear", "delta_step")
    norm, gated, linear, coded, delta = (choose(name, use, without=without) for name in names)
    exact_head = float32_head and dtype != torch.float32
    sample = choose("sample", replace(use, dtype=torch.float32) if exact_head else use, without=without)
    attention = choose("slot_attention", use, without=without)
    assert norm and gated and sample and linear and coded and delta, "torch computes these in every dtype"
    layout: Products = products or linear.call()
    exact = choose("exact_linear", use) if exact_rows and products is None and not layout.exact_rows else None
    head = choose("float32_linear", use) if exact_head else None
    return NativeOps(
        rms_norm=norm.call,
        gated=gated.call,
        sample=sample.call,
        slot_attention=None if attention is None else attention.call,
        delta_step=delta.call,
        products=layout if exact is None else exact.call(),
        float32_linear=None if head is None else head.call,
        block_linear=None if block_linear is None else partial(block_linear, exact_rows=exact_rows),
        quantised_linear=coded.call,
        missing="; ".join(norm.passed_over.values()) or None,
    )
