"""The rollout/trainer mismatch monitor: what the sampler said of its tokens against what the trainer says (section 5).

Always on (pitfalls 1). The correction weights themselves are rows of the next table; the measure comes first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.types import Metric, Metrics


def mismatch_metrics(trainer: Tensor, rollout: Tensor, mask: Tensor) -> Metrics:
    """q = trainer - rollout over the mask [L]: k1 and k3 of KL(rollout || trainer), max |q|, ESS share, p99 of exp(|q|)."""
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


def _thinned(x: Tensor, at_most: int = 1 << 22) -> Tensor:
    """torch.quantile refuses more than 16M values; an even stride keeps the estimate deterministic."""
    return x if len(x) <= at_most else x[:: len(x) // at_most + 1]
