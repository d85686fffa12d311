"""A rank of a model engine in a child process, which may be of an environment without the libraries of the tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from verl.batch import Batch
from verl.config.backends import import_object
from verl.model_engine.base import EngineContext
from verl.model_engine.options import Options
from verl.objective import Term
from verl.types import Metrics


class EngineRank:
    """The engine of one rank."""

    def __init__(self, engine):
        self.engine = engine

    def update(self, batch: Batch, terms: Sequence[Term], count: int) -> tuple[Metrics, dict[str, np.ndarray]]:
        """Make one optimizer step. Return the rank's metrics, and the whole gradients as they were before it."""
        out, local = self.engine.forward_backward(batch, terms, count), self.engine.local
        every = {n: p.grad for n, p in local.trained().named_parameters() if p.grad is not None}
        found = {n: local.whole(g).clone().numpy() for n, g in every.items()}
        self.engine.optim_step()
        return out.metrics, found

    def torch_version(self) -> str:
        """Return the version of torch in this process."""
        return torch.__version__

    def weights(self) -> dict[str, np.ndarray]:
        """Return the whole weights."""
        local = self.engine.local
        return {n: local.whole(p.detach()).clone().numpy() for n, p in local.trained().named_parameters()}


def alone(place) -> None:
    """Set up one thread: the ranks share the processors of the tests."""
    torch.set_num_threads(1)


def build(engine: str, context: EngineContext, *, ranks) -> list[EngineRank]:
    return [EngineRank(import_object(engine)(Options(), context))]
