"""Ranks that share the tokens of a packed forest: every rank of a group has a run of them, and a shared prompt is still
computed once. While they attend, each has all tokens of some heads (Ulysses, 2309.14509), or all heads of its own
tokens with the keys and values of all (context parallelism), which works with any number of heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from verl.errors import Refused

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [Q, H, D], k and v [T, KV, D] -> [Q, H, D]."""


@dataclass(frozen=True, slots=True)
class TokenRuns:
    """`num_tokens` of a batch over the ranks of `group`, padded to equal runs of `run`."""

    group: dist.ProcessGroup
    num_tokens: int

    @property
    def run(self) -> int:
        return -(-self.num_tokens // self.group.size())

    def mine(self, x: Tensor) -> Tensor:
        """[..., T] -> [..., run] of this rank."""
        padded = F.pad(x, (0, self.run * self.group.size() - self.num_tokens))
        return padded[..., self.run * self.group.rank() :][..., : self.run]

    def rows_of_mine(self, index: Tensor) -> Tensor:
        """[n] tokens of the batch -> which of them are in this rank's run."""
        return (index // self.run == self.group.rank()).nonzero()[:, 0]

    def together(self, values: Tensor, which: Tensor, size: int) -> Tensor:
        """Return [size, ...] on every rank, of which this one computed the rows `which`. All ranks continue with the
        same values to the same loss; the gradient of a value reaches the rank that computed it, once."""
        out: Tensor = _Together.apply(values, which.to(values.device), size, self.group)
        return out


@dataclass(frozen=True, slots=True)
class HeadExchange(TokenRuns):
    """Each rank attends with all tokens of some heads."""

    @property
    def queries(self) -> None:
        """A rank has the queries of all tokens."""

    def attend(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v [run, heads, D] -> [run, H, D]."""
        return self._to_tokens(attention(*(self._to_heads(x) for x in (q, k, v))))

    def _to_heads(self, x: Tensor) -> Tensor:
        """[run, H, D] -> [T, H / ranks, D]."""
        parts = x.reshape(self.run, self.group.size(), -1, x.shape[-1]).transpose(0, 1)
        return AllToAll.apply(parts, self.group, None, None).flatten(0, 1)[: self.num_tokens]

    def _to_tokens(self, x: Tensor) -> Tensor:
        """[T, H / ranks, D] -> [run, H, D]."""
        padded = F.pad(x, (0, 0, 0, 0, 0, self.run * self.group.size() - self.num_tokens))
        parts = padded.view(self.group.size(), self.run, *x.shape[1:])
        return AllToAll.apply(parts, self.group, None, None).transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True, slots=True)
class KeyGather(TokenRuns):
    """Each rank attends with the queries of its run over the keys and values of all tokens."""

    @property
    def queries(self) -> tuple[int, int]:
        """The first token of the run, and the first behind it; the last runs may have padding or no token at all."""
        first = min(self.run * self.group.rank(), self.num_tokens)
        return first, min(first + self.run, self.num_tokens)

    def attend(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [run, H, D], k and v [run, KV, D] -> [run, H, D], in one exchange, so that all ranks make it in the same
        order, in the backward pass too."""
        both = _GatherRuns.apply(torch.cat((k, v.to(k.dtype)), -1), self.group)[: self.num_tokens]
        every_k, every_v = both.split((k.shape[-1], v.shape[-1]), -1)
        first, end = self.queries
        if first == end:
            nothing = q[:0].sum() + both[:0].sum()  # the backward pass of every rank makes the exchange too
            return q.new_zeros(*q.shape[:2], v.shape[-1], dtype=v.dtype) + nothing.to(v.dtype)
        out = attention(q[: end - first], every_k, every_v.to(v.dtype))
        return F.pad(out, (0, 0, 0, 0, 0, self.run - (end - first)))


class _GatherRuns(torch.autograd.Function):
    """[run, ...] of each rank -> [ranks * run, ...] on all; the gradient of a run is the sum over all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.new_empty(len(x) * group.size(), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None]:
        d_x = d_out.new_empty(len(d_out) // ctx.group.size(), *d_out.shape[1:])
        dist.reduce_scatter_tensor(d_x, d_out.contiguous(), group=ctx.group)
        return d_x, None


class AllToAll(torch.autograd.Function):
    """[sum sent, ...] -> [sum came, ...]: runs of rows to each rank of the group, and what they send here. None: as
    many to each, so that it is its own transpose."""

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
    """ValueError where the heads that a rank has cannot be shared over `sequence` ranks."""
    heads = config.num_attention_heads  # without this setting each head has keys of its own
    key_heads = config.to_dict().get("num_key_value_heads") or heads
    for name, number in {"attention heads": heads, "key-value heads": key_heads}.items():
        if number % (sequence * tensor):
            raise Refused(
                f"parallel.sequence={sequence} with parallel.tensor={tensor}: the model has {number} {name}, which "
                f"{sequence * tensor} ranks cannot share equally; use a divisor of it"
            )
