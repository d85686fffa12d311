"""Hand-solved numbers for each estimator of algorithms.md section 1, and what each does at its edges. float64."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_algorithms import columns, f64

from verl.algorithms import advantages as adv
from verl.algorithms import selection


def outcome(estimator, scores, groups, **sequence):
    c = columns(scores, groups)
    return estimator(replace(c, sequence={**c.sequence, **sequence}))["advantages"]


# -- GAE -------------------------------------------------------------------------------------------------------------


def test_gae_by_hand():
    """delta = (0 + .5*2 - 1, 4 - 2) = (0, 2); A = (0 + .5*.5*2, 2)."""
    c = columns([4.0], tokens=2).with_token({"old_values": f64(1, 2)})
    got = adv.gae(c, gamma=0.5, lam=0.5, whitened=False)
    torch.testing.assert_close(got["advantages"], f64(0.5, 2))
    torch.testing.assert_close(got["returns"], f64(1.5, 4))
    white = adv.gae(c, gamma=0.5, lam=0.5)
    torch.testing.assert_close(white["advantages"], f64(-1, 1) / math.sqrt(2), rtol=1e-6, atol=0)
    torch.testing.assert_close(white["returns"], got["returns"])


def test_gae_with_lambda_one_is_the_return_minus_the_value_and_with_zero_the_td_error():
    c = columns([3.0, -1.0], tokens=[3, 2]).with_token({"old_values": f64(0.5, 1, 2, -1, 0.25)})
    monte_carlo = adv.gae(c, whitened=False)
    torch.testing.assert_close(monte_carlo["advantages"], f64(3, 3, 3, -1, -1) - c["old_values"])
    torch.testing.assert_close(monte_carlo["returns"], f64(3, 3, 3, -1, -1))
    torch.testing.assert_close(adv.gae(c, lam=0.0, whitened=False)["advantages"], f64(0.5, 1, 1, 1.25, -1.25))


def test_gae_skips_holes_and_ignores_what_stands_in_them():
    nan = float("nan")
    c = columns([4.0], tokens=4, mask=[True, False, False, True]).with_token({"old_values": f64(1, nan, 7, 2)})
    got = adv.gae(c.with_token({"rewards": f64(0, nan, math.inf, 4)}), gamma=0.5, lam=0.5, whitened=False)
    torch.testing.assert_close(got["advantages"], f64(0.5, 0, 0, 2))
    torch.testing.assert_close(got["returns"], f64(1.5, 0, 0, 4))


def test_the_critic_may_have_its_own_lambda():
    """VC-PPO: returns of lambda 1 are Monte Carlo, whatever the policy's lambda."""
    c = columns([4.0], tokens=3).with_token({"old_values": f64(1, 2, 3)})
    got = adv.gae(c, lam=0.0, lam_critic=1.0, whitened=False)
    torch.testing.assert_close(got["returns"], f64(4, 4, 4))
    torch.testing.assert_close(got["advantages"], f64(1, 1, 1))


def test_lambda_grows_with_the_length():
    """VAPO: lambda = max(0, 1 - 1 / (alpha l)); alpha .5: l = 4 gives .5, l = 2 gives 0, l = 1 would be negative."""
    c = columns([1.0, 1.0, 1.0], tokens=[4, 2, 1]).with_token({"old_values": torch.zeros(7, dtype=torch.float64)})
    got = adv.gae(c, lam_critic=1.0, length_adaptive_alpha=0.5, whitened=False)["advantages"]
    torch.testing.assert_close(got, f64(0.125, 0.25, 0.5, 1, 0, 1, 1))


# -- baselines of a group --------------------------------------------------------------------------------------------


def test_leave_one_out_uses_the_others_mean_and_deviation():
    got = outcome(lambda c: adv.grpo(c, leave_one_out=True), [1.0, 2.0, 4.0], ["g"] * 3)
    torch.testing.assert_close(
        got, f64((1 - 3) / (2**0.5 + 1e-6), (2 - 2.5) / (4.5**0.5 + 1e-6), (4 - 1.5) / (0.5**0.5 + 1e-6))
    )
    flat_rest = outcome(lambda c: adv.grpo(c, leave_one_out=True), [0.1, 0.1, 0.1, 1.0], ["g"] * 4)
    assert flat_rest[3] == pytest.approx(0.9), "the others do not vary: undivided"
    torch.testing.assert_close(outcome(lambda c: adv.grpo(c, leave_one_out=True), [1.0, 3.0], ["g"] * 2), f64(-2, 2))


def test_scales_of_grpo():
    scores, groups = [0.0, 2.0, 5.0, 7.0], ["a", "a", "b", "b"]
    centred = f64(-1, 1, -1, 1)
    torch.testing.assert_close(
        outcome(lambda c: adv.grpo(c, scale="batch"), scores, groups), centred / (f64(*scores).std() + 1e-6)
    )
    torch.testing.assert_close(outcome(lambda c: adv.grpo(c, scale="none"), scores, groups), centred)
    torch.testing.assert_close(
        outcome(lambda c: adv.grpo(c, scale="none", leave_one_out=True), scores, groups), 2 * centred
    )


def test_remax_by_hand():
    """Two samples share the greedy score 1 of their prompt; the penalty of the first token is in its own return only."""
    c = columns([3.0, 0.5], tokens=2, penalty=f64(0.5, 0, 0, 0))
    got = adv.remax(replace(c, sequence={**c.sequence, "baseline": f64(1, 1)}))
    torch.testing.assert_close(got["returns"], f64(2.5, 3, 0.5, 0.5))
    torch.testing.assert_close(got["advantages"], f64(1.5, 2, -0.5, -0.5))


def test_opo_weighs_by_length():
    c = columns([1.0, 5.0, 9.0], ["g", "g", "alone"], tokens=[3, 1, 2])
    torch.testing.assert_close(adv.opo(c)["advantages"], f64(-1, -1, -1, 3, 0, 0))
    assert adv.opo(c, singleton="raw")["advantages"].tolist()[-2:] == [9, 9]


def test_gpg_counts_the_samples_without_signal():
    """B = 6, of which 2 in a flat group and 1 alone: alpha = 6 / 3. verl counts scores that are not 0: 6 / 5."""
    scores, groups = [1.0, 0.0, -1.0, 2.0, 2.0, 4.0], ["a", "a", "a", "b", "b", "c"]
    torch.testing.assert_close(outcome(adv.gpg, scores, groups), f64(2, 0, -2, 0, 0, 0))
    torch.testing.assert_close(outcome(lambda c: adv.gpg(c, f_norm=4.0), scores, groups), f64(0.5, 0, -0.5, 0, 0, 0))
    torch.testing.assert_close(outcome(lambda c: adv.gpg(c, alpha="verl"), scores, groups), f64(1.2, 0, -1.2, 0, 0, 0))


def test_pass_at_k_rewards_only_the_margin_of_the_best():
    scores, groups = [1.0, 4.0, 2.0, 3.0, 3.0, 9.0], ["a", "a", "a", "tie", "tie", "alone"]
    torch.testing.assert_close(
        outcome(lambda c: adv.pass_at_k(c, normalize_by_std=False), scores, groups), f64(0, 2, 0, 0, 0, 0)
    )
    expected = 2 / (f64(1, 4, 2).std() + 1e-6)
    torch.testing.assert_close(outcome(adv.pass_at_k, scores, groups), f64(0, expected, 0, 0, 0, 0))


def test_gdpo_normalises_each_component_so_none_drowns_another():
    """Components (0, 2) and (100, 0) in a group of two: each is -+ 1 / sqrt 2; equal weights cancel, 2 : 1 leaves the first."""
    parts = f64(0, 100, 2, 0).view(2, 2)
    assert outcome(adv.gdpo, [0.0, 0.0], ["g"] * 2, components=parts).tolist() == [0, 0]
    got = outcome(lambda c: adv.gdpo(c, weights=(2.0, 1.0)), [0.0, 0.0], ["g"] * 2, components=parts)
    torch.testing.assert_close(got, f64(-1, 1) / math.sqrt(2), rtol=1e-6, atol=0)  # whitened: variance 1, Bessel


def test_gdpo_leaves_a_missing_component_and_a_flat_group_at_zero():
    parts = f64(0, 1, 2, float("nan"), 4, 3, 5, 5, 5, 5).view(5, 2)
    got = outcome(adv.gdpo, [0.0] * 5, ["a", "a", "a", "b", "b"], components=parts)
    assert got.isfinite().all() and got.tolist()[3:] == [0, 0] and got[:3].abs().sum() > 0


def test_optimal_token_baseline_by_hand():
    """Squared norms: pi .5, sum pi^2 .5 gives .5 a token; pi .9, sum .82 gives .02. W: (.5, 1) and (.02, .04), (.5) ends."""
    token = {"old_logprobs": f64(0.5, 0.5, 0.9, 0.9, 0.5).log(), "sum_pi_squared": f64(0.5, 0.5, 0.82, 0.82, 0.5)}
    c = columns([1.0, 0.0, 3.0], ["g"] * 3, tokens=[2, 2, 1]).with_token(token)
    first, second = (0.5 * 1 + 0 + 0.5 * 3) / 1.02, 1 / 1.04
    got = adv.otb(c)
    torch.testing.assert_close(
        got["advantages"], f64(1 - first, 1 - second, -first, -second, 3 - first), rtol=1e-6, atol=0
    )
    torch.testing.assert_close(got["returns"], f64(1, 1, 0, 0, 3))
    longest = columns([1.0, 0.0], ["g"] * 2, tokens=[2, 1]).with_token({n: x[:3] for n, x in token.items()})
    assert adv.otb(longest)["advantages"][1] == 1, "alone at its place: no baseline"
    corrected = adv.otb(c.with_token({"is_weights": f64(2, 2, 1, 1, 1)}))["advantages"][0]
    assert float(corrected) == pytest.approx(1 - (2 * 1 + 0.5 * 3) / 2.52, rel=1e-6), "weights enter squared"


def test_optimal_token_baseline_does_not_count_holes_as_places():
    token = {"old_logprobs": f64(0.5, 0.2, 0.5, 0.9, 0.9).log(), "sum_pi_squared": f64(0.5, 0.7, 0.5, 0.82, 0.82)}
    hole = columns([1.0, 0.0], ["g"] * 2, tokens=[3, 2], mask=[True, False, True, True, True]).with_token(token)
    plain = columns([1.0, 0.0], ["g"] * 2, tokens=2).with_token({n: x[[0, 2, 3, 4]] for n, x in token.items()})
    torch.testing.assert_close(adv.otb(hole)["advantages"][[0, 2, 3, 4]], adv.otb(plain)["advantages"])


@pytest.mark.parametrize("garbage", [float("nan"), math.inf, -1e300])
@pytest.mark.parametrize("estimator", [adv.gae, adv.otb, adv.remax])
def test_garbage_outside_the_mask_reaches_no_advantage(estimator, garbage):
    mask = torch.tensor([True, True, False, True, False])
    token = {
        "old_values": f64(1, 2, 3, 4, 5),
        "old_logprobs": -f64(1, 2, 3, 4, 5),
        "sum_pi_squared": f64(0.1, 0.2, 0.3, 0.4, 0.5),
    }
    c = columns([1.0, 2.0], ["g"] * 2, tokens=[3, 2], mask=mask.tolist())
    c = replace(c, sequence={**c.sequence, "baseline": f64(0, 1)})
    clean = estimator(c.with_token(token))
    dirty = estimator(
        c.with_token({n: torch.where(mask, x, garbage) for n, x in {**token, "rewards": c["rewards"]}.items()})
    )
    for n, x in clean.items():
        torch.testing.assert_close(dirty[n], x)
        assert not x[~mask].any()


# -- selection -------------------------------------------------------------------------------------------------------


def test_per_prompt_filtration_by_hand():
    scores, rng = [0.2, 0.9, -3.0, 0.9], random.Random(0)
    assert selection.per_prompt_filter(scores, rng, how="bon") == [1]
    assert selection.per_prompt_filter(scores, rng, how="bw") == [1, 2]
    seen = {tuple(selection.per_prompt_filter(scores, rng, how="br")) for _ in range(50)}
    assert seen == {(0, 1), (1, 2), (1, 3)}
    assert selection.per_prompt_filter([0.5] * 3, rng, how="bw") == [0, 2], "two rows, also of a flat group"
    assert selection.per_prompt_filter([float("nan"), 1.0], rng, how="bw") == [1]
    assert selection.per_prompt_filter([], rng, how="bw") == []
    with pytest.raises(ValueError, match="selection 'best' is unknown; known: bon, br, bw"):
        selection.per_prompt_filter(scores, rng, how="best")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8), st.integers(0, 99))
def test_filtration_keeps_the_best_and_repeats_with_its_seed(scores, seed):
    for how, most in (("bon", 1), ("br", 2), ("bw", 2)):
        kept = selection.per_prompt_filter(scores, random.Random(seed), how=how)
        assert kept == selection.per_prompt_filter(scores, random.Random(seed), how=how)
        assert len(kept) == min(most, len(scores)) == len(set(kept))
        assert max(scores) in [scores[i] for i in kept]
        assert how != "bw" or min(scores) in [scores[i] for i in kept]


def test_batch_resampling_moves_whole_rows_and_repeats_with_its_seed():
    """Q2: verl wrote the resampled advantages back by position. Indices move a row with everything that it has."""
    scores = f64(0, 0, 0, 0, 0, 5)
    weight = selection.batch_weights(scores, how="pow")
    drawn = selection.resample(weight, torch.Generator().manual_seed(3))
    assert drawn.tolist() == [5] * 6 and scores[drawn].tolist() == [5] * 6
    even = selection.batch_weights(torch.zeros(4), how="pow")
    one, two = (selection.resample(even, torch.Generator().manual_seed(1), draws=1000) for _ in range(2))
    assert torch.equal(one, two) and np.bincount(one.numpy(), minlength=4).min() > 150
    assert selection.batch_weights(f64(1, 3, 2), how="max_min").tolist() == pytest.approx([1, 1, 1e-8])
    assert selection.batch_weights(f64(1, 3, 2), how="max_random").tolist() == pytest.approx([0.1, 0.4, 0.1])
    with pytest.raises(ValueError, match="weighting 'max' is unknown"):
        selection.batch_weights(scores, how="max")
