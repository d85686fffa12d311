"""Which answers and tokens of a step are trained, and with which weight: dynamic sampling, PF-PPO, what the budget cut,
off-policy corrections; and a term beside the loss. No torch, as specs.py."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from verl.algorithms.settings import Spec, knob
from verl.errors import Refused

REJECTION_STATS = (
    *(f"token_k{k}" for k in (1, 2, 3)),
    *(f"seq_{how}_k{k}" for how in ("sum", "mean") for k in (1, 2, 3)),
    "seq_max_k2",
    "seq_max_k3",
)


@dataclass(frozen=True, kw_only=True)
class GroupFilter(Spec):
    """Dynamic sampling (DAPO): groups without variance of their metric are rejected and sampled again. curriculum: a
    user's `module:function` that weighs the rows by their scores (data/cursor.py)."""

    filter_groups: bool = knob(False)
    filter_metric: str | None = knob(None)
    max_draws_per_group: float = knob(10.0, least=1)
    on_exhausted: Literal["stop", "smaller"] = knob("stop", choices=("stop", "smaller"))
    curriculum: str | None = knob(None, option=True)

    def select(self, values: Sequence[float]) -> Literal["keep", "reject"]:
        return reject_flat(values) if self.filter_groups else "keep"


def reject_flat(values: Sequence[float]) -> Literal["keep", "reject"]:
    """Keep a group iff its metric varies beyond rounding, or it is alone."""
    if len(values) == 1:
        return "keep"
    high, low = max(values), min(values)
    return "reject" if high - low <= 1e-6 * max(1.0, abs(high), abs(low)) else "keep"


_OF_GROUP, _OF_BATCH = ("bon", "br", "bw"), ("pow", "max_min", "max_random")
_SELECTIONS = (
    " (best | best and a random one | best and worst of each group; or draws from the whole step, as verl has it: by "
    "|score|^weight_pow | the highest and the lowest score | the highest 0.4, others 0.1)"
)
_LEAST_WEIGHT = 1e-8


@dataclass(frozen=True, kw_only=True)
class SampleFilter(Spec):
    """Which answers are trained (PF-PPO, 2409.06957; algorithms 1.13). None: all.

    Of each group, before any advantage, as in the paper; or verl's: after the advantages, as many draws with
    replacement as the step has answers."""

    switches = ("selection",)
    selection: str | None = knob(None, option=True, choices=(*_OF_GROUP, *_OF_BATCH), advice=_SELECTIONS)
    weight_pow: float = knob(2.0, option=True, above=0)

    @property
    def draws(self) -> bool:
        return self.selection in _OF_BATCH

    def batch_weights(self, scores: Sequence[float]) -> list[float]:
        """Return the weight of each answer: its probability in a draw is proportional to it, and 0 for a score of
        NaN."""
        known = [s for s in scores if not math.isnan(s)]
        high, low = max(known, default=0.0), min(known, default=0.0)
        weigh: dict[str, Callable[[float], float]] = {
            "pow": lambda s: abs(s) ** self.weight_pow,
            "max_min": lambda s: float(s in (high, low)),
            "max_random": lambda s: 0.4 if s == high else 0.1,
        }
        assert self.selection is not None
        weight = weigh[self.selection]
        return [0.0 if math.isnan(s) else weight(s) + _LEAST_WEIGHT for s in scores]

    def draw(self, scores: Sequence[float], rng: random.Random) -> list[int]:
        """Return how often each answer is drawn."""
        weights = self.batch_weights(scores)
        drawn = Counter(rng.choices(range(len(scores)), weights, k=len(scores)) if any(weights) else ())
        return [drawn[i] for i in range(len(scores))]

    def choose(self, scores: Sequence[float], rng: random.Random) -> list[int]:
        """Return the indices to keep of one group, ascending. Ties: the first is best, the last is worst. NaN is never
        kept."""
        ranked = sorted((i for i, s in enumerate(scores) if not math.isnan(s)), key=lambda i: (-scores[i], i))
        if len(ranked) <= 1 or self.selection == "bon":
            return ranked[:1]
        other = rng.choice(ranked[1:]) if self.selection == "br" else ranked[-1]
        return sorted((ranked[0], other))


@dataclass(frozen=True, kw_only=True)
class Truncation(Spec):
    """Answers that the budget cut."""

    switches = ("mask_truncated", "shapes", "measures")
    mask_truncated: bool = knob(False, option=True)
    """They are in no loss, but in their group's statistics (DAPO's overlong filtering; TRL's
    mask_truncated_completions)."""
    stop_properly_coef: float | None = knob(None, option=True, most=1)
    """Their positive score is multiplied by this (ProRL, NeMo-RL); below 0 it is their score (OpenRLHF)."""
    overlong_tokens: int | None = knob(None, option=True, least=1)
    """The length at which the overlong penalty is whole. None: the response budget."""
    overlong_cap: bool = knob(True, option=True)
    """False: the penalty grows beyond that length (verl, NeMo-RL)."""

    @property
    def shapes(self) -> bool:
        return self.stop_properly_coef is not None

    @property
    def measures(self) -> bool:
        """Return whether a setting of the overlong penalty is given."""
        return self.overlong_tokens is not None or not self.overlong_cap


class Rejection(NamedTuple):
    """Reject the tokens (token_*) or sequences (seq_*) with a statistic that is out of bounds; both bounds are kept.
    k1: `low` <= pi_train / pi_rollout (its product or geometric mean for seq_sum, seq_mean) <= `high`; without `low`, 1
    / `high`. k2, k3: at most `high`."""

    stat: str
    low: float | None
    high: float

    @classmethod
    def parse(cls, text: str) -> Rejection:
        """`token_k1:0.5:2` (bounds on pi_train / pi_rollout), `seq_mean_k3:0.01` (an upper bound)."""
        stat, *bounds = str(text).split(":")
        prefix = f"algorithm.options.correction_reject={text}: "
        try:
            values = [float(b) for b in bounds]
        except ValueError:
            values = []
        if not 1 <= len(values) <= 2:
            raise Refused(prefix + "write STAT:HIGH or STAT:LOW:HIGH, e.g. token_k1:0.5:2")
        if stat not in REJECTION_STATS:
            raise Refused(prefix + f"statistic {stat!r} is unknown; known: {', '.join(REJECTION_STATS)}")
        rule = cls(stat, values[0] if len(values) == 2 else None, values[-1])
        if not rule.high > 0 or not 0 <= (rule.low or 0) <= rule.high:
            raise Refused(prefix + "need 0 <= low <= high and high > 0")
        return rule


@dataclass(frozen=True, kw_only=True)
class Correction(Spec):
    """Weights pi_train / pi_rollout on the policy loss, and rejections. Bounds are on that ratio."""

    prefix: ClassVar[str] = "correction_"
    switches = ("form", "reject", "bypass")
    form: str | None = knob(None, key="correction", choices=("truncate", "clamp", "icepop", "mask"))
    """truncate: min(w, high), TIS · clamp: to [low, high] · icepop: 0 outside [low, high], the token still counts in
    the denominators · mask: rejected outside [low, high] (AReaL's decoupled PPO) · None: no weights."""
    level: str = knob("token", option=True, choices=("token", "sequence", "geometric"))
    """token · sequence: the product over the trajectory · geometric: its geometric mean."""
    low: float | None = knob(None, option=True, least=0)
    high: float | None = knob(None, option=True, above=0)
    batch_normalize: bool = knob(False, option=True)
    """Divide the weights by their mean over tokens (level token) or sequences, after the bounds."""
    reject: tuple[str, ...] = knob((), option=True)
    denominator: str = knob("after_rejection", option=True, choices=("after_rejection", "before_rejection"))
    bypass: bool = knob(False, key="bypass")
    """Use the sampler's log-probs as the old policy."""

    @property
    def of_step(self) -> bool:
        """Return whether it reads the trainer's log-probs before the update; a bypass that rejects nothing does not."""
        return not self.bypass or bool(self.reject) or self.form == "mask"

    def rejections(self) -> tuple[Rejection, ...]:
        return tuple(Rejection.parse(text) for text in self.reject)

    def faults(self) -> Iterator[str]:
        yield from Spec.faults(self)
        for text in self.reject:
            try:
                Rejection.parse(text)
            except ValueError as exc:
                yield str(exc)
        if self.form is not None and self.high is None:
            usual = "(truncate 2, icepop 5, mask 3)"
            yield f"algorithm.correction={self.form}: set algorithm.options.correction_high {usual}"
        if self.low is not None and self.high is not None and self.low > self.high:
            yield f"algorithm.options.correction_low={self.low} is above correction_high={self.high}: need low <= high"
        if self.bypass and self.batch_normalize:
            why = "the weights follow the current policy, their mean would not; leave it out"
            yield f"algorithm.options.correction_batch_normalize with algorithm.bypass: {why}"


@dataclass(frozen=True, kw_only=True)
class Divergence(Spec):
    """The divergence of the policy from a teacher, over the teacher's likeliest tokens and the rest, as a term beside a
    policy loss."""

    prefix: ClassVar[str] = "divergence_"
    switches = ("coef",)
    coef: float = knob(0.0, option=True, least=0)
    beta: float = knob(0.5, option=True, least=0, most=1)
    """As in `GKDTopK`."""
    clamp: float | None = knob(None, option=True, above=0)
    """As its teacher_clamp."""
    floor: float | None = knob(None, option=True, below=0)
    """As its teacher_floor."""
