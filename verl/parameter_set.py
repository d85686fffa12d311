"""Sets of parameters of a model. A weight source publishes one set, and a request names the set that samples. No torch
is imported here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from verl.errors import Refused

SetKind = Literal["full", "lora"]
GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""The two tensors of the experts of a layer, in transformers' order."""
Delivery = Literal["merged", "factors", "base and factors"]
"""How the weights of a policy with LoRA factors are sent. merged: as a full set, with the factors added to the base ·
factors: alone, to engines that have the base · base and factors: both, unmerged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSet:
    """A set of parameters that is published with its own version numbers."""

    id: str
    """The name by which requests and publishes refer to it."""
    kind: SetKind = "full"
    """full: all tensors of the model. lora: the factors A and B of some linear layers, which compute
    W x + scale * B A x on top of a full set. Those of a tensor of experts are [experts, rank, in] and
    [experts, out, rank]."""
    base: str | None = None
    """The identity of the full set (`WeightSource.identity`) that it belongs to; None for a full set."""
    rank: int = 0
    """The number of rows of each factor A, and of columns of each factor B, of a linear layer or of one expert."""
    scale: float = 1.0
    """The factor of B A x: alpha / rank in PEFT's terms."""
    targets: tuple[str, ...] = ()
    """The modules, and tensors of experts, that have factors, by their names in the model."""
    replaced: tuple[str, ...] = ()
    """The weights of the full set that it has whole, by their names in the model. They are no part of its base."""

    def __post_init__(self) -> None:
        if not self.id:
            raise Refused("a set of parameters has the name '': give it another one")
        if self.whole:
            assert self.base is None and not self.rank and not self.targets, f"{self.id}: a full set is its own base"
            return
        if self.rank < 1 or not self.targets or not math.isfinite(self.scale):
            sizes = f"rank {self.rank}, scale {self.scale} and {len(self.targets)} target modules"
            raise Refused(f"{self.id}: a LoRA set with {sizes}; it needs a rank of at least 1 and a target")

    @property
    def whole(self) -> bool:
        """True if the set has all tensors of the model."""
        return self.kind == "full"

    def factors(self, module: str) -> tuple[str, str]:
        """Return the names of the factors A [rank, in] and B [out, rank] of a module, as PEFT names them. It wraps a
        module of experts once for each of its tensors."""
        above = module
        if is_experts(module):
            above, _, tensor = module.rpartition(".")
            above += ".base_layer" if tensor == GATE_UP and f"{above}.{DOWN}" in self.targets else ""
        return f"base_model.model.{above}.lora_A.weight", f"base_model.model.{above}.lora_B.weight"

    @staticmethod
    def whole_name(weight: str) -> str:
        """Return PEFT's name of a weight that the set has whole."""
        return f"base_model.model.{weight}"

    @property
    def experts(self) -> bool:
        """True if a tensor of experts has factors."""
        return any(map(is_experts, self.targets))


def is_experts(target: str) -> bool:
    """Return True for the name of a tensor of experts, False for that of a linear layer."""
    return target.endswith((f".experts.{GATE_UP}", f".experts.{DOWN}"))


POLICY_SET = ParameterSet(id="policy")
"""All weights of the policy. A LoRA set with this id has the factors of a policy whose base is frozen."""


@runtime_checkable
class OfSet(Protocol):
    """A reader of weights that has the attributes `parameters` and `identity`. A reader without them has all weights of
    the policy."""

    @property
    def parameters(self) -> ParameterSet: ...

    @property
    def identity(self) -> str:
        """The identity of the weights of a full set; "" if it is unknown."""
        ...


def set_of(source: object) -> ParameterSet:
    """Return the parameter set of a reader of weights."""
    return source.parameters if isinstance(source, OfSet) else POLICY_SET


def check_base(
    parameters: ParameterSet, held: str, lora_rank: int, lora_experts: bool, lora_whole: bool = False
) -> None:
    """Raise ValueError for a LoRA set that an engine cannot use.

    held: the identity of the engine's full set, "" if it is unknown
    lora_rank: the highest rank that the engine supports
    lora_experts: it computes with factors of experts
    lora_whole: it takes weights that are trained whole beside them
    """
    name = f"LoRA set {parameters.id!r}"
    if not lora_rank:
        fix = "use rollout.engine=native or hf, or vllm with rollout.engine_options.max_lora_rank"
        raise ValueError(f"{name}: this rollout engine loads no adapters; {fix}")
    if parameters.rank > lora_rank:
        fix = f"set rollout.engine_options.max_lora_rank to at least {parameters.rank}"
        raise ValueError(f"{name}: rank {parameters.rank} is above the engine's {lora_rank}; {fix}")
    if parameters.experts and not lora_experts:
        fix = "publish a set without them, or use rollout.engine=hf, or native on a CPU"
        raise ValueError(f"{name}: it has factors of experts, which this rollout engine does not take; {fix}")
    if parameters.replaced and not lora_whole:
        fix = "use rollout.engine=native or hf"
        raise ValueError(
            f"{name}: it has {parameters.replaced[0]} whole, which this rollout engine does not take; {fix}"
        )
    if not held:
        raise ValueError(f"{name}: the weights under it have no identity here; publish them whole (no bucket_mb)")
    if parameters.base != held:
        raise ValueError(
            f"{name} belongs to the weights {parameters.base}, and the engine has {held}; publish it again"
        )
