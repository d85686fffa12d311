"""Ranks that share the tokens of a packed forest: every rank of a group has a run of them, and a shared prompt is still
computed once. For attention a rank gets all tokens of some heads (Ulysses, 2309.14509), or it has all heads of its own
tokens and gets the keys and values of all tokens (context parallelism), which works with any number of heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from verl.errors import Refused
from verl.media_tokens import MediaTokens
from verl.nn.torch_compat import all_gather_single, reduce_scatter_single

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""An attention function: q [Q, H, D], k and v [T, KV, D] -> [Q, H, D]."""


@dataclass(frozen=True, slots=True)
class TokenRuns:
    """The division of the tokens of a batch over ranks, in equal runs; the last ones may have padding."""

    group: dist.ProcessGroup
    """The ranks that share the tokens."""
    num_tokens: int
    """Tokens of the batch, without padding."""

    @property
    def run(self) -> int:
        return -(-self.num_tokens // self.group.size())

    def mine(self, x: Tensor) -> Tensor:
        """Return this rank's run [..., run] of x [..., T]."""
        padded = F.pad(x, (0, self.run * self.group.size() - self.num_tokens))
        return padded[..., self.run * self.group.rank() :][..., : self.run]

    def media_of_mine(self, media: MediaTokens) -> MediaTokens | None:
        """Return the media of this rank's run, of which the padding is text."""
        medium, feature = self.mine(media.medium + 1) - 1, self.mine(media.feature)
        return replace(media, medium=medium, feature=feature).at(torch.arange(self.run))

    def rows_of_mine(self, index: Tensor) -> Tensor:
        """Return the positions in `index` of those tokens of the batch [n] that are in this rank's run."""
        return (index // self.run == self.group.rank()).nonzero()[:, 0]

    def together(self, values: Tensor, which: Tensor, size: int) -> Tensor:
        """Return a tensor [size, ...] on every rank, to which each rank contributes its computed `values` as the rows
        `which`. All ranks compute the same loss from it; the rank that computed a row gets the gradient of that row,
        once."""
        out: Tensor = _Together.apply(values, which.to(values.device), size, self.group)
        return out


@dataclass(frozen=True, slots=True)
class HeadExchange(TokenRuns):
    """Ulysses: for attention each rank has all tokens of some heads."""

    @property
    def queries(self) -> None:
        """None: a rank has the queries of all tokens."""

    def attend(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute attention for this rank's tokens: q, k, v [run, heads, D] -> [run, H, D]."""
        return self._to_tokens(attention(*(self._to_heads(x) for x in (q, k, v))))

    def _to_heads(self, x: Tensor) -> Tensor:
        """Exchange all heads of this rank's tokens [run, H, D] for all tokens of its heads [T, H / ranks, D]."""
        parts = x.reshape(self.run, self.group.size(), -1, x.shape[-1]).transpose(0, 1)
        return AllToAll.apply(parts, self.group, None, None).flatten(0, 1)[: self.num_tokens]

    def _to_tokens(self, x: Tensor) -> Tensor:
        """Exchange all tokens of this rank's heads [T, H / ranks, D] for all heads of its tokens [run, H, D]."""
        padded = F.pad(x, (0, 0, 0, 0, 0, self.run * self.group.size() - self.num_tokens))
        parts = padded.view(self.group.size(), self.run, *x.shape[1:])
        return AllToAll.apply(parts, self.group, None, None).transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True, slots=True)
class KeyGather(TokenRuns):
    """Context parallelism: each rank computes attention from the queries of its run to the keys and values of all
    tokens."""

    @property
    def queries(self) -> tuple[int, int]:
        """The first token of the run, and the one after its last; the last runs may be shorter or empty."""
        first = min(self.run * self.group.rank(), self.num_tokens)
        return first, min(first + self.run, self.num_tokens)

    def attend(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute attention for this rank's tokens: q [run, H, D], k and v [run, KV, D] -> [run, H, D]. Keys and values
        are gathered in one collective, so that its order is the same on all ranks, in the backward pass too."""
        both = _GatherRuns.apply(torch.cat((k, v.to(k.dtype)), -1), self.group)[: self.num_tokens]
        every_k, every_v = both.split((k.shape[-1], v.shape[-1]), -1)
        first, end = self.queries
        if first == end:
            nothing = q[:0].sum() + both[:0].sum()  # the backward pass of every rank makes the exchange too
            return q.new_zeros(*q.shape[:2], v.shape[-1], dtype=v.dtype) + nothing.to(v.dtype)
        out = attention(q[: end - first], every_k, every_v.to(v.dtype))
        return F.pad(out, (0, 0, 0, 0, 0, self.run - (end - first)))


class _GatherRuns(torch.autograd.Function):
    """Gather x [run, ...] of each rank as [ranks * run, ...] on all; the gradient of a run is the sum over all
    ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.new_empty(len(x) * group.size(), *x.shape[1:])
        all_gather_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None]:
        d_x = d_out.new_empty(len(d_out) // ctx.group.size(), *d_out.shape[1:])
        reduce_scatter_single(d_x, d_out.contiguous(), group=ctx.group)
        return d_x, None


class AllToAll(torch.autograd.Function):
    """Send rows [sum sent, ...] to the ranks of the group, and return the received rows [sum came, ...]. sent, came:
    the number of rows per rank; None: the same number for every rank."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, sent: list[int] | None, came: list[int] | None
    ) -> Tensor:
        ctx.how = group, came, sent
        out = x.new_empty(len(x) if came is None else sum(came), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), came, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None, None, None]:
        return AllToAll.apply(d_out, *ctx.how), None, None, None


class _Together(torch.autograd.Function):
    """The autograd function of `TokenRuns.together`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, which: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(which)
        out = values.new_zeros(size, *values.shape[1:])
        out[which] = values
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None, None, None]:
        (which,) = ctx.saved_tensors
        return d_out[which], None, None, None


def check_heads(config: Any, sequence: int, tensor: int) -> None:
    """Raise ValueError if the heads of each of `tensor` ranks cannot be shared equally by `sequence` ranks."""
    heads = config.num_attention_heads  # without this setting each head has keys of its own
    key_heads = config.to_dict().get("num_key_value_heads") or heads
    for name, number in {"attention heads": heads, "key-value heads": key_heads}.items():
        if number % (sequence * tensor):
            raise Refused(
                f"parallel.sequence={sequence} with parallel.tensor={tensor}: the model has {number} {name}, which "
                f"{sequence * tensor} ranks cannot share equally; use a divisor of it"
            )
