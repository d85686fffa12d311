"""For every row of the table, without anyone asking: the gradient does not depend on how the batch was split, packed or
ordered, nor on what stands outside the mask (pitfalls 3, 13, 18; algorithms.md 0.1 and 10). float64."""

import copy
import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.algorithms.advantages import token_rewards
from verl.algorithms.table import TABLE, resolve
from verl.algorithms.terms import Term, TermValue

from verl.algorithms.weights import term_weights
from verl.batch import Batch, Columns, pack, select_rows, unshare
from verl.model_engine.objective import Surrogate, evaluate_terms
from verl.model_engine.torch_engine import TorchEngine
from verl.types import Metric, Refs, Sample, Segment, merge_metrics, ref_of
from verl.workers.role import columns_of

NEEDED = {"drgrpo": {"horizon_tokens": 16}, "gdpo": {"reward_components": ["a", "b"]}}
CRITICS = [f"{name}:critic" for name, row in sorted(TABLE.items()) if row.estimator == "gae"]
ROWS = [*sorted(TABLE), *CRITICS]  # NAME: the policy's terms · NAME:critic: the value model's


def algorithm(name):
    """The row with every optional part switched on, so that all its terms are tested."""
    name = name.partition(":")[0]
    return resolve(name, {"kl_loss_coef": 0.1, "entropy_coef": 0.01, **NEEDED.get(name, {})})


def terms_of(name):
    algo = algorithm(name)
    return algo.value_terms if name in CRITICS else algo.terms


def samples(seed: int, groups: int = 4, n: int = 3, vocab: int = 40) -> list[Sample]:
    """Ragged groups with opaque ids, multi-turn holes, one invalid reward, a group of one, a group without variance."""
    rng = np.random.default_rng(seed)
    out = []
    for g in range(groups):
        prompt = rng.integers(1, vocab, rng.integers(2, 6))
        for i in range(1 if g == 0 else n + g % 2):
            segments = [Segment(ids=prompt, source="prompt")]
            for turn in range(rng.integers(1, 3)):
                if turn:
                    segments.append(Segment(ids=rng.integers(1, vocab, 2), source="env"))
                ids = rng.integers(1, vocab, rng.integers(1, 6))
                segments.append(
                    Segment(
                        ids=ids, source="sampled", logprobs=rng.normal(-2, 0.5, len(ids)).astype(np.float32), version=0
                    )
                )
            reward = 0.1 if g == 1 else float(rng.normal())
            name = f"group-{'0' * g}{g}/{i}"
            out.append(
                Sample(
                    sample_id=name,
                    trajectory_id=name,
                    group_id=f"{'0' * g}1",
                    purpose="train",
                    segments=tuple(segments),
                    temperature=float(rng.choice([0.7, 1.0])),
                    reward=reward,
                    components={"a": reward, "b": -0.5 * i},
                    outcome="invalid" if (g, i) == (2, 1) else "ok",
                )
            )
    return out


def columns_for(refs: Refs, seed: int) -> Columns:
    """The columns of a whole step: rewards, a greedy baseline per group, and values that belong to the sample, not to its place."""
    columns = columns_of(refs, {}, {r.group_id: 0.25 for r in refs})
    columns = columns.with_token({"rewards": token_rewards(columns)})
    drawn = {}
    for r in refs:
        g = torch.Generator().manual_seed(seed + sum(r.sample_id.encode()))
        for n, scale in (("old_values", 1.0), ("sum_pi_squared", 0.0), ("old_logprobs", -1.0)):
            x = torch.rand(r.loss_tokens, generator=g, dtype=torch.float64)
            drawn.setdefault(n, []).append(x if scale == 0 else scale * x * 3)
    return columns.with_token({n: torch.cat(parts) for n, parts in drawn.items()})


def weighted(rows: list[Sample], name: str, seed: int = 0, garbage: float = 0.0) -> tuple[Batch, tuple[Term, ...]]:
    """The batch of one optimizer step, with advantages, stored columns and weights, as a Role makes it."""
    refs = Refs(ref_of(s) for s in rows)
    batch = pack(rows)
    columns = columns_for(refs, seed)
    found = algorithm(name).advantage(columns)
    generator = torch.Generator().manual_seed(seed)
    rollout = batch.columns["rollout_logprobs"].double()
    noise = lambda: 0.3 * torch.randn(len(rollout), generator=generator, dtype=torch.float64)  # noqa: E731
    stored = {
        **found,
        "old_values": columns["old_values"],
        "old_logprobs": rollout + noise(),
        "ref_logprobs": rollout + noise(),
    }
    if garbage:
        stored = {
            k: torch.where(columns.mask, v, torch.tensor(garbage, dtype=torch.float64)) for k, v in stored.items()
        }
    batch = batch.with_columns(stored)
    terms = terms_of(name)
    return batch.with_columns(term_weights(columns_of(refs, batch.columns), terms)), terms


def gradient(
    batch: Batch, terms, parts: list[np.ndarray], outputs: dict[str, torch.Tensor]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and dL/doutput, accumulated over the parts; terms with statistics over the step are evaluated on all of it first."""
    leaves = {n: v.clone().requires_grad_() for n, v in outputs.items()}
    total = 0.0
    whole = [t for t in terms if t.two_pass]
    if whole:
        loss, _ = evaluate_terms(whole, batch, leaves)
        total += float(loss.detach())
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        surrogates = []
        for (n, leaf), g in zip(leaves.items(), grads, strict=True):
            surrogates.append(Surrogate(f"two_pass/{n}", n))
            batch = batch.with_columns({f"w/two_pass/{n}": torch.zeros_like(leaf) if g is None else g})
        total -= sum(
            float((batch.columns[f"w/{s.name}"] * leaves[s.outputs[0]].detach().nan_to_num(0, 0, 0)).sum())
            for s in surrogates
        )
        terms = [*(t for t in terms if not t.two_pass), *surrogates]
    for rows in parts:
        index = torch.cat([torch.arange(int(batch.row_start[r]), int(batch.row_start[r + 1])) for r in rows])
        loss, _ = evaluate_terms(terms, select_rows(batch, rows), {n: v[index] for n, v in leaves.items()})
        loss.backward()
        total += float(loss.detach())
    return total, {n: v.grad for n, v in leaves.items() if v.grad is not None}


def fake_outputs(batch: Batch, seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    n = batch.num_loss_tokens
    draw = lambda: torch.rand(n, generator=g, dtype=torch.float64)  # noqa: E731
    return {"logprobs": -draw() * 3, "entropy": draw(), "values": 3 * draw()}


@pytest.mark.parametrize("name", ROWS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 8))
def test_any_number_of_micro_batches_in_any_order(name, seed, k):
    rows = samples(seed)
    batch, terms = weighted(rows, name, seed)
    outputs = fake_outputs(batch, seed)
    everything = [np.arange(batch.num_rows)]
    loss, grads = gradient(batch, terms, everything, outputs)
    order = list(range(batch.num_rows))
    random.Random(seed).shuffle(order)
    bounds = sorted(random.Random(seed + 1).sample(range(1, batch.num_rows), min(k, batch.num_rows - 1)))
    parts = [np.array(order[a:b]) for a, b in itertools.pairwise([0, *bounds, batch.num_rows])]
    split_loss, split_grads = gradient(batch, terms, parts, outputs)
    assert split_loss == pytest.approx(loss, rel=1e-9, abs=1e-12)
    for n in grads:
        torch.testing.assert_close(split_grads[n], grads[n], rtol=1e-9, atol=1e-12)
    assert any(float(g.abs().sum()) > 0 for g in grads.values()), "a test of zeros proves nothing"


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -1e30])
def test_garbage_outside_the_mask_changes_nothing(name, garbage):
    rows = samples(3)
    clean, terms = weighted(rows, name)
    dirty, _ = weighted(rows, name, garbage=garbage)
    outputs = fake_outputs(clean, 1)
    outside = clean.columns[f"w/{terms[0].name}"] == 0
    assert outside.any()
    spoiled = {n: torch.where(outside, torch.tensor(garbage, dtype=v.dtype), v) for n, v in outputs.items()}
    everything = [np.arange(clean.num_rows)]
    loss, grads = gradient(clean, terms, everything, outputs)
    got_loss, got = gradient(dirty, terms, everything, spoiled)
    assert got_loss == pytest.approx(loss, rel=1e-12)
    for n in grads:
        torch.testing.assert_close(got[n], grads[n], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ROWS)
def test_an_entirely_masked_batch_gives_zero_and_no_nan(name):
    rows = [s for s in samples(5)]
    rows = [Sample(**{**{f: getattr(s, f) for f in s.__dataclass_fields__}, "outcome": "invalid"}) for s in rows]
    batch, terms = weighted(rows, name)
    loss, grads = gradient(batch, terms, [np.arange(batch.num_rows)], fake_outputs(batch, 0))
    assert loss == 0.0 and all(float(g.abs().sum()) == 0 for g in grads.values())


@pytest.mark.parametrize("name", ROWS)
def test_order_and_names_of_groups_do_not_matter(name):
    rows = samples(9)
    algo = algorithm(name)

    def by_sample(order, rename):
        chosen = [rows[i] for i in order]
        chosen = [
            Sample(**{**{f: getattr(s, f) for f in s.__dataclass_fields__}, "group_id": rename(s.group_id)})
            for s in chosen
        ]
        columns = columns_for(Refs(ref_of(s) for s in chosen), 0)
        a = algo.advantage(columns)["advantages"]
        return {s.sample_id: a[columns.sequence_of == i] for i, s in enumerate(chosen)}

    one = by_sample(range(len(rows)), lambda g: g)
    order = list(range(len(rows)))
    random.Random(0).shuffle(order)
    two = by_sample(order, lambda g: f"{{uuid-{g}-\u00e9}}")
    for name_, value in one.items():
        torch.testing.assert_close(two[name_], value, rtol=1e-9, atol=1e-12)


@pytest.fixture(scope="module")
def tiny():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=40,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            intermediate_size=24,
            tie_word_embeddings=True,
        )
    ).double()


def engine_gradient(model, batch, terms, *, budget=10_000, mode="auto"):
    from verl.model_engine.optim import OptimSpec

    critic = "values" in terms[0].outputs
    engine = TorchEngine(
        copy.deepcopy(model),
        head="value" if critic else "lm",
        optim=OptimSpec(lr=1e-3),
        dtype="float64",
        max_tokens_per_microbatch=budget,
        attention_mode=mode,
    )
    if engine.value_head is not None:
        torch.nn.init.normal_(
            engine.value_head.weight, generator=torch.Generator().manual_seed(0)
        )  # zero passes no gradient on
    out = engine.forward_backward(batch, terms, () if critic else ("logprobs",))
    return {n: p.grad.clone() for n, p in engine.model.named_parameters()}, out


@pytest.mark.parametrize("name", ROWS)
def test_the_engine_packed_padded_shared_or_split_gives_one_gradient(name, tiny):
    batch, terms = weighted(samples(11), name)
    expected, whole = engine_gradient(tiny, batch, terms, mode="padded")
    for what, got in {
        "packed": engine_gradient(tiny, batch, terms),
        "split": engine_gradient(tiny, batch, terms, budget=24),
        "unshared": engine_gradient(tiny, unshare(batch), terms, budget=40),
    }.items():
        grads, out = got
        for n, column in whole.columns.items():
            torch.testing.assert_close(out.columns[n], column, rtol=1e-8, atol=1e-10, msg=lambda m, w=what: f"{w}: {m}")
        for n, g in expected.items():
            torch.testing.assert_close(grads[n], g, rtol=1e-6, atol=1e-10, msg=lambda m, w=what, n=n: f"{w} {n}: {m}")
        assert {k: v.value for k, v in out.metrics.items()} == pytest.approx(
            {k: v.value for k, v in whole.metrics.items()}, rel=1e-6
        )


def test_two_pass_terms_see_the_whole_step(tiny):
    """A term with a statistic over the minibatch: the engine's two passes equal one autograd graph, however it is split."""

    def centred(columns: Columns) -> TermValue:
        lp = columns["logprobs"]
        mean = lp[columns.mask].mean()
        return TermValue((lp - mean) ** 2 * columns["advantages"])

    batch, _ = weighted(samples(13), "grpo")
    term = Term(name="pg_loss", fn=centred, two_pass=True)
    whole, _ = engine_gradient(tiny, batch, (term,), budget=100_000)
    parts, _ = engine_gradient(tiny, batch, (term,), budget=24)
    single = Term(name="pg_loss", fn=centred)
    graph, _ = engine_gradient(tiny, batch, (single,), budget=100_000)
    for n in graph:
        torch.testing.assert_close(whole[n], graph[n], rtol=1e-6, atol=1e-10)
        torch.testing.assert_close(parts[n], graph[n], rtol=1e-6, atol=1e-10)
    assert sum(float(g.abs().sum()) for g in graph.values()) > 0


def test_metrics_do_not_depend_on_the_split():
    values = [Metric(float(i), 2.0, "token") for i in range(6)]
    whole = merge_metrics([{"x": v} for v in values])
    halves = merge_metrics(
        [merge_metrics([{"x": v} for v in values[:2]]), merge_metrics([{"x": v} for v in values[2:]])]
    )
    assert whole == halves
