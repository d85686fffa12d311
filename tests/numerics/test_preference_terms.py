"""Preference terms as they are trained, on columns by hand: from token log-probs to loss and gradient."""

import math

import pytest
import torch

from verl.algorithms.preference import CHOSEN, REJECTED, preference_terms
from verl.batch import Columns

F64 = torch.float64
CHOSEN_LP, REJECTED_LP = [-0.5, -1.0, -0.25, -2.0], [-1.5, -0.75]


def pair(chosen=CHOSEN_LP, rejected=REJECTED_LP, ref=None, mask=None) -> Columns:
    """One pair as columns; ref: the reference's log-probs, chosen before rejected (None: those of the policy)."""
    n, m = len(chosen), len(rejected)
    lp = torch.tensor([*chosen, *rejected], dtype=F64)
    token = {
        "logprobs": lp.clone().requires_grad_(),
        "ref_logprobs": lp if ref is None else torch.tensor(ref, dtype=F64),
        "side": torch.tensor([CHOSEN] * n + [REJECTED] * m, dtype=F64),
        "pair": torch.zeros(n + m, dtype=F64),
        "gap": torch.ones(n + m, dtype=F64),
    }
    mask = torch.ones(n + m, dtype=torch.bool) if mask is None else torch.tensor(mask)
    return Columns(token=token, sequence={}, sequence_of=torch.tensor([0] * n + [1] * m), num_sequences=2, mask=mask)


def trained(name, columns, **options) -> tuple[float, list[float]]:
    """(loss of the pair, its gradient by the log-probs) as the term gives them."""
    [term] = preference_terms(name, beta=options.pop("beta", 0.5), options=options)
    values = term.fn(columns).values
    loss = values.sum() / 2  # the mean over the two sequences
    (grad,) = torch.autograd.grad(loss, columns["logprobs"])
    return float(loss.detach()), grad.tolist()


def test_equal_models_give_log_2_whatever_the_lengths():
    for alpha in (0.0, 0.5, 1.0):
        assert trained("ld_dpo", pair(), ld_alpha=alpha)[0] == pytest.approx(math.log(2), abs=1e-12), alpha


def test_ld_dpo_counts_the_tokens_beyond_the_other_answer_less_in_both_models():
    ref = [-1.0, -1.0, -1.0, -1.0, -1.0, -1.0]
    loss, grad = trained("ld_dpo", pair(ref=ref), ld_alpha=0.25)
    h = (0.5 + 0.0) + 0.25 * (0.75 - 1.0) - (-0.5 + 0.25)
    assert loss == pytest.approx(math.log(1 + math.exp(-0.5 * h)), rel=1e-12)
    pull = 0.5 / (1 + math.exp(0.5 * h))
    assert grad == pytest.approx([-pull, -pull, -0.25 * pull, -0.25 * pull, pull, pull], rel=1e-12)
