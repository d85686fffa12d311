"""Closed forms: what each row of the table does to a softmax policy, and the edge cases of algorithms.md section 10."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.algorithms.kl_reward import adapted_coef, kl_penalty
from verl.algorithms.table import TABLE, KLReward, reject_flat, resolve

from verl.algorithms import advantages as adv
from verl.algorithms import terms as tm
from verl.algorithms.weights import check_finite, term_weights, weight_column
from verl.batch import Columns
from verl.driver.step import rewards_and_advantages
from verl.types import Metric

F64 = torch.float64
NEEDED = {"drgrpo": {"horizon_tokens": 2}, "gdpo": {"reward_components": ("score", "again")}}


def f64(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def columns(scores, groups=None, *, tokens=1, mask=None, valid=None, token=None, penalty=None) -> Columns:
    """Sequences of `tokens` tokens each (an int or one number per sequence), with their rewards."""
    n = len(scores)
    lengths = torch.tensor([tokens] * n if isinstance(tokens, int) else tokens)
    sequence_of = torch.arange(n).repeat_interleave(lengths)
    labels = list(dict.fromkeys(groups)) if groups is not None else list(range(n))
    group = torch.tensor([labels.index(g) for g in groups]) if groups is not None else torch.arange(n)
    valid = torch.tensor(valid) if valid is not None else torch.ones(n, dtype=torch.bool)
    mask = torch.tensor(mask) if mask is not None else torch.ones(len(sequence_of), dtype=torch.bool)
    score = f64(*scores)
    sequence = {"score": score, "group": group, "valid": valid, "positive": valid & (score > 0)}
    c = Columns(token=token or {}, sequence=sequence, sequence_of=sequence_of, num_sequences=n, mask=mask)
    return c.with_token({"rewards": adv.token_rewards(c, penalty)})


# -- a two-armed bandit ----------------------------------------------------------------------------------------------


class Bandit:
    """One context, a softmax over two actions, one token per sequence: every gradient has a closed form."""

    def __init__(self, actions, rewards, *, logits=(0.3, -0.2), reference=(0.0, 0.0), groups=None):
        self.actions = torch.tensor(actions)
        self.logits = f64(*logits).requires_grad_()
        self.reference = f64(*reference).log_softmax(0)
        self.columns = self._with_inputs(columns(rewards, groups or ["g"] * len(actions)))

    def _with_inputs(self, c: Columns) -> Columns:
        """What estimators may ask for: a critic that says 0.3, a greedy answer worth 0.2, every reward component the score."""
        n, p = len(self.actions), self.p
        token = {
            "old_values": torch.full((n,), 0.3, dtype=F64),
            "old_logprobs": p.log()[self.actions],
            "sum_pi_squared": (p**2).sum().expand(n),
        }
        sequence = {
            "baseline": torch.full((n,), 0.2, dtype=F64),
            **{f"component/{x}": c.sequence["score"] for x in ("score", "again")},
        }
        return replace(c.with_token(token), sequence={**c.sequence, **sequence})

    @property
    def p(self) -> torch.Tensor:
        return self.logits.detach().softmax(0)

    def loss(self, algo, *, advantages=True, only=None) -> torch.Tensor:
        """sum over terms of sum(w * value), with the columns that the loop would have."""
        logp = self.logits.log_softmax(0)
        taken = logp[self.actions]
        c = self.columns
        a = algo.advantage(c)["advantages"] if advantages else torch.zeros(len(self.actions), dtype=F64)
        entropy = -(logp.exp() * logp).sum().expand(len(self.actions))
        token = {"logprobs": taken, "entropy": entropy, "advantages": a, "ref_logprobs": self.reference[self.actions]}
        c = replace(c, token=token)
        terms = tuple(t for t in algo.terms if only is None or t.name == only)
        w = term_weights(c, terms)
        return sum((w[f"w/{t.name}"] * t.fn(c.cleaned()).values).sum() for t in terms)

    def step(self, algo, lr=0.1, **options) -> None:
        (g,) = torch.autograd.grad(self.loss(algo, **options), self.logits)
        with torch.no_grad():
            self.logits -= lr * g


def algorithm(name, **settings):
    return resolve(name, {**NEEDED.get(name, {}), **settings})


@pytest.mark.parametrize("name", TABLE)
def test_the_default_of_every_row_learns_the_better_action(name):
    for good in (0, 1):
        bandit = Bandit([0, 0, 1, 1], [float(good == 0), 0.9 * (good == 0), float(good == 1), 0.9 * (good == 1)])
        (g,) = torch.autograd.grad(bandit.loss(algorithm(name)), bandit.logits)
        assert g.abs().sum() > 1e-3, "the default configuration has a gradient"
        before = bandit.p[good]
        bandit.step(algorithm(name))
        assert bandit.p[good] > before


@pytest.mark.parametrize("name", TABLE)
def test_the_first_gradient_is_the_policy_gradient_in_closed_form(name):
    """On policy: -sum w A (1[v = a] - p_v); clipping and ratios are not active yet."""
    bandit = Bandit([0, 1, 1, 0, 1], [1.0, 0.0, 0.5, 0.0, -1.0])
    algo = algorithm(name, kl_loss_coef=0.0)
    (g,) = torch.autograd.grad(bandit.loss(algo, only="pg_loss"), bandit.logits)
    s, n = f64(1.0, 0.0, 0.5, 0.0, -1.0), 5
    centred = s - s.mean()
    grpo, white = centred / (s.std() + 1e-6), centred / (s.var() + 1e-8).sqrt()
    others = [torch.cat([s[:i], s[i + 1 :]]) for i in range(n)]
    norm = (1 - 2 * bandit.p + (bandit.p**2).sum())[bandit.actions]  # the squared norm of the score function
    a = {
        **dict.fromkeys(
            ("grpo", "dapo", "gspo", "gspo_token", "cispo", "sapo", "gmpo", "kl_cov", "clip_cov", "decoupled_ppo"), grpo
        ),
        **dict.fromkeys(("drgrpo", "gpg", "opo"), centred),
        **dict.fromkeys(("ppo", "vapo", "pf_ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"), white),
        "grpo_loo": torch.stack([(x - o.mean()) / (o.std() + 1e-6) for x, o in zip(s, others)]),
        "rloo": (n * s - s.sum()) / (n - 1),
        "reinforce": s,
        "remax": s - 0.2,
        "pass_at_k": f64(0.5, 0, 0, 0, 0) / (s.std() + 1e-6),
        "gdpo": 2 * grpo / ((2 * grpo).var() + 1e-8).sqrt(),
        "otb": s - (norm * s).sum() / (norm.sum() + 1e-8),
    }
    assert name in a, f"give the closed form of {name} here"
    horizon = 2 if name == "drgrpo" else 1
    onehot = torch.nn.functional.one_hot(bandit.actions, 2)
    expected = -(a[name][:, None] * (onehot - bandit.p)).sum(0) / (n * horizon)
    torch.testing.assert_close(g, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("form", ["k2", "k3", "low_var_kl", "k1+", "k3+"])
@pytest.mark.parametrize("name", TABLE)
def test_the_kl_term_alone_pulls_toward_the_reference(name, form):
    algo = algorithm(name, kl_loss_coef=0.5, kl_loss_form=form)
    for logits in ((2.0, -1.0), (-1.5, 0.5)):
        actions = [0] * round(100 * float(f64(*logits).softmax(0)[0]))
        bandit = Bandit(actions + [1] * (100 - len(actions)), [0.0] * 100, logits=logits)
        away = (bandit.p - bandit.reference.exp()).abs().sum()
        bandit.step(algo, advantages=False)
        assert (bandit.p - bandit.reference.exp()).abs().sum() < away - 1e-5


@pytest.mark.parametrize("name", TABLE)
def test_the_entropy_term_alone_raises_the_entropy(name):
    algo = algorithm(name, kl_loss_coef=0.0, entropy_coef=0.1)
    bandit = Bandit([0, 1], [0.0, 0.0], logits=(1.0, -1.0))
    for _ in range(3):
        before = -(bandit.p * bandit.p.log()).sum()
        bandit.step(algo, advantages=False)
        assert -(bandit.p * bandit.p.log()).sum() > before
    assert "entropy_loss" not in [t.name for t in algorithm(name).terms], "off by default, as in the papers"


@pytest.mark.parametrize("name", TABLE)
def test_a_group_without_signal_has_no_policy_gradient(name):
    if name in ("reinforce", "reinforce_plus_plus", "remax", "ppo", "vapo", "pf_ppo"):
        pytest.skip("no group baseline")
    for rewards in ([0.1, 0.1, 0.1], [1.0] * 3, [-7.3] * 3):
        bandit = Bandit([0, 1, 1], rewards)
        (g,) = torch.autograd.grad(bandit.loss(algorithm(name, kl_loss_coef=0.0)), bandit.logits)
        assert g.tolist() == [0.0, 0.0]


# -- clipping --------------------------------------------------------------------------------------------------------


def clipped(ratio, a, **options):
    """(loss, its derivative by log pi) of one token."""
    lp = torch.tensor([math.log(ratio)], dtype=F64, requires_grad=True)
    c = columns([0.0]).with_token({"logprobs": lp, "old_logprobs": torch.zeros(1, dtype=F64), "advantages": f64(a)})
    value = tm.ppo_clip(c, **options)
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
    with pytest.raises(ValueError, match="clip_dual=0.5: dual clip needs c > 1"):
        resolve("dapo", {"clip_dual": 0.5})


@pytest.mark.parametrize("d", [-1000.0, -21.0, 21.0, 1000.0])
def test_a_ratio_far_out_is_finite_and_pulls_nowhere(d):
    lp = f64(d).requires_grad_()
    c = columns([0.0]).with_token({"logprobs": lp, "old_logprobs": f64(0.0), "advantages": f64(-1.0 if d > 0 else 1.0)})
    value = tm.ppo_clip(c).values
    (g,) = torch.autograd.grad(value.sum(), lp)
    assert value.isfinite().all() and g.tolist() == [0.0]


# -- KL --------------------------------------------------------------------------------------------------------------


def test_kl_forms_in_expectation():
    """Under pi: E[k1] = E[k3] = KL; the gradient of k2 is that of the reverse KL; E[grad of k1] = 0 (3.1)."""
    logits = f64(0.5, -1.0, 0.2).requires_grad_()
    logp, ref = logits.log_softmax(0), f64(0.1, 0.0, 1.0).log_softmax(0)
    p, kl = logp.exp().detach(), (logp.exp() * (logp - ref)).sum()
    expected = {form: (p * tm.kl_estimate(logp, ref, form)).sum() for form in ("k1", "k2", "k3", "k1+", "k3+")}
    grad = {form: torch.autograd.grad(v, logits, retain_graph=True)[0] for form, v in expected.items()}
    (reverse,) = torch.autograd.grad(kl, logits, retain_graph=True)
    for form in ("k1", "k3", "k1+", "k3+"):
        torch.testing.assert_close(expected[form].detach(), kl.detach())
    for form in ("k2", "k1+", "k3+"):
        torch.testing.assert_close(grad[form], reverse)
    torch.testing.assert_close(grad["k1"], torch.zeros(3, dtype=F64))
    torch.testing.assert_close(grad["k3"], p - ref.exp())  # the forward KL's
    for alias, form in tm.KL_ALIASES.items():
        torch.testing.assert_close(tm.kl_estimate(logp, ref, alias), tm.kl_estimate(logp, ref, form))
    with pytest.raises(ValueError, match="KL form 'k4' is unknown"):
        tm.kl_form("k4")


def test_k3_still_pulls_on_the_tokens_that_drifted_most():
    """Q10: a clamp of the value at 10 has no gradient where ref / pi > 13."""
    lp = f64(-4.0, -30.0).requires_grad_()
    ref = f64(0.0, 0.0)
    (g,) = torch.autograd.grad(tm.kl_estimate(lp, ref, "k3").sum(), lp)
    assert g[0] == pytest.approx(1 - math.exp(4)) and g[1] == 0, "the log-ratio is clamped at 20"
    (clamped,) = torch.autograd.grad(tm.kl_estimate(lp, ref, "k3", value_bound=10.0).sum(), lp)
    assert clamped.tolist() == [0, 0]


def test_kl_in_the_reward():
    c = columns([1.0, 1.0], tokens=[2, 2], mask=[True, True, True, False])
    c = c.with_token({"old_logprobs": f64(-1, -2, -1, 5), "ref_logprobs": f64(-2, -2, -3, float("nan"))})
    penalty, mean = kl_penalty(c, coef=0.1, form="k1")
    torch.testing.assert_close(penalty, f64(0.1, 0, 0.2, 0))
    assert mean == pytest.approx((0.5 + 2) / 2)
    rewards = adv.token_rewards(c, penalty)
    torch.testing.assert_close(rewards, f64(-0.1, 1.0, 0.8, 0))  # the score stands at the last trainable token
    empty = replace(c, mask=torch.tensor([True, True, False, False]))
    assert kl_penalty(empty, coef=0.1, form="k1")[1] == pytest.approx(0.5)
    assert kl_penalty(empty, coef=0.1, form="k1", count_empty=True)[1] == pytest.approx(0.25)


def test_the_adaptive_coefficient_moves_toward_its_target_and_by_a_bounded_step():
    assert adapted_coef(0.2, kl=12, target=6, horizon=100, num_sequences=10) == pytest.approx(0.2 * 1.02)
    assert adapted_coef(0.2, kl=0, target=6, horizon=100, num_sequences=10) == pytest.approx(0.2 * 0.98)
    assert adapted_coef(0.2, kl=6.3, target=6, horizon=100, num_sequences=10) == pytest.approx(0.2 * 1.005)
    assert adapted_coef(0.2, kl=6, target=6, horizon=100, num_sequences=10) == 0.2


# -- estimators ------------------------------------------------------------------------------------------------------

GROUPED = {"grpo": adv.grpo, "drgrpo": lambda c: adv.grpo(c, normalize_by_std=False), "rloo": adv.rloo}


def fed(estimator, **options):
    """The estimator with whatever it asks for: the same for every token, so that order cannot show."""

    def call(c: Columns):
        constant = {"old_values": 0.3, "old_logprobs": -0.7, "sum_pi_squared": 0.4}
        score = c.sequence["score"]
        sequence = {"baseline": torch.full_like(score, 0.5), "components": torch.stack([score, score**2], 1)}
        c = replace(c, sequence={**c.sequence, **sequence})
        return estimator(
            c.with_token({n: torch.full((len(c.mask),), x, dtype=F64) for n, x in constant.items()}), **options
        )

    return call


SIGNAL = {  # exactly 0 for a group of one or without variance
    **GROUPED,
    "grpo_loo": fed(adv.grpo, leave_one_out=True),
    "grpo_batch": fed(adv.grpo, scale="batch"),
    "opo": fed(adv.opo),
    "gpg": fed(adv.gpg),
    "pass_at_k": fed(adv.pass_at_k),
    "gdpo": fed(adv.gdpo),
    "otb": fed(adv.otb),
}
EVERY = {
    **SIGNAL,
    "gae": fed(adv.gae, lam=0.9),
    "gae_raw": fed(adv.gae, whitened=False),
    "remax": fed(adv.remax),
    "vapo": fed(adv.gae, lam_critic=1.0, length_adaptive_alpha=0.5),
    "gdpo_token": fed(adv.gdpo, whiten_over="token"),
    "rf++": adv.reinforce_plus_plus,
    "rf++_baseline": adv.reinforce_plus_plus_baseline,
    "reinforce": adv.reinforce,
}


@st.composite
def ragged(draw):
    """(scores, opaque group ids, tokens, valid) of up to four ragged groups in any order."""
    ids = draw(st.lists(st.sampled_from(["01", "1", "{uuid}", "g é"]), min_size=1, max_size=12))
    scores = draw(
        st.lists(
            st.sampled_from([0.0, 1.0, 0.1, -3.5, 0.30000000000000004, 7.25]), min_size=len(ids), max_size=len(ids)
        )
    )
    tokens = draw(st.lists(st.integers(0, 4), min_size=len(ids), max_size=len(ids)))
    valid = draw(st.lists(st.sampled_from([True, True, True, False]), min_size=len(ids), max_size=len(ids)))
    return scores, ids, tokens, valid


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=40, deadline=None)
@given(data=ragged(), random=st.randoms(use_true_random=False))
def test_advantages_depend_on_groups_and_not_on_order_or_names(name, data, random):
    scores, ids, tokens, valid = data
    scores = [float("nan") if not v else s for s, v in zip(scores, valid)]  # an invalid reward may be anything
    c = columns(scores, ids, tokens=tokens, valid=valid)
    a = EVERY[name](c)["advantages"]
    assert a.isfinite().all() and not a[~c.sequence["valid"][c.sequence_of]].any(), "no reward, no advantage"
    order = list(range(len(ids)))
    random.shuffle(order)
    renamed = [f"<{ids[i]}>" for i in order]
    moved = EVERY[name](
        columns([scores[i] for i in order], renamed, tokens=[tokens[i] for i in order], valid=[valid[i] for i in order])
    )["advantages"]
    back = torch.cat([a[c.sequence_of == i] for i in order])
    torch.testing.assert_close(moved, back, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", GROUPED)
@settings(max_examples=40, deadline=None)
@given(data=ragged())
def test_group_estimators_sum_to_zero_and_ignore_what_carries_no_signal(name, data):
    scores, ids, tokens, valid = data
    c = columns(scores, ids, tokens=tokens, valid=valid)
    a = GROUPED[name](c)["advantages"]
    for g in set(ids):
        usable = [i for i, x in enumerate(ids) if x == g and valid[i] and tokens[i]]
        per_sequence = [float(a[c.sequence_of == i][0]) for i in usable]
        assert sum(per_sequence) == pytest.approx(0, abs=1e-9)
        values = [scores[i] for i in usable]
        if len(usable) < 2 or max(values) - min(values) <= 1e-6:
            assert per_sequence == [0.0] * len(usable), "exactly 0, also for scores like 0.1 (Q18)"
        elif name == "grpo":
            expected = (np.array(values) - np.mean(values)) / (np.std(values, ddof=1) + 1e-6)
            assert per_sequence == pytest.approx(expected.tolist())
        else:
            factor = len(values) / (len(values) - 1) if name == "rloo" else 1
            assert per_sequence == pytest.approx((factor * (np.array(values) - np.mean(values))).tolist())


@pytest.mark.parametrize("name", SIGNAL)
@settings(max_examples=40, deadline=None)
@given(data=ragged())
def test_a_group_of_one_or_without_variance_gives_exactly_zero(name, data):
    scores, ids, tokens, valid = data
    c = columns(scores, ids, tokens=tokens, valid=valid)
    a = SIGNAL[name](c)["advantages"]
    for g in set(ids):
        members = [i for i, x in enumerate(ids) if x == g and valid[i] and tokens[i]]
        values = [scores[i] for i in members]
        if len(members) < 2 or max(values) - min(values) <= 1e-6:
            assert not any(a[c.sequence_of == i].any() for i in members)


def test_singleton_rules():
    c = columns([3.0, 1.0, 2.0], ["a", "b", "b"])
    assert adv.grpo(c)["advantages"][0] == 0 and adv.rloo(c)["advantages"][0] == 0
    assert adv.grpo(c, singleton="raw")["advantages"][0] == pytest.approx(3 / (1 + 1e-6))
    assert adv.grpo(c, normalize_by_std=False, singleton="raw")["advantages"][0] == 3
    assert adv.rloo(c, singleton="raw")["advantages"][0] == 3
    assert adv.reinforce_plus_plus_baseline(c)["advantages"].sum() == pytest.approx(0)


def test_an_invalid_reward_is_in_no_statistic():
    with_invalid = columns([1.0, 0.0, 99.0], ["g"] * 3, valid=[True, True, False])
    for estimator in EVERY.values():
        a = estimator(with_invalid)["advantages"]
        torch.testing.assert_close(a[:2], estimator(columns([1.0, 0.0], ["g"] * 2))["advantages"])
        assert a[2] == 0
    penalised = columns([1.0, 99.0], tokens=2, valid=[True, False], penalty=f64(0.1, 0.1, 0.1, 0.1))
    assert adv.reinforce(penalised)["advantages"].tolist() == pytest.approx([0.8, 0.9, 0, 0]), (
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
    plain = rewards_and_advantages(c, advantage=adv.reinforce, kl=None, kl_coef=0.2)
    torch.testing.assert_close(plain["advantages"], adv.reinforce(c)["advantages"])


@pytest.mark.parametrize("shift", [True, False])
def test_whitening_edges(shift):
    everything = torch.ones(4, dtype=torch.bool)
    x = f64(1.0, 2.0, 4.0, float("nan"))
    mask = torch.tensor([True, True, True, False])
    inside = x[:3]
    expected = (inside - inside.mean()) / (inside.var() + 1e-8).sqrt() + (0 if shift else inside.mean())
    torch.testing.assert_close(adv.whiten(x, mask, shift_mean=shift), torch.cat([expected, f64(0.0)]))
    mean = 0.0 if shift else 0.1
    for constant in (f64(0.1, 0.1, 0.1, 0.1), f64(0.1, 0.1, 0.1, 0.1 + 2e-17)):
        got = adv.whiten(constant, everything, shift_mean=shift)
        assert got.tolist() == pytest.approx([mean] * 4, abs=0 if shift else 1e-12), (
            "rounding is not raised to a signal"
        )
    one = torch.tensor([False, True, False, False])
    assert adv.whiten(f64(5, 7, 5, 5), one, shift_mean=shift).tolist() == [0, 0 if shift else 7, 0, 0]
    assert adv.whiten(x, torch.zeros(4, dtype=torch.bool), shift_mean=shift).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("name", EVERY)
def test_nothing_trainable_is_no_error(name):
    c = columns([1.0, 0.0], ["g", "g"], tokens=2, mask=[False] * 4)
    assert EVERY[name](c)["advantages"].tolist() == [0, 0, 0, 0]
    empty = columns([1.0, 0.0], ["g", "g"], tokens=[0, 0])
    assert EVERY[name](empty)["advantages"].shape == (0,)


def test_dynamic_sampling_by_spread_and_not_by_exact_equality():
    assert reject_flat([0.1] * 3) == "reject" and reject_flat([0.1, 0.1 + 1e-9]) == "reject"
    assert reject_flat([0.0, 1.0]) == "keep" and reject_flat([5.0]) == "keep"
    assert reject_flat([1e9, 1e9 + 1]) == "reject"


# -- the table and the one division ----------------------------------------------------------------------------------


def test_settings_replace_single_axes_and_are_checked():
    algo = algorithm("grpo", aggregation="token-mean", kl_loss_coef=0.0, clip_high=0.3)
    assert (
        [t.name for t in algo.terms] == ["pg_loss"]
        and algo.terms[0].aggregate == "token-mean"
        and algo.settings["clip_high"] == 0.3
    )
    assert algo.needs(1) == () and algo.needs(2) == ("old_logprobs",)
    assert algorithm("rloo").needs(1) == ("ref_logprobs", "old_logprobs") and algorithm("grpo").needs(1) == (
        "ref_logprobs",
    )
    for settings_, words in (
        ({"aggregation": "mean"}, "algorithm.aggregation='mean' is unknown; known: token-mean"),
        ({"estimator": "gae2"}, "algorithm.estimator='gae2' is unknown; known: gae"),
        ({"loss": "ppo"}, "algorithm.loss='ppo' is unknown"),
        ({"clip_low": 1.0}, "need 0 <= clip_low < 1"),
        ({"kl_loss_form": "k9"}, "KL form 'k9' is unknown"),
        ({"on_exhausted": "wait"}, "stop | smaller"),
        ({"loss": "no_such_module_x:f"}, "is it on PYTHONPATH"),
        ({"advantage": "math:no_such"}, "module 'math' has no 'no_such'"),
        ({"aggregation": "seq-mean-token-sum-norm"}, "set algorithm.horizon_tokens"),
    ):
        with pytest.raises(ValueError, match=words.replace("|", r"\|")):
            resolve("grpo", settings_)
    with pytest.raises(ValueError, match="did you mean 'dapo'"):
        resolve("dapoo")


def test_a_users_own_loss_and_advantage(monkeypatch):
    import sys
    from types import SimpleNamespace

    own = SimpleNamespace(
        loss=lambda c: -c["advantages"] * c["logprobs"],
        advantage=lambda c: {"advantages": torch.full((2,), 3.0, dtype=F64)},
    )
    monkeypatch.setitem(sys.modules, "own_algorithm", own)
    algo = resolve("dapo", {"loss": "own_algorithm:loss", "advantage": "own_algorithm:advantage"})
    bandit = Bandit([0, 1], [0.0, 1.0])
    lp = bandit.logits.log_softmax(0)
    torch.testing.assert_close(bandit.loss(algo), -3 * lp.mean())


def test_a_term_over_some_sequences_divides_by_their_own_count():
    """VAPO's positive examples (2.3): the denominator is that of the sequences it is over, 0 when there is none."""
    c = columns([1.0, 0.0, 1.0], tokens=[2, 3, 1])
    c = replace(c, sequence={**c.sequence, "correct": torch.tensor([True, False, True])}).with_token(
        {"logprobs": -torch.ones(6, dtype=F64)}
    )
    term = tm.Term(name="nll", fn=tm.nll, coef=0.1, over="correct")
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
