"""Compile the kernels of accel/cuda for GPUs that are not here, as their callers launch them, and print their needs.

    python tests/compiled_kernels.py CAPABILITY DTYPE HEAD_DIM    such as 90 bfloat16 128

One line of JSON per launch: kernel, registers per thread, bytes of stack (spilled registers) and of shared memory, and
the copies that run ahead of their use. Triton brings its compiler and NVIDIA's; only a run needs a driver.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from verl.nn.quant import quantise_weight
from verl.wire import FP8_CAPABILITY

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
}
OPTIONS = ("num_warps", "num_stages")


def compile_launch(kernel: Any, given: dict[str, Any], target: GPUTarget) -> dict[str, Any]:
    """Compile one launch with its arguments by name, specialised as Triton does: None and 1 are constants, aligned
    addresses and multiples of 16 are known to be so."""
    options = {name: given.pop(name) for name in OPTIONS if name in given}
    signature, constants, known = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], known[(i,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0:
                known[(i,)] = [["tt.divisibility", 16]]
    made = triton.compile(ASTSource(kernel, signature, constants, known), target=target, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        Path(binary.name).write_bytes(made.asm["cubin"])
        command = [str(TOOLS / "cuobjdump"), "-res-usage", binary.name]
        used = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    found = {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", used)}
    return {
        "kernel": kernel.fn.__name__,
        "registers": found["REG"],
        "stack": found["STACK"] + found["LOCAL"],
        "shared": made.metadata.shared,
        "copies_ahead": made.asm["ptx"].count("cp.async.c"),
    }


def launch_all(dtype: torch.dtype, dim: int, capability: int) -> None:
    """Call every operation once with the sizes of a Qwen3 layer, and the others' features."""
    from verl.accel.cuda import (
        attention,
        blocks,
        experts,
        head,
        layers,
        nf4,
        products,
        prompts,
        rotary,
        sampling,
        skinny,
        training,
        truncation,
    )

    rows, heads, kv_heads, page, ffn, vocab = 4, 16, 8, 256, 3072, 151936

    def empty(*size: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(size, dtype=kind)

    positions, table = empty(rows, kind=torch.int64), empty(rows, 16, kind=torch.int32)
    keys, qkv = empty(2, page, kv_heads, dim), empty(rows, (heads + 2 * kv_heads) * dim)
    turns = empty(64, dim // 2, 2, kind=torch.float32)
    q = rotary.rotate_and_store(qkv, empty(heads + kv_heads, dim), turns, positions, table, keys, keys, 1e-6)
    for splits, window, cap in ((1, 0, 0.0), (16, 0, 0.0), (2, 512, 50.0)):
        sinks = empty(heads) if window else None
        attention.attend_pages(
            q, keys, keys, table, positions, scale=0.1, window=window, cap=cap, splits=splits, sinks=sinks
        )
    starts = empty(3, kind=torch.int32)
    for window, cap in ((0, 0.0), (512, 50.0)):
        lines = empty(600, kv_heads, dim)
        prompts.attend_prompts(
            empty(600, heads, dim), lines, lines, starts, starts, (512, 512), scale=0.1, window=window, cap=cap
        )
        spans = empty(17, kind=torch.int64), empty(16, kind=torch.int64)
        prompts.attend_prompts_in_pages(
            empty(512, heads, dim), keys, keys, table, *spans, 512, scale=0.1, window=window, cap=cap
        )
    x, weight = empty(rows, 1024), empty(1024)
    layers.add_norm(x, None, None, weight, 1e-6)
    layers.add_norm(x, x, None, weight, 1e-6)
    layers.add_norm(x, x, weight.float(), weight.float(), 1e-6)
    for activation in ("silu", "gelu_tanh"):
        layers.gated(empty(rows, 2 * ffn), activation)
    order, starts = empty(8 * rows, kind=torch.int64), empty(129, kind=torch.int64)
    each = experts.expert_products(x, empty(128, 1536, 1024), order, starts, 8)
    experts.expert_sum(each, empty(rows, 8, kind=torch.float32))
    products.exact_product(x, empty(ffn, 1024), None, None)
    products.exact_product(x, empty(1024, 1024), weight, x)
    products.float32_product(x, empty(ffn, 1024))
    skinny.skinny_product(x, empty(vocab, 1024), None, None)
    skinny.skinny_product(x, empty(1024, 1024), weight, x, parts=4)
    if dtype != torch.float32:
        codes = quantise_weight(torch.zeros(1024, 1024), "nf4")
        nf4.nf4_product(x, codes, weight)
        nf4.nf4_product(empty(600, 1024), codes)
        nf4.nf4_back(empty(600, 1024), codes)
    if divmod(capability, 10) >= FP8_CAPABILITY:
        scales, of = empty(ffn // 128, 8, kind=torch.float32), empty(ffn, kind=torch.int32)
        for n, bias in ((rows, None), (600, empty(ffn))):
            values, residual = empty(ffn, 1024, kind=torch.float8_e4m3fn), empty(n, ffn)
            blocks.block_product(empty(n, 1024), values, scales, of, bias, None if bias is None else residual)
        values, scales = empty(128, 1536, 1024, kind=torch.float8_e4m3fn), empty(128, 12, 8, kind=torch.float32)
        experts.expert_products(x, values, order, starts, 8, scales)
    numbers, ids = empty(rows, kind=torch.float64), empty(rows, kind=torch.int64)
    truncation.truncate(empty(rows, vocab), numbers, ids, numbers, numbers)
    sampling.draw_tokens(empty(rows, vocab), numbers, sampling.draw_uniforms(ids, ids))
    of_rows = empty(rows, kind=torch.float32)
    for bias, cap in ((None, 0.0), (empty(vocab), 30.0)):
        head.logit_sums(empty(rows, vocab), ids, of_rows, bias, cap)
        head.logit_gradients(empty(rows, vocab), ids, *[of_rows] * 5, bias, cap)
    gate, tables = empty(1, rows, ffn).requires_grad_(), empty(rows, 1, dim, kind=torch.float32)
    for out in (
        training.fused_rms_norm(gate, empty(ffn), 1e-6),
        training.fused_swiglu(gate, gate),
        training.fused_rotation(empty(rows, heads, dim).requires_grad_(), tables, tables),
    ):
        out.backward(out.detach())


def main(capability: int, dtype: str, dim: int) -> None:
    target = GPUTarget("cuda", capability, 32)

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        given = {**dict(zip(kernel.arg_names, args)), **named}
        print(json.dumps({**compile_launch(kernel, given, target), "programs": list(grid)}), flush=True)

    JITFunction.run = run
    launch_all(getattr(torch, dtype), dim, capability)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
