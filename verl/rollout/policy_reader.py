"""Reads a publish of the policy whose weights are a base and LoRA factors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from torch import Tensor

from verl.nn.fp8 import SCALES
from verl.parameter_set import OfSet, set_of
from verl.rollout.base import WeightReader, lasting_of


@runtime_checkable
class Stays(Protocol):
    """A reader of tensors that stay as they are until the version is live everywhere."""

    @property
    def stays(self) -> bool: ...


class PolicyReader:
    """The weights of a publish without the LoRA factors of the policy, and without the weights that are trained whole
    beside them if the base is not sent. These are kept aside (`WeightReader`)."""

    def __init__(self, source: WeightReader) -> None:
        self._source, self.parameters = source, set_of(source)
        self.version, self._stays = source.version, isinstance(source, Stays) and source.stays
        self.identity = source.identity if isinstance(source, OfSet) else ""
        self.names = frozenset(n for module in self.parameters.targets for n in self.parameters.factors(module))
        self.factors: dict[str, Tensor] = {}
        self.whole: dict[str, Tensor] = {}
        """The weights that are trained whole, of a publish without a base; with one they are read as its own are."""
        self.lasting = {name: keeps for name, keeps in lasting_of(source).items() if name not in self.names}

    @property
    def seconds(self) -> dict[str, float]:
        return self._source.seconds

    @property
    def passes(self) -> bool:
        return self._source.passes

    @property
    def has_base(self) -> bool:
        """True if the publish has a full set: all weights of the policy, or the base under its factors."""
        return self.parameters.whole or bool(self.identity)

    def tensors(self) -> Iterator[tuple[str, object]]:
        replaced = frozenset(() if self.has_base else self.parameters.replaced)
        for name, tensor in self._source.tensors():
            kept = self.factors if name in self.names else None
            kept = self.whole if name.removesuffix(SCALES) in replaced else kept
            if kept is None:
                yield name, tensor
            else:
                assert isinstance(tensor, Tensor)
                kept[name] = tensor.detach() if self._stays else tensor.detach().clone()

    def read_factors(self) -> None:
        """Read a publish without the base."""
        strange = self.read()
        assert not strange, f"weights of the base among the factors alone: {strange[:3]}"

    def read(self) -> list[str]:
        """Read the publish for its factors, and return the names of all other tensors."""
        return [name for name, _ in self.tensors()]
