"""Algorithms as rows of a table: group spec, selection, estimator, terms, aggregation and KL are independent axes.

A preset fixes all of them at the paper's values (algorithms.md section 9); settings override single ones; the resolved
row is plain data that the loop, the roles and the engine run without knowing its name.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor

from verl.algorithms import advantages as adv
from verl.algorithms import terms as tm
from verl.algorithms.terms import Term, TermValue
from verl.algorithms.weights import AGGREGATIONS
from verl.batch import Columns
from verl.types import Sampling

Select = Callable[[Sequence[float]], Literal["keep", "reject"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """n trajectories to train on and k for a baseline, each with its sampling. `least`: fewer carry no signal."""

    least: int = 1
    baselines: int = 0
    baseline_sampling: Callable[[Sampling], Sampling] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KLReward:
    """KL in the reward (3.2): R -= beta k(old, ref). target set: adaptive controller (1909.08593)."""

    coef: float
    form: str = "k1"
    target: float | None = None
    horizon: float = 10000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    name: str
    source: str
    settings: Mapping[str, Any]
    group: GroupSpec
    select: Select
    filter_metric: str | None
    advantage: Callable[[Columns], Mapping[str, Tensor]]
    terms: tuple[Term, ...]
    kl_reward: KLReward | None = None
    max_draws_per_group: float = 10.0
    on_exhausted: Literal["stop", "smaller"] = "stop"

    def needs(self, updates: int) -> tuple[str, ...]:
        """Columns to infer before the advantages, in order. One update: the old policy is the current one, no pass."""
        wanted = {name for term in self.terms for name in term.inputs}
        out = []
        if "ref_logprobs" in wanted or self.kl_reward is not None:
            out.append("ref_logprobs")
        if updates > 1 or self.kl_reward is not None:
            out.append("old_logprobs")
        if "old_values" in wanted:
            out.append("old_values")
        return tuple(out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One preset: every axis by name. What `verl show algorithm=NAME` prints."""

    source: str
    estimator: str
    loss: str
    aggregation: str
    least: int = 1
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float | None = None
    normalize_by_std: bool = True
    gamma: float = 1.0
    lam: float = 1.0
    horizon_tokens: int | None = None
    kl_loss_coef: float = 0.0
    kl_loss_form: str = "k3"
    kl_reward_coef: float = 0.0
    kl_reward_form: str = "k1"
    kl_reward_target: float | None = None
    kl_reward_horizon: float = 10000.0
    entropy_coef: float = 0.0
    filter_groups: bool = False
    filter_metric: str | None = None
    max_draws_per_group: float = 10.0
    on_exhausted: str = "stop"
    advantage: str | None = None
    notes: tuple[str, ...] = field(default=())


TABLE: Mapping[str, Row] = {
    "grpo": Row(
        source="DeepSeekMath, 2402.03300", estimator="grpo", loss="ppo_clip", least=2,
        aggregation="seq-mean-token-mean", kl_loss_coef=0.04, kl_loss_form="k3",
    ),
    "drgrpo": Row(
        source="Understanding R1-Zero-like training, 2503.20783", estimator="grpo", loss="ppo_clip",
        least=2, aggregation="seq-mean-token-sum-norm", normalize_by_std=False,
    ),
    "dapo": Row(
        source="DAPO, 2503.14476", estimator="grpo", loss="ppo_clip", least=2,
        aggregation="token-mean", clip_low=0.2, clip_high=0.28, filter_groups=True,
    ),
    "rloo": Row(
        source="Back to basics, 2402.14740", estimator="rloo", loss="reinforce", least=2,
        aggregation="seq-mean-token-sum", kl_reward_coef=0.05, kl_reward_form="k1",
    ),
    "reinforce_plus_plus": Row(
        source="REINFORCE++, 2501.03262", estimator="reinforce_plus_plus", loss="ppo_clip",
        aggregation="token-mean", kl_reward_coef=0.01, kl_reward_form="k1",
    ),
    "reinforce_plus_plus_baseline": Row(
        source="REINFORCE++-baseline, 2501.03262", estimator="reinforce_plus_plus_baseline",
        loss="ppo_clip", least=2, aggregation="token-mean", kl_loss_coef=0.001, kl_loss_form="k2",
    ),
    "reinforce": Row(
        source="Williams 1992", estimator="reinforce", loss="reinforce", aggregation="seq-mean-token-sum",
    ),
}  # fmt: skip

ESTIMATORS: Mapping[str, Callable[[Row], Callable[[Columns], Mapping[str, Tensor]]]] = {
    "grpo": lambda row: partial(adv.grpo, normalize_by_std=row.normalize_by_std),
    "rloo": lambda row: adv.rloo,
    "reinforce_plus_plus": lambda row: partial(adv.reinforce_plus_plus, gamma=row.gamma),
    "reinforce_plus_plus_baseline": lambda row: adv.reinforce_plus_plus_baseline,
    "reinforce": lambda row: partial(adv.reinforce, gamma=row.gamma),
}

LOSSES: Mapping[str, Callable[[Row], Callable[[Columns], TermValue]]] = {
    "ppo_clip": lambda row: partial(
        tm.ppo_clip, clip_low=row.clip_low, clip_high=row.clip_high, clip_dual=row.clip_dual
    ),
    "reinforce": lambda row: tm.reinforce,
}


def resolve(name: str, settings: Mapping[str, Any] | None = None) -> Algorithm:
    """The algorithm `name` with the given settings in place of the preset's. None means: the preset's value.

    settings: any field of `Row`. `loss` and `advantage` may be `module:function`, a user's own
    fn(Columns) -> TermValue or [L] values, or fn(Columns) -> {"advantages": [L]}.
    """
    if name not in TABLE:
        near = difflib.get_close_matches(name, TABLE, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"algorithm {name!r} is not in the table ({', '.join(TABLE)}){hint}")
    given = {k: v for k, v in (settings or {}).items() if v is not None}
    unknown = set(given) - set(Row.__dataclass_fields__)
    assert not unknown, f"unknown algorithm settings {sorted(unknown)}"
    row = replace(TABLE[name], **given)
    _check(name, row)
    return Algorithm(
        name=name,
        source=row.source,
        settings={f: getattr(row, f) for f in Row.__dataclass_fields__},
        group=GroupSpec(least=row.least),
        select=reject_flat if row.filter_groups else keep_all,
        filter_metric=row.filter_metric,
        advantage=_user_function(row.advantage, "algorithm.advantage") if row.advantage else ESTIMATORS[row.estimator](row),
        terms=_terms(row),
        kl_reward=KLReward(coef=row.kl_reward_coef, form=row.kl_reward_form, target=row.kl_reward_target,
                           horizon=row.kl_reward_horizon) if row.kl_reward_coef else None,
        max_draws_per_group=row.max_draws_per_group,
        on_exhausted=row.on_exhausted,  # type: ignore[arg-type]
    )  # fmt: skip


def _terms(row: Row) -> tuple[Term, ...]:
    fn = _user_loss(row.loss) if ":" in row.loss else LOSSES[row.loss](row)
    common: dict[str, Any] = {"aggregate": row.aggregation, "horizon_tokens": row.horizon_tokens}
    out = [Term(name="pg_loss", fn=fn, inputs=("advantages",), corrected=True, **common)]
    if row.kl_loss_coef:
        kl = partial(tm.kl_loss, form=row.kl_loss_form)
        out.append(Term(name="kl_loss", fn=kl, coef=row.kl_loss_coef, inputs=("ref_logprobs",), **common))
    if row.entropy_coef:
        out.append(Term(name="entropy_loss", fn=tm.entropy_bonus, coef=row.entropy_coef, outputs=("entropy",), **common))
    return tuple(out)


def _check(name: str, row: Row) -> None:
    if row.aggregation not in AGGREGATIONS:
        raise ValueError(f"algorithm.aggregation={row.aggregation!r} is unknown; known: {', '.join(AGGREGATIONS)}")
    if row.aggregation == "seq-mean-token-sum-norm" and not row.horizon_tokens:
        raise ValueError(
            f"{name} divides by a constant horizon: set algorithm.horizon_tokens (the maximum response length)"
        )
    if row.estimator not in ESTIMATORS:
        raise ValueError(f"algorithm.estimator={row.estimator!r} is unknown; known: {', '.join(ESTIMATORS)}")
    if row.loss not in LOSSES and ":" not in row.loss:
        raise ValueError(f"algorithm.loss={row.loss!r} is unknown; known: {', '.join(LOSSES)} or module:function")
    if not 0 <= row.clip_low < 1 or row.clip_high < 0:
        raise ValueError(f"clip_low={row.clip_low}, clip_high={row.clip_high}: need 0 <= clip_low < 1 and clip_high >= 0")
    if row.clip_dual is not None and row.clip_dual <= 1:
        raise ValueError(f"clip_dual={row.clip_dual}: dual clip needs c > 1 (verl: 3.0)")
    if row.on_exhausted not in ("stop", "smaller"):
        raise ValueError(f"algorithm.on_exhausted={row.on_exhausted!r}: stop | smaller")
    tm.kl_form(row.kl_loss_form)
    tm.kl_form(row.kl_reward_form)


def keep_all(values: Sequence[float]) -> Literal["keep", "reject"]:
    return "keep"


def reject_flat(values: Sequence[float]) -> Literal["keep", "reject"]:
    """Dynamic sampling (6.2): keep a group iff its metric varies beyond rounding, or it is alone."""
    if len(values) == 1:
        return "keep"
    high, low = max(values), min(values)
    return "reject" if high - low <= 1e-6 * max(1.0, abs(high), abs(low)) else "keep"


def _user_function(spec: str, key: str) -> Callable[[Columns], Any]:
    module_name, _, attribute = spec.partition(":")
    if not attribute:
        raise ValueError(f"{key}={spec!r}: write it as module:function")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as e:
        raise ValueError(f"{key}={spec!r}: cannot import {module_name!r} ({e}); is it on PYTHONPATH?") from e
    except AttributeError as e:
        raise ValueError(f"{key}={spec!r}: module {module_name!r} has no {attribute!r}") from e


def _user_loss(spec: str) -> Callable[[Columns], TermValue]:
    fn = _user_function(spec, "algorithm.loss")

    def called(columns: Columns) -> TermValue:
        out = fn(columns)
        return out if isinstance(out, TermValue) else TermValue(out)

    return called
