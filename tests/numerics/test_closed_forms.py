"""Hand-solved values and gradients of each estimator, filter and loss, and what each does at its edges. float64."""

import math
import random
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st
from small_columns import F64, columns, f64

from verl.algorithms import estimators as adv
from verl.algorithms import losses
from verl.algorithms.filters import Correction, SampleFilter, reject_flat
from verl.algorithms.presets import settled
from verl.algorithms.specs import AGGREGATIONS, KLReward
from verl.algorithms.weights import check_finite, term_weights, weight_column
from verl.driver.step import rewards_and_advantages
from verl.objective import Term
from verl.types import Metric


def outcome(estimator, scores, groups, **sequence):
    c = columns(scores, groups)
    return estimator(replace(c, sequence={**c.sequence, **sequence}))["advantages"]


def raw_gae(c, *, gamma=1.0, lam=1.0, lam_critic=None, length_adaptive_alpha=None):
    return adv.raw_gae(c, gamma, lam, lam_critic, length_adaptive_alpha)


# -- estimators --------------------------------------------------------------------------------------------------------


def test_gae_by_hand():
    """delta = (0 + .5*2 - 1, 4 - 2) = (0, 2); A = (0 + .5*.5*2, 2)."""
    c = columns([4.0], tokens=2).with_token({"old_values": f64(1, 2)})
    got = raw_gae(c, gamma=0.5, lam=0.5)
    torch.testing.assert_close(got["advantages"], f64(0.5, 2))
    torch.testing.assert_close(got["returns"], f64(1.5, 4))
    white = adv.gae(c, gamma=0.5, lam=0.5)
    torch.testing.assert_close(white["advantages"], f64(-1, 1) / math.sqrt(2), rtol=1e-6, atol=0)
    torch.testing.assert_close(white["returns"], got["returns"])


def test_gae_with_lambda_one_is_the_return_minus_the_value_and_with_zero_the_td_error():
    c = columns([3.0, -1.0], tokens=[3, 2]).with_token({"old_values": f64(0.5, 1, 2, -1, 0.25)})
    monte_carlo = raw_gae(c)
    torch.testing.assert_close(monte_carlo["advantages"], f64(3, 3, 3, -1, -1) - c["old_values"])
    torch.testing.assert_close(monte_carlo["returns"], f64(3, 3, 3, -1, -1))
    torch.testing.assert_close(raw_gae(c, lam=0.0)["advantages"], f64(0.5, 1, 1, 1.25, -1.25))


def test_gae_skips_holes_and_ignores_what_stands_in_them():
    nan = float("nan")
    c = columns([4.0], tokens=4, mask=[True, False, False, True]).with_token({"old_values": f64(1, nan, 7, 2)})
    got = raw_gae(c.with_token({"rewards": f64(0, nan, math.inf, 4)}), gamma=0.5, lam=0.5)
    torch.testing.assert_close(got["advantages"], f64(0.5, 0, 0, 2))
    torch.testing.assert_close(got["returns"], f64(1.5, 0, 0, 4))


def test_the_critic_may_have_its_own_lambda():
    """VC-PPO: returns of lambda 1 are Monte Carlo, whatever the policy's lambda."""
    c = columns([4.0], tokens=3).with_token({"old_values": f64(1, 2, 3)})
    got = raw_gae(c, lam=0.0, lam_critic=1.0)
    torch.testing.assert_close(got["returns"], f64(4, 4, 4))
    torch.testing.assert_close(got["advantages"], f64(1, 1, 1))


def test_lambda_grows_with_the_length():
    """VAPO: lambda = max(0, 1 - 1 / (alpha l)); alpha .5: l = 4 gives .5, l = 2 gives 0, l = 1 would be negative."""
    c = columns([1.0, 1.0, 1.0], tokens=[4, 2, 1]).with_token({"old_values": torch.zeros(7, dtype=torch.float64)})
    got = raw_gae(c, lam_critic=1.0, length_adaptive_alpha=0.5)["advantages"]
    torch.testing.assert_close(got, f64(0.125, 0.25, 0.5, 1, 0, 1, 1))


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
        outcome(lambda c: adv.grpo(c, scale_rewards="batch"), scores, groups), centred / (f64(*scores).std() + 1e-6)
    )
    torch.testing.assert_close(outcome(lambda c: adv.grpo(c, scale_rewards="none"), scores, groups), centred)
    torch.testing.assert_close(
        outcome(lambda c: adv.grpo(c, scale_rewards="none", leave_one_out=True), scores, groups), 2 * centred
    )


def test_remax_by_hand():
    """Two samples share the greedy score 1 of their prompt; a first token's penalty is in its own return only."""
    c = columns([3.0, 0.5], tokens=2, penalty=f64(0.5, 0, 0, 0))
    got = adv.remax(replace(c, sequence={**c.sequence, "baseline": f64(1, 1)}))
    torch.testing.assert_close(got["returns"], f64(2.5, 3, 0.5, 0.5))
    torch.testing.assert_close(got["advantages"], f64(1.5, 2, -0.5, -0.5))


def test_opo_weighs_by_length():
    c = columns([1.0, 5.0, 9.0], ["g", "g", "alone"], tokens=[3, 1, 2])
    torch.testing.assert_close(adv.opo(c)["advantages"], f64(-1, -1, -1, 3, 0, 0))


def test_gpg_counts_the_samples_without_signal():
    """B = 6, of which 2 in a flat group and 1 alone: alpha = 6 / 3."""
    scores, groups = [1.0, 0.0, -1.0, 2.0, 2.0, 4.0], ["a", "a", "a", "b", "b", "c"]
    torch.testing.assert_close(outcome(adv.gpg, scores, groups), f64(2, 0, -2, 0, 0, 0))


def test_pass_at_k_rewards_only_the_margin_of_the_best():
    scores, groups = [1.0, 4.0, 2.0, 3.0, 3.0, 9.0], ["a", "a", "a", "tie", "tie", "alone"]
    torch.testing.assert_close(
        outcome(lambda c: adv.pass_at_k(c, normalize_by_std=False), scores, groups), f64(0, 2, 0, 0, 0, 0)
    )
    expected = 2 / (f64(1, 4, 2).std() + 1e-6)
    torch.testing.assert_close(outcome(adv.pass_at_k, scores, groups), f64(0, expected, 0, 0, 0, 0))


def gdpo(parts, groups, **options):
    named = {f"component/{n}": parts[:, k] for k, n in enumerate("ab")}
    return outcome(lambda c: adv.gdpo(c, reward_components=("a", "b"), **options), [0.0] * len(parts), groups, **named)


def test_gdpo_normalises_each_component_so_none_drowns_another():
    """Components (0, 2) and (100, 0) in a group of two: each is -+ 1 / sqrt 2; weights 1 : 1 cancel."""
    parts = f64(0, 100, 2, 0).view(2, 2)
    assert gdpo(parts, ["g"] * 2).tolist() == [0, 0]
    got = gdpo(parts, ["g"] * 2, reward_weights=(2.0, 1.0))
    torch.testing.assert_close(got, f64(-1, 1) / math.sqrt(2), rtol=1e-6, atol=0)  # whitened: variance 1, Bessel
    with pytest.raises(ValueError, match=r"the reward gave no \['b'\]; its components: a"):
        c = columns([0.0, 1.0], ["g"] * 2)
        adv.gdpo(replace(c, sequence={**c.sequence, "component/a": f64(0, 1)}), reward_components=("a", "b"))


def test_gdpo_leaves_a_missing_component_and_a_flat_group_at_zero():
    parts = f64(0, 1, 2, float("nan"), 4, 3, 5, 5, 5, 5).view(5, 2)
    got = gdpo(parts, ["a", "a", "a", "b", "b"])
    assert got.isfinite().all() and got.tolist()[3:] == [0, 0] and got[:3].abs().sum() > 0


def test_optimal_token_baseline_by_hand():
    """Squared norms: pi .5, sum pi^2 .5 gives .5 a token; pi .9, sum .82 gives .02. W: (.5, 1), (.02, .04), (.5)."""
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


@each("garbage, estimator", product([float("nan"), math.inf, -1e300], [adv.gae, adv.otb, adv.remax]))
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


def test_the_kl_penalty_of_an_invalid_reward_trains_nothing():
    penalised = columns([1.0, 99.0], tokens=2, valid=[True, False], penalty=f64(0.1, 0.1, 0.1, 0.1))
    assert adv.reward_to_go(penalised)["advantages"].tolist() == pytest.approx([0.8, 0.9, 0, 0]), (
        "nor does its KL penalty train it"
    )


def test_a_rejected_last_token_does_not_swallow_the_score():
    """Q6: advantages on the mask before rejection; the score moves to the last trainable token of the response."""
    c = columns([2.0, 4.0], tokens=3, mask=[True, True, False, False, True, True])
    torch.testing.assert_close(c["rewards"], f64(0, 2, 0, 0, 0, 4))
    torch.testing.assert_close(adv.to_go(c, 0.5), f64(1, 2, 0, 0, 2, 4))  # holes are skipped without a discount
    hole = columns([8.0], tokens=4, mask=[True, False, False, True])
    torch.testing.assert_close(adv.to_go(hole, 0.5), f64(4, 0, 0, 8))


def test_an_advantage_function_cannot_replace_the_kl_that_the_controller_follows():
    c = columns([1.0, 0.0], token={"old_logprobs": f64(-1.0, -1.0), "ref_logprobs": f64(-1.5, -1.0)})

    def given(c):
        return {"advantages": c["rewards"], "actor/reward_kl_penalty": Metric(99.0)}

    found = rewards_and_advantages(c, advantage=given, kl=KLReward(coef=0.1), kl_coef=0.2)
    assert found["actor/reward_kl_penalty"].value == pytest.approx(0.25)
    assert found["advantages"].tolist() == pytest.approx([1 - 0.2 * 0.5, 0])
    plain = rewards_and_advantages(c, advantage=adv.reward_to_go, kl=None, kl_coef=0.2)
    torch.testing.assert_close(plain["advantages"], adv.reward_to_go(c)["advantages"])


def test_whitening_edges():
    everything = torch.ones(4, dtype=torch.bool)
    x = f64(1.0, 2.0, 4.0, float("nan"))
    mask = torch.tensor([True, True, True, False])
    inside = x[:3]
    expected = (inside - inside.mean()) / (inside.var() + 1e-8).sqrt()
    torch.testing.assert_close(adv.whiten(x, mask), torch.cat([expected, f64(0.0)]))
    for constant in (f64(0.1, 0.1, 0.1, 0.1), f64(0.1, 0.1, 0.1, 0.1 + 2e-17)):
        assert adv.whiten(constant, everything).tolist() == [0] * 4, "rounding is not raised to a signal"
    one = torch.tensor([False, True, False, False])
    assert adv.whiten(f64(5, 7, 5, 5), one).tolist() == [0, 0, 0, 0]
    assert adv.whiten(x, torch.zeros(4, dtype=torch.bool)).tolist() == [0, 0, 0, 0]


# -- filters -----------------------------------------------------------------------------------------------------------


def test_dynamic_sampling_by_spread_and_not_by_exact_equality():
    assert reject_flat([0.1] * 3) == "reject" and reject_flat([0.1, 0.1 + 1e-9]) == "reject"
    assert reject_flat([0.0, 1.0]) == "keep" and reject_flat([5.0]) == "keep"
    assert reject_flat([1e9, 1e9 + 1]) == "reject"


def test_per_prompt_filtration_by_hand():
    scores, rng = [0.2, 0.9, -3.0, 0.9], random.Random(0)
    assert SampleFilter(selection="bon").choose(scores, rng) == [1]
    assert SampleFilter(selection="bw").choose(scores, rng) == [1, 2]
    seen = {tuple(SampleFilter(selection="br").choose(scores, rng)) for _ in range(50)}
    assert seen == {(0, 1), (1, 2), (1, 3)}
    assert SampleFilter(selection="bw").choose([0.5] * 3, rng) == [0, 2], "two rows, also of a flat group"
    assert SampleFilter(selection="bw").choose([float("nan"), 1.0], rng) == [1]
    assert SampleFilter(selection="bw").choose([], rng) == []


def test_draws_from_the_whole_step_follow_their_weights():
    """verl's PF-PPO (1.13): as many draws with replacement as answers; what has no reward is never drawn."""
    scores = [1.0, 2.0, float("nan"), 0.0]
    chosen = SampleFilter(selection="pow", weight_pow=2.0)
    assert chosen.draws and not SampleFilter(selection="bw").draws and not list(chosen.faults())
    rounds = [chosen.draw(scores, random.Random(seed)) for seed in range(2000)]
    assert all(sum(drawn) == 4 and drawn[2] == 0 for drawn in rounds)
    share = [sum(drawn[i] for drawn in rounds) / 8000 for i in range(4)]
    assert share == pytest.approx([0.2, 0.8, 0.0, 0.0], abs=0.02)
    assert rounds[7] == chosen.draw(scores, random.Random(7))
    assert SampleFilter(selection="max_random").batch_weights(scores) == pytest.approx([0.1, 0.4, 0, 0.1])
    assert chosen.draw([float("nan")] * 2, random.Random(0)) == [0, 0]


@each("aggregate, unit", product(AGGREGATIONS, ["token", "sequence"]))
def test_a_row_drawn_twice_weighs_what_two_such_rows_weigh(aggregate, unit):
    drawn = columns([1.0, 0.0, 3.0], tokens=[2, 3, 1], mask=[True, True, True, False, True, True])
    drawn = replace(drawn, sequence={**drawn.sequence, "copies": f64(2, 1, 3)})
    rows = columns([1.0, 1.0, 0.0, 3.0, 3.0, 3.0], tokens=[2, 2, 3, 1, 1, 1], mask=[True] * 5 + [False] + [True] * 4)
    once, each = (weight_column(c, aggregate, unit=unit, horizon_tokens=16) for c in (drawn, rows))
    if unit == "sequence":
        torch.testing.assert_close(once, f64(each[0] + each[1], each[2], each[3:].sum()))
    else:
        torch.testing.assert_close(once, torch.cat([each[:2] + each[2:4], each[4:7], each[7:].sum().reshape(1)]))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8), st.integers(0, 99))
def test_filtration_keeps_the_best_and_repeats_with_its_seed(scores, seed):
    for how, most in (("bon", 1), ("br", 2), ("bw", 2)):
        kept = SampleFilter(selection=how).choose(scores, random.Random(seed))
        assert kept == SampleFilter(selection=how).choose(scores, random.Random(seed))
        assert len(kept) == min(most, len(scores)) == len(set(kept))
        assert max(scores) in [scores[i] for i in kept]
        assert how != "bw" or min(scores) in [scores[i] for i in kept]


# -- losses ------------------------------------------------------------------------------------------------------------


def run(fn, ratio, a, *, tokens=None, logprobs=None, **token):
    """(values, d sum(values) / d log pi, metrics) of tokens with these ratios to the old policy."""
    ratio = f64(*ratio)
    lp = (ratio.log() if logprobs is None else f64(*logprobs)).requires_grad_()
    c = columns([0.0] * (len(tokens) if tokens else len(ratio)), tokens=tokens or 1)
    c = c.with_token({"logprobs": lp, "old_logprobs": lp.detach() - ratio.log(), "advantages": f64(*a), **token})
    value = fn(c)
    (grad,) = torch.autograd.grad(value.values.sum(), lp)
    return value.values.detach(), grad, {n: x.double().mean().item() for n, (x, _) in value.metrics.items()}


def close(got, *expected):
    torch.testing.assert_close(got, f64(*expected))


def clipped(ratio, a, **options):
    """(loss, its derivative by log pi) of one token."""
    lp = torch.tensor([math.log(ratio)], dtype=F64, requires_grad=True)
    c = columns([0.0]).with_token({"logprobs": lp, "old_logprobs": torch.zeros(1, dtype=F64), "advantages": f64(a)})
    value = losses.ppo_clip(c, **options)
    (g,) = torch.autograd.grad(value.values.sum(), lp)
    return float(value.values.detach()), float(g), {n: float(x) for n, (x, _) in value.metrics.items()}


def test_clip_higher_and_dual_clip():
    wide = {"clip_low": 0.2, "clip_high": 0.28}
    assert clipped(1.1, 2.0, **wide)[:2] == pytest.approx((-2.2, -2.2))
    assert clipped(1.27, 2.0, **wide)[:2] == pytest.approx((-2.54, -2.54))
    assert clipped(1.5, 2.0, **wide)[:2] == pytest.approx((-2.56, 0)), "no push beyond the upper bound"
    assert clipped(0.5, 2.0, **wide)[:2] == pytest.approx((-1.0, -1.0)), "but back into it"
    assert clipped(0.5, -2.0, **wide)[:2] == pytest.approx((1.6, 0))
    assert clipped(5.0, -2.0, **wide)[:2] == pytest.approx((10.0, 10.0)), "single clip: unbounded"
    assert clipped(5.0, -2.0, **wide, clip_dual=3.0)[:2] == pytest.approx((6.0, 0))
    assert clipped(2.9, -2.0, **wide, clip_dual=3.0)[:2] == pytest.approx((5.8, 5.8))
    assert clipped(5.0, 2.0, **wide, clip_dual=3.0)[0] == clipped(5.0, 2.0, **wide)[0], "only for negative advantages"
    assert clipped(5.0, -2.0, clip_dual=3.0)[2] == {
        "pg_clipfrac": 0,
        "pg_clipfrac_lower": 1,
        "ppo_kl": pytest.approx(-math.log(5)),
    }
    assert clipped(1.5, 2.0)[2]["pg_clipfrac"] == 1 and clipped(1.0, 2.0)[2] == {"pg_clipfrac": 0, "ppo_kl": 0}


@each("d", [-1000.0, -21.0, 21.0, 1000.0])
def test_a_ratio_far_out_is_finite_and_pulls_nowhere(d):
    lp = f64(d).requires_grad_()
    c = columns([0.0]).with_token({"logprobs": lp, "old_logprobs": f64(0.0), "advantages": f64(-1.0 if d > 0 else 1.0)})
    value = losses.ppo_clip(c).values
    (g,) = torch.autograd.grad(value.sum(), lp)
    assert value.isfinite().all() and g.tolist() == [0.0]


def test_a_cap_on_the_ratio_itself_holds_for_both_signs():
    """TRL's delta: min(r, 2) before the clip, so a negative advantage is bounded too."""
    values, grad, _ = run(partial(losses.ppo_clip, ratio_max=2.0), (3.0, 3.0, 1.5), (1.0, -1.0, -1.0))
    close(values, -1.2, 2.0, 1.5)
    close(grad, 0, 0, 1.5)


def test_gspo_uses_the_geometric_mean_of_the_sequence():
    """Ratios (4, 1): s = 2. Ratios (1.1, 1): s = sqrt 1.1, its gradient shared by the two tokens."""
    options = {"clip_low": 0.2, "clip_high": 0.2}
    s = math.sqrt(1.1)
    for fn in (losses.gspo, losses.gspo_token):
        values, grad, metrics = run(partial(fn, **options), (4.0, 1.0, 1.1, 1.0), (1.0, 1.0, 2.0, 2.0), tokens=[2, 2])
        close(values, -1.2, -1.2, -2 * s, -2 * s)
        close(grad, 0, 0, -2 * s, -2 * s)
        assert metrics["pg_clipfrac"] == 0.5


def test_gspo_and_gspo_token_differ_where_the_advantage_does():
    values, grad, _ = run(partial(losses.gspo, clip_low=1, clip_high=1), (1.0, 1.0), (1.0, 3.0), tokens=[2])
    close(values, -1, -3)
    close(grad, -2, -2)
    _, grad, _ = run(partial(losses.gspo_token, clip_low=1, clip_high=1), (1.0, 1.0), (1.0, 3.0), tokens=[2])
    close(grad, -1, -3)


def test_cispo_keeps_the_gradient_of_a_capped_token():
    values, grad, metrics = run(partial(losses.cispo, ratio_max=2.0), (3.0, 0.1), (1.0, -1.0), logprobs=(-0.5, -2.0))
    close(values, 1.0, -0.2)
    close(grad, -2, 0.1)
    assert metrics["pg_clipfrac"] == 0.5
    close(run(partial(losses.cispo, ratio_max=2.0, ratio_min=0.8), (0.1,), (-1.0,))[1], 0.8)


def test_sapo_has_slope_one_at_the_old_policy_and_a_tail_that_fades():
    """-A (4 / tau) sigmoid(tau (r - 1)): derivative by log pi is -A r 4 p (1 - p)."""
    fn = partial(losses.sapo, tau_positive=1.0, tau_negative=2.0)
    values, grad, _ = run(fn, (1.0, 1.0, 3.0), (1.5, -1.5, -1.0))
    p = 1 / (1 + math.exp(-4))
    close(values, -1.5 * 2, 1.5, 2 * p)
    close(grad, -1.5, 1.5, 3 * 4 * p * (1 - p))


def test_gmpo_clips_each_token_in_log_space_before_the_geometric_mean():
    """A > 0: log-ratios (1, -.2) become (.4, -.2), mean .1; only the second pulls."""
    e = math.exp
    values, grad, metrics = run(losses.gmpo, (e(1), e(-0.2), e(-1), e(0.2)), (1.0, 1.0, -1.0, -1.0), tokens=[2, 2])
    close(values, -e(0.1), -e(0.1), e(-0.1), e(-0.1))
    close(grad, 0, -e(0.1), 0, e(-0.1))
    assert (metrics["pg_clipfrac"], metrics["pg_clipfrac_lower"]) == (0.25, 0.25)


def test_kl_cov_punishes_the_tokens_of_highest_covariance():
    """Mean A 0, mean log pi -2: covariances (1, 1.5, -1, .. ): the second token alone at k = 1/4."""
    lp, a = (-1.0, -3.5, -1.0, -2.5), (1.0, -1.0, -1.0, 1.0)
    values, grad, metrics = run(
        partial(losses.kl_cov, cov_ratio=0.25, cov_coef=0.5), (1.0, math.exp(0.2), 1.0, 1.0), a, logprobs=lp
    )
    close(values, -1, math.exp(0.2) + 0.1, 1, -1)
    close(grad, -1, math.exp(0.2) + 0.5, 1, -1)
    assert metrics["kl_cov_fraction"] == 0.25
    few = run(partial(losses.kl_cov, cov_ratio=1e-9), (1.0,) * 4, a, logprobs=lp)[2]
    assert few["kl_cov_fraction"] == 0.25, "at least one"


def test_rounding_chooses_no_direction_and_no_token():
    """Two passes of the same policy differ by rounding: its sign is no gradient, its order no choice."""
    noise = f64(1, -2, 3, -4, 5, -6) * 1e-7
    for x, expected in ((noise, [0.0] * 6), (noise + 0.1, [1.0] * 6), (noise - 0.1, [-1.0] * 6)):
        lp = x.clone().requires_grad_()
        value = losses.kl_estimate(lp, torch.zeros_like(x), "abs")
        torch.testing.assert_close(value.detach(), x.abs())
        assert torch.autograd.grad(value.sum(), lp)[0].tolist() == expected
    same = {"rollout_logprobs": f64(-1, -2, -3, -1, -2, -3)}
    picks = []
    for rounding in (noise, -noise):
        lp, a = f64(-1, -2, -3, -1, -2, -3) + rounding, f64(1, 1, 1, 2, 2, 2)
        c = columns([0.0, 0.0], tokens=3).with_token({**same, "logprobs": lp, "advantages": a + rounding})
        c = c.with_token({"old_logprobs": lp - rounding})
        picks.append(losses.kl_cov(c, cov_ratio=0.34).metrics["kl_cov_fraction"][0].tolist())
        lp.requires_grad_()
        value = losses.kl_cov(c.with_token({"logprobs": lp}), cov_ratio=1.0).values
        assert torch.autograd.grad(value.sum(), lp)[0].add(a).abs().max() < 1e-5, "the |d| of rounding pulls nothing"
    assert picks[0] == picks[1]


def test_clip_cov_drops_tokens_within_the_band_that_the_clip_left_alone():
    """Covariances (1, 1.5, -1, -.5): band (.5, 2) holds the first two; the first is clipped already."""
    lp, a = (-1.0, -3.5, -1.0, -2.5), (1.0, -1.0, -1.0, 1.0)
    fn = partial(losses.clip_cov, cov_ratio=1.0, cov_low=0.5, cov_high=2.0)
    values, grad, metrics = run(fn, (2.0, 1.0, 1.0, 1.0), a, logprobs=lp)
    close(values, -1.2, 0, 1, -1)
    close(grad, 0, 0, 1, -1)
    assert metrics["pg_clipfrac"] == 0.25
    close(run(partial(fn, cov_low=5.0), (1.0,) * 4, a, logprobs=lp)[0], -1, 1, 1, -1)


def chosen(fn, c):
    return fn(c).values.detach() == 0


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999), random=st.randoms(use_true_random=False))
def test_the_draw_of_clip_cov_follows_the_tokens_and_not_their_order(seed, random):
    g = torch.Generator().manual_seed(seed)
    token = {n: torch.randn(60, generator=g, dtype=F64) for n in ("logprobs", "rollout_logprobs", "advantages")}
    c = columns([0.0] * 60).with_token({**token, "old_logprobs": token["logprobs"]})
    fn = partial(losses.clip_cov, cov_ratio=0.1, cov_low=0.0, cov_high=9.0)
    order = list(range(60))
    random.shuffle(order)
    moved = c.with_token({n: x[order] for n, x in c.token.items()})
    assert torch.equal(chosen(fn, moved), chosen(fn, c)[order]) and chosen(fn, c).sum() == 6
    nudged = c.with_token({"logprobs": c["logprobs"] * (1 + 1e-12)})
    assert torch.equal(chosen(fn, nudged), chosen(fn, c)), "rounding of another packing does not redraw"
    other = c.with_token({"rollout_logprobs": c["rollout_logprobs"] - 1})
    assert not torch.equal(chosen(fn, c), chosen(fn, other)), "a draw of each step's own"
    top = partial(losses.kl_cov, cov_ratio=0.1)
    picked = top(c).metrics["kl_cov_fraction"][0]
    assert picked.sum() == 6 and torch.equal(top(moved).metrics["kl_cov_fraction"][0], picked[order])


def test_the_lottery_is_fair():
    c = columns([0.0] * 4000).with_token(
        {"logprobs": torch.linspace(-3, 0, 4000, dtype=F64), "advantages": torch.ones(4000, dtype=F64)}
    )
    first = torch.argsort(losses._lottery(c))[:1000]
    assert abs(float(first.double().mean()) - 2000) < 120 and torch.bincount(first // 1000, minlength=4).min() > 200


def test_dppo_drops_a_token_that_moves_away_too_far_and_keeps_the_way_back():
    """pi_old .5; total variation .2: .8 is out for A > 0 and in for A < 0; the weight is capped at 1.5."""
    old = f64(*[math.log(0.5)] * 4)
    now = (0.8, 0.8, 0.6, 0.2)
    logs = [math.log(p) for p in now]
    ratio = [p / 0.5 for p in now]
    expected = f64(0, 1.5, -1.2, 0)
    kl = [0.5 * math.log(0.5 / p) + 0.5 * math.log(0.5 / (1 - p)) for p in now]
    assert kl[2] < 0.1 < kl[0]
    for fn in (
        partial(losses.dppo_tv, clip_low=0.2, clip_high=0.2),
        partial(losses.dppo_kl, clip_low=0.1, clip_high=0.1),
    ):
        a = (1.0, -1.0, 1.0, -1.0)
        values, grad, metrics = run(partial(fn, ratio_max=1.5), ratio, a, logprobs=logs, old_logprobs=old)
        torch.testing.assert_close(grad, expected)
        torch.testing.assert_close(values, expected * f64(*logs))
        assert metrics["pg_clipfrac"] == 0.5


def test_dro_is_quadratic_in_the_log_ratio():
    values, grad, _ = run(partial(losses.dro, dro_beta=0.5), (math.exp(0.2), 1.0), (1.0, -2.0), logprobs=(-1.0, -3.0))
    close(values, 1 + 0.25 * 0.04, -6)
    close(grad, -1 + 0.5 * 0.2, 2)


def test_a_sequence_far_off_policy_is_dropped_only_if_it_was_bad():
    """mean log(rollout / pi) is 1 for every sequence but the last; delta .5."""
    lp = (-2.0, -2.0, -3.0, -3.0, -2.0)
    token = {"rollout_logprobs": f64(-1, -1, -2, -2, -1.9)}
    fn = partial(losses.off_policy_sequence_mask, inner=losses.reinforce, delta=0.5)
    values, grad, metrics = run(fn, (1.0,) * 5, (-1.0, -1.0, 1.0, 1.0, -1.0), tokens=[2, 2, 1], logprobs=lp, **token)
    close(values, 0, 0, 3, 3, -2)
    close(grad, 0, 0, -1, -1, 1)
    assert metrics["off_policy_fraction"] == 0.4


def test_bypass_weighs_by_the_current_policy():
    """log(pi / rollout) = (log 3, 0): truncated at 2; geometric: sqrt 3 for both; no level: plain REINFORCE."""
    token = {"rollout_logprobs": f64(-1 - math.log(3), -2)}
    for level, w in (("token", (2, 1)), ("geometric", (3**0.5, 3**0.5)), (None, (1, 1))):
        form = {"level": level, "form": "truncate"} if level else {}
        fn = partial(losses.bypass_reinforce, correction=Correction(**form, high=2.0, bypass=True))
        values, grad, _ = run(fn, (1.0, 1.0), (1.0, -1.0), tokens=[2], logprobs=(-1.0, -2.0), **token)
        close(values, w[0], -2 * w[1])
        close(grad, -w[0], w[1])


def test_the_clip_metrics_of_bypass_are_of_the_tokens_that_were_kept():
    fn = partial(losses.bypass_reinforce, correction=Correction(form="truncate", high=2.0, bypass=True))
    c = columns([0.0], tokens=2).with_token({"logprobs": f64(-1, -2), "rollout_logprobs": f64(-1.5, -9)})
    value = fn(c.with_token({"advantages": f64(1, 1), "keep": torch.tensor([True, False])}))
    kept, where = value.metrics["ppo_kl"][0], value.where["ppo_kl"]
    assert kept[where].tolist() == [-0.5], "what the bounds rejected is in no mean, as in verl"


def test_the_ratio_makes_the_kl_gradient_unbiased_off_policy():
    """E_old[r k3] = E_pi[k3], in value and gradient; alone, k3 is weighted by the old policy."""
    logits = f64(0.5, -1.0, 0.2).requires_grad_()
    lp, ref, old = logits.log_softmax(0), f64(0.1, 0.0, 1.0).log_softmax(0), f64(1.0, 0.3, -1.0).log_softmax(0)
    expected = (lp.exp() * losses.kl_estimate(lp, ref, "k3")).sum()
    c = columns([0.0] * 3).with_token(
        {"logprobs": lp, "ref_logprobs": ref, "old_logprobs": old, "rollout_logprobs": old}
    )
    got = (old.exp() * losses.kl_loss(c, ratio_corrected=True).values).sum()
    torch.testing.assert_close(got, expected)
    one, two = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (got, expected))
    torch.testing.assert_close(one, two)


def test_value_loss_by_hand():
    """v = 2, old 1, clip .5: clipped to 1.5. Return 3: the clipped error 2.25 wins, no gradient; 0: the plain 4."""
    v = f64(2, 2, 1.2).requires_grad_()
    c = columns([0.0] * 3).with_token({"values": v, "old_values": f64(1, 1, 1), "returns": f64(3, 0, 2)})
    value = losses.value_clip(c, clip=0.5)
    (grad,) = torch.autograd.grad(value.values.sum(), v)
    close(value.values.detach(), 1.125, 2, 0.32)
    close(grad, 0, 2, -0.8)
    assert value.metrics["vf_clipfrac"][0].tolist() == [1, 0, 0] and value.metrics["vpred_mean"][0].tolist() == [
        2,
        2,
        1.2,
    ]
    plain = losses.value_clip(replace(c, token={n: x for n, x in c.token.items() if n != "old_values"}), clip=None)
    close(plain.values.detach(), 0.5, 2, 0.32)


# -- KL, weights -------------------------------------------------------------------------------------------------------


def test_kl_forms_in_expectation():
    """Under pi: E[k1] = E[k3] = KL; the gradient of k2 is that of the reverse KL; E[grad of k1] = 0 (3.1)."""
    logits = f64(0.5, -1.0, 0.2).requires_grad_()
    logp, ref = logits.log_softmax(0), f64(0.1, 0.0, 1.0).log_softmax(0)
    p, kl = logp.exp().detach(), (logp.exp() * (logp - ref)).sum()
    expected = {form: (p * losses.kl_estimate(logp, ref, form)).sum() for form in ("k1", "k2", "k3", "k1+", "k3+")}
    grad = {form: torch.autograd.grad(v, logits, retain_graph=True)[0] for form, v in expected.items()}
    (reverse,) = torch.autograd.grad(kl, logits, retain_graph=True)
    for form in ("k1", "k3", "k1+", "k3+"):
        torch.testing.assert_close(expected[form].detach(), kl.detach())
    for form in ("k2", "k1+", "k3+"):
        torch.testing.assert_close(grad[form], reverse)
    torch.testing.assert_close(grad["k1"], torch.zeros(3, dtype=F64))
    torch.testing.assert_close(grad["k3"], p - ref.exp())  # the forward KL's


def test_k3_still_pulls_on_the_tokens_that_drifted_most():
    """Q10: a clamp of the value at 10 has no gradient where ref / pi > 13."""
    lp = f64(-4.0, -30.0).requires_grad_()
    ref = f64(0.0, 0.0)
    (g,) = torch.autograd.grad(losses.kl_estimate(lp, ref, "k3").sum(), lp)
    assert g[0] == pytest.approx(1 - math.exp(4)) and g[1] == 0, "the log-ratio is clamped at 20"


def test_k3_is_not_bounded_on_either_side_before_its_log_ratio_is_20():
    """exp(-x) - 1 + x and its gradient 1 - exp(-x), x = log(pi / ref)."""
    x = torch.tensor([-15.0, -6.0, -0.1, 0.1, 6.0, 15.0], dtype=F64, requires_grad=True)
    value = losses.kl_estimate(x, torch.zeros(6, dtype=F64), "k3")
    torch.testing.assert_close(value.detach(), (-x).exp().detach() - 1 + x.detach())
    (gradient,) = torch.autograd.grad(value.sum(), x)
    torch.testing.assert_close(gradient, 1 - (-x.detach()).exp())


def test_kl_in_the_reward():
    c = columns([1.0, 1.0], tokens=[2, 2], mask=[True, True, True, False])
    c = c.with_token({"old_logprobs": f64(-1, -2, -1, 5), "ref_logprobs": f64(-2, -2, -3, float("nan"))})
    penalty, mean = losses.kl_penalty(c, coef=0.1, form="k1")
    torch.testing.assert_close(penalty, f64(0.1, 0, 0.2, 0))
    assert mean == pytest.approx((0.5 + 2) / 2)
    rewards = adv.token_rewards(c, penalty)
    torch.testing.assert_close(rewards, f64(-0.1, 1.0, 0.8, 0))  # the score is at the last trainable token
    empty = replace(c, mask=torch.tensor([True, True, False, False]))
    assert losses.kl_penalty(empty, coef=0.1, form="k1")[1] == pytest.approx(0.5)


def test_the_adaptive_coefficient_moves_toward_its_target_and_by_a_bounded_step():
    assert losses.adapted_coef(0.2, kl=12, target=6, horizon=100, num_sequences=10) == pytest.approx(0.2 * 1.02)
    assert losses.adapted_coef(0.2, kl=0, target=6, horizon=100, num_sequences=10) == pytest.approx(0.2 * 0.98)
    assert losses.adapted_coef(0.2, kl=6.3, target=6, horizon=100, num_sequences=10) == pytest.approx(0.2 * 1.005)
    assert losses.adapted_coef(0.2, kl=6, target=6, horizon=100, num_sequences=10) == 0.2


def test_a_term_over_some_sequences_divides_by_their_own_count():
    """VAPO's positive examples (2.3): the denominator is that of the sequences it is over, 0 when there is none."""
    c = columns([1.0, 0.0, 1.0], tokens=[2, 3, 1])
    c = replace(c, sequence={**c.sequence, "correct": torch.tensor([True, False, True])}).with_token(
        {"logprobs": -torch.ones(6, dtype=F64)}
    )
    term = Term(name="nll", fn=losses.nll, coef=0.1, over="correct")
    torch.testing.assert_close(term_weights(c, (term,))["w/nll"], f64(1, 1, 0, 0, 0, 1) * 0.1 / 3)
    none = replace(c, sequence={**c.sequence, "correct": torch.zeros(3, dtype=torch.bool)})
    assert not term_weights(none, (term,))["w/nll"].any()


def test_rejection_can_keep_the_earlier_denominator():
    before = torch.ones(4, dtype=torch.bool)
    c = columns([0.0, 0.0], tokens=2, mask=[True, False, False, False])
    torch.testing.assert_close(weight_column(c, "token-mean"), f64(1, 0, 0, 0))
    torch.testing.assert_close(weight_column(c, "token-mean", denominator_mask=before), f64(0.25, 0, 0, 0))
    torch.testing.assert_close(weight_column(c, "seq-mean-token-mean", denominator_mask=before), f64(0.25, 0, 0, 0))
    with pytest.raises(ValueError, match="maximum response length"):
        weight_column(c, "seq-mean-token-sum-norm")


def test_a_non_finite_number_inside_the_mask_names_its_sequence():
    c = columns([0.0, 0.0], tokens=2, mask=[False, True, True, True]).with_token(
        {"old_logprobs": f64(float("nan"), -1, -2, float("inf"))}
    )
    with pytest.raises(ValueError, match=r"old_logprobs is inf at trainable token 3 of sequence 1 \(1 such tokens\)"):
        check_finite(c, ("old_logprobs",))
    check_finite(replace(c, mask=torch.tensor([False, True, True, False])), ("old_logprobs",))


def test_rloo_clips_scores_before_the_kl_and_normalises_over_sequences():
    scores, groups = [9.0, 1.0, -7.0, 0.0], ["a", "a", "b", "b"]
    penalty = f64(0.5, 0.0, 0.0, 0.0)
    c = columns(scores, groups, penalty=penalty)
    plain, clipped = adv.rloo(c)["advantages"], adv.rloo(c, reward_clip=(-2.0, 2.0))["advantages"]
    close(plain, 7.5, -7.5, -7, 7)
    close(clipped, 0.5, -0.5, -2, 2)
    white = adv.rloo(c, reward_clip=(-2.0, 2.0), normalize_advantages=True)["advantages"]
    close(white, *(x / math.sqrt((2 * 0.25 + 2 * 4) / 3) for x in (0.5, -0.5, -2, 2)))
    with pytest.raises(ValueError, match=r"reward_clip=\[2\]: write \[low,high\]"):
        settled("rloo", {"reward_clip": [2]})


def test_the_epsilon_of_gdpo_stands_beside_each_deviation():
    c = columns([1.0, 0.0], ["a", "a"])
    parts = {"component/a": f64(1.0, 0.0), "component/b": f64(0.01, 0.0)}
    c = replace(c, sequence={**c.sequence, **parts})
    names = {"reward_components": ("a", "b"), "reward_weights": (1.0, -1.0)}
    small, large = (adv.gdpo(c, **names, epsilon=e)["advantages"] for e in (1e-12, 0.1))
    close(small, 0, 0)
    unit = 0.5 / (0.5**0.5 + 0.1) - 0.005 / (0.01 * 0.5**0.5 + 0.1)
    close(large, *(x / math.sqrt(2 * unit**2 + 1e-8) for x in (unit, -unit)))
    assert settled("gdpo", {**{k: list(v) for k, v in names.items()}, "epsilon": 1e-4}).estimator.settings()["epsilon"]
