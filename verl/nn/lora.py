"""LoRA in the layers of a model: scale * B A x is added to the output of a layer, in the layer's precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from verl.errors import Refused
from verl.nn.expert_lora import add_to_experts, experts_of, has_factors, without_factors
from verl.parameter_set import ParameterSet, is_experts


@dataclass(frozen=True, slots=True)
class LowRank:
    """The factors of one linear layer, or of a tensor of experts."""

    a: Tensor
    """[rank, in], of experts [experts, rank, in]."""
    b: Tensor
    """[out, rank], of experts [experts, out, rank]."""


def low_ranks(parameters: ParameterSet, tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, LowRank]:
    """Return the factors of a LoRA set by module. Raise ValueError if tensors are missing or left over, or do not fit
    the modules of the model."""
    return fitted(parameters, tensors, lambda module: layer_size(model, module, parameters.id))


def fitted(
    parameters: ParameterSet, tensors: Mapping[str, Tensor], size_of: Callable[[str], tuple[int, ...]]
) -> dict[str, LowRank]:
    """Return the factors of a LoRA set by module, for layers with the (inputs, outputs) that `size_of` returns, of
    experts (experts, inputs, outputs). Raise ValueError as `low_ranks`."""
    found, used = dict[str, LowRank](), set[str]()
    for module in parameters.targets:
        names = parameters.factors(module)
        if missing := [name for name in names if name not in tensors]:
            raise Refused(f"LoRA set {parameters.id!r}: it has no {missing[0]}; publish all of its factors")
        a, b = (tensors[name] for name in names)
        used.update(names)
        *experts, into, out = size_of(module)
        if (tuple(a.shape), tuple(b.shape)) != ((*experts, parameters.rank, into), (*experts, out, parameters.rank)):
            raise Refused(
                f"LoRA set {parameters.id!r}: {module} has factors A {list(a.shape)} and B {list(b.shape)} of rank "
                f"{parameters.rank}, and the layer has {into} inputs and {out} outputs; it belongs to another model"
            )
        found[module] = LowRank(a, b)
    if strange := sorted(tensors.keys() - used):
        raise Refused(f"LoRA set {parameters.id!r}: {strange[0]} is the factor of none of its target modules")
    return found


def layer_size(model: nn.Module, module: str, name: str) -> tuple[int, ...]:
    """Return (inputs, outputs) of a linear layer, or (experts, inputs, outputs) of a tensor of experts. Raise
    ValueError for a module of another kind. name: the set's, for the message"""
    if is_experts(module) and module in experts_of(model):
        experts, out, into = model.get_parameter(module).shape
        return experts, into, out
    try:
        layer = model.get_submodule(module)
    except AttributeError:
        layer = None
    if isinstance(layer, nn.Linear) and layer is not getattr(model, "lm_head", None):
        return layer.in_features, layer.out_features
    if type(layer).__name__ == "Conv1D" and isinstance(weight := getattr(layer, "weight", None), Tensor):
        return weight.shape[0], weight.shape[1]
    kind = "no module" if layer is None else f"a {type(layer).__name__}"
    fix = "leave it out of target_modules" if layer is not None else "it belongs to another model"
    raise Refused(f"LoRA set {name!r}: its target {module} is {kind} of {type(model).__name__}: {fix}")


@contextmanager
def with_low_ranks(model: nn.Module, factors: Mapping[str, LowRank], scale: float) -> Iterator[None]:
    """Inside the context each of these layers of the model adds scale * B A x, the product of its factors. Experts have
    one forward pass with factors, so those of a model whose experts are trained with LoRA get no others."""
    handles, of_experts = [], dict[str, dict[str, tuple[Tensor, Tensor]]]()
    for module in {target.rpartition(".")[0] for target in factors if is_experts(target)}:
        assert not has_factors(model.get_submodule(module)), f"{module} has factors, which these would replace"
    try:
        for target, one in factors.items():
            if is_experts(target):
                module, _, tensor = target.rpartition(".")
                of_experts.setdefault(module, {})[tensor] = one.a, one.b
            else:
                add = partial(_add, one=one, scale=scale)
                handles.append(model.get_submodule(target).register_forward_hook(add))
        for module, of_tensors in of_experts.items():
            add_to_experts(model.get_submodule(module), of_tensors.get, scale)
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in of_experts:
            without_factors(model.get_submodule(module))


@dataclass(frozen=True, slots=True)
class AddsFactors:
    """A forward hook of a linear layer, which adds the product of its factors to its output."""

    factors: Callable[[Any, Tensor], LowRank | None]
    """Returns the factors for a layer and its input; None: nothing is added."""
    scale: float
    over: bool
    """As in `with_product`."""

    def __call__(self, layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        x = inputs[0]
        found = self.factors(layer, x)
        if found is None:
            return None
        frozen = type(layer) is nn.Linear and not (layer.bias is not None and layer.bias.requires_grad)
        weight = layer.weight if frozen else None
        return with_product(output, x, found.a, found.b, self.scale, over=self.over, weight=weight)


def _add(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, one: LowRank, scale: float) -> Tensor:
    x = inputs[0]
    return with_product(output, x, one.a.to(x), one.b.to(x), scale)


def with_product(
    output: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, *, over: bool = False, weight: Tensor | None = None
) -> Tensor:
    """Return the output [..., out] of a layer for x [..., in] with the product of the factors, scale * B A x, added.

    over: it may be written over the output, which nothing else reads · weight: the frozen weight [out, in] of the
    layer, of which nothing is trained, its bias neither: the gradient of x is then one sum, and that of the output is
    not computed"""
    if not (over and _in_place(output, x, a, b)):
        return output + linear(linear(x, a) * scale, b)  # the few values between them are scaled
    frozen = weight is not None and type(weight) is nn.Parameter and not weight.requires_grad
    found: Tensor = _Added.apply(output.detach() if frozen else output, x, a, b, scale, weight if frozen else None)
    return found


def _in_place(output: Tensor, *others: Tensor) -> bool:
    """Return True if `_Added` computes a sum with this output as autograd does with the plain one: of tensors of one
    dtype, or those that autocast rounds to that of the output."""
    if torch.compiler.is_compiling() or not output.is_contiguous():
        return False
    if any(type(t) not in (Tensor, nn.Parameter) for t in (output, *others)):
        return False
    kind = output.device.type
    if torch.is_autocast_enabled(kind):
        return output.dtype == torch.get_autocast_dtype(kind)
    return all(t.dtype == output.dtype for t in others)


class _Added(torch.autograd.Function):
    """An output with the product of the factors, in the memory of the output: one tensor less of its size is allocated,
    and it is read and written once. Nothing that its own gradient needs is overwritten, since a product does not save
    its result. With the frozen weight of the layer the gradient of x through both is one tensor, to which nothing else
    has to be added. In 16 bits both products are rounded, as the rollout does."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, weight: Tensor | None
    ) -> Tensor:
        ctx.scale, ctx.shape, ctx.dtypes = scale, x.shape, (x.dtype, a.dtype, b.dtype)
        rows, a, b = (t.to(output.dtype) for t in (x.reshape(-1, a.shape[1]), a, b))
        low, flat = torch.mm(rows, a.t()).mul_(scale), output.view(-1, len(b))
        ctx.save_for_backward(rows, a, b, low, weight)
        if output.dtype in (torch.float32, torch.float64):
            torch.addmm(flat, low, b.t(), out=flat)
        else:
            flat.add_(torch.mm(low, b.t()))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        rows, a, b, low, weight = ctx.saved_tensors
        flat, (of_output, of_x, of_a, of_b, *_) = dy.reshape(-1, len(b)), ctx.needs_input_grad
        d_low, dx = torch.mm(flat, b).mul_(ctx.scale), None
        if of_x:
            dx = torch.mm(d_low, a) if weight is None else torch.mm(flat, weight.to(a.dtype)).addmm_(d_low, a)
            dx = dx.view(ctx.shape).to(ctx.dtypes[0])
        da = torch.mm(d_low.t(), rows).to(ctx.dtypes[1]) if of_a else None
        db = torch.mm(flat.t(), low).to(ctx.dtypes[2]) if of_b else None
        return dy if of_output else None, dx, da, db, None, None
