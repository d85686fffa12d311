"""LoRA adapters as parameter sets: their factors are published, and the model computes with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Literal

import numpy as np
from torch import Tensor

from verl.batch import Batch
from verl.model_engine.base import WeightPart, whole_part
from verl.model_engine.local_model import LocalModel
from verl.model_engine.lora import is_factor
from verl.model_engine.torch_engine import TorchEngine
from verl.nn.lora import low_ranks, with_low_ranks
from verl.parameter_set import ParameterSet


class LoraSource:
    """The weight source of a LoRA set on an engine's model (`Publishes`): its weights are the factors, and its passes
    add them to the engine's present weights, which stay unchanged."""

    def __init__(self, engine: TorchEngine, parameters: ParameterSet, factors: Mapping[str, Tensor]) -> None:
        """Make a set the source of weights to publish. parameters: the set, with any base · factors: tensors by the
        names that the set gives them."""
        self._engine, self.parameters, self.masters = engine, parameters, dict(factors)
        self._layers = low_ranks(parameters, factors, engine.model)

    tied: Mapping[str, str] = {}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.masters.items()

    def weight_parts(self) -> Iterator[WeightPart]:
        return (whole_part(name, tensor) for name, tensor in self.weights())

    def infer(self, batch: Batch, columns: Sequence[str], average: bool = False) -> dict[str, Tensor]:
        with self._adapted():
            return self._engine.infer(batch, columns, average)

    def own_logprobs(self, probes: Sequence[np.ndarray], dtype: str, merged: bool = False) -> list[np.ndarray]:
        assert not merged, "the factors of a set are never merged"
        with self._adapted():
            return self._engine.own_logprobs(probes, dtype)

    def _adapted(self) -> AbstractContextManager[None]:
        return with_low_ranks(self._engine.model, self._layers, self.parameters.scale)


def lasts(engine: TorchEngine) -> bool:
    """Return True if the tensors of a model are the same objects in every version: they are neither gathered from ranks
    nor moved."""
    return type(engine.local) is LocalModel and not engine.offload.moves("weights")


class FrozenBase:
    """The weights under the LoRA factors of an engine's model, without those that are trained whole."""

    frozen: Literal[True] = True

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._masters: Mapping[str, Tensor] | None = None

    @property
    def masters(self) -> Mapping[str, Tensor]:
        """The frozen weights by the engine's own names; in a sharded engine the parts of this rank."""
        if self._masters is not None:
            return self._masters
        found = {name: p for name, p in self._engine.masters.items() if not _is_trained(self._engine, name)}
        self._masters = found if lasts(self._engine) else None
        return found


def _is_trained(engine: TorchEngine, name: str) -> bool:
    """Return True for the name of a factor in a model with LoRA, or of a weight that is trained whole."""
    assert engine.local.lora is not None, "all weights of this policy are trained"
    return is_factor(name) or name in engine.local.lora.parameters.replaced


class PolicyFactors:
    """The weight source of a policy with LoRA factors (`Publishes`), unmerged. with_base: all weights of the model are
    among its weights; otherwise they are the factors, and the weights that are trained whole, by their own names.
    codes: those of a quantised base are given as their codes and scales, and not dequantised."""

    def __init__(self, engine: TorchEngine, *, with_base: bool, codes: bool = False) -> None:
        assert engine.local.lora is not None, "all weights of this policy are trained"
        self._engine, self._with_base, self._codes = engine, with_base, codes
        self.parameters = engine.local.lora.of_policy
        factors = (name for module in self.parameters.targets for name in self.parameters.factors(module))
        self._moving = frozenset(factors).union(self.parameters.replaced)
        self._kept: tuple[dict[str, Tensor], list[tuple[str, Tensor | None]]] | None = None  # masters, and as sent

    def never_changes(self, name: str) -> bool:
        """Return True for a tensor of the base that stays where it is: no step changes it, and it is not offloaded."""
        return name not in self._moving and "weights" not in self._engine.settings.offload

    @property
    def tied(self) -> Mapping[str, str]:
        return self._engine.tied if self._with_base else {}

    @property
    def masters(self) -> Mapping[str, Tensor]:
        engine = self._engine
        if self._with_base or not lasts(engine):
            every = engine.masters
            return every if self._with_base else {name: p for name, p in every.items() if _is_trained(engine, name)}
        return {name: p.detach() for name, p in self._lasting[0].items()}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        local = self._engine.local
        whole = ((name, local.delivered(name, p)) for name, p in self._named())
        return self._engine.offload.stream(whole)

    def weight_parts(self) -> Iterator[WeightPart]:
        return self._engine.local.parts_of(self._named())

    def _named(self) -> Iterator[tuple[str, Tensor | None]]:
        local = self._engine.local
        if not self._with_base:
            yield from self._lasting[1] if lasts(self._engine) else self._trained()
            return
        yield from local.coded_weights() if self._codes else local.named_weights()
        yield from self._trained(whole=False)

    def _trained(self, *, whole: bool = True) -> Iterator[tuple[str, Tensor | None]]:
        """Yield the factors by PEFT's names. whole: and then the weights that are trained whole, by their own."""
        local = self._engine.local
        assert local.lora is not None
        named = dict(local.model.named_parameters())
        yield from local.lora.factors(named)
        yield from ((name, named.get(name)) for name in self.parameters.replaced if whole)

    @property
    def _lasting(self) -> tuple[dict[str, Tensor], list[tuple[str, Tensor | None]]]:
        """The trained tensors by the engine's own names, and as they are sent, which are looked for once."""
        if self._kept is None:
            named = self._engine.local.trained().named_parameters()
            self._kept = {n: p for n, p in named if _is_trained(self._engine, n)}, list(self._trained())
        return self._kept

    def infer(self, batch: Batch, columns: Sequence[str], average: bool = False) -> dict[str, Tensor]:
        return self._engine.infer(batch, columns, average)

    def own_logprobs(self, probes: Sequence[np.ndarray], dtype: str, merged: bool = False) -> list[np.ndarray]:
        return self._engine.own_logprobs(probes, dtype, merged)
