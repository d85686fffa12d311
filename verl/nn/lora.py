"""LoRA in the layers of a model: scale * B A x is added to the output of a layer, in the layer's precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
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


def _add(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, one: LowRank, scale: float) -> Tensor:
    x = inputs[0]
    return with_product(output, x, one.a.to(x), one.b.to(x), scale)


def with_product(output: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return the output [..., out] of a layer for x [..., in] with the product of the factors, scale * B A x, added."""
    return output + linear(linear(x, a) * scale, b)  # the few values between them are scaled
