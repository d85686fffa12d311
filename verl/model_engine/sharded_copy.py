"""The copy of a rank's shards from which FSDP gathers the weights that compute: in bfloat16, beside the float32 shards
(masters) that are trained.

A gathering sends half the bytes, and no pass casts a whole weight. FSDP's own `param_dtype` casts the shards at each
gathering instead, and could not gather in float32 for the check at start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from verl.model_engine.compute_copy import copied_parameters
from verl.nn.torch_compat import gather_from, sharded_parameters


class ShardedCopy:
    """A copy in `dtype` of this rank's shards of `model`, which is part of `root`.

    It exists inside a context only, which is all passes of an optimizer step, or of an inference. A cast of the shards
    costs little beside those passes; torch does not count all writes to a shard, so a copy that is kept could be of
    older weights."""

    def __init__(self, model: nn.Module, root: nn.Module, dtype: torch.dtype) -> None:
        self._model, self._root, self._dtype = model, root, dtype

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside the context FSDP gathers from a copy of the present masters."""
        copied = {id(p) for p in copied_parameters(self._model)}
        shards = [shard for shard in sharded_parameters(self._root) if id(shard.sharded_param) in copied]
        masters = [shard._sharded_param_data for shard in shards]
        for shard, master in zip(shards, masters, strict=True):
            gather_from(shard, master.detach().to(self._dtype))
        try:
            yield
        finally:
            for shard, master in zip(shards, masters, strict=True):
                gather_from(shard, master)


def accumulate_in_float32(module: nn.Module, *_: object) -> None:
    """Let the gradients of a module's gathered parameters be float32, as those of the masters. A hook before the
    forward pass of each module that FSDP gathers: FSDP requires one dtype for all gradients that it reduces
    together."""
    for p in module.parameters():
        if p.dtype == torch.bfloat16:
            p.grad_dtype = torch.float32
