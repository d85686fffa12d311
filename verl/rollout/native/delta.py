"""Gated delta nets in rollouts: the states of rows in place of keys and values, the computation of prompts and of one
token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from verl.accel.delta import gated_norm, unit
from verl.accel.operations import Call
from verl.accel.transfer import to_device
from verl.nn.attention import group_segments
from verl.nn.delta_net import gated_delta_rule
from verl.rollout.native.architecture import DeltaSizes, Shape

MAX_WASTE, FREE_PADDING = 0.5, 256  # of a block of prompts: the share and the tokens of padding that are accepted


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """The states of rows in all delta nets of a decoder: all that they keep of the tokens before."""

    windows: Tensor
    """[layers, rows, w, C] The channels of the last w tokens, zeros before the first one."""
    sums: Tensor
    """[layers, rows, H, K, V] The states of the delta rule."""

    @classmethod
    def empty(cls, s: Shape, rows: int, dtype: torch.dtype, device: torch.device) -> States:
        """Return the states of rows without tokens."""
        sizes, layers = s.delta, s.layers - s.kv_layers
        assert sizes is not None
        exact = torch.promote_types(dtype, torch.float32)
        windows = torch.zeros(layers, rows, sizes.window, sizes.channels, dtype=dtype, device=device)
        shape = layers, rows, sizes.heads, sizes.key_dim, sizes.value_dim
        return cls(windows, torch.zeros(shape, dtype=exact, device=device))

    @property
    def rows(self) -> int:
        return self.windows.shape[1]

    @property
    def nbytes(self) -> int:
        return self.windows.nbytes + self.sums.nbytes

    def copy(self) -> States:
        return States(self.windows.clone(), self.sums.clone())

    def write(self, rows: slice | int, of: States, taken: slice | int) -> None:
        """Write the states of some rows of another one. An index of a single row is written to each of `rows`."""
        for mine, other in ((self.windows, of.windows), (self.sums, of.sums)):
            new = other[:, taken]
            mine[:, rows] = new[:, None] if isinstance(taken, int) and isinstance(rows, slice) else new


@dataclass(frozen=True, slots=True, eq=False)
class PromptBlock:
    """Parts of prompts that are computed together."""

    members: tuple[int, ...]
    index: Tensor
    """[b, t] The tokens of each; padding has the index T, that of a row of zeros."""
    lengths: tuple[int, ...]


class PromptStates:
    """The parts of prompts that a pass computes, in blocks of similar length, with the state of each, which becomes
    that after its tokens."""

    def __init__(self, lengths: Sequence[int], states: Sequence[States], device: torch.device) -> None:
        """lengths: the tokens of each part, one after the other · states: of one row each"""
        self._states, self._tokens = states, sum(lengths)
        sizes, starts, blocks = np.asarray(lengths), np.cumsum([0, *lengths[:-1]]), list[PromptBlock]()
        for group in group_segments(sizes, np.ones_like(sizes), MAX_WASTE, FREE_PADDING):
            tokens = np.arange(int(sizes[group].max()))
            index = np.where(tokens < sizes[group, None], starts[group, None] + tokens, self._tokens)
            blocks.append(PromptBlock(tuple(group.tolist()), to_device(index, device), tuple(sizes[group].tolist())))
        self._blocks = blocks

    def run(self, layer: int, net: DeltaNet, given: Tensor) -> Tensor:
        """Return the outputs [T, H V] of a delta net for `given` [T, ...], what its product returns."""
        out = given.new_empty(len(given), net.sizes.values)
        padded = F.pad(given, (0, 0, 0, 1))
        for block in self._blocks:
            mine = [self._states[i] for i in block.members]
            windows = torch.stack([one.windows[layer, 0] for one in mine])
            sums = torch.stack([one.sums[layer, 0] for one in mine])
            real = block.index < self._tokens
            found, windows, sums = net.prompts(padded[block.index], real, block.lengths, windows, sums)
            out[block.index[real]] = found[real]
            for one, window, total in zip(mine, windows, sums, strict=True):
                one.windows[layer, 0], one.sums[layer, 0] = window, total
        return out


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """The weights of a gated delta net, besides those of its products."""

    sizes: DeltaSizes
    taps: Tensor
    """[w + 1, C] The weights of the convolution, the token's own last."""
    decays: Tensor
    """[H] A_log."""
    steps: Tensor
    """[H] dt_bias."""
    norm: Tensor
    """[V]"""
    eps: float
    step: Call
    """The operation `delta_step`."""

    def token(self, given: Tensor, windows: Tensor, sums: Tensor) -> Tensor:
        """Return the outputs [n, H V] for one token of each row, and update the windows [n, w, C] and states [n, H, K,
        V] of the rows. given: [n, ...], what the product returns"""
        weights = self.taps, self.decays, self.steps, self.norm
        out: Tensor = self.step(given, *weights, windows, sums, key_heads=self.sizes.key_heads, eps=self.eps)
        return out

    def prompts(
        self, given: Tensor, real: Tensor, lengths: Sequence[int], windows: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs [b, t, H V] for parts of prompts, and the windows and states after them.

        given: [b, t, ...], what the product returns · real: [b, t] what is no padding · lengths: the tokens of each ·
        windows: [b, w, C] · sums: [b, H, K, V]"""
        s, (count, tokens), exact = self.sizes, given.shape[:2], sums.dtype
        mixed, gate, rate, decay = given.split((s.channels, s.values, s.heads, s.heads), -1)
        seen = torch.cat([windows, mixed], 1)
        ends = torch.stack([row[n : n + s.window] for row, n in zip(seen, lengths, strict=True)])
        summed = sum(seen[:, i : i + tokens] * tap for i, tap in enumerate(self.taps))
        mixed = F.silu(summed).to(given.dtype).to(exact)
        q, k, v = mixed.split((s.keys, s.keys, s.values), -1)
        q, k = (unit(x.view(count, tokens, s.key_heads, -1)) for x in (q, k))
        q, k = (x.repeat_interleave(s.heads // s.key_heads, 2) for x in (q, k))
        fade = -self.decays.to(exact).exp() * F.softplus(decay.to(exact) + self.steps)
        rate, k = rate.to(exact).sigmoid() * real[..., None], k * real[..., None, None]
        given_v = v.view(count, tokens, s.heads, -1)
        found, sums = gated_delta_rule(q * s.key_dim**-0.5, k, given_v, fade * real[..., None], rate, sums)
        gate = gate.view(count, tokens, s.heads, -1)
        return gated_norm(found, self.norm, gate, self.eps).flatten(2), ends, sums
