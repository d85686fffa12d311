"""Handmade columns for the tests of algorithms, float64."""

import torch

from verl.algorithms import estimators as adv
from verl.batch import Columns

F64 = torch.float64


def f64(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def columns(scores, groups=None, *, tokens=1, mask=None, valid=None, token=None, penalty=None) -> Columns:
    """Sequences of `tokens` tokens each (an int or one number per sequence), with their rewards."""
    n = len(scores)
    lengths = torch.tensor([tokens] * n if isinstance(tokens, int) else tokens)
    sequence_of = torch.arange(n).repeat_interleave(lengths)
    labels = list(dict.fromkeys(groups)) if groups is not None else list(range(n))
    group = torch.tensor([labels.index(g) for g in groups]) if groups is not None else torch.arange(n)
    valid = torch.tensor(valid) if valid is not None else torch.ones(n, dtype=torch.bool)
    mask = torch.tensor(mask) if mask is not None else torch.ones(len(sequence_of), dtype=torch.bool)
    score = f64(*scores)
    sequence = {"score": score, "group": group, "valid": valid, "positive": valid & (score > 0)}
    c = Columns(token=token or {}, sequence=sequence, sequence_of=sequence_of, num_sequences=n, mask=mask)
    return c.with_token({"rewards": adv.token_rewards(c, penalty)})
