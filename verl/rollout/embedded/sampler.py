"""Sampling: one counter-based uniform number per row, inverse CDF, log-probs of the distribution that was sampled from.

A draw is a pure function of (request seed, token position, logits). Batch, slot, order and restarts do not change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from verl.accel.operations import Call
from verl.accel.plain import inverse_cdf, plain_truncate
from verl.accel.uniforms import GAMMA, mixed, uniforms
from verl.models.families import banned_ids
from verl.rollout.base import RolloutContext, Scores

MASK = 2**64 - 1


def stream_of(seed: int, position: int = 0) -> np.uint64:
    """Return a request's stream of random numbers from its seed, mixed so that neighbouring seeds share nothing. The
    stream begins at `position`."""
    return np.uint64((int(mixed(np.array([seed & MASK], np.uint64))[0]) + position * GAMMA) & MASK)


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """The sampling settings of n rows, and where the uniform number of each is from. They are numpy arrays, so a check
    of them does not synchronise with the device."""

    temperature: np.ndarray  # [n] float32, 0 is greedy
    top_k: np.ndarray  # [n] int64, 0 is off
    top_p: np.ndarray  # [n] float32, 1 is off
    min_p: np.ndarray  # [n] float32, 0 is off
    stream: np.ndarray  # [n] uint64
    position: np.ndarray  # [n] int64, of the drawn token in its response
    banned: np.ndarray | None = None  # [n] bool, the ids that the policy must not sample are banned; None: for no row

    @property
    def uniform(self) -> np.ndarray:
        """A uniform number in [0, 1) per row, float64 [n]."""
        return uniforms(self.stream, self.position)

    @property
    def truncated(self) -> np.ndarray:
        """True [n] for rows with top-k, top-p or min-p, unless they are greedy."""
        return (self.temperature > 0) & ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0))

    def of(self, rows: slice | np.ndarray) -> SamplingMetadata:
        """Return the settings of these rows."""
        columns = (self.temperature, self.top_k, self.top_p, self.min_p, self.stream, self.position)
        found = SamplingMetadata(*(column[rows] for column in columns))
        return found if self.banned is None else replace(found, banned=self.banned[rows])


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


def never_sampled(context: RolloutContext) -> tuple[int, ...]:
    """Return the ids that a policy must not sample."""
    return banned_ids(context.hf_config) if context.banned is None else context.banned


def banned_of(context: RolloutContext, device: torch.device) -> Tensor | None:
    """Return the ids [k] that a policy must not sample; None if there are none."""
    ids = never_sampled(context)
    return torch.tensor(ids, device=device) if ids else None


def close_banned(logits: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Overwrite logits [n, V] with -inf at the `ids` [k] of those rows [n] that are True."""
    logits.index_copy_(1, ids, logits.index_select(1, ids).masked_fill_(rows[:, None], -torch.inf))


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


def concat_draws(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids and log-probs of consecutive blocks of rows, joined."""
    return np.concatenate([ids for ids, _ in parts]), np.concatenate([logprobs for _, logprobs in parts])


def _truncate(logits: Tensor, rows: np.ndarray, sampling: SamplingMetadata) -> Tensor:
    """Return the logits, already divided by the temperature, with -inf for the ids that `rows` do not draw from."""
    index = torch.from_numpy(rows).to(logits.device)
    part = logits.index_select(0, index)  # [m, V]
    given = (sampling.top_k[rows], sampling.top_p[rows].astype(np.float64), sampling.min_p[rows].astype(np.float64))
    limits = [torch.from_numpy(column).to(logits.device) for column in given]
    return logits.index_copy(0, index, plain_truncate(part, torch.ones_like(limits[1]), *limits))
