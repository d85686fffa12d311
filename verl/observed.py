"""Rows in which the environment's tokens are loss tokens too, and columns of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from verl.types import ROUTES, TEMPLATE, Sample, Segment

OBSERVED = -2
"""The value of the column `versions` for a token that the environment wrote."""


def observed(sample: Sample) -> Sample:
    """Return the row with the environment's tokens after the policy's first token as loss tokens too, except those that
    the template is known to have written. The tokens before (a prompt, the history of a rewritten row) stay context."""
    sides = {name: channel for s in sample.segments for name, channel in s.side.items() if name != ROUTES}
    out, drawn = list[Segment](), False
    for s in sample.segments:
        if s.source == "env" and drawn and s.version != TEMPLATE:
            n = len(s.ids)
            side = {name: np.zeros((n, *channel.shape[1:]), channel.dtype) for name, channel in sides.items()}
            s = replace(
                s, source="sampled", logprobs=np.zeros(n, np.float32), version=OBSERVED, side={**side, **s.side}
            )
        drawn = drawn or s.source == "sampled"
        out.append(s)
    return replace(sample, segments=tuple(out))


def around(column: Tensor, at: Tensor) -> Tensor:
    """Return [L, ...]: the values of `column` [n, ...] where `at` [L] is True, and 0 elsewhere."""
    out = torch.zeros((len(at), *column.shape[1:]), dtype=column.dtype)
    out[at] = column
    return out
