"""Refs to one plan per rank: groups whole, costs balanced, the same number of micro-batches, results back in order."""

import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from fakes import unscored
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.batch import make_microbatches, pack, padded_rows
from verl.driver.dispatch import count_microbatches, in_order, shares
from verl.errors import Refused
from verl.model_engine.base import EngineCapabilities
from verl.model_engine.layout import Layout
from verl.transfer_queue.memory import MemoryQueue
from verl.types import Ref, Refs, Sample, Segment, ref_of
from verl.workers.inproc import InprocCluster
from verl.workers.model_workers import ModelWorkers
from verl.workers.role import RoleSpec, roles_of


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


def test_a_long_row_costs_more_than_its_tokens_and_a_group_its_prompt_once():
    """By tokens alone the row of 16,000 would get a companion; a prompt of 1,000 counts for the first of its rows."""
    long = Refs([ref(0, 0, 0, 16000), *(ref(g, 0, 0, 4000) for g in range(1, 7))])
    assert [len(p.refs) for p in shares(long, 2, max_tokens=10**6)] == [1, 6]
    prompts = Refs([ref(0, 0, 1000, 10), ref(0, 1, 1000, 10), ref(1, 0, 10, 500), ref(2, 0, 10, 500)])
    found = [sorted(p.refs.groups()) for p in shares(prompts, 2, max_tokens=10**6)]
    assert sorted(found) == [["0"], ["1", "2"]]


def test_every_rank_makes_the_passes_of_the_one_that_needs_most():
    """One long answer beside many short ones: 100 tokens fit, so that the short ones of the other rank need more."""
    refs = Refs([ref(0, 0, 10, 900), *(ref(g, 0, 10, 80) for g in range(1, 10))])
    parts = shares(refs, 2, max_tokens=100)
    needed = [count_microbatches(p.refs, 100) for p in parts]
    assert needed[0] != needed[1] and [p.num_microbatches for p in parts] == [max(needed)] * 2


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


def test_a_prompt_that_is_not_shared_counts_for_every_row_of_a_trajectory():
    """Two rows of 10 prompt and 5 own tokens each: 20 where they share it, 30 where they do not."""
    rows = Refs(replace(ref(t, i, 10, 5), trajectory_id=str(t), group_id="g") for t in range(2) for i in range(2))
    for budget, shared, apart in ((60, 1, 1), (59, 1, 2), (30, 1, 2), (29, 2, 2)):
        assert count_microbatches(rows, budget) == shared, budget
        assert count_microbatches(rows, budget, shares_prefix=False) == apart, budget
    three = Refs([*rows, *(replace(ref(2, i, 0, 1), trajectory_id="2", group_id="g") for i in range(1))])
    assert count_microbatches(three, 60, shares_prefix=False) == 2


class Scorer:
    """An engine that returns the number of tokens of each row, and records the rows that it got."""

    capabilities = EngineCapabilities(
        shares_prefix=True, max_tokens_per_microbatch=64, outputs=("scores",), trains=False, one_pass=False
    )

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def infer(self, batch, columns, average=False, start=False):
        tokens = padded_rows(batch)[1].sum(1).tolist()
        self.seen.append(sorted(tokens))
        return {"scores": torch.tensor(tokens, dtype=torch.float32)}


@pytest.mark.parametrize(("sizes", "given"), [((5, 30, 7, 8, 9), [[5, 7, 8, 9], [30]]), ((5,), [[5], [5]])])
def test_streamed_rows_are_shared_out_and_their_scores_come_back_in_order(sizes, given):
    """A rank without a row has one too: its peers may want it in a collective."""
    engine = Scorer()
    spec = RoleSpec(name="reward_model", queue=MemoryQueue(), engine="", options=None, context=None)
    group = InprocCluster(2).start("reward_model", partial(roles_of, engine), (spec,), world_size=2)
    workers = ModelWorkers(group)
    rows = [unscored(np.arange(2), np.arange(n - 2)) for n in sizes]
    assert workers.score_rows(rows).result(60) == [float(n) for n in sizes]
    assert sorted(engine.seen) == sorted(given)
    workers.close()


@pytest.mark.parametrize("layout", [Layout(world_size=2), Layout(world_size=2, tensor=2)])
def test_a_lora_set_is_refused_where_several_ranks_have_the_model(layout, tmp_path):
    """Also where they share the rows, of which there is one share."""
    group = InprocCluster(2).start("actor", lambda *, ranks: [object()] * len(ranks), (), world_size=2)
    can = EngineCapabilities(shares_prefix=True, max_tokens_per_microbatch=9, outputs=(), trains=True, one_pass=True)
    with pytest.raises(Refused, match="published by a model on one rank; this one has 2"):
        ModelWorkers(group, can, layout).open_set("a", tmp_path, tmp_path, None)
    group.close()
