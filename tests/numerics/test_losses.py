"""Hand-solved values and gradients for each loss of algorithms.md sections 2, 3.4 and 5, and what no loss may do: look
outside its mask, depend on order or on names, or make a NaN of nothing. float64."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_algorithms import columns, f64

from verl.algorithms import terms as tm
from verl.algorithms.corrections import Correction
from verl.algorithms.weights import weight_column

F64 = torch.float64


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


def test_a_cap_on_the_ratio_itself_holds_for_both_signs():
    """TRL's delta: min(r, 2) before the clip, so a negative advantage is bounded too."""
    values, grad, _ = run(partial(tm.ppo_clip, ratio_max=2.0), (3.0, 3.0, 1.5), (1.0, -1.0, -1.0))
    close(values, -1.2, 2.0, 1.5)
    close(grad, 0, 0, 1.5)


def test_gspo_uses_the_geometric_mean_of_the_sequence():
    """Ratios (4, 1): s = 2. Ratios (1.1, 1): s = sqrt 1.1, its gradient shared by the two tokens."""
    options = {"clip_low": 0.2, "clip_high": 0.2}
    s = math.sqrt(1.1)
    for fn in (tm.gspo, tm.gspo_token):
        values, grad, metrics = run(partial(fn, **options), (4.0, 1.0, 1.1, 1.0), (1.0, 1.0, 2.0, 2.0), tokens=[2, 2])
        close(values, -1.2, -1.2, -2 * s, -2 * s)
        close(grad, 0, 0, -2 * s, -2 * s)
        assert metrics["pg_clipfrac"] == 0.5


def test_gspo_and_gspo_token_differ_where_the_advantage_does():
    values, grad, _ = run(partial(tm.gspo, clip_low=1, clip_high=1), (1.0, 1.0), (1.0, 3.0), tokens=[2])
    close(values, -1, -3)
    close(grad, -2, -2)
    _, grad, _ = run(partial(tm.gspo_token, clip_low=1, clip_high=1), (1.0, 1.0), (1.0, 3.0), tokens=[2])
    close(grad, -1, -3)


def test_cispo_keeps_the_gradient_of_a_capped_token():
    values, grad, metrics = run(partial(tm.cispo, ratio_max=2.0), (3.0, 0.1), (1.0, -1.0), logprobs=(-0.5, -2.0))
    close(values, 1.0, -0.2)
    close(grad, -2, 0.1)
    assert metrics["pg_clipfrac"] == 0.5
    close(run(partial(tm.cispo, ratio_max=2.0, ratio_min=0.8), (0.1,), (-1.0,))[1], 0.8)


def test_sapo_has_slope_one_at_the_old_policy_and_a_tail_that_fades():
    """-A (4 / tau) sigmoid(tau (r - 1)): derivative by log pi is -A r 4 p (1 - p)."""
    fn = partial(tm.sapo, tau_pos=1.0, tau_neg=2.0)
    values, grad, _ = run(fn, (1.0, 1.0, 3.0), (1.5, -1.5, -1.0))
    p = 1 / (1 + math.exp(-4))
    close(values, -1.5 * 2, 1.5, 2 * p)
    close(grad, -1.5, 1.5, 3 * 4 * p * (1 - p))


def test_gmpo_clips_each_token_in_log_space_before_the_geometric_mean():
    """A > 0: log-ratios (1, -.2) become (.4, -.2), mean .1; only the second pulls."""
    e = math.exp
    values, grad, metrics = run(tm.gmpo, (e(1), e(-0.2), e(-1), e(0.2)), (1.0, 1.0, -1.0, -1.0), tokens=[2, 2])
    close(values, -e(0.1), -e(0.1), e(-0.1), e(-0.1))
    close(grad, 0, -e(0.1), 0, e(-0.1))
    assert (metrics["pg_clipfrac"], metrics["pg_clipfrac_lower"]) == (0.25, 0.25)


def test_kl_cov_punishes_the_tokens_of_highest_covariance():
    """Mean A 0, mean log pi -2: covariances (1, 1.5, -1, .. ): the second token alone at k = 1/4."""
    lp, a = (-1.0, -3.5, -1.0, -2.5), (1.0, -1.0, -1.0, 1.0)
    values, grad, metrics = run(
        partial(tm.kl_cov, k_ratio=0.25, coef=0.5), (1.0, math.exp(0.2), 1.0, 1.0), a, logprobs=lp
    )
    close(values, -1, math.exp(0.2) + 0.1, 1, -1)
    close(grad, -1, math.exp(0.2) + 0.5, 1, -1)
    assert metrics["kl_cov_fraction"] == 0.25
    few = run(partial(tm.kl_cov, k_ratio=1e-9), (1.0,) * 4, a, logprobs=lp)[2]
    assert few["kl_cov_fraction"] == 0.25, "at least one"


def test_clip_cov_drops_tokens_within_the_band_that_the_clip_left_alone():
    """Covariances (1, 1.5, -1, -.5): band (.5, 2) holds the first two; the first is clipped already."""
    lp, a = (-1.0, -3.5, -1.0, -2.5), (1.0, -1.0, -1.0, 1.0)
    fn = partial(tm.clip_cov, ratio=1.0, lower=0.5, upper=2.0)
    values, grad, metrics = run(fn, (2.0, 1.0, 1.0, 1.0), a, logprobs=lp)
    close(values, -1.2, 0, 1, -1)
    close(grad, 0, 0, 1, -1)
    assert metrics["pg_clipfrac"] == 0.25
    close(run(partial(fn, lower=5.0), (1.0,) * 4, a, logprobs=lp)[0], -1, 1, 1, -1)


def chosen(fn, c):
    return fn(c).values.detach() == 0


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999), random=st.randoms(use_true_random=False))
def test_the_draw_of_clip_cov_follows_the_tokens_and_not_their_order(seed, random):
    g = torch.Generator().manual_seed(seed)
    token = {n: torch.randn(60, generator=g, dtype=F64) for n in ("logprobs", "rollout_logprobs", "advantages")}
    c = columns([0.0] * 60).with_token({**token, "old_logprobs": token["logprobs"]})
    fn = partial(tm.clip_cov, ratio=0.1, lower=0.0, upper=9.0, seed=seed)
    order = list(range(60))
    random.shuffle(order)
    moved = c.with_token({n: x[order] for n, x in c.token.items()})
    assert torch.equal(chosen(fn, moved), chosen(fn, c)[order]) and chosen(fn, c).sum() == 6
    nudged = c.with_token({"logprobs": c["logprobs"] * (1 + 1e-12)})
    assert torch.equal(chosen(fn, nudged), chosen(fn, c)), "rounding of another packing does not redraw"
    assert not torch.equal(chosen(fn, c), chosen(partial(fn, seed=seed + 1), c))
    top = partial(tm.kl_cov, k_ratio=0.1)
    picked = top(c).metrics["kl_cov_fraction"][0]
    assert picked.sum() == 6 and torch.equal(top(moved).metrics["kl_cov_fraction"][0], picked[order])


def test_the_lottery_is_fair():
    c = columns([0.0] * 4000).with_token(
        {"logprobs": torch.linspace(-3, 0, 4000, dtype=F64), "advantages": torch.ones(4000, dtype=F64)}
    )
    first = torch.argsort(tm._lottery(c, 7))[:1000]
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
    for fn in (partial(tm.dppo_tv, clip_low=0.2, clip_high=0.2), partial(tm.dppo_kl, clip_low=0.1, clip_high=0.1)):
        a = (1.0, -1.0, 1.0, -1.0)
        values, grad, metrics = run(partial(fn, ratio_max=1.5), ratio, a, logprobs=logs, old_logprobs=old)
        torch.testing.assert_close(grad, expected)
        torch.testing.assert_close(values, expected * f64(*logs))
        assert metrics["pg_clipfrac"] == 0.5


def test_dro_is_quadratic_in_the_log_ratio():
    values, grad, _ = run(partial(tm.dro, beta=0.5), (math.exp(0.2), 1.0), (1.0, -2.0), logprobs=(-1.0, -3.0))
    close(values, 1 + 0.25 * 0.04, -6)
    close(grad, -1 + 0.5 * 0.2, 2)


def test_a_sequence_far_off_policy_is_dropped_only_if_it_was_bad():
    """mean log(rollout / pi) is 1 for every sequence but the last; delta .5."""
    lp = (-2.0, -2.0, -3.0, -3.0, -2.0)
    token = {"rollout_logprobs": f64(-1, -1, -2, -2, -1.9)}
    fn = partial(tm.off_policy_sequence_mask, inner=tm.reinforce, delta=0.5)
    values, grad, metrics = run(fn, (1.0,) * 5, (-1.0, -1.0, 1.0, 1.0, -1.0), tokens=[2, 2, 1], logprobs=lp, **token)
    close(values, 0, 0, 3, 3, -2)
    close(grad, 0, 0, -1, -1, 1)
    assert metrics["off_policy_fraction"] == 0.4


def test_bypass_weighs_by_the_current_policy():
    """log(pi / rollout) = (log 3, 0): truncated at 2; geometric: sqrt 3 for both; no level: plain REINFORCE."""
    token = {"rollout_logprobs": f64(-1 - math.log(3), -2)}
    for level, w in (("token", (2, 1)), ("geometric", (3**0.5, 3**0.5)), (None, (1, 1))):
        fn = partial(tm.bypass_reinforce, correction=Correction(level=level, high=2.0, mode="bypass"))
        values, grad, _ = run(fn, (1.0, 1.0), (1.0, -1.0), tokens=[2], logprobs=(-1.0, -2.0), **token)
        close(values, w[0], -2 * w[1])
        close(grad, -w[0], w[1])


def test_the_ratio_makes_the_kl_gradient_unbiased_off_policy():
    """E_old[r k3] = E_pi[k3], in value and gradient; alone, k3 is weighted by the old policy."""
    logits = f64(0.5, -1.0, 0.2).requires_grad_()
    lp, ref, old = logits.log_softmax(0), f64(0.1, 0.0, 1.0).log_softmax(0), f64(1.0, 0.3, -1.0).log_softmax(0)
    expected = (lp.exp() * tm.kl_estimate(lp, ref, "k3")).sum()
    c = columns([0.0] * 3).with_token(
        {"logprobs": lp, "ref_logprobs": ref, "old_logprobs": old, "rollout_logprobs": old}
    )
    for behind in ("old_logprobs", "rollout_logprobs"):
        got = (old.exp() * tm.kl_loss(c, ratio_corrected=True, ratio_to=behind).values).sum()
        torch.testing.assert_close(got, expected)
        one, two = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (got, expected))
        torch.testing.assert_close(one, two)
    weighed = tm.kl_loss(c, ratio_corrected=True, ratio_to="logprobs").values
    torch.testing.assert_close(weighed, tm.kl_loss(c).values)


def test_value_loss_by_hand():
    """v = 2, old 1, clip .5: clipped to 1.5. Return 3: the clipped error 2.25 wins, no gradient; return 0: the plain 4."""
    v = f64(2, 2, 1.2).requires_grad_()
    c = columns([0.0] * 3).with_token({"values": v, "old_values": f64(1, 1, 1), "returns": f64(3, 0, 2)})
    value = tm.value_clip(c, clip=0.5)
    (grad,) = torch.autograd.grad(value.values.sum(), v)
    close(value.values.detach(), 1.125, 2, 0.32)
    close(grad, 0, 2, -0.8)
    assert value.metrics["vf_clipfrac"][0].tolist() == [1, 0, 0] and value.metrics["vpred_mean"][0].tolist() == [
        2,
        2,
        1.2,
    ]
    plain = tm.value_clip(replace(c, token={n: x for n, x in c.token.items() if n != "old_values"}), clip=None)
    close(plain.values.detach(), 0.5, 2, 0.32)


# -- what no loss may do ---------------------------------------------------------------------------------------------

SPEC = Correction(high=2.0)
LOSSES = {
    "ppo": tm.ppo_clip,
    "ppo_dual": partial(tm.ppo_clip, clip_dual=3.0, ratio_max=5.0),
    "reinforce": tm.reinforce,
    "gspo": tm.gspo,
    "gspo_token": tm.gspo_token,
    "cispo": tm.cispo,
    "sapo": tm.sapo,
    "gmpo": tm.gmpo,
    "kl_cov": partial(tm.kl_cov, k_ratio=0.2),
    "clip_cov": partial(tm.clip_cov, ratio=0.2, lower=0.0),
    "dppo_tv": tm.dppo_tv,
    "dppo_kl": tm.dppo_kl,
    "dro": tm.dro,
    "opsm": partial(tm.off_policy_sequence_mask, inner=tm.ppo_clip, delta=0.1),
    "bypass": partial(tm.bypass_reinforce, correction=SPEC),
    "kl": partial(tm.kl_loss, ratio_corrected=True),
    "value": tm.value_clip,
}
NAMES = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages", "old_values", "returns")
LENGTHS = [3, 1, 4, 2]


def case(seed, mask, garbage=None):
    g = torch.Generator().manual_seed(seed)
    token = {n: torch.randn(10, generator=g, dtype=F64) for n in (*NAMES, "logprobs", "values")}
    c = columns([0.0] * 4, tokens=LENGTHS, mask=mask)
    if garbage is not None:
        token = {n: torch.where(c.mask, x, garbage) for n, x in token.items()}
    return c.with_token(token)


def total(fn, c):
    """Loss and gradient as the engine makes them."""
    leaves = {n: c[n].clone().requires_grad_() for n in ("logprobs", "values")}
    value = fn(c.with_token(leaves).cleaned())
    loss = (weight_column(c, "seq-mean-token-mean") * torch.where(c.mask, value.values, 0.0)).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return loss.detach(), sum(g for g in grads if g is not None), value


masks = st.lists(st.booleans(), min_size=10, max_size=10)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 999), mask=masks, garbage=st.sampled_from([float("nan"), math.inf, -math.inf, -1e30]))
def test_nothing_outside_the_mask_reaches_value_or_gradient(name, seed, mask, garbage):
    loss, grad, _ = total(LOSSES[name], case(seed, mask))
    dirty_loss, dirty_grad, value = total(LOSSES[name], case(seed, mask, garbage))
    torch.testing.assert_close(dirty_loss, loss)
    torch.testing.assert_close(dirty_grad, grad)
    assert not grad[~torch.tensor(mask)].any()
    assert value.values.shape == (10,) and all(
        x.shape == (10,) and not x.requires_grad for x, _ in value.metrics.values()
    )


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_in_the_mask_is_zero(name):
    loss, grad, _ = total(LOSSES[name], case(0, [False] * 10, float("nan")))
    assert loss == 0 and not grad.any()


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 999), mask=masks)
def test_the_order_of_sequences_does_not_matter(name, seed, mask):
    c = case(seed, mask)
    order = [2, 0, 3, 1]
    at = torch.cat([torch.nonzero(c.sequence_of == i)[:, 0] for i in order])
    moved = replace(
        c,
        token={n: x[at] for n, x in c.token.items()},
        mask=c.mask[at],
        sequence_of=torch.arange(4).repeat_interleave(torch.tensor([LENGTHS[i] for i in order])),
    )
    (loss, grad, _), (moved_loss, moved_grad, _) = total(LOSSES[name], c), total(LOSSES[name], moved)
    torch.testing.assert_close(moved_loss, loss)
    torch.testing.assert_close(moved_grad, grad[at])


@pytest.mark.parametrize("name", [n for n in LOSSES if n not in ("kl_cov", "clip_cov")])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 999), mask=masks)
def test_whole_sequences_may_be_split_into_micro_batches(name, seed, mask):
    c = case(seed, mask)
    weight = weight_column(c, "seq-mean-token-mean")
    parts = 0.0
    for i in range(4):
        at = c.sequence_of == i
        one = replace(
            c,
            token={n: x[at] for n, x in c.token.items()},
            mask=c.mask[at],
            sequence_of=torch.zeros(int(at.sum()), dtype=torch.int64),
            num_sequences=1,
        )
        parts += (weight[at] * torch.where(one.mask, LOSSES[name](one.cleaned()).values, 0.0)).sum()
    torch.testing.assert_close(parts, total(LOSSES[name], c)[0])


@pytest.mark.parametrize("name", [n for n in LOSSES if n not in ("kl", "value", "dro", "reinforce", "bypass")])
def test_without_advantage_there_is_no_gradient(name):
    c = case(1, [True] * 10)
    c = c.with_token({"advantages": torch.zeros(10, dtype=F64), "old_logprobs": c["logprobs"]})
    loss, grad, _ = total(LOSSES[name], c)
    assert loss == 0 and not grad.any()


@pytest.mark.parametrize("name", [n for n in LOSSES if n not in ("kl", "value", "dro", "bypass")])
@pytest.mark.parametrize("d", [-1000.0, 1000.0])
def test_a_far_ratio_is_finite(name, d):
    c = case(2, [True] * 10)
    loss, grad, _ = total(LOSSES[name], c.with_token({"old_logprobs": c["logprobs"] - d}))
    assert loss.isfinite() and grad.isfinite().all()


def test_without_old_logprobs_the_policy_has_not_moved():
    c = case(3, [True] * 10)
    same = replace(c, token={n: x for n, x in c.token.items() if n != "old_logprobs"})
    for name in ("ppo", "gspo", "cispo", "sapo", "gmpo", "kl_cov", "dppo_tv", "dppo_kl"):
        _, grad, _ = total(LOSSES[name], same)
        _, expected, _ = total(LOSSES[name], c.with_token({"old_logprobs": c["logprobs"]}))
        torch.testing.assert_close(grad, expected)
        assert grad.any()
