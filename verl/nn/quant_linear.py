"""Linear layers with a frozen quantised weight: products read the codes, and the gradient of the input is computed from
the dequantised weight a few rows at a time. The weight itself has no gradient."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from verl.accel.operations import Call, Use
from verl.accel.table import choose
from verl.errors import Refused
from verl.nn.quant import Int8, Kind, Nested, Nf4, QuantisedTensor, quantise_weight, read_quantised

BUFFERS = ("codes", "absmax", "nested_absmax", "nested_values")
"""The tensors of a quantised weight in a layer."""
ROUTERS = ("gate", "router", "shared_expert_gate")
"""Linear layers that choose experts: small, and a rounded score would choose another expert."""


class _Product(torch.autograd.Function):
    """x W^T for a quantised W. Only x has a gradient, for which nothing but W is needed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantisedTensor) -> Tensor:
        ctx.weight, flat = weight, x.reshape(-1, x.shape[-1])
        out: Tensor = _kernel("quantised_linear", x)(flat, weight, None)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        flat = dy.reshape(-1, dy.shape[-1])
        dx: Tensor = _kernel("quantised_back", dy)(flat, ctx.weight)
        return dx.view(*dy.shape[:-1], -1), None


def _kernel(operation: str, x: Tensor) -> Call:
    choice = choose(operation, Use(x.device, x.dtype))
    assert choice is not None, f"every device and dtype has a plain form of {operation}"
    return choice.call


class QuantLinear(nn.Linear):
    """A linear layer with a frozen quantised weight. Its tensors are buffers that move with the layer and keep
    their dtype; in a state dict they have the names of bitsandbytes. `weight` is dequantised each time it is read."""

    def __init__(self, weight: QuantisedTensor, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.register_parameter("bias", bias)
        self._is_hf_initialized = True  # transformers draws no values for it
        self.hold(weight)

    def hold(self, weight: QuantisedTensor) -> None:
        """Keep this weight in place of the present one."""
        assert tuple(weight.shape) == (self.out_features, self.in_features), weight.shape
        nested = weight.nested if isinstance(weight, Nf4) else None
        tensors = (weight.codes, weight.absmax, *((None, None) if nested is None else (nested.absmax, nested.values)))
        for name, tensor in zip(BUFFERS, tensors, strict=True):
            self.register_buffer(name, tensor, persistent=False)
        self._facts = (weight.dtype, None if nested is None else nested.offset)

    @property
    def quantised(self) -> QuantisedTensor:
        """The quantised weight."""
        codes, absmax, nested_absmax, values = (getattr(self, name) for name in BUFFERS)
        dtype, offset = self._facts
        if codes.dtype == torch.int8:
            return Int8(codes, absmax, dtype)
        nested = None if offset is None else Nested(nested_absmax, values, offset)
        return Nf4(codes, absmax, nested, (self.out_features, self.in_features), dtype)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dequantised weight [N, K], in the dtype of the weight that was quantised; a new tensor each time."""
        return self.quantised.dequantised()

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., K] W^T + bias [..., N] in the dtype of x, or in autocast's."""
        kind = x.device.type
        x = x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
        out: Tensor = _Product.apply(x, self.quantised)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantLinear:
        """Move the tensors as `fn` does; they keep their dtype, since scales in bfloat16 would be other weights."""
        kept = {name: t for name in BUFFERS if (t := self._buffers.pop(name)) is not None}
        super()._apply(fn, recurse)
        for name in BUFFERS:
            tensor = kept.get(name)
            moved = None if tensor is None else fn(tensor)
            if tensor is not None and moved is not None and moved.dtype != tensor.dtype:
                moved = tensor.to(moved.device)
            self._buffers[name] = moved
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({f"{prefix}{name}": t for name, t in self.quantised.tensors().items()})

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Tensor],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own = {name for name in state_dict if name.startswith((f"{prefix}weight", f"{prefix}SCB"))}
        rest = {name: t for name, t in state_dict.items() if name not in own}
        rest_of = (local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(rest, prefix, *rest_of)
        if own:
            self.hold(read_quantised(prefix.removesuffix("."), state_dict.__getitem__, state_dict))
        elif strict:
            missing_keys.append(f"{prefix}weight")

    def extra_repr(self) -> str:
        kind = "int8" if self.codes.dtype == torch.int8 else "nf4"
        return f"in_features={self.in_features}, out_features={self.out_features}, {kind}"


def quantised_layers(model: nn.Module) -> dict[str, QuantLinear]:
    """Return the quantised layers of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}


@contextmanager
def computing_with(model: nn.Module, made: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Inside the context the quantised layers of a model multiply with other weights, each of which exists during its
    product only. made: makes a weight from its name and the dequantised weight"""
    layers = quantised_layers(model)
    for name, layer in layers.items():
        layer.forward = partial(_forward_with, layer, partial(made, f"{name}.weight"))  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers.values():
            layer.__dict__.pop("forward", None)


def _forward_with(layer: QuantLinear, made: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return linear(x, made(layer.weight), layer.bias)


def quantise_linears(model: nn.Module, kind: Kind, skip: Collection[str] = ()) -> list[str]:
    """Replace the linear layers in the decoder layers of a model by quantised ones, one at a time. Head, embeddings,
    norms, routers of experts and the modules that `skip` names (or whose last name it has) stay. Return the names of
    the replaced modules. Raise ValueError if there are none."""
    names = quantised_names(model, skip)
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        replace_linear(model, name, QuantLinear(quantise_weight(layer.weight, kind, name=f"{name}.weight"), layer.bias))
    return names


def quantised_names(model: nn.Module, skip: Collection[str] = ()) -> list[str]:
    """Return the names of the linear layers of a model that are quantised. Raise ValueError if there are none, and for
    a name in `skip` that no linear layer has."""
    find_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = find_head()
    every = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    inner = [name for name in every if any(part.isdigit() for part in name.split("."))]
    leaves = {name.rpartition(".")[2] for name in inner}
    if unknown := sorted(set(skip) - leaves - {*inner}):
        raise Refused(f"{unknown[0]} is no linear layer of {type(model).__name__}: {', '.join(sorted(leaves))}")
    found = [name for name in inner if name not in skip and name.rpartition(".")[2] not in {*skip, *ROUTERS}]
    if not found:
        raise Refused(f"{type(model).__name__} has no linear layer in decoder layers that could be quantised")
    return found


def replace_linear(model: nn.Module, name: str, by: QuantLinear) -> None:
    """Put a quantised layer in the place of a linear layer, which is freed."""
    holder, _, leaf = name.rpartition(".")
    by.train(model.training)
    setattr(model.get_submodule(holder), leaf, by)
