"""The least work of each operation, from the shapes of its arguments. Weights in a layout of the kernel count too."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.accel.operations import Cost
from verl.nn.quant import QuantisedTensor


def rms_norm_cost(x: Tensor, weight: Tensor, eps: float) -> Cost:
    return Cost(2 * x.nbytes + weight.nbytes, 5 * x.numel())


def gated_cost(gate_up: Tensor, activation: str) -> Cost:
    return Cost(gate_up.nbytes * 3 // 2, 8 * gate_up.numel() // 2)


def swiglu_cost(gate: Tensor, up: Tensor) -> Cost:
    return Cost(2 * gate.nbytes + up.nbytes, 8 * gate.numel())


def rotation_cost(x: Tensor, cos: Tensor, sin: Tensor) -> Cost:
    return Cost(2 * x.nbytes + cos.nbytes + sin.nbytes, 3 * x.numel())


def low_rank_gradients_cost(x: Tensor, dy: Tensor, a: Tensor, b: Tensor, scale: float) -> Cost:
    """Return the work of four products with factors of few rows; x [n, K] and dy [n, N] are read once."""
    factors = a.nbytes + b.nbytes
    return Cost(x.nbytes + dy.nbytes + 2 * factors, 4 * len(a) * (x.numel() + dy.numel()))


def sample_cost(logits: Tensor, temperature: Tensor, uniform: Tensor) -> Cost:
    return Cost(logits.nbytes + temperature.nbytes + uniform.nbytes + 16 * len(logits), 5 * logits.numel())


def logit_sums_cost(
    z: Tensor, targets: Tensor, temperature: Tensor, bias: Tensor | None = None, cap: float = 0.0
) -> Cost:
    of_ids = 0 if bias is None else bias.nbytes
    return Cost(z.nbytes + of_ids + targets.nbytes + temperature.nbytes + 16 * len(z), 10 * z.numel())


def logit_gradients_cost(
    z: Tensor,
    targets: Tensor,
    temperature: Tensor,
    lse: Tensor,
    d_logprob: Tensor,
    entropy: Tensor | None = None,
    d_entropy: Tensor | None = None,
    bias: Tensor | None = None,
    cap: float = 0.0,
) -> Cost:
    """Return the work if every row has a gradient: its logits are read and written."""
    others = (targets, temperature, lse, d_logprob, entropy, d_entropy, bias)
    return Cost(2 * z.nbytes + sum(x.nbytes for x in others if x is not None), 12 * z.numel())


def truncate_cost(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Cost:
    """Return the work if every row is truncated: its logits are read and most of them written."""
    settings = sum(column.nbytes for column in (temperature, top_k, top_p, min_p))
    return Cost(2 * logits.nbytes + settings, 8 * logits.numel())


def uniforms_cost(streams: Tensor, positions: Tensor) -> Cost:
    return Cost(3 * streams.nbytes, 10 * streams.numel())


def linear_cost(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Cost:
    """Return the work of x [n, K] W^T + b -> [n, N] for a weight [N, K]."""
    out = len(x) * len(weight)
    read = x.nbytes + weight.nbytes + (0 if bias is None else bias.nbytes)
    return Cost(read + out * x.element_size(), 2 * out * x.shape[1])


def quantised_linear_cost(
    x: Tensor,
    weight: QuantisedTensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    pairs: int = 0,
    add: bool = False,
) -> Cost:
    """Return the work of x [n, K] W^T + b -> [n, N] for a quantised weight [N, K]."""
    values = len(x) * weight.shape[0]
    added = 0 if bias is None else bias.nbytes
    moved = (1 + add) * values * x.element_size()
    return Cost(x.nbytes + weight.nbytes + added + moved, 2 * values * x.shape[1])


def quantised_back_cost(dy: Tensor, weight: QuantisedTensor) -> Cost:
    """Return the work of dy [n, N] W -> [n, K] for a quantised weight [N, K]."""
    out = len(dy) * weight.shape[1]
    return Cost(dy.nbytes + weight.nbytes + out * dy.element_size(), 2 * out * dy.shape[1])


def float32_linear_cost(x: Tensor, weight: Tensor) -> Cost:
    """Return the work of x [n, K] W^T -> [n, N] for a weight [N, K], with a result of 4 bytes per number."""
    out = len(x) * len(weight)
    return Cost(x.nbytes + weight.nbytes + 4 * out, 2 * out * x.shape[1])


def wide_product_cost(a: Tensor, b: Tensor) -> Cost:
    """Return the work of a [m, k] b [k, n] -> [m, n] with a result of at least 4 bytes per number."""
    out = len(a) * b.shape[1]
    return Cost(a.nbytes + b.nbytes + max(4, a.element_size()) * out, 2 * out * a.shape[1])


def block_linear_cost(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    scale_rows: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    exact_rows: bool = False,
) -> Cost:
    """Return the work of x [n, K] W^T -> [n, N] for a weight [N, K] of one byte per value, with its scales."""
    out = len(x) * len(values)
    read = x.nbytes + values.numel() + scales.nbytes + scale_rows.nbytes
    read += sum(0 if added is None else added.nbytes for added in (bias, residual))
    return Cost(read + x.element_size() * out, 2 * out * x.shape[1])


def _seen_tokens(positions: Tensor, window: int) -> int:
    """Return the number of keys that all rows together see: those up to their positions [n], or the last `window`."""
    seen = positions + 1
    return int((seen.clamp(max=window) if window else seen).sum())


def slot_attention_cost(
    qkv: Tensor,
    qk_norm: Tensor | None,
    turns: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    heads: int,
    eps: float,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
) -> Cost:
    """Return the work for the keys and values that each row sees: all up to its position, or the last `window`."""
    (n, kv_heads), dim = keys.shape[:2], keys.shape[3]
    tokens = _seen_tokens(positions, window)
    read = 2 * tokens * kv_heads * dim * keys.element_size()
    ends = qkv.nbytes + n * (heads + 2 * kv_heads) * dim * qkv.element_size() + n * dim * 4
    return Cost(read + ends, 4 * tokens * heads * dim + 6 * qkv.numel())


def delta_step_cost(
    given: Tensor,
    taps: Tensor,
    decays: Tensor,
    steps: Tensor,
    norm: Tensor,
    windows: Tensor,
    states: Tensor,
    *,
    key_heads: int,
    eps: float,
) -> Cost:
    """Return the work of reading and writing windows and states once."""
    ends = given.nbytes + taps.nbytes + states.shape[0] * states.shape[1] * states.shape[3] * given.element_size()
    return Cost(2 * (windows.nbytes + states.nbytes) + ends, 7 * states.numel() + 2 * len(given) * taps.numel())


def page_attention_cost(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
    sinks: Tensor | None = None,
    exact_rows: bool = False,
) -> Cost:
    """Return the work for the keys and values that each row sees: all up to its position, or the last `window`."""
    tokens = _seen_tokens(positions, window)
    read = 2 * tokens * keys.shape[2] * keys.shape[3] * keys.element_size()
    return Cost(read + 2 * q.nbytes, 4 * tokens * q.shape[1] * q.shape[2])


def prompt_attention_cost(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: tuple[int, int],
    *,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
) -> Cost:
    """Return the work of reading each query, key and value once, for the keys that each query sees."""
    pairs = _seen_pairs(starts, key_starts.diff(), window)
    return Cost(2 * q.nbytes + keys.nbytes + values.nbytes, 4 * pairs * q.shape[1] * q.shape[2])


def trained_attention_cost(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: tuple[int, int],
    *,
    scale: float,
    window: int = 0,
    index: Tensor | None = None,
) -> Cost:
    """Return the work of `prompt_attention_cost`, with keys that are read once although several segments have them."""
    return prompt_attention_cost(q, keys, values, starts, key_starts, longest, scale=scale, window=window)


def page_prompt_attention_cost(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    starts: Tensor,
    lengths: Tensor,
    longest: int,
    *,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
) -> Cost:
    """Return the work of reading each query once, and each key and value that a query sees."""
    lengths = lengths[: len(starts) - 1]
    first = lengths - starts.diff() - window + 1 if window else 0 * lengths
    read = int((lengths - first.clamp(min=0))[starts.diff() > 0].sum())
    pairs = _seen_pairs(starts, lengths, window)
    bytes_each = 2 * keys.shape[2] * keys.shape[3] * keys.element_size()
    return Cost(2 * q.nbytes + read * bytes_each, 4 * pairs * q.shape[1] * q.shape[2])


def _seen_pairs(starts: Tensor, lengths: Tensor, window: int) -> int:
    """Return the number of pairs of a query and a key that the query sees, in prompts with `lengths` keys each. The
    last keys of a prompt have queries."""
    pairs = 0
    for tokens, length in zip(starts.diff().tolist(), lengths.tolist(), strict=True):
        seen = torch.arange(length - tokens, length) + 1
        pairs += int((seen.clamp(max=window) if window else seen).sum())
    return pairs


def rotate_and_store_cost(
    qkv: Tensor,
    norm: Tensor | None,
    turns: Tensor,
    positions: Tensor,
    table: Tensor,
    keys: Tensor,
    values: Tensor,
    eps: float,
) -> Cost:
    """Return the work of reading each row once and writing its queries, keys and values."""
    turned = len(qkv) * turns.shape[1] * 2 * turns.element_size()
    return Cost(2 * qkv.nbytes + turned + (0 if norm is None else norm.nbytes), 6 * qkv.numel())


def add_norm_cost(
    residual: Tensor, delta: Tensor | None, delta_weight: Tensor | None, weight: Tensor, eps: float
) -> Cost:
    """Return the work of reading residual and delta, and of writing the new residual and the normed result."""
    weights = weight.nbytes + (0 if delta_weight is None else delta_weight.nbytes)
    return Cost((2 if delta is None else 4) * residual.nbytes + weights, 10 * residual.numel())


def expert_products_cost(
    x: Tensor, weights: Tensor, order: Tensor, starts: Tensor, each: int, scales: Tensor | None = None
) -> Cost:
    """Return the work of reading the weights of the experts that have a pair, and each row once."""
    experts, width, depth = weights.shape
    used = int((starts[1:] > starts[:-1]).sum())
    out = len(order) * width
    one = width * depth * weights.element_size() + (0 if scales is None else scales[0].nbytes)
    return Cost(x.nbytes + used * one + out * x.element_size(), 2 * out * depth)


def expert_sum_cost(each: Tensor, share: Tensor) -> Cost:
    """Return the work of reading each result once."""
    return Cost(each.nbytes + share.nbytes + each.nbytes // share.shape[1], 2 * each.numel())
