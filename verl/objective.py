"""The parts of a loss: terms that give one value per token or per sequence, and never sum or divide. The division
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
    """The values of a term: [L] for a term per token, [S] for a term per sequence.

    metrics: name -> (values of the same unit, kind of reduction)
    where: metric -> a bool mask of the values that it covers; without a mask it covers all
    """

    values: Tensor
    metrics: Mapping[str, tuple[Tensor, Kind]] = field(default_factory=dict)
    where: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One additive part of a loss: the sum of weight x value over its unit.

    The unit `observation` covers the tokens that the environment wrote between the policy's turns, which have weight 0
    in all other terms.
    """

    name: str
    fn: Callable[[Columns], TermValue]
    coef: float = 1.0
    unit: Literal["token", "observation", "sequence"] = "token"
    aggregate: str = "token-mean"
    horizon_tokens: int | None = None
    over: str | None = None  # A bool sequence column that restricts the term. None: all sequences.
    outputs: tuple[str, ...] = ("logprobs",)  # Model outputs that it needs (logprobs, entropy, values).
    inputs: tuple[str, ...] = ()  # Stored columns that it needs.
    scaled_by: str | None = None
    """The stored column that its gradient is multiplied by: a sequence in which this is 0 has none. None: no column."""
    two_pass: bool = False
    """True if its values depend on statistics of the whole optimizer step. It is then evaluated first on all log-probs,
    and dL/dlogp becomes its weights."""
    corrected: Literal["no", "token", "geometric"] = "no"
    """How its weights are multiplied by the column `is_weights`, if present: per token, or by the geometric mean over
    the sequence."""
    denominator: str = "after_rejection"
    """The tokens that its aggregation counts: those before, or those after a rejection (column `keep`)."""
    sees_rejected: bool = False  # Rejected tokens are in its mask, with weight 0.
    silent: bool = False  # Its loss is not a metric.
