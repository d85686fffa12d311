"""Advantages by turn: a turn of the model (one call) is one action, with a reward of its own. As in estimators.py, on
the trainable tokens of a whole step in float64; `side/turn` [L] int64 numbers the turns of a trajectory over all of its
rows, `side/turn_reward` [L] has a turn's reward at its last token, `side/turn_state` [L] int64 is the state that the
turn was played in. Without these columns every trajectory is one turn. The score, and a KL penalty, are added."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.estimators import EPS, FLAT, Advantage, whiten
from verl.batch import Columns, segment_sum


class _Turns:
    """The turns [N] of all trajectories with a valid reward, in order of trajectory, then of play."""

    def __init__(self, columns: Columns) -> None:
        self.usable = columns.mask & columns.sequence["valid"][columns.sequence_of]
        self.at = torch.nonzero(self.usable)[:, 0]
        sequence, zeros = columns.sequence_of[self.at], torch.zeros(len(self.at), dtype=torch.int64)
        number = columns["side/turn"][self.at].long() if "side/turn" in columns else zeros
        width = int(number.max()) + 1 if len(number) else 1
        keys, self.index = torch.unique(sequence * width + number, return_inverse=True)
        self.sequence = keys // width
        rewards = columns["rewards"].double()
        if "side/turn_reward" in columns:
            rewards = rewards + columns["side/turn_reward"].double()
        self.reward = segment_sum(rewards[self.at], self.index, len(keys))
        start = torch.full((len(keys),), len(columns.mask), dtype=torch.int64)
        self.first = start.scatter_reduce(0, self.index, self.at, "amin")  # the place of its first token
        self.group = columns.sequence["group"][self.sequence]

    def discounted(self, x: Tensor, factor: float) -> Tensor:
        """[N] the sum of x [N] over this turn and those after it, each `factor` further."""
        out, sequence = x.tolist(), self.sequence.tolist()
        for i in range(len(out) - 2, -1, -1):
            if sequence[i] == sequence[i + 1]:
                out[i] += factor * out[i + 1]
        return torch.tensor(out, dtype=torch.float64)

    def on_tokens(self, x: Tensor) -> Tensor:
        """[N] -> [L], 0 outside the mask."""
        out = torch.zeros(len(self.usable), dtype=torch.float64)
        out[self.at] = x[self.index]
        return out


def _normalized(x: Tensor, label: Tensor, by_std: bool, epsilon: float) -> Tensor:
    """[N] (x - mean) / (std + epsilon), Bessel, among those of one label; 0 where there is one, or no spread."""
    _, index = torch.unique(label, return_inverse=True)
    n = int(index.max()) + 1 if len(index) else 0
    size = segment_sum(torch.ones_like(x), index, n)
    low, high = (
        torch.zeros(n, dtype=x.dtype).scatter_reduce(0, index, x, how, include_self=False) for how in ("amin", "amax")
    )
    flat = (high - low <= FLAT * torch.maximum(high.abs(), low.abs()).clamp(min=1)) | (size < 2)
    centred = torch.where(flat[index], 0.0, x - (segment_sum(x, index, n) / size.clamp(min=1))[index])
    if not by_std:
        return centred
    std = (segment_sum(centred**2, index, n) / (size - 1).clamp(min=1)).sqrt()
    return centred / (std[index] + epsilon)


def turn_discount(
    columns: Columns, *, turn_discount: float = 1.0, normalize_by_std: bool = True, epsilon: float = EPS
) -> Advantage:
    """The discounted return from each turn on, normalised over all turns of the group (process supervision of
    2402.03300, with a discount). One turn each: GRPO."""
    turns = _Turns(columns)
    returns = turns.discounted(turns.reward, turn_discount)
    return {"advantages": turns.on_tokens(_normalized(returns, turns.group, normalize_by_std, epsilon))}


def gigpo(
    columns: Columns,
    *,
    turn_discount: float = 0.95,
    step_coef: float = 1.0,
    normalize_by_std: bool = True,
    epsilon: float = EPS,
) -> Advantage:
    """GRPO's advantage of whole trajectories, plus step_coef x that of a turn's discounted return among the turns of
    the group that were played in the same state (2505.10978). A state met once adds 0."""
    turns = _Turns(columns)
    sequences, index = torch.unique(turns.sequence, return_inverse=True)
    total = segment_sum(turns.reward, index, len(sequences))
    advantage = _normalized(total, columns.sequence["group"][sequences], normalize_by_std, epsilon)[index]
    if "side/turn_state" in columns:
        state = torch.stack([turns.group, columns["side/turn_state"][turns.first]], 1)
        _, label = torch.unique(state, dim=0, return_inverse=True)
        returns = turns.discounted(turns.reward, turn_discount)
        advantage = advantage + step_coef * _normalized(returns, label, normalize_by_std, epsilon)
    return {"advantages": turns.on_tokens(advantage)}


def turn_gae(
    columns: Columns,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    shift_mean: bool = True,
    whiten_epsilon: float | None = None,
) -> Advantage:
    """Generalised advantages (1506.02438) with a turn as one action, whitened over tokens: its value is `old_values`
    [L] at its first token, and all of its tokens have its advantage, and its return as the critic's target."""
    turns = _Turns(columns)
    values = columns["old_values"][turns.first.clamp(max=max(0, len(columns.mask) - 1))].double()
    same = turns.sequence[1:] == turns.sequence[:-1]
    following = torch.cat([torch.where(same, values[1:], 0.0), values.new_zeros(min(1, len(values)))])
    advantages = turns.discounted(turns.reward + gamma * following - values, gamma * lam)
    spread = whiten(turns.on_tokens(advantages), turns.usable, shift_mean=shift_mean, epsilon=whiten_epsilon)
    return {"advantages": spread, "returns": turns.on_tokens(advantages + values)}
