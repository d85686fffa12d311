"""For every preset: the gradient does not depend on how a step was split, packed or ordered, nor on values outside the
mask; new presets are included without further code. Weights are those of the whole step; the parts only sum.
float64."""

import copy
import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from each import FULL_GRID, matrix
from hypothesis import given, settings
from hypothesis import strategies as st
from passes import forward_backward
from small_columns import F64
from transformers import Qwen3Config, Qwen3ForCausalLM

from verl.algorithms import estimators as adv
from verl.algorithms.losses import log_ratio, old_logprobs
from verl.algorithms.presets import PRESETS
from verl.algorithms.resolve import resolve
from verl.algorithms.specs import AGGREGATIONS
from verl.algorithms.weights import term_weights, weight_column
from verl.batch import Batch, Columns, loss_index, make_microbatches, pack, segment_sum, select_rows, unshare
from verl.model_engine.lm_head import Teacher
from verl.model_engine.lora_spec import LoraSpec
from verl.model_engine.objective import evaluate_terms, surrogate, trained_rows
from verl.model_engine.optim import OptimSpec
from verl.model_engine.passes import Passes
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.nn.linear_teacher import HeadWeights, top_k
from verl.objective import Term, TermValue
from verl.observed import OBSERVED, around, observed
from verl.transfer_queue.rows import columns_of as row_columns
from verl.transfer_queue.rows import observed_tokens
from verl.types import Metric, Refs, Sample, Segment, merge_metrics, ref_of
from verl.workers.compute import step_columns

VOCAB, HIDDEN, TOP_K = 40, 6, 4
TEACHER = Teacher(
    HeadWeights(torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9), dtype=F64)), 0.3, 0.8
)
CRITICS = [f"{name}:critic" for name, preset in PRESETS.items() if preset.critic]
OBSERVING = [f"{name}:observing" for name in ("grpo", "gspo", "kl_cov", "gkd_topk")]
BESIDE = [f"{name}:beside" for name in ("grpo", "gspo", "kl_cov")]
EVERY = [*PRESETS, *CRITICS, *OBSERVING, *BESIDE]
"""NAME: the policy's terms · NAME:critic: the value model's · NAME:observing: with the loss on what tools wrote ·
NAME:beside: with the divergence to a teacher beside the policy loss."""
EXTRA = {
    "kl_loss_coef": 0.1,
    "entropy_coef": 0.01,
    "clip_dual": 3.0,
    "horizon_tokens": 16,
    "reward_components": ["a", "b"],
}


def algorithm(name, **given):
    """The preset with every optional part switched on, so that all its terms are tested."""
    more = {"observation_coef": 0.3} if name in OBSERVING else {"divergence_coef": 0.7} if name in BESIDE else {}
    return resolve(name.partition(":")[0], {**EXTRA, **more, **given})


def where(mask, inside, garbage):
    return torch.where(mask.view(-1, *[1] * (inside.dim() - 1)), inside, garbage)


def terms_of(name, **given):
    algo = algorithm(name, **given)
    return algo.value_terms if name in CRITICS else algo.terms


def samples(seed: int) -> list[Sample]:
    """Ragged groups with opaque ids, several turns with holes, trajectories of one to three rows (a rewritten history),
    one invalid reward, a group of one and a group without variance."""
    rng, out = np.random.default_rng(seed), []

    def segment(source, size):
        logprobs = rng.normal(-2, 0.6, size).astype(np.float32) if source == "sampled" else None
        return Segment(ids=rng.integers(1, VOCAB, size), source=source, logprobs=logprobs, version=0)

    for g in range(4):
        prompt = segment("prompt", rng.integers(2, 6))
        for i in range(1 if g == 0 else 3 + g % 2):
            name, reward = f"group-{g:b}/{i}", 0.1 if g == 1 else float(rng.normal())
            for part in range(rng.integers(1, 4) if g != 2 else 1):
                turns = [prompt]
                for _ in range(rng.integers(1, 3)):
                    turns += [segment("env", rng.integers(0, 3)), segment("sampled", rng.integers(1, 6))]
                row = Sample(
                    sample_id=f"{name}#{part}",
                    trajectory_id=name,
                    group_id=f"{'0' * g}1",
                    purpose="train",
                    segments=tuple(turns),
                    temperature=float(rng.choice([0.7, 1.0])),
                    reward=reward,
                    components={"a": reward, "b": -0.5 * i},
                    outcome="invalid" if (g, i) == (2, 1) else "ok",
                )
                out.append(row)
    return out


def drawn(rows: list[Sample], seed: int) -> dict[str, torch.Tensor]:
    """Return stored columns that are a function of the sample, at any place in the batch."""
    names = ("old_values", "sum_pi_squared", "old_logprobs", "ref_logprobs", "teacher_logprobs")
    parts, teachers = [], []
    for row in rows:
        g = torch.Generator().manual_seed(seed + sum(row.sample_id.encode()))
        parts.append(torch.rand(row.loss_tokens, len(names), generator=g, dtype=F64))
        teachers.append(torch.randn(row.loss_tokens, HIDDEN, generator=g, dtype=F64))
    x, hidden = torch.cat(parts), torch.cat(teachers)
    ids, topk, _ = top_k(hidden, TEACHER.head, torch.ones(len(x), dtype=F64), TOP_K)
    found = {n: x[:, k] if k < 2 else -3 * x[:, k] - 0.1 for k, n in enumerate(names)}
    return {**found, "teacher_hidden": hidden, "teacher_ids": ids, "teacher_topk": topk}


def prepared(
    rows: list[Sample], name: str, *, seed=0, rejected=0.0, garbage=0.0, **given
) -> tuple[Batch, tuple[Term, ...]]:
    """One optimizer step as a Role makes it: advantages before rejection, weights of the whole step after it."""
    refs, terms = Refs(ref_of(s) for s in rows), terms_of(name, **given)
    batch, plain = pack([observed(s) for s in rows] if name in OBSERVING else rows), pack(rows)
    stored = drawn(rows, seed)
    seen = {"rollout_logprobs": plain.columns["rollout_logprobs"], **stored}
    columns = step_columns(refs, seen, {r.group_id: 0.25 for r in refs})
    found = algorithm(name, **given).advantage(columns.with_token({"rewards": adv.token_rewards(columns)}))
    stored |= {k: v for k, v in found.items() if isinstance(v, torch.Tensor)}
    if rejected:
        g = torch.Generator().manual_seed(seed)
        keep = torch.rand(len(columns.mask), generator=g) >= rejected
        keep[columns.sequence_of == 1] = False  # a trajectory that is rejected as a whole
        stored["keep"] = keep
    if garbage:
        spoiled = {k: where(columns.mask, v, garbage) for k, v in stored.items() if v.is_floating_point()}
        stored |= spoiled
    stored |= {"rollout_logprobs": seen["rollout_logprobs"], "versions": plain.columns["versions"]}
    inside, watching = ([t for t in terms if (t.unit == "observation") == o] for o in (False, True))
    stored |= term_weights(step_columns(refs, stored), tuple(inside))
    if name not in OBSERVING:
        return batch.with_columns(stored), terms
    env = batch.columns["versions"] == OBSERVED
    counts = [observed_tokens(row_columns(s)["segments"]) for s in rows]
    weights = term_weights(step_columns(refs, {}, counts=counts), tuple(watching))["w/observation_loss"]
    spread = {n: around(c, ~env) for n, c in stored.items() if n != "versions"}
    return batch.with_columns({**spread, "w/observation_loss": around(weights, env)}), terms


def accumulated(batch: Batch, terms, parts, outputs) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and dL/doutput over the parts. Two-pass terms are evaluated on the whole step first, as the engine does."""
    leaves = {n: v.clone().requires_grad_() for n, v in outputs.items()}
    total, whole = 0.0, [t for t in terms if t.two_pass]
    if whole:
        loss, _ = evaluate_terms(whole, batch, leaves)
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        weighed = {n: g for n, g in zip(leaves, grads, strict=True) if g is not None}
        batch = batch.with_columns({f"w/two_pass/{n}": g for n, g in weighed.items()})
        total = float(loss.detach()) - sum(
            float((g * leaves[n].detach().nan_to_num(0, 0, 0)).sum()) for n, g in weighed.items()
        )
        terms = [*(t for t in terms if not t.two_pass), *(surrogate(n) for n in weighed)]
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


def fake_outputs(batch: Batch, seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    scale = {"logprobs": -3, "entropy": 1, "values": 3}
    found = {n: k * torch.rand(batch.num_loss_tokens, generator=g, dtype=F64) for n, k in scale.items()}
    whole = ("divergence", "teacher_agreement", "teacher_entropy")
    found |= {n: torch.rand(batch.num_loss_tokens, generator=g, dtype=F64) for n in whole}
    logits = torch.randn(batch.num_loss_tokens, TOP_K + 1, generator=g, dtype=F64)
    return found | {"logprobs_at": logits.log_softmax(-1)}


def everything(batch: Batch) -> list[np.ndarray]:
    return [np.arange(batch.num_rows)]


def differences(got, expected) -> list[str]:
    out = [] if got[0] == pytest.approx(expected[0], rel=1e-9, abs=1e-12) else [f"loss {got[0]}, not {expected[0]}"]
    close = {n: torch.allclose(got[1][n], g, rtol=1e-9, atol=1e-12) for n, g in expected[1].items()}
    return out + [f"gradient of {n}" for n, same in close.items() if not same]


# -- parts of a step ---------------------------------------------------------------------------------------------------


@matrix("aggregation", [None, *AGGREGATIONS])
def test_any_number_of_parts_in_any_order(aggregation):
    """With rejected tokens and without; in turn, but in the full grid."""
    wrong, turn = [], AGGREGATIONS.index(aggregation) if aggregation else len(AGGREGATIONS)
    for i, (name, seed) in enumerate(itertools.product(EVERY, (0, 7))):
        if not FULL_GRID and (i + i // 2 + turn) % 2:
            continue
        given = {} if aggregation is None else {"aggregation": aggregation}
        batch, terms = prepared(samples(seed), name, seed=seed, rejected=0.2 * (seed > 0), **given)
        outputs = fake_outputs(batch, seed)
        whole = accumulated(batch, terms, everything(batch), outputs)
        assert any(g.abs().sum() > 0 for g in whole[1].values()), f"{name}: a test of zeros proves nothing"
        for k in (2, 5, batch.num_sequences) if FULL_GRID else ((2, batch.num_sequences), (5,))[len(name) % 2]:
            found = differences(accumulated(batch, terms, shuffled_parts(batch, seed + k, k), outputs), whole)
            wrong += [f"{name}, seed {seed}, {k} parts: {x}" for x in found]
    assert not wrong, wrong


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 9), name=st.sampled_from(EVERY))
def test_any_step_in_any_parts(seed, k, name):
    batch, terms = prepared(samples(seed), name, seed=seed, rejected=0.3 * (seed % 2))
    outputs = fake_outputs(batch, seed)
    whole = accumulated(batch, terms, everything(batch), outputs)
    assert not differences(accumulated(batch, terms, shuffled_parts(batch, seed, k), outputs), whole)


def test_weights_of_a_part_alone_would_be_seen():
    """The mistake that this file is about: denominators counted in each part, and averaged."""
    rows = samples(7)
    batch, terms = prepared(rows, "dapo")
    outputs = fake_outputs(batch, 0)
    whole = accumulated(batch, terms, everything(batch), outputs)
    parts = shuffled_parts(batch, 0, 3)
    refs = Refs(ref_of(s) for s in rows)
    own = {t.name: torch.zeros(batch.num_loss_tokens, dtype=F64) for t in terms}
    for part in parts:
        some = Refs(refs[i] for i in part)
        found = term_weights(step_columns(some, select_rows(batch, part).columns), terms)
        for t in terms:
            own[t.name][loss_index(batch, part)] = found[f"w/{t.name}"] / len(parts)
    mine = batch.with_columns({f"w/{n}": w for n, w in own.items()})
    assert differences(accumulated(mine, terms, parts, outputs), whole)


def test_order_of_rows_and_names_of_groups_change_no_advantage_and_no_weight():
    rows, wrong = samples(9), []
    for name in EVERY:
        straight, terms = prepared(rows, name)
        shuffled = np.random.default_rng(0).permutation(straight.num_sequences)
        order = np.concatenate([np.flatnonzero(straight.sequence == s) for s in shuffled])
        moved, _ = prepared([replace(rows[i], group_id=f"{{uuid-{rows[i].group_id}-é}}") for i in order], name)
        index = loss_index(straight, order)
        for column in ("advantages", *(f"w/{t.name}" for t in terms)):
            if not torch.allclose(moved.columns[column], straight.columns[column][index], rtol=1e-9, atol=1e-12):
                wrong.append(f"{name}: {column}")
        assert straight.columns["advantages"].abs().sum() > 0
    assert not wrong, wrong


# -- rows without a gradient -------------------------------------------------------------------------------------------


def bare_terms(rows: list[Sample], name: str) -> tuple[Batch, tuple[Term, ...]]:
    """A step of a preset with its policy loss alone."""
    batch, terms = prepared(rows, name)
    return batch, tuple(t for t in terms if t.name == "pg_loss")


def gradient_of_rows(batch: Batch, terms, rows: np.ndarray) -> float:
    """The largest gradient to an output of a token of these rows."""
    _, grads = accumulated(batch, terms, everything(batch), fake_outputs(batch, 0))
    index = loss_index(batch, np.flatnonzero(rows))
    return max(float(g[index].abs().max()) for g in grads.values() if len(index))


def test_rows_that_are_not_trained_have_no_gradient():
    """Of every policy loss with groups: one of the groups has no variance."""
    without, wrong = [], []
    for name, preset in PRESETS.items():
        batch, terms = bare_terms(samples(7), name)
        if preset.loss.two_pass:
            continue
        trained = trained_rows(batch, terms)
        if trained.all():
            continue
        without.append(name)
        if gradient_of_rows(batch, terms, ~trained) != 0 or gradient_of_rows(batch, terms, trained) == 0:
            wrong.append(name)
    assert not wrong and {"grpo", "dapo", "gspo", "cispo", "sapo", "rloo"} <= {*without}, (wrong, without)


@pytest.mark.parametrize("name", ["dro", "intellect_ipo"])
def test_a_loss_with_a_gradient_without_advantages_would_be_seen(name):
    """Both pull the policy back also where the advantage is 0."""
    batch, terms = bare_terms(samples(7), name)
    trained = trained_rows(batch, [replace(t, scaled_by="advantages") for t in terms])
    assert not trained.all() and gradient_of_rows(batch, terms, ~trained) > 0


# -- what stands outside the mask --------------------------------------------------------------------------------------


def test_garbage_outside_the_mask_changes_nothing():
    wrong = []
    for name in EVERY:
        clean, terms = prepared(samples(3), name)
        outputs = fake_outputs(clean, 1)
        outside = torch.stack([clean.columns[f"w/{t.name}"] == 0 for t in terms]).all(0)
        assert outside.any()
        whole = accumulated(clean, terms, everything(clean), outputs)
        for garbage in (torch.nan, torch.inf, -1e30):
            dirty, _ = prepared(samples(3), name, garbage=garbage)
            spoiled = {n: where(~outside, v, garbage) for n, v in outputs.items()}
            got = accumulated(dirty, terms, everything(clean), spoiled)
            wrong += [f"{name}, {garbage}: {x}" for x in differences(got, whole)]
    assert not wrong, wrong


def test_an_entirely_masked_batch_gives_zero_and_no_nan():
    rows, wrong = [replace(s, outcome="invalid") for s in samples(5)], []
    for name in EVERY:
        batch, terms = prepared(rows, name)
        loss, grads = accumulated(batch, terms, everything(batch), fake_outputs(batch, 0))
        if loss != 0.0 or any(float(g.abs().sum()) != 0 for g in grads.values()):
            wrong.append(name)
    assert not wrong, wrong


def test_a_term_that_is_infinite_at_zero_is_not_seen_outside_its_mask():
    batch, _ = prepared(samples(2), "grpo")
    term = Term(name="pg_loss", fn=lambda c: TermValue(c["logprobs"].abs().pow(-0.5).detach() * c["logprobs"]))
    outputs = {"logprobs": fake_outputs(batch, 0)["logprobs"] - 0.1}
    loss, grads = accumulated(batch, (term,), everything(batch), outputs)
    assert np.isfinite(loss) and grads["logprobs"].isfinite().all()
    assert torch.equal(grads["logprobs"] != 0, batch.columns["w/pg_loss"] != 0)


# -- units and metrics -------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 9), aggregate=st.sampled_from(AGGREGATIONS))
def test_a_sequence_unit_term(seed, k, aggregate):
    """A ratio of whole sequences (GSPO's), with its weight in the first row of each trajectory."""

    def sequence_ratio(columns: Columns) -> TermValue:
        ratio = columns.mean(log_ratio(columns["logprobs"], old_logprobs(columns))).exp()
        a = columns.mean(columns["advantages"])
        return TermValue(torch.maximum(-a * ratio, -a * ratio.clamp(0.9, 1.1)), {"ratio": (ratio, "max")})

    batch, _ = prepared(samples(seed), "grpo", rejected=0.2)
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
    outputs = {"logprobs": fake_outputs(batch, seed)["logprobs"]}
    spoiled = {"logprobs": torch.where(kept, outputs["logprobs"], torch.nan)}
    whole = accumulated(batch, terms, everything(batch), outputs)
    assert not differences(accumulated(batch, terms, shuffled_parts(batch, seed, k), spoiled), whole)
    assert not whole[1]["logprobs"][~kept].any()


def test_metrics_do_not_depend_on_the_split():
    values = [Metric(float(i), 2.0, "token") for i in range(6)]
    whole = merge_metrics([{"x": v} for v in values])
    halves = merge_metrics([merge_metrics([{"x": v} for v in part]) for part in (values[:2], values[2:])])
    assert whole == halves


# -- through the engine ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=24,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config).double()


def engine_run(model, batch, terms, *, budget=10_000, mode="auto", lora=None):
    critic = "values" in terms[0].outputs
    engine = TorchEngine(
        copy.deepcopy(model),
        EngineSettings(
            head="value" if critic else "lm",
            optim=OptimSpec(lr=1.0),
            dtype="float64",
            max_tokens_per_microbatch=budget,
            attention_mode=mode,
            teacher=None if critic else TEACHER,
            lora=lora,
        ),
    )
    generator = torch.Generator().manual_seed(1)
    for name, p in engine.model.named_parameters():
        if name.endswith("lora_B"):  # else A would have no gradient
            torch.nn.init.normal_(p, std=0.1, generator=generator)
    if engine.value_head is not None:  # zero passes no gradient on
        torch.nn.init.normal_(engine.value_head.weight, generator=torch.Generator().manual_seed(0))
    out = forward_backward(engine, batch, terms, () if critic else ("logprobs",))
    return out, {n: p.grad for n, p in engine.model.named_parameters() if p.grad is not None}


def engine_differences(got, expected, rtol=1e-6) -> list[str]:
    (out, grads), (whole, exact) = got, expected
    wrong = [n for n, g in exact.items() if not torch.allclose(grads[n], g, rtol=rtol, atol=1e-10)]
    wrong += [n for n, c in whole.columns.items() if not torch.allclose(out.columns[n], c, rtol=1e-8, atol=1e-10)]
    metrics = [{k: v.value for k, v in o.metrics.items()} for o in (out, whole)]
    return wrong if metrics[0] == pytest.approx(metrics[1], rel=rtol) else [*wrong, "metrics"]


@matrix("names", [EVERY[::3], EVERY[1::3], EVERY[2::3]], ids=("first", "second", "third"))
def test_the_engine_packed_padded_shared_or_split_gives_one_gradient(names, tiny):
    wrong = []
    for name in names:
        batch, terms = prepared(samples(11), name)
        assert len(make_microbatches(batch, 40)) > 1
        expected = engine_run(tiny, batch, terms, mode="padded")
        assert sum(float(g.abs().sum()) for g in expected[1].values()) > 0
        for what, got in {
            "packed": engine_run(tiny, batch, terms),
            "split": engine_run(tiny, batch, terms, budget=24),
            "unshared": engine_run(tiny, unshare(batch), terms, budget=40),
        }.items():
            wrong += [f"{name} {what}: {x}" for x in engine_differences(got, expected)]
    assert not wrong, wrong


@pytest.mark.parametrize("name", ["grpo", "gspo", "dapo"])
def test_the_factors_of_lora_get_one_gradient_however_a_step_is_packed(name, tiny):
    batch, terms = prepared(samples(11), name)
    lora = LoraSpec(rank=3, alpha=6.0)
    expected = engine_run(tiny, batch, terms, mode="padded", lora=lora)
    assert expected[1] and all(n.endswith(("lora_A", "lora_B")) and g.any() for n, g in expected[1].items())
    for packed, budget in ((batch, 10_000), (batch, 24), (unshare(batch), 40)):
        assert not engine_differences(engine_run(tiny, packed, terms, budget=budget, lora=lora), expected)


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_rows_without_a_gradient_need_no_backward_pass(name, tiny, monkeypatch):
    """All results are those of passes that train every row; a step without any gradient has zeros."""
    batch, terms = bare_terms(samples(11), name)
    every = [replace(t, scaled_by=None) for t in terms]
    seen, outputs = [], Passes._outputs

    def watched(passes, part, wanted):
        seen.append((torch.is_grad_enabled(), part.num_rows))
        return outputs(passes, part, wanted)

    monkeypatch.setattr(Passes, "_outputs", watched)
    trained = trained_rows(batch, terms)
    for budget in (10_000, 24):
        seen.clear()
        got = engine_run(tiny, batch, terms, budget=budget)
        assert sum(rows for grad, rows in seen if grad) == trained.sum() < batch.num_rows
        assert sum(rows for _, rows in seen) == batch.num_rows
        assert not engine_differences(got, engine_run(tiny, batch, every, budget=budget))
    still = batch.with_columns({"advantages": torch.zeros_like(batch.columns["advantages"])})
    _, grads = engine_run(tiny, still, terms)
    assert grads.keys() == got[1].keys() and not any(g.any() for g in grads.values())


def covariance(columns: Columns) -> TermValue:
    """Statistics over the minibatch under the current policy, as of KL-Cov: they also carry gradient here."""
    lp, h, m = columns["logprobs"], columns["entropy"], columns.mask
    centred = lp - segment_sum(lp[m], torch.zeros_like(columns.sequence_of[m]), 1)[0] / m.sum()
    return TermValue(centred * centred.roll(1) * h.exp() / (1 + lp[m].var()), {"cov": (centred.detach(), "mean")})


def test_two_pass_terms_beside_ordinary_ones(tiny):
    """All at once in one graph, against two passes over any number of micro-batches."""
    batch, ordinary = prepared(samples(5), "dapo")
    batch = batch.with_columns({"w/cov": batch.columns["w/pg_loss"] * 3})
    term = Term(name="cov", fn=covariance, outputs=("logprobs", "entropy"))
    expected = engine_run(tiny, batch, (*ordinary, term))
    for budget in (10_000, 60, 1):
        got = engine_run(tiny, batch, (*ordinary, replace(term, two_pass=True)), budget=budget)
        assert not engine_differences(got, expected, rtol=1e-7), budget
    _, wrong = engine_run(tiny, batch, (*ordinary, term), budget=60)
    assert any(not torch.allclose(wrong[n], g, rtol=1e-3) for n, g in expected[1].items()), (
        "one pass over parts must be seen to differ"
    )


@pytest.mark.slow
def test_a_masked_infinite_log_prob_changes_no_gradient(tiny):
    """The masked tokens' own logit is -inf in one model and ordinary in the other; nothing else sees it."""
    banned = 0  # no sampled id is 0: the rejected tokens are made so

    def with_bias(value, batch, terms, budget):
        model = copy.deepcopy(tiny)
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCAB, dtype=F64))
        with torch.no_grad():
            model.lm_head.bias[banned] = value
        return engine_run(model, batch, terms, budget=budget)

    wrong = []
    for i, name in enumerate(PRESETS):
        batch, terms = prepared(samples(4), name)
        rejected = torch.zeros(batch.num_loss_tokens, dtype=torch.bool)
        rejected[::4] = True
        batch = replace(batch, targets=torch.where(rejected, banned, batch.targets))
        nothing = {c: torch.where(rejected, 0.0, batch.columns[c]) for c in batch.columns if c.startswith("w/")}
        nothing |= {c: batch.columns[c] & ~rejected for c in batch.columns if c.startswith("m/")}
        nan = {
            c: torch.where(rejected, torch.nan, batch.columns[c])
            for c in ("advantages", "old_logprobs", "ref_logprobs")
        }
        batch, budget = batch.with_columns({**nothing, **nan}), (10_000, 30)[i % 2]
        out, grads = with_bias(-torch.inf, batch, terms, budget)
        assert (out.columns["logprobs"][rejected] == -torch.inf).all()
        _, expected = with_bias(-1e5, batch, terms, budget)  # probability exactly 0 as well, but finite
        for n, g in expected.items():
            if not (g.abs().sum() > 0 and torch.allclose(grads[n], g, rtol=1e-10, atol=1e-14)):
                wrong.append(f"{name}: {n}")
        if not all(np.isfinite(m.value) for m in out.metrics.values()):
            wrong.append(f"{name}: metrics")
    assert not wrong, wrong
