"""Each optimizer learns the quickstart's task at the learning rate that docs/optimizers.md gives for it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from verl.algorithms.losses import nll
from verl.batch import Batch, pack
from verl.model_engine.optim import OptimSpec
from verl.model_engine.optimizer_table import OPTIMIZERS
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.models import tiny
from verl.objective import Term
from verl.recipes import arithmetic
from verl.types import Sample, Segment

ROWS, EVERY, AT_MOST = 64, 5, 200
GOAL = 0.75
"""Nats per token on rows that are not trained."""
LR = 3e-3
"""AdamW's learning rate."""


def rows_of(tokenizer: Any, count: int, seed: int) -> list[Sample]:
    """Rows of the quickstart's warm-up, by its imperfect teacher."""
    rng, rows = random.Random(seed), []
    for i, problem in enumerate(islice(arithmetic.problems(seed, held=False), count)):
        texts = arithmetic.prompt(problem), arithmetic.trace(problem, forget_carries=rng.random() < 0.65)
        asked, answer = (tokenizer(text, add_special_tokens=False).input_ids for text in texts)
        ids = np.array([*answer, tokenizer.eos_token_id])
        sampled = Segment(ids=ids, source="sampled", logprobs=np.zeros(len(ids), np.float32), version=0)
        segments, name = (Segment(ids=np.array(asked), source="prompt"), sampled), str(i)
        rows.append(Sample(sample_id=name, trajectory_id=name, group_id=name, purpose="train", segments=segments))
    return rows


def batch_of(rows: Sequence[Sample]) -> Batch:
    """A batch with the weights of a mean over its tokens."""
    batch = pack(rows, share_prefix=False)
    weight = torch.full((batch.num_loss_tokens,), 1 / batch.num_loss_tokens, dtype=torch.float64)
    return batch.with_columns({"w/nll": weight})


def steps_to_learn(tokenizer: Any, rows: Sequence[Sample], name: str, lr: float) -> int:
    """The optimizer steps, a multiple of EVERY, after which the goal is reached; more than AT_MOST if it is not.
    rows: those that are not trained, then the others"""
    held, *batches = [batch_of(rows[i : i + ROWS]) for i in range(0, len(rows), ROWS)]
    model = tiny.qwen3(tokenizer, hidden=64, layers=2, ffn=192)
    engine = TorchEngine(model, EngineSettings(optim=OptimSpec(lr=lr, name=name, warmup_steps=10), dtype="float32"))
    for step in range(1, AT_MOST + 1):
        engine.forward_backward(batches[(step - 1) % len(batches)], [Term(name="nll", fn=nll)])
        engine.optim_step()
        if step % EVERY == 0 and -float(engine.infer(held, ("logprobs",))["logprobs"].mean()) <= GOAL:
            return step
    return AT_MOST + 1


def steps_of(name: str) -> int:
    """The steps in the sum over four orders of data: of one alone, rounding moves them by a tenth."""
    tokenizer = tiny.character_tokenizer(arithmetic.CHARACTERS)
    held, lr = rows_of(tokenizer, ROWS, 77), LR * OPTIMIZERS[name].lr_factor
    orders = ([*held, *rows_of(tokenizer, 60 * ROWS, seed)] for seed in (1000, 2000, 3000, 4000))
    return sum(steps_to_learn(tokenizer, rows, name, lr) for rows in orders)


@pytest.fixture(scope="module")
def usual() -> int:
    """AdamW's steps."""
    return steps_of("adamw")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw_8bit", "muon", "adam_mini", "apollo", "apollo_mini"])
def test_each_optimizer_learns_within_three_tenths_more_steps_than_adamw(name: str, usual: int) -> None:
    """At the multiple of AdamW's rate that the table gives for it."""
    assert 200 < usual <= 600, "the task is learned, and not at once"
    assert 10 * steps_of(name) <= 13 * usual
