"""LoRA in a model that is trained: factors beside the frozen weights of its linear layers and experts.

A layer computes W x + scale * B A x with the factors A [rank, in] and B [out, rank], which are parameters of the layer
with the names lora_A and lora_B. They are therefore gathered, cut and moved with the layer's weight. Those of a tensor
of experts are [experts, rank, in] and [experts, out, rank], with its name before theirs (gate_up_proj_lora_A).

Weights that are trained whole beside the factors are the model's own; their values at the start are kept."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import pad

from verl.config.adapter import WEIGHTS, factors_alone, read_adapter, refuse_not_finite
from verl.errors import Refused
from verl.model_engine.hf_parts import Index, part_and_place
from verl.model_engine.lora_spec import LoraSpec, check_rank, check_saved, target_modules, weights_to_save
from verl.models.families import family_of
from verl.nn.expert_lora import add_to_experts, experts_of, from_peft
from verl.nn.lora import AddsFactors, LowRank, layer_size, with_product
from verl.nn.quant_linear import ROUTERS, QuantLinear, quantised_layers
from verl.parameter_set import POLICY_SET, ParameterSet, is_experts

A, B = "lora_A", "lora_B"
Factors = Literal["trained", "start", "none"]
"""The factors that a pass uses."""
TRAINED_SET = "lora"
"""The id of the parameter set that is trained."""


class LoraLayers:
    """The layers of a model with factors, and whether they are used.

    model: an instantiated causal LM, which may be without storage · base: its folder, for an adapter to start from ·
    head: that adapter has the head of a reward model too, which is not read here · trains: the set is trained ·
    body: the model's output head is not, since another one is · over: products are written over the outputs of layers,
    which no checkpointing keeps"""

    def __init__(
        self,
        model: Any,
        spec: LoraSpec,
        base: Path | None = None,
        *,
        head: bool = False,
        trains: bool = True,
        body: bool = False,
        over: bool = False,
    ) -> None:
        self._over = over
        self._spec, self._start, self._kept = spec, dict[str, Tensor](), dict[str, Tensor]()
        self._at: Factors = "trained"
        coded = [f"{name}.weight" for name in quantised_layers(model)]
        if spec.path is not None:
            assert base is not None, "an adapter is read on top of the folder of its base"
            path = Path(spec.path).expanduser()
            found, self._start = read_lora(TRAINED_SET, path, base, head=head, whole=trains)
        else:
            targets = target_modules(spec, *_linears(model), model=type(model).__name__, fused=experts_of(model))
            every = [name for name, _ in model.named_parameters(remove_duplicate=False)]
            saved = weights_to_save(spec, [*every, *coded], type(model).__name__)
            found = ParameterSet(
                id=TRAINED_SET, kind="lora", base="", rank=spec.rank, scale=spec.scale, targets=targets, replaced=saved
            )
        check_saved(found.replaced, found.targets, type(model).__name__, tied=_tied(model), coded=coded)
        inside = f"{model.base_model_prefix}." if body else ""
        self.parameters = replace(found, replaced=tuple(n for n in found.replaced if n.startswith(inside)))
        self._targets, self._turned = frozenset(self.parameters.targets), set[str]()
        for target in self.parameters.targets:
            self._add(model, target)

    @property
    def names(self) -> list[str]:
        """The names of all factors, A before B."""
        return [name for target in self.parameters.targets for name in own_names(target)]

    def _add(self, model: Any, target: str) -> None:
        rank, (*experts, into, out) = self.parameters.rank, layer_size(model, target, TRAINED_SET)
        check_rank(rank, target, (out, into), type(model).__name__)
        layer = model.get_submodule(_holder(target))
        like = model.get_parameter(target) if experts else _like(layer)
        if not experts and not isinstance(layer, nn.Linear):  # its weight is [in, out]
            self._turned.add(f"{target}.weight")
        for name, shape in zip(own_names(target), ((*experts, rank, into), (*experts, out, rank)), strict=True):
            empty = torch.empty(shape, dtype=like.dtype, device=like.device)
            layer.register_parameter(name.rpartition(".")[2], nn.Parameter(empty))
        if experts:
            add_to_experts(layer, partial(self._of_experts, layer, _holder(target)), self.parameters.scale)
        else:
            of_target = partial(self._factors_of, target)
            layer.register_forward_hook(AddsFactors(of_target, self.parameters.scale, self._over))

    def _of_experts(self, layer: Any, module: str, tensor: str) -> tuple[Tensor, Tensor] | None:
        """Return the factors of a tensor of experts that a pass uses: those of the experts that this rank has."""
        target = f"{module}.{tensor}"
        if self._at == "none" or target not in self._targets:
            return None
        if self._at == "trained":
            a, b = (getattr(layer, name.rpartition(".")[2]) for name in own_names(target))
            return a, b
        a, b = (self._start[name] for name in self.parameters.factors(target))
        return a, b

    def _factors_of(self, module: str, layer: Any, x: Tensor) -> LowRank | None:
        """Return the factors that a linear layer adds in a pass with this input."""
        if self._at == "none":
            return None
        if self._at == "trained":
            return LowRank(layer.lora_A, layer.lora_B)
        a, b = (self._start[name].to(x) for name in self.parameters.factors(module))
        return LowRank(a, b)

    def add_to(self, model: nn.Module, factors: Callable[[str], Tensor]) -> None:
        """Let another model of this kind, which has no factors, add them to the outputs of its layers. factors: returns
        a whole factor by its name, for each pass."""
        for target in self.parameters.targets:
            layer = model.get_submodule(_holder(target))
            if is_experts(target):
                add_to_experts(layer, partial(self._whole_of, _holder(target), factors), self.parameters.scale)
            else:
                layer.register_forward_hook(partial(self._add_whole, target, factors))

    def _whole_of(self, module: str, factors: Callable[[str], Tensor], tensor: str) -> tuple[Tensor, Tensor] | None:
        target = f"{module}.{tensor}"
        if target not in self._targets:
            return None
        a, b = map(factors, own_names(target))
        return a, b

    def _add_whole(
        self, module: str, factors: Callable[[str], Tensor], _: Any, inputs: tuple[Tensor, ...], output: Tensor
    ) -> Tensor:
        a, b = (factors(f"{module}.{factor}").to(output.dtype) for factor in (A, B))
        return with_product(output, inputs[0], a, b, self.parameters.scale)

    def off(self) -> AbstractContextManager[None]:
        """Return a context in which the model adds no factors, and computes with its weights as they are."""
        return self._using("none")

    @contextmanager
    def at_start(self, named: Mapping[str, Tensor]) -> Iterator[None]:
        """Return a context in which the model computes as before training: with the adapter that it started from, if
        there is one, else with its own weights only. named: its parameters, of which those that are trained whole have
        their first values meanwhile."""
        which: Factors = "start" if self._start else "none" if self._spec.path is None else "trained"
        self._exchange(named)
        try:
            with self._using(which):
                yield
        finally:
            self._exchange(named)

    @torch.no_grad()
    def _exchange(self, named: Mapping[str, Tensor]) -> None:
        """Exchange the values of the weights that are trained whole and those that are kept."""
        for name, kept in self._kept.items():
            mine, _ = part_and_place(named[name])
            present = mine.clone()
            mine.copy_(kept)
            kept.copy_(present)

    @contextmanager
    def _using(self, which: Factors) -> Iterator[None]:
        before, self._at = self._at, which
        try:
            yield
        finally:
            self._at = before

    @torch.no_grad()
    def fill(self, into: Mapping[str, Tensor], computed: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Give the factors the values that training starts from: those of an adapter, or random A and zeros for B. The
        values do not depend on how the tensors are sharded.

        into: by their names in the model; others are ignored · computed: returns, for a factor and
        the whole tensor that it starts from, what passes as of the start compute with"""
        start = dict[str, Tensor]()
        for target in self.parameters.targets:
            for name, own in zip(own_names(target), self.parameters.factors(target), strict=True):
                if (p := into.get(name)) is None:
                    continue
                mine, index = part_and_place(p)
                if own in self._start:
                    mine.copy_(self._start[own][index])
                    if p.requires_grad:  # a frozen set stays as it starts
                        start[own] = computed(p, self._start[own])
                elif name.endswith(B):
                    mine.zero_()
                else:
                    mine.copy_(_drawn(p.shape, self._spec.seed, target)[index])
        for name in self.parameters.replaced:
            if (p := into.get(name)) is not None:
                mine, index = part_and_place(p)
                if (own := self.parameters.whole_name(name)) in self._start:
                    mine.copy_(self._start[own][index])
                self._kept[name] = mine.detach().clone()
        self._start = start

    def merged(self, name: str, weight: Tensor, factors: Callable[[str], Tensor], index: Index | None = None) -> Tensor:
        """Return a weight of the model with the product of its factors added; the weight itself if it has none.

        weight: a tensor of the masters, or the part at `index` of it · factors: returns a whole factor by its name

        For a part too the whole product is computed, and B is scaled before it. A part then has the bits that it has in
        the whole tensor: those of a product of matrices depend on their sizes, those of a sum do not."""
        target = name.removesuffix(".weight")
        if target not in self._targets or (target == name) != is_experts(target):
            return weight
        a, b = (factors(factor).to(weight.dtype) for factor in own_names(target))
        if is_experts(target):
            experts, inside = range(len(a))[slice(None) if index is None else index[0]], (index or ())[1:]
            return torch.stack(
                [one + ((b[e] * self.parameters.scale) @ a[e])[inside] for one, e in zip(weight, experts, strict=True)]
            )
        product = (b * self.parameters.scale) @ a
        product = product.T if name in self._turned else product
        return weight + (product if index is None else product[index])

    def factors(self, named: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield (name in PEFT's layout, the value in `named`) of all factors, A before B; None: it has no value."""
        for target in self.parameters.targets:
            for name, own in zip(own_names(target), self.parameters.factors(target), strict=True):
                yield own, named.get(name)

    def tensors(self, named: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield what `factors` yields, and then the same of the weights that are trained whole."""
        yield from self.factors(named)
        yield from ((self.parameters.whole_name(name), named.get(name)) for name in self.parameters.replaced)

    @property
    def of_policy(self) -> ParameterSet:
        """The set as the weights of the policy, whose base is not named yet."""
        return replace(self.parameters, id=POLICY_SET.id)


def is_factor(name: str) -> bool:
    """Return True for the name of a factor in a model."""
    return name.endswith((A, B))


def _like(layer: nn.Module) -> Tensor:
    """Return a tensor with the dtype and on the device that the factors of a layer have: its weight, or for a quantised
    layer an empty one, since reading its weight would dequantise it."""
    if isinstance(layer, QuantLinear):
        return torch.empty(0, dtype=layer.quantised.dtype, device=layer.quantised.codes.device)
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return weight


def own_names(target: str) -> tuple[str, str]:
    """Return the names of the factors A and B of a layer or a tensor of experts in a model."""
    joint = "_" if is_experts(target) else "."
    return f"{target}{joint}{A}", f"{target}{joint}{B}"


def _holder(target: str) -> str:
    """Return the name of the module that has the factors."""
    return target.rpartition(".")[0] if is_experts(target) else target


def _linears(model: Any) -> tuple[list[str], list[str]]:
    """Return the names of all linear layers but the output head, and of those in the decoder layers. Those that read
    images are none of them."""
    head, prefix, family = model.get_output_embeddings(), f"{model.base_model_prefix}.", family_of(model.config)
    every = [
        name
        for name, module in model.named_modules()
        if module is not head
        and (family is None or family.part_of(name) == "language")
        and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
    ]
    inner = [name for name in every if name.startswith(prefix) and any(part.isdigit() for part in name.split("."))]
    return every, [name for name in inner if name.rpartition(".")[2] not in ROUTERS]


def _tied(model: Any) -> list[str]:
    """Return all names of the weights of a model that have several."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    return [name for several in names.values() if len(several) > 1 for name in several]


def _drawn(shape: torch.Size, seed: int, module: str) -> Tensor:
    """Return a factor A as PEFT draws it: uniform within 1 / sqrt(inputs). Each module has a seed of its own."""
    key = hashlib.blake2b(f"{seed} {module}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "big"))
    bound = 1 / math.sqrt(shape[-1])
    return torch.empty(shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)


def read_lora(
    name: str, folder: Path, base: Path, *, head: bool = False, whole: bool = False
) -> tuple[ParameterSet, dict[str, Tensor]]:
    """Read the folder of an adapter, in PEFT's layout, as a LoRA set of this name. base: the folder of its base model ·
    head: it has the head of a reward model, which is left out · whole: it may have whole weights.

    Return the set, with that folder as its base, and its tensors in float32. A set has one rank and one scale: a factor
    of a lower rank is padded with zeros, and a module's other scale is multiplied into its factor B. Raise ValueError
    for an adapter of another model, or with tensors that the set cannot have."""
    if name == POLICY_SET.id:
        raise Refused(f"{name!r} is the name of the policy's own weights: give the LoRA set another one")
    every = read_adapter(folder, base) if whole else factors_alone(folder, base, head=head)
    refuse_not_finite(folder)
    parts = {name: part for name, part in every.items() if not part.whole}
    with safe_open(folder / WEIGHTS, "pt") as file:
        read = {
            name: from_peft(file.get_tensor(part.a).float(), file.get_tensor(part.b).float(), part.experts)
            for name, part in parts.items()
        }
        saved = {name: file.get_tensor(part.whole).float() for name, part in every.items() if part.whole}
    rank, scale = max(a.shape[-2] for a, _ in read.values()), max((part.scale for part in parts.values()), key=abs)
    modules = {name: name.removesuffix(".weight") for name in sorted(read)}
    targets = tuple(modules.values())
    found = ParameterSet(
        id=name, kind="lora", base=str(base), rank=rank, scale=scale, targets=targets, replaced=tuple(saved)
    )
    factors = dict[str, Tensor]()
    for weight, module in modules.items():
        (a, b), more = read[weight], rank - read[weight][0].shape[-2]
        if (own := parts[weight].scale) != scale:
            b = b * (own / scale)
        factors |= zip(found.factors(module), (pad(a, (0, 0, 0, more)), pad(b, (0, more))))
    return found, factors | {found.whole_name(weight): tensor for weight, tensor in saved.items()}
