"""Advantages by turn, by hand: two answers to one prompt, the first of two turns, the second of three."""

from dataclasses import replace

import pytest
import torch
from small_columns import F64, columns, f64

from verl.algorithms.estimators import gae, grpo
from verl.algorithms.turns import gigpo, turn_discount, turn_gae

EPS = 1e-6


def played():
    """A: turns of 2 and 1 tokens, rewards 1 and 0, score 2. B: turns of 1, 2 and 1, rewards 0, 3, 0, score 1.

    Turn A0 and B0 are played in state 7, A1 and B2 in state 8, B1 in state 9."""
    token = {
        "side/turn": torch.tensor([0, 0, 1, 0, 1, 1, 2]),
        "side/turn_reward": torch.tensor([0, 1.0, 0, 0, 0, 3, 0]),
        "side/turn_state": torch.tensor([7, 7, 8, 7, 9, 9, 8]),
        "old_values": f64(0.5, 9, 1, 0.25, 2, 9, 0.5),
    }
    return columns([2.0, 1.0], ["g", "g"], tokens=[3, 4], token=token)


A0, A1, B0, B1, B2 = 1 + 0.5 * 2, 2.0, 0.5 * (3 + 0.5 * 1), 3 + 0.5 * 1, 1.0  # discounted by 0.5


def spread(*values):
    """(x - mean) / (std + eps), Bessel."""
    x = f64(*values)
    return (x - x.mean()) / (x.std(correction=1) + EPS)


def test_returns_over_turns():
    a0, a1, b0, b1, b2 = spread(A0, A1, B0, B1, B2)
    found = turn_discount(played(), turn_discount=0.5)["advantages"]
    torch.testing.assert_close(found, torch.stack([a0, a0, a1, b0, b1, b1, b2]))
    plain = turn_discount(played(), turn_discount=0.5, normalize_by_std=False)["advantages"]
    mean = (A0 + A1 + B0 + B1 + B2) / 5
    torch.testing.assert_close(plain, f64(A0, A0, A1, B0, B1, B1, B2) - mean)


def test_gigpo_compares_trajectories_and_turns_of_one_state():
    episode = spread(1 + 2, 3 + 1)
    start, end = spread(A0, B0), spread(A1, B2)  # states 7 and 8; B1 is alone in its own
    a0, a1 = episode[0] + 0.5 * start[0], episode[0] + 0.5 * end[0]
    b0, b1, b2 = episode[1] + 0.5 * start[1], episode[1], episode[1] + 0.5 * end[1]
    found = gigpo(played(), turn_discount=0.5, step_coef=0.5)["advantages"]
    torch.testing.assert_close(found, torch.stack([a0, a0, a1, b0, b1, b1, b2]))
    # The same state in another group is not compared with.
    c = columns([2.0, 1.0], ["g", "h"], tokens=[3, 4], token=dict(played().token))
    assert gigpo(c)["advantages"].abs().max() == 0


def test_gae_over_turns():
    lam = 0.8
    b2 = 1 - 0.5
    b1 = 3 + 0.5 - 2 + lam * b2
    b0 = 0 + 2 - 0.25 + lam * b1
    a1 = 2 - 1
    a0 = 1 + 1 - 0.5 + lam * a1
    raw = f64(a0, a0, a1, b0, b1, b1, b2)
    found = turn_gae(played(), gamma=1.0, lam=lam)
    torch.testing.assert_close(found["advantages"], (raw - raw.mean()) / (raw.var(correction=1) + 1e-8).sqrt())
    torch.testing.assert_close(found["returns"], raw + f64(0.5, 0.5, 1, 0.25, 2, 2, 0.5))


@pytest.mark.parametrize("estimator", [turn_discount, gigpo, turn_gae])
def test_rows_of_a_branched_trajectory_are_one(estimator):
    """B's turns are in two rows, of which the second is after A's: the numbers of turns count, not their rows."""
    whole = played()
    order = torch.tensor([3, 0, 1, 2, 4, 5, 6])  # B0 | A0 A0 A1 | B1 B1 B2
    token = {name: column[order] for name, column in whole.token.items()}
    cut = replace(whole, token=token, sequence_of=whole.sequence_of[order])
    torch.testing.assert_close(estimator(cut)["advantages"], estimator(whole)["advantages"][order])


def test_one_turn_each_is_grpo_and_invalid_ones_are_nowhere():
    scores, groups = [1.0, 0.0, 0.5, 2.0, 2.0], ["g", "g", "g", "h", "h"]
    plain = columns(scores, groups, tokens=[2, 1, 3, 1, 2])
    for fn in (turn_discount, gigpo):
        torch.testing.assert_close(fn(plain)["advantages"], grpo(plain)["advantages"])
    broken = columns(scores, groups, tokens=[2, 1, 3, 1, 2], valid=[True, False, True, True, True])
    for fn in (turn_discount, gigpo):
        torch.testing.assert_close(fn(broken)["advantages"], grpo(broken)["advantages"])
    one = columns(scores, groups, token={"old_values": f64(0.1, 0.2, 0.3, 0.4, 0.5)})  # a token each
    torch.testing.assert_close(turn_gae(one, lam=0.7)["advantages"], gae(one, lam=0.7)["advantages"])
    nothing = columns(scores[:2], groups[:2], valid=[False, False], token={"old_values": torch.zeros(2, dtype=F64)})
    assert all(fn(nothing)["advantages"].abs().max() == 0 for fn in (turn_discount, gigpo, turn_gae))
