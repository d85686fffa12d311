"""Options for what peers fix at other values, and algorithms that came later, against formulas in numpy. float64."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_columns import F64, columns, f64

from verl.algorithms import estimators as adv
from verl.algorithms import losses, turns
from verl.algorithms.corrections import correct
from verl.algorithms.presets import settled
from verl.algorithms.resolve import resolve
from verl.algorithms.weights import term_weights


def close(x, *values, rtol=1e-9):
    torch.testing.assert_close(x, f64(*values), rtol=rtol, atol=1e-12)


def test_the_epsilon_beside_the_deviation_of_a_group():
    scores, groups, e = np.array([0.3, 0.1, 0.0, 0.7]), ["a", "a", "b", "b"], 0.05
    c = columns(scores.tolist(), groups)
    g = scores.reshape(2, 2)
    centred, std = g - g.mean(1, keepdims=True), g.std(1, ddof=1, keepdims=True)
    close(adv.grpo(c, epsilon=e)["advantages"], *(centred / (std + e)).ravel())
    whole = centred.ravel() / (scores.std(ddof=1) + e)
    close(adv.grpo(c, epsilon=e, scale_rewards="batch")["advantages"], *whole)
    best = np.where(g == g.max(1, keepdims=True), g.max(1, keepdims=True) - g.min(1, keepdims=True), 0.0)
    close(adv.pass_at_k(c, epsilon=e)["advantages"], *(best / (std + e)).ravel())
    close(turns.turn_discount(c, epsilon=e)["advantages"], *(centred / (std + e)).ravel())
    close(turns.gigpo(c, epsilon=e)["advantages"], *(centred / (std + e)).ravel())
    three = columns([0.3, 0.1, 0.0], ["a"] * 3)
    rest = [np.delete([0.3, 0.1, 0.0], i) for i in range(3)]
    loo = [(x - r.mean()) / (r.std(ddof=1) + e) for x, r in zip([0.3, 0.1, 0.0], rest)]
    close(adv.grpo(three, epsilon=e, leave_one_out=True)["advantages"], *loo)


def test_an_answer_that_is_alone_may_keep_its_score():
    """verl's way; where advantages of the others are unchanged, and nothing is learned from an invalid one, which has
    a KL penalty alone."""
    valid, penalty = [True, True, True, False], f64(0, 0, 0, 0, 0.5)
    c = columns([3.0, 1.0, 4.0, 7.0], ["a", "a", "b", "b"], valid=valid, tokens=[1, 2, 1, 1], penalty=penalty)
    std = math.sqrt(2)
    for fn, options, expected in (
        (adv.grpo, {}, (1 / (std + 1e-6), 4 / (1 + 1e-6))),
        (adv.grpo, {"normalize_by_std": False}, (1.0, 4.0)),
        (adv.grpo, {"leave_one_out": True}, (2.0, 4.0)),
        (adv.rloo, {}, (2.0, 4.0)),
        (adv.opo, {}, (3 - 5 / 3, 4.0)),
        (adv.gpg, {}, (1.5, 6.0)),
        (adv.gpg, {"f_norm": 2.0, "alpha_counts": "nonzero"}, (0.5, 2.0)),
    ):
        raw, zero = (fn(c, **options, singleton=s)["advantages"] for s in ("raw", "zero"))
        assert (raw[0].item(), raw[3].item()) == pytest.approx(expected, rel=1e-9), (fn, options)
        assert torch.equal(raw[:3], zero[:3]) and zero[3] == 0 and raw[4] == 0, (fn, options)
    centred = np.array([1.0, -1.0, -1.0, 4.0])
    white = (centred - centred.mean()) / np.sqrt(centred.var(ddof=1) + 1e-8)
    close(adv.reinforce_plus_plus_baseline(c, singleton="raw")["advantages"], *white, 0.0)
    assert settled("rloo").group.least == 2 and settled("rloo", {"singleton": "raw"}).group.least == 1


def test_what_alpha_of_gpg_counts():
    c = columns([1.0, -1.0, 0.0, 1.0, 0.0, 0.0], list("aabbcc"))
    a = adv.gpg(c)["advantages"]
    close(a, 1.5, -1.5, -0.75, 0.75, 0, 0)
    close(adv.gpg(c, alpha_counts="nonzero", f_norm=4.0)["advantages"], *(np.array([1, -1, -0.5, 0.5, 0, 0]) * 2 / 4))
    assert not adv.gpg(columns([0.0, 0.0], ["a", "a"]), alpha_counts="nonzero")["advantages"].any()


def test_whitening_without_the_mean_and_with_an_epsilon_beside_the_deviation():
    scores = np.array([3.0, 1.0, 4.0, 9.0])
    c = columns(scores.tolist(), ["a", "a", "b", "b"]).with_token({"old_values": torch.zeros(4, dtype=F64)})

    def white(x, shift_mean, epsilon):
        divisor = np.sqrt(x.var(ddof=1) + 1e-8) if epsilon is None else x.std(ddof=1) + epsilon
        return (x - x.mean()) / divisor + (0.0 if shift_mean else x.mean())

    centred = np.array([1.0, -1.0, -2.5, 2.5])
    of_gdpo = np.array([1, -1, -1, 1]) * (0.5**0.5)
    c = replace(c, sequence={**c.sequence, "component/a": f64(*scores), "component/b": f64(0, 0, 0, 0)})
    for epsilon in (None, 0.1):
        for shift_mean in (True, False):
            options = {"shift_mean": shift_mean, "whiten_epsilon": epsilon}
            for fn, x in ((adv.gae, scores), (adv.reinforce_plus_plus, scores), (turns.turn_gae, scores)):
                close(fn(c, **options)["advantages"], *white(x, shift_mean, epsilon))
            close(adv.reinforce_plus_plus_baseline(c, **options)["advantages"], *white(centred, shift_mean, epsilon))
        scaled = adv.rloo(c, normalize_advantages=True, whiten_epsilon=epsilon)["advantages"]
        close(scaled, *white(2 * centred, True, epsilon))
        options = {"epsilon": 1e-12, "whiten_epsilon": epsilon}
        close(adv.gdpo(c, reward_components=("a", "b"), **options)["advantages"], *white(of_gdpo, True, epsilon))
    flat = columns([2.0, 2.0]).with_token({"old_values": torch.zeros(2, dtype=F64)})
    close(adv.gae(flat)["advantages"], 0, 0)
    close(adv.gae(flat, shift_mean=False)["advantages"], 2, 2)


def test_the_teachers_signal_counts_less_after_a_drift():
    """IW-OPD: 1 + gain x (1 - sum of the gaps before / that before the last token); tokens outside the mask are none
    of it."""
    likes = [np.array([0.5, -2.0, 0.25, 1.0]), np.array([-0.3])]
    c = columns([0.0, 0.0], tokens=[5, 1], mask=[True, True, False, True, True, True])
    teacher = f64(0.5, -2.0, 99.0, 0.25, 1.0, -0.3)
    c = c.with_token({"teacher_logprobs": teacher, "rollout_logprobs": torch.zeros(6, dtype=F64)})
    before = np.array([0.0, 0.5, 2.5, 2.75]) / 2.75
    expected = [*(likes[0] * (1 + 0.5 * (1 - before))), likes[1][0] * 1.5]
    found = adv.opd(c, prefix_gain=0.5)["advantages"]
    close(found[c.mask], *expected)
    plain = adv.opd(c)["advantages"]
    close(plain[c.mask], *likes[0], *likes[1])
    assert found[2] == plain[2] == 0


def test_the_teachers_signal_is_clamped_as_verl_does():
    """Log-probs are raised to the floor first; then log(teacher / policy), or the divergence, is bounded on both
    sides, and what is clamped has no gradient."""
    c = columns([0.0, 0.0], tokens=[3, 1], mask=[True, True, True, True])
    teacher, ours = f64(-20.0, -0.5, -30.0, -1.0), f64(-1.0, -8.0, -25.0, -0.9)
    c = c.with_token({"teacher_logprobs": teacher, "rollout_logprobs": ours})
    close(adv.opd(c)["advantages"], -19.0, 7.5, -5.0, -0.1)
    close(adv.opd(c, teacher_clamp=5.0)["advantages"], -5.0, 5.0, -5.0, -0.1)
    close(adv.opd(c, teacher_floor=-10.0)["advantages"], -9.0, 7.5, 0.0, -0.1)
    close(adv.opd(c, teacher_floor=-10.0, teacher_clamp=8.0)["advantages"], -8.0, 7.5, 0.0, -0.1)
    student = torch.log(f64(0.9, 1e-9, 0.1 - 1e-9)).repeat(4, 1).requires_grad_()
    theirs = torch.log(f64(1e-9, 0.9, 0.1 - 1e-9)).repeat(4, 1)
    c = c.with_token({"logprobs_at": student, "teacher_topk": theirs})
    raw = 0.9 * (np.log(0.9) - np.log(1e-9)) + 1e-9 * (np.log(1e-9) - np.log(0.9))
    low = 0.9 * (np.log(0.9) + 10) + np.exp(-10) * (-10 - np.log(0.9))
    close(losses.gkd_topk(c, beta=0.0).values.detach(), *[raw] * 4)
    close(losses.gkd_topk(c, beta=0.0, floor=-10.0).values.detach(), *[low] * 4)
    bounded = losses.gkd_topk(c, beta=0.0, clamp=10.0).values
    close(bounded.detach(), *[10.0] * 4)
    bounded.sum().backward()
    assert float(student.grad.abs().max()) == 0
    for at in (0, 1):
        student.grad = None
        losses.gkd_topk(c, beta=0.0, floor=-10.0).values.sum().backward()
        assert (float(student.grad[0, at]) != 0) == (at == 0), "the student's log-prob below the floor is not pulled"


# -- algorithms that came later ----------------------------------------------------------------------------------------

NEW, OLD = [-1.0, -0.4, -2.0, -0.7, -1.1], [-1.3, -0.9, -1.2, -0.7, -1.5]  # answers of 2, 2 and 1 tokens
A = [0.5, 0.5, -2.0, -2.0, 0.0]


def stepped(name, mask=None, token=None, **settings):
    """(columns of three answers, loss and gradient by log-prob and entropy of the policy term of this preset)."""
    made = {"old_logprobs": OLD, "advantages": A, "entropy": [0.3, 2.0, 1.0, 0.1, 0.7], **(token or {})}
    c = columns([1.0, 0.0, 0.0], ["a"] * 3, tokens=[2, 2, 1], mask=mask)
    leaf = f64(*NEW).requires_grad_()
    c = c.with_token({**{n: f64(*v) for n, v in made.items()}, "logprobs": leaf})
    algorithm = resolve(name, settings)
    if algorithm.correction is not None and algorithm.correction.of_step:
        found = correct(c, algorithm.correction)
        c = c.with_token({n: found[n] for n in ("is_weights", "keep")})
    [term] = [t for t in algorithm.terms if t.name == "pg_loss"]
    weights = term_weights(c, (term,))
    seen = replace(c, mask=weights["m/pg_loss"])
    loss = (weights["w/pg_loss"] * torch.where(seen.mask, term.fn(seen.cleaned()).values, 0.0)).sum()
    return c, loss.item(), torch.autograd.grad(loss, leaf)[0].tolist()


def phi(w, k, rate):
    return w**k * np.exp(rate * (1 - w))


def test_vespo_weighs_a_sequence_by_the_product_of_its_ratios():
    d = np.array(NEW) - np.array(OLD)
    w = [np.exp(d[:2].sum()), np.exp(d[2:4].sum()), np.exp(d[4])]
    by = [phi(w[0], 2.0, 3.0), phi(w[1], 3.0, 2.0), phi(w[2], 2.0, 3.0)]
    each = np.repeat(by, [2, 2, 1]) * np.array(A) / 5
    _, loss, grad = stepped("vespo")
    assert grad == pytest.approx((-each).tolist(), rel=1e-9) and loss == pytest.approx(-(each * NEW).sum(), rel=1e-9)
    assert phi(1.0, 2.0, 3.0) == 1.0, "the policy gradient where nothing has moved"
    far = {"old_logprobs": [-31.0, *OLD[1:2], 29.0, *OLD[3:]]}
    _, loss, grad = stepped("vespo", token=far)
    assert np.isfinite(loss) and np.isfinite(grad).all() and abs(grad[0]) < 1e-9 > abs(grad[2])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_vespo_takes_importance_weights_into_the_product(level):
    """And not as a factor beside it: TRL's way. A weight of a sequence counts once."""
    rollout = [-1.5, -0.9, -1.4, -0.2, -1.5]
    given = {"correction": "truncate", "correction_high": 1.2, "correction_level": level}
    q = np.array(OLD) - np.array(rollout)
    d = np.array(NEW) - np.array(OLD)
    parts = (slice(0, 2), slice(2, 4), slice(4, 5))
    if level == "token":
        more = [np.minimum(np.exp(q[p]), 1.2).prod() for p in parts]
    else:
        more = [min(np.exp(q[p].sum()), 1.2) for p in parts]
    w = [np.exp(d[p].sum()) * m for p, m in zip(parts, more)]
    by = [phi(w[0], 2.0, 3.0), phi(w[1], 3.0, 2.0), phi(w[2], 2.0, 3.0)]
    _, _, grad = stepped("vespo", token={"rollout_logprobs": rollout}, **given)
    assert grad == pytest.approx((-np.repeat(by, [2, 2, 1]) * np.array(A) / 5).tolist(), rel=1e-6)


def test_luspo_is_gspo_with_every_answer_counted_by_its_length():
    """Nothing is clipped: -A s of the answer, for each of its tokens, over the number of answers."""
    wide = {"clip_low": 0.9, "clip_high": 9.0}
    d = np.array(NEW) - np.array(OLD)
    s = [np.exp(d[:2].mean()), np.exp(d[2:4].mean()), np.exp(d[4])]
    _, loss, grad = stepped("luspo", **wide)
    each = -np.array(A) * np.repeat(s, [2, 2, 1])
    assert loss == pytest.approx(each.sum() / 3, rel=1e-9) and grad == pytest.approx((each / 3).tolist(), rel=1e-9)
    fixed = settled("luspo").loss
    assert (fixed.aggregation, fixed.clip_low, fixed.clip_high) == ("seq-mean-token-sum", 2e-3, 2.5e-3)


def test_max_rl_divides_by_the_mean():
    c = columns([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, -1.0, 0.5], [*"aaaabbccdd"])
    close(adv.max_rl(c)["advantages"], 3, -1, -1, -1, 0, 0, 0, 0, 0, 0)
    uneven = columns([0.5, 1.0, 0.0], ["a"] * 3, valid=[True, True, False])
    close(adv.max_rl(uneven)["advantages"], -1 / 3, 1 / 3, 0)


def test_the_trust_region_of_intellect_holds_on_both_sides_for_both_signs():
    """|pi - pi_old| <= 0.2; beyond it only the drift's square is left. Token 1 rose by 0.26, token 2 fell by 0.17."""
    p, old = np.exp(NEW), np.exp(OLD)
    d, gap = np.array(NEW) - np.array(OLD), p - old
    assert [bool(x) for x in abs(gap) > 0.2] == [False, True, False, False, False] and gap[2] < -0.16
    for tau, bound in ((0.3, {}), (0.0, {"clip_low": 0.1})):
        inside = (gap <= 0.2) & (gap >= -bound.get("clip_low", 0.2))
        expected = (np.where(inside, -np.array(A) * p / old, 0.0) + 2 * tau * d) / 5
        _, loss, grad = stepped("intellect_ipo", drift_coef=tau, **bound)
        assert grad == pytest.approx(expected.tolist(), rel=1e-9)
        value = np.where(inside, -np.array(A) * p / old, 0.0) + tau * d**2
        assert loss == pytest.approx(value.sum() / 5, rel=1e-9)
    preset = settled("intellect_ipo")
    assert preset.correction.bypass and not preset.needs(1) and not preset.estimator.normalize_by_std


def test_only_the_tokens_of_high_entropy_have_a_loss():
    """Entropies 0.3, 2.0, 1.0, 0.1, 0.7: the quantile 0.6 is 0.7 + 0.4 x 0.3 = 0.82. Denominators count all tokens."""
    wide = {"clip_low": 0.9, "clip_high": 9.0}
    _, _, every = stepped("dapo", **wide)
    assert all(every[:4])
    for share, kept in ((0.4, [1, 2]), (0.5, [1, 2, 4]), (1e-6, [1]), (1.0, range(5))):
        _, _, grad = stepped("dapo", top_entropy_quantile=share, **wide)
        assert grad == pytest.approx([g if i in kept else 0.0 for i, g in enumerate(every)]), share
        [term] = [t for t in resolve("dapo", {"top_entropy_quantile": share}).terms if t.name == "pg_loss"]
        assert term.two_pass and term.outputs == ("logprobs", "entropy")
    quantile = np.quantile([0.3, 2.0, 1.0, 0.1, 0.7], 0.6)
    assert quantile == pytest.approx(0.82)
    _, _, masked = stepped("dapo", mask=[True, False, True, True, True], top_entropy_quantile=0.5, **wide)
    assert [bool(g) for g in masked] == [False, False, True, False, False], "the median of the four tokens is 0.5"


def test_a_mask_by_entropy_or_staleness_holds_also_where_a_bypass_weighs():
    given = {"bypass": True, "correction": "truncate", "correction_high": 9.0}
    token = {"rollout_logprobs": [*OLD[:2], -0.5, -0.2, OLD[4]]}
    _, _, every = stepped("reinforce", token=token, **given)
    _, _, top = stepped("reinforce", token=token, top_entropy_quantile=0.4, **given)
    assert top == pytest.approx([g if i in (1, 2) else 0.0 for i, g in enumerate(every)])
    _, _, kept = stepped("reinforce", token=token, off_policy_delta=0.5, **given)
    assert all(every[:4]) and kept == pytest.approx([*every[:2], 0.0, 0.0, 0.0]), "the second answer is far and bad"


def test_a_mask_by_entropy_of_a_divergence_is_refused():
    with pytest.raises(ValueError, match="top_entropy_quantile=0.2 with algorithm.name=gkd: it is of policy losses"):
        settled("gkd", {"top_entropy_quantile": 0.2})
