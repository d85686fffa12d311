"""A decode step over pages by fused operations: ten launches per layer, of which four are matrix products, and two more
if the step computes prompts beside its rows; of prompts without rows there are nine.

The output of a block is added to the residual by the next norm, which also applies the block's own output norm (Gemma).
So every family has the same ten: norm, qkv, rotation, attention and its merge, out, norm, up, gate, down.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, view_as_real

from verl.rollout.native.layers import Experts, FeedForward, Norm
from verl.rollout.native.model import Model
from verl.rollout.native.ops import DecodeOps
from verl.rollout.native.sets import SetRows, adapted


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The last rows of a step that are tokens of prompts, by prompt; each prompt has several rows or none."""

    tokens: int
    """The number of these rows, also those that belong to no prompt."""
    starts: Tensor
    """The first row of each prompt, counted from the first prompt's [prompts + 1]."""
    lengths: Tensor
    """The tokens of each prompt up to its last row [prompts]."""
    table: Tensor
    """The pages of each prompt [prompts, W]."""

    @property
    def ends(self) -> Tensor:
        """The last row of each prompt [prompts], counted as `starts`."""
        return (self.starts[1:] - 1).clamp(min=0)


def decode_hidden(
    ops: DecodeOps,
    model: Model,
    pool: Tensor,
    table: Tensor,
    tokens: Tensor,
    positions: Tensor,
    prompts: PromptRows | None = None,
    sets: SetRows | None = None,
) -> Tensor:
    """Return the final hidden states [n, hidden] of tokens at positions, both [n], and write their keys and values into
    `pool` [layers, 2, pages, PAGE, K, D]. Row i has the pages table[i]; a position below 0 is an empty row. The last
    rows may be tokens of `prompts`: these see each other. sets: the LoRA sets of all rows, if any has one."""
    s, weights = model.shape, model.live
    single = len(tokens) - (0 if prompts is None else prompts.tokens)
    turns = view_as_real(model.rotary.table)  # [kinds, positions, D/2, 2]
    x, delta, after = weights.embedded(tokens), None, None

    def normed(norm: Norm) -> Tensor:
        """Add what the last block computed to the residual, and norm it."""
        out: Tensor = ops.add_norm(x, delta, None if after is None else after.weight, norm.weight, s.eps)
        return out

    for i, layer in enumerate(adapted(layer, i, sets) for i, layer in enumerate(weights.layers)):
        qkv, keys, values = layer.qkv(normed(layer.norm)), pool[i, 0], pool[i, 1]
        q = ops.rotate_and_store(qkv, layer.qk_norm, turns[layer.rope], positions, table, keys, values, s.eps)
        read, parts = {"scale": s.query_scale, "window": layer.window, "cap": s.attention_cap}, list[Tensor]()
        if single:
            parts.append(ops.page_attention(q[:single], keys, values, table[:single], positions[:single], **read))
        if prompts is not None:
            where = prompts.table, prompts.starts, prompts.lengths, prompts.tokens
            parts.append(ops.page_prompt_attention(q[single:], keys, values, *where, **read))
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        delta, after = layer.out(mixed.flatten(1)), layer.out_norm
        delta, after = _fed_forward(ops, layer.mlp, normed(layer.mlp_norm)), layer.mlp_out_norm
    return normed(weights.norm)


def _fed_forward(ops: DecodeOps, block: FeedForward | Experts, x: Tensor) -> Tensor:
    """Return the output [n, hidden] of a feed-forward block for x [n, hidden], without a synchronisation with the
    host."""
    if isinstance(block, FeedForward):
        return block.down(ops.gated(block.up(x), block.activation))
    assert block.stacked is not None, "products of experts are one tensor"
    up, down = block.stacked
    share, expert = block.routed(x)  # [n, k]
    pairs = expert.flatten()
    order = pairs.argsort(stable=True)
    starts = torch.searchsorted(pairs[order], torch.arange(len(up.weights) + 1, device=x.device))
    both = ops.expert_products(x, up.weights, order, starts, block.chosen, up.scales)
    inner = ops.gated(both, block.experts[0].activation)
    mixed: Tensor = ops.expert_sum(ops.expert_products(inner, down.weights, order, starts, 1, down.scales), share)
    return mixed
