"""The parts that an algorithm is composed of: group, estimator, loss, KL and critic (filters and corrections:
filters.py). No torch. Each spec owns its settings (settings.py); functions are named `module:name` and imported when a
run is assembled."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from verl.algorithms.settings import Spec, knob
from verl.columns import COLUMNS
from verl.errors import Refused
from verl.types import Sampling

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
BY_HORIZON = "seq-mean-token-sum-norm"
KL_FORMS = ("k1", "abs", "k2", "k3")


class Need(NamedTuple):
    """A column that is inferred before the advantages: `role` computes `output` of its model, stored as `column`."""

    column: str
    role: str
    output: str
    build: str = ""
    """`module:function` that makes the role's workers, (ModelContext, Algorithm) -> ModelWorkers; the actor's exist
    already."""
    may_fail: bool = False
    """A sample with a value that is not finite is Invalid; for other columns that stops the run."""


_TEACHER = "verl.driver.models:teacher"

NEEDS = (
    Need("ref_logprobs", "ref", "logprobs", "verl.driver.models:reference"),
    Need("teacher_logprobs", "teacher", "logprobs", _TEACHER, may_fail=True),
    Need("teacher_ids", "teacher", "topk_ids", _TEACHER, may_fail=True),
    Need("teacher_topk", "teacher", "topk_logprobs", _TEACHER, may_fail=True),
    Need("teacher_hidden", "teacher", "hidden", _TEACHER, may_fail=True),
    Need("old_logprobs", "actor", "logprobs"),
    Need("sum_pi_squared", "actor", "sum_pi_squared"),
    Need("old_values", "critic", "values", "verl.driver.models:critic"),
)
"""Every column that may be inferred, in the order of inference. A new role is one more row."""

WRITTEN = tuple(c.name for c in COLUMNS if c.written)
"""Columns that every step has without inference."""

TURNS = ("side/turn", "side/turn_reward", "side/turn_state")
"""The turn's number, reward and state of each token: agent loops record them for an algorithm that reads one."""


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """The needs of an algorithm on its groups."""

    least: int = 2
    """Fewer valid answers have no signal."""
    baselines: int = 0
    """Answers that others are compared with, and that are not trained."""
    baseline_sampling: Callable[[Sampling], Sampling] | None = None
    """The sampling of these, from that of the group."""


def greedy(sampling: Sampling) -> Sampling:
    """The same request, decoded greedily: ReMax's baseline."""
    return replace(sampling, temperature=0.0)


@dataclass(frozen=True, kw_only=True)
class EstimatorSpec(Spec):
    """An advantage estimator. The settings are keyword arguments of `fn`."""

    fn: str = field(kw_only=False)
    """`module:function`."""
    inputs: tuple[str, ...] = ()
    """Inferred columns that it reads."""
    optional: tuple[str, ...] = ()
    """Columns of a correction that it reads where there is one."""


@dataclass(frozen=True, kw_only=True)
class Grouped(EstimatorSpec):
    """epsilon is added to the deviation that divides (TRL and OpenRLHF have other numbers than verl's 1e-6)."""

    normalize_by_std: bool = knob(True)
    epsilon: float = knob(1e-6, option=True, above=0)


@dataclass(frozen=True, kw_only=True)
class Singletons(EstimatorSpec):
    """singleton: the advantage of an answer without others to its prompt, 0 or its own score (verl)."""

    singleton: str = knob("zero", option=True, choices=("zero", "raw"))


@dataclass(frozen=True, kw_only=True)
class Scaled(EstimatorSpec):
    """The advantages of a step have a mean of 0, and are scaled. whiten_epsilon: they are divided by their deviation
    plus this (TRL, 1e-4); null: by sqrt(variance + 1e-8)."""

    whiten_epsilon: float | None = knob(None, option=True, above=0)


@dataclass(frozen=True, kw_only=True)
class Whitened(Scaled):
    """shift_mean: false adds the mean of the advantages to what is whitened."""

    shift_mean: bool = knob(True, option=True)


@dataclass(frozen=True, kw_only=True)
class WhitenedSingletons(Whitened, Singletons):
    pass


@dataclass(frozen=True, kw_only=True)
class ScaledSingletons(Scaled, Singletons):
    pass


@dataclass(frozen=True, kw_only=True)
class GRPO(Grouped, Singletons):
    fn: str = "verl.algorithms.estimators:grpo"
    leave_one_out: bool = knob(False, option=True)
    scale_rewards: str = knob("group", option=True, choices=("group", "batch", "none"))


@dataclass(frozen=True, kw_only=True)
class GPG(Singletons):
    """Advantages that are scaled by the answers that count."""

    fn: str = "verl.algorithms.estimators:gpg"
    alpha_counts: str = knob("varied", option=True, choices=("varied", "nonzero"))
    """B / N scales the advantages: N counts the answers of groups with a variance (the paper), or scores other than 0
    (verl)."""
    f_norm: float = knob(1.0, option=True, above=0)
    """The advantages are divided by it."""


@dataclass(frozen=True, kw_only=True)
class RLOO(ScaledSingletons):
    fn: str = "verl.algorithms.estimators:rloo"
    reward_clip: tuple[float, ...] = knob((), option=True)
    normalize_advantages: bool = knob(False, option=True)

    def faults(self) -> Iterator[str]:
        yield from Spec.faults(self)
        if self.reward_clip and (len(self.reward_clip) != 2 or self.reward_clip[0] >= self.reward_clip[-1]):
            yield f"algorithm.options.reward_clip={list(self.reward_clip)}: write [low,high], e.g. [-10,10]"


@dataclass(frozen=True, kw_only=True)
class Discounted(EstimatorSpec):
    gamma: float = knob(1.0, least=0, most=1)


@dataclass(frozen=True, kw_only=True)
class WhitenedReturns(Discounted, Whitened):
    pass


@dataclass(frozen=True, kw_only=True)
class OPD(Discounted):
    """Distillation on-policy: the teacher's signal as an advantage."""

    fn: str = "verl.algorithms.estimators:opd"
    inputs: tuple[str, ...] = ("teacher_logprobs", "rollout_logprobs")
    gamma: float = knob(0.0, least=0, most=1)
    """The discount of the teacher's signal; the reward's is one for the whole answer."""
    teacher_coef: float = knob(1.0, option=True, least=0)
    reward_coef: float = knob(0.0, option=True, least=0)
    agree_only: bool = knob(False, option=True)
    prefix_gain: float = knob(0.0, option=True, least=0)
    teacher_clamp: float | None = knob(None, option=True, above=0)
    teacher_floor: float | None = knob(None, option=True, below=0)

    def faults(self) -> Iterator[str]:
        yield from Spec.faults(self)
        if not self.teacher_coef:
            yield "algorithm.options.teacher_coef=0: nothing is learned from the teacher; set algorithm.name=grpo"
        if self.agree_only and not self.reward_coef:
            yield "algorithm.options.agree_only=true is of the reward's part: set algorithm.options.reward_coef"


@dataclass(frozen=True, kw_only=True)
class GAE(WhitenedReturns):
    fn: str = "verl.algorithms.estimators:gae"
    inputs: tuple[str, ...] = ("old_values",)
    lam: float = knob(1.0, least=0, most=1)
    lam_critic: float | None = knob(None, option=True, least=0, most=1)
    length_adaptive_alpha: float | None = knob(None, option=True, above=0)


@dataclass(frozen=True, kw_only=True)
class TurnGAE(WhitenedReturns):
    fn: str = "verl.algorithms.turns:turn_gae"
    inputs: tuple[str, ...] = ("old_values", *TURNS[:2])
    lam: float = knob(0.95, least=0, most=1)


@dataclass(frozen=True, kw_only=True)
class TurnReturns(Grouped):
    fn: str = "verl.algorithms.turns:turn_discount"
    inputs: tuple[str, ...] = TURNS[:2]
    turn_discount: float = knob(1.0, option=True, least=0, most=1)


@dataclass(frozen=True, kw_only=True)
class GiGPO(Grouped):
    fn: str = "verl.algorithms.turns:gigpo"
    inputs: tuple[str, ...] = TURNS
    turn_discount: float = knob(0.95, option=True, least=0, most=1)
    step_coef: float = knob(1.0, option=True, least=0)


@dataclass(frozen=True, kw_only=True)
class GDPO(Scaled):
    fn: str = "verl.algorithms.estimators:gdpo"
    reward_components: tuple[str, ...] = knob((), option=True)
    reward_weights: tuple[float, ...] | None = knob(None, option=True)
    epsilon: float = knob(1e-6, option=True, above=0)

    def faults(self) -> Iterator[str]:
        yield from Spec.faults(self)
        names, weights = self.reward_components, self.reward_weights
        if len(names) < 2:
            fix = "set algorithm.options.reward_components=[a,b] to keys of the dict that the reward function returns"
            yield f"gdpo normalises reward components one by one: {fix}"
        if weights is not None and len(weights) != len(names):
            prefix = f"algorithm.options.reward_weights has {len(weights)} values for {len(names)}"
            yield f"{prefix} algorithm.options.reward_components: give one for each"


@dataclass(frozen=True, kw_only=True)
class LossSpec(Spec):
    """A policy loss, its aggregation, and the small terms beside it. The settings that a subclass adds are keyword
    arguments of `fn`."""

    fn: str = field(kw_only=False)
    """`module:function`."""
    inputs: tuple[str, ...] = ("advantages",)
    """Columns that it reads."""
    outputs: tuple[str, ...] = ("logprobs",)
    """Outputs of the model that it reads."""
    recorded: tuple[str, ...] = ()
    """Further outputs of its first pass that are recorded for metrics (columns train_NAME)."""
    two_pass: bool = False
    """It has statistics over the whole step."""
    corrected: Literal["token", "geometric", "own"] = "token"
    """How importance weights enter it. own: `fn` reads them, at the level `weighed`."""
    aggregation: str = knob("token-mean", choices=AGGREGATIONS)
    horizon_tokens: int | None = knob(None, least=1)
    off_policy_delta: float | None = knob(None, option=True)
    top_entropy_quantile: float | None = knob(None, option=True, above=0, most=1)
    """The share of tokens, those of the highest entropy, that have a loss. None: all."""
    entropy_coef: float = knob(0.0)
    positive_nll_coef: float = knob(0.0, option=True)
    observation_coef: float = knob(0.0, option=True, least=0)
    coef_schedule: Mapping[str, Any] | None = knob(None, option=True)
    """Coefficient -> [[step, factor], ...] (`factors`)."""

    def faults(self) -> Iterator[str]:
        yield from Spec.faults(self)
        for key, points in self.schedule().items():
            if not _are_points(points):
                wanted = "[[step, factor], ...], steps from 1 that grow, factors >= 0, e.g. [[1, 1], [100, 0]]"
                yield f"algorithm.options.coef_schedule.{key}={points}: write {wanted}"

    def schedule(self) -> Mapping[str, Any]:
        return self.coef_schedule if isinstance(self.coef_schedule, Mapping) else {}

    def factors(self, step: int) -> dict[str, float]:
        """Return the factor of each scheduled coefficient at this step (the first is 1): straight lines between the
        points, constant before the first and after the last."""
        return {k: float(np.interp(step, *np.asarray(points, np.float64).T)) for k, points in self.schedule().items()}

    def arguments(self) -> dict[str, Any]:
        own = {f.name for f in fields(self)} - {f.name for f in fields(LossSpec)}
        return {name: getattr(self, name) for name in sorted(own)}


def _are_points(given: Any) -> bool:
    """Return whether this is [[step, factor], ...] as a schedule needs it."""
    if not isinstance(given, list | tuple) or not all(isinstance(p, list | tuple) and len(p) == 2 for p in given):
        return False
    steps, factors = [p[0] for p in given], [p[1] for p in given]
    whole = all(type(x) is int and x >= 1 for x in steps) and bool(steps) and steps == sorted({*steps})
    return whole and all(type(x) in (int, float) and 0 <= x < math.inf for x in factors)


@dataclass(frozen=True, kw_only=True)
class Clipped(LossSpec):
    clip_low: float = knob(0.2, least=0, below=1, advice=" (0.2 is usual)")
    clip_high: float = knob(0.2, least=0)


@dataclass(frozen=True, kw_only=True)
class PPOClip(Clipped):
    fn: str = "verl.algorithms.losses:ppo_clip"
    clip_dual: float | None = knob(
        None, above=1, advice="; dual clip needs a bound above 1 (verl: 3.0), or null for none"
    )
    ratio_max: float | None = knob(None, option=True, above=0)


@dataclass(frozen=True, kw_only=True)
class DPPO(Clipped):
    fn: str = "verl.algorithms.losses:dppo_tv"
    clip_low: float = knob(0.15, least=0)
    clip_high: float = knob(0.15, least=0)
    ratio_max: float | None = knob(20.0, option=True, above=0)


@dataclass(frozen=True, kw_only=True)
class IntellectIPO(LossSpec):
    fn: str = "verl.algorithms.losses:intellect_ipo"
    clip_low: float = knob(0.2, least=0)
    clip_high: float = knob(0.2, least=0)
    drift_coef: float = knob(1e-3, option=True, least=0)


@dataclass(frozen=True, kw_only=True)
class VESPO(LossSpec):
    """`lambda_*` set how fast the weight of a sequence falls that became likelier, `k_*` of one that became rarer."""

    fn: str = "verl.algorithms.losses:vespo"
    corrected: Literal["token", "geometric", "own"] = "own"
    k_positive: float = knob(2.0, option=True, least=0)
    lambda_positive: float = knob(3.0, option=True, least=0)
    k_negative: float = knob(3.0, option=True, least=0)
    lambda_negative: float = knob(2.0, option=True, least=0)


@dataclass(frozen=True, kw_only=True)
class DRO(LossSpec):
    fn: str = "verl.algorithms.losses:dro"
    dro_beta: float = knob(0.1, option=True, least=0)


@dataclass(frozen=True, kw_only=True)
class CISPO(LossSpec):
    fn: str = "verl.algorithms.losses:cispo"
    ratio_max: float | None = knob(None, option=True, above=0)
    ratio_min: float | None = knob(None, option=True, least=0)

    def faults(self) -> Iterator[str]:
        yield from LossSpec.faults(self)
        if self.ratio_max is None:
            yield "algorithm.options.ratio_max is missing: cispo caps the ratio; set it to 5.0"


@dataclass(frozen=True, kw_only=True)
class SAPO(LossSpec):
    fn: str = "verl.algorithms.losses:sapo"
    tau_positive: float = knob(1.0, option=True, above=0)
    tau_negative: float = knob(1.05, option=True, above=0)


@dataclass(frozen=True, kw_only=True)
class KLCov(LossSpec):
    fn: str = "verl.algorithms.losses:kl_cov"
    two_pass: bool = True
    cov_ratio: float = knob(2e-4, option=True, least=0, most=1)
    cov_coef: float = knob(1.0, option=True)


@dataclass(frozen=True, kw_only=True)
class ClipCov(Clipped):
    fn: str = "verl.algorithms.losses:clip_cov"
    two_pass: bool = True
    cov_ratio: float = knob(2e-4, option=True, least=0, most=1)
    cov_low: float = knob(1.0, option=True)
    cov_high: float = knob(5.0, option=True)


@dataclass(frozen=True, kw_only=True)
class GKDTopK(LossSpec):
    """beta: 0 is forward KL, 1 reverse, generalised JSD between them · on_policy_share: GKD's lambda, of prompts that
    the policy answers; the others have their stored answer, in the column stored_key."""

    fn: str = "verl.algorithms.losses:gkd_topk"
    inputs: tuple[str, ...] = ("teacher_ids", "teacher_topk")
    outputs: tuple[str, ...] = ("logprobs_at",)
    beta: float = knob(0.5, option=True, least=0, most=1)
    on_policy_share: float = knob(1.0, option=True, least=0, most=1)
    stored_key: str | None = knob(None, option=True)
    teacher_clamp: float | None = knob(None, option=True, above=0)
    teacher_floor: float | None = knob(None, option=True, below=0)

    def arguments(self) -> dict[str, Any]:
        bounds = {"clamp": self.teacher_clamp, "floor": self.teacher_floor}
        return {"beta": self.beta, "mixed": self.on_policy_share < 1, **bounds}

    def faults(self) -> Iterator[str]:
        yield from LossSpec.faults(self)
        if (self.on_policy_share < 1) != (self.stored_key is not None):
            prefix = f"algorithm.options.on_policy_share={self.on_policy_share:g}"
            if self.stored_key is None:
                fix = "set algorithm.options.stored_key=COLUMN, where the rows hold them"
                yield f"{prefix}: the other prompts have stored answers; {fix}"
            else:
                yield f"algorithm.options.stored_key={self.stored_key} does nothing with {prefix}: lower it"


@dataclass(frozen=True, kw_only=True)
class GKD(GKDTopK):
    """GKD over the whole vocabulary: the student's engine computes it, with this beta."""

    fn: str = "verl.algorithms.losses:gkd"
    inputs: tuple[str, ...] = ("teacher_hidden",)
    outputs: tuple[str, ...] = ("divergence", "teacher_agreement", "teacher_entropy")
    recorded: tuple[str, ...] = ("drawn_by_teacher",)

    def arguments(self) -> dict[str, Any]:
        return {"mixed": self.on_policy_share < 1}

    def faults(self) -> Iterator[str]:
        yield from GKDTopK.faults(self)
        for key in ("teacher_clamp", "teacher_floor"):
            if (value := getattr(self, key)) is not None:
                yield f"algorithm.options.{key}={value:g}: gkd clamps nothing; set algorithm.name=gkd_topk or opd"


@dataclass(frozen=True, kw_only=True)
class KLLoss(Spec):
    """KL to the reference as a term of the loss. `ratio_corrected`: times pi / pi_old, gradient included."""

    prefix: ClassVar[str] = "kl_loss_"
    switches = ("coef",)
    coef: float = knob(0.0, least=0)
    form: str = knob("k3", choices=(*KL_FORMS, *(f"{k}+" for k in KL_FORMS)))
    ratio_corrected: bool = knob(False, option=True)


@dataclass(frozen=True, kw_only=True)
class KLReward(Spec):
    """KL to the reference in the reward: R -= coef k(old, ref). `target` set: adaptive controller (1909.08593)."""

    prefix: ClassVar[str] = "kl_reward_"
    switches = ("coef",)
    coef: float = knob(0.0, least=0)
    form: str = knob("k1", choices=KL_FORMS)
    target: float | None = knob(None, above=0)
    horizon: float = knob(10000.0, above=0)


@dataclass(frozen=True, kw_only=True)
class CriticSpec(Spec):
    """A value model beside the policy; `critic_warmup_*`: it is trained alone so long."""

    value_clip: float | None = knob(0.2, above=0)
    critic_warmup_steps: int = knob(0, least=0)
    critic_warmup_until: float | None = knob(None, above=0, most=1, advice=", an explained variance")


@dataclass(frozen=True)
class PreferenceSpec:
    """A loss that `preference.loss=NAME` trains."""

    source: str
    fn: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `fn` that preference.options may set."""
    beta: float = 0.1
    reference: bool = True
    """It needs the log-probs of the frozen start policy."""
    paired: bool = True
    needs_gap: bool = False
    """It reads the answers' true rewards."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `fn` that are fixed."""


def short(fn: str) -> str:
    """Return the short name of one of our functions; a user's own stays `module:name`."""
    return fn.partition(":")[2] if fn.startswith("verl.algorithms.") else fn


def function(path: str, key: str) -> Callable[..., Any]:
    """Return the function at `module:name`; ValueError naming the key that it was given for."""
    module_name, _, attribute = path.partition(":")
    if not attribute:
        raise Refused(f"{key}={path}: write it as module:function")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as e:
        raise Refused(f"{key}={path}: cannot import {module_name!r} ({e}); is it on PYTHONPATH?") from e
    except AttributeError as e:
        raise Refused(f"{key}={path}: module {module_name!r} has no {attribute!r}") from e
