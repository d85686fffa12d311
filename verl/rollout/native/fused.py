"""A decode step by the kernels of accel/cuda: ten launches per layer, of which four are products.

The residual is added where the next norm reads it, also after a norm of its own (Gemma), so every family has the same
ten: norm, qkv, rotation, attention and its merge, out, norm, up, gate, down.
"""

from __future__ import annotations

from torch import Tensor, view_as_real

from verl.accel.cuda.decode import DecodeOps
from verl.rollout.native.layers import Experts, Norm
from verl.rollout.native.model import Model


def decode_hidden(
    ops: DecodeOps, model: Model, pool: Tensor, table: Tensor, tokens: Tensor, positions: Tensor
) -> Tensor:
    """tokens and positions [n] -> final hidden states [n, hidden]. The keys and values of the tokens are written into
    `pool` [layers, 2, pages, PAGE, K, D], of which row i has the pages table[i]; a position below 0 is an empty row."""
    s, weights = model.shape, model.live
    turns = view_as_real(model.rotary.table)  # [kinds, positions, D/2, 2]
    splits = ops.splits_of(len(tokens), s.kv_heads, table.shape[1] * pool.shape[3], ops.processors)
    x, delta, after = weights.embedded(tokens), None, None

    def normed(norm: Norm) -> Tensor:
        """Add what the last block computed to the residual, and norm it."""
        return ops.add_norm(x, delta, None if after is None else after.weight, norm.weight, s.eps)

    for i, layer in enumerate(weights.layers):
        qkv, keys, values = layer.qkv(normed(layer.norm)), pool[i, 0], pool[i, 1]
        q = ops.rotate_and_store(qkv, layer.qk_norm, turns[layer.rope], positions, table, keys, values, s.eps)
        read = {"scale": s.query_scale, "window": layer.window, "cap": s.attention_cap, "splits": splits}
        mixed = ops.attend(q, keys, values, table, positions, **read)
        delta, after = layer.out(mixed.flatten(1)), layer.out_norm
        h, mlp = normed(layer.mlp_norm), layer.mlp
        delta = mlp(h) if isinstance(mlp, Experts) else mlp.down(ops.gated(mlp.up(h), mlp.activation))
        after = layer.mlp_out_norm
    return normed(weights.norm)
