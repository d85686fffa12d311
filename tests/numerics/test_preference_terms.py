"""Preference terms as they are trained, on columns by hand: from token log-probs to loss and gradient."""

import math
from dataclasses import replace

import pytest
import torch

from verl.algorithms.preference import CHOSEN, REJECTED, odds_ratio, preference_terms, reward_terms
from verl.algorithms.presets import PREFERENCES
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
    own = {n: c for n, c in columns.token.items() if n != "ref_logprobs" or n in term.inputs}
    values = term.fn(replace(columns, token=own)).values
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


# -- every loss and option by hand -------------------------------------------------------------------------------------

REF = [-0.75, -0.5, -0.5, -1.0, -1.0, -1.0]
W, L = (-0.5 + 0.75) + (-1.0 + 0.5) + (-0.25 + 0.5) + (-2.0 + 1.0), (-1.5 + 1.0) + (-0.75 + 1.0)  # log-ratios
NLL = 3.75  # of the chosen answer's four tokens


def log_sigmoid(x):
    return -math.log(1 + math.exp(-x))


def smoothed(x, e):
    return -(1 - e) * log_sigmoid(x) - e * log_sigmoid(-x)


H, AVERAGED = 0.5 * (W - L), 0.5 * (W / 4 - L / 2)
RAW, RAW_AVERAGED = 0.5 * (-3.75 + 2.25), 0.5 * (-3.75 / 4 + 2.25 / 2)  # without a reference
BY_HAND = [
    ("dpo", {}, smoothed(H, 0)),
    ("dpo", {"average": True, "label_smoothing": 0.2}, smoothed(AVERAGED, 0.2)),
    (
        "robust",
        {"label_smoothing": 0.2, "average": True},
        (smoothed(AVERAGED, 0.2) + 0.4 * log_sigmoid(-AVERAGED)) / 0.6,
    ),
    ("hinge", {"average": True}, 1 - AVERAGED),
    ("sppo", {}, (W - 1) ** 2 + (L + 1) ** 2),
    ("nca", {}, -log_sigmoid(0.5 * W) - 0.5 * log_sigmoid(-0.5 * W) - 0.5 * log_sigmoid(-0.5 * L)),
    ("rpo", {"average": True, "alpha": 2.0}, smoothed(AVERAGED, 0) + 2 * NLL / 4),
    ("rpo", {"normalization": "sum", "label_smoothing": 0.1}, smoothed(H, 0.1) + NLL),
    ("rpo_sq", {"average": True, "eta": 2.0}, (AVERAGED - 2.0) ** 2),
    ("simpo", {"gamma": 0.3, "label_smoothing": 0.1}, smoothed(RAW_AVERAGED - 0.3, 0.1)),
    ("cpo", {"normalization": "sum", "label_smoothing": 0.1, "alpha": 0.5}, smoothed(RAW, 0.1) + 0.5 * NLL),
]


def test_losses_and_options_by_hand_and_their_gradients_by_differences():
    wrong = {}
    for name, options, expected in BY_HAND:
        loss, grad = trained(name, pair(ref=REF), **options)
        step, lp = 1e-6, [*CHOSEN_LP, *REJECTED_LP]
        for i, g in enumerate(grad):
            up, down = ([x + s * step * (k == i) for k, x in enumerate(lp)] for s in (1, -1))
            high, low = (trained(name, pair(x[:4], x[4:], ref=REF), **options)[0] for x in (up, down))
            if g != pytest.approx((high - low) / (2 * step), abs=1e-7):
                wrong[name, i] = (g, (high - low) / (2 * step))
        if loss != pytest.approx(expected, rel=1e-12) or not sum(map(abs, grad)):
            wrong[name, str(options)] = (loss, expected)
    assert not wrong


def test_every_pair_loss_raises_the_chosen_and_lowers_the_rejected():
    """By what a step does to the answers' own log-probs; NLL and NCA pull on the chosen alone where they must."""
    wrong = []
    for name, spec in PREFERENCES.items():
        if spec.paired:
            columns = pair(ref=[*CHOSEN_LP, *REJECTED_LP])
            _, grad = trained(name, columns.with_token({"sum_pi_squared": torch.full((6,), 0.5, dtype=F64)}))
            if not sum(grad[:4]) < 0 < sum(grad[4:]):
                wrong.append((name, grad))
    assert not wrong


def test_wpo_weighs_a_pair_by_how_likely_the_policy_writes_it_also_with_ld():
    """min(1, exp(mean of log pi - log sum pi^2, of both answers)), without a gradient of its own."""
    pi2 = [0.9, 0.8, 0.9, 0.7, 0.6, 0.9]
    each = [lp - math.log(s) for lp, s in zip([*CHOSEN_LP, *REJECTED_LP], pi2)]
    weight = math.exp(sum(each[:4]) / 4 + sum(each[4:]) / 2)
    assert weight < 1
    for options in ({}, {"ld_alpha": 0.25}):
        columns = pair(ref=REF).with_token({"sum_pi_squared": torch.tensor(pi2, dtype=F64)})
        loss, grad = trained("wpo", columns, **options)
        plain, pull = trained("dpo", pair(ref=REF), **options)
        assert loss == pytest.approx(weight * plain) and grad == pytest.approx([weight * g for g in pull])
    sure = pair(ref=REF).with_token({"sum_pi_squared": torch.full((6,), 1e-3, dtype=F64)})
    assert trained("wpo", sure)[0] == pytest.approx(trained("dpo", pair(ref=REF))[0]), "never above 1"


def test_the_nll_beside_a_shortened_preference_is_of_the_whole_answer():
    """ld_alpha counts the chosen answer's last two tokens less in the preference, not in the NLL."""
    shortened, whole = (trained("rpo", pair(ref=REF), ld_alpha=0.25, alpha=a, normalization="sum") for a in (0.0, 1.0))
    assert whole[0] - shortened[0] == pytest.approx(NLL, rel=1e-9)
    assert [a - b for a, b in zip(whole[1], shortened[1])] == pytest.approx([-1.0] * 4 + [0.0] * 2)


def test_the_odds_of_answers_that_are_all_but_certain():
    """float32: 1 - exp(-1e-6) has one digit there, -expm1(-1e-6) has all; certain answers have finite odds."""
    w, l = torch.tensor([-1e-6], requires_grad=True), torch.tensor([-3e-6])  # noqa: E741
    log_odds = (-1e-6 + 3e-6) - (math.log(1e-6) - math.log(3e-6))
    loss = odds_ratio(w, l, beta=1.0)
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-log_odds)), rel=1e-5)
    assert torch.autograd.grad(loss, w)[0].item() == pytest.approx(-1e6 / (1 + math.exp(log_odds)), rel=1e-5)
    assert torch.isfinite(odds_ratio(torch.zeros(1), l, beta=1.0)).all()


def test_halves_of_pairs_are_matched_by_number_and_not_by_place():
    """Two pairs, of which the rejected answers come in the other order; one token each."""
    lp, side, number = [-0.5, -2.0, -1.0, -0.25], [CHOSEN, CHOSEN, REJECTED, REJECTED], [4.0, 9.0, 9.0, 4.0]
    token = {n: torch.tensor(v, dtype=F64) for n, v in (("logprobs", lp), ("side", side), ("pair", number))}
    token["ref_logprobs"] = torch.zeros(4, dtype=F64)
    at = torch.arange(4)
    c = Columns(token=token, sequence={}, sequence_of=at, num_sequences=4, mask=torch.ones(4, dtype=torch.bool))
    [term] = preference_terms("dpo", beta=0.5)
    found = term.fn(c)
    each = [-2 * log_sigmoid(0.5 * (w - l)) for w, l in ((lp[0], lp[3]), (lp[1], lp[2]))]  # noqa: E741
    assert found.values.tolist() == pytest.approx([*each, 0.0, 0.0])
    figures = {name: values.sum().item() / 4 for name, (values, _) in found.metrics.items()}
    assert figures["rewards/chosen"] == pytest.approx(0.5 * (-0.5 - 2.0) / 2)
    assert figures["rewards/rejected"] == pytest.approx(0.5 * (-0.25 - 1.0) / 2)
    assert figures["rewards/accuracies"] == 0.0 and figures["rewards/margins"] == pytest.approx(0.5 * (-0.25 - 1.0) / 2)
    tie = c.with_token({"logprobs": torch.full((4,), -1.0, dtype=F64)})
    assert not term.fn(tie).metrics["rewards/accuracies"][0].any(), "a tie is no right answer"


def test_the_figures_and_the_loss_of_a_reward_model():
    """Two pairs; the scores of the first are right by 2, those of the second equal."""
    values, number = torch.tensor([3.0, 1.0, 1.0, 1.0], dtype=F64), torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=F64)
    token = {"values": values, "side": torch.tensor([CHOSEN, CHOSEN, REJECTED, REJECTED], dtype=F64), "pair": number}
    at = torch.arange(4)
    c = Columns(token=token, sequence={}, sequence_of=at, num_sequences=4, mask=torch.ones(4, dtype=torch.bool))
    found = reward_terms()[0].fn(c)
    figures = {name: each.sum().item() / 4 for name, (each, _) in found.metrics.items()}
    assert figures == pytest.approx({"score/chosen": 2.0, "score/rejected": 1.0, "margin": 1.0, "accuracy": 0.5})
    assert found.values.sum().item() / 4 == pytest.approx(-(log_sigmoid(2.0) + log_sigmoid(0.0)) / 2)
