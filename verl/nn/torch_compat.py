"""The differences between the releases of torch that verl runs with, 2.11 to 2.15. Other modules have no branch for a
release."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Set
from functools import cache, partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import varlen


@cache
def argument_names(function: Callable[..., object]) -> frozenset[str]:
    """Return the names of the arguments of a function of torch."""
    return frozenset(inspect.signature(function).parameters)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: tuple[Tensor, Tensor, int, int],
    *,
    scale: float,
    window_size: tuple[int, int],
) -> Tensor:
    """Return torch's variable-length attention [T, H, D] of q [T, H, D] over k and v [U, K, D], where H is a multiple
    of K. bounds: the offsets of the rows in q and in k (int32 [rows + 1]), and the longest of each. window_size: keys
    before and after the query's position; -1 is no limit.

    From 2.12 on, heads that share keys must be announced (`enable_gqa`); 2.11 groups them without, and has no such
    argument."""
    attend: Callable[..., Any] = varlen.varlen_attn
    if "enable_gqa" in argument_names(attend):
        attend = partial(attend, enable_gqa=q.shape[1] != k.shape[1])
    out = attend(q, k, v, *bounds, scale=scale, window_size=window_size)
    assert isinstance(out, Tensor)
    return out


def all_gather_single(out: Tensor, part: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Gather the parts of all ranks [n, ...] into `out` [ranks * n, ...]. The function has this name from 2.12 on."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, part, group=group)


def reduce_scatter_single(part: Tensor, whole: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Write this rank's part [n, ...] of the sum of `whole` [ranks * n, ...] over all ranks into `part`. The function
    has this name from 2.12 on."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(part, whole, group=group)


def _parameter_groups(root: nn.Module) -> Iterator[Any]:
    """Yield FSDP's groups of parameters of all modules below `root`. A module has several from 2.13 on."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            yield from (g for g in ([state._fsdp_param_group] if groups is None else groups) if g is not None)


def sharded_parameters(root: nn.Module) -> list[Any]:
    """Return FSDP's records of the parameters of all modules below `root`, ready for their first gathering."""
    found: list[Any] = []
    for group in _parameter_groups(root):
        group.lazy_init()  # else the first pass would forget what it is to gather from
        found += group.fsdp_params
    return found


def share_shards(root: nn.Module, owner: nn.Module, names: Set[str]) -> None:
    """Let FSDP gather the parameters of `root` with these names from the shards of those of `owner`, in the same
    storage. None of them is trained."""
    theirs = {id(one.sharded_param): one for group in _parameter_groups(owner) for one in group.fsdp_params}
    by_id = {id(p): theirs[id(owner.get_parameter(name))] for name in names for p in [root.get_parameter(name)]}
    for one in [one for group in _parameter_groups(root) for one in group.fsdp_params]:
        if (source := by_id.get(id(one.sharded_param))) is not None:
            one.sharded_param = nn.Parameter(source.sharded_param.detach(), requires_grad=False)
            one._sharded_param_data = source._sharded_param_data
            one._setattr_on_modules(one.sharded_param)


def gather_from(sharded: Any, part: Tensor) -> None:
    """Let FSDP gather a parameter from `part`, this rank's part of it without its shape, in the dtype of `part`. FSDP
    keeps the tensors that the first gathering made; they are of the dtype before."""
    sharded._sharded_param_data = part
    sharded.all_gather_outputs = []
    vars(sharded).pop("_unsharded_param", None)
