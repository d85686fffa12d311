"""A trajectory as one row, and the same trajectory as the rows of a history that branched: the same loss and the same
gradients, for every preset. A token in several rows is trained once."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from each import FULL_GRID, each
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from passes import forward_backward
from test_split import EVERY, HIDDEN, OBSERVING, TEACHER, TOP_K, VOCAB, algorithm, samples, terms_of
from transformers import Qwen3Config, Qwen3ForCausalLM

from verl.algorithms import estimators as adv
from verl.algorithms.filters import SampleFilter
from verl.algorithms.weights import term_weights
from verl.batch import pack, unshare
from verl.driver.step import Step, _selected
from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.nn.linear_teacher import top_k
from verl.transfer_queue.rows import columns_of as row_columns
from verl.types import Refs, Sample, Segment, ref_of
from verl.workers.compute import step_columns

STORED = ("old_values", "sum_pi_squared", "old_logprobs", "ref_logprobs", "teacher_logprobs", "rollout_logprobs")
HEAD = replace(TEACHER, head=replace(TEACHER.head, weight=TEACHER.head.weight.float()))


def linear(seed: int) -> list[Sample]:
    """One row per trajectory, some of several turns."""
    rows = [s for s in samples(seed) if s.sample_id.endswith("#0")]
    rng = np.random.default_rng(seed)

    def turns(sample: Sample) -> tuple[Segment, ...]:
        more = []
        for _ in range(rng.integers(0, 3)):
            n = int(rng.integers(1, 5))
            more.append(Segment(ids=rng.integers(1, VOCAB, int(rng.integers(1, 4))), source="env"))
            logprobs = rng.normal(-2, 0.6, n).astype(np.float32)
            more.append(Segment(ids=rng.integers(1, VOCAB, n), source="sampled", logprobs=logprobs, version=0))
        return (*sample.segments, *more)

    return [replace(s, segments=turns(s)) for s in rows]


def cut(sample: Sample, seed: int) -> list[Sample]:
    """The same trajectory as rows that end at some of its turns: a row trains what no row before it trains."""
    rng, segments = np.random.default_rng(seed), [s for s in sample.segments if len(s.ids)]
    turns = [i for i, s in enumerate(segments) if s.source == "sampled"]
    ends = sorted({*rng.choice(turns, size=int(rng.integers(0, len(turns))), replace=False).tolist(), turns[-1]})
    rows, before = [], -1
    for k, end in enumerate(ends):
        known = [
            replace(s, source="env", logprobs=None) if s.source == "sampled" else s for s in segments[1 : before + 1]
        ]
        row = (segments[0], *known, *segments[max(1, before + 1) : end + 1])
        if k % 2 and len(row) > 2:  # a loop that hands its whole history over as the next prompt
            n = 1 + len(known)
            row = (Segment(ids=np.concatenate([s.ids for s in row[:n]]), source="prompt"), *row[n:])
        rows.append(replace(sample, sample_id=f"{sample.trajectory_id}#{k}", segments=row))
        before = end
    return rows


def stored(row: Sample, n: int) -> dict[str, torch.Tensor]:
    """Return the outputs of models for the n trained tokens of a trajectory."""
    g = torch.Generator().manual_seed(sum(row.trajectory_id.encode()))
    x, hidden = torch.rand(n, len(STORED), generator=g), torch.randn(n, HIDDEN, generator=g)
    ids, topk, _ = top_k(hidden, HEAD.head, torch.ones(n), TOP_K)
    found = {name: x[:, k] if k < 2 else -3 * x[:, k] - 0.1 for k, name in enumerate(STORED)}
    return {**found, "teacher_hidden": hidden, "teacher_ids": ids, "teacher_topk": topk}


def prepared(rows: list[Sample], name: str):
    """One optimizer step, float32."""
    refs, batch, terms = Refs(ref_of(s) for s in rows), pack(rows), terms_of(name)
    of: dict[str, int] = {}
    for r in refs:
        of[r.trajectory_id] = of.get(r.trajectory_id, 0) + r.loss_tokens
    drawn = {r.trajectory_id: stored(r, of[r.trajectory_id]) for r in rows}
    found = {c: torch.cat([drawn[t][c] for t in of]) for c in next(iter(drawn.values()))}
    columns = step_columns(refs, found, {r.group_id: 0.25 for r in refs})
    made = algorithm(name).advantage(columns.with_token({"rewards": adv.token_rewards(columns)}))
    found |= {column: values for column, values in made.items() if isinstance(values, torch.Tensor)}
    batch = batch.with_columns(found)
    return batch.with_columns(term_weights(step_columns(refs, batch.columns), terms)), terms


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(vocab_size=VOCAB, head_dim=8, intermediate_size=24, tie_word_embeddings=False, **size)
    return Qwen3ForCausalLM(config)


def gradients(model, batch, terms, *, budget: int = 10_000) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    critic = "values" in terms[0].outputs
    engine = TorchEngine(
        copy.deepcopy(model),
        EngineSettings(
            head="value" if critic else "lm",
            optim=OptimSpec(lr=1.0),
            dtype="float32",
            max_tokens_per_microbatch=budget,
            teacher=None if critic else HEAD,
        ),
    )
    if engine.value_head is not None:
        torch.nn.init.normal_(engine.value_head.weight, generator=torch.Generator().manual_seed(0))
    out = forward_backward(engine, batch, terms)
    metrics = {name: metric.value for name, metric in out.metrics.items()}
    return metrics, {n: p.grad.clone() for n, p in engine.model.named_parameters() if p.grad is not None}


@each("name", [name for name in EVERY if name not in OBSERVING], quick=6)
def test_one_row_or_a_row_per_turn(model, name):
    whole = linear(3)
    rows = [part for k, s in enumerate(whole) for part in cut(s, k)]
    assert len(rows) > len(whole) + 3, "a test of uncut rows proves nothing"
    one, terms = prepared(whole, name)
    several, _ = prepared(rows, name)
    assert several.num_tokens == one.num_tokens, "what rows have in common is computed once"
    at = list(EVERY).index(name)
    for budget in (10_000, 30) if FULL_GRID else ((10_000, 30)[at % 2],):  # in turn, but in the full grid
        (said, grads), (also, others) = (gradients(model, b, terms, budget=budget) for b in (one, several))
        assert also == pytest.approx(said, rel=1e-5, abs=1e-6) and any(g.abs().sum() > 0 for g in grads.values())
        for key, value in grads.items():
            scale = max(1.0, float(value.abs().max()))
            assert float((others[key] - value).abs().max()) <= 1e-6 * scale, (key, budget)


def test_a_token_that_counts_twice_would_be_seen(model):
    """The mistake that this file is about: every row trains all that was sampled in it."""
    whole = linear(3)
    doubled = []
    for k, sample in enumerate(whole):
        doubled += [sample, replace(sample, sample_id=f"{sample.trajectory_id}#1")] if k == 1 else [sample]
    assert sum(ref_of(s).loss_tokens for s in doubled) > sum(ref_of(s).loss_tokens for s in whole)
    (one, terms), rows = prepared(whole, "grpo"), Refs(ref_of(s) for s in doubled)
    weight = term_weights(step_columns(rows, {}), terms[:1])[f"w/{terms[0].name}"]
    assert not torch.allclose(weight[: one.num_loss_tokens], one.columns[f"w/{terms[0].name}"])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000))
@example(seed=3351)
def test_the_forest_of_any_cut(seed):
    """Distinct tokens are there once, and each row reads as it was given."""
    whole = linear(seed)
    begins = [(s.group_id, next(int(t.ids[0]) for t in s.segments[1:] if len(t.ids))) for s in whole]
    assume(len({*begins}) == len(begins))  # else a history that became a prompt may be that of two trajectories
    rows = [part for k, s in enumerate(whole) for part in cut(s, seed + k)]
    batch = pack(rows)
    assert batch.num_tokens == pack(whole).num_tokens and batch.num_loss_tokens == pack(whole).num_loss_tokens
    flat = unshare(batch)
    for r, row in enumerate(rows):
        ids = np.concatenate([s.ids for s in row.segments])
        assert flat.ids[flat.seg_start[r] : flat.seg_start[r + 1]].tolist() == ids.tolist()
    given_logprobs = np.concatenate([row_columns(row)["rollout_logprobs"] for row in rows])
    assert np.array_equal(batch.columns["rollout_logprobs"].numpy(), given_logprobs)
    assert torch.equal(flat.ids[flat.target_from + 1], flat.targets)


def test_pf_ppo_chooses_trajectories_with_all_their_rows():
    """The best and the worst of each group, whichever rows the best has most of."""
    (row, *_), rewards = linear(0), {"a": 1.0, "b": 0.0, "c": 0.5}
    refs = Refs(
        ref_of(replace(row, sample_id=f"{name}#{i}", trajectory_id=name, purpose="train", reward=reward))
        for name, reward in rewards.items()
        for i in range(3)
    )
    run = SimpleNamespace(run=SimpleNamespace(seed=0))
    for selection, kept in (("bon", "a"), ("bw", "ab")):
        spec = SimpleNamespace(sample_filter=SampleFilter(selection=selection))
        found = _selected(SimpleNamespace(algorithm=spec, config=run), Step(0), refs)
        assert found.ids == [f"{name}#{i}" for name in kept for i in range(3)]
