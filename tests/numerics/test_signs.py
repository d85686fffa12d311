"""For every row of the table, without anyone asking: its own terms push the right way (float64, a tabular softmax policy).

A better reward raises an action's probability, a bandit is solved, KL alone pulls to the reference, entropy alone raises
the entropy, values move to the returns; and where all rewards of a group are equal the gradient is exactly 0.
"""

import functools
import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from verl.algorithms.advantages import token_rewards
from verl.algorithms.kl_reward import kl_penalty
from verl.algorithms.table import TABLE, resolve

from verl.algorithms.corrections import correct
from verl.algorithms.weights import term_weights
from verl.batch import Batch, pack
from verl.model_engine.objective import evaluate_terms
from verl.types import Refs, Sample, Segment, ref_of
from verl.workers.role import columns_of

NEEDED = {"drgrpo": {"horizon_tokens": 3}, "gdpo": {"reward_components": ["a", "b"]}}
ROWS = sorted(TABLE)
CRITICS = [name for name in ROWS if resolve(name, NEEDED.get(name)).critic]
NO_BASELINE = ("reinforce", "gae")  # estimators that leave a gradient where all rewards are equal
ACROSS_GROUPS = ("reinforce_plus_plus", "remax")  # a baseline that is not the group's mean
LENGTHS = (1, 3)
OFF = {"kl_loss_coef": 0.0, "kl_reward_coef": 0.0, "entropy_coef": 0.0}


def algorithm(name, **settings):
    return resolve(name, {**NEEDED.get(name, {}), **settings})


class Policy:
    """Logits [T, K]: the token at each place of an answer, whatever came before; values [T]."""

    def __init__(self, probabilities, length: int) -> None:
        logits = torch.tensor(probabilities, dtype=torch.float64).log()
        self.logits = logits.repeat(length, 1).requires_grad_()
        self.values = torch.zeros(length, dtype=torch.float64, requires_grad=True)

    def logp(self) -> torch.Tensor:
        return self.logits.log_softmax(-1)

    def probability(self, action: int) -> float:
        """Of the answer `action`, `action`, ..."""
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
        "sum_pi_squared": now["sum_pi_squared"],
        "old_values": now["values"] + values,
    }
    columns = columns_of(refs, stored, {r.group_id: baseline for r in refs})
    if algo.correction is not None:
        stored |= {k: v for k, v in correct(columns, algo.correction).items() if k in ("is_weights", "keep")}
    penalty = None
    if algo.kl_reward is not None:
        penalty, _ = kl_penalty(columns, coef=algo.kl_reward.coef, form=algo.kl_reward.form)
    stored |= algo.advantage(columns.with_token({"rewards": token_rewards(columns, penalty)}))
    if not moved and "old_logprobs" not in algo.needs(1):
        del stored["old_logprobs"]  # the default: one update per step, so no pass for it
    weights = term_weights(columns_of(refs, stored), (*algo.terms, *algo.value_terms))
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


@pytest.mark.parametrize("moved", [False, True], ids=["first_update", "old_logprobs"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ROWS)
def test_a_better_reward_raises_the_probability(name, length, moved):
    algo = algorithm(name)
    for action in range(4):
        policy = Policy(UNEVEN, length)
        rewards = one_differs(action, 1.0)
        step = prepared(algo, policy, torch.arange(4), rewards, baseline=0.0, values=0.25, moved=moved)
        after = moved_by(algo.terms, step, policy)
        assert after.probability(action) > policy.probability(action), f"action {action}"


@pytest.mark.parametrize("moved", [False, True], ids=["first_update", "old_logprobs"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ROWS)
def test_a_worse_reward_lowers_the_probability(name, length, moved):
    algo = algorithm(name)
    for action in range(4):
        policy = Policy(UNEVEN, length)
        rewards = one_differs(action, -1.0)
        if name == "pass_at_k":  # only a sole best answer has an advantage; the others lose what it gains
            rewards[(action + 1) % 4] = 0.5
        step = prepared(algo, policy, torch.arange(4), rewards, baseline=0.0, values=-0.25, moved=moved)
        after = moved_by(algo.terms, step, policy)
        assert after.probability(action) < policy.probability(action), f"action {action}"


@pytest.mark.parametrize("name", CRITICS)
@pytest.mark.parametrize("length", LENGTHS)
def test_values_move_to_the_returns(name, length):
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
@pytest.mark.parametrize("name", ROWS)
def test_equal_rewards_have_no_gradient(name, length):
    """0.1 is no float: a mean of equal rewards may miss it by rounding, which a division would raise to noise."""
    algo, policy = algorithm(name), Policy(UNEVEN, length)
    equal = 0.0 if TABLE[name].estimator in NO_BASELINE else 0.1
    other = equal if TABLE[name].estimator in (*NO_BASELINE, *ACROSS_GROUPS) else 0.7
    actions = torch.tensor([0, 1, 2, 0, 1, 3])
    step = prepared(algo, policy, actions, [equal] * 3 + [other] * 3, groups=2, baseline=equal)
    assert float(gradient(algo.terms, step, policy).abs().sum()) == 0.0


ON_POLICY = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])  # exactly as often as the policy below draws them
DRAWN = [0.5, 0.25, 0.125, 0.125]


def kl(p: Policy, q: Policy) -> float:
    return float((p.logp().exp() * (p.logp() - q.logp())).sum().detach())


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ROWS)
def test_kl_alone_pulls_to_the_reference(name, length):
    """On answers drawn exactly in proportion, k3's gradient is that of KL(ref || pi) and k2's that of KL(pi || ref) (3.1)."""
    algo = algorithm(name, **{**OFF, "kl_loss_coef": 0.1})
    policy, reference = Policy(DRAWN, length), Policy([0.1, 0.2, 0.3, 0.4], length)
    step = prepared(algo, policy, ON_POLICY, [0.0] * 8, reference=reference)
    after = moved_by(algo.terms, step, policy)
    assert kl(after, reference) < kl(policy, reference) and kl(reference, after) < kl(reference, policy)
    p, q = policy.logp(), reference.logp().detach()
    forward = algo.settings["kl_loss_form"] == "k3"
    exact = (q.exp() * (q - p)).sum() if forward else (p.exp() * (p - q)).sum()
    expected = torch.autograd.grad(exact, policy.logits)[0]
    assert cosine(gradient(algo.terms, step, policy), expected) == pytest.approx(1, abs=1e-9)
    at_home = prepared(algo, policy, ON_POLICY, [0.0] * 8)
    assert float(gradient(algo.terms, at_home, policy).abs().sum()) < 1e-15


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", [n for n in ROWS if TABLE[n].kl_reward_coef])
def test_kl_in_the_reward_alone_pulls_to_the_reference(name, length):
    algo = algorithm(name)
    policy, reference = Policy(DRAWN, length), Policy([0.1, 0.2, 0.3, 0.4], length)
    step = prepared(algo, policy, ON_POLICY, [0.0] * 8, reference=reference)
    assert kl(moved_by(algo.terms, step, policy), reference) < kl(policy, reference)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ROWS)
def test_entropy_alone_raises_the_entropy(name, length):
    algo = algorithm(name, **{**OFF, "entropy_coef": 0.1})
    policy = Policy(DRAWN, length)
    step = prepared(algo, policy, ON_POLICY, [0.0] * 8)
    after = moved_by(algo.terms, step, policy)
    assert float((after.entropy() - policy.entropy()).sum().detach()) > 0


ARMS = torch.tensor([0.0, 0.2, 1.0], dtype=torch.float64)
GROUPS = 4
PULLS = {
    "pass_at_k": 2
}  # a group with two best answers has passed and teaches nothing: of 8, p stays where one is sure


@pytest.mark.parametrize("name", ROWS)
def test_a_bandit_is_solved(name):
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
        groups = [g for g in pulls if algo.select(ARMS[g].tolist()) == "keep"]
        if algo.choose is not None:
            groups = [g[algo.choose(ARMS[g].tolist(), rng)] for g in groups]
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
        if algo.critic and i < algo.critic_warmup_steps:
            continue
        for _ in range(2):
            actor.zero_grad()
            loss_of(algo.terms, step, policy).backward()
            actor.step()
        if policy.probability(2) > 0.95:
            break
    assert policy.probability(2) > 0.9
