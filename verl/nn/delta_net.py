"""Gated delta nets over a packed forest of segments: the layers of Qwen3-Next and Qwen3.5 between those of attention.

Such a layer keeps a state instead of keys and values (Yang et al., 2412.06464). In a forest a segment begins with the
state in which its parent ended, and a root with zeros. A prompt is therefore computed once for all of its answers, and
gets the sum of their gradients; no other segment is visible in a state."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from verl.accel.delta import unit
from verl.accel.families import DELTA_TYPES, STATE_LAYERS, unpacked_states
from verl.accel.transfer import to_device
from verl.batch import Batch
from verl.errors import Refused
from verl.nn.attention import WAY_OUT, group_segments

CHUNK_TOKENS = 64
"""The tokens between two states that are computed; within a chunk tokens are compared in pairs."""
_FREE_PADDING = 256  # tokens of padding in a block that are always accepted
_MAX_WASTE = 0.2


@dataclass(frozen=True, slots=True)
class StateBlock:
    """Segments of one depth that are computed together."""

    index: Tensor  # [b, W] the tokens of each segment; those of padding have the index T, that of a row of zeros
    parent: Tensor | None  # [b] the parent of each among the segments of the depth above; None: roots


@dataclass(slots=True)
class StatePlan:
    """The index tensors of the delta nets for one micro-batch, the same for every layer."""

    depths: list[list[StateBlock]]
    """The blocks of each depth: roots, their children, and so on."""
    inverse: Tensor
    """[T] The place of each token in the blocks, one after the other."""
    previous: np.ndarray
    """[T] The token before each one, of its own segment or its parent's; -1: none."""
    by_lag: dict[int, Tensor] = field(default_factory=dict)

    def lag(self, tokens: int) -> Tensor:
        """Return the index [T] of the token that is so many tokens before each one; T where there is none."""
        if tokens not in self.by_lag:
            at = self.previous
            for _ in range(tokens - 1):
                at = np.where(at >= 0, self.previous[at], -1)
            self.by_lag[tokens] = to_device(np.where(at >= 0, at, len(at)), self.inverse.device)
        return self.by_lag[tokens]


def plan_states(batch: Batch, device: torch.device) -> StatePlan:
    """Group the segments of `batch` by depth, and those of one depth by their lengths."""
    lengths, parent, starts = np.diff(batch.seg_start), batch.parent, batch.seg_start[:-1]
    previous = np.arange(batch.num_tokens) - 1
    previous[starts] = np.where(parent >= 0, batch.seg_start[parent + 1] - 1, -1)
    depth = np.zeros(len(parent), np.int64)
    for segment, above in enumerate(parent):
        depth[segment] = depth[above] + 1 if above >= 0 else 0
    depths, place = list[list[StateBlock]](), np.zeros(len(parent), np.int64)  # place of a segment in its depth
    inverse, used = np.zeros(batch.num_tokens, np.int64), 0
    for level in range(int(depth.max()) + 1):
        members, blocks, first = np.flatnonzero(depth == level), list[StateBlock](), 0
        for group in group_segments(lengths[members], np.ones_like(members), _MAX_WASTE, _FREE_PADDING):
            of_block = members[group]
            tokens = np.arange(int(lengths[of_block].max()))
            real = tokens < lengths[of_block, None]
            index = np.where(real, starts[of_block, None] + tokens, batch.num_tokens)
            inverse[index[real]] = used + np.flatnonzero(real)
            used += index.size
            place[of_block] = first + np.arange(len(of_block))
            first += len(of_block)
            above = to_device(place[parent[of_block]], device) if level else None
            blocks.append(StateBlock(to_device(index, device), above))
        depths.append(blocks)
    return StatePlan(depths, to_device(inverse, device), previous)


def causal_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, plan: StatePlan) -> Tensor:
    """Return the convolution [T, C] of each channel of x [T, C] over a token and those before it, with the weights
    [C, n] of which the last is the token's own."""
    padded, newest = F.pad(x, (0, 0, 0, 1)), weight.shape[1] - 1
    out = x * weight[:, newest]
    for lag in range(1, newest + 1):
        out = out + padded.index_select(0, plan.lag(lag)) * weight[:, newest - lag]
    return out if bias is None else out + bias


def forest_delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, plan: StatePlan) -> Tensor:
    """Return the outputs [T, H, V] of the gated delta rule, each segment from the state in which its parent ended.
    Arguments: those of `gated_delta_rule` for the tokens of a pack, [T, ...]."""
    heads, width = v.shape[1:]
    rows = [F.pad(x.flatten(1), (0, 0, 0, 1)) for x in (q, k, v, decay, rate)]
    out, above = list[Tensor](), q.new_zeros(0)
    for blocks in plan.depths:
        ended = list[Tensor]()
        for block in blocks:
            count, tokens = block.index.shape
            taken = (x.index_select(0, block.index.flatten()).view(count, tokens, heads, -1) for x in rows)
            of_q, of_k, of_v, of_decay, of_rate = taken
            state = None if block.parent is None else above.index_select(0, block.parent)
            found, end = gated_delta_rule(of_q, of_k, of_v, of_decay[..., 0], of_rate[..., 0], state)
            out.append(found.reshape(-1, heads, width))
            ended.append(end)
        above = torch.cat(ended)
    return torch.cat(out).index_select(0, plan.inverse)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the outputs [b, t, H, V] of the gated delta rule for t tokens, and the state [b, H, K, V] after them.

    With the state S and one token: S <- exp(decay) S; S <- S + k (rate (v - S^T k))^T; the output is S^T q.
    q and k: [b, t, H, K] · v: [b, t, H, V] · decay (a logarithm) and rate: [b, t, H] · state: before the first token,
    None for zeros. A token of zeros leaves the state as it is.

    The tokens of a chunk are solved for together: their corrections u = rate (v - S^T k) are a triangular system, of
    which the state before the chunk is one more right-hand side."""
    (count, tokens, heads, inner), width = q.shape, v.shape[-1]
    size = min(CHUNK_TOKENS, tokens)
    chunks = -(-tokens // size)

    def cut(x: Tensor) -> Tensor:  # [b, t, H, n] -> [b, H, chunks, size, n]
        x = F.pad(x, (0, 0, 0, 0, 0, chunks * size - tokens))
        return x.view(count, chunks, size, heads, -1).permute(0, 3, 1, 2, 4)

    q, k, v, rate, sums = (cut(x) for x in (q, k, v, rate[..., None], decay[..., None]))
    sums = sums[..., 0].cumsum(-1)  # logarithm of the decay from the chunk's begin to each token, its own included
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    between = (sums[..., :, None] - sums[..., None, :]).masked_fill(later, -torch.inf).exp()
    pairs = rate * (k @ k.transpose(-1, -2)) * between
    wanted = torch.cat([v, k * sums.exp()[..., None]], -1) * rate
    solved = torch.linalg.solve_triangular(pairs, wanted, upper=False, unitriangular=True)
    own, of_state = solved.split((width, inner), -1)
    within = (q @ k.transpose(-1, -2)) * between
    reads, writes = q * sums.exp()[..., None], k * (sums[..., -1:] - sums).exp()[..., None]
    kept = sums[..., -1].exp()[..., None, None]
    if state is None:
        state = q.new_zeros(count, heads, inner, width)
    out = list[Tensor]()
    for c in range(chunks):
        corrections = own[:, :, c] - of_state[:, :, c] @ state
        out.append(reads[:, :, c] @ state + within[:, :, c] @ corrections)
        state = kept[:, :, c] * state + writes[:, :, c].transpose(-1, -2) @ corrections
    found = torch.stack(out, 2).permute(0, 2, 3, 1, 4).reshape(count, chunks * size, heads, width)
    return found[:, :tokens], state


# -- the layers of a model -------------------------------------------------------------------------------------------


def route_delta_nets(model: Any) -> bool:
    """Let the delta nets of a model compute packed batches; return False if it keeps no state. Raise ValueError for a
    model with states that are not computed here: from packed rows a state would pass on to the next row."""
    config = model.config.get_text_config()
    kinds = [kind for kind in getattr(config, "layer_types", None) or () if kind in STATE_LAYERS]
    if not kinds and not getattr(model, "_is_stateful", False):
        return False
    nets = [module for module in model.modules() if hasattr(module, "A_log") and hasattr(module, "conv1d")]
    if config.model_type not in DELTA_TYPES or len(nets) != len(kinds):
        raise Refused(f"{type(model).__name__} {unpacked_states(config.model_type)}")
    for module in nets:
        module.forward = MethodType(_delta_forward, module)
    return True


def _delta_forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """Compute a delta net's output [1, T, hidden] from hidden_states [1, T, hidden]. The arguments are those of
    transformers' modules."""
    plan: StatePlan | None = kwargs.get("verl_states")
    if plan is None:
        raise Refused(f"{type(self).__name__} computes whole packed rows, and got a part of them; {WAY_OUT}")
    assert kwargs.get("cache_params") is None, "packed rows are driven by a plan alone"
    mixed, gate, rate, decay = _projected(self, hidden_states[0])
    exact = torch.promote_types(hidden_states.dtype, torch.float32)
    weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
    mixed = F.silu(causal_convolution(mixed, weight, bias, plan)).to(mixed.dtype)
    with torch.autocast(hidden_states.device.type, enabled=False):
        q, k, v = mixed.to(exact).split((self.key_dim, self.key_dim, self.value_dim), -1)
        q, k = (unit(x.view(len(x), self.num_k_heads, -1)) for x in (q, k))
        q, k = (x.repeat_interleave(self.num_v_heads // self.num_k_heads, 1) for x in (q, k))
        steps = F.softplus(decay.to(exact) + self.dt_bias.to(exact))
        decay = -self.A_log.to(exact).exp() * steps
        v = v.view(len(v), self.num_v_heads, -1)
        found = forest_delta_rule(q * self.head_k_dim**-0.5, k, v, decay, rate.to(exact).sigmoid(), plan)
    normed = self.norm(found.to(mixed.dtype).flatten(0, 1), gate.reshape(-1, self.head_v_dim))
    out: Tensor = self.out_proj(normed.view(1, len(mixed), -1))
    return out


def _projected(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return, for x [T, hidden], queries, keys and values in one [T, C], gates [T, H, V], and the inputs of rates and
    of decays [T, H]. Qwen3-Next has them in two projections, in which they are neighbours by key head."""
    tokens, heads, each = len(x), self.num_k_heads, self.num_v_heads // self.num_k_heads
    if not hasattr(self, "in_proj_qkvz"):
        gate = self.in_proj_z(x).view(tokens, self.num_v_heads, -1)
        return self.in_proj_qkv(x), gate, self.in_proj_b(x), self.in_proj_a(x)
    width = each * self.head_v_dim
    parts = self.in_proj_qkvz(x).view(tokens, heads, -1).split((self.head_k_dim, self.head_k_dim, width, width), -1)
    *mixed, gate = (part.reshape(tokens, -1) for part in parts)
    rate, decay = (part.reshape(tokens, -1) for part in self.in_proj_ba(x).view(tokens, heads, -1).split(each, -1))
    return torch.cat(mixed, -1), gate.view(tokens, self.num_v_heads, -1), rate, decay
