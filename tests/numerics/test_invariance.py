"""What `test_split_invariance` does not vary: rows of one trajectory, sequence units, several terms at once, two passes,
masked non-finite numbers inside the engine (pitfalls 3, 20; algorithms.md 0, 0.1, 10). float64."""

import copy
import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM
from verl.algorithms.table import TABLE, resolve
from verl.algorithms.terms import Term, TermValue, log_ratio, old_logprobs

from verl.algorithms import advantages as adv
from verl.algorithms.weights import AGGREGATIONS, term_weights, weight_column
from verl.batch import Batch, Columns, loss_index, make_microbatches, pack, segment_sum, select_rows
from verl.model_engine.objective import Surrogate, evaluate_terms
from verl.model_engine.optim import OptimSpec
from verl.model_engine.torch_engine import TorchEngine
from verl.types import Sample, Segment

SETTINGS = {
    "horizon_tokens": 16,
    "reward_components": ["a", "b"],
    "entropy_coef": 0.01,
    "kl_loss_coef": 0.1,
    "clip_dual": 3.0,
}
F64 = torch.float64
VOCAB = 32


def segment(source, ids, rng):
    logprobs = rng.normal(-2, 0.7, len(ids)).astype(np.float32) if source == "sampled" else None
    return Segment(ids=np.asarray(ids, np.int64), source=source, logprobs=logprobs, version=0)


def rewritten(seed: int) -> list[Sample]:
    """Trajectories whose history was rewritten: one to three rows each; shared prompts; a group of one, a flat group."""
    rng, out = np.random.default_rng(seed), []
    for g in range(4):
        prompt = rng.integers(1, VOCAB, rng.integers(1, 5))
        for i in range(1 if g == 0 else 3):
            name, reward = f"{g:b}/{i}", 0.1 if g == 1 else float(rng.normal())
            for part in range(rng.integers(1, 4)):
                turns = [segment("prompt", prompt, rng)]
                for _ in range(rng.integers(1, 3)):
                    turns += [
                        segment("env", rng.integers(1, VOCAB, rng.integers(0, 3)), rng),
                        segment("sampled", rng.integers(1, VOCAB, rng.integers(1, 6)), rng),
                    ]
                out.append(
                    Sample(
                        sample_id=f"{name}#{part}",
                        trajectory_id=name,
                        group_id=f"{{{g:b}}}",
                        purpose="train",
                        segments=tuple(turns),
                        reward=reward,
                        temperature=float(rng.choice([0.7, 1.0])),
                    )
                )
    return out


def columns_of(batch: Batch, samples: list[Sample], keep: torch.Tensor, token=None) -> Columns:
    """One score and group per trajectory, which all its rows carry."""
    first = {s: r for r, s in reversed(list(enumerate(batch.sequence.tolist())))}
    rows = [samples[first[s]] for s in range(batch.num_sequences)]
    groups = list(dict.fromkeys(s.group_id for s in rows))
    sequence = {
        "score": torch.tensor([s.reward for s in rows], dtype=F64),
        "valid": torch.ones(len(rows), dtype=torch.bool),
        "group": torch.tensor([groups.index(s.group_id) for s in rows]),
        "baseline": torch.full((len(rows),), 0.25, dtype=F64),
        "positive": torch.tensor([s.reward > 0 for s in rows]),
        "component/a": torch.tensor([s.reward for s in rows], dtype=F64),
        "component/b": torch.tensor([-0.3 * float(s.trajectory_id[-1]) for s in rows], dtype=F64),
    }
    drawn = [
        torch.rand(s.loss_tokens, 2, generator=torch.Generator().manual_seed(sum(s.sample_id.encode())), dtype=F64)
        for s in samples
    ]
    both = torch.cat(drawn)  # of the sample, wherever it stands
    token = {
        "old_values": both[:, 0],
        "sum_pi_squared": both[:, 1],
        "old_logprobs": -3 * both[:, 0] - 0.1,
        **(token or {}),
    }
    return Columns(
        token=token, sequence=sequence, sequence_of=batch.sequence_of, num_sequences=batch.num_sequences, mask=keep
    )


def prepared(samples: list[Sample], name: str, *, rejected: float = 0.2) -> tuple[Batch, tuple[Term, ...]]:
    """A step's batch as the roles make it: advantages before rejection, weights after it."""
    algo, batch = resolve(name, SETTINGS), pack(samples)
    n = batch.num_loss_tokens
    g = torch.Generator().manual_seed(n)
    every = columns_of(batch, samples, torch.ones(n, dtype=torch.bool))
    found = algo.advantage(every.with_token({"rewards": adv.token_rewards(every)}))
    stored = {
        **found,
        "old_values": every["old_values"],
        **{f"{p}_logprobs": -3 * torch.rand(n, generator=g, dtype=F64) for p in ("old", "ref")},
    }
    kept = torch.rand(n, generator=g) >= rejected
    if rejected:
        kept[batch.sequence_of == 1] = False  # a trajectory that is rejected as a whole
    batch = batch.with_columns(stored)
    return batch.with_columns(term_weights(columns_of(batch, samples, kept, batch.columns), algo.terms)), algo.terms


def accumulated(batch: Batch, terms, parts, outputs) -> tuple[float, dict[str, torch.Tensor]]:
    leaves = {n: v.clone().requires_grad_() for n, v in outputs.items()}
    total = 0.0
    whole = [t for t in terms if t.two_pass]
    if whole:  # as the engine's first pass: evaluated on the whole step, whose gradient weighs the outputs of each part
        loss, _ = evaluate_terms(whole, batch, leaves)
        total += float(loss.detach())
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        weighed = {n: torch.zeros_like(v) if g is None else g for (n, v), g in zip(leaves.items(), grads, strict=True)}
        batch = batch.with_columns({f"w/two_pass/{n}": g for n, g in weighed.items()})
        total -= sum(float((g * leaves[n].detach()).sum()) for n, g in weighed.items())
        terms = [*(t for t in terms if not t.two_pass), *(Surrogate(f"two_pass/{n}", n) for n in weighed)]
    for rows in parts:
        index = loss_index(batch, rows)
        loss, _ = evaluate_terms(terms, select_rows(batch, rows), {n: v[index] for n, v in leaves.items()})
        loss.backward()
        total += float(loss.detach())
    return total, {n: torch.zeros_like(v) if v.grad is None else v.grad for n, v in leaves.items()}


def shuffled_parts(batch: Batch, seed: int, k: int) -> list[np.ndarray]:
    """k micro-batches in any order; rows of one trajectory stay together, in any order."""
    rng = random.Random(seed)
    sequences = [np.flatnonzero(batch.sequence == s) for s in range(batch.num_sequences)]
    rng.shuffle(sequences)
    cuts = sorted(rng.sample(range(1, len(sequences)), min(k, len(sequences)) - 1))
    parts = [np.concatenate(sequences[a:b]) for a, b in itertools.pairwise([0, *cuts, len(sequences)])]
    return [np.array(rng.sample(p.tolist(), len(p))) for p in parts]


def random_outputs(batch: Batch, seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {n: -3 * torch.rand(batch.num_loss_tokens, generator=g, dtype=F64) for n in ("logprobs", "entropy")}


def assert_same(got, expected, **tolerance):
    assert got[0] == pytest.approx(expected[0], rel=1e-9, abs=1e-12)
    for n in expected[1]:
        torch.testing.assert_close(
            got[1][n], expected[1][n], **{"rtol": 1e-9, "atol": 1e-13, **tolerance}, msg=lambda m, n=n: f"{n}: {m}"
        )


@pytest.mark.parametrize("aggregation", [None, *AGGREGATIONS])
@pytest.mark.parametrize("name", TABLE)
def test_rows_of_one_trajectory_are_one_sequence_however_the_step_is_split(name, aggregation, monkeypatch):
    monkeypatch.setitem(SETTINGS, "aggregation", aggregation)
    samples = rewritten(7)
    batch, terms = prepared(samples, name)
    outputs = random_outputs(batch, 1)
    whole = accumulated(batch, terms, [np.arange(batch.num_rows)], outputs)
    assert whole[1]["logprobs"].abs().sum() > 0 and whole[1]["entropy"].abs().sum() > 0
    for seed, k in enumerate((2, 3, batch.num_sequences)):
        assert_same(accumulated(batch, terms, shuffled_parts(batch, seed, k), outputs), whole)


@pytest.mark.parametrize("name", TABLE)
def test_the_order_of_trajectories_changes_no_advantage_and_no_weight(name):
    samples = rewritten(7)
    straight, terms = prepared(samples, name, rejected=0)
    shuffled = np.random.default_rng(0).permutation(straight.num_sequences)
    order = np.concatenate([np.flatnonzero(straight.sequence == s) for s in shuffled])
    moved, _ = prepared([samples[i] for i in order], name, rejected=0)
    index = loss_index(straight, order)
    for column in ("advantages", *(f"w/{t.name}" for t in terms)):
        torch.testing.assert_close(moved.columns[column], straight.columns[column][index], rtol=1e-9, atol=1e-12)
    assert straight.columns["advantages"].abs().sum() > 0


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 9), aggregate=st.sampled_from(AGGREGATIONS))
def test_a_sequence_unit_term(seed, k, aggregate):
    """A ratio of whole sequences (GSPO's), whose weight stands in the first row of each trajectory."""

    def sequence_ratio(columns: Columns) -> TermValue:
        ratio = columns.mean(log_ratio(columns["logprobs"], old_logprobs(columns))).exp()
        a = columns.mean(columns["advantages"])
        return TermValue(torch.maximum(-a * ratio, -a * ratio.clamp(0.9, 1.1)), {"ratio": (ratio, "max")})

    batch, _ = prepared(rewritten(seed), "grpo")
    kept = batch.columns["w/pg_loss"] != 0
    batch = batch.with_columns({"mask": kept})
    columns = Columns(
        token={}, sequence={}, sequence_of=batch.sequence_of, num_sequences=batch.num_sequences, mask=kept
    )
    weight = weight_column(columns, aggregate, unit="sequence", horizon_tokens=16)
    first = np.array([np.flatnonzero(batch.sequence == s)[0] for s in range(batch.num_sequences)])
    per_row = torch.zeros(batch.num_rows, dtype=F64).index_add(0, torch.from_numpy(first), weight)
    batch = batch.with_row_columns({"w/ratio": per_row})
    terms = (Term(name="ratio", fn=sequence_ratio, unit="sequence"),)
    outputs = {"logprobs": random_outputs(batch, seed)["logprobs"]}
    spoiled = {"logprobs": torch.where(kept, outputs["logprobs"], torch.nan)}
    whole = accumulated(batch, terms, [np.arange(batch.num_rows)], outputs)
    assert_same(accumulated(batch, terms, shuffled_parts(batch, seed, k), spoiled), whole)
    assert not whole[1]["logprobs"][~kept].any()


@pytest.mark.parametrize("aggregate", AGGREGATIONS)
def test_weights_are_the_definitions_and_sum_to_the_coefficient(aggregate):
    mask = torch.tensor([1, 1, 0, 1, 0, 0, 1], dtype=torch.bool)
    columns = Columns(
        token={}, sequence={}, sequence_of=torch.tensor([0, 0, 0, 1, 2, 2, 3]), num_sequences=4, mask=mask
    )
    w = weight_column(columns, aggregate, horizon_tokens=10)
    n_global, s_global, n_own = 4, 3, torch.tensor([2, 2, 2, 1, 0, 0, 1.0])  # sequence 2 is empty: in no count
    expected = {
        "token-mean": 1 / n_global,
        "token-sum": 1,
        "seq-mean-token-sum": 1 / s_global,
        "seq-mean-token-mean": 1 / (s_global * n_own),
        "seq-mean-token-sum-norm": 1 / (s_global * 10),
    }[aggregate]
    torch.testing.assert_close(
        w, torch.where(mask, torch.as_tensor(expected, dtype=F64) * torch.ones(7, dtype=F64), 0.0)
    )
    none = replace(columns, mask=torch.zeros(7, dtype=torch.bool))
    assert not weight_column(none, aggregate, horizon_tokens=10).any()
    term = Term(
        name="x",
        fn=lambda c: TermValue(c["logprobs"]),
        aggregate=aggregate,
        horizon_tokens=10,
        coef=-0.5,
        corrected=True,
    )
    corrected = term_weights(columns.with_token({"is_weights": torch.full((7,), 2.0)}), (term,))["w/x"]
    torch.testing.assert_close(corrected, -w)


def test_a_term_that_is_infinite_at_zero_is_not_seen_outside_its_mask():
    batch, _ = prepared(rewritten(2), "grpo")
    term = Term(name="pg_loss", fn=lambda c: TermValue(c["logprobs"].abs().pow(-0.5).detach() * c["logprobs"]))
    outputs = {"logprobs": random_outputs(batch, 0)["logprobs"] - 0.1}
    loss, grads = accumulated(batch, (term,), [np.arange(batch.num_rows)], outputs)
    assert np.isfinite(loss) and grads["logprobs"].isfinite().all()
    assert torch.equal(grads["logprobs"] != 0, batch.columns["w/pg_loss"] != 0)


# -- through the engine ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=False,
        )
    ).double()


def engine_run(model, batch, terms, *, budget=10_000):
    engine = TorchEngine(
        copy.deepcopy(model), optim=OptimSpec(lr=1.0), dtype="float64", max_tokens_per_microbatch=budget
    )
    out = engine.forward_backward(batch, terms)
    return out, {n: p.grad for n, p in engine.model.named_parameters()}


@pytest.mark.parametrize("name", TABLE)
def test_the_engine_with_rewritten_trajectories(name, tiny):
    batch, terms = prepared(rewritten(3), name)
    whole, expected = engine_run(tiny, batch, terms)
    for budget in (90, 30, 1):
        assert len(make_microbatches(batch, budget)) > 1
        out, grads = engine_run(tiny, batch, terms, budget=budget)
        for n, g in expected.items():
            torch.testing.assert_close(grads[n], g, rtol=1e-8, atol=1e-13)
        assert {k: v.value for k, v in out.metrics.items()} == pytest.approx(
            {k: v.value for k, v in whole.metrics.items()}, rel=1e-8
        )


def covariance(columns: Columns) -> TermValue:
    """Statistics over the minibatch under the current policy, as of KL-Cov: they also carry gradient here."""
    lp, h, m = columns["logprobs"], columns["entropy"], columns.mask
    centred = lp - segment_sum(lp[m], torch.zeros_like(columns.sequence_of[m]), 1)[0] / m.sum()
    return TermValue(centred * centred.roll(1) * h.exp() / (1 + lp[m].var()), {"cov": (centred.detach(), "mean")})


def test_two_pass_terms_beside_ordinary_ones(tiny):
    """All at once in one graph, against two passes over any number of micro-batches."""
    batch, ordinary = prepared(rewritten(5), "dapo", rejected=0)
    batch = batch.with_columns({"w/cov": batch.columns["w/pg_loss"] * 3})
    term = Term(name="cov", fn=covariance, outputs=("logprobs", "entropy"))
    one_graph, expected = engine_run(tiny, batch, (*ordinary, term))
    for budget in (10_000, 60, 1):
        out, grads = engine_run(tiny, batch, (*ordinary, replace(term, two_pass=True)), budget=budget)
        for n, g in expected.items():
            torch.testing.assert_close(
                grads[n], g, rtol=1e-7, atol=1e-12, msg=lambda m, n=n, b=budget: f"{n} at {b}: {m}"
            )
        got = {k: v.value for k, v in out.metrics.items()}
        assert got == pytest.approx({k: v.value for k, v in one_graph.metrics.items()}, rel=1e-7)
    single, wrong = engine_run(tiny, batch, (*ordinary, term), budget=60)
    assert any(not torch.allclose(wrong[n], expected[n], rtol=1e-3) for n in expected), (
        "one pass over parts must be seen to differ"
    )


@pytest.mark.parametrize("budget", [10_000, 30])
@pytest.mark.parametrize("name", TABLE)
def test_a_masked_infinite_log_prob_changes_no_gradient(name, budget, tiny):
    """The masked tokens' own logit is -inf in one model and ordinary in the other; nothing else sees it (pitfalls 20)."""
    samples = rewritten(4)
    batch, terms = prepared(samples, name, rejected=0)
    banned = 0  # no sampled id is 0: the rejected tokens are made so
    rejected = torch.zeros(batch.num_loss_tokens, dtype=torch.bool)
    rejected[::4] = True
    batch = replace(batch, targets=torch.where(rejected, banned, batch.targets))
    batch = batch.with_columns(
        {c: torch.where(rejected, 0.0, batch.columns[c]) for c in batch.columns if c.startswith("w/")}
    )
    batch = batch.with_columns(
        {c: torch.where(rejected, torch.nan, batch.columns[c]) for c in ("advantages", "old_logprobs", "ref_logprobs")}
    )

    def with_bias(value):
        model = copy.deepcopy(tiny)
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCAB, dtype=F64))
        with torch.no_grad():
            model.lm_head.bias[banned] = value
        return engine_run(model, batch, terms, budget=budget)

    out, grads = with_bias(-torch.inf)
    assert (out.columns["logprobs"][rejected] == -torch.inf).all()
    _, expected = with_bias(-1e5)  # probability exactly 0 as well, but finite
    for n, g in expected.items():
        assert grads[n].isfinite().all() and g.abs().sum() > 0
        torch.testing.assert_close(grads[n], g, rtol=1e-10, atol=1e-14)
    assert all(np.isfinite(m.value) for m in out.metrics.values())
