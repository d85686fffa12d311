"""Off-policy corrections: the sampler's log-probs of its tokens against the trainer's. `mismatch_metrics` is the
monitor, always on. `correct` turns the same log-ratio into importance weights (TIS, IcePop, clamp) and rejections
(MIS), on the mask before rejection; both are plain columns of the loss."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from verl.algorithms.filters import Correction, Rejection
from verl.batch import Columns
from verl.types import Metric, Metrics

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped here before exp; no gradient outside."""


def correct(columns: Columns, spec: Correction) -> dict[str, Tensor | Metric]:
    """`is_weights` [L] float64, `keep` [L] bool, `rollout_corr/*` metrics, of `old_logprobs` and `rollout_logprobs`. On
    the mask as given: rejection changes no weight. Weights are 0 and `keep` False outside the mask and where the
    log-ratio is not finite. Sequences without a token are in no metric; without any token there are no metrics."""
    train = torch.where(columns.mask, columns["old_logprobs"].double(), 0.0)
    rollout = torch.where(columns.mask, columns["rollout_logprobs"].double(), 0.0)
    q = train - rollout
    broken = ~torch.isfinite(q)
    q = torch.where(broken, 0.0, q)
    broken_rows = columns.sum(broken.double()) > 0
    keep = columns.mask & ~broken
    out: dict[str, Tensor | Metric] = {}
    weights = keep.double()
    if spec.form is not None:
        ratio = importance_ratio(columns, q, spec.level)
        good = keep if spec.level == "token" else keep & ~broken_rows[columns.sequence_of]
        weights = torch.where(good, bounded(ratio, spec), 0.0)
        out |= _weight_metrics(columns, ratio, weights, spec)
        if spec.batch_normalize:
            mean = _weight_mean(columns, weights, spec.level)
            weights = torch.where(good, weights / mean.clamp(min=torch.finfo(mean.dtype).tiny), 0.0)
        keep = good & within(ratio, spec) if spec.form == "mask" else good
    rules = spec.rejections()
    for rule in rules:
        passed = _passes(columns, q, rule)
        if rule.stat.startswith("seq_"):
            passed = passed & ~broken_rows[columns.sequence_of]
        out |= _rejection_metrics(columns, passed, f"rollout_corr/rollout_rs_{rule.stat}_")
        keep = keep & passed
    if rules or spec.form == "mask":
        out |= _rejection_metrics(columns, keep, "rollout_corr/rollout_rs_")
    out |= policy_gap_metrics(columns, train, rollout)
    return {"is_weights": torch.where(keep, weights, 0.0), "keep": keep, **out}


def importance_ratio(columns: Columns, q: Tensor, level: str) -> Tensor:
    """[L] exp of the clamped log-ratio: of the token, or of its sequence (summed | averaged), broadcast."""
    if level == "token":
        return q.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    of_sequence = columns.sum(q) if level == "sequence" else columns.mean(q)
    return of_sequence.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()[columns.sequence_of]


def within(ratio: Tensor, spec: Correction) -> Tensor:
    """low <= ratio <= high; boundaries are inside."""
    assert spec.high is not None
    return (ratio >= (spec.low or 0.0)) & (ratio <= spec.high)


def bounded(ratio: Tensor, spec: Correction) -> Tensor:
    """The weights of these ratios by the form of the correction."""
    if spec.form == "truncate":
        return ratio.clamp(max=spec.high)
    if spec.form == "clamp":
        return ratio.clamp(spec.low, spec.high)
    return torch.where(within(ratio, spec), ratio, torch.zeros_like(ratio))


def _weight_mean(columns: Columns, weights: Tensor, level: str) -> Tensor:
    each = weights[columns.mask] if level == "token" else columns.mean(weights)[columns.counts() > 0]
    return each.mean() if len(each) else torch.ones((), dtype=weights.dtype)


def _passes(columns: Columns, q: Tensor, rule: Rejection) -> Tensor:
    """[L] bool: the statistic of the token, or of its sequence, is in bounds."""
    *where, k = rule.stat.split("_")
    x = {"k1": q, "k2": 0.5 * q * q, "k3": q.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp() - 1 - q}[k]
    if where[0] == "seq":
        if where[1] == "max":
            top = torch.full((columns.num_sequences,), -torch.inf, dtype=x.dtype)
            top = top.scatter_reduce(0, columns.sequence_of[columns.mask], x[columns.mask], "amax")
            x = top[columns.sequence_of]
        else:
            x = (columns.sum(x) if where[1] == "sum" else columns.mean(x))[columns.sequence_of]
    if k != "k1":
        return columns.mask & (x <= rule.high)
    ratio = x.exp()
    return columns.mask & (ratio >= (1 / rule.high if rule.low is None else rule.low)) & (ratio <= rule.high)


def _step(value: Tensor | float) -> Metric:
    return Metric(float(value), 1, "step")


def _weight_metrics(columns: Columns, ratio: Tensor, weights: Tensor, spec: Correction) -> Metrics:
    """Return metrics of the weights after the bounds, before batch normalisation; fractions are of the ratios out of
    bounds."""
    w, raw = weights[columns.mask], ratio[columns.mask]
    if len(w) == 0:
        return {}
    n = float(len(w))
    assert spec.high is not None
    low = 1 / spec.high if spec.low is None else spec.low
    square = float((w * w).sum())
    return {
        "rollout_corr/rollout_is_mean": Metric(float(w.sum()), n, "token"),
        "rollout_corr/rollout_is_max": Metric(float(w.max()), n, "token", "max"),
        "rollout_corr/rollout_is_min": Metric(float(w.min()), n, "token", "min"),
        "rollout_corr/rollout_is_std": _step(w.std(correction=0)),
        "rollout_corr/rollout_is_eff_sample_size": _step(float(w.sum()) ** 2 / (n * square) if square else 0.0),
        "rollout_corr/rollout_is_ratio_fraction_high": Metric(float((raw > spec.high).sum()), n, "token"),
        "rollout_corr/rollout_is_ratio_fraction_low": Metric(float((raw < low).sum()), n, "token"),
        "rollout_corr/rollout_is_oob_ratio": Metric(float((~within(raw, spec)).sum()), n, "token"),
    }


def _rejection_metrics(columns: Columns, keep: Tensor, prefix: str) -> Metrics:
    """Share of tokens rejected, and of sequences that lost some token."""
    lost = columns.mask & ~keep
    n, present = float(columns.mask.sum()), float((columns.counts() > 0).sum())
    if n == 0:
        return {}
    tokens, sequences = float(lost.sum()), float((columns.sum(lost.double()) > 0).sum())
    by_sequence = Metric(sequences, present, "sequence")
    return {f"{prefix}masked_fraction": Metric(tokens, n, "token"), f"{prefix}seq_masked_fraction": by_sequence}


def policy_gap_metrics(columns: Columns, train: Tensor, rollout: Tensor) -> Metrics:
    """KL(rollout || train), perplexities and chi-square of `train` against `rollout` [L], as means over tokens or over
    sequences with some token."""
    mask, present = columns.mask, columns.counts() > 0
    finite = torch.isfinite(train) & torch.isfinite(rollout)
    train, rollout = torch.where(finite, train, 0.0), torch.where(finite, rollout, 0.0)
    q = torch.where(mask, train - rollout, 0.0)
    if not mask.any():
        return {}
    tokens, sequences = float(mask.sum()), float(present.sum())
    inside = q[mask]
    clamped = inside.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    train_log_ppl, rollout_log_ppl = -columns.mean(train)[present], -columns.mean(rollout)[present]
    gap = train_log_ppl - rollout_log_ppl
    product = columns.sum(q)[present].clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    def token(x: Tensor) -> Metric:
        return Metric(float(x.sum()), tokens, "token")

    def sequence(x: Tensor, kind: Literal["mean", "max", "min"] = "mean") -> Metric:
        total = x.sum() if kind == "mean" else x.max() if kind == "max" else x.min()
        return Metric(float(total), sequences, "sequence", kind)

    return {
        "rollout_corr/kl": token(-inside),
        "rollout_corr/k3_kl": token(clamped.exp() - 1 - inside),
        "rollout_corr/chi2_token": token((2 * clamped).exp() - 1),
        "rollout_corr/chi2_seq": sequence((2 * product).exp() - 1),
        "rollout_corr/training_ppl": sequence(train_log_ppl.exp()),
        "rollout_corr/training_log_ppl": sequence(train_log_ppl),
        "rollout_corr/rollout_ppl": sequence(rollout_log_ppl.exp()),
        "rollout_corr/rollout_log_ppl": sequence(rollout_log_ppl),
        "rollout_corr/log_ppl_diff": sequence(gap),
        "rollout_corr/log_ppl_abs_diff": sequence(gap.abs()),
        "rollout_corr/log_ppl_diff_max": sequence(gap, "max"),
        "rollout_corr/log_ppl_diff_min": sequence(gap, "min"),
        "rollout_corr/ppl_ratio": sequence(gap.exp()),
    }


def mismatch_metrics(trainer: Tensor, rollout: Tensor, mask: Tensor) -> Metrics:
    """Return metrics of q = trainer - rollout in the mask [L]: k1, k3 of KL(rollout || trainer), max |q|, ESS, p99 of
    exp(|q|)."""
    q = (trainer.double() - rollout.double())[mask]
    if len(q) == 0:
        return {}
    n = float(len(q))
    ratio = q.clamp(-20, 20).exp()
    return {
        "mismatch/k1": Metric(float(-q.sum()), n, "token"),
        "mismatch/k3": Metric(float((ratio - 1 - q.clamp(-20, 20)).sum()), n, "token"),
        "mismatch/max_abs_dlogp": Metric(float(q.abs().max()), n, "token", "max"),
        "mismatch/ess": Metric(float(ratio.sum() ** 2 / (n * (ratio * ratio).sum())), 1, "step"),
        "mismatch/ratio_p99": Metric(float(torch.quantile(_thinned(q.abs()), 0.99).exp()), 1, "step", "max"),
    }


def _thinned(x: Tensor) -> Tensor:
    """Return at most 4M of the values, since torch.quantile refuses more than 16M. An even stride keeps the estimate
    deterministic."""
    at_most = 1 << 22
    return x if len(x) <= at_most else x[:: len(x) // at_most + 1]
