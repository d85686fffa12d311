"""Which answers of a prompt are trained on: PF-PPO's policy filtration (algorithms.md 1.13; 2409.06957).

`per_prompt_filter` is the paper's: rank the answers of one prompt, before any advantage. `batch_weights` and `resample`
are verl's whole-batch variant; indices are of whole rows, so everything that belongs to a row moves with it (quirk Q2).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

FILTERS = ("bon", "br", "bw")
WEIGHTINGS = ("pow", "max_min", "max_random")


def per_prompt_filter(scores: Sequence[float], rng: random.Random, *, how: str = "bw") -> list[int]:
    """Indices to keep of one group, ascending: bon (best) | br (best and a random other) | bw (best and worst).

    Ties: the first is the best, the last the worst. NaN scores are never kept. `rng` is used by br only.
    """
    if how not in FILTERS:
        raise ValueError(f"selection {how!r} is unknown; known: {', '.join(FILTERS)}")
    ranked = sorted((i for i, s in enumerate(scores) if not math.isnan(s)), key=lambda i: (-scores[i], i))
    if len(ranked) <= 1 or how == "bon":
        return ranked[:1]
    other = rng.choice(ranked[1:]) if how == "br" else ranked[-1]
    return sorted((ranked[0], other))


def batch_weights(scores: Tensor, *, how: str = "pow", power: float = 2.0) -> Tensor:
    """[S] verl's weights over the whole batch: pow |s|^power | max_min 1 for the extremes | max_random .4 for the best,
    .1 for the rest; + 1e-8, so that a batch of zeros is uniform. |s| favours very negative scores too."""
    s = scores.double()
    if how == "pow":
        return s.abs() ** power + 1e-8
    if how == "max_min":
        return ((s == s.max()) | (s == s.min())).double() + 1e-8
    if how == "max_random":
        return torch.where(s == s.max(), 0.4, 0.1).double() + 1e-8
    raise ValueError(f"weighting {how!r} is unknown; known: {', '.join(WEIGHTINGS)}")


def resample(weights: Tensor, generator: torch.Generator, *, draws: int | None = None) -> Tensor:
    """[draws] rows drawn with replacement by weight (default: as many as there are)."""
    return torch.multinomial(weights, draws or len(weights), replacement=True, generator=generator)
