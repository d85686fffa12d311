"""KTO by hand: the judged rows, the reference point, and the pairs of prompts and mismatched answers."""

import math

import numpy as np
import torch
from small_columns import F64, f64

from verl.algorithms.preference import CHOSEN, MISMATCHED, REJECTED, preference_terms
from verl.algorithms.weights import term_weights
from verl.batch import Columns
from verl.chat import Rendered
from verl.data.preference import Pair
from verl.driver.stages import PreferenceStage


def loss_and_gradient(sides, ratios, **settings):
    """One token per answer; ratios: log pi / pi_ref of each."""
    n = len(sides)
    lp = f64(*ratios).requires_grad_()
    token = {"side": f64(*sides), "pair": torch.arange(n, dtype=F64), "ref_logprobs": torch.zeros(n, dtype=F64)}
    c = Columns(
        token={**token, "logprobs": lp},
        sequence={},
        sequence_of=torch.arange(n),
        num_sequences=n,
        mask=torch.ones(n, dtype=torch.bool),
    )
    (term,) = preference_terms("kto", beta=0.5, options=settings)
    loss = (term_weights(c, (term,))["w/loss"] * term.fn(c).values).sum()
    (grad,) = torch.autograd.grad(loss, lp)
    return float(loss.detach()), grad


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_kto_judges_its_own_rows_against_the_mismatched_ones():
    sides = (CHOSEN, MISMATCHED, REJECTED, MISMATCHED)
    for ratios, z0 in (((0.8, 1.0, -0.4, 0.2), 0.6), ((0.8, -3.0, -0.4, 1.0), 0.0)):
        loss, grad = loss_and_gradient(sides, ratios, desirable_weight=1.5, undesirable_weight=0.5)
        good, bad = sigmoid(0.5 * (ratios[0] - z0)), sigmoid(0.5 * (z0 - ratios[2]))
        assert math.isclose(loss, (1.5 * (1 - good) + 0.5 * (1 - bad)) / 2, rel_tol=1e-12)
        expected = f64(-1.5 * 0.5 * good * (1 - good) / 2, 0, 0.5 * 0.5 * bad * (1 - bad) / 2, 0)
        torch.testing.assert_close(grad, expected)


def rendered(prompt, answer):
    return Rendered(np.array([*prompt, *answer]), np.array([False] * len(prompt) + [True] * len(answer)))


class Rows(list):
    """A table of pairs in memory."""


def test_the_mismatched_answer_is_the_next_rows_under_this_rows_prompt():
    rows = Rows(
        Pair(rendered(p, a), None, desirable=d)
        for p, a, d in (([1, 2], [5, 6, 7], True), ([3], [8], False), ([4, 4, 4], [9, 9], True))
    )
    stage = PreferenceStage(rows, (), paired=False)
    found = [[(side, r.ids.tolist(), r.mask.tolist()) for side, r in stage.entries(i)] for i in range(3)]
    t, f = True, False
    assert found == [
        [(CHOSEN, [1, 2, 5, 6, 7], [f, f, t, t, t]), (MISMATCHED, [1, 2, 8], [f, f, t])],
        [(REJECTED, [3, 8], [f, t]), (MISMATCHED, [3, 9, 9], [f, t, t])],
        [(CHOSEN, [4, 4, 4, 9, 9], [f, f, f, t, t]), (MISMATCHED, [4, 4, 4, 5, 6, 7], [f, f, f, t, t, t])],
    ]


def test_a_pairs_sides_stand_beside_their_own_answers():
    rows = Rows(
        [Pair(rendered([1], [2, 3]), rendered([1], [4]), gap=0.5), Pair(rendered([5], [6]), rendered([5], [7, 8]))]
    )
    samples, columns = PreferenceStage(rows, (), paired=True).rows([1, 0], ["a", "b"], str)
    ids = [np.concatenate([s.ids for s in sample.segments]).tolist() for sample in samples]
    assert ids == [[5, 6], [5, 7, 8], [1, 2, 3], [1, 4]]
    assert columns["side"].tolist() == [CHOSEN, REJECTED, REJECTED, CHOSEN, CHOSEN, REJECTED]
    assert columns["pair"].tolist() == [0, 0, 0, 1, 1, 1] and columns["gap"].tolist() == [0, 0, 0, 0.5, 0.5, 0.5]
