"""Laws of every preset, estimator and loss; new ones are included without further code. float64.

Presets on a tabular softmax policy: a better reward raises an action's probability, a bandit is solved, KL alone pulls
to the reference, entropy alone raises the entropy, values move to the returns, equal rewards give exactly no gradient,
and the first gradient is the policy gradient in closed form. Estimators and losses: nothing outside the mask counts,
order and names do not matter, and nothing makes a NaN of nothing. A table is checked in one loop that collects
failures.
"""

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from each import each, matrix
from hypothesis import given, settings
from hypothesis import strategies as st
from small_columns import F64, columns, f64

from verl.algorithms import estimators as adv
from verl.algorithms import losses, turns
from verl.algorithms.corrections import correct
from verl.algorithms.filters import Correction
from verl.algorithms.losses import kl_penalty
from verl.algorithms.presets import PRESETS
from verl.algorithms.resolve import resolve
from verl.algorithms.specs import AGGREGATIONS
from verl.algorithms.weights import term_weights, weight_column
from verl.batch import Batch, Columns, pack
from verl.model_engine.objective import evaluate_terms
from verl.objective import Term, TermValue
from verl.types import Refs, Sample, Segment, ref_of
from verl.workers.compute import step_columns

NEEDED = {
    "drgrpo": {"horizon_tokens": 3},
    "gdpo": {"reward_components": ["a", "b"]},
    "opd": {"reward_coef": 1.0},  # beside a teacher that is the policy itself
    "iw_opd": {"reward_coef": 1.0},
}
BY_TEACHER = ("gkd", "gkd_topk")  # their loss reads no reward: test_teacher.py
BY_REWARD = tuple(name for name in PRESETS if name not in BY_TEACHER)
NO_BASELINE = (
    "reinforce",
    "ppo",
    "vapo",
    "pf_ppo",
    "turn_ppo",
)  # presets that keep a gradient where all rewards are equal
ACROSS_GROUPS = ("reinforce_plus_plus", "remax")  # a baseline that is not the group's mean
LENGTHS = (1, 3)
OFF = {"kl_loss_coef": 0.0, "kl_reward_coef": 0.0, "entropy_coef": 0.0}


def algorithm(name, **settings):
    return resolve(name, {**NEEDED.get(name, {}), **settings})


def holds(law: Callable[..., None], names=BY_REWARD, **options) -> None:
    """The law for each of these; all that break it are named together."""
    broken = {}
    for name in names:
        try:
            law(name, **options)
        except AssertionError as exc:
            broken[name] = str(exc).splitlines()[:6]
    assert not broken, broken


# -- presets on a tabular policy ---------------------------------------------------------------------------------------


class Policy:
    """Logits [T, K]: the token at each place of an answer, whatever came before; values [T]."""

    def __init__(self, probabilities, length: int) -> None:
        logits = torch.tensor(probabilities, dtype=torch.float64).log()
        self.logits = logits.repeat(length, 1).requires_grad_()
        self.values = torch.zeros(length, dtype=torch.float64, requires_grad=True)

    def logp(self) -> torch.Tensor:
        return self.logits.log_softmax(-1)

    def probability(self, action: int) -> float:
        """Return the probability of the answer `action`, `action`, ..."""
        return float(self.logp()[:, action].sum().exp().detach())

    def entropy(self) -> torch.Tensor:
        return -(self.logp().exp() * self.logp()).sum(-1)

    def outputs(self, actions: torch.Tensor) -> dict[str, torch.Tensor]:
        """Columns [S * T] of answers [S] that repeat one action."""
        n = len(actions)
        return {
            "logprobs": self.logp()[:, actions].T.reshape(-1),
            "entropy": self.entropy().repeat(n),
            "values": self.values.repeat(n),
            "sum_pi_squared": (self.logp().exp() ** 2).sum(-1).detach().repeat(n),
        }


@functools.cache
def layout(groups: int, n: int, length: int) -> tuple[Batch, Refs]:
    """`groups` prompts with n answers of `length` tokens; actions and rewards come later."""
    rows = []
    for g in range(groups):
        for i in range(n):
            ids = np.full(length, i)
            sampled = Segment(ids=ids, source="sampled", logprobs=np.zeros(length, np.float32), version=0)
            segments = (Segment(ids=np.array([g + 1]), source="prompt"), sampled)
            name = f"{g}/{i}"
            rows.append(
                Sample(
                    sample_id=name, trajectory_id=name, group_id=str(g), purpose="train", segments=segments, reward=0.0
                )
            )
    return pack(rows, share_prefix=False), Refs(ref_of(r) for r in rows)


@dataclass
class Step:
    """One optimizer step's batch with everything but the model outputs, as driver/step.py and a Role make it."""

    batch: Batch
    actions: torch.Tensor


def prepared(
    algo, policy, actions, rewards, *, groups=1, reference=None, baseline=0.0, values=0.0, moved=False
) -> Step:
    """Rewards -> correction -> KL in the reward -> advantages -> weights of both sets of terms."""
    length, n = len(policy.logits), len(actions) // groups
    batch, refs = layout(groups, n, length)
    refs = Refs(
        replace(r, reward=float(s), components={"a": float(s), "b": 0.5 * float(s)}) for r, s in zip(refs, rewards)
    )
    with torch.no_grad():
        now = policy.outputs(actions)
        ref = now if reference is None else reference.outputs(actions)
    stored = {
        "old_logprobs": now["logprobs"],
        "rollout_logprobs": now["logprobs"],
        "ref_logprobs": ref["logprobs"],
        "teacher_logprobs": now["logprobs"],
        "sum_pi_squared": now["sum_pi_squared"],
        "old_values": now["values"] + values,
    }
    columns = step_columns(refs, stored, {r.group_id: baseline for r in refs})
    if algo.correction is not None:
        stored |= {k: v for k, v in correct(columns, algo.correction).items() if k in ("is_weights", "keep")}
    penalty = None
    if algo.kl_reward:
        penalty, _ = kl_penalty(columns, coef=algo.kl_reward.coef, form=algo.kl_reward.form)
    found = algo.advantage(columns.with_token({"rewards": adv.token_rewards(columns, penalty)}))
    stored |= {k: v for k, v in found.items() if isinstance(v, torch.Tensor)}
    if not moved and "old_logprobs" not in {n.column for n in algo.needs(1)}:
        del stored["old_logprobs"]  # the default: one update per step, so no pass for it
    weights = term_weights(step_columns(refs, stored), (*algo.terms, *algo.value_terms))
    return Step(batch.with_columns({**stored, **weights}), actions)


def loss_of(terms, step: Step, policy: Policy) -> torch.Tensor:
    return evaluate_terms(terms, step.batch, policy.outputs(step.actions))[0]


def gradient(terms, step: Step, policy: Policy) -> torch.Tensor:
    return torch.autograd.grad(loss_of(terms, step, policy), policy.logits)[0]


def moved_by(terms, step: Step, policy: Policy, size: float = 1e-3) -> Policy:
    """The policy after one small step of plain gradient descent."""
    out = Policy([1.0] * policy.logits.shape[1], len(policy.logits))
    g = gradient(terms, step, policy)
    assert g.abs().sum() > 0, "the gradient is zero"
    out.logits = (policy.logits - size * g / g.norm()).detach().requires_grad_()
    return out


UNEVEN = [0.4, 0.3, 0.2, 0.1]


def one_differs(action: int, by: float) -> list[float]:
    return [by if a == action else 0.0 for a in range(4)]


def better_is_raised(name, length, moved):
    algo = algorithm(name)
    for action in range(4):
        policy = Policy(UNEVEN, length)
        step = prepared(algo, policy, torch.arange(4), one_differs(action, 1.0), values=0.25, moved=moved)
        after = moved_by(algo.terms, step, policy)
        assert after.probability(action) > policy.probability(action), f"action {action}"


def worse_is_lowered(name, length, moved):
    algo = algorithm(name)
    for action in range(4):
        policy, rewards = Policy(UNEVEN, length), one_differs(action, -1.0)
        if name == "pass_at_k":  # only a sole best answer has an advantage; the others lose what it gains
            rewards[(action + 1) % 4] = 0.5
        if name == "max_rl":  # of scores that are not below 0
            rewards = [reward + 1.0 for reward in rewards]
        step = prepared(algo, policy, torch.arange(4), rewards, values=-0.25, moved=moved)
        after = moved_by(algo.terms, step, policy)
        assert after.probability(action) < policy.probability(action), f"action {action}"


@each("moved", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
@matrix("law", [better_is_raised, worse_is_lowered], ids=lambda f: f.__name__)
def test_the_sign_of_every_preset(law, length, moved):
    holds(law, length=length, moved=moved)


def values_move(name, length):
    algo = algorithm(name, **OFF)
    for sign in (1.0, -1.0):
        policy = Policy(UNEVEN, length)
        step = prepared(algo, policy, torch.arange(4), [sign] * 4)
        g = torch.autograd.grad(loss_of(algo.value_terms, step, policy), policy.values)[0]
        assert (sign * g < 0).all(), "descent raises a value below the return"
    policy = Policy(UNEVEN, length)
    exact = prepared(algo, policy, torch.arange(4), [0.0] * 4)
    assert float(torch.autograd.grad(loss_of(algo.value_terms, exact, policy), policy.values)[0].abs().sum()) == 0.0


@pytest.mark.parametrize("length", LENGTHS)
def test_values_move_to_the_returns(length):
    holds(values_move, [name for name, preset in PRESETS.items() if preset.critic], length=length)


def equal_rewards(name, length):
    """0.1 is no float: a mean of equal rewards may miss it by rounding, which a division would raise to noise."""
    algo, policy = algorithm(name), Policy(UNEVEN, length)
    for equal in (0.1, 1.0, -7.3):
        equal = 0.0 if name in NO_BASELINE else equal
        other = equal if name in (*NO_BASELINE, *ACROSS_GROUPS) else 0.7
        actions = torch.tensor([0, 1, 2, 0, 1, 3])
        step = prepared(algo, policy, actions, [equal] * 3 + [other] * 3, groups=2, baseline=equal)
        assert float(gradient(algo.terms, step, policy).abs().sum()) == 0.0


@pytest.mark.parametrize("length", LENGTHS)
def test_equal_rewards_have_no_gradient(length):
    holds(equal_rewards, length=length)


ON_POLICY = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])  # exactly as often as the policy below draws them
DRAWN = [0.5, 0.25, 0.125, 0.125]


def kl(p: Policy, q: Policy) -> float:
    return float((p.logp().exp() * (p.logp() - q.logp())).sum().detach())


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


def kl_pulls(name, length, form):
    """On answers in exact proportion, k3's gradient is that of KL(ref || pi), the others' that of KL(pi || ref)."""
    algo = algorithm(name, **{**OFF, "kl_loss_coef": 0.1, "kl_loss_form": form})
    policy, reference = Policy(DRAWN, length), Policy([0.1, 0.2, 0.3, 0.4], length)
    step = prepared(algo, policy, ON_POLICY, [0.0] * 8, reference=reference)
    after = moved_by(algo.terms, step, policy)
    assert kl(after, reference) < kl(policy, reference) and kl(reference, after) < kl(reference, policy)
    p, q = policy.logp(), reference.logp().detach()
    exact = (q.exp() * (q - p)).sum() if form == "k3" else (p.exp() * (p - q)).sum()
    expected = torch.autograd.grad(exact, policy.logits)[0]
    assert cosine(gradient(algo.terms, step, policy), expected) == pytest.approx(1, abs=1e-9)
    at_home = prepared(algo, policy, ON_POLICY, [0.0] * 8)
    assert float(gradient(algo.terms, at_home, policy).abs().sum()) < 1e-15


@each("form", ["k2", "k3", "k1+", "k3+"])
@matrix("length", LENGTHS)
def test_kl_alone_pulls_to_the_reference(length, form):
    holds(kl_pulls, length=length, form=form)


def kl_in_the_reward_pulls(name, length):
    algo, policy, reference = algorithm(name), Policy(DRAWN, length), Policy([0.1, 0.2, 0.3, 0.4], length)
    step = prepared(algo, policy, ON_POLICY, [0.0] * 8, reference=reference)
    assert kl(moved_by(algo.terms, step, policy), reference) < kl(policy, reference)


@pytest.mark.parametrize("length", LENGTHS)
def test_kl_in_the_reward_alone_pulls_to_the_reference(length):
    holds(kl_in_the_reward_pulls, [name for name, preset in PRESETS.items() if preset.kl_reward], length=length)


def entropy_rises(name, length):
    assert "entropy_loss" not in [t.name for t in algorithm(name).terms], "off by default, as in the papers"
    algo, policy = algorithm(name, **{**OFF, "entropy_coef": 0.1}), Policy(DRAWN, length)
    after = moved_by(algo.terms, prepared(algo, policy, ON_POLICY, [0.0] * 8), policy)
    assert float((after.entropy() - policy.entropy()).sum().detach()) > 0


@pytest.mark.parametrize("length", LENGTHS)
def test_entropy_alone_raises_the_entropy(length):
    holds(entropy_rises, length=length)


def first_gradient(name):
    """On policy: -sum w A (1[v = a] - p_v); clipping and ratios are not active yet."""
    algo, actions, s = algorithm(name, kl_loss_coef=0.0), torch.tensor([0, 1, 1, 0, 1]), f64(1.0, 0.0, 0.5, 0.0, -1.0)
    policy, n = Policy([0.62, 0.38], 1), 5
    step = prepared(algo, policy, actions, s.tolist(), baseline=0.2, values=0.3)
    g = gradient([t for t in algo.terms if t.name == "pg_loss"], step, policy)[0]
    p = policy.logp()[0].exp().detach()
    centred = s - s.mean()
    grpo, white = centred / (s.std() + 1e-6), centred / (s.var() + 1e-8).sqrt()
    others = [torch.cat([s[:i], s[i + 1 :]]) for i in range(n)]
    norm = (1 - 2 * p + (p**2).sum())[actions]  # the squared norm of the score function
    a = {
        **dict.fromkeys(
            ("grpo", "dapo", "gspo", "gspo_token", "cispo", "sapo", "gmpo", "kl_cov", "clip_cov", "decoupled_ppo"), grpo
        ),
        **dict.fromkeys(("dppo_tv", "dppo_kl", "opd", "iw_opd", "turn_discount", "gigpo", "luspo", "vespo"), grpo),
        **dict.fromkeys(("drgrpo", "gpg", "opo", "dro", "intellect_ipo"), centred),
        "max_rl": centred / s.mean(),
        **dict.fromkeys(
            ("ppo", "vapo", "pf_ppo", "turn_ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"), white
        ),
        "grpo_loo": torch.stack([(x - o.mean()) / (o.std() + 1e-6) for x, o in zip(s, others)]),
        "rloo": (n * s - s.sum()) / (n - 1),
        "reinforce": s,
        "remax": s - 0.2,
        "pass_at_k": f64(0.5, 0, 0, 0, 0) / (s.std() + 1e-6),
        "gdpo": 2 * grpo / ((2 * grpo).var() + 1e-8).sqrt(),
        "otb": s - (norm * s).sum() / (norm.sum() + 1e-8),
    }
    assert name in a, f"give the closed form of {name} here"
    horizon = 3 if name == "drgrpo" else 1
    onehot = torch.nn.functional.one_hot(actions, 2)
    expected = -(a[name][:, None] * (onehot - p)).sum(0) / (n * horizon)
    # a component of gdpo that is half the score is divided by half the deviation, to which the same 1e-6 is added
    torch.testing.assert_close(g, expected, rtol=1e-5 if name == "gdpo" else 1e-9, atol=1e-12)


def test_the_first_gradient_is_the_policy_gradient_in_closed_form():
    holds(first_gradient)


ARMS = torch.tensor([0.0, 0.2, 1.0], dtype=torch.float64)
GROUPS = 4
PULLS = {
    "pass_at_k": 2
}  # a group with two best answers has passed and teaches nothing: of 8, p stays where one is sure


def bandit_is_solved(name):
    """Three arms, 4 x 8 pulls a step, two updates on each: the best arm, drawn least at first, gets p > 0.9."""
    algo = algorithm(name)
    policy, start = Policy([0.4, 0.4, 0.2], 1), Policy([0.4, 0.4, 0.2], 1)
    actor = torch.optim.Adam([policy.logits], lr=0.03)
    critic = torch.optim.Adam([policy.values], lr=0.05)
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    n = PULLS.get(name, 8)
    for i in range(300):
        with torch.no_grad():
            p = policy.logp().exp()[0]
        pulls = torch.multinomial(p, GROUPS * n, replacement=True, generator=generator).view(GROUPS, n)
        groups = [g for g in pulls if algo.group_filter.select(ARMS[g].tolist()) == "keep"]
        if algo.sample_filter:
            groups = [g[algo.sample_filter.choose(ARMS[g].tolist(), rng)] for g in groups]
        if not groups:
            continue
        actions = torch.cat(groups)
        greedy = float(ARMS[int(p.argmax())])
        step = prepared(
            algo, policy, actions, ARMS[actions], groups=len(groups), reference=start, baseline=greedy, moved=True
        )
        if algo.critic:
            critic.zero_grad()
            loss_of(algo.value_terms, step, policy).backward()
            critic.step()
        if algo.critic and i < algo.critic.critic_warmup_steps:
            continue
        for _ in range(2):
            actor.zero_grad()
            loss_of(algo.terms, step, policy).backward()
            actor.step()
        if policy.probability(2) > 0.95:
            break
    assert policy.probability(2) > 0.9


@pytest.mark.slow
def test_every_preset_solves_a_bandit():
    holds(bandit_is_solved)


# -- estimators --------------------------------------------------------------------------------------------------------

GROUPED = {"grpo": adv.grpo, "drgrpo": lambda c: adv.grpo(c, normalize_by_std=False), "rloo": adv.rloo}


def fed(estimator, **options):
    """The estimator with whatever it asks for: the same for every token, so that order cannot show."""

    def call(c: Columns):
        constant = {"old_values": 0.3, "old_logprobs": -0.7, "sum_pi_squared": 0.4}
        constant |= {"teacher_logprobs": -0.9, "rollout_logprobs": -0.7}
        score = c.sequence["score"]
        sequence = {"baseline": torch.full_like(score, 0.5), "component/a": score, "component/b": score**2}
        c = replace(c, sequence={**c.sequence, **sequence})
        return estimator(
            c.with_token({n: torch.full((len(c.mask),), x, dtype=F64) for n, x in constant.items()}), **options
        )

    return call


SIGNAL = {  # exactly 0 for a group of one or without variance
    **GROUPED,
    "grpo_loo": fed(adv.grpo, leave_one_out=True),
    "grpo_batch": fed(adv.grpo, scale_rewards="batch"),
    "opo": fed(adv.opo),
    "gpg": fed(adv.gpg),
    "pass_at_k": fed(adv.pass_at_k),
    "gdpo": fed(adv.gdpo, reward_components=("a", "b")),
    "otb": fed(adv.otb),
    "turn_discount": fed(turns.turn_discount),
    "gigpo": fed(turns.gigpo),
    "max_rl": fed(adv.max_rl),
}
EVERY = {
    **SIGNAL,
    "turn_gae": fed(turns.turn_gae, lam=0.9),
    "gae": fed(adv.gae, lam=0.9),
    "remax": fed(adv.remax),
    "vapo": fed(adv.gae, lam_critic=1.0, length_adaptive_alpha=0.5),
    "rf++": adv.reinforce_plus_plus,
    "rf++_baseline": adv.reinforce_plus_plus_baseline,
    "reinforce": adv.reward_to_go,
    "opd": fed(adv.opd, gamma=0.5, reward_coef=0.3),
    "iw_opd": fed(adv.opd, prefix_gain=0.5),
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


def order_and_names(name, data, random):
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


def group_sums(name, data):
    scores, ids, tokens, valid = data
    c = columns(scores, ids, tokens=tokens, valid=valid)
    a = GROUPED[name](c)["advantages"]
    for g in set(ids):
        usable = [i for i, x in enumerate(ids) if x == g and valid[i] and tokens[i]]
        per_sequence = [float(a[c.sequence_of == i][0]) for i in usable]
        assert sum(per_sequence) == pytest.approx(0, abs=1e-9)
        values = [scores[i] for i in usable]
        if len(usable) < 2 or max(values) - min(values) <= 1e-6:
            assert per_sequence == [0.0] * len(usable), "exactly 0, also for scores like 0.1"
        elif name == "grpo":
            expected = (np.array(values) - np.mean(values)) / (np.std(values, ddof=1) + 1e-6)
            assert per_sequence == pytest.approx(expected.tolist())
        else:
            factor = len(values) / (len(values) - 1) if name == "rloo" else 1
            assert per_sequence == pytest.approx((factor * (np.array(values) - np.mean(values))).tolist())


def no_signal(name, data):
    scores, ids, tokens, valid = data
    c = columns(scores, ids, tokens=tokens, valid=valid)
    a = SIGNAL[name](c)["advantages"]
    for g in set(ids):
        members = [i for i, x in enumerate(ids) if x == g and valid[i] and tokens[i]]
        values = [scores[i] for i in members]
        if len(members) < 2 or max(values) - min(values) <= 1e-6:
            assert not any(a[c.sequence_of == i].any() for i in members)


@settings(max_examples=40, deadline=None)
@given(data=ragged(), random=st.randoms(use_true_random=False))
def test_advantages_depend_on_groups_and_not_on_order_or_names(data, random):
    holds(order_and_names, EVERY, data=data, random=random)


@settings(max_examples=40, deadline=None)
@given(data=ragged())
def test_group_estimators_sum_to_zero_and_ignore_what_carries_no_signal(data):
    holds(group_sums, GROUPED, data=data)
    holds(no_signal, SIGNAL, data=data)


def invalid_is_in_no_statistic(name):
    estimator, with_invalid = EVERY[name], columns([1.0, 0.0, 99.0], ["g"] * 3, valid=[True, True, False])
    a = estimator(with_invalid)["advantages"]
    torch.testing.assert_close(a[:2], estimator(columns([1.0, 0.0], ["g"] * 2))["advantages"])
    assert a[2] == 0


def nothing_trainable(name):
    c = columns([1.0, 0.0], ["g", "g"], tokens=2, mask=[False] * 4)
    assert EVERY[name](c)["advantages"].tolist() == [0, 0, 0, 0]
    empty = columns([1.0, 0.0], ["g", "g"], tokens=[0, 0])
    assert EVERY[name](empty)["advantages"].shape == (0,)


@pytest.mark.parametrize("law", [invalid_is_in_no_statistic, nothing_trainable], ids=lambda f: f.__name__)
def test_what_carries_no_reward_or_token(law):
    holds(law, EVERY)


# -- losses ------------------------------------------------------------------------------------------------------------

LOSSES = {
    "ppo": losses.ppo_clip,
    "ppo_dual": partial(losses.ppo_clip, clip_dual=3.0, ratio_max=5.0),
    "reinforce": losses.reinforce,
    "gspo": losses.gspo,
    "gspo_token": losses.gspo_token,
    "cispo": losses.cispo,
    "sapo": losses.sapo,
    "gmpo": losses.gmpo,
    "kl_cov": partial(losses.kl_cov, cov_ratio=0.2),
    "clip_cov": partial(losses.clip_cov, cov_ratio=0.2, cov_low=0.0),
    "dppo_tv": losses.dppo_tv,
    "dppo_kl": losses.dppo_kl,
    "dro": losses.dro,
    "vespo": losses.vespo,
    "vespo_weighed": partial(losses.vespo, weighed="token"),
    "intellect_ipo": losses.intellect_ipo,
    "opsm": partial(losses.off_policy_sequence_mask, inner=losses.ppo_clip, delta=0.1),
    "bypass": partial(losses.bypass_reinforce, correction=Correction(form="truncate", high=2.0)),
    "kl": partial(losses.kl_loss, ratio_corrected=True),
    "value": losses.value_clip,
}
NAMES = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages", "old_values", "returns")
PARTS = [3, 1, 4, 2]


def case(seed, mask, garbage=None):
    g = torch.Generator().manual_seed(seed)
    token = {n: torch.randn(10, generator=g, dtype=F64) for n in (*NAMES, "logprobs", "values")}
    token["is_weights"] = torch.rand(10, generator=g, dtype=F64) * 2
    c = columns([0.0] * 4, tokens=PARTS, mask=mask)
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


def mask_is_kept(name, seed, mask, garbage):
    loss, grad, _ = total(LOSSES[name], case(seed, mask))
    dirty_loss, dirty_grad, value = total(LOSSES[name], case(seed, mask, garbage))
    torch.testing.assert_close(dirty_loss, loss)
    torch.testing.assert_close(dirty_grad, grad)
    assert not grad[~torch.tensor(mask)].any()
    assert value.values.shape == (10,) and all(
        x.shape == (10,) and not x.requires_grad for x, _ in value.metrics.values()
    )


def order_of_sequences(name, seed, mask):
    c = case(seed, mask)
    order = [2, 0, 3, 1]
    at = torch.cat([torch.nonzero(c.sequence_of == i)[:, 0] for i in order])
    moved = replace(
        c,
        token={n: x[at] for n, x in c.token.items()},
        mask=c.mask[at],
        sequence_of=torch.arange(4).repeat_interleave(torch.tensor([PARTS[i] for i in order])),
    )
    (loss, grad, _), (moved_loss, moved_grad, _) = total(LOSSES[name], c), total(LOSSES[name], moved)
    torch.testing.assert_close(moved_loss, loss)
    torch.testing.assert_close(moved_grad, grad[at])


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 999), mask=masks, garbage=st.sampled_from([float("nan"), math.inf, -math.inf, -1e30]))
def test_nothing_outside_the_mask_reaches_value_or_gradient(seed, mask, garbage):
    holds(mask_is_kept, LOSSES, seed=seed, mask=mask, garbage=garbage)
    holds(order_of_sequences, LOSSES, seed=seed, mask=mask)
    holds(parts_of_a_step, [n for n in LOSSES if n not in ("kl_cov", "clip_cov")], seed=seed, mask=mask)


def parts_of_a_step(name, seed, mask):
    """Whole sequences may be split into micro-batches."""
    c = case(seed, mask)
    weight, parts = weight_column(c, "seq-mean-token-mean"), 0.0
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


def zero_of_nothing(name):
    loss, grad, _ = total(LOSSES[name], case(0, [False] * 10, float("nan")))
    assert loss == 0 and not grad.any()


def no_advantage_no_gradient(name):
    c = case(1, [True] * 10)
    c = c.with_token({"advantages": torch.zeros(10, dtype=F64), "old_logprobs": c["logprobs"]})
    loss, grad, _ = total(LOSSES[name], c)
    assert loss == 0 and not grad.any()


def far_ratio_is_finite(name):
    c = case(2, [True] * 10)
    for d in (-1000.0, 1000.0):
        loss, grad, _ = total(LOSSES[name], c.with_token({"old_logprobs": c["logprobs"] - d}))
        assert loss.isfinite() and grad.isfinite().all()


def test_losses_at_their_edges():
    holds(zero_of_nothing, LOSSES)
    holds(no_advantage_no_gradient, [n for n in LOSSES if n not in ("kl", "value", "dro", "reinforce", "bypass")])
    holds(far_ratio_is_finite, [n for n in LOSSES if n not in ("kl", "value", "dro", "bypass")])


def test_without_old_logprobs_the_policy_has_not_moved():
    c = case(3, [True] * 10)
    same = replace(c, token={n: x for n, x in c.token.items() if n != "old_logprobs"})
    for name in ("ppo", "gspo", "cispo", "sapo", "gmpo", "kl_cov", "dppo_tv", "dppo_kl"):
        _, grad, _ = total(LOSSES[name], same)
        _, expected, _ = total(LOSSES[name], c.with_token({"old_logprobs": c["logprobs"]}))
        torch.testing.assert_close(grad, expected)
        assert grad.any()


# -- the one division --------------------------------------------------------------------------------------------------


def weights_are_the_definition(aggregate):
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
        corrected="token",
    )
    corrected = term_weights(columns.with_token({"is_weights": torch.full((7,), 2.0)}), (term,))["w/x"]
    torch.testing.assert_close(corrected, -w)


def test_weights_are_the_definitions_times_the_coefficient():
    holds(weights_are_the_definition, AGGREGATIONS)
