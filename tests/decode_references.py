"""The operations of a decode step over pages by plain torch, in the precision of their inputs, and random inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def pages_of(
    positions: Tensor, page: int, kv_heads: int, dim: int, dtype: torch.dtype, rng: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """A pool [2, pages, page, K, D] with NaN in every place that no row has written, and a table of shuffled pages."""
    width = int(positions.max()) // page + 1
    table = (torch.randperm(len(positions) * width, generator=rng).view(len(positions), width) + 1).int()
    pool = torch.full((2, table.numel() + 1, page, kv_heads, dim), torch.nan, dtype=dtype)
    for row, length in enumerate((positions + 1).clamp(min=0).tolist()):
        for token in range(length):
            pool[:, table[row, token // page], token % page] = torch.randn(2, kv_heads, dim, generator=rng).to(dtype)
    return pool, table


def page_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, positions: Tensor,
    *, scale: float, window: int = 0, cap: float = 0.0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One row at a time; an empty row gives 0."""
    out = torch.zeros_like(q)
    for row, length in enumerate((positions + 1).tolist()):
        if length <= 0:
            continue
        lo, each = max(0, length - window) if window else 0, q.shape[1] // keys.shape[2]
        k, v = (p[table[row].long()].flatten(0, 1)[lo:length].repeat_interleave(each, 1) for p in (keys, values))
        score = torch.einsum("hd,lhd->hl", q[row], k) * scale
        score = cap * torch.tanh(score / cap) if cap else score
        score = score if sinks is None else torch.cat([score, sinks.to(score)[:, None]], 1)
        out[row] = torch.einsum("hl,lhd->hd", score.softmax(1)[:, : length - lo], v)
    return out


def prompt_attention(
    q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, key_starts: Tensor, longest: tuple[int, int],
    *, scale: float, window: int = 0, cap: float = 0.0,
) -> Tensor:  # fmt: skip
    """One query at a time."""
    out, each = torch.zeros_like(q), q.shape[1] // keys.shape[1]
    for prompt, (begin, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        first, last = key_starts[prompt : prompt + 2].tolist()
        for row in range(begin, end):
            seen = last - (end - row) + 1
            lo = max(first, seen - window) if window else first
            k, v = (t[lo:seen].repeat_interleave(each, 1) for t in (keys, values))
            score = torch.einsum("hd,lhd->hl", q[row], k) * scale
            score = cap * torch.tanh(score / cap) if cap else score
            out[row] = torch.einsum("hl,lhd->hd", score.softmax(1), v)
    return out


def page_prompt_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, starts: Tensor, lengths: Tensor, longest: int, **read: Any
) -> Tensor:
    """The pages of each prompt in a row."""
    lengths = lengths[: len(starts) - 1]
    packed = [
        torch.cat([pool[pages.long()].flatten(0, 1)[:n] for pages, n in zip(table, lengths.tolist())])
        for pool in (keys, values)
    ]
    key_starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return prompt_attention(q, *packed, starts, key_starts, (longest, int(lengths.max())), **read)


def rotate_and_store(
    qkv: Tensor, norm: Tensor | None, turns: Tensor, positions: Tensor, table: Tensor, keys: Tensor, values: Tensor,
    eps: float,
) -> Tensor:  # fmt: skip
    """An empty row writes nothing, and its result is of no meaning."""
    page, kv_heads, dim = keys.shape[1:]
    every = qkv.view(len(qkv), -1, dim)
    x = every[:, :-kv_heads]
    if norm is not None:
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    turned = turned * torch.view_as_complex(turns.to(x))[positions.clamp(min=0), None]
    x = torch.view_as_real(turned).flatten(-2)
    for row, at in enumerate(positions.tolist()):
        if at >= 0:
            place = table[row, at // page], at % page
            keys[place], values[place] = x[row, -kv_heads:], every[row, -kv_heads:]
    return x[:, :-kv_heads]


def add_norm(residual: Tensor, delta: Tensor | None, delta_weight: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Changes the residual."""

    def normed(x: Tensor, by: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * by

    if delta is not None:
        residual += delta if delta_weight is None else normed(delta, delta_weight)
    return normed(residual, weight)


def scaled(values: Tensor, scales: Tensor, scale_rows: Tensor) -> Tensor:
    """The weights [..., N, K] of values and scales [..., R, ceil(K / 128)]; row n has those of scale_rows[n]."""
    return values * scales[..., scale_rows.long(), :].repeat_interleave(128, -1)[..., : values.shape[-1]]


def block_linear(
    x: Tensor, values: Tensor, scales: Tensor, scale_rows: Tensor, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    out = x @ scaled(values, scales, scale_rows).T
    return out + sum(added for added in (bias, residual) if added is not None)


def expert_products(
    x: Tensor, weights: Tensor, order: Tensor, starts: Tensor, each: int, scales: Tensor | None = None
) -> Tensor:
    if scales is not None:
        weights = scaled(weights, scales, torch.arange(weights.shape[1]) // 128)
    of_pair = torch.empty_like(order)
    of_pair[order] = torch.repeat_interleave(torch.arange(len(weights)), starts[1:] - starts[:-1])
    return torch.einsum("pc,pnc->pn", x.repeat_interleave(each, 0), weights[of_pair])


def expert_sum(each: Tensor, share: Tensor) -> Tensor:
    return torch.einsum("nkc,nk->nc", each.unflatten(0, share.shape), share)


Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def page_attention_inputs(rng: torch.Generator, size: int, dtype: torch.dtype) -> Inputs:
    heads, kv_heads, dim = ((4, 4, 16), (4, 2, 64), (16, 1, 24), (6, 3, 128))[size % 4]
    positions = torch.tensor([0, 15, 16, 40])
    (keys, values), table = pages_of(positions, 16, kv_heads, dim, dtype, rng)
    rest = {"scale": dim**-0.5, "window": (0, 20)[size // 2 % 2], "cap": (0.0, 30.0)[size % 2]}
    q = torch.randn(4, heads, dim, generator=rng).to(dtype)
    sinks = torch.randn(heads, generator=rng) if size % 3 else None
    return (q, keys, values, table, positions), {**rest, "sinks": sinks}


def prompt_attention_inputs(rng: torch.Generator, size: int, dtype: torch.dtype) -> Inputs:
    """A prompt of one token, an empty one, one with a past, and one of more than a block."""
    heads, kv_heads, dim = ((4, 4, 16), (4, 2, 64), (16, 1, 24), (6, 3, 128))[size % 4]
    starts, key_starts = torch.tensor([0, 1, 1, 6, 76]).int(), torch.tensor([0, 1, 4, 79, 149]).int()
    q, (keys, values) = torch.randn(76, heads, dim, generator=rng), torch.randn(2, 149, kv_heads, dim, generator=rng)
    rest = {"scale": dim**-0.5, "window": (0, 20)[size // 2 % 2], "cap": (0.0, 30.0)[size % 2]}
    return (q.to(dtype), keys.to(dtype), values.to(dtype), starts, key_starts, (70, 75)), rest


def page_prompt_attention_inputs(rng: torch.Generator, size: int, dtype: torch.dtype) -> Inputs:
    """As `prompt_attention_inputs`; the prompts end before, at and after the end of a page."""
    heads, kv_heads, dim = ((4, 4, 16), (4, 2, 64), (16, 1, 24), (6, 3, 128))[size % 4]
    starts, lengths = torch.tensor([0, 1, 1, 6, 76]), torch.tensor([1, 0, 64, 70])
    (keys, values), table = pages_of(lengths - 1, 32, kv_heads, dim, dtype, rng)
    q = torch.randn(76, heads, dim, generator=rng).to(dtype)
    rest = {"scale": dim**-0.5, "window": (0, 20)[size // 2 % 2], "cap": (0.0, 30.0)[size % 2]}
    return (q, keys, values, table, starts, lengths, 70), rest


def rotate_and_store_inputs(rng: torch.Generator, size: int, dtype: torch.dtype) -> Inputs:
    heads, kv_heads, dim = ((4, 4, 16), (4, 2, 64), (7, 1, 24), (6, 3, 128))[size % 4]
    positions = torch.tensor([0, 15, 16, 40])
    (keys, values), table = pages_of(positions, 16, kv_heads, dim, dtype, rng)
    qkv = torch.randn(4, (heads + 2 * kv_heads) * dim, generator=rng).to(dtype)
    norm = torch.randn(heads + kv_heads, dim, generator=rng).to(dtype) if size % 2 else None
    turns = torch.view_as_real(torch.polar(torch.ones(50, dim // 2), torch.randn(50, dim // 2, generator=rng)))
    return (qkv, norm, turns, positions, table, keys.nan_to_num(), values.nan_to_num(), 1e-6), {}


def add_norm_inputs(rng: torch.Generator, size: int, dtype: torch.dtype) -> Inputs:
    shape = (5, (8, 12, 67, 192)[size % 4])
    x, delta = torch.randn(2, *shape, generator=rng).to(dtype)
    inner, weight = torch.randn(2, shape[1], generator=rng)
    return (x, delta if size % 2 else None, inner if size in (3, 5) else None, weight, 1e-5), {}


def block_linear_inputs(rng: torch.Generator, size: int, dtype: torch.dtype) -> Inputs:
    """Rows of a decode step and of a prefill; rows of the weight in any order of their scales."""
    rows, depth, width = ((1, 128, 16), (5, 130, 200), (33, 20, 70), (70, 384, 129))[size % 4]
    values = (30 * torch.randn(width, depth, generator=rng)).to(torch.float8_e4m3fn)
    scales = 10 ** (2 * torch.rand(-(-width // 128) + 1, -(-depth // 128), generator=rng) - 4) / depth**0.5
    order = torch.randint(0, len(scales), (width,), generator=rng, dtype=torch.int32)
    x, bias, residual = (torch.randn(n, generator=rng).to(dtype) for n in ((rows, depth), (width,), (rows, width)))
    return (x, values, scales, order, bias if size % 2 else None, residual if size % 3 else None), {}


def expert_products_inputs(rng: torch.Generator, size: int, dtype: torch.dtype) -> Inputs:
    each, experts, width, depth = ((1, 3, 24, 40), (2, 6, 16, 130), (2, 40, 8, 16), (1, 1, 70, 64))[size % 4]
    of_pair = torch.randint(0, experts, (18 * each,), generator=rng)
    order = of_pair.argsort(stable=True)
    starts = torch.searchsorted(of_pair[order], torch.arange(experts + 1))
    x, weights = torch.randn(18, depth, generator=rng), torch.randn(experts, width, depth, generator=rng) / depth**0.5
    if size % 8 < 4:
        return (x.to(dtype), weights.to(dtype), order, starts, each), {}
    scales = torch.rand(experts, -(-width // 128), -(-depth // 128), generator=rng) / 100
    return (x.to(dtype), (100 * weights).to(torch.float8_e4m3fn), order, starts, each), {"scales": scales}


def expert_sum_inputs(rng: torch.Generator, size: int, dtype: torch.dtype) -> Inputs:
    rows, chosen, width = ((1, 1, 70), (5, 2, 64), (3, 8, 1030), (2, 3, 16))[size % 4]
    return (torch.randn(rows * chosen, width, generator=rng).to(dtype), torch.rand(rows, chosen, generator=rng)), {}
