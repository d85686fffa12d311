"""Model engines: parallel training of one model. They know parallelism and numerics, not RL (DESIGN section 5)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from verl.batch import Batch
from verl.objective import Term
from verl.types import Metrics


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Metrics of the terms, and the model outputs of this pass per loss token [L] (detached, on the CPU, batch order)."""

    metrics: Metrics
    columns: Mapping[str, Tensor] = field(default_factory=dict)


class ModelEngine(Protocol):
    """One per rank. Policy, critic and reward model differ by head."""

    def forward_backward(self, batch: Batch, terms: Sequence[Term], also: Sequence[str] = ()) -> StepOutput:
        """Add the gradient of sum over terms of sum(w * value); w stands in the column `w/<term>`. `batch` is this rank's share of ONE optimizer step.

        The outputs that terms name, and those in `also`, come back in the columns of the result."""
        ...

    def infer(self, batch: Batch, columns: Sequence[str]) -> dict[str, Tensor]:
        """logprobs, entropy, values, sum_pi_squared [L], or scores [R]: only what is asked."""
        ...

    def optim_step(self) -> Metrics:
        """Clip and step; a non-finite gradient never reaches the weights."""
        ...

    def weights(self, kind: Literal["full", "adapter", "merged"] = "full") -> Iterator[tuple[str, Tensor]]:
        """(HF name, tensor) with bounded memory; tied tensors once."""
        ...

    def state(self) -> dict[str, Any]: ...
    def load_state(self, state: Mapping[str, Any]) -> None: ...
    def to(self, where: str, parts: Sequence[str] = ("weights", "optimizer")) -> None: ...

    @property
    def optimizer_step(self) -> int: ...
    @property
    def source_dir(self) -> Path | None: ...
