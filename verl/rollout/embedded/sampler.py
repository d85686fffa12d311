"""Sampling: one counter-based uniform number per row, inverse CDF, log-probs of the distribution that was sampled from.

A draw is a pure function of (request seed, token position, logits). Batch, slot, order and restarts do not change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl.accel.operations import Call
from verl.accel.plain import inverse_cdf
from verl.rollout.base import Scores

MASK = 2**64 - 1
GAMMA, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64


def _mixed(z: np.ndarray) -> np.ndarray:
    """Return the output function of splitmix64 for each uint64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
    return z ^ (z >> np.uint64(31))


def stream_of(seed: int, position: int = 0) -> np.uint64:
    """Return a request's stream of random numbers from its seed, mixed so that neighbouring seeds share nothing. The
    stream begins at `position`."""
    return np.uint64((int(_mixed(np.array([seed & MASK], np.uint64))[0]) + position * GAMMA) & MASK)


def uniforms(streams: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return a uniform number in [0, 1) per row, float64 [n], from streams uint64 [n] and the position [n] of the drawn
    token in its response."""
    z = _mixed(streams + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(GAMMA))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """The sampling settings of n rows, and the uniform number of each. They are numpy arrays, so a check of them does
    not synchronise with the device."""

    temperature: np.ndarray  # [n] float32, 0 is greedy
    top_k: np.ndarray  # [n] int64, 0 is off
    top_p: np.ndarray  # [n] float32, 1 is off
    min_p: np.ndarray  # [n] float32, 0 is off
    uniform: np.ndarray  # [n] float64

    @property
    def truncated(self) -> np.ndarray:
        """True [n] for rows with top-k, top-p or min-p, unless they are greedy."""
        return (self.temperature > 0) & ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0))

    def of(self, rows: slice | np.ndarray) -> SamplingMetadata:
        """Return the settings of these rows."""
        columns = (self.temperature, self.top_k, self.top_p, self.min_p, self.uniform)
        return SamplingMetadata(*(column[rows] for column in columns))


def sample(logits: Tensor, sampling: SamplingMetadata) -> tuple[Tensor, Tensor]:
    """Sample a token per row of logits [n, V]. Return ids [n] int64 and log-probs [n] float32 of the processed
    distribution (greedy rows: at temperature 1)."""
    logits = logits.float()
    greedy = sampling.temperature == 0
    if not ((sampling.temperature == 1) | greedy).all():
        scale = torch.from_numpy(np.where(greedy, np.float32(1), sampling.temperature)).to(logits.device)
        logits = logits / scale[:, None]
    truncated = np.flatnonzero(sampling.truncated)
    if truncated.size:
        logits = _truncate(logits, truncated, sampling)
    probs = torch.softmax(logits, dim=-1)  # [n, V]
    if greedy.all():
        ids = logits.argmax(dim=-1)
    else:
        ids = inverse_cdf(probs, torch.from_numpy(sampling.uniform).to(logits.device))
        if greedy.any():
            ids = torch.where(torch.from_numpy(greedy).to(logits.device), logits.argmax(dim=-1), ids)
    return ids, probs.gather(1, ids[:, None]).squeeze(1).log_()


def draw_rows(logits: Tensor, sampling: SamplingMetadata, kernel: Call, *, separately: bool = False) -> Tensor:
    """Sample a token per row of logits [n, V], with top-k, top-p and min-p by `sample` and all other rows by `kernel`
    (the operation `sample`), so that the bits of a row do not depend on the settings of other rows. With `separately`
    `sample` is called once per row, since on a GPU its bits depend on the number of rows. Return ids and
    log-probs as the kernel does: float64 [2, n]."""
    cut = np.flatnonzero(sampling.truncated)
    if len(cut) == len(logits) and not separately:
        return joined_draws(*sample(logits, sampling))
    given = (torch.from_numpy(column).to(logits.device) for column in (sampling.temperature, sampling.uniform))
    both: Tensor = kernel(logits, *given)
    for rows in (cut[:, None] if separately else [cut]) if len(cut) else []:
        index = torch.from_numpy(rows).to(logits.device)
        both[:, index] = joined_draws(*sample(logits[index], sampling.of(rows)))
    return both


def score_logits(logits: Tensor, given: Tensor, temperature: float, top: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-prob of each of the ids `given` [t] under logits [t, V], float32 [t], and the `top` most likely
    ids [t, top] with their log-probs."""
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    best = logprobs.topk(top)
    return logprobs.gather(1, given[:, None]).squeeze(1), best.indices, best.values


def scores_of(parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Scores:
    """Join the scores of consecutive blocks of tokens."""
    return Scores(*(torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)))


def to_host(ids: Tensor, logprobs: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Copy ids and log-probs [n] to the host in one transfer. Return int64 [n] and float32 [n]."""
    return split_draws(joined_draws(ids, logprobs))


def joined_draws(ids: Tensor, logprobs: Tensor) -> Tensor:
    """Return ids and log-probs [n] as the operation `sample` does: float64 [2, n], exact for both."""
    return torch.stack((ids.double(), logprobs.double()))


def split_draws(both: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Copy the result of the operation `sample` (ids and log-probs, float64 [2, n]) to the host. Return int64 [n] and
    float32 [n]."""
    ids, logprobs = both.cpu().numpy()
    return ids.astype(np.int64), logprobs.astype(np.float32)


def _truncate(logits: Tensor, rows: np.ndarray, sampling: SamplingMetadata) -> Tensor:
    """Return the logits with -inf for the ids that top-k, then top-p of the rest, then min-p drop in `rows`. Of equal
    logits those with lower ids are kept."""
    index = torch.from_numpy(rows).to(logits.device)
    part = logits.index_select(0, index)  # [m, V]
    keep = torch.ones_like(part, dtype=torch.bool)
    top_k, top_p = sampling.top_k[rows], sampling.top_p[rows]
    if ((top_k > 0) | (top_p < 1)).any():
        keep = _keep_top(part, np.where(top_k > 0, top_k, part.shape[1]), top_p)
    if (sampling.min_p[rows] > 0).any():
        floor = torch.from_numpy(sampling.min_p[rows]).to(part.device).log()  # log 0 = -inf: off
        keep &= part >= part.amax(dim=-1, keepdim=True) + floor[:, None]
    return logits.index_copy(0, index, part.masked_fill_(~keep, -torch.inf))


def _keep_top(part: Tensor, top_k: np.ndarray, top_p: np.ndarray) -> Tensor:
    """Return which logits of part [m, V] are kept, bool [m, V]: the k largest, and of them the fewest of the largest
    with a probability of at least top_p together."""
    ordered, order = part.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(part.shape[1], device=part.device)
    keep = rank < torch.from_numpy(top_k).to(part.device)[:, None]
    probs = torch.softmax(ordered.masked_fill_(~keep, -torch.inf), dim=-1).double()
    before = probs.cumsum(-1) - probs  # probability of the ids ranked above
    # top_p = 1 keeps all: a float64 sum may round above 1 before the last id
    share = torch.from_numpy(np.where(top_p < 1, top_p, np.inf)).to(part.device)[:, None]
    keep &= before < share
    return torch.zeros_like(keep).scatter_(1, order, keep)
