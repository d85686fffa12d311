"""The role without a model: what it reads of a step, and what it writes."""

import asyncio
from dataclasses import replace

import numpy as np
import torch

from verl.algorithms.preference import preference_terms
from verl.algorithms.resolve import resolve
from verl.batch import Ragged
from verl.driver.step import inputs_of, optimizer_steps
from verl.transfer_queue.memory import MemoryQueue
from verl.types import Refs, Sample, Segment
from verl.workers.compute import Compute, OptimizerStep

LENGTHS = (2, 3, 1, 2)


def stored():
    """Four answers in a queue, and their refs."""
    queue = MemoryQueue()
    rows = [
        Sample(
            sample_id=str(i),
            trajectory_id=str(i),
            group_id=str(i // 2),
            purpose="train",
            segments=(
                Segment(ids=np.array([1]), source="prompt"),
                Segment(ids=np.arange(n), source="sampled", logprobs=np.zeros(n, np.float32), version=0),
            ),
            reward=float(i),
        )
        for i, n in enumerate(LENGTHS)
    ]
    return queue, asyncio.run(queue.put(rows))


def column(values):
    return Ragged(values, np.cumsum([0, *LENGTHS], dtype=np.int64))


def test_weights_are_made_of_the_importance_weights_and_of_what_was_kept():
    queue, refs = stored()
    n = sum(LENGTHS)
    keep = torch.tensor([True, True, True, False, False, True, False, True])
    is_weights = torch.linspace(0.5, 2.0, n, dtype=torch.float64)
    queue.write(refs, {"advantages": column(torch.ones(n)), "keep": column(keep), "is_weights": column(is_weights)})
    terms = resolve("dapo", {"kl_loss_coef": 0.3, "correction": "mask", "correction_high": 3.0}).terms
    queue.write(refs, {"ref_logprobs": column(torch.zeros(n))})
    Compute(queue).weigh([OptimizerStep(refs)], terms, inputs_of(terms))
    found = queue.read(refs, ("w/pg_loss", "w/kl_loss", "loss_mask"))
    torch.testing.assert_close(found["w/pg_loss"].values, torch.where(keep, is_weights, 0.0) / keep.sum())
    torch.testing.assert_close(found["w/kl_loss"].values, 0.3 * keep.double() / keep.sum())


def test_each_optimizer_step_divides_by_its_own_rows():
    queue, refs = stored()
    queue.write(refs, {"advantages": column(torch.ones(sum(LENGTHS)))})
    terms = resolve("dapo").terms
    halves = [OptimizerStep(Refs(refs[:2])), OptimizerStep(Refs(refs[2:]))]
    Compute(queue).weigh(halves, terms, inputs_of(terms))
    weights = queue.read(refs, ("w/pg_loss",))["w/pg_loss"].values
    torch.testing.assert_close(weights, torch.tensor([1 / 5] * 5 + [1 / 3] * 3, dtype=torch.float64))


def test_rows_without_a_valid_reward_are_in_no_statistic():
    queue, refs = stored()
    broken = Refs(replace(r, outcome="invalid") if i == 1 else r for i, r in enumerate(refs))
    queue.write(broken, {"advantages": column(torch.ones(sum(LENGTHS)))})
    terms = resolve("dapo").terms
    Compute(queue).weigh([OptimizerStep(broken)], terms, inputs_of(terms))
    weights = queue.read(broken, ("w/pg_loss",))["w/pg_loss"].values
    torch.testing.assert_close(weights, torch.tensor([1 / 5] * 2 + [0.0] * 3 + [1 / 5] * 3, dtype=torch.float64))


def test_an_epochs_steps_have_weights_of_their_own():
    """Groups are dealt anew in every epoch: each step's weights sum to one over its own rows, also of the first."""
    queue, refs = stored()
    queue.write(refs, {"advantages": column(torch.ones(sum(LENGTHS)))})
    singles = Refs(replace(r, group_id=r.sample_id) for r in refs)  # four groups, dealt to two updates
    terms = resolve("dapo").terms
    dealt = set()
    for seed in range(6):
        steps = optimizer_steps(singles, updates=2, epochs=2, seed=seed, index=0)
        dealt.add(len({frozenset(s.refs.ids) for s in steps}))
        Compute(queue).weigh(steps, terms, inputs_of(terms))
        for step in steps:
            weights = queue.read(step.refs, (f"w/pg_loss{step.weights}",))[f"w/pg_loss{step.weights}"].values
            torch.testing.assert_close(weights.sum(), torch.ones((), dtype=torch.float64))
    assert max(dealt) > 2, "two epochs were dealt alike in every draw"


def test_a_trajectory_of_two_rows_weighs_once():
    """The weight of a term per sequence is in the first row of a trajectory, and in no other."""
    queue, refs = stored()
    queue.write(refs, {n: column(torch.ones(sum(LENGTHS))) for n in ("side", "pair", "ref_logprobs")})
    joined = Refs(replace(r, trajectory_id="t") if i < 2 else r for i, r in enumerate(refs))
    terms = preference_terms("dpo")
    Compute(queue).weigh([OptimizerStep(joined)], terms, inputs_of(terms))
    weights = queue.read(joined, ("w/loss",))["w/loss"].values
    torch.testing.assert_close(weights, torch.tensor([1 / 3, 0, 1 / 3, 1 / 3], dtype=torch.float64))
