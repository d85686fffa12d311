"""The rows of the table of operations for CUDA: kernels of Triton, which is imported when one is chosen, and variable-
length attention."""

from __future__ import annotations

import importlib
from functools import partial

import torch

from verl.accel.cuda import segments
from verl.accel.cuda.decode import LEAST_CAPABILITY, missing
from verl.accel.operations import Call, Kernel, Use
from verl.wire import FP8_CAPABILITY

TRITON = "Triton"
"""The name of these kernels in the table."""


def _row(
    operation: str,
    module: str,
    function: str,
    float32: float | None,
    half: float,
    traffic: float = 1.0,
    least: tuple[int, int] = LEAST_CAPABILITY,
    launches: int = 1,
) -> Kernel:
    def load(use: Use) -> Call | str:
        reason = missing(use.device, use.sizes, least)
        if reason is not None:
            return reason
        call: Call = getattr(importlib.import_module(f"verl.accel.cuda.{module}"), function)
        return call

    return Kernel(operation, TRITON, load, _tolerance(float32, half), ("cuda",), traffic, launches)


def _tolerance(float32: float | None, half: float) -> dict[torch.dtype, float]:
    halves = {torch.bfloat16: half, torch.float16: half}
    return halves if float32 is None else {torch.float32: float32, **halves}


def _skinny(use: Use) -> Call | str:
    reason = missing(use.device, use.sizes)
    if reason is not None:
        return reason
    return partial(importlib.import_module("verl.accel.cuda.skinny").measured_products, use.device)


def _wide_product(use: Use) -> Call:
    return partial(torch.mm, out_dtype=torch.float32)


HALF = {torch.bfloat16: 2e-2, torch.float16: 2e-2}

KERNELS = (
    Kernel("trained_attention", "flash-attn", segments.load_flash_attn, HALF, ("cuda",)),
    # on the device `meta` it has shapes and gradients
    Kernel("trained_attention", "torch's flash kernel", segments.load_torch, HALF, ("cuda", "meta")),
    Kernel("prompt_attention", "flash-attn", segments.load_flash_attn_prompts, HALF, ("cuda",)),
    Kernel("prompt_attention", "torch's flash kernel", segments.load_torch_prompts, HALF, ("cuda", "meta")),
    Kernel("wide_product", "torch's half product", _wide_product, _tolerance(None, 2e-4), ("cuda",)),
    # partial results: G / 128 of the keys and values of a row that is split, for G query heads per key head
    _row("page_attention", "attention", "attend_pages", 2e-6, 2e-2, traffic=1.07, launches=2),
    _row("prompt_attention", "prompts", "attend_prompts", 2e-6, 2e-2, traffic=1.1),
    _row("page_prompt_attention", "prompts", "attend_prompts_in_pages", 2e-6, 2e-2, traffic=1.1),
    _row("rotate_and_store", "rotary", "rotate_and_store", 2e-6, 2e-2, traffic=1.1),
    _row("add_norm", "layers", "add_norm", 2e-6, 2e-2, traffic=1.1),
    _row("gated", "layers", "gated", 2e-5, 2e-2),
    _row("truncate", "truncation", "truncate", 0.0, 0.0),
    _row("uniforms", "sampling", "draw_uniforms", 0.0, 0.0),
    _row("sample", "sampling", "draw_tokens", 3e-5, 3e-5, traffic=2.1, launches=2),
    _row("expert_products", "experts", "expert_products", 2e-5, 4e-2, traffic=1.1),
    _row("trained_rms_norm", "training", "fused_rms_norm", 2e-6, 2e-2, traffic=1.1),
    _row("trained_swiglu", "training", "fused_swiglu", 2e-6, 2e-2),
    _row("trained_rotation", "training", "fused_rotation", 2e-6, 2e-2),
    _row("logit_sums", "head", "logit_sums", 2e-5, 2e-5),
    _row("logit_gradients", "head", "logit_gradients", 2e-5, 2e-2),
    _row("expert_sum", "experts", "expert_sum", 2e-6, 2e-2),
    _row("float32_linear", "products", "float32_product", 2e-4, 2e-4, traffic=1.1),
    # parts of few rows are written and read in float32
    Kernel("linear", TRITON, _skinny, _tolerance(2e-4, 4e-2), ("cuda",), traffic=1.25, launches=2),
    _row("block_linear", "blocks", "block_product", None, 4e-2, traffic=1.1, least=FP8_CAPABILITY),
    # in float32 exact products of such tiles spill their registers: torch's products of tiles are used; each code is
    # read by two lanes, and its level and its scale come from the first-level cache
    _row("quantised_linear", "nf4", "nf4_product", None, 4e-2, traffic=12),
    _row("quantised_back", "nf4", "nf4_back", None, 4e-2, traffic=12),
    _row("exact_linear", "products", "exact_products", 2e-4, 4e-2, traffic=1.1),
)
