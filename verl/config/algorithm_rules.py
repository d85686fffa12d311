"""The rules of `algorithm.*`, from a torch-free mirror of algorithms/table.py. All that knows an algorithm is here."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType

from verl.config.schema import Config
from verl.config.tree import nearest, values_of


@dataclasses.dataclass(frozen=True, slots=True)
class AlgorithmFacts:
    """What sizes depend on, of a row of algorithms/table.py (which imports torch). A test holds the two together."""

    needs_group: bool
    kl_loss: bool = False
    kl_reward: bool = False
    needs_horizon: bool = False
    filters_groups: bool = False
    critic: bool = False
    baselines: int = 0


ALGORITHMS: Mapping[str, AlgorithmFacts] = MappingProxyType(
    {
        "grpo": AlgorithmFacts(True, kl_loss=True),
        "drgrpo": AlgorithmFacts(True, needs_horizon=True),
        "dapo": AlgorithmFacts(True, filters_groups=True),
        "rloo": AlgorithmFacts(True, kl_reward=True),
        "grpo_loo": AlgorithmFacts(True),
        "gspo": AlgorithmFacts(True),
        "gspo_token": AlgorithmFacts(True),
        "cispo": AlgorithmFacts(True),
        "sapo": AlgorithmFacts(True),
        "gmpo": AlgorithmFacts(True),
        "kl_cov": AlgorithmFacts(True),
        "clip_cov": AlgorithmFacts(True),
        "gdpo": AlgorithmFacts(True),
        "gpg": AlgorithmFacts(True),
        "opo": AlgorithmFacts(True),
        "pass_at_k": AlgorithmFacts(True),
        "otb": AlgorithmFacts(True),
        "remax": AlgorithmFacts(False, kl_reward=True, baselines=1),
        "reinforce_plus_plus": AlgorithmFacts(False, kl_reward=True),
        "reinforce_plus_plus_baseline": AlgorithmFacts(True, kl_loss=True),
        "reinforce": AlgorithmFacts(False),
        "ppo": AlgorithmFacts(False, kl_reward=True, critic=True),
        "vapo": AlgorithmFacts(False, critic=True),
        "pf_ppo": AlgorithmFacts(True, kl_reward=True, critic=True),
        "decoupled_ppo": AlgorithmFacts(True),
    }
)

ALGORITHM_OPTIONS: Collection[str] = (
    "ratio_max",
    "ratio_min",
    "tau_positive",
    "tau_negative",
    "cov_ratio",
    "cov_low",
    "cov_high",
    "cov_coef",
    "off_policy_delta",
    "leave_one_out",
    "scale_rewards",
    "reward_components",
    "reward_weights",
    "lam_critic",
    "length_adaptive_alpha",
    "positive_nll_coef",
    "selection",
    "kl_loss_ratio_corrected",
    "correction_level",
    "correction_low",
    "correction_high",
    "correction_batch_normalize",
    "correction_reject",
    "correction_denominator",
)
"""Fields of a row of algorithms/table.py that `algorithm.options` may set."""

CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "algorithm.name": tuple(ALGORITHMS),
        "algorithm.aggregation": (
            "token-mean",
            "token-sum",
            "seq-mean-token-sum",
            "seq-mean-token-mean",
            "seq-mean-token-sum-norm",
        ),
        "algorithm.kl_loss_form": ("k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"),
        "algorithm.kl_reward_form": ("k1", "abs", "k2", "k3"),
        "algorithm.on_exhausted": ("stop", "smaller"),
        "algorithm.correction": ("truncate", "clamp", "icepop", "mask"),
    }
)

BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "algorithm.clip_low": (0, math.inf),
        "algorithm.clip_high": (0, math.inf),
        "algorithm.horizon_tokens": (1, math.inf),
        "algorithm.gamma": (0, 1),
        "algorithm.lam": (0, 1),
        "algorithm.critic_warmup_until": (0, 1),
        "algorithm.critic_warmup_steps": (0, math.inf),
        "algorithm.kl_loss_coef": (0, math.inf),
        "algorithm.kl_reward_coef": (0, math.inf),
        "algorithm.max_draws_per_group": (1, math.inf),
    }
)
"""key -> (least, most), both allowed."""

POSITIVE = ("algorithm.value_clip", "algorithm.kl_reward_target", "algorithm.kl_reward_horizon")


def algorithm_values(config: Config) -> Iterator[str]:
    """Each key by itself: known words, numbers within bounds."""
    for key, value in values_of(config).items():
        if not key.startswith("algorithm.") or value is None:
            continue
        if key in CHOICES and value not in CHOICES[key]:
            near = nearest(value, CHOICES[key], 1)
            hint = f"did you mean {near[0]}? " if near else ""
            yield f"{key}={value}: unknown; {hint}There are: {', '.join(CHOICES[key])}"
        if not isinstance(value, int | float):
            continue
        least, most = BOUNDS.get(key, (-math.inf, math.inf))
        if key in POSITIVE and not 0 < value < math.inf:
            yield f"{key}={value}: must be > 0" + (" and finite" if value > 0 else "")
        elif not least <= value <= most:
            yield f"{key}={value}: must be " + (f">= {least:g}" if most == math.inf else f"from {least:g} to {most:g}")
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"{key}={value}: must be finite"


def algorithm_faults(config: Config, needs_group: Callable[[str], bool] | None) -> Iterator[str]:
    a, facts = config.algorithm, ALGORITHMS[config.algorithm.name]
    group = facts.needs_group if needs_group is None else needs_group(a.name)
    if group and a.advantage is None and config.step.samples_per_prompt == 1:
        yield f"step.samples_per_prompt=1: {a.name} compares the answers to one prompt; set at least 2 (8 is usual)"
    if a.clip_dual is not None and a.clip_dual <= 1:
        yield f"algorithm.clip_dual={a.clip_dual}: dual clip needs a bound above 1 (verl: 3.0), or null for none"
    if a.clip_low is not None and a.clip_low >= 1 and a.name != "cispo":
        yield f"algorithm.clip_low={a.clip_low}: the ratio would be clipped at {1 - a.clip_low:g}; use a value below 1 (0.2 is usual)"
    by_horizon = a.aggregation == "seq-mean-token-sum-norm" or (a.aggregation is None and facts.needs_horizon)
    if by_horizon and a.horizon_tokens is None:
        yield (
            f"algorithm.horizon_tokens is missing: {a.aggregation or a.name} divides by a constant; set it to the longest "
            f"response, {config.rollout.max_response_tokens}"
        )
    if a.horizon_tokens is not None and not by_horizon:
        yield f"algorithm.horizon_tokens={a.horizon_tokens} does nothing here: it belongs to aggregation=seq-mean-token-sum-norm"
    kl = facts.kl_reward if a.kl_reward_coef is None else a.kl_reward_coef > 0
    if a.kl_reward_target is not None and not kl:
        yield "algorithm.kl_reward_target needs a start for its controller: set algorithm.kl_reward_coef (verl: 0.001)"
    if a.kl_reward_horizon is not None and a.kl_reward_target is None:
        yield "algorithm.kl_reward_horizon belongs to the adaptive controller: set algorithm.kl_reward_target, or leave it out"
    filters = facts.filters_groups if a.filter_groups is None else a.filter_groups
    for name in ("filter_metric", "max_draws_per_group"):
        if vars(a)[name] is not None and not filters:
            yield f"algorithm.{name}={vars(a)[name]} does nothing without algorithm.filter_groups=true: leave it out"
    if a.advantage is not None and not re.fullmatch(r"[\w.]+:\w+", a.advantage):
        yield f"algorithm.advantage={a.advantage}: write it as module:function"
    if a.loss is not None and not re.fullmatch(r"([\w.]+:)?\w+", a.loss):
        yield f"algorithm.loss={a.loss}: write it as module:function"
    for name in a.options:
        if name not in ALGORITHM_OPTIONS:
            near = nearest(name, ALGORITHM_OPTIONS)
            yield f"algorithm.options.{name}: unknown" + (
                f"; did you mean {' or '.join(near)}?" if near else f"; known: {', '.join(ALGORITHM_OPTIONS)}"
            )
    if a.name == "gdpo" and len(a.options.get("reward_components") or ()) < 2:
        yield "gdpo normalises reward components one by one: set algorithm.options.reward_components=[a,b] to keys of the reward's dict"
    if not facts.critic:
        for name in ("critic_warmup_steps", "critic_warmup_until"):
            if vars(a)[name]:
                yield f"algorithm.{name}={vars(a)[name]} does nothing: {a.name} has no critic (ppo, vapo and pf_ppo have)"
    if a.correction is not None and a.options.get("correction_high") is None:
        yield f"algorithm.correction={a.correction}: set algorithm.options.correction_high (truncate 2, icepop 5, mask 3)"
    if (
        config.reward.stage == "batch"
        and config.reward.model is not None
        and (filters or a.options.get("selection") or a.name == "pf_ppo")
    ):
        yield f"reward.stage=batch scores after groups are selected, but {a.name} selects by the score: reward.stage=stream"
