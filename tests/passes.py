"""The passes of one optimizer step through a model engine, as a Role makes them on one rank."""

from __future__ import annotations

from collections.abc import Sequence

from verl.batch import Batch
from verl.model_engine.base import ModelEngine, StepOutput
from verl.objective import Term
from verl.transfer_queue.memory import MemoryQueue
from verl.types import merge_metrics
from verl.workers.role import Role


def forward_backward(
    engine: ModelEngine, batch: Batch, terms: Sequence[Term], extra_outputs: Sequence[str] = ()
) -> StepOutput:
    """The gradient of a step: two-pass terms first, where the step is cut; metrics of both passes, and the model
    outputs."""
    batch, now, first = Role("trainer", MemoryQueue(), engine)._two_passes(batch, tuple(terms))
    out = engine.forward_backward(batch, now, 0, extra_outputs)
    return StepOutput(merge_metrics([first, out.metrics]), out.columns)
