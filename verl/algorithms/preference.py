"""Preference and reward-model losses: functions of pairs, and the terms that run them. A pair is two sequences of one
step, marked by token columns (`side`, `pair`); the term is evaluated on the whole step at once, so no split into
micro-batches can part a pair or change KTO's reference point."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.algorithms.presets import preference
from verl.algorithms.settings import MEANT
from verl.algorithms.specs import function
from verl.batch import Columns
from verl.errors import Refused
from verl.names import did_you_mean
from verl.objective import Term, TermValue

CHOSEN, REJECTED, MISMATCHED = 1.0, -1.0, 0.0
"""Values of the column `side`. Unpaired rows are CHOSEN (desirable) or REJECTED; MISMATCHED rows measure KTO's z0."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """n pairs of answers."""

    chosen: Tensor
    """Summed log-probs of the chosen answers [n]."""
    rejected: Tensor
    """Summed log-probs of the rejected answers [n]."""
    ref_chosen: Tensor
    """The reference's log-probs of the chosen answers; 0 without a reference."""
    ref_rejected: Tensor
    """The same of the rejected answers."""
    chosen_tokens: Tensor
    """Lengths of the chosen answers [n]."""
    rejected_tokens: Tensor
    """Lengths of the rejected answers [n]."""
    gap: Tensor | None = None
    """True reward of the chosen minus the rejected [n], where the rows have one."""
    whole: Tensor | None = None
    """`chosen` before LD-DPO shortens it, for an NLL."""

    @property
    def log_ratios(self) -> tuple[Tensor, Tensor]:
        return self.chosen - self.ref_chosen, self.rejected - self.ref_rejected

    @property
    def mean_log_ratios(self) -> tuple[Tensor, Tensor]:
        chosen, rejected = self.log_ratios
        return chosen / self.chosen_tokens.clamp(min=1), rejected / self.rejected_tokens.clamp(min=1)


def dpo(p: Pairs, *, beta: float, label_smoothing: float = 0.0, average: bool = False) -> Tensor:
    """-log sigmoid(beta h) (2305.18290); label_smoothing: cDPO; average: h of log-ratios per token."""
    return _smoothed(beta * _difference(p, average), label_smoothing)


def robust(p: Pairs, *, beta: float, label_smoothing: float = 0.1, average: bool = False) -> Tensor:
    """Unbiased under labels flipped with probability `label_smoothing` (2403.00409)."""
    if not 0 <= label_smoothing < 0.5:
        need = "robust DPO needs 0 <= label_smoothing < 0.5"
        raise Refused(f"preference.options.label_smoothing={label_smoothing}: {need}")
    h = _difference(p, average)
    wrong = label_smoothing * F.logsigmoid(-beta * h)
    return (-(1 - label_smoothing) * F.logsigmoid(beta * h) + wrong) / (1 - 2 * label_smoothing)


def hinge(p: Pairs, *, beta: float, average: bool = False) -> Tensor:
    """relu(1 - beta h) (SLiC, 2305.10425)."""
    return torch.relu(1 - beta * _difference(p, average))


def ipo(p: Pairs, *, beta: float, average: bool = True) -> Tensor:
    """(h - 1 / (2 beta))^2 (2310.12036); average: log-ratios per token (TRL, its authors), else summed."""
    return (_difference(p, average) - 1 / (2 * beta)) ** 2


def apo_zero(p: Pairs, *, beta: float) -> Tensor:
    """Pulls the chosen up and the rejected down by themselves (2408.06266)."""
    chosen, rejected = p.log_ratios
    return 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)


def sppo(p: Pairs, *, beta: float) -> Tensor:
    """(log-ratio_w - 1 / 2 beta)^2 + (log-ratio_l + 1 / 2 beta)^2 (SPPO with sure preferences, 2405.00675)."""
    chosen, rejected = p.log_ratios
    return (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2


def nca(p: Pairs, *, beta: float) -> Tensor:
    """-log sigmoid(r_w) - (log sigmoid(-r_w) + log sigmoid(-r_l)) / 2, r = beta log-ratio (NCA, 2402.05369)."""
    chosen, rejected = (beta * x for x in p.log_ratios)
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def rpo(
    p: Pairs,
    *,
    beta: float,
    alpha: float = 1.0,
    normalization: str = "sequence",
    label_smoothing: float = 0.0,
    average: bool = False,
) -> Tensor:
    """DPO + alpha NLL of the chosen (Iterative RPO, 2404.19733), by its own length | that of all | not (sum)."""
    return dpo(p, beta=beta, label_smoothing=label_smoothing, average=average) + alpha * _nll(p, normalization)


def rpo_gap(p: Pairs, *, beta: float, eta: float = 1.0, distance: str = "sq", average: bool = False) -> Tensor:
    """Reward-aware (Nemotron-4, 2502.00203): distance of beta h from eta (r_w - r_l); squares or Bernoulli KLs."""
    if p.gap is None:
        need = "rows need chosen_score and rejected_score (or margin)"
        raise Refused(f"this loss reads the answers' true rewards: {need}")
    d, s = beta * _difference(p, average), eta * p.gap
    if distance == "sq":
        return (d - s) ** 2
    first, second = (s, d) if distance == "bwd_kl" else (d, s)
    up, down = F.logsigmoid(first) - F.logsigmoid(second), F.logsigmoid(-first) - F.logsigmoid(-second)
    return torch.sigmoid(first) * up + torch.sigmoid(-first) * down


def odds_ratio(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """-beta log sigmoid(log odds_w - log odds_l) of mean log-probs below 0 (ORPO, 2403.07691)."""
    log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    return -beta * F.logsigmoid(log_odds)


def orpo(p: Pairs, *, beta: float) -> Tensor:
    """NLL of the chosen + the odds ratio; no reference."""
    chosen, rejected = p.chosen / p.chosen_tokens.clamp(min=1), p.rejected / p.rejected_tokens.clamp(min=1)
    return -chosen + odds_ratio(chosen, rejected, beta=beta)


def simpo(p: Pairs, *, beta: float, gamma: float = 1.0, label_smoothing: float = 0.0) -> Tensor:
    """-log sigmoid(beta (P_w/|w| - P_l/|l|) - gamma) (2405.14734); no reference; label_smoothing: as in cDPO."""
    return _smoothed(beta * _difference(p, True) - gamma, label_smoothing)


def cpo(
    p: Pairs, *, beta: float, alpha: float = 1.0, normalization: str = "sequence", label_smoothing: float = 0.0
) -> Tensor:
    """-log sigmoid(beta (P_w - P_l)) + alpha NLL of the chosen (2401.08417); no reference."""
    return _smoothed(beta * (p.chosen - p.rejected), label_smoothing) + alpha * _nll(p, normalization)


def kto(
    log_ratio: Tensor,
    desirable: Tensor,
    kl_log_ratio: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Per answer [n] (2402.01306). z0 = max(0, mean of `kl_log_ratio`), of mismatched answers, no gradient."""
    z0 = kl_log_ratio.detach().mean().clamp(min=0) if len(kl_log_ratio) else torch.zeros((), dtype=log_ratio.dtype)
    up = desirable_weight * (1 - torch.sigmoid(beta * (log_ratio - z0)))
    down = undesirable_weight * (1 - torch.sigmoid(beta * (z0 - log_ratio)))
    return torch.where(desirable, up, down)


def bradley_terry(
    chosen: Tensor, rejected: Tensor, *, margin: Tensor | None = None, center_coef: float = 0.0
) -> Tensor:
    """-log sigmoid(r_w - r_l - margin) + center (r_w + r_l)^2 per pair [n] (2204.05862, 2307.09288, 2312.09244)."""
    gap = chosen - rejected if margin is None else chosen - rejected - margin
    return -F.logsigmoid(gap) + center_coef * (chosen + rejected) ** 2


def _smoothed(x: Tensor, label_smoothing: float) -> Tensor:
    return -(1 - label_smoothing) * F.logsigmoid(x) - label_smoothing * F.logsigmoid(-x)


def _difference(p: Pairs, average: bool) -> Tensor:
    chosen, rejected = p.mean_log_ratios if average else p.log_ratios
    return chosen - rejected


def _nll(p: Pairs, normalization: str) -> Tensor:
    chosen = p.chosen if p.whole is None else p.whole
    if normalization == "sequence":
        return -chosen / p.chosen_tokens.clamp(min=1)
    if normalization == "token":  # the mean over pairs makes it the mean over all chosen tokens
        return -chosen * len(chosen) / p.chosen_tokens.sum().clamp(min=1)
    if normalization == "sum":
        return -chosen
    raise Refused(f"preference.options.normalization={normalization!r}: sequence | token | sum")


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, also near 0."""
    return torch.log(-torch.expm1(x.clamp(max=-1e-7)))


_WHOLE: Mapping[str, Any] = {"unit": "sequence", "aggregate": "seq-mean-token-mean", "two_pass": True}


def preference_terms(
    name: str, *, beta: float | None = None, options: Mapping[str, Any] | None = None
) -> tuple[Term, ...]:
    """The term of `preference.loss`; ValueError for a name or an option that there is not."""
    spec = preference(name)
    for key in options or {}:
        if key not in spec.options:
            hint = did_you_mean(key, spec.options, form=MEANT) or f"; it has {', '.join(spec.options) or 'none'}"
            raise Refused(f"preference.options.{key}: {name} has no such option{hint}")
    settings = {**spec.options, **(options or {})}
    ld_alpha, wpo = settings.pop("ld_alpha", None), bool(settings.pop("wpo", False))
    strength = spec.beta if beta is None else beta
    loss = partial(function(spec.fn, "preference.loss"), beta=strength, **settings, **spec.fixed)
    paired = partial(_pair_term, loss=loss, beta=strength, ld_alpha=ld_alpha, wpo=wpo)
    fn = paired if spec.paired else partial(_kto_term, loss=loss)
    inputs = ("side", "pair", *(("ref_logprobs",) if spec.reference else ()), *(("gap",) if spec.needs_gap else ()))
    outputs = ("logprobs", "sum_pi_squared") if wpo else ("logprobs",)
    return (Term(name="loss", fn=fn, outputs=outputs, inputs=inputs, **_WHOLE),)


def reward_terms(*, center_coef: float = 0.0, margin: bool = False) -> tuple[Term, ...]:
    """Bradley-Terry on the scores after the last token: each row's only trainable token carries them as `values`."""
    fn = partial(_reward_term, center_coef=center_coef, margin=margin)
    inputs = ("side", "pair", *(("gap",) if margin else ()))
    return (Term(name="loss", fn=fn, outputs=("values",), inputs=inputs, **_WHOLE),)


def _of_sequence(columns: Columns, name: str) -> Tensor:
    """Return [S] of a column that is constant in each sequence; 0 where a sequence has no token."""
    return columns.mean(columns[name].double())


def _places(columns: Columns) -> tuple[Tensor, Tensor]:
    """Indices [n] of the chosen and the rejected sequence of each pair, in the same order."""
    side, pair = _of_sequence(columns, "side").round(), _of_sequence(columns, "pair").round()
    chosen, rejected = (torch.nonzero(side == s)[:, 0] for s in (CHOSEN, REJECTED))
    chosen, rejected = chosen[torch.argsort(pair[chosen])], rejected[torch.argsort(pair[rejected])]
    assert torch.equal(pair[chosen], pair[rejected]), "a pair without its other half"
    return chosen, rejected


def _spread(columns: Columns, at: Tensor, per_item: Tensor) -> Tensor:
    """Return [S] values with a mean over the present sequences that is the mean of `per_item` [n], placed at sequences
    `at`."""
    values = per_item * (columns.counts() > 0).sum() / max(1, len(at))
    return torch.zeros(columns.num_sequences, dtype=per_item.dtype).index_put((at,), values)


def _pair_metrics(columns: Columns, at: Tensor, found: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Any]]:
    """Add the metrics of pairs: means over all present sequences; each pair's value is at both of its sequences."""
    return {n: (_spread(columns, at, v.detach().to(torch.float64)), "mean") for n, v in found.items()}


def _pair_term(
    columns: Columns, *, loss: Callable[[Pairs], Tensor], beta: float, ld_alpha: float | None, wpo: bool = False
) -> TermValue:
    w, l = _places(columns)  # noqa: E741
    counts = columns.counts().double()
    shares = torch.ones_like(columns["logprobs"])
    if ld_alpha is not None:  # beyond the length of the other answer tokens count less, in both models (LD-DPO)
        shared = torch.zeros(columns.num_sequences, dtype=torch.float64)
        shared[w] = shared[l] = torch.minimum(counts[w], counts[l])
        shares = torch.where(_position(columns) < shared[columns.sequence_of], shares, ld_alpha)
    policy = columns.sum(shares * columns["logprobs"])
    against = "ref_logprobs" in columns
    ref = columns.sum(shares * columns["ref_logprobs"].to(policy.dtype)) if against else torch.zeros_like(policy)
    gap = _of_sequence(columns, "gap")[w].to(policy.dtype) if "gap" in columns else None
    pairs = Pairs(policy[w], policy[l], ref[w], ref[l], counts[w], counts[l], gap, columns.sum(columns["logprobs"])[w])
    chosen, rejected = pairs.log_ratios if against else pairs.mean_log_ratios
    metrics = {"rewards/chosen": beta * chosen, "rewards/rejected": beta * rejected}
    metrics |= {"rewards/margins": beta * (chosen - rejected), "rewards/accuracies": (chosen > rejected).double()}
    values = loss(pairs)
    if wpo:  # how likely the policy is to write such answers itself (WPO, 2406.11827, equation 2)
        likely = columns.mean(columns["logprobs"].detach() - columns["sum_pi_squared"].detach().log())
        metrics["wpo_weight"] = (likely[w] + likely[l]).exp().clamp(max=1)
        values = values * metrics["wpo_weight"]
    return TermValue(_spread(columns, w, values), _pair_metrics(columns, w, metrics))


def _position(columns: Columns) -> Tensor:
    """[L] place of each trainable token in its sequence."""
    n = columns.mask.double()
    before = torch.cumsum(n, 0) - n
    start = torch.full((columns.num_sequences,), torch.inf, dtype=torch.float64)
    start = start.scatter_reduce(0, columns.sequence_of[columns.mask], before[columns.mask], "amin")
    return before - start[columns.sequence_of]


def _kto_term(columns: Columns, *, loss: Callable[..., Tensor]) -> TermValue:
    side = _of_sequence(columns, "side").round()
    ratio = columns.sum(columns["logprobs"]) - columns.sum(columns["ref_logprobs"].to(columns["logprobs"].dtype))
    present, alone = columns.counts() > 0, side == MISMATCHED
    own, other = (torch.nonzero(present & of)[:, 0] for of in (~alone, alone))
    values = loss(ratio[own], side[own] == CHOSEN, ratio[other])
    kl = ratio[other].detach().mean().clamp(min=0).expand(len(own)) if len(other) else torch.zeros(len(own))
    return TermValue(_spread(columns, own, values), _pair_metrics(columns, own, {"kl": kl}))


def _reward_term(columns: Columns, *, center_coef: float, margin: bool) -> TermValue:
    w, l = _places(columns)  # noqa: E741
    scores = columns.sum(columns["values"])
    gap = _of_sequence(columns, "gap")[w].to(scores.dtype) if margin else None
    loss = bradley_terry(scores[w], scores[l], margin=gap, center_coef=center_coef)
    metrics = {"score/chosen": scores[w], "score/rejected": scores[l], "margin": scores[w] - scores[l]}
    metrics["accuracy"] = (scores[w] > scores[l]).double()
    return TermValue(_spread(columns, w, loss), _pair_metrics(columns, w, metrics))
