"""The algorithm cards of docs/algorithms, made from the table: `python -m verl.algorithms.cards docs/algorithms`.

Formulas and defects belong to axes, so a card is put together from its row's. Every card solves one example by hand:
`HAND` holds the arithmetic as text, the numbers beside it come from the row's own estimator, terms and weights, and
tests/unit/test_cards.py compares the two.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.advantages import token_rewards
from verl.algorithms.corrections import correct
from verl.algorithms.kl_reward import kl_penalty
from verl.algorithms.table import TABLE, Algorithm, Row, resolve
from verl.algorithms.weights import term_weights
from verl.batch import Columns

AXES = ("estimator", "loss", "aggregation", "selection")

BASE: Mapping[str, str] = {"algorithm.aggregation": "null"}
"""Over recipe=quickstart, which takes the token mean: the preset's own aggregation."""
_EXACT_REWARD = {"algorithm.kl_reward_coef": "0"}
_REUSED = {"step.updates_per_step": "4"}
_CRITIC = {"critic.lr": "5e-4", "algorithm.critic_warmup_steps": "5", **_EXACT_REWARD}
RECOMMENDED: Mapping[str, Mapping[str, str]] = {
    "ppo": {**_CRITIC, "algorithm.lam": "1.0"},
    "pf_ppo": {**_CRITIC, "algorithm.lam": "1.0"},
    "vapo": {**_CRITIC, "algorithm.options.length_adaptive_alpha": "1.0"},
    "drgrpo": {"algorithm.horizon_tokens": "48"},
    "gdpo": {"algorithm.options.reward_components": "[right,form]", "reward.path": "bench/two_rewards.py"},
    "pass_at_k": {"step.prompts_per_step": "64", "step.samples_per_prompt": "4"},
    "rloo": _EXACT_REWARD,
    "remax": _EXACT_REWARD,
    "reinforce_plus_plus": _EXACT_REWARD,
    "gspo": _REUSED,
    "gspo_token": _REUSED,
    "cispo": _REUSED,
    "sapo": _REUSED,
    "gmpo": _REUSED,
    "kl_cov": _REUSED,
    "clip_cov": _REUSED,
    "decoupled_ppo": _REUSED,
}
"""Overrides of a run of the quickstart's size (arithmetic, about 35 tokens an answer), by name; see `recommended`."""

WHY_RECOMMENDED: Mapping[str, str] = {
    "ppo": "The critic starts from nothing: it learns faster than the policy and alone for 5 steps. lambda 1 while it is young.",
    "pf_ppo": "The critic starts from nothing: it learns faster than the policy and alone for 5 steps. lambda 1 while it is young.",
    "vapo": "50 steps of value pretraining are more than the whole run. An alpha of 0.05 is for answers of thousands of tokens: "
    "of 35 it makes lambda 0.4, and of 20 or fewer 0, where the policy follows a young critic alone.",
    "drgrpo": "The horizon is the longest answer allowed (rollout.max_response_tokens).",
    "gdpo": "The reward function returns a dict with both components.",
    "pass_at_k": "Only a group with exactly one right answer teaches; smaller groups have that more often once accuracy rises.",
    "rloo": "The reward is exact and cannot be gamed: no reference model.",
    "remax": "The reward is exact and cannot be gamed: no reference model.",
    "reinforce_plus_plus": "The reward is exact and cannot be gamed: no reference model.",
    **dict.fromkeys(
        ("gspo", "gspo_token", "cispo", "sapo", "gmpo", "kl_cov", "clip_cov", "decoupled_ppo"),
        "With one update per step every ratio is 1, and the loss does nothing of its own.",
    ),
}

TITLES: Mapping[str, str] = {
    "grpo": "GRPO",
    "grpo_loo": "GRPO, leave one out",
    "drgrpo": "Dr. GRPO",
    "dapo": "DAPO",
    "gspo": "GSPO",
    "gspo_token": "GSPO-token",
    "cispo": "CISPO",
    "sapo": "SAPO",
    "gmpo": "GMPO",
    "kl_cov": "KL-Cov",
    "clip_cov": "Clip-Cov",
    "gdpo": "GDPO",
    "gpg": "GPG",
    "opo": "OPO",
    "pass_at_k": "Pass@k",
    "otb": "Optimal token baseline",
    "rloo": "RLOO",
    "remax": "ReMax",
    "reinforce_plus_plus": "REINFORCE++",
    "reinforce_plus_plus_baseline": "REINFORCE++ with a baseline",
    "reinforce": "REINFORCE",
    "ppo": "PPO",
    "vapo": "VAPO",
    "pf_ppo": "PF-PPO",
    "decoupled_ppo": "Decoupled PPO",
}

WHEN: Mapping[str, str] = {
    "grpo": "The first choice for verifiable rewards: no critic, a group of answers per prompt. Long answers are not favoured, each counts once.",
    "grpo_loo": "As GRPO, when groups are small: an answer's own reward is not in its baseline. Deviations of two others can be tiny.",
    "drgrpo": "When GRPO's answers grow longer without getting better: neither the length nor the spread of a group changes its weight.",
    "dapo": "Long reasoning with many solved or hopeless prompts: flat groups are replaced, rare tokens may rise further. Costs more rollouts.",
    "gspo": "Mixture-of-experts models and several updates per step: one ratio per sequence has less noise than one per token.",
    "gspo_token": "As GSPO, with advantages that differ within an answer; with one advantage per answer the gradient is the same.",
    "cispo": "Many updates per step on long answers: rare but decisive tokens keep their gradient where PPO would clip it to nothing.",
    "sapo": "When clipping is too coarse: the pull fades smoothly as the ratio leaves 1, faster for answers that are pushed down.",
    "gmpo": "As GSPO, with each token's ratio clipped before the geometric mean: single outliers do not move a whole answer.",
    "kl_cov": "When entropy collapses early: the few tokens that cost most entropy are held near the old policy.",
    "clip_cov": "When entropy collapses early: a few of the tokens that cost most entropy are left out of the step.",
    "gdpo": "Several rewards of unlike scale (right, short, well formed): each is normalised on its own, so that none drowns the others.",
    "gpg": "The plainest group method, one update per step: no ratio, no clip, no reference; flat groups do not dilute the step.",
    "opo": "Strictly on-policy training with answers of unlike lengths: the baseline has the least variance when long answers weigh more.",
    "pass_at_k": "When any of k answers may be right (a verifier or a vote picks): a prompt solved twice in a group teaches nothing more.",
    "otb": "Long or multi-turn answers: a baseline per place, weighed by how much each answer's gradient varies up to there.",
    "rloo": "Small groups and a learned reward: unbiased, no clip, KL to the reference inside the reward. One update per step.",
    "remax": "One sample per prompt: the greedy answer is the baseline, generated beside it. One update per step.",
    "reinforce_plus_plus": "One sample per prompt without a critic: rewards are whitened over the whole step. Prompts of very unlike difficulty add noise.",
    "reinforce_plus_plus_baseline": "As REINFORCE++ with several samples per prompt: the group's mean is taken off first.",
    "reinforce": "A baseline for experiments: the reward itself is the advantage, so its offset and scale matter.",
    "ppo": "Learned or dense rewards and one answer per prompt, where a critic pays for its memory; the classic third stage after a reward model.",
    "vapo": "Long reasoning with a critic: value pretraining and a lambda that grows with the answer keep the far reward in sight.",
    "pf_ppo": "A noisy reward model: only the best and the worst of a group are trusted and trained.",
    "decoupled_ppo": "Asynchronous rollouts: the clip is around the proximal policy, the sampler's staleness is a weight; tokens off by more than 5x go.",
}

ESTIMATES: Mapping[str, str] = {
    "gae": "delta_t = R_t + gamma V_t+1 - V_t\nA_t = delta_t + gamma lam A_t+1, then whitened over all tokens of the step\nreturn_t = A_t (before whitening, lambda of the critic) + V_t",
    "grpo": "A = (s - mean of the group) / (std of the group + 1e-6), for every token of the answer",
    "rloo": "A = s - mean of the other answers of the group",
    "remax": "A_t = (sum of R from t on) - score of the greedy answer",
    "opo": "A = s - (sum of n s) / (sum of n), sums over the group, n tokens each",
    "gpg": "A = B / (B - M) (s - mean of the group); M of the B answers are in groups without spread",
    "pass_at_k": "A = (s_best - s_second) / (std of the group + 1e-6) for the sole best answer, 0 for the others",
    "gdpo": "a = sum over components k of w_k (s_k - mean_k of the group) / (std_k of the group + 1e-6)\nA = (a - mean) / std, over all answers of the step",
    "otb": "w_t = 1 - 2 pi_t + sum_v pi_v^2;  W_t = w_1 + ... + w_t\nb_t = (sum of G_t W_t) / (sum of W_t) over the answers of the group that reach place t; 0 where one is left\nA_t = G_t - b_t, with G_t the reward from t on",
    "reinforce_plus_plus": "G_t = R_t + gamma G_t+1\nA = (G - mean) / std, over all tokens of the step",
    "reinforce_plus_plus_baseline": "a = s - mean of the group\nA = (a - mean) / std, over all tokens of the step",
    "reinforce": "A_t = R_t + gamma A_t+1",
}
LEAVE_ONE_OUT = "A = (s - mean of the others) / (std of the others + 1e-6), undivided where they are equal"
ONLY_MEAN = "A = s - mean of the group"
LENGTH_ADAPTIVE = "lam of an answer of l tokens = max(0, 1 - 1 / (alpha l))"

POLICY_LOSSES: Mapping[str, str] = {
    "ppo_clip": "loss_t = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)),  r = pi / pi_old",
    "gspo": "s = exp(mean over the answer of log(pi / pi_old))\nloss_t = max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high))",
    "gspo_token": "s_t = (the answer's s of GSPO, detached) pi / (pi, detached)\nloss_t = max(-A s_t, -A clip(s_t, 1 - clip_low, 1 + clip_high))",
    "cispo": "loss_t = -(min(r, ratio_max), detached) A log pi,  r = pi / pi_old",
    "sapo": "loss_t = -A (4 / tau) sigmoid(tau (r - 1)),  tau = tau_positive if A > 0, else tau_negative",
    "gmpo": "d_t = log(pi / pi_old), clipped to [-clip_low, clip_high] on the side that A pushes to\nloss = -A exp(mean of d_t)",
    "kl_cov": "loss_t = -A r;  + cov_coef |log r| for the share cov_ratio of tokens with the highest (A - mean A)(log pi - mean log pi)",
    "clip_cov": "loss_t = PPO clip; 0 for a share cov_ratio of tokens, drawn where cov_low < (A - mean A)(log pi - mean log pi) < cov_high",
    "reinforce": "loss_t = -A log pi",
}
AGGREGATED: Mapping[str, str] = {
    "token-mean": "loss = (sum of loss_t) / (number of tokens)",
    "token-sum": "loss = sum of loss_t",
    "seq-mean-token-sum": "loss = mean over answers of (sum of loss_t)",
    "seq-mean-token-mean": "loss = mean over answers of (mean of loss_t)",
    "seq-mean-token-sum-norm": "loss = (sum of loss_t) / (number of answers x horizon_tokens)",
}

QUIRKS: Mapping[str, str] = {
    "Q1": "verl's default trainer divides kept tokens by kept plus rejected ones.",
    "Q2": "verl resamples the whole batch but writes the advantages back by place: answers of reward 0 get the best one's; |s| favours very bad ones.",
    "Q3": "verl's default trainer never makes what it needs (greedy baseline, sum of pi^2, components): it fails there.",
    "Q4": "verl's clip_ratio has no effect, clip_ratio_low and _high win; its dual clip (c = 3) cannot be switched off.",
    "Q5": "verl scales by the number of scores that are not 0: with rewards -1 and 1 the correction vanishes.",
    "Q6": "verl drops a reward whose token was rejected: the whole answer looks worthless.",
    "Q7": "verl averages per micro-batch and sums: the gradient grows with the number of micro-batches.",
    "Q8": "verl's rejection bounds act on pi_rollout / pi_train although the text says the inverse.",
    "Q10": "verl and NeMo-RL clamp the value of k3 at 10: tokens that drifted most get no pull.",
    "Q12": "verl: NaN in the padding reaches the loss or its gradient.",
    "Q13": "verl returns NaN when nothing is left of a group.",
    "Q14": "verl keeps rejected answers in the group's mean and deviation.",
    "Q16": "verl 0.9.1 with loss_mode=gspo keeps clip 0.2 and the token mean: that is not GSPO.",
    "Q17": "verl counts empty answers with ratio 1 in the metrics of the weights.",
    "Q18": "verl tests a deviation for exact 0: three scores of 0.1 count as spread.",
    "Q19": 'verl parses group ids as numbers: "01" and "1" become one group.',
    "Q20": "verl takes at least one token per micro-batch: up to 100 times the set share, and it depends on their size.",
    "Q21": "verl divides by the padded width of a micro-batch: the scale changes with the batching.",
    "Q22": "verl raises on whitening one token; no peer bootstraps a truncated answer.",
    "Q23": "OpenRLHF divides by n - 1 = 0 for a group of one; its KL in the reward is not masked.",
}
DEFECTS: Mapping[str, tuple[str, ...]] = {
    "gae": ("Q6", "Q22"),
    "grpo": ("Q14", "Q19"),
    "rloo": ("Q23",),
    "remax": ("Q3", "Q6"),
    "otb": ("Q3", "Q6"),
    "gdpo": ("Q3",),
    "gpg": ("Q5",),
    "opo": ("Q13",),
    "reinforce_plus_plus": ("Q6", "Q22"),
    "ppo_clip": ("Q4",),
    "gspo": ("Q16", "Q12"),
    "gspo_token": ("Q16", "Q12"),
    "cispo": ("Q12",),
    "gmpo": ("Q7", "Q12"),
    "kl_cov": ("Q20", "Q12"),
    "clip_cov": ("Q20", "Q12"),
    "token-mean": ("Q1",),
    "seq-mean-token-sum": ("Q12",),
    "seq-mean-token-mean": ("Q12",),
    "seq-mean-token-sum-norm": ("Q21",),
    "k3": ("Q10",),
    "filter_groups": ("Q18",),
    "correction": ("Q8", "Q17"),
    "bw": ("Q2",),
}
ALSO: Mapping[str, str] = {
    "vapo": "verl has no decoupled or length-adaptive GAE; NeMo-RL divides the NLL per micro-batch.",
    "reinforce_plus_plus": "OpenRLHF and NeMo-RL whiten by the population deviation.",
    "pass_at_k": "verl stops on a group of one.",
    "cispo": "verl's default bounds of 0.2 have a lower bound, which the paper has not.",
    "sapo": "verl ignores the aggregation that is set.",
    "gdpo": "verl whitens over tokens: long answers weigh more.",
    "drgrpo": "TRL divides per micro-batch and by accumulation steps.",
    "reinforce_plus_plus_baseline": "verl raises on whitening one token.",
}
RAW_SINGLETON = ("grpo", "rloo", "opo", "reinforce_plus_plus_baseline")

# -- the example -----------------------------------------------------------------------------------------------------

TOKENS = ("A1", "A2", "B1")
NEEDED: Mapping[str, Mapping[str, Any]] = {"drgrpo": {"horizon_tokens": 3}, "gdpo": {"reward_components": ["a", "b"]}}
EXAMPLE = (
    "One prompt, two answers: A has two tokens and is right (score 1), B has one and is wrong (0). Between the rollout and this\n"
    "update pi moved: A1 0.5 -> 0.7, A2 0.5 -> 0.5, B1 0.4 -> 0.3, so that r = 1.4, 1, 0.75. The reference is the old policy."
)
EXTRA: Mapping[str, str] = {
    "gae": " The critic says 0.5 of every token.",
    "remax": " The greedy answer scored 0.5.",
    "gdpo": " Components: a is the score, b is 1 for both.",
    "otb": " Sum of pi^2: 0.5, 0.5, 0.52.",
    "correction": " The sampler's own probabilities were 0.5, 0.5, 0.5: pi_old / pi_rollout = 1, 1, 0.8.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hand:
    """The arithmetic of the example, per token, as text: numbers, + - * /, sqrt, exp, ln, max, min, sigmoid."""

    words: str
    advantages: tuple[str, str, str]
    losses: tuple[str, str, str]
    total: str
    terms: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)
    returns: tuple[str, str, str] | None = None
    values: tuple[str, str, str] | None = None
    """The critic's loss."""


_GROUP = "The mean is 0.5 and the deviation (Bessel) sqrt(0.25 + 0.25) = 0.7071: the advantages are +-0.5 / 0.7071."
_NORMAL = ("0.5 / 0.7071", "0.5 / 0.7071", "-0.5 / 0.7071")
_CLIP = " A1 rose past 1.2 and B1 fell past 0.8: both are clipped and have no gradient."
_CLIPPED = ("-0.7071 * 1.2", "-0.7071 * 1", "0.7071 * 0.8")
_K3 = ("0.5 / 0.7 + ln(1.4) - 1", "0", "0.4 / 0.3 + ln(0.75) - 1")
_K2 = ("ln(1.4) * ln(1.4) / 2", "0", "ln(0.75) * ln(0.75) / 2")
_WHITENED = "Over the three tokens the values {v} have mean {m} and deviation {d}."
_GAE = Hand(
    words="delta is 0, 1 - 0.5, 0 - 0.5, and A1 gets 0.95 of A2's: 0.475, 0.5, -0.5. "
    + _WHITENED.format(v="0.475, 0.5, -0.5", m="0.15833", d="0.57027")
    + _CLIP
    + " A return is the advantage before whitening plus 0.5.",
    advantages=("(0.475 - 0.15833) / 0.57027", "(0.5 - 0.15833) / 0.57027", "(-0.5 - 0.15833) / 0.57027"),
    losses=("-0.5553 * 1.2", "-0.5991 * 1", "1.1544 * 0.8"),
    total="(-0.66636 - 0.5991 + 0.92352) / 3",
    returns=("0.475 + 0.5", "0.5 + 0.5", "-0.5 + 0.5"),
    values=("0.475 * 0.475 / 2", "0.5 * 0.5 / 2", "0.5 * 0.5 / 2"),
)

HAND: Mapping[str, Hand] = {
    "grpo": Hand(
        words=_GROUP + _CLIP + " A's two tokens share one half, B's one has the other.",
        advantages=_NORMAL,
        losses=_CLIPPED,
        terms={"kl_loss": _K3},
        total="(-0.84852 - 0.7071) / 4 + 0.56568 / 2 + 0.04 * (0.050758 / 4 + 0.045651 / 2)",
    ),
    "grpo_loo": Hand(
        words="The only other answer is the mean; one answer has no deviation, so nothing is divided." + _CLIP,
        advantages=("1 - 0", "1 - 0", "0 - 1"),
        losses=("-1 * 1.2", "-1 * 1", "1 * 0.8"),
        total="(-1.2 - 1 + 0.8) / 3",
    ),
    "drgrpo": Hand(
        words="The mean is 0.5, nothing is divided; the horizon is 3 tokens, so each token weighs 1 / (2 x 3)." + _CLIP,
        advantages=("1 - 0.5", "1 - 0.5", "0 - 0.5"),
        losses=("-0.5 * 1.2", "-0.5 * 1", "0.5 * 0.8"),
        total="(-0.6 - 0.5 + 0.4) / (2 * 3)",
    ),
    "dapo": Hand(
        words=_GROUP + " A1 may rise to 1.28; B1 is clipped at 0.8. Every token weighs 1 / 3.",
        advantages=_NORMAL,
        losses=("-0.7071 * 1.28", "-0.7071 * 1", "0.7071 * 0.8"),
        total="(-0.90509 - 0.7071 + 0.56568) / 3",
    ),
    "gspo": Hand(
        words=_GROUP + " A's ratio is sqrt(1.4 x 1) = 1.1832, clipped at 1.0004; B's is 0.75, clipped at 0.9997.",
        advantages=_NORMAL,
        losses=("-0.7071 * 1.0004", "-0.7071 * 1.0004", "0.7071 * 0.9997"),
        total="-0.70738 / 2 + 0.70689 / 2",
    ),
    "gspo_token": Hand(
        words=_GROUP + " A's ratio is sqrt(1.4 x 1) = 1.1832, clipped at 1.0004; B's is 0.75, clipped at 0.9997.",
        advantages=_NORMAL,
        losses=("-0.7071 * 1.0004", "-0.7071 * 1.0004", "0.7071 * 0.9997"),
        total="-0.70738 / 2 + 0.70689 / 2",
    ),
    "cispo": Hand(
        words=_GROUP + " No ratio is above 5: each multiplies its token's log-probability as a constant.",
        advantages=_NORMAL,
        losses=("-1.4 * 0.7071 * ln(0.7)", "-1 * 0.7071 * ln(0.5)", "0.75 * 0.7071 * ln(0.3)"),
        total="(0.35309 + 0.49012 - 0.63850) / 3",
    ),
    "sapo": Hand(
        words=_GROUP + " The gate's temperature is 1 for A and 1.05 for B.",
        advantages=_NORMAL,
        losses=("-0.7071 * 4 * sigmoid(0.4)", "-0.7071 * 4 * sigmoid(0)", "0.7071 * 4 / 1.05 * sigmoid(1.05 * -0.25)"),
        total="(-1.69331 - 1.41420) / 4 + 1.17108 / 2",
    ),
    "gmpo": Hand(
        words=_GROUP
        + " ln(1.4) = 0.3365 and ln(0.75) = -0.2877 are within 0.4. A's geometric mean is sqrt(1.4 x 1) = 1.1832, B's 0.75.",
        advantages=_NORMAL,
        losses=("-0.7071 * 1.1832", "-0.7071 * 1.1832", "0.7071 * 0.75"),
        total="-0.83664 / 2 + 0.53033 / 2",
    ),
    "kl_cov": Hand(
        words=_GROUP
        + " (A - 0.2357)(log pi + 0.7513) is 0.186, 0.027, 0.427: B1 alone gets |ln 0.75|. Nothing is clipped.",
        advantages=_NORMAL,
        losses=("-0.7071 * 1.4", "-0.7071 * 1", "0.7071 * 0.75 + 0.28768"),
        total="(-0.98994 - 0.7071 + 0.81801) / 3",
    ),
    "clip_cov": Hand(
        words=_GROUP + _CLIP + " No covariance (0.186, 0.027, 0.427) is between 1 and 5: no token is dropped.",
        advantages=_NORMAL,
        losses=_CLIPPED,
        total="(-0.84852 - 0.7071 + 0.56568) / 3",
    ),
    "gdpo": Hand(
        words="Component a is +-0.5 / 0.7071 = +-0.7071, b has no spread and adds 0. Over the two answers the mean is 0 and the deviation 1."
        + _CLIP,
        advantages=("0.7071 / 1", "0.7071 / 1", "-0.7071 / 1"),
        losses=_CLIPPED,
        total="(-0.84852 - 0.7071) / 4 + 0.56568 / 2",
    ),
    "gpg": Hand(
        words="No group is flat: B / (B - M) = 2 / 2. No ratio: the log-probability itself is weighed.",
        advantages=("1 - 0.5", "1 - 0.5", "0 - 0.5"),
        losses=("-0.5 * ln(0.7)", "-0.5 * ln(0.5)", "0.5 * ln(0.3)"),
        total="(0.17834 + 0.34657 - 0.60199) / 3",
    ),
    "opo": Hand(
        words="The baseline is (2 x 1 + 1 x 0) / 3 = 0.6667: the longer answer counts twice." + _CLIP,
        advantages=("1 - 2 / 3", "1 - 2 / 3", "0 - 2 / 3"),
        losses=("-0.33333 * 1.2", "-0.33333 * 1", "0.66667 * 0.8"),
        total="(-0.4 - 0.33333 + 0.53333) / 3",
    ),
    "pass_at_k": Hand(
        words="A alone is best, by 1 - 0; the deviation is 0.7071. B has no advantage." + " A1 is clipped at 1.2.",
        advantages=("(1 - 0) / 0.7071", "(1 - 0) / 0.7071", "0"),
        losses=("-1.41422 * 1.2", "-1.41422 * 1", "0"),
        total="(-1.69706 - 1.41422) / 3",
    ),
    "otb": Hand(
        words="w is 1 - 1 + 0.5 = 0.5 for A1 and A2, 1 - 0.8 + 0.52 = 0.72 for B1. At place 1 b = 1 x 0.5 / (0.5 + 0.72) = 0.40984; at place 2 "
        "A is alone and b = 0." + _CLIP,
        advantages=("1 - 0.40984", "1 - 0", "0 - 0.40984"),
        losses=("-0.59016 * 1.2", "-1 * 1", "0.40984 * 0.8"),
        total="(-0.70819 - 1 + 0.32787) / 3",
    ),
    "rloo": Hand(
        words="The other answer is the baseline. The KL in the reward is 0: the old policy is the reference. Each token weighs 1 / 2 answers.",
        advantages=("1 - 0", "1 - 0", "0 - 1"),
        losses=("-1 * ln(0.7)", "-1 * ln(0.5)", "1 * ln(0.3)"),
        total="(0.35667 + 0.69315 - 1.20397) / 2",
    ),
    "remax": Hand(
        words="The greedy answer's 0.5 is taken off. The KL in the reward is 0: the old policy is the reference. Each token weighs 1 / 2 answers.",
        advantages=("1 - 0.5", "1 - 0.5", "0 - 0.5"),
        losses=("-0.5 * ln(0.7)", "-0.5 * ln(0.5)", "0.5 * ln(0.3)"),
        total="(0.17834 + 0.34657 - 0.60199) / 2",
    ),
    "reinforce_plus_plus": Hand(
        words="The reward to go is 1, 1, 0. " + _WHITENED.format(v="1, 1, 0", m="0.66667", d="0.57735") + _CLIP,
        advantages=("(1 - 0.66667) / 0.57735", "(1 - 0.66667) / 0.57735", "(0 - 0.66667) / 0.57735"),
        losses=("-0.57735 * 1.2", "-0.57735 * 1", "1.15470 * 0.8"),
        total="(-0.69282 - 0.57735 + 0.92376) / 3",
    ),
    "reinforce_plus_plus_baseline": Hand(
        words="Less the group's mean: 0.5, 0.5, -0.5. "
        + _WHITENED.format(v="0.5, 0.5, -0.5", m="0.16667", d="0.57735")
        + _CLIP,
        advantages=("(0.5 - 0.16667) / 0.57735", "(0.5 - 0.16667) / 0.57735", "(-0.5 - 0.16667) / 0.57735"),
        losses=("-0.57735 * 1.2", "-0.57735 * 1", "1.15470 * 0.8"),
        terms={"kl_loss": _K2},
        total="(-0.69282 - 0.57735 + 0.92376) / 3 + 0.001 * (0.056607 + 0.041380) / 3",
    ),
    "reinforce": Hand(
        words="The reward to go is the advantage; a wrong answer has none.",
        advantages=("1", "1", "0"),
        losses=("-1 * ln(0.7)", "-1 * ln(0.5)", "0"),
        total="(0.35667 + 0.69315) / 2",
    ),
    "ppo": _GAE,
    "vapo": Hand(
        words="0.05 x 2 tokens is below 1, so lambda is 0 and the advantages are the deltas 0, 1 - 0.5, 0 - 0.5, of mean 0 and deviation 0.5. B1 is "
        "clipped at 0.8. The returns take lambda 1. A is right: 0.1 of its NLL over its two tokens is added.",
        advantages=("0 / 0.5", "0.5 / 0.5", "-0.5 / 0.5"),
        losses=("0", "-1 * 1", "1 * 0.8"),
        returns=("0.5 + 0.5", "0.5 + 0.5", "-0.5 + 0.5"),
        values=("0.5 * 0.5 / 2", "0.5 * 0.5 / 2", "0.5 * 0.5 / 2"),
        terms={"positive_nll": ("-ln(0.7)", "-ln(0.5)", "0")},
        total="(0 - 1 + 0.8) / 3 + 0.1 * (0.35667 + 0.69315) / 2",
    ),
    "pf_ppo": Hand(
        words="Best and worst are both kept here. " + _GAE.words,
        advantages=_GAE.advantages,
        losses=_GAE.losses,
        total=_GAE.total,
        returns=_GAE.returns,
        values=_GAE.values,
    ),
    "decoupled_ppo": Hand(
        words=_GROUP + _CLIP + " Then B1's loss is weighed by 0.8; no weight is above 5.",
        advantages=_NORMAL,
        losses=_CLIPPED,
        total="(-0.84852 - 0.7071 + 0.8 * 0.56568) / 3",
    ),
}


@dataclass(frozen=True, slots=True)
class Solved:
    """What the row's own code says of the example: [3] each."""

    columns: Columns
    losses: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    total: float


def solve(name: str) -> Solved:
    """The example through the row's estimator, terms and weights, critic's included; nothing is rounded."""
    algo = resolve(name, NEEDED.get(name))
    f64 = torch.float64
    score = torch.tensor([1.0, 0.0], dtype=f64)
    old = torch.tensor([0.5, 0.5, 0.4], dtype=f64).log()
    columns = Columns(
        token={
            "old_logprobs": old,
            "ref_logprobs": old,
            "rollout_logprobs": torch.full((3,), 0.5, dtype=f64).log(),
            "old_values": torch.full((3,), 0.5, dtype=f64),
            "sum_pi_squared": torch.tensor([0.5, 0.5, 0.52], dtype=f64),
        },
        sequence={
            "score": score,
            "group": torch.zeros(2, dtype=torch.int64),
            "valid": torch.tensor([True, True]),
            "positive": score > 0,
            "baseline": torch.full((2,), 0.5, dtype=f64),
            "component/a": score,
            "component/b": torch.ones(2, dtype=f64),
        },
        sequence_of=torch.tensor([0, 0, 1]),
        num_sequences=2,
        mask=torch.tensor([True, True, True]),
    )
    if algo.correction is not None:
        weighed = correct(columns, algo.correction)
        columns = columns.with_token({k: v for k, v in weighed.items() if isinstance(v, Tensor)})
    penalty = kl_penalty(columns, coef=algo.kl_reward.coef, form=algo.kl_reward.form)[0] if algo.kl_reward else None
    columns = columns.with_token({"rewards": token_rewards(columns, penalty)})
    columns = columns.with_token(algo.advantage(columns))
    terms = (*algo.terms, *algo.value_terms)
    weights = {k.removeprefix("w/"): v for k, v in term_weights(columns, terms).items()}
    now = torch.tensor([0.7, 0.5, 0.3], dtype=f64).log()
    columns = columns.with_token({"logprobs": now, "values": columns["old_values"]})
    losses = {t.name: torch.where(weights[t.name] != 0, t.fn(columns).values, 0.0) for t in terms}
    policy = [t.name for t in algo.terms]
    return Solved(columns, losses, weights, float(sum((weights[n] * losses[n]).sum() for n in policy)))


# -- the page --------------------------------------------------------------------------------------------------------


def recommended(name: str) -> dict[str, str]:
    """Overrides over recipe=quickstart for this algorithm, as on the command line."""
    return {"algorithm.name": name, **BASE, **RECOMMENDED.get(name, {})}


def changed(row: Row) -> dict[str, Any]:
    """The settings of a row that differ from the table's defaults, axes apart."""
    out = {}
    for f in fields(Row):
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        value = getattr(row, f.name)
        if f.name not in ("source", "notes", *AXES) and default is not MISSING and value != default:
            out[f.name] = value
    return out


def defects(name: str) -> list[str]:
    """Quirk numbers of the row's axes (algorithms.md section 8), each once."""
    row = TABLE[name]
    keys = [row.estimator, row.loss, row.aggregation, row.selection or ""]
    keys += [row.kl_loss_form] if row.kl_loss_coef else []
    keys += ["filter_groups"] if row.filter_groups else []
    keys += ["correction"] if row.correction else []
    return sorted(dict.fromkeys(q for k in keys for q in DEFECTS.get(k, ())), key=lambda q: int(q[1:]))


def card(name: str) -> str:
    """One page of markdown."""
    row, algo = TABLE[name], resolve(name, NEEDED.get(name))
    parts = [
        f"# {TITLES[name]}",
        _source(row.source),
        WHEN[name],
        "## Formula",
        _block(*_formula(row)),
        "## What the preset fixes",
        _table(("axis", "value"), _axes(row, algo)),
        _settings(row),
        "## Run it",
        _block(*_launch(name)),
        f"`verl show algorithm={name}` prints every setting. " + _recommendation(name),
        "## Three tokens by hand",
        EXAMPLE + _extra(row),
        HAND[name].words,
        _solution(name),
        "## Where others differ",
        _differences(name),
    ]
    return "\n\n".join(p for p in parts if p) + "\n"


def index() -> str:
    """README.md: all rows, and what every card leaves out."""
    lines = [
        (f"[{TITLES[n]}]({n}.md)", f"`{n}`", r.estimator, r.loss, r.aggregation, r.source) for n, r in TABLE.items()
    ]
    return (
        "\n\n".join(
            [
                "# Algorithms",
                "Each is a row of `verl/algorithms/table.py`: group, selection, estimator, loss, aggregation, KL and correction, fixed at the\n"
                "paper's values. Settings change single ones; the resolved row is what runs.",
                _table(("card", "name", "estimator", "loss", "aggregation", "source"), lines),
                _block("verl show algorithms", "verl show algorithm=vapo", language="bash"),
                "What holds for all: an answer without a valid reward is in no statistic and no loss; a group of one and a group of equal rewards\n"
                "have advantage 0; loss and gradient do not depend on micro-batches, packing or order; a fully masked batch gives 0, never NaN\n"
                "(Q12, Q13). The numbers Q1 to Q23 are defects of other implementations that were read in their source or reproduced.",
                "These pages are made by `python -m verl.algorithms.cards docs/algorithms`; edits are overwritten.",
            ]
        )
        + "\n"
    )


def pages() -> dict[str, str]:
    """Every page by its file name."""
    return {"README.md": index(), **{f"{name}.md": card(name) for name in TABLE}}


def _source(source: str) -> str:
    words = [
        f"[{w}](https://arxiv.org/abs/{w})" if w[:4].isdigit() and w[4:5] == "." else w
        for w in source.replace(",", " ,").replace(";", " ;").split()
    ]
    return " ".join(words).replace(" ,", ",").replace(" ;", ";") + "."


def _formula(row: Row) -> list[str]:
    estimate = ESTIMATES[row.estimator]
    if row.estimator == "grpo" and row.leave_one_out:
        estimate = LEAVE_ONE_OUT
    elif row.estimator == "grpo" and not row.normalize_by_std:
        estimate = ONLY_MEAN
    out = estimate.split("\n")
    if row.length_adaptive_alpha is not None:
        out.append(LENGTH_ADAPTIVE)
    if row.kl_reward_coef:
        out.insert(0, "R_t = score at the last token - kl_reward_coef log(pi_old / pi_ref)")
    out += POLICY_LOSSES[row.loss].split("\n")
    if row.correction:
        out.append(
            "loss_t is weighed by w = pi_old / pi_rollout; tokens with w > correction_high are dropped, but counted"
        )
    out.append(AGGREGATED[row.aggregation])
    if row.kl_loss_coef:
        k = {"k3": "pi_ref / pi - log(pi_ref / pi) - 1", "k2": "log(pi / pi_ref)^2 / 2"}[row.kl_loss_form]
        out.append(f"     + kl_loss_coef x the same of {k}")
    if row.positive_nll_coef:
        out.append("     + positive_nll_coef x mean of -log pi over the tokens of answers with a score above 0")
    if row.estimator == "gae":
        out.append("critic: mean of max((v - return)^2, (v clipped to v_old +- value_clip - return)^2) / 2")
    return out


def _axes(row: Row, algo: Algorithm) -> list[tuple[str, str]]:
    group = f"at least {row.least} answers per prompt" if row.least > 1 else "any number of answers per prompt"
    if row.baselines:
        group += f", {row.baselines} greedy one as baseline"
    kl = [f"in the loss, {row.kl_loss_form}, {row.kl_loss_coef:g}"] if row.kl_loss_coef else []
    kl += [f"in the reward, {row.kl_reward_form}, {row.kl_reward_coef:g}"] if row.kl_reward_coef else []
    return [
        ("group", group),
        (
            "selection",
            {"bw": "best and worst of each group"}.get(row.selection or "", "")
            or ("groups without spread are replaced" if row.filter_groups else "all"),
        ),
        ("estimator", row.estimator),
        ("loss", row.loss),
        ("aggregation", row.aggregation),
        ("KL", "; ".join(kl) or "none"),
        (
            "correction",
            f"{row.correction}, {row.correction_level}, at most {row.correction_high:g}" if row.correction else "none",
        ),
        ("critic", "yes" if algo.critic else "no"),
    ]


def _settings(row: Row) -> str:
    found = changed(row)
    if not found:
        return "All other settings are the table's defaults."
    return "Settings that differ from the table's defaults: " + ", ".join(f"`{k}` {v}" for k, v in found.items()) + "."


def _launch(name: str) -> list[str]:
    needed = {
        "gdpo": " algorithm.options.reward_components=[a,b] reward.path=my_reward.py",
        "drgrpo": " algorithm.horizon_tokens=1024",
    }
    plain = f"verl train model.path=DIR data.train_files=[FILE] algorithm.name={name}{needed.get(name, '')}"
    small = " ".join(f"{k}={v}" for k, v in recommended(name).items())
    return [
        plain,
        f"verl train recipe=quickstart model.path=DIR data.train_files=[FILE] data.eval_files=[FILE] {small}",
    ]


def _recommendation(name: str) -> str:
    return (
        "The second line is for a task of the quickstart's size; the recipes fix\nthe aggregation themselves, `algorithm.aggregation=null` gives it back to the preset. "
        + WHY_RECOMMENDED.get(name, "The recipe's 1e-4 is the rate; nothing else changes.")
    )


def _differences(name: str) -> str:
    found = [f"{q}: {QUIRKS[q]}" for q in defects(name)]
    if TABLE[name].estimator in RAW_SINGLETON:
        found.append("verl gives the answer of a group of one its raw score as advantage.")
    found += [ALSO[name]] if name in ALSO else []
    return "\n".join(f"- {x}" for x in found)


def _extra(row: Row) -> str:
    return EXTRA.get(row.estimator, "") + (EXTRA["correction"] if row.correction else "")


def _solution(name: str) -> str:
    solved, hand = solve(name), HAND[name]
    head = ["token", "reward", "advantage by hand", "advantage", "loss by hand", "loss", "weight"]
    columns: list[Sequence[str]] = [
        TOKENS,
        _numbers(solved.columns["rewards"]),
        hand.advantages,
        _numbers(solved.columns["advantages"]),
        hand.losses,
        _numbers(solved.losses["pg_loss"]),
        _numbers(solved.weights["pg_loss"]),
    ]
    for term, text in hand.terms.items():
        head += [f"{term} by hand", term]
        columns += [text, _numbers(solved.losses[term])]
    out = [_table(head, list(zip(*columns, strict=True))), f"Loss: `{hand.total}` = {_number(solved.total)}."]
    if hand.returns and hand.values:
        value = float((solved.weights["vf_loss"] * solved.losses["vf_loss"]).sum())
        rows = [
            TOKENS,
            hand.returns,
            _numbers(solved.columns["returns"]),
            hand.values,
            _numbers(solved.losses["vf_loss"]),
        ]
        out += [
            _table(
                ("token", "return by hand", "return", "value loss by hand", "value loss"), list(zip(*rows, strict=True))
            ),
            f"The critic's loss is their mean, {_number(value)}.",
        ]
    return "\n\n".join(out)


def _number(x: float) -> str:
    return f"{x:.4f}".replace("-0.0000", "0.0000")


def _numbers(x: Tensor) -> list[str]:
    return [_number(v) for v in x.tolist()]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _block(*lines: str, language: str = "text") -> str:
    return f"```{language}\n" + "\n".join(lines) + "\n```"


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m verl.algorithms.cards FOLDER", file=sys.stderr)
        return 2
    folder = Path(argv[0])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
