"""Refs to one plan per rank: groups whole, costs balanced, the same number of micro-batches, results back in order."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.batch import make_microbatches, pack
from verl.driver.dispatch import count_microbatches, in_order, shares
from verl.types import Ref, Refs, Sample, Segment, ref_of


def ref(group: int, index: int, prompt: int, tokens: int) -> Ref:
    name = f"{group}/{index}"
    return Ref(
        sample_id=name,
        trajectory_id=name,
        group_id=str(group),
        purpose="train",
        prompt_tokens=prompt,
        total_tokens=prompt + tokens,
        loss_tokens=tokens,
        version_min=0,
        version_max=0,
        reward=0.0,
    )


def groups(count: int, size: int, seed: int) -> Refs:
    """Exponential lengths, as answers have them."""
    rng = random.Random(seed)
    prompts = [rng.randint(20, 200) for _ in range(count)]
    return Refs(ref(g, i, prompts[g], 1 + int(rng.expovariate(1 / 400))) for g in range(count) for i in range(size))


def distinct_tokens(refs: Refs) -> int:
    return sum(rs[0].prompt_tokens + sum(r.total_tokens - r.prompt_tokens for r in rs) for rs in refs.groups().values())


def test_shares_of_exponential_lengths_are_balanced():
    for seed in range(50):
        costs = [distinct_tokens(s.refs) for s in shares(groups(64, 8, seed), 4, max_tokens=8192)]
        assert max(costs) / (sum(costs) / 4) <= 1.05, (seed, costs)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 5), st.integers(0, 10**6), st.booleans())
def test_every_row_is_on_one_rank_and_groups_are_whole(count, size, ranks, seed, shares_prefix):
    refs = groups(count, size, seed)
    order = list(refs)
    random.Random(seed).shuffle(order)  # rows of a group need not be neighbours
    refs = Refs(order)
    parts = shares(refs, ranks, max_tokens=512, shares_prefix=shares_prefix)
    assert len(parts) == ranks
    assert sorted(i for p in parts for i in p.rows) == list(range(len(refs)))
    busy = [p for p in parts if not p.idle]
    assert all([refs[i] for i in p.rows] == list(p.refs) and list(p.rows) == sorted(p.rows) for p in busy)
    homes = [set(p.refs.groups()) for p in busy]
    assert sum(len(h) for h in homes) == len(set().union(*homes)), "a group is on one rank"
    assert len({p.num_microbatches for p in parts}) == 1, "every rank makes the same number of passes"
    assert all(p.rows == () and len(p.refs) == 1 for p in parts if p.idle)
    assert in_order([(p, [f"{r.sample_id}!" for r in p.refs]) for p in parts]) == [f"{r.sample_id}!" for r in refs]
    assert shares(refs, ranks, max_tokens=512, shares_prefix=shares_prefix) == parts


def test_one_rank_keeps_the_order_and_cuts_as_it_likes():
    refs = groups(5, 3, 1)
    [share] = shares(refs, 1, max_tokens=100)
    assert share.refs == refs and share.rows == tuple(range(15)) and share.num_microbatches == 0
    assert shares(Refs(), 3, max_tokens=100)[2].rows == ()


@pytest.mark.parametrize("shares_prefix", [True, False])
def test_the_predicted_micro_batches_are_those_that_the_batch_makes(shares_prefix):
    for seed in range(30):
        rng = random.Random(seed)
        samples = []
        for g in range(rng.randint(1, 6)):
            prompt = Segment(ids=np.arange(g * 1000, g * 1000 + rng.randint(3, 40)), source="prompt")
            for i in range(rng.randint(1, 5)):
                n = rng.randint(1, 60)
                drawn = Segment(ids=np.arange(n) + 7 * i, source="sampled", logprobs=np.zeros(n, np.float32))
                name = f"{g}/{i}"
                samples.append(
                    Sample(
                        sample_id=name, trajectory_id=name, group_id=str(g), purpose="train", segments=(prompt, drawn)
                    )
                )
        refs = Refs(ref_of(s) for s in samples)
        for budget in (1, 60, 150, 10**6):
            made = make_microbatches(pack(samples, share_prefix=shares_prefix), budget)
            assert count_microbatches(refs, budget, shares_prefix=shares_prefix) == len(made), (seed, budget)
