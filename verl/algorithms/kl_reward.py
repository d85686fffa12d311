"""KL in the reward and its controller (algorithms.md 3.2)."""

from __future__ import annotations

from torch import Tensor

from verl.algorithms.terms import kl_estimate
from verl.batch import Columns


def kl_penalty(columns: Columns, *, coef: float, form: str, count_empty: bool = False) -> tuple[Tensor, float]:
    """(beta k(old, ref) [L], mean over sequences of the mean KL per token).

    The mean is over sequences with a trainable token; count_empty=True counts the others as 0, as verl does.
    """
    clean = columns.cleaned()
    kl = kl_estimate(clean["old_logprobs"].double(), clean["ref_logprobs"].double(), form)
    per_sequence = columns.mean(kl)
    present = columns.num_sequences if count_empty else int((columns.counts() > 0).sum())
    return coef * kl, float(per_sequence.sum()) / max(1, present)


def adapted_coef(coef: float, *, kl: float, target: float, horizon: float, num_sequences: int) -> float:
    """The coefficient after this step (1909.08593): beta (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon)."""
    error = min(0.2, max(-0.2, kl / target - 1))
    return coef * (1 + error * num_sequences / horizon)
