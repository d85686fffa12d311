"""The table of operations: which kernels compute an operation, on which device and in which dtype.

Callers choose a kernel by the name of the operation and never by the type of a device. A new kernel is a function and a
row; `tests/numerics/test_accel_table.py` compares every row with float64 on random inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from verl.accel import costs, plain
from verl.accel.cpu import rows as cpu
from verl.accel.cuda import rows as cuda
from verl.accel.operations import Choice, Kernel, Operation, Use

OPERATIONS: Mapping[str, Operation] = {
    operation.name: operation
    for operation in (
        Operation(
            "rms_norm",
            "(x [n, C], weight [C] of x's dtype or float32, eps) -> x / rms(x) * weight [n, C]",
            costs.rms_norm_cost,
        ),
        Operation(
            "gated",
            "(gate_up [n, 2 F], activation silu or gelu_tanh) -> activation(gate) * up [n, F]",
            costs.gated_cost,
        ),
        Operation(
            "sample",
            "(logits [n, V], temperature [n] float32, 0 is greedy, uniform [n] float64) -> float64 [2, n]: the ids by "
            "inverse CDF, and their log-probs in the distribution that was drawn from (greedy: of temperature 1)",
            costs.sample_cost,
        ),
        Operation(
            "truncate",
            "(logits [n, V], temperature [n], top_k int64 [n], top_p and min_p float64 [n]) -> logits, with -inf for "
            "the ids that a row does not draw from; 0, 1 and 0 are off, and a temperature of 0 drops none",
            costs.truncate_cost,
        ),
        Operation(
            "uniforms",
            "(streams [n], positions [n], both int64) -> float64 [n] in [0, 1): the uniform number of each draw",
            costs.uniforms_cost,
        ),
        Operation(
            "slot_attention",
            "(qkv [n, (H + 2K) D], qk_norm float32 [H + K, D] or None, turns complex64 [positions, D/2], "
            "positions [n], keys and values [n, K, capacity, D], heads, eps, scale, window, cap) -> [n, H D]: one new "
            "token per row over its own keys and values, which receive those of the token",
            costs.slot_attention_cost,
        ),
        Operation(
            "delta_step",
            "(given [n, C + H V + 2 H], taps [w + 1, C], decays and steps float32 [H], norm [V], windows [n, w, C], "
            "states float32 [n, H, K, V], key_heads, eps) -> [n, H V]: one token of each row of a gated delta net, "
            "which updates windows and states",
            costs.delta_step_cost,
        ),
        Operation(
            "page_attention",
            "(q [n, H, D], keys and values [pages, PAGE, K, D], table int32 [n, W], positions [n], scale, window, cap, "
            "sinks, exact_rows) -> [n, H, D]: each row over the keys of its pages up to its position, -1 for an empty "
            "row; with exact_rows the bits of a row do not depend on the number of rows",
            costs.page_attention_cost,
        ),
        Operation(
            "prompt_attention",
            "(q [T, H, D], keys and values [U, K, D], starts int32 [prompts + 1] of their queries, key_starts of their "
            "keys, longest: the most queries and keys of one, scale, window, and cap if the Use has `capped`) -> "
            "[T, H, D]: causal attention of the last tokens of each prompt",
            costs.prompt_attention_cost,
        ),
        Operation(
            "page_prompt_attention",
            "(q [T, H, D], keys and values [pages, PAGE, K, D], table int32 [prompts, W], starts [prompts + 1] of the "
            "queries, lengths [prompts] in keys, longest, scale, window, cap) -> [T, H, D]: as prompt_attention, over "
            "the pages of each prompt",
            costs.page_prompt_attention_cost,
        ),
        Operation(
            "rotate_and_store",
            "(qkv [n, (H + 2K) D], norm [H + K, D] or None, turns float32 [positions, D/2, 2], positions [n], table "
            "int32 [n, W], keys and values [pages, PAGE, K, D], eps) -> q [n, H, D]; writes keys and values into pages",
            costs.rotate_and_store_cost,
        ),
        Operation(
            "add_norm",
            "(residual [n, C], delta [n, C] or None, delta_weight [C] or None, weight [C], eps) -> [n, C]: residual += "
            "delta, normed if it has a weight; the residual over its root mean square, times its weight",
            costs.add_norm_cost,
        ),
        Operation(
            "expert_products",
            "(x [P / each, C], weights [E, N, C], order [P], starts [E + 1], each, scales of blocks of 8 bits or None) "
            "-> [P, N]: row p // each times the weights of the expert e of pair p; the pairs of e are "
            "order[starts[e] : starts[e + 1]]",
            costs.expert_products_cost,
        ),
        Operation(
            "expert_sum",
            "(each [n k, C], share float32 [n, k]) -> [n, C]: the sum of each row's k results, weighted by its shares",
            costs.expert_sum_cost,
        ),
        Operation(
            "block_linear",
            "(x [n, K], values E4M3 [N, K], scales float32 [R, ceil(K / 128)], scale_rows int32 [N], bias [N] or None, "
            "residual [n, N] or None, exact_rows) -> x W^T + bias + residual [n, N], into the residual if given: W[i] "
            "= values[i] times the scales of its blocks, row scale_rows[i]",
            costs.block_linear_cost,
        ),
        Operation(
            "quantised_linear",
            "(x [n, K], weight [N, K] an Nf4 or Int8 of nn/quant.py, bias [N] or None, out [n, N] or None; pairs, add) "
            "-> x W^T + bias [n, N], written or added to out",
            costs.quantised_linear_cost,
        ),
        Operation(
            "quantised_back",
            "(dy [n, N], weight [N, K] an Nf4 or Int8) -> dy W [n, K]: the gradient of x",
            costs.quantised_back_cost,
        ),
        Operation(
            "exact_linear",
            "() -> Products: as linear, and the bits of a row of a product depend on that row alone",
            costs.linear_cost,
        ),
        Operation(
            "float32_linear",
            "(x [n, K], weight [N, K] of x's dtype) -> x W^T [n, N] in float32, of float32 products",
            costs.float32_linear_cost,
        ),
        Operation(
            "wide_product",
            "(a [m, k], b [k, n] of a's dtype, with any strides) -> a b [m, n] in float32 at least, not rounded to "
            "a's dtype in between",
            costs.wide_product_cost,
        ),
        Operation(
            "logit_sums",
            "(z [n, V] raw logits, targets int64 [n], temperature [n], bias [V] or None, cap) -> float32 [4, n]: the "
            "target's logit, 0 for a target below 0, log-sum-exp, entropy and sum of squared probabilities of x / "
            "temperature, where x = cap tanh((z + bias) / cap)",
            costs.logit_sums_cost,
        ),
        Operation(
            "logit_gradients",
            "(z [n, V] raw logits, targets, temperature, lse [n], d_logprob [n], entropy and d_entropy [n] or None, "
            "bias, cap) -> z, overwritten with its gradients: of log-probs and entropies; 0 in rows that have none and "
            "where z is -inf",
            costs.logit_gradients_cost,
        ),
        Operation(
            "linear", "() -> Products: the layout of the weights of matrix products, and the product", costs.linear_cost
        ),
        Operation(
            "trained_attention",
            "(q [T, H, D], k and v [U, K, D], starts int32 [segments + 1] of their queries, key_starts of their keys, "
            "longest: the most queries and keys of one, scale, window, index int64 [keys]: the rows of k and v that "
            "are keys, or None: all in order) -> [T, H, D]: causal attention of the last tokens of each segment's "
            "keys, differentiable in q, k and v",
            costs.trained_attention_cost,
        ),
        Operation(
            "trained_rms_norm",
            "(x [..., C], weight [C], eps) -> weight * x / rms(x), differentiable in both, which are its first saved "
            "tensors",
            costs.rms_norm_cost,
        ),
        Operation(
            "trained_swiglu",
            "(gate [...], up [...]) -> silu(gate) * up, differentiable in both, which are its first saved tensors",
            costs.swiglu_cost,
        ),
        Operation(
            "trained_rotation",
            "(x [T, h, D], cos [T, 1, D], sin [T, 1, D]) -> x cos + rotate_half(x) sin in the dtype of x, "
            "differentiable in x",
            costs.rotation_cost,
        ),
        Operation(
            "low_rank_gradients",
            "(x [n, K], dy [n, N], a [rank, K], b [N, rank], scale) -> [K + N, rank]: the gradients of a transposed "
            "and, below, of b, for the gradient dy of scale (x a^T) b^T",
            costs.low_rank_gradients_cost,
        ),
    )
}
"""The operations by name."""

DECODED_LAYER: Mapping[str, int] = {"linear": 4, "add_norm": 2, "rotate_and_store": 1, "page_attention": 1, "gated": 1}
"""The calls of operations in a layer of a dense model, in a decode step over pages."""
DECODED_ONCE: Mapping[str, int] = {"linear": 1, "add_norm": 1, "truncate": 1, "uniforms": 1, "sample": 1}
"""Those in the rest of such a step: the norm before the head, the head and the draw."""
TORCH_ONCE = 6
"""The most launches of torch in the rest of a step: tokens, embeddings with their scale, the cap on logits."""

KERNELS: tuple[Kernel, ...] = (*cpu.KERNELS, *cuda.KERNELS, *plain.KERNELS)
"""All rows. Of those that can compute an operation the first is chosen."""


def kernels_of(operation: str, use: Use) -> list[Kernel]:
    """Return the rows of an operation for a type of device and a dtype, the best first."""
    if operation not in OPERATIONS:
        raise KeyError(f"no operation {operation}: {', '.join(OPERATIONS)}")
    return [kernel for kernel in KERNELS if kernel.operation == operation and kernel.serves(use)]


def choose(operation: str, use: Use, *, without: tuple[str, ...] = ()) -> Choice | None:
    """Return the first kernel that this machine and model have, without the rows of the names `without`; None if there
    is none."""
    passed: dict[str, str] = {}
    for kernel in kernels_of(operation, use):
        if kernel.name in without:
            continue
        found = kernel.load(use)
        if not isinstance(found, str):
            return Choice(kernel, found, passed)
        passed[kernel.name] = found
    return None


def why_plain(operation: str, use: Use) -> str | None:
    """Return why an operation is computed by torch's operations; None if it has a kernel."""
    choice = choose(operation, use)
    if choice is not None and choice.kernel.name != plain.PLAIN:
        return None
    passed = {} if choice is None else choice.passed_over
    if choice is None:
        passed = {kernel.name: str(kernel.load(use)) for kernel in kernels_of(operation, use)}
    found = "; ".join(f"{name}: {reason}" for name, reason in passed.items())
    return found or f"{use.device.type} has no kernel of it in {str(use.dtype).removeprefix('torch.')}"


def decode_launches(use: Use, *, split: bool = True) -> tuple[int, int] | None:
    """Return the launches of a layer of a dense model in a decode step over pages, and those of the rest of the step,
    at most; None if this device has no kernels for them. split: the depth of every product is split, if there is a
    kernel for that."""
    found = {name: choose(name, use) for name in {**DECODED_LAYER, **DECODED_ONCE}}
    chosen = {name: choice.kernel.launches for name, choice in found.items() if choice is not None}
    if len(chosen) < len(found):
        return None
    if not split:
        chosen["linear"] = 1
    layer, rest = (sum(n * chosen[name] for name, n in calls.items()) for calls in (DECODED_LAYER, DECODED_ONCE))
    return layer, rest + TORCH_ONCE


def lines_of(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return a line for each operation: its kernel on a device in a dtype, and why no better one."""
    lines, use = [], Use(device, dtype)
    for name in OPERATIONS:
        choice = choose(name, use)
        if choice is None:
            reasons = [f"{k.name}: {k.load(use)}" for k in kernels_of(name, use)]
            lines.append(f"{name}: none, its caller computes it by other operations ({'; '.join(reasons) or 'no row'})")
            continue
        why = "; ".join(f"not {other}: {reason}" for other, reason in choice.passed_over.items())
        lines.append(f"{name}: {choice.kernel.name}{f' ({why})' if why else ''}")
    return lines
