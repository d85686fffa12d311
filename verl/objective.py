"""What a loss is made of: terms that give one value per token or per sequence, and never sum or divide. The division
happens once, in the weight columns of `algorithms/weights.py`; the engine sums weight x value. Engines and algorithms
share this file and know nothing else of each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from verl.batch import Columns
from verl.types import Kind


@dataclass(frozen=True, slots=True)
class TermValue:
    """values [L] (unit token) or [S] (unit sequence); metrics: name -> (values of the same unit, kind of reduction) ·
    where: of those that are of some of them alone, which (bool)."""

    values: Tensor
    metrics: Mapping[str, tuple[Tensor, Kind]] = field(default_factory=dict)
    where: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One additive part of a loss: the sum over its unit of weight x value. The unit `observation` is of tokens too: of
    those that the environment wrote between the policy's turns, where all other terms have the weight 0.

    outputs: what of the model it needs (logprobs, entropy, values) · inputs: stored columns it needs · over: a sequence
    column of bool that restricts it (None: all) · two_pass: its values depend on statistics over the whole optimizer
    step, so it is evaluated on all log-probs first, and dL/dlogp becomes its weights · corrected: its weights are
    multiplied by the column `is_weights` when there is one, token by token or by its geometric mean over the sequence ·
    denominator: what its aggregation counts where a rejection (column `keep`) has taken tokens out · sees_rejected:
    those are in its mask, with weight 0 · silent: its loss is not a metric."""

    name: str
    fn: Callable[[Columns], TermValue]
    coef: float = 1.0
    unit: Literal["token", "observation", "sequence"] = "token"
    aggregate: str = "token-mean"
    horizon_tokens: int | None = None
    over: str | None = None
    outputs: tuple[str, ...] = ("logprobs",)
    inputs: tuple[str, ...] = ()
    two_pass: bool = False
    corrected: Literal["no", "token", "geometric"] = "no"
    denominator: str = "after_rejection"
    sees_rejected: bool = False
    silent: bool = False
