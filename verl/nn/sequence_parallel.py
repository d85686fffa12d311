"""Sequence parallelism (DeepSpeed Ulysses, 2309.14509) over the packed forest: every rank of a group has a run of its
tokens, and for the time of attention all tokens of some heads. A shared prompt is still computed once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from verl.errors import Refused


@dataclass(frozen=True, slots=True)
class HeadExchange:
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

    def to_heads(self, x: Tensor) -> Tensor:
        """[run, H, D] -> [T, H / ranks, D]."""
        parts = x.reshape(self.run, self.group.size(), -1, x.shape[-1]).transpose(0, 1)
        return AllToAll.apply(parts, self.group, None, None).flatten(0, 1)[: self.num_tokens]

    def to_tokens(self, x: Tensor) -> Tensor:
        """[T, H / ranks, D] -> [run, H, D]."""
        padded = F.pad(x, (0, 0, 0, 0, 0, self.run * self.group.size() - self.num_tokens))
        parts = padded.view(self.group.size(), self.run, *x.shape[1:])
        return AllToAll.apply(parts, self.group, None, None).transpose(0, 1).flatten(1, 2)

    def rows_of_mine(self, index: Tensor) -> Tensor:
        """[n] tokens of the batch -> which of them are in this rank's run."""
        return (index // self.run == self.group.rank()).nonzero()[:, 0]

    def together(self, values: Tensor, which: Tensor, size: int) -> Tensor:
        """Return [size, ...] on every rank, of which this one computed the rows `which`. All ranks continue with the
        same values to the same loss; the gradient of a value reaches the rank that computed it, once."""
        out: Tensor = _Together.apply(values, which.to(values.device), size, self.group)
        return out


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
