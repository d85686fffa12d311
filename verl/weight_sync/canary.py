"""The canary: a check that a rollout engine computes with the trainer's weights. It compares their log-probs of fixed
probe sequences.

The allowed difference is the one that rounding explains: it is measured between the trainer's pass and the model's own
pass in the rollout's precision, over published weights. Two statistics are compared, neither of which a single token
can move: the mean |dlogp| over likely tokens, for other weights, and the scale of the logits, for errors below the
rounding of single tokens. Logits that are 1 + a times as large change a log-prob by a (logp + entropy), so a is the
result of a regression over all tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

WITHIN = 3.0  # allowed mean |dlogp|, in multiples of the one that rounding explains; correct runs are at 0.4 to 2
FLOOR = 1e-5  # nats; the allowed difference between kernels if rounding explains nearly none
LEAST_SCALE = 2.0**-8  # relative; the largest rounding of a weight in bfloat16
SURE = 5.0  # standard errors by which the scale must be off
SEVERAL = 4  # distinct likely tokens; with fewer, `difference` leaves none out
LEAST_WORDS = 8  # different tokens for a verdict on the scale: errors of the same token are alike
PROBE_TOKENS, PROBED_TOKENS = 128, 384  # the most tokens of one probe; of all probes together, about
DIVERGED = 1.0  # nats between two passes over the same weights: such a model computes nothing
LOST = -100.0  # nats of a likely token; a uniform guess among a million has -14


def probes_of(prompts: Iterable[np.ndarray], longest: int, vocab: int = sys.maxsize) -> list[np.ndarray]:
    """Return the probe sequences: the beginnings of the first different prompts, joined up to `longest` tokens, since
    each sequence is one forward pass. Further prompts are added, up to PROBED_TOKENS tokens, only if they have new
    ids. Ids that are not below `vocab` have no log-prob, and are left out."""
    starts: dict[bytes, np.ndarray] = {}
    words: set[int] = set()
    room = min(PROBE_TOKENS, longest)
    for ids in prompts:
        ids = ids[ids < vocab]
        start, tokens = ids[:room], sum(map(len, starts.values()))
        wanted = tokens < PROBE_TOKENS or (tokens < PROBED_TOKENS and not words.issuperset(start.tolist()))
        if len(start) > 1 and wanted:
            starts[start.tobytes()] = start
            words.update(start.tolist())
    probes: list[np.ndarray] = []
    for start in starts.values():
        if probes and len(probes[-1]) + len(start) <= room:
            probes[-1] = np.concatenate([probes[-1], start])
        else:
            probes.append(start)
    return probes


@dataclass(frozen=True, slots=True)
class Probed:
    """The trainer's side of the canary: values for the n probe tokens that have a log-prob, those of all probes in a
    row."""

    targets: np.ndarray
    """[n] token ids."""
    logprobs: np.ndarray
    """[n] their log-probs in the trainer's pass."""
    entropy: np.ndarray
    """[n] entropy, in nats, of the trainer's distribution at each token."""
    own: np.ndarray
    """[n] their log-probs in the model's own pass in the rollout's precision."""
    eps: float
    """The machine epsilon of that precision."""

    @property
    def likely(self) -> np.ndarray:
        """[n] weights that sum to 1: positive for the likelier half of the tokens, 0 for the others. Every distinct
        token id counts once, however often it occurs, because its errors are alike."""
        _, word, count = np.unique(self.targets, return_inverse=True, return_counts=True)
        weight = 1.0 / count[word]
        order = np.argsort(-self.logprobs, kind="stable")
        before = np.cumsum(weight[order]) - weight[order]
        found = np.zeros(len(weight))
        found[order] = np.where(before < weight.sum() / 2, weight[order], 0.0)
        return found / found.sum()

    @property
    def explained(self) -> float:
        """Mean |dlogp| between the trainer's two passes over the likely tokens, in nats. Each token counts with at
        least the error of rounded logits, since a few distinct tokens can agree by chance."""
        rounding = self.eps / 4 * np.abs(self.logprobs + self.entropy)
        return float((np.maximum(np.abs(self.own - self.logprobs), rounding) * self.likely).sum())


def no_model(probe: Probed) -> str:
    """Return why these log-probs are not those of a trainable model, or ""."""
    if not np.isfinite(probe.logprobs).all():
        return "its own log-probs are not finite"
    if not probe.explained <= DIVERGED:
        return f"its own two passes over the same weights differ by {probe.explained:.3g} nats on likely tokens"
    if not (mean := float((probe.logprobs * probe.likely).sum())) >= LOST:
        return f"its mean log-prob of likely tokens is {mean:.3g}"
    return ""


def difference(probe: Probed, got: np.ndarray) -> float:
    """Return the mean |dlogp| of the rollout's log-probs [n] over the likely tokens, in nats. With `SEVERAL` or more
    distinct tokens, the one that differs most is left out: a model may magnify rounding a hundredfold at one token, in
    one pass and not in the next."""
    _, word = np.unique(probe.targets, return_inverse=True)
    share = np.bincount(word, weights=probe.likely)
    off = np.bincount(word, weights=np.abs(got - probe.logprobs) * probe.likely)
    worst = int(off.argmax())
    if np.count_nonzero(share) < SEVERAL or not np.isfinite(off[worst]):
        return float(off.sum())
    return float((off.sum() - off[worst]) / (1.0 - share[worst]))


def fault(probe: Probed, got: np.ndarray, tolerance: float | None) -> str:
    """Return an error text if the rollout's log-probs [n] do not agree with the trainer's, else "". tolerance: the
    largest mean |dlogp|, in nats; None: derived from the difference that rounding explains."""
    found, allowed = difference(probe, got), tolerance or WITHIN * probe.explained + FLOOR
    if not found <= allowed:  # NaN, too
        return (
            f"rollout and trainer log-probs of the canary differ by {found:.3g} on likely tokens, where {allowed:.3g} "
            f"is allowed (the trainer's own two passes differ by {probe.explained:.3g}; sync.canary_tolerance sets it)"
        )
    (scale, error), (rounded, unsure) = _scale(probe, got), _scale(probe, probe.own)
    if tolerance is None and abs(scale - rounded) > max(LEAST_SCALE, SURE * float(np.hypot(error, unsure))):
        return f"the logits of the rollout are {1 + scale:.4f} times the trainer's on the canary"
    return ""


def _scale(probe: Probed, got: np.ndarray) -> tuple[float, float]:
    """Return (a, its standard error), where the logits behind `got` are 1 + a times the trainer's; (0, 0) with too few
    distinct tokens. The leverage of improbable tokens is bounded."""
    along, d = probe.logprobs + probe.entropy, got - probe.logprobs
    bound = 2.0 * float(np.median(np.abs(along)))
    weight = np.clip(along, -bound, bound)
    total = float((weight * along).sum())
    words, word = np.unique(probe.targets, return_inverse=True)
    if total <= 0.0 or len(words) < LEAST_WORDS:
        return 0.0, 0.0
    scale = float((weight * d).sum()) / total
    off = np.bincount(word, weights=(d - scale * along) * weight)
    return scale, float(np.sqrt((off**2).sum())) / total
