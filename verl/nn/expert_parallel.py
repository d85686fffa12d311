"""Expert parallelism: every rank of a group has some of a layer's experts, and tokens are sent to the ranks of their
experts.

The code of the experts' module is unchanged; it runs on the received tokens. A hook before it sends the tokens, and a
hook after it returns their outputs and sums them with the router's weights."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from verl.errors import Refused
from verl.nn.sequence_parallel import AllToAll

_EXPERTS, _WEIGHTS = "ep_dispatch_experts", "grouped_gemm"


class ExpertParallel:
    """Divides the experts of a causal LM over the ranks of `mesh`, which has one dimension. Raise ValueError if the
    model has no experts, or others than transformers' fused ones."""

    def __init__(self, model: Any, mesh: DeviceMesh) -> None:
        self._mesh, self._group, self._size = mesh, mesh.get_group(), mesh.size()
        self.modules = _experts(model, self._size)
        for module in self.modules:
            module.num_experts //= self._size
            for name, p in module._parameters.items():
                assert p is not None
                mine = p.detach().chunk(self._size)[mesh.get_local_rank()].clone()
                cut = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)
                module._parameters[name] = nn.Parameter(cut, requires_grad=p.requires_grad)
            module.register_forward_pre_hook(self._send)
            module.register_forward_hook(self._bring_back, always_call=True)

    def _send(self, module: Any, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Send this rank's tokens, with hidden [t, H], experts [t, k] and weights [t, k], to the ranks of their
        experts. Return the same three for the received tokens, each with one expert and weight 1."""
        hidden, experts, weights = args
        flat = experts.flatten()
        order = torch.argsort(flat, stable=True)  # by expert, and so by rank
        sent = torch.bincount(flat // module.num_experts, minlength=self._size)
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent, group=self._group)
        counts = sent.tolist(), came.tolist()
        ids = flat.new_empty(sum(counts[1]))
        dist.all_to_all_single(ids, flat[order] % module.num_experts, counts[1], counts[0], group=self._group)
        token = order // experts.shape[1]
        x = AllToAll.apply(hidden[token], self._group, *counts)
        module.__dict__["_way_back"] = (token, weights.flatten()[order], counts, len(hidden), x)
        for name, p in module._parameters.items():
            module.__dict__[name] = p.to_local()
        return x, ids[:, None], weights.new_ones(len(ids), 1)

    def _bring_back(self, module: Any, args: Any, out: Any) -> Any:
        local = [module.__dict__.pop(name, None) for name in module._parameters]
        way_back = module.__dict__.pop("_way_back", None)
        if way_back is None or not isinstance(out, Tensor):
            return None
        token, weights, (sent, came), size, x = way_back
        if len(x) == 0:  # no token arrived: this rank must still take part in the backward pass
            out = out + x.sum() + sum(p[:0].sum() for p in local)
        found = AllToAll.apply(out, self._group, came, sent)
        return found.new_zeros(size, found.shape[1]).index_add(0, token, found * weights[:, None])


def _experts(model: Any, size: int) -> list[Any]:
    config, what = model.config.get_text_config(), f"parallel.expert={size}: {type(model).__name__}"
    plan: dict[str, str] = getattr(type(config), "base_model_ep_plan", None) or {}
    foreign = {name: style for name, style in plan.items() if style not in (_EXPERTS, _WEIGHTS)}
    if not plan or foreign:
        why = f"its plan wants {next(iter(foreign.items()))}" if foreign else "transformers has no plan for it"
        raise Refused(f"{what} cannot give its experts to ranks here: {why}; use parallel.expert=1")
    patterns = [re.escape(name).replace(r"\*", r"\d+") for name, style in plan.items() if style == _EXPERTS]
    every = model.base_model.named_modules()
    found = [module for name, module in every if any(re.fullmatch(pattern, name) for pattern in patterns)]
    if not found:
        raise Refused(f"{what} has no experts; use parallel.expert=1")
    for module in found:
        if module.num_experts % size:
            raise Refused(f"{what} has {module.num_experts} experts, which {size} ranks cannot share equally")
    return found
