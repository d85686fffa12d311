"""LoRA adapters as parameter sets: their factors are published, and the model computes with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np
from torch import Tensor

from verl.batch import Batch
from verl.model_engine.base import WeightPart, whole_part
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

    def own_logprobs(self, probes: Sequence[np.ndarray], dtype: str) -> list[np.ndarray]:
        with self._adapted():
            return self._engine.own_logprobs(probes, dtype)

    def _adapted(self) -> AbstractContextManager[None]:
        return with_low_ranks(self._engine.model, self._layers, self.parameters.scale)
