"""A rank of bench/engines.py, in a child process of another interpreter: what its steps and its exports cost."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from verl.batch import Batch, Columns
from verl.config.backends import MODEL, import_object
from verl.model_engine.base import EngineContext
from verl.objective import Term, TermValue


def likelihood(columns: Columns) -> TermValue:
    return TermValue(-columns["logprobs"])


TERMS = (Term(name="nll", fn=likelihood, outputs=("logprobs",)),)


class MeasuredRank:
    """The model engine of one rank."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def modules(self) -> list[str]:
        """Return the names of the modules that this process has imported, in their order."""
        return [name for name in sys.modules if name != "__main__"]

    def steps(self, batch: Batch, passes: int, number: int) -> list[float]:
        """Make optimizer steps. Return the processor's seconds of each, of all threads of this process."""
        found = []
        for _ in range(number):
            began = time.process_time()
            self.engine.forward_backward(batch, TERMS, passes)
            self.engine.optim_step()
            found.append(time.process_time() - began)
        return found

    def export(self, rounds: int) -> list[tuple[int, float, float, float]]:
        """Return for each round (bytes that this rank stages, the processor's seconds of staging its parts as a publish
        does, those of a copy of the same bytes, seconds of the whole weights as a checkpoint's folder has them)."""
        sizes = [part.mine().numel() for part in self.engine.weight_parts() if part.mine is not None]
        staged, copied = torch.zeros(sum(sizes)), torch.zeros(sum(sizes))
        found = []
        for _ in range(rounds):
            began, at = time.process_time(), 0
            for part in self.engine.weight_parts():
                if part.mine is not None:
                    mine = part.mine()
                    staged[at : at + mine.numel()].view(mine.shape).copy_(mine)
                    at += mine.numel()
            ended = time.process_time()
            copied.copy_(staged)
            copying, again = time.process_time() - ended, time.perf_counter()
            whole = sum(t.numel() for _, t in self.engine.exported())
            assert whole >= at
            found.append((4 * at, ended - began, copying, time.perf_counter() - again))
        return found


def one_thread(place: object) -> None:
    """Set up one thread: the ranks share the processors of one machine."""
    torch.set_num_threads(1)


def build(engine: str, context: EngineContext, *, ranks: Sequence[object]) -> list[MeasuredRank]:
    row = MODEL[engine]
    return [MeasuredRank(import_object(row.build)(import_object(row.options)(), context))]
