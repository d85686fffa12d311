"""The passes of one optimizer step through a model engine, as a Role makes them on one rank, and a whole turn of the
loop's second half over given samples."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from fakes import put
from torch import Tensor

from verl.batch import Batch
from verl.config.schema import Config
from verl.driver.assemble import offline_learner
from verl.driver.step import Step, experience_and_update
from verl.model_engine.base import ModelEngine, StepOutput
from verl.model_engine.torch_engine import TorchEngine
from verl.objective import Term
from verl.transfer_queue.base import TransferQueue
from verl.transfer_queue.memory import MemoryQueue
from verl.types import Refs, Sample, merge_metrics
from verl.workers.role import Role


def forward_backward(
    engine: ModelEngine, batch: Batch, terms: Sequence[Term], extra_outputs: Sequence[str] = ()
) -> StepOutput:
    """The gradient of a step: two-pass terms first, where the step is cut; metrics of both passes, and the model
    outputs."""
    batch, now, first = Role("trainer", MemoryQueue(), engine)._two_passes(batch, tuple(terms))
    out = engine.forward_backward(batch, now, 0, extra_outputs)
    return StepOutput(merge_metrics([first, out.metrics]), out.columns)


def turn(
    config: Config, made: Sequence[Sample]
) -> tuple[list[dict[str, Tensor]], dict[str, float], TransferQueue, Refs]:
    """(gradients of each optimizer step by parameter, metrics, queue, refs) of a turn over these samples."""
    found: list[dict[str, Tensor]] = []

    class Watched(TorchEngine):
        def optim_step(self):
            found.append({n: p.grad.clone() for n, p in self.local.trained().named_parameters() if p.grad is not None})
            return super().optim_step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verl.model_engine.torch_engine.TorchEngine", Watched)
        learner = offline_learner(config, 1, Path("/nonexistent"))
    learner.controllers.critic_warm = True
    try:
        refs, step = put(learner.queue, made), Step(0)
        asyncio.run(experience_and_update(learner, step, refs))
        return found, {n: m.value for n, m in step.metrics.items()}, learner.queue, refs
    finally:
        learner.close()
