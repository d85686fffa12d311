"""LoRA adapters as parameter sets: their factors are published, and the model computes with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import pad

from verl.batch import Batch
from verl.config.adapter import WEIGHTS, read_adapter
from verl.errors import Refused
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


def read_lora(name: str, folder: Path, base: Path) -> tuple[ParameterSet, dict[str, Tensor]]:
    """Read the folder of an adapter, in PEFT's layout, as a LoRA set of this name. base: the folder of its base model.

    Return the set, with that folder as its base, and its factors in float32. A set has one rank and one scale: a factor
    of a lower rank is padded with zeros, and a module's other scale is multiplied into its factor B. Raise ValueError
    for an adapter of another model, or with tensors that are no factors."""
    parts = read_adapter(folder, base)
    if whole := sorted(name for name, part in parts.items() if part.whole or not part.a):
        raise Refused(f"{folder}: an adapter with the whole tensor {whole[0]}; only factors can be published as a set")
    with safe_open(folder / WEIGHTS, "pt") as file:
        read = {
            name: (file.get_tensor(part.a).float(), file.get_tensor(part.b).float()) for name, part in parts.items()
        }
    rank, scale = max(len(a) for a, _ in read.values()), max((part.scale for part in parts.values()), key=abs)
    modules = {name: name.removesuffix(".weight") for name in sorted(read)}
    found = ParameterSet(id=name, kind="lora", base=str(base), rank=rank, scale=scale, targets=tuple(modules.values()))
    factors = dict[str, Tensor]()
    for weight, module in modules.items():
        (a, b), more = read[weight], rank - len(read[weight][0])
        if (own := parts[weight].scale) != scale:
            b = b * (own / scale)
        factors |= zip(found.factors(module), (pad(a, (0, 0, 0, more)), pad(b, (0, more))))
    return found, factors
