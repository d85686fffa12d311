"""Parts of a decoder layer besides attention: norms and feed-forward blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl.accel.linear import Linear
from verl.accel.operations import Call

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
"""The activation that is computed, by its names in configs."""


class Norm:
    """An RMS norm of rows [T, width], by the operation `rms_norm`. Its weight may have more precision than the rows."""

    def __init__(self, weight: Tensor, eps: float, rms_norm: Call) -> None:
        self.weight, self.eps, self.rms_norm = weight, eps, rms_norm

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self.rms_norm(x, self.weight, self.eps)
        return out


class FeedForward:
    """The block down(act(gate(x)) * up(x)). `up` computes gate and up as one product, and the operation `gated`
    act(gate) * up."""

    def __init__(self, up: Linear, down: Linear, activation: str, gated: Call) -> None:
        self.up, self.down, self.activation, self.gated = up, down, activation, gated

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self._inner(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Add the block's output for x to `residual`, both [T, hidden], and return the sum."""
        return self.down.add_to(residual, self._inner(x))

    def _inner(self, x: Tensor) -> Tensor:
        out: Tensor = self.gated(self.up(x), self.activation)  # [T, 2 ffn] -> [T, ffn]
        return out


@dataclass(frozen=True, slots=True)
class Stacked:
    """The weights [E, N, K] of a product of all experts, as one tensor."""

    weights: Tensor
    scales: Tensor | None
    """The scales [E, ceil(N / 128), ceil(K / 128)] of weights in blocks of 8 bits."""


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The expert that computes every row, times the sigmoid of a gate."""

    block: FeedForward
    gate: Linear
    """The product [hidden] -> [1]."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.block(x).mul_(self.gate(x).sigmoid())


class Experts:
    """A mixture of experts: each row is computed by the `chosen` experts with the highest router probabilities, and
    these are the weights of their sum, to which a shared expert is added if there is one."""

    def __init__(
        self,
        router: Linear,
        experts: tuple[FeedForward, ...],
        chosen: int,
        normalised: bool,
        stacked: tuple[Stacked, Stacked] | None,
        shared: SharedExpert | None,
    ) -> None:
        """`stacked`: the weights up [E, 2 ffn, hidden] and down [E, hidden, ffn] of all experts, if each is one
        tensor."""
        self.router, self.experts, self.chosen, self.normalised = router, experts, chosen, normalised
        self.stacked, self.shared = stacked, shared

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of the chosen experts, float32 [T, k], and their indices [T, k], for x [T, hidden]."""
        share, expert = torch.softmax(self.router(x).float(), dim=-1).topk(self.chosen, dim=-1)
        return share / share.sum(-1, keepdim=True) if self.normalised else share, expert

    def expert(self, number: int, rows: Tensor) -> FeedForward:
        """Return the block of an expert. rows: those of x that it computes"""
        return self.experts[number]

    def __call__(self, x: Tensor) -> Tensor:
        return self.add_to(torch.zeros_like(x), x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Add the block's output for x to `residual`, both [T, hidden], and return the sum."""
        share, expert = self.routed(x)
        order = expert.flatten().argsort(stable=True)  # pairs (row, choice) by expert: one product per expert
        row, share = order // self.chosen, share.flatten()[order, None].to(x.dtype)
        start = 0
        mixed = torch.zeros_like(x)
        for i, n in enumerate(torch.bincount(expert.flatten(), minlength=len(self.experts)).tolist()):
            if n:
                rows = row[start : start + n]
                out = self.expert(i, rows)(x.index_select(0, rows))
                mixed.index_add_(0, rows, out.mul_(share[start : start + n]))
                start += n
        return residual.add_(mixed if self.shared is None else mixed.add_(self.shared(x)))


def add_normed(residual: Tensor, block: Linear | FeedForward | Experts, x: Tensor, norm: Norm | None) -> Tensor:
    """Return residual + norm(block(x)), or residual + block(x) without a norm."""
    return block.add_to(residual, x) if norm is None else residual.add_(norm(block(x)))
