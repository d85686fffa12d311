"""Every algorithm as one entry, composed of specs at the paper's values. No torch: configuration and plan read it.
`settled` replaces its values by a user's settings and reports faults; `resolve.py` makes functions and terms of the
result."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, TypeVar

from verl.algorithms import filters, specs
from verl.algorithms.settings import MEANT, Knob, Spec
from verl.algorithms.specs import Clipped, EstimatorSpec, KLLoss, PPOClip, PreferenceSpec, short
from verl.columns import side_columns
from verl.errors import Refused
from verl.names import did_you_mean

T = TypeVar("T")
SCHEDULED = (
    *(
        "kl_loss_coef",
        "divergence_coef",
        "entropy_coef",
        "positive_nll_coef",
        "observation_coef",
    ),  # of terms of the loss
    *("teacher_coef", "reward_coef"),  # of an advantage
)
"""Coefficients that `coef_schedule` may multiply."""


@dataclass(frozen=True)
class Preset:
    """One algorithm. A part that is None is off."""

    name: str
    source: str
    estimator: specs.EstimatorSpec
    loss: specs.LossSpec
    group: specs.GroupSpec = field(default_factory=specs.GroupSpec)
    kl_loss: specs.KLLoss | None = None
    divergence: filters.Divergence | None = None
    kl_reward: specs.KLReward | None = None
    group_filter: filters.GroupFilter = field(default_factory=filters.GroupFilter)
    sample_filter: filters.SampleFilter | None = None
    truncation: filters.Truncation | None = None
    correction: filters.Correction | None = None
    critic: specs.CriticSpec | None = None

    def parts(self) -> dict[str, Spec]:
        """Every spec with settings by its field; the default where one is off. A critic cannot be switched on."""
        every = {name: getattr(self, name) or default for name, default in SWITCHED.items()}
        critic: dict[str, Spec] = {} if self.critic is None else {"critic": self.critic}
        return {"estimator": self.estimator, "loss": self.loss, "group_filter": self.group_filter, **every, **critic}

    def settings(self) -> dict[str, Any]:
        """Every setting of this algorithm by its key, as `verl show algorithm=NAME` prints them."""
        out = {"estimator": short(self.estimator.fn), "loss": short(self.loss.fn)}
        return {**out, **{k: v for spec in self.parts().values() for k, v in spec.settings().items()}}

    def needs(self, updates: int) -> tuple[specs.Need, ...]:
        """Return the columns that are inferred before the advantages, in order. With one update the old policy is the
        current one, without a pass."""
        wanted = {*self.estimator.inputs, *self.loss.inputs}
        if self.kl_loss or self.kl_reward:
            wanted.add("ref_logprobs")
        if self.divergence:
            wanted |= {*specs.GKDTopK.inputs}
        if self.kl_reward or (self.correction.of_step if self.correction else updates > 1):
            wanted.add("old_logprobs")
        if self.critic:
            wanted.add("old_values")
        return tuple(need for need in specs.NEEDS if need.column in wanted)

    def outputs_by_role(self, updates: int) -> dict[str, dict[str, str]]:
        """Return the same by role, in order: {output: column}."""
        needs = self.needs(updates)
        return {n.role: {m.output: m.column for m in needs if m.role == n.role} for n in needs}

    def roles(self) -> frozenset[str]:
        """The models beside the policy that this algorithm infers with: ref, critic, ..."""
        return frozenset(need.role for need in self.needs(1)) - {"actor"}

    def credits_turns(self) -> bool:
        """Return whether it reads rewards of single turns."""
        return not {*self.estimator.inputs, *self.loss.inputs}.isdisjoint(specs.TURNS)

    def columns(self) -> tuple[str, ...]:
        """Columns that a policy loss of this algorithm may read, apart from the model's outputs."""
        kl = ("ref_logprobs",) if self.kl_loss else ()
        correction = ("is_weights", "keep") if self.correction else ()
        return (*specs.WRITTEN, "old_logprobs", *kl, *correction)

    def stored_share(self) -> float:
        """Return the share of the prompts for which the stored answer is learned in place of answers of the policy."""
        return 1 - self.loss.on_policy_share if isinstance(self.loss, specs.GKDTopK) else 0.0

    def faults(self, longest: int | str = "rollout.max_response_tokens") -> Iterator[str]:
        """Yield a line for each fault of these specs together. longest: the longest response, for the advice."""
        written = {*side_columns(), *specs.WRITTEN}
        written |= {n.column for n in specs.NEEDS if n.role != "critic" or self.critic}
        for spec in (self.estimator, self.loss):
            for column in spec.inputs:
                if column not in written:
                    hint = (
                        f"{did_you_mean(column, sorted(written), form=MEANT)}; there are: {', '.join(sorted(written))}"
                    )
                    prefix = f"{spec.fn} reads the column {column!r}, which nobody writes"
                    yield f"algorithm.name={self.name}: {prefix}{hint}"
        if self.loss.aggregation == specs.BY_HORIZON and self.loss.horizon_tokens is None:
            prefix = f"{self.loss.aggregation} divides by a constant; set it to the longest response, {longest}"
            yield f"algorithm.horizon_tokens is missing: {prefix}"
        settings = self.settings()
        able = [key for key in SCHEDULED if settings.get(key)]
        for key in (key for key in self.loss.schedule() if key not in able):
            prefix = f"{key} is no coefficient of {self.name} that is above 0"
            yield f"algorithm.options.coef_schedule: {prefix}; of such there are: {', '.join(able) or 'none'}"
        drawn = {
            "a KL to the reference": self.kl_loss or self.kl_reward,
            "a correction": self.correction,
            "a critic": self.critic,
            "algorithm.options.off_policy_delta": self.loss.off_policy_delta,
            "a selection of answers": self.sample_filter or self.group_filter.filter_groups,
        }
        for what in (what for what, on in drawn.items() if on and self.stored_share()):
            prefix = f"algorithm.options.on_policy_share={1 - self.stored_share():g} with {what}"
            yield f"{prefix}, which is of answers that the policy drew: nobody drew a stored one; leave one of them out"
        if self.loss.top_entropy_quantile is not None and isinstance(self.loss, specs.GKDTopK):
            prefix = f"algorithm.options.top_entropy_quantile={self.loss.top_entropy_quantile:g}"
            yield f"{prefix} with algorithm.name={self.name}: it is of policy losses, and this loss is a divergence"
        if self.divergence and isinstance(self.loss, specs.GKDTopK):
            prefix = f"algorithm.options.divergence_coef={self.divergence.coef:g} with algorithm.name={self.name}"
            yield f"{prefix}, whose loss is a divergence: it goes with a policy loss, as algorithm.name=grpo has"
        c, loss = self.correction, short(self.loss.fn)
        if c is None or not c.bypass:
            return
        if loss not in ("ppo_clip", "reinforce", "intellect_ipo"):
            yield f"algorithm.bypass=true with algorithm.loss={loss}: set ppo_clip or reinforce"
        elif loss != "reinforce" and c.form is not None:
            fix = "a correction would count it twice; set algorithm.correction=null, or algorithm.loss=reinforce"
            yield f"algorithm.bypass=true puts the sampler's log-probs in the ratio already: {fix}"
        elif loss == "reinforce" and c.form is None:
            fix = "set algorithm.correction and algorithm.options.correction_high, its importance weights"
            yield f"algorithm.bypass=true with algorithm.loss=reinforce: {fix}"

    def reads_rewards(self) -> bool:
        """Return whether the loss uses the reward; distillation without a reward term only reports it."""
        weighed = not isinstance(self.estimator, specs.OPD) or self.estimator.reward_coef > 0
        return weighed and "advantages" in self.loss.inputs

    def idle(self, given: Mapping[str, Any]) -> Iterator[str]:
        """Yield the given settings that have no effect in this algorithm although they look as if they had."""
        if "horizon_tokens" in given and self.loss.aggregation != specs.BY_HORIZON:
            prefix = f"algorithm.horizon_tokens={given['horizon_tokens']} does nothing here"
            yield f"{prefix}: it belongs to algorithm.aggregation={specs.BY_HORIZON}"
        if "kl_reward_target" in given and self.kl_reward is None:
            yield "algorithm.kl_reward_target: its controller needs a start; set algorithm.kl_reward_coef (verl: 0.001)"
        if "kl_reward_horizon" in given and "kl_reward_target" not in given:
            fix = "set algorithm.kl_reward_target, or leave it out"
            yield f"algorithm.kl_reward_horizon belongs to the adaptive controller: {fix}"
        for key in ("on_policy_share", "stored_key"):
            if given.get(key) not in (None, 1) and not isinstance(self.loss, specs.GKDTopK):
                fix = "its loss is of what the policy draws; set algorithm.name=gkd or gkd_topk"
                yield f"algorithm.options.{key}={given[key]} does nothing with algorithm.name={self.name}: {fix}"
        for key in ("filter_metric", "max_draws_per_group"):
            if key in given and not self.group_filter.filter_groups:
                yield f"algorithm.{key}={given[key]} does nothing without algorithm.filter_groups=true: leave it out"
        if given.get("kl_reward_coef") and isinstance(self.estimator, specs.GDPO):
            fix = "it is made of the reward's components; set algorithm.kl_loss_coef instead"
            yield f"algorithm.kl_reward_coef={given['kl_reward_coef']} does not reach {self.name}'s advantage: {fix}"
        if given.get("kl_reward_coef") and not self.reads_rewards():
            fix = "the reward is in no loss; set algorithm.kl_loss_coef (or, of opd, algorithm.options.reward_coef)"
            yield f"algorithm.kl_reward_coef={given['kl_reward_coef']} does not reach {self.name}'s loss: {fix}"
        if "lam" in given and isinstance(self.estimator, specs.GAE) and self.estimator.length_adaptive_alpha:
            fix = "the policy's lambda follows from algorithm.options.length_adaptive_alpha; leave it out"
            yield f"algorithm.lam={given['lam']} does nothing here: {fix}"
        if (
            "scale_rewards" in given
            and isinstance(self.estimator, specs.Grouped)
            and not self.estimator.normalize_by_std
        ):
            fix = "nothing is scaled with algorithm.normalize_by_std=false; leave it out"
            yield f"algorithm.options.scale_rewards={given['scale_rewards']} does nothing here: {fix}"
        if "epsilon" in given and isinstance(self.estimator, specs.Grouped) and not self.estimator.normalize_by_std:
            fix = "nothing is divided by a deviation with algorithm.normalize_by_std=false; leave it out"
            yield f"algorithm.options.epsilon={given['epsilon']} does nothing here: {fix}"
        if (
            "whiten_epsilon" in given
            and isinstance(self.estimator, specs.RLOO)
            and not self.estimator.normalize_advantages
        ):
            fix = "nothing is scaled without algorithm.options.normalize_advantages=true; leave it out"
            yield f"algorithm.options.whiten_epsilon={given['whiten_epsilon']} does nothing here: {fix}"
        for key in ("critic_warmup_steps", "critic_warmup_until"):
            if given.get(key) and self.critic is None:
                yield f"algorithm.{key}={given[key]} does nothing: {self.name} has no critic (ppo, vapo, pf_ppo have)"


SWITCHED: Mapping[str, Spec] = {
    "kl_loss": specs.KLLoss(),
    "divergence": filters.Divergence(),
    "kl_reward": specs.KLReward(),
    "sample_filter": filters.SampleFilter(),
    "truncation": filters.Truncation(),
    "correction": filters.Correction(),
}
"""Defaults of the parts that may be None in a preset."""


_A, _L = "verl.algorithms.estimators:", "verl.algorithms.losses:"
GRPO, GAE, PPO_CLIP, REINFORCE = specs.GRPO(), specs.GAE(lam=0.95), PPOClip(), specs.LossSpec(_L + "reinforce")
_DPPO_KL = specs.DPPO(fn=_L + "dppo_kl", clip_low=0.05, clip_high=0.05)
LOSSES: Mapping[str, specs.LossSpec] = {
    "ppo_clip": PPO_CLIP,
    "gspo": Clipped(_L + "gspo"),
    "gspo_token": Clipped(_L + "gspo_token"),
    "gmpo": Clipped(_L + "gmpo", corrected="geometric"),
    "cispo": specs.CISPO(),
    "sapo": specs.SAPO(),
    "kl_cov": specs.KLCov(),
    "clip_cov": specs.ClipCov(),
    "dppo_tv": specs.DPPO(),
    "dppo_kl": _DPPO_KL,
    "dro": specs.DRO(),
    "vespo": specs.VESPO(),
    "intellect_ipo": specs.IntellectIPO(),
    "gkd": specs.GKD(),
    "gkd_topk": specs.GKDTopK(),
    "reinforce": REINFORCE,
}
"""Losses that `algorithm.loss=NAME` may name, at the usual settings."""

_BY_SEQUENCE = PPOClip(aggregation="seq-mean-token-mean")
_BY_CONSTANT = PPOClip(aggregation=specs.BY_HORIZON)
_SUMMED = replace(REINFORCE, aggregation="seq-mean-token-sum")
_ALONE = specs.GroupSpec(least=1)
_GSPO: Mapping[str, Any] = {"aggregation": "seq-mean-token-mean", "clip_low": 3e-4, "clip_high": 4e-4}
_LUSPO: Mapping[str, Any] = {"aggregation": "seq-mean-token-sum", "clip_low": 2e-3, "clip_high": 2.5e-3}
_KL = specs.KLReward(coef=0.01)
_DAPO_CLIP = PPOClip(clip_high=0.28)
_MASKED = filters.Correction(form="mask", high=5.0, denominator="before_rejection")
_GREEDY_BASELINE = specs.GroupSpec(least=1, baselines=1, baseline_sampling=specs.greedy)
_ENTROPY = "The entropy mechanism, 2505.22617"
_RFPP = specs.WhitenedReturns(_A + "reinforce_plus_plus")
_RFPP_BASELINE = specs.WhitenedSingletons(_A + "reinforce_plus_plus_baseline")
_K2 = KLLoss(coef=0.001, form="k2")
_RLOO = specs.RLOO()
_GMPO_CLIP: Mapping[str, Any] = {"clip_low": 0.4, "clip_high": 0.4}
_GMPO = Clipped(_L + "gmpo", corrected="geometric", aggregation="seq-mean-token-mean", **_GMPO_CLIP)
_OTB = EstimatorSpec(_A + "otb", inputs=("old_logprobs", "sum_pi_squared"), optional=("is_weights",))
_VAPO = PPOClip(clip_high=0.28, positive_nll_coef=0.1)
_VAPO_GAE = specs.GAE(lam_critic=1.0, length_adaptive_alpha=0.05)
_PPO: Mapping[str, Any] = {"kl_reward": _KL, "critic": specs.CriticSpec()}
_BEST_AND_WORST = filters.SampleFilter(selection="bw")
_FIGURE = EstimatorSpec(_A + "opo")  # of a loss that reads no advantage: for the figures
_WARM = specs.CriticSpec(critic_warmup_steps=50)

_TABLE = (
    Preset("grpo", "DeepSeekMath, 2402.03300", GRPO, _BY_SEQUENCE, kl_loss=KLLoss(coef=0.04)),
    Preset(
        "grpo_loo", "NeMo-RL's GRPO: mean and deviation of the other members", specs.GRPO(leave_one_out=True), PPO_CLIP
    ),
    Preset(
        "drgrpo", "Understanding R1-Zero-like training, 2503.20783", specs.GRPO(normalize_by_std=False), _BY_CONSTANT
    ),
    Preset("dapo", "DAPO, 2503.14476", GRPO, _DAPO_CLIP, group_filter=filters.GroupFilter(filter_groups=True)),
    Preset("gspo", "GSPO, 2507.18071", GRPO, Clipped(_L + "gspo", **_GSPO)),
    Preset("gspo_token", "GSPO-token, 2507.18071", GRPO, Clipped(_L + "gspo_token", **_GSPO)),
    Preset("luspo", "LUSPO, 2602.05261", GRPO, Clipped(_L + "gspo", **_LUSPO)),
    Preset("vespo", "VESPO, 2602.10693", GRPO, specs.VESPO()),
    Preset("cispo", "CISPO, MiniMax-M1, 2506.13585; the cap of ScaleRL, 2510.13786", GRPO, specs.CISPO(ratio_max=5.0)),
    Preset("sapo", "SAPO, 2511.20347", GRPO, specs.SAPO(aggregation="seq-mean-token-mean")),
    Preset("gmpo", "GMPO, 2507.20673", GRPO, _GMPO),
    Preset("kl_cov", _ENTROPY, GRPO, specs.KLCov()),
    Preset("clip_cov", _ENTROPY, GRPO, specs.ClipCov()),
    Preset("dppo_tv", "DPPO, total variation, 2602.04879", GRPO, specs.DPPO()),
    Preset("dppo_kl", "DPPO, binary KL, 2602.04879", GRPO, _DPPO_KL),
    Preset("dro", "DRO, 2405.19107, the group's mean as its value", specs.GRPO(normalize_by_std=False), specs.DRO()),
    Preset("max_rl", "MaxRL, 2602.02710", EstimatorSpec(_A + "max_rl"), REINFORCE),
    Preset("gdpo", "GDPO, 2601.05242", specs.GDPO(), _BY_SEQUENCE),
    Preset("gpg", "GPG, 2504.02546", specs.GPG(), REINFORCE),
    Preset("opo", "OPO, 2505.23585", specs.Singletons(_A + "opo"), PPO_CLIP),
    Preset("pass_at_k", "Pass@k policy optimisation, 2503.19595", specs.Grouped(_A + "pass_at_k"), PPO_CLIP),
    Preset("otb", "Optimal token baseline", _OTB, PPO_CLIP),
    Preset("rloo", "Back to basics, 2402.14740", _RLOO, _SUMMED, kl_reward=specs.KLReward(coef=0.05)),
    Preset("remax", "ReMax, 2310.10505", EstimatorSpec(_A + "remax"), _SUMMED, group=_GREEDY_BASELINE, kl_reward=_KL),
    Preset("reinforce_plus_plus", "REINFORCE++, 2501.03262", _RFPP, PPO_CLIP, kl_reward=_KL, group=_ALONE),
    Preset("reinforce_plus_plus_baseline", "REINFORCE++-baseline, 2501.03262", _RFPP_BASELINE, PPO_CLIP, kl_loss=_K2),
    Preset("reinforce", "Williams 1992", specs.Discounted(_A + "reward_to_go"), _SUMMED, group=_ALONE),
    Preset("ppo", "PPO, 1707.06347; for language models 1909.08593", GAE, PPO_CLIP, group=_ALONE, **_PPO),
    Preset("vapo", "VAPO, 2504.05118", _VAPO_GAE, _VAPO, critic=_WARM, group=_ALONE),
    Preset("turn_discount", "Returns over turns: process supervision of 2402.03300", specs.TurnReturns(), PPO_CLIP),
    Preset("gigpo", "GiGPO, 2505.10978", specs.GiGPO(), _BY_SEQUENCE, kl_loss=KLLoss(coef=0.01)),
    Preset("turn_ppo", "PPO, 1707.06347, with a turn as one action", specs.TurnGAE(), PPO_CLIP, group=_ALONE, **_PPO),
    Preset("pf_ppo", "PF-PPO, 2409.06957", GAE, PPO_CLIP, sample_filter=_BEST_AND_WORST, **_PPO),
    Preset("decoupled_ppo", "Decoupled PPO, AReaL, 2505.24298", GRPO, PPO_CLIP, correction=_MASKED),
    Preset(
        "intellect_ipo",
        "INTELLECT policy optimisation of prime-rl",
        specs.GRPO(normalize_by_std=False),
        specs.IntellectIPO(),
        correction=filters.Correction(bypass=True),
    ),
    Preset("opd", "On-policy distillation, 2306.08543; Thinking Machines 2025", specs.OPD(), PPO_CLIP, group=_ALONE),
    Preset("iw_opd", "IW-OPD, 2606.22600", specs.OPD(prefix_gain=0.5), PPO_CLIP, group=_ALONE),
    Preset("gkd", "GKD, 2306.13649", _FIGURE, specs.GKD(), group=_ALONE),
    Preset("gkd_topk", "GKD, 2306.13649, of the likeliest tokens", _FIGURE, specs.GKDTopK(), group=_ALONE),
)
"""Name, source, estimator, loss; then what else the paper has. Other settings are at their spec's defaults."""
PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in _TABLE}

_P, _NEMOTRON = "verl.algorithms.preference:", "reward-aware RPO, 2502.00203"
_AVERAGE, _PAIRS = {"average": False}, {"ld_alpha": None, "wpo": False}
_GAP: Mapping[str, Any] = {"needs_gap": True, "options": {"eta": 1.0, **_AVERAGE, **_PAIRS}}
_DPO = {"label_smoothing": 0.0, **_AVERAGE, **_PAIRS}
_NLL = {"alpha": 1.0, "normalization": "sequence", "label_smoothing": 0.0}
_KTO = {"desirable_weight": 1.0, "undesirable_weight": 1.0}
PREFERENCES: Mapping[str, PreferenceSpec] = {
    "dpo": PreferenceSpec("DPO, 2305.18290", _P + "dpo", _DPO),
    "cdpo": PreferenceSpec("cDPO, Mitchell 2023", _P + "dpo", {**_DPO, "label_smoothing": 0.1}),
    "dpo_norm": PreferenceSpec(
        "length-normalised DPO (Tulu 3, 2411.15124)", _P + "dpo", {**_DPO, "average": True}, beta=5.0
    ),
    "ld_dpo": PreferenceSpec("LD-DPO, 2409.06411", _P + "dpo", {**_DPO, "ld_alpha": 0.5}),
    "wpo": PreferenceSpec("WPO, 2406.11827", _P + "dpo", {**_DPO, "wpo": True}),
    "robust": PreferenceSpec("robust DPO, 2403.00409", _P + "robust", {**_DPO, "label_smoothing": 0.1}),
    "hinge": PreferenceSpec("SLiC, 2305.10425", _P + "hinge", {**_AVERAGE, **_PAIRS}),
    "ipo": PreferenceSpec("IPO, 2310.12036", _P + "ipo", {"average": True, **_PAIRS}),
    "apo_zero": PreferenceSpec("APO, 2408.06266", _P + "apo_zero", _PAIRS),
    "sppo": PreferenceSpec("SPPO, 2405.00675", _P + "sppo", _PAIRS),
    "nca": PreferenceSpec("NCA, 2402.05369", _P + "nca", _PAIRS),
    "rpo": PreferenceSpec("Iterative RPO, 2404.19733", _P + "rpo", {**_NLL, **_AVERAGE, **_PAIRS}),
    "rpo_sq": PreferenceSpec(_NEMOTRON, _P + "rpo_gap", fixed={"distance": "sq"}, **_GAP),
    "rpo_bwd_kl": PreferenceSpec(_NEMOTRON, _P + "rpo_gap", fixed={"distance": "bwd_kl"}, **_GAP),
    "rpo_fwd_kl": PreferenceSpec(_NEMOTRON, _P + "rpo_gap", fixed={"distance": "fwd_kl"}, **_GAP),
    "orpo": PreferenceSpec("ORPO, 2403.07691", _P + "orpo", reference=False),
    "simpo": PreferenceSpec(
        "SimPO, 2405.14734", _P + "simpo", {"gamma": 1.0, "label_smoothing": 0.0}, beta=2.0, reference=False
    ),
    "cpo": PreferenceSpec("CPO, 2401.08417", _P + "cpo", _NLL, reference=False),
    "kto": PreferenceSpec("KTO, 2402.01306", _P + "kto", _KTO, paired=False),
}
"""Losses that `preference.loss=NAME` may name."""


def _every_knob() -> list[tuple[str, Knob, str]]:
    every = [*(spec for preset in PRESETS.values() for spec in preset.parts().values()), *LOSSES.values()]
    return [(key, limits, kind) for spec in every for key, (_, limits, kind) in spec.knobs().items()]


def knobs() -> dict[str, bool]:
    """Return every setting by its key, and whether it is under algorithm.options. `loss` and `advantage` name
    functions."""
    return {key: limits.option for key, limits, _ in _every_knob()}


def setting_types() -> dict[str, str]:
    """The settings that are keys of their own, `algorithm.KEY` -> the type as text."""
    return {key: kind for key, limits, kind in _every_knob() if not limits.option}


def setting_texts() -> dict[str, str]:
    """The same -> what it may be, as text. (Every algorithm has its own defaults: `verl show algorithm=NAME`.)"""
    return {key: limits.wanted(kind) for key, limits, kind in reversed(_every_knob()) if not limits.option}


def altered_settings(preset: Preset) -> dict[str, Any]:
    """Return the settings of the preset that differ from their default."""
    out: dict[str, Any] = {}
    for spec in preset.parts().values():
        defaults = {f.name: f.default for f in fields(spec)}
        values = spec.settings()
        out |= {key: values[key] for key, (name, _, _) in spec.knobs().items() if values[key] != defaults[name]}
    return out


def preference(name: str) -> PreferenceSpec:
    """The preference loss; ValueError with the nearest name."""
    return _named(PREFERENCES, "preference.loss", name)


def find(name: str) -> Preset:
    """The preset; ValueError with the nearest name."""
    return _named(PRESETS, "algorithm.name", name)


ALIASES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("gae", "ppo_trainer"), "ppo"),
        **dict.fromkeys(("grpo_passk", "pass@k", "passk"), "pass_at_k"),
        **dict.fromkeys(("optimal_token_baseline", "tir_optimal_token_baseline"), "otb"),
        **dict.fromkeys(("grpo_done_right", "grpo_dr"), "drgrpo"),
        **dict.fromkeys(("on_policy_distillation", "distillation"), "opd"),
        **{"grpo_vectorized": "grpo", "rloo_vectorized": "rloo", "geo_mean": "gmpo", "rpp": "reinforce_plus_plus"},
    }
)
"""Names of algorithms in other libraries -> names in this table, for suggestions in errors."""


def _named(table: Mapping[str, T], key: str, name: str) -> T:
    if name not in table:
        near = did_you_mean(name, table, aliases={k: v for k, v in ALIASES.items() if v in table}, form=MEANT)
        raise Refused(f"{key}={name}: unknown{near}; there are: {', '.join(table)}")
    return table[name]


def unknown_option(key: str, value: Any = "VALUE") -> str:
    """Return a line for `algorithm.options.KEY=value`, which is no option: the key of its own, or the nearest name."""
    if key in setting_types() or key in ("loss", "advantage"):
        return f"algorithm.options.{key}: a key of its own: write {written(key, value)}"
    options = [k for k, option in knobs().items() if option]
    hint = did_you_mean(key, options, form=MEANT) or f"; known: {', '.join(options)}"
    return f"algorithm.options.{key}: unknown{hint}"


def written(key: str, value: Any = "VALUE") -> str:
    """Return the setting as a command line has it, with what it needs beside it."""
    prefix = f"algorithm.{'options.' if knobs().get(key) else ''}{key}={value}"
    if key == "correction":
        return f"{prefix} algorithm.options.correction_high=2.0"
    if key in ("correction_level", "correction_low", "correction_high", "correction_batch_normalize"):
        return f"{prefix} beside algorithm.correction=truncate (or clamp, icepop, mask)"
    return prefix


def settled(name: str, given: Mapping[str, Any] | None = None, *, longest: int | None = None) -> Preset:
    """The preset with the given settings in place of its own (None: the preset's); ValueError with a line per fault.
    Settings that this algorithm does not have are accepted: a recipe may set what only some algorithms read."""
    preset = find(name)
    stated = {k: v for k, v in (given or {}).items() if v is not None}
    settings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in stated.items()}
    loss, advantage = settings.pop("loss", None), settings.pop("advantage", None)
    known = knobs() if settings else {}
    found = [unknown_option(key) for key in settings if key not in known]
    if loss is not None:
        if loss not in LOSSES and not re.fullmatch(r"[\w.]+:\w+", loss):
            known_losses = f"{', '.join(LOSSES)}, or your own as module:function"
            found.append(
                f"algorithm.loss={loss}: unknown{did_you_mean(loss, LOSSES, form=MEANT)}; there are: {known_losses}"
            )
        else:  # what both losses have keeps the preset's value
            preset = replace(preset, loss=LOSSES.get(loss, specs.LossSpec(loss)).updated(preset.loss.settings()))
    if advantage is not None:
        if not re.fullmatch(r"[\w.]+:\w+", advantage):
            found.append(f"algorithm.advantage={advantage}: write it as module:function")
        preset = replace(preset, estimator=specs.EstimatorSpec(advantage, inputs=preset.estimator.inputs))
    parts = {name: spec.updated(settings) for name, spec in preset.parts().items()}
    found += [line for spec in parts.values() for line in spec.faults()]
    used: dict[str, Any] = {n: None if n in SWITCHED and not s.is_on() else s for n, s in parts.items()}
    preset = replace(preset, **used)
    if isinstance(preset.estimator, specs.Singletons) and preset.estimator.singleton == "raw":
        preset = replace(preset, group=replace(preset.group, least=1))
    if "teacher_topk" in {need.column for need in preset.needs(1)}:  # the same walk reads the drawn token, for figures
        inputs = dict.fromkeys((*preset.estimator.inputs, *specs.OPD.inputs))
        preset = replace(preset, estimator=replace(preset.estimator, inputs=tuple(inputs)))
    found += preset.faults() if longest is None else preset.faults(longest)
    if found:
        raise Refused("\n".join(found))
    return preset
