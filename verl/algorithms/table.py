"""Algorithms as rows of a table: group spec, selection, estimator, terms, aggregation, KL and correction are independent axes.

A preset fixes all of them at the paper's values (algorithms.md section 9); settings override single ones; the resolved
row is plain data that the loop, the roles and the engine run without knowing its name.
"""

from __future__ import annotations

import difflib
import importlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from verl.algorithms import advantages as adv
from verl.algorithms import terms as tm
from verl.algorithms.corrections import Correction, Rejection
from verl.algorithms.selection import per_prompt_filter
from verl.algorithms.terms import Term, TermValue
from verl.algorithms.weights import AGGREGATIONS
from verl.batch import Columns
from verl.types import Sampling

Select = Callable[[Sequence[float]], Literal["keep", "reject"]]
Choose = Callable[[Sequence[float], random.Random], Sequence[int]]
"""(scores of a group's training trajectories, seeded generator) -> which of them are trained."""


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
    advantage_inputs: tuple[str, ...]
    terms: tuple[Term, ...]
    value_terms: tuple[Term, ...] = ()
    choose: Choose | None = None
    kl_reward: KLReward | None = None
    correction: Correction | None = None
    critic_warmup_steps: int = 0
    critic_warmup_until: float | None = None
    max_draws_per_group: float = 10.0
    on_exhausted: Literal["stop", "smaller"] = "stop"

    def needs(self, updates: int) -> tuple[tuple[str, str, str], ...]:
        """(column, role, output) of every pass before the advantages, in order."""
        return tuple((column, *_SOURCES[column]) for column in self.columns(updates))

    @property
    def roles(self) -> frozenset[str]:
        return frozenset(role for _, role, _ in self.needs(1))

    def columns(self, updates: int) -> tuple[str, ...]:
        """Columns to infer before the advantages, in order. One update: the old policy is the current one, no pass."""
        wanted = {name for term in (*self.terms, *self.value_terms) for name in term.inputs} | set(
            self.advantage_inputs
        )
        bypass = self.correction is not None and self.correction.mode == "bypass"
        out = []
        if "ref_logprobs" in wanted or self.kl_reward is not None:
            out.append("ref_logprobs")
        moved = updates > 1 and not bypass
        if moved or self.kl_reward is not None or self.correction is not None or "old_logprobs" in wanted:
            out.append("old_logprobs")
        return (*out, *(name for name in ("sum_pi_squared", "old_values") if name in wanted))

    @property
    def critic(self) -> bool:
        return bool(self.value_terms)


_SOURCES = {
    "ref_logprobs": ("reference", "logprobs"),
    "old_logprobs": ("actor", "logprobs"),
    "sum_pi_squared": ("actor", "sum_pi_squared"),
    "old_values": ("critic", "values"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One preset: every axis by name. What `verl show algorithm=NAME` prints."""

    source: str
    estimator: str
    loss: str
    aggregation: str
    least: int = 1
    baselines: int = 0
    selection: str | None = None
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float | None = None
    ratio_max: float | None = None
    ratio_min: float | None = None
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    cov_ratio: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0
    cov_coef: float = 1.0
    off_policy_delta: float | None = None
    normalize_by_std: bool = True
    leave_one_out: bool = False
    scale_rewards: str = "group"
    reward_components: tuple[str, ...] | None = None
    reward_weights: tuple[float, ...] | None = None
    gamma: float = 1.0
    lam: float = 1.0
    lam_critic: float | None = None
    length_adaptive_alpha: float | None = None
    value_clip: float | None = 0.2
    critic_warmup_steps: int = 0
    critic_warmup_until: float | None = None
    positive_nll_coef: float = 0.0
    horizon_tokens: int | None = None
    kl_loss_coef: float = 0.0
    kl_loss_form: str = "k3"
    kl_loss_ratio_corrected: bool = False
    kl_reward_coef: float = 0.0
    kl_reward_form: str = "k1"
    kl_reward_target: float | None = None
    kl_reward_horizon: float = 10000.0
    entropy_coef: float = 0.0
    filter_groups: bool = False
    filter_metric: str | None = None
    max_draws_per_group: float = 10.0
    on_exhausted: str = "stop"
    correction: str | None = None
    correction_level: str = "token"
    correction_low: float | None = None
    correction_high: float | None = None
    correction_batch_normalize: bool = False
    correction_reject: tuple[str, ...] = ()
    correction_denominator: str = "after_rejection"
    bypass: bool = False
    advantage: str | None = None
    notes: tuple[str, ...] = field(default=())


TABLE: Mapping[str, Row] = {
    "grpo": Row(
        source="DeepSeekMath, 2402.03300",
        estimator="grpo",
        loss="ppo_clip",
        least=2,
        aggregation="seq-mean-token-mean",
        kl_loss_coef=0.04,
        kl_loss_form="k3",
    ),
    "grpo_loo": Row(
        source="NeMo-RL's GRPO: mean and deviation of the other members",
        estimator="grpo",
        loss="ppo_clip",
        least=2,
        aggregation="token-mean",
        leave_one_out=True,
    ),
    "drgrpo": Row(
        source="Understanding R1-Zero-like training, 2503.20783",
        estimator="grpo",
        loss="ppo_clip",
        least=2,
        aggregation="seq-mean-token-sum-norm",
        normalize_by_std=False,
    ),
    "dapo": Row(
        source="DAPO, 2503.14476",
        estimator="grpo",
        loss="ppo_clip",
        least=2,
        aggregation="token-mean",
        clip_low=0.2,
        clip_high=0.28,
        filter_groups=True,
    ),
    "gspo": Row(
        source="GSPO, 2507.18071",
        estimator="grpo",
        loss="gspo",
        least=2,
        aggregation="seq-mean-token-mean",
        clip_low=3e-4,
        clip_high=4e-4,
    ),
    "gspo_token": Row(
        source="GSPO-token, 2507.18071",
        estimator="grpo",
        loss="gspo_token",
        least=2,
        aggregation="seq-mean-token-mean",
        clip_low=3e-4,
        clip_high=4e-4,
    ),
    "cispo": Row(
        source="CISPO, MiniMax-M1, 2506.13585; the cap of ScaleRL, 2510.13786",
        estimator="grpo",
        loss="cispo",
        least=2,
        aggregation="token-mean",
        ratio_max=5.0,
    ),
    "sapo": Row(source="SAPO, 2511.20347", estimator="grpo", loss="sapo", least=2, aggregation="seq-mean-token-mean"),
    "gmpo": Row(
        source="GMPO, 2507.20673",
        estimator="grpo",
        loss="gmpo",
        least=2,
        aggregation="seq-mean-token-mean",
        clip_low=0.4,
        clip_high=0.4,
    ),
    "kl_cov": Row(
        source="The entropy mechanism, 2505.22617", estimator="grpo", loss="kl_cov", least=2, aggregation="token-mean"
    ),
    "clip_cov": Row(
        source="The entropy mechanism, 2505.22617", estimator="grpo", loss="clip_cov", least=2, aggregation="token-mean"
    ),
    "gdpo": Row(
        source="GDPO, 2601.05242", estimator="gdpo", loss="ppo_clip", least=2, aggregation="seq-mean-token-mean"
    ),
    "gpg": Row(source="GPG, 2504.02546", estimator="gpg", loss="reinforce", least=2, aggregation="token-mean"),
    "opo": Row(source="OPO, 2505.23585", estimator="opo", loss="ppo_clip", least=2, aggregation="token-mean"),
    "pass_at_k": Row(
        source="Pass@k policy optimisation, 2503.19595",
        estimator="pass_at_k",
        loss="ppo_clip",
        least=2,
        aggregation="token-mean",
    ),
    "otb": Row(
        source="Optimal token baseline (algorithms.md 1.12)",
        estimator="otb",
        loss="ppo_clip",
        least=2,
        aggregation="token-mean",
    ),
    "rloo": Row(
        source="Back to basics, 2402.14740",
        estimator="rloo",
        loss="reinforce",
        least=2,
        aggregation="seq-mean-token-sum",
        kl_reward_coef=0.05,
        kl_reward_form="k1",
    ),
    "remax": Row(
        source="ReMax, 2310.10505",
        estimator="remax",
        loss="reinforce",
        baselines=1,
        aggregation="seq-mean-token-sum",
        kl_reward_coef=0.01,
        kl_reward_form="k1",
    ),
    "reinforce_plus_plus": Row(
        source="REINFORCE++, 2501.03262",
        estimator="reinforce_plus_plus",
        loss="ppo_clip",
        aggregation="token-mean",
        kl_reward_coef=0.01,
        kl_reward_form="k1",
    ),
    "reinforce_plus_plus_baseline": Row(
        source="REINFORCE++-baseline, 2501.03262",
        estimator="reinforce_plus_plus_baseline",
        loss="ppo_clip",
        least=2,
        aggregation="token-mean",
        kl_loss_coef=0.001,
        kl_loss_form="k2",
    ),
    "reinforce": Row(source="Williams 1992", estimator="reinforce", loss="reinforce", aggregation="seq-mean-token-sum"),
    "ppo": Row(
        source="PPO, 1707.06347; for language models 1909.08593",
        estimator="gae",
        loss="ppo_clip",
        aggregation="token-mean",
        lam=0.95,
        kl_reward_coef=0.01,
        kl_reward_form="k1",
    ),
    "vapo": Row(
        source="VAPO, 2504.05118",
        estimator="gae",
        loss="ppo_clip",
        aggregation="token-mean",
        clip_low=0.2,
        clip_high=0.28,
        lam_critic=1.0,
        length_adaptive_alpha=0.05,
        positive_nll_coef=0.1,
        critic_warmup_steps=50,
    ),
    "pf_ppo": Row(
        source="PF-PPO, 2409.06957",
        estimator="gae",
        loss="ppo_clip",
        least=2,
        aggregation="token-mean",
        selection="bw",
        lam=0.95,
        kl_reward_coef=0.01,
        kl_reward_form="k1",
    ),
    "decoupled_ppo": Row(
        source="Decoupled PPO, AReaL, 2505.24298",
        estimator="grpo",
        loss="ppo_clip",
        least=2,
        aggregation="token-mean",
        correction="mask",
        correction_high=5.0,
        correction_denominator="before_rejection",
    ),
}

ESTIMATORS: Mapping[str, Callable[[Row], Callable[[Columns], Mapping[str, Tensor]]]] = {
    "gae": lambda row: partial(
        adv.gae,
        gamma=row.gamma,
        lam=row.lam,
        lam_critic=row.lam_critic,
        length_adaptive_alpha=row.length_adaptive_alpha,
    ),
    "grpo": lambda row: partial(
        adv.grpo, normalize_by_std=row.normalize_by_std, leave_one_out=row.leave_one_out, scale=row.scale_rewards
    ),
    "rloo": lambda row: adv.rloo,
    "remax": lambda row: adv.remax,
    "opo": lambda row: adv.opo,
    "gpg": lambda row: adv.gpg,
    "pass_at_k": lambda row: partial(adv.pass_at_k, normalize_by_std=row.normalize_by_std),
    "gdpo": lambda row: partial(_gdpo, names=row.reward_components or (), weights=row.reward_weights),
    "otb": lambda row: adv.otb,
    "reinforce_plus_plus": lambda row: partial(adv.reinforce_plus_plus, gamma=row.gamma),
    "reinforce_plus_plus_baseline": lambda row: adv.reinforce_plus_plus_baseline,
    "reinforce": lambda row: partial(adv.reinforce, gamma=row.gamma),
}
ESTIMATOR_INPUTS: Mapping[str, tuple[str, ...]] = {"gae": ("old_values",), "otb": ("old_logprobs", "sum_pi_squared")}

LOSSES: Mapping[str, Callable[[Row], Callable[[Columns], TermValue]]] = {
    "ppo_clip": lambda row: partial(
        tm.ppo_clip, clip_low=row.clip_low, clip_high=row.clip_high, clip_dual=row.clip_dual, ratio_max=row.ratio_max
    ),
    "gspo": lambda row: partial(tm.gspo, clip_low=row.clip_low, clip_high=row.clip_high),
    "gspo_token": lambda row: partial(tm.gspo_token, clip_low=row.clip_low, clip_high=row.clip_high),
    "cispo": lambda row: partial(tm.cispo, ratio_min=row.ratio_min, ratio_max=_cap(row)),
    "sapo": lambda row: partial(tm.sapo, tau_pos=row.tau_positive, tau_neg=row.tau_negative),
    "gmpo": lambda row: partial(tm.gmpo, clip_low=row.clip_low, clip_high=row.clip_high),
    "kl_cov": lambda row: partial(tm.kl_cov, k_ratio=row.cov_ratio, coef=row.cov_coef),
    "clip_cov": lambda row: partial(
        tm.clip_cov,
        ratio=row.cov_ratio,
        lower=row.cov_low,
        upper=row.cov_high,
        clip_low=row.clip_low,
        clip_high=row.clip_high,
    ),
    "reinforce": lambda row: tm.reinforce,
}
WHOLE_STEP = ("kl_cov", "clip_cov")  # losses with statistics over the whole optimizer step


def resolve(name: str, settings: Mapping[str, Any] | None = None) -> Algorithm:
    """The algorithm `name` with the given settings in place of the preset's. None means: the preset's value.

    settings: any field of `Row`. `loss` and `advantage` may be `module:function`, a user's own
    fn(Columns) -> TermValue or [L] values, or fn(Columns) -> {"advantages": [L]}.
    """
    if name not in TABLE:
        near = difflib.get_close_matches(name, TABLE, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"algorithm {name!r} is not in the table ({', '.join(TABLE)}){hint}")
    given: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in (settings or {}).items() if v is not None
    }
    unknown = sorted(set(given) - set(Row.__dataclass_fields__))
    if unknown:
        near = difflib.get_close_matches(unknown[0], Row.__dataclass_fields__, 1)
        raise ValueError(
            f"algorithm setting {unknown[0]!r} is unknown" + (f"; did you mean {near[0]!r}?" if near else "")
        )
    row = replace(TABLE[name], **given)
    _check(name, row)
    own = _user_function(row.advantage, "algorithm.advantage") if row.advantage else None
    return Algorithm(
        name=name,
        source=row.source,
        settings={f: getattr(row, f) for f in Row.__dataclass_fields__},
        group=GroupSpec(least=row.least, baselines=row.baselines, baseline_sampling=greedy if row.baselines else None),
        select=reject_flat if row.filter_groups else keep_all,
        filter_metric=row.filter_metric,
        advantage=own or ESTIMATORS[row.estimator](row),
        advantage_inputs=ESTIMATOR_INPUTS.get(row.estimator, ()),
        terms=_terms(row),
        value_terms=_value_terms(row),
        choose=partial(per_prompt_filter, how=row.selection) if row.selection else None,
        kl_reward=KLReward(
            coef=row.kl_reward_coef, form=row.kl_reward_form, target=row.kl_reward_target, horizon=row.kl_reward_horizon
        )
        if row.kl_reward_coef
        else None,
        correction=_correction(row),
        critic_warmup_steps=row.critic_warmup_steps,
        critic_warmup_until=row.critic_warmup_until,
        max_draws_per_group=row.max_draws_per_group,
        on_exhausted=row.on_exhausted,  # type: ignore[arg-type]
    )


def greedy(sampling: Sampling) -> Sampling:
    """The same request, decoded greedily: ReMax's baseline (1.7)."""
    return replace(sampling, temperature=0.0)


def _terms(row: Row) -> tuple[Term, ...]:
    fn = _user_loss(row.loss) if ":" in row.loss else LOSSES[row.loss](row)
    denominator: Any = row.correction_denominator
    common: dict[str, Any] = {
        "aggregate": row.aggregation,
        "horizon_tokens": row.horizon_tokens,
        "denominator": denominator,
    }
    inputs: tuple[str, ...] = ("advantages",)
    if row.off_policy_delta is not None:
        fn, inputs = (
            partial(tm.off_policy_sequence_mask, inner=fn, delta=row.off_policy_delta),
            (*inputs, "rollout_logprobs"),
        )
    correction = _correction(row)
    if (
        row.bypass and row.loss == "reinforce" and correction is not None
    ):  # weights from the current policy, so they follow it through several updates
        fn, inputs = partial(tm.bypass_reinforce, correction=correction), (*inputs, "rollout_logprobs")
    out = [
        Term(name="pg_loss", fn=fn, inputs=inputs, corrected=not row.bypass, two_pass=row.loss in WHOLE_STEP, **common)
    ]
    if row.kl_loss_coef:
        kl = partial(tm.kl_loss, form=row.kl_loss_form, ratio_corrected=row.kl_loss_ratio_corrected)
        out.append(Term(name="kl_loss", fn=kl, coef=row.kl_loss_coef, inputs=("ref_logprobs",), **common))
    if row.entropy_coef:
        out.append(
            Term(name="entropy_loss", fn=tm.entropy_bonus, coef=row.entropy_coef, outputs=("entropy",), **common)
        )
    if row.positive_nll_coef:
        out.append(
            Term(name="positive_nll", fn=tm.nll, coef=row.positive_nll_coef, aggregate="token-mean", over="positive")
        )
    return tuple(out)


def _value_terms(row: Row) -> tuple[Term, ...]:
    if row.estimator != "gae":
        return ()
    fn = partial(tm.value_clip, clip=row.value_clip)
    return (Term(name="vf_loss", fn=fn, outputs=("values",), inputs=("returns", "old_values"), aggregate="token-mean"),)


def _correction(row: Row) -> Correction | None:
    if row.correction is None and not row.correction_reject and not row.bypass:
        return None
    level: Any = row.correction_level if row.correction else None
    form: Any = row.correction or "truncate"
    return Correction(
        level=level,
        form=form,
        low=row.correction_low,
        high=row.correction_high,
        batch_normalize=row.correction_batch_normalize,
        reject=tuple(_rejection(text) for text in row.correction_reject),
        mode="bypass" if row.bypass else "decoupled",
    )


def _rejection(text: str) -> Rejection:
    """`token_k1:0.5:2` (bounds on pi_train / pi_rollout), `seq_mean_k3:0.01` (an upper bound)."""
    stat, *bounds = text.split(":")
    try:
        values = [float(b) for b in bounds]
        assert 1 <= len(values) <= 2
    except (ValueError, AssertionError):
        raise ValueError(
            f"algorithm.options.correction_reject={text!r}: write STAT:HIGH or STAT:LOW:HIGH, e.g. token_k1:0.5:2"
        ) from None
    return Rejection(stat, values[0] if len(values) == 2 else None, values[-1])


def _gdpo(columns: Columns, *, names: Sequence[str], weights: Sequence[float] | None) -> Mapping[str, Tensor]:
    """Stack the named reward components to [S, K] for the estimator."""
    have = sorted(n.removeprefix("component/") for n in columns.sequence if n.startswith("component/"))
    missing = [n for n in names if n not in have]
    if missing:
        raise ValueError(
            f"algorithm.options.reward_components: the reward gave no {missing}; its components: {', '.join(have) or 'none'}"
        )
    stacked = torch.stack([columns.sequence[f"component/{n}"] for n in names], 1)
    return adv.gdpo(replace(columns, sequence={**columns.sequence, "components": stacked}), weights=weights)


def _cap(row: Row) -> float:
    assert row.ratio_max is not None, "checked before"
    return row.ratio_max


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
    if row.estimator == "gdpo" and len(row.reward_components or ()) < 2:
        raise ValueError(
            f"{name} normalises each reward component on its own: set algorithm.options.reward_components=[a,b] to keys of the dict "
            "that the reward function returns"
        )
    if row.reward_weights is not None and len(row.reward_weights) != len(row.reward_components or ()):
        raise ValueError(
            f"algorithm.options.reward_weights has {len(row.reward_weights)} values for {len(row.reward_components or ())} reward_components"
        )
    if row.loss == "cispo" and row.ratio_max is None:
        raise ValueError("cispo caps the ratio: set algorithm.options.ratio_max (5.0)")
    if min(row.tau_positive, row.tau_negative) <= 0:
        raise ValueError(f"tau_positive={row.tau_positive}, tau_negative={row.tau_negative}: a temperature is above 0")
    if row.selection is not None and row.selection not in ("bon", "br", "bw"):
        raise ValueError(
            f"algorithm.options.selection={row.selection!r}: bon (best) | br (best and a random one) | bw (best and worst)"
        )
    if row.correction_level not in ("token", "sequence", "geometric"):
        raise ValueError(f"algorithm.options.correction_level={row.correction_level!r}: token | sequence | geometric")
    if row.correction is not None and row.correction_high is None:
        raise ValueError(
            f"algorithm.correction={row.correction}: set algorithm.options.correction_high (truncate 2, icepop 5, mask 3)"
        )
    if row.correction_denominator not in ("after_rejection", "before_rejection"):
        raise ValueError(
            f"algorithm.options.correction_denominator={row.correction_denominator!r}: after_rejection | before_rejection"
        )
    if row.bypass and row.correction is not None and row.loss == "ppo_clip":
        raise ValueError(
            "algorithm.bypass=true puts the sampler's log-probs in the ratio already: a correction would count it twice; "
            "set algorithm.correction=null, or algorithm.loss=reinforce"
        )
    if row.bypass and row.correction_batch_normalize:
        raise ValueError(
            "algorithm.options.correction_batch_normalize with bypass: the weights follow the current policy, their mean would not; leave it out"
        )
    if row.bypass and row.loss not in ("ppo_clip", "reinforce"):
        raise ValueError(f"algorithm.bypass=true with loss={row.loss}: ppo_clip or reinforce")
    if row.bypass and row.loss != "ppo_clip" and row.correction is None:
        raise ValueError(
            f"algorithm.bypass=true with loss={row.loss}: set algorithm.correction and correction_high, its importance weights"
        )
    if row.critic_warmup_until is not None and not 0 < row.critic_warmup_until <= 1:
        raise ValueError(f"critic_warmup_until={row.critic_warmup_until}: an explained variance in (0, 1]")
    if row.loss != "cispo" and (not 0 <= row.clip_low < 1 or row.clip_high < 0):
        raise ValueError(
            f"clip_low={row.clip_low}, clip_high={row.clip_high}: need 0 <= clip_low < 1 and clip_high >= 0"
        )
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
