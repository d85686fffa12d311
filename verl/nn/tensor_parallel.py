"""Tensor parallelism: every rank of a group holds a slice of each matrix and computes with it.

A module runs as it is written, on slices: hooks give it local weights, sum partial results, and sum the gradients of
what all ranks share. The plan that transformers has for an architecture defines how each matrix is cut; the vocabulary
is cut too, and no rank ever holds a row of logits."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from verl.errors import Refused
from verl.model_engine.options import EXPERT_PLANS
from verl.nn.linear_logprob import Vocabulary
from verl.nn.torch_compat import all_gather_single

_COLUMNS, _ROWS, _HEADS = "colwise", "rowwise", "replicated_with_grad_allreduce"
_EXPERTS = "moe_tp_experts"
_CUT: dict[str, dict[str, int]] = {
    _COLUMNS: {"weight": 0, "bias": 0, "lora_B": 0},
    _ROWS: {"weight": 1, "lora_A": 1},
    "vocabulary": {"weight": 0, "bias": 0},
}
"""The dimension along which each parameter of a module is cut; every rank has the whole of the others."""
_PARTIAL = {(_COLUMNS, "lora_A"), (_ROWS, "lora_B")}
"""Whole parameters of which a rank computes a part of the gradient, beside those of modules of style `_HEADS`."""
_ONE_INPUT = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})
"""Projections that read the same input; its gradient is summed over the ranks once for all of them."""


class _Enter(torch.autograd.Function):
    """The identity. Its gradient is summed over the ranks, since each rank uses the input for a slice of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None]:
        d_x = d_out.contiguous().clone()
        dist.all_reduce(d_x, group=ctx.group)
        return d_x, None


class _Sum(torch.autograd.Function):
    """The sum over ranks. Its gradient is passed on unchanged to every rank, since every rank uses the whole sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        out = x.contiguous().clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None]:
        return d_out, None


class TensorParallel:
    """Divides a causal LM over the ranks of `mesh`, which has one dimension. Raise ValueError if it cannot be
    divided."""

    def __init__(self, model: Any, mesh: DeviceMesh) -> None:
        self._mesh, self._group, self._size = mesh, mesh.get_group(), mesh.size()
        self._done: dict[int, nn.Parameter] = {}  # by the id of the original parameter, so that tied ones stay tied
        self._styles = _styles(model, self._size)
        embeddings, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
        self._slice = embeddings.num_embeddings // self._size
        self._first = mesh.get_local_rank() * self._slice
        for module in model.modules():
            if module is lm_head or module is embeddings:
                self._styles[module] = "vocabulary"
            children = {n for n, child in module.named_children() if self._styles.get(child) == _COLUMNS}
            if children in _ONE_INPUT:
                module.register_forward_pre_hook(self._enter, with_kwargs=True)
            else:
                for child in children:
                    module.get_submodule(child).register_forward_pre_hook(self._enter, with_kwargs=True)
        if embeddings.padding_idx is not None:  # the row without a gradient, if it is in this slice
            local = embeddings.padding_idx - self._first
            embeddings.padding_idx = local if 0 <= local < self._slice else None
        embeddings.register_forward_pre_hook(self._enter_embedding)
        embeddings.register_forward_hook(self._leave_embedding)

    def finish(self) -> Vocabulary:
        """Return this rank's slice of the vocabulary. Call it after all modules are split."""
        self._done.clear()  # these references would keep unsharded tensors in memory
        return Vocabulary(self._first, lambda x: _Enter.apply(x, self._group), self._gather)

    def split(self, module: nn.Module) -> None:
        """Cut the parameters below `module` that are not cut yet, and register the hooks that run its modules on the
        slices."""
        for part in module.modules():
            held = {n: p for n, p in part._parameters.items() if p is not None and not isinstance(p, DTensor)}
            for name, p in held.items():
                if id(p) not in self._done:
                    self._done[id(p)] = self._cut(p, self._styles.get(part), name)
                part._parameters[name] = self._done[id(p)]
            if held:
                part.register_forward_pre_hook(self._show)
                part.register_forward_hook(self._hide, always_call=True)

    def _cut(self, p: nn.Parameter, style: str | None, name: str) -> nn.Parameter:
        along = _CUT.get(style or "", {}).get(name)
        placement = Replicate() if along is None else Shard(along)
        mine = p.detach()
        if along is not None:
            mine = mine.chunk(self._size, along)[self._mesh.get_local_rank()].clone()
        cut = DTensor.from_local(mine.contiguous(), self._mesh, [placement], run_check=False)
        return nn.Parameter(cut, requires_grad=p.requires_grad)

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def _show(self, module: nn.Module, args: Any) -> None:
        """Use this rank's slices as the module's weights during a pass. The gradients of norms over single heads, and
        of the factors of LoRA that are not cut, are marked as partial sums: a rank computes them from its own slice of
        the heads, outputs or inputs only."""
        style = self._styles.get(module)
        for name, p in module._parameters.items():
            if isinstance(p, DTensor):
                partial = style == _HEADS or (style, name) in _PARTIAL
                module.__dict__[name] = p.to_local(grad_placements=[Partial()] if partial else None)
        if style == _ROWS and "bias" in module.__dict__:
            module.__dict__["_bias"], module.__dict__["bias"] = module.__dict__["bias"], None  # added after the sum

    def _hide(self, module: nn.Module, args: Any, out: Any) -> Any:
        bias = module.__dict__.pop("_bias", None)
        for name in module._parameters:
            module.__dict__.pop(name, None)
        if self._styles.get(module) != _ROWS or not isinstance(out, Tensor):
            return None
        out = _Sum.apply(out, self._group)
        return out if bias is None else out + bias

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (_Enter.apply(args[0], self._group), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": _Enter.apply(kwargs["hidden_states"], self._group)}

    def _enter_embedding(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        local = args[0] - self._first
        module.__dict__["_here"] = (local >= 0) & (local < self._slice)
        return (local.clamp(0, self._slice - 1), *args[1:])

    def _leave_embedding(self, module: Any, args: Any, out: Tensor) -> Tensor:
        return _Sum.apply(out * module.__dict__.pop("_here")[..., None], self._group)

    def _gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(self._size * len(x), *x.shape[1:])
        all_gather_single(out, x.contiguous(), group=self._group)
        return out.view(self._size, *x.shape)


def _styles(model: Any, size: int) -> dict[nn.Module, str]:
    """Return how each module is cut. Raise ValueError if transformers has no plan for the model, if the plan has
    unknown styles or omits a module, or if the ranks cannot share a size equally."""
    config, what = model.config.get_text_config(), f"parallel.tensor={size}: {type(model).__name__}"
    plan: dict[str, str] = getattr(type(config), "base_model_tp_plan", None) or {}
    if config.model_type in EXPERT_PLANS:  # experts stay whole: parallel.expert shares them
        experts = tuple(name for name, style in plan.items() if style == _EXPERTS)
        plan = {name: style for name, style in plan.items() if not name.startswith(experts)}
    foreign = {name: style for name, style in plan.items() if style not in (_COLUMNS, _ROWS, _HEADS)}
    if not plan or foreign:
        found = f"its plan wants {next(iter(foreign.items()))}" if foreign else "transformers has no plan for it"
        raise Refused(f"{what} cannot be cut over ranks here: {found}; use parallel.tensor=1")
    heads = {"attention heads": config.num_attention_heads, "key-value heads": config.num_key_value_heads}
    for name, number in {**heads, "entries of the vocabulary": model.get_input_embeddings().num_embeddings}.items():
        if number % size:
            raise Refused(f"{what} has {number} {name}, which {size} ranks cannot share equally; use a divisor of it")
    styles: dict[nn.Module, str] = {}
    cut = set()
    for name, module in model.base_model.named_modules():
        for pattern, style in plan.items():
            if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name):
                styles[module] = style
                cut.add(name.rpartition(".")[0])
    for name, module in model.base_model.named_modules():
        if name.rpartition(".")[0] in cut and module not in styles and any(True for _ in module.parameters()):
            raise Refused(f"{what} cannot be cut over ranks here: its plan does not name {name}; use parallel.tensor=1")
    for module, style in styles.items():
        wide = module.weight.shape[1 if style == _ROWS else 0] if style != _HEADS else 0  # type: ignore[index]
        if wide % size:
            raise Refused(f"{what} has a matrix of {wide}, which {size} ranks cannot share equally")
    return styles
