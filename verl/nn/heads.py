"""The heads on top of the hidden states: policy, critic and reward model differ by their head."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

Head = Literal["lm", "value", "score"]
"""lm: a language-model head · value: a critic's, with a bias · score: a reward model's, without a bias (it cancels in a
pair), as in transformers."""


class ValueHead(nn.Module):
    """A head that maps hidden [n, H] to values [n] float32. Its weights start at 0, so that a new critic predicts 0."""

    def __init__(self, hidden_size: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size))
        self.bias = nn.Parameter(torch.zeros(1)) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias)[:, 0]
