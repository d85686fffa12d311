"""Rollout corrections: weights, rejections and metrics by hand, and their edges. float64."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st
from small_columns import columns, f64

from verl.algorithms import losses
from verl.algorithms.corrections import correct
from verl.algorithms.filters import REJECTION_STATS, Correction
from verl.algorithms.weights import term_weights
from verl.objective import Term
from verl.types import Metric

F64 = torch.float64


def policies(ratios, tokens, mask=None):
    """Columns with these pi_train / pi_rollout."""
    ratio = f64(*ratios)
    c = columns([0.0] * len(tokens), tokens=tokens, mask=mask)
    rollout = torch.linspace(-3, -1, len(ratio), dtype=F64)
    return c.with_token({"rollout_logprobs": rollout, "old_logprobs": rollout + ratio.log()})


FORMS = ("truncate", "clamp", "icepop", "mask")


def weighed(**spec):
    """Return a correction that truncates, unless another form is given."""
    return Correction(**{"form": "truncate", **spec})


def rule(stat, low, high):
    return ":".join([stat, *([] if low is None else [repr(low)]), repr(high)])


def weights_of(c, **spec):
    return correct(c, weighed(**spec))["is_weights"]


def kept(c, *rules):
    return correct(c, Correction(reject=tuple(rule(*r) for r in rules)))["keep"].int().tolist()


def test_levels_by_hand():
    c = policies((4.0, 1.0, 0.25, 0.25), [2, 2])
    torch.testing.assert_close(weights_of(c, level="token", high=9.0), f64(4, 1, 0.25, 0.25))
    torch.testing.assert_close(weights_of(c, level="sequence", high=9.0), f64(4, 4, 1 / 16, 1 / 16))
    torch.testing.assert_close(weights_of(c, level="geometric", high=9.0), f64(2, 2, 0.25, 0.25))
    torch.testing.assert_close(weights_of(c, form=None), f64(1, 1, 1, 1))


def test_forms_by_hand():
    """Bounds .5 and 2 on pi_train / pi_rollout."""
    c = policies((4.0, 1.9, 0.6, 0.25), [4])
    expected = {
        "truncate": ([2, 1.9, 0.6, 0.25], [1, 1, 1, 1]),
        "clamp": ([2, 1.9, 0.6, 0.5], [1, 1, 1, 1]),
        "icepop": ([0, 1.9, 0.6, 0], [1, 1, 1, 1]),
        "mask": ([0, 1.9, 0.6, 0], [0, 1, 1, 0]),
    }
    assert set(expected) == set(FORMS)
    for form, (weight, keep) in expected.items():
        got = correct(c, Correction(form=form, low=0.5, high=2.0))
        torch.testing.assert_close(got["is_weights"], f64(*weight))
        assert got["keep"].int().tolist() == keep
    assert correct(c, Correction(form="mask", high=2.0))["keep"].int().tolist() == [0, 1, 1, 1], "no lower bound"
    same = policies((1.0, 1.0), [2])
    assert correct(same, Correction(form="mask", low=1.0, high=1.0))["keep"].all(), "the boundaries are inside"


def test_batch_normalisation_is_over_tokens_or_over_sequences_after_the_bounds():
    """Truncated at 2: tokens (2, 1, .5), mean 3.5 / 3; sequences (2, .5) whatever their lengths, mean 1.25."""
    c = policies((4.0, 1.0, 0.5), [2, 1])
    torch.testing.assert_close(weights_of(c, high=2.0, batch_normalize=True), f64(2, 1, 0.5) * 3 / 3.5)
    got = weights_of(c, level="sequence", high=2.0, batch_normalize=True)
    torch.testing.assert_close(got, f64(2, 2, 0.5) / 1.25)
    empty = policies((4.0, 1.0, 0.5, 9.0), [2, 1, 1], mask=[True, True, True, False])
    torch.testing.assert_close(weights_of(empty, level="sequence", high=2.0, batch_normalize=True)[:3], got)


def test_bounds_of_k1_are_on_the_trainers_probability_over_the_samplers():
    """Q8: 0.4 to 1.2 keeps 0.6 and rejects 1.8; one bound means the reciprocal below."""
    c = policies((0.6, 1.0, 1.8, 0.3), [4])
    assert kept(c, ("token_k1", 0.4, 1.2)) == [1, 1, 0, 0]
    assert kept(c, ("token_k1", None, 2.0)) == [1, 1, 1, 0]


def test_statistics_by_hand():
    """Log-ratios (ln 2, ln 2), (ln 2, -ln 2), (0): k2 of ln 2 is .2402, k3 of 2 is .307, of 1/2 .193."""
    c = policies((2.0, 2.0, 2.0, 0.5, 1.0), [2, 2, 1])
    assert kept(c, ("token_k2", None, 0.25)) == [1] * 5 and kept(c, ("token_k2", None, 0.24)) == [0, 0, 0, 0, 1]
    assert kept(c, ("token_k3", None, 0.3)) == [0, 0, 0, 1, 1]
    assert kept(c, ("seq_sum_k1", None, 3.0)) == [0, 0, 1, 1, 1], "product 4, 1, 1"
    assert kept(c, ("seq_mean_k1", 0.5, 1.9)) == [0, 0, 1, 1, 1], "geometric mean 2, 1, 1"
    assert kept(c, ("seq_sum_k2", None, 0.4)) == [0, 0, 0, 0, 1]
    assert kept(c, ("seq_mean_k2", None, 0.25)) == [1] * 5
    assert kept(c, ("seq_sum_k3", None, 0.55)) == [0, 0, 1, 1, 1], "0.614, 0.5, 0"
    assert kept(c, ("seq_mean_k3", None, 0.2)) == [0, 0, 0, 0, 1]
    assert kept(c, ("seq_max_k3", None, 0.2)) == [0, 0, 0, 0, 1] and kept(c, ("seq_max_k2", None, 0.25)) == [1] * 5
    assert kept(c, ("token_k3", None, 0.3), ("seq_mean_k3", None, 0.3)) == [0, 0, 0, 1, 1], "all must pass"


def test_rejection_changes_no_weight_and_takes_the_token_out_of_the_loss():
    c = policies((4.0, 1.0, 0.5), [2, 1])
    plain = weighed(high=2.0, batch_normalize=True)
    got = correct(c, replace(plain, reject=(rule("token_k1", None, 3.0),)))
    torch.testing.assert_close(got["is_weights"], correct(c, plain)["is_weights"] * f64(0, 1, 1))
    term = Term(name="pg", fn=losses.reinforce, corrected="token")
    seen = c.with_token({"is_weights": got["is_weights"], "keep": got["keep"]})
    torch.testing.assert_close(term_weights(seen, (term,))["w/pg"], got["is_weights"] / 2)
    before = term_weights(seen, (replace(term, denominator="before_rejection"),))["w/pg"]
    torch.testing.assert_close(before, got["is_weights"] / 3)
    assert got["rollout_corr/rollout_rs_masked_fraction"].value == pytest.approx(1 / 3)
    assert got["rollout_corr/rollout_rs_seq_masked_fraction"].value == 0.5


def test_metrics_by_hand():
    """Ratios (2, 1 / 2) and (1): perplexities from the log-probs; a sequence without a token is in none."""
    c = columns([0.0] * 3, tokens=[2, 1, 1], mask=[True, True, True, False])
    ln = math.log
    c = c.with_token(
        {"rollout_logprobs": f64(-1, -3, -1, 7), "old_logprobs": f64(-1 + ln(2), -3 - ln(2), -1, float("nan"))}
    )
    got = {
        n.removeprefix("rollout_corr/"): m.value
        for n, m in correct(c, weighed(high=1.5)).items()
        if isinstance(m, Metric)
    }
    w = (1.5, 0.5, 1)
    expected = {
        "kl": 0.0,
        "k3_kl": (1 - ln(2) - 0.5 + ln(2)) / 3,
        "chi2_token": (4 + 0.25 + 1) / 3 - 1,
        "chi2_seq": 0.0,
        "training_log_ppl": 1.5,
        "rollout_log_ppl": 1.5,
        "training_ppl": (math.exp(2) + math.e) / 2,
        "ppl_ratio": 1.0,
        "rollout_is_mean": 1.0,
        "rollout_is_max": 1.5,
        "rollout_is_min": 0.5,
        "rollout_is_std": (0.5 / 3) ** 0.5,
        "rollout_is_eff_sample_size": sum(w) ** 2 / (3 * sum(x * x for x in w)),
        "rollout_is_ratio_fraction_high": 1 / 3,
        "rollout_is_ratio_fraction_low": 1 / 3,
    }
    assert {n: got[n] for n in expected} == pytest.approx(expected, abs=1e-12)


def test_the_same_policy_has_weight_one():
    c = policies((1.0, 1.0, 1.0), [2, 1])
    for level in ("token", "sequence", "geometric"):
        got = correct(
            c,
            weighed(
                level=level, high=2.0, batch_normalize=True, reject=tuple(rule(s, None, 1.0) for s in REJECTION_STATS)
            ),
        )
        torch.testing.assert_close(got["is_weights"], f64(1, 1, 1))
        assert got["keep"].all() and got["rollout_corr/rollout_is_eff_sample_size"].value == pytest.approx(1)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 999),
    mask=st.lists(st.booleans(), min_size=8, max_size=8),
    level=st.sampled_from(["token", "sequence", "geometric"]),
    form=st.sampled_from([*FORMS, None]),
    stat=st.sampled_from(REJECTION_STATS),
    garbage=st.sampled_from([float("nan"), math.inf, -1e30]),
)
def test_garbage_outside_the_mask_changes_nothing(seed, mask, level, form, stat, garbage):
    g = torch.Generator().manual_seed(seed)
    c = columns([0.0] * 3, tokens=[3, 4, 1], mask=mask)
    token = {n: torch.randn(8, generator=g, dtype=F64) for n in ("old_logprobs", "rollout_logprobs")}
    spec = Correction(level=level, form=form, low=0.5, high=1.5, batch_normalize=True, reject=(rule(stat, None, 1.5),))
    clean = correct(c.with_token(token), spec)
    dirty = correct(c.with_token({n: torch.where(c.mask, x, garbage) for n, x in token.items()}), spec)
    assert clean.keys() == dirty.keys()
    for name, x in clean.items():
        if isinstance(x, Metric):
            assert dirty[name].value == pytest.approx(x.value) and math.isfinite(x.value)
        else:
            torch.testing.assert_close(dirty[name], x)
            assert not x[~c.mask].any()
    assert any(mask) or not [n for n in clean if n.startswith("rollout_corr/")], "no token: metrics are left out"


@each("bad", [float("nan"), math.inf, -math.inf])
def test_a_log_ratio_that_is_not_finite_is_rejected_and_spreads_no_further_than_it_must(bad):
    c = policies((1.0, 1.0, 1.0, 1.0), [2, 2])
    c = c.with_token({"old_logprobs": torch.where(torch.tensor([True, False, False, False]), bad, c["old_logprobs"])})
    token = correct(c, weighed(high=2.0))
    assert token["is_weights"].tolist() == [0, 1, 1, 1] and token["keep"].tolist() == [False, True, True, True]
    for got in (
        correct(c, weighed(level="sequence", high=2.0)),
        correct(c, weighed(reject=(rule("seq_mean_k3", None, 9.0),), high=2.0)),
    ):
        assert got["keep"].tolist() == [False, False, True, True] and got["is_weights"].tolist() == [0, 0, 1, 1]
        assert all(math.isfinite(m.value) for m in got.values() if isinstance(m, Metric))


@each("q, level", product([-600.0, 600.0], ["token", "sequence", "geometric"]))
def test_a_huge_log_ratio_is_finite(q, level):
    c = columns([0.0], tokens=2).with_token({"old_logprobs": f64(q, q), "rollout_logprobs": f64(0, 0)})
    got = correct(c, weighed(level=level, high=1e30, batch_normalize=True))
    assert got["is_weights"].tolist() == pytest.approx([1, 1]) and all(
        math.isfinite(m.value) for m in got.values() if isinstance(m, Metric)
    )
