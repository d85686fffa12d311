"""Converts a golden case (padded [B, T] arrays of a peer) to ours (packed columns), by the name of the peer's function.

Each adapter runs the product on the case's inputs and returns {output name: array} to compare. A case without a
function here is skipped by name in the report.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms import estimators as adv
from verl.algorithms import losses, weights
from verl.algorithms.corrections import correct
from verl.algorithms.filters import Correction, SampleFilter, reject_flat
from verl.batch import Batch, Columns, pack
from verl.driver.stages import SFT_TERMS
from verl.model_engine.objective import evaluate_terms
from verl.nn.linear_logprob import linear_logprob
from verl.objective import Term, TermValue
from verl.reward import shaping
from verl.types import Sample, Segment

Case = Mapping[str, Any]
Adapter = Callable[[Case, Mapping[str, Any]], dict[str, Any]]
"""(arrays, hyperparameters) -> {array's name: value} and {\"metric:NAME\": value} to compare with the case's own."""


NEUTRAL = {
    "garbage_padding": (False, True),  # what the case's inputs hold
    "loss_agg_mode": ("token-mean",),  # verl's GMPO reads none
    "clip_ratio_low": (0.2,),
    "clip_ratio_high": (0.2,),
    "clip_ratio_c": (3.0,),
    "bypass_mode": (False,),
    "_target_": ("",),
    "label_smoothing": (0.0,),
    "simpo_gamma": (0.5,),
    "delta": (None,),
    "use_bias_correction_kl": (False,),
    "importance_sampling_level": ("token",),
    "multi_objective_aggregation": ("sum_then_normalize",),
    "atol": (1e-6,),
    "replacement": (True,),
    "use_kl_in_reward": (False,),
    "use_on_policy_kl_approximation": (False,),
    "reference_policy_kl_type": ("k3",),
    "kl_input_clamp_value": (20.0,),
    "kl_output_clamp_value": (10.0,),
    "ratio_clip_c": (None,),
    **dict.fromkeys(("truncated_importance_sampling_type", "truncated_importance_sampling_ratio"), (None,)),
    "truncated_importance_sampling_ratio_min": (None,),
}
"""Values that say nothing where no adapter asks for them; any other value of these is refused."""
IDLE = ("clip_ratio", "loss_mode", "discopop_tau", "num_samples")
"""Given beside what counts: verl's dead key, and the function's own name."""
RESTATED = (
    *(f"in_{ref}{side}_logps" for ref in ("", "ref_") for side in ("chosen", "rejected")),
    *("in_chosen_len", "in_rejected_len", "in_logps"),
)
"""Inputs that are sums of others, which the adapter reads."""


class Read(Mapping):
    """Hyper-parameters or arrays of a case, with those that an adapter looked at."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = {k: Read(v) if isinstance(v, dict) else v for k, v in values.items()}
        self._seen: set[str] = set()

    def __contains__(self, key):
        return key in self._values

    def __getitem__(self, key):
        self._seen.add(key)
        return self._values[key]

    def __iter__(self):
        return iter(self._values)

    def __len__(self):
        return len(self._values)

    def unread(self) -> list[str]:
        """Inputs that no adapter looked at."""
        return [k for k in self._values if k.startswith("in_") and k not in (*self._seen, *RESTATED)]

    def ignored(self) -> dict:
        """Return the inputs that no adapter reads, without those that are known to have no effect."""
        unasked = {k: v for k, v in self._values.items() if k not in (*self._seen, *IDLE)}
        out = {k: v for k, v in unasked.items() if v not in NEUTRAL.get(k, ())}
        for k, v in self._values.items():
            if isinstance(v, Read) and k in self._seen and v.ignored():
                out[k] = v.ignored()
        return out


def columns_of(
    mask: np.ndarray, token: Mapping[str, np.ndarray], sequence: Mapping[str, Tensor] | None = None
) -> Columns:
    """All B*T positions become tokens of B sequences; `mask` decides. Garbage outside must not matter."""
    b, t = mask.shape
    return Columns(
        token={n: torch.from_numpy(np.asarray(x, np.float64).reshape(-1)) for n, x in token.items()},
        sequence=dict(sequence or {}),
        sequence_of=torch.arange(b).repeat_interleave(t),
        num_sequences=b,
        mask=torch.from_numpy(mask.reshape(-1) > 0),
    )


def labels(index: np.ndarray) -> Tensor:
    names: dict[str, int] = {}
    return torch.tensor([names.setdefault(str(i), len(names)) for i in index])


def _rewarded(case: Case, to_go: bool = False) -> Columns:
    """Return the case's rewards on its tokens. A reward outside of the mask is counted by verl's estimators of whole
    answers, and by ours at the place of the score; returns from a token on (to_go) are of the mask alone."""
    mask = case["in_response_mask"]
    rewards = np.asarray(case["in_token_level_rewards"], np.float64)
    index = case["in_index"] if "in_index" in case else np.arange(len(mask))
    sequence = {
        "score": torch.from_numpy(rewards.sum(1)),
        "group": labels(index),
        "valid": torch.ones(len(mask), dtype=torch.bool),
    }
    columns = columns_of(mask, {}, sequence)
    if to_go or ((rewards != 0) & (mask > 0)).sum() == (rewards != 0).sum():
        return columns.with_token({"rewards": torch.from_numpy(np.where(mask > 0, rewards, 0.0).reshape(-1))})
    return columns.with_token({"rewards": adv.token_rewards(columns)})


def _advantage(fn: Callable[[Columns], Mapping[str, Tensor]]) -> Callable[[Case], dict[str, np.ndarray]]:
    def run(case: Case) -> dict[str, np.ndarray]:
        return {"out_advantages": fn(_rewarded(case))["advantages"].numpy().reshape(case["in_response_mask"].shape)}

    return run


def _alone(columns: Columns) -> Tensor:
    """[L] tokens of groups of one."""
    group = columns.sequence["group"]
    return (torch.bincount(group)[group] == 1)[columns.sequence_of]


RAW: Mapping[str, Any] = {"singleton": "raw"}
"""verl gives the answer of a group of one its own score."""


def grpo(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    options = {"normalize_by_std": hp.get("norm_adv_by_std_in_grpo", True), "epsilon": hp.get("epsilon", 1e-6)}
    return _advantage(partial(adv.grpo, **options, **RAW))(case)


def rloo(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return _advantage(partial(adv.rloo, **RAW))(case)


def rloo_vectorized(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return _advantage(adv.rloo)(case)


def rfpp(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    got = adv.reinforce_plus_plus(_rewarded(case, to_go=True), gamma=hp.get("gamma", 1.0))
    return _inside(case, got, case["in_response_mask"])


def rfpp_baseline(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return _advantage(partial(adv.reinforce_plus_plus_baseline, **RAW))(case)


def gae(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """verl leaves garbage outside the mask; ours is 0 there and compared only where the case has numbers of its own."""
    mask = case["in_response_mask"]
    columns = columns_of(
        mask, {"rewards": case["in_token_level_rewards"], "old_values": case["in_values"]}, _no_groups(len(mask))
    )
    return _inside(case, adv.gae(columns, gamma=hp["gamma"], lam=hp["lam"]), mask)


def spec_gae(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    mask = case["in_response_mask"]
    columns = columns_of(
        mask, {"rewards": case["in_token_level_rewards"], "old_values": case["in_values"]}, _no_groups(len(mask))
    )
    got = adv.gae(columns, gamma=hp["gamma"], lam=hp["lam"])
    return {f"out_{n}": x.numpy().reshape(mask.shape) for n, x in got.items()}


def nemo_gae(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    mask = case["in_response_mask"]
    sequence = {**_no_groups(len(mask)), "score": torch.from_numpy(np.asarray(case["in_rewards"], np.float64))}
    columns = columns_of(mask, {"old_values": case["in_values"]}, sequence)
    columns = columns.with_token({"rewards": adv.token_rewards(columns)})
    assert not hp["whiten"]
    alpha = hp["length_adaptive_alpha"] or None
    return _inside(case, adv.raw_gae(columns, hp["gamma"], hp["lam_policy"] or 1.0, hp["lam_value"], alpha), mask)


def _no_groups(n: int) -> dict[str, Tensor]:
    return {"group": torch.arange(n), "valid": torch.ones(n, dtype=torch.bool)}


def _inside(case: Case, got: Mapping[str, Tensor], mask: np.ndarray) -> dict[str, np.ndarray]:
    for x in got.values():
        assert not x.numpy().reshape(mask.shape)[mask == 0].any(), "exactly 0 outside the mask"
    return {f"out_{n}": np.where(mask > 0, x.numpy().reshape(mask.shape), case[f"out_{n}"]) for n, x in got.items()}


def remax(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """verl leaves returns in holes of the mask; ours are 0 there."""
    columns = _rewarded(case, to_go=True)
    baseline = torch.from_numpy(np.asarray(case["in_reward_baselines"], np.float64))
    got = adv.remax(replace(columns, sequence={**columns.sequence, "baseline": baseline}))
    return _inside(case, got, case["in_response_mask"])


def opo(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return _advantage(partial(adv.opo, **RAW))(case)


def gpg(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return _advantage(partial(adv.gpg, alpha_counts="nonzero", f_norm=hp["f_norm"], **RAW))(case)


def gpg_paper(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return _advantage(partial(adv.gpg, f_norm=hp["f_norm"]))(case)


def pass_at_k(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return _advantage(partial(adv.pass_at_k, normalize_by_std=hp["norm_adv_by_std_in_grpo"], epsilon=hp["epsilon"]))(
        case
    )


def gdpo(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    mask = case["in_response_mask"]
    components = torch.from_numpy(np.asarray(case["in_component_rewards"], np.float64))
    named = {f"component/{k}": components[:, k] for k in range(components.shape[1])}
    columns = columns_of(mask, {}, {**_no_groups(len(mask)), "group": labels(case["in_index"]), **named})
    assert hp["norm_adv_by_std_in_grpo"]
    names = [n.removeprefix("component/") for n in named]
    total, _ = adv.summed_components(columns, names, hp["weights"], hp["epsilon"])
    per_token = torch.where(columns.mask, total[columns.sequence_of], 0.0)
    white = adv.whiten(per_token, columns.mask)  # verl whitens over tokens: long answers weigh more
    return {"out_advantages": white.numpy().reshape(mask.shape)}


def otb(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Both of verl's variants: with a mask without holes they are one, and with holes ours is the TIR variant."""
    token = {
        "old_logprobs": torch.from_numpy(np.asarray(case["in_old_log_probs"], np.float64).reshape(-1)),
        "sum_pi_squared": torch.from_numpy(np.asarray(case["in_sum_pi_squared"], np.float64).reshape(-1)),
    }
    if "in_rollout_is_weights" in case:
        token["is_weights"] = torch.from_numpy(np.asarray(case["in_rollout_is_weights"], np.float64).reshape(-1))
    assert hp["handle_zero_tail"] and hp["epsilon"] == 1e-8
    columns = _rewarded(case, to_go=True).with_token(token)
    got = adv.otb(columns)
    alone = _alone(columns) & columns.mask  # a group of one has no baseline in verl: its reward to go
    got = {**got, "advantages": torch.where(alone, got["returns"], got["advantages"])}
    return _inside(case, got, case["in_response_mask"])


def nemo_grpo_loo(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    assert hp["use_leave_one_out_baseline"]
    columns = _outcomes(case["in_rewards"], labels(case["in_index"]))
    got = adv.grpo(columns, leave_one_out=True, normalize_by_std=hp["normalize_rewards"], epsilon=hp["epsilon"])
    return {"out_advantages": got["advantages"].numpy()}


def trl_rloo(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    mask = case["in_response_mask"]
    score = torch.from_numpy(np.asarray(case["in_rewards"], np.float64))
    sequence = {**_no_groups(len(mask)), "group": torch.arange(len(mask)) // hp["num_generations"], "score": score}
    columns = columns_of(
        mask, {"old_logprobs": case["in_old_log_prob"], "ref_logprobs": case["in_ref_log_prob"]}, sequence
    )
    penalty, _ = losses.kl_penalty(columns, coef=hp["beta"], form="k1")
    columns = columns.with_token({"rewards": adv.token_rewards(columns, penalty)})
    options = {"reward_clip": hp["reward_clip_range"] or (), "normalize_advantages": hp["normalize_advantages"]}
    a = columns.mean(adv.rloo(columns, **options, whiten_epsilon=1e-4)["advantages"])
    return {"out_advantages": a.numpy()}


def pf_ppo(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    drawn = SampleFilter(selection=hp["reweight_method"], weight_pow=hp["weight_pow"])
    weight = np.array(drawn.batch_weights(np.asarray(case["in_scores"], np.float64).tolist()))
    return {"out_weights": weight, "out_probabilities": weight / weight.sum()}


def _outcomes(rewards: np.ndarray, group: Tensor, valid: Tensor | None = None) -> Columns:
    """One token per sequence, which carries its score."""
    score = torch.from_numpy(np.asarray(rewards, np.float64))
    valid = torch.ones(len(score), dtype=torch.bool) if valid is None else valid
    columns = columns_of(np.ones((len(score), 1)), {}, {"score": score, "group": group, "valid": valid})
    return columns.with_token({"rewards": adv.token_rewards(columns)})


def trl_grpo_advantage(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    per_fn = torch.from_numpy(np.asarray(case["in_rewards_per_func"], np.float64))
    score = (per_fn * torch.from_numpy(np.asarray(case["in_reward_weights"], np.float64))).nansum(1)
    score[per_fn.isnan().all(1)] = float("nan")
    group = torch.arange(len(score)) // hp["num_generations"]
    columns = _outcomes(score.nan_to_num().numpy(), group, ~score.isnan())
    a = adv.grpo(columns, scale_rewards=hp["scale_rewards"], epsilon=hp["eps"])["advantages"]
    return {"out_advantages": a.numpy()}


def _batch(columns: Columns) -> Batch:
    """The same tokens as an engine's batch: one row per sequence."""
    counts = torch.bincount(columns.sequence_of, minlength=columns.num_sequences).tolist()
    rows = [
        Sample(
            sample_id=str(i),
            trajectory_id=str(i),
            group_id=str(i),
            purpose="train",
            segments=(
                Segment(ids=np.zeros(1, np.int64), source="prompt"),
                Segment(ids=np.arange(n), source="sampled", logprobs=np.zeros(n, np.float32), version=0),
            ),
        )
        for i, n in enumerate(counts)
    ]
    return pack(rows, share_prefix=False).with_columns(columns.token)


def _evaluated(
    columns: Columns, terms: tuple[Term, ...], leaf: Tensor, scale: Tensor | float = 1.0, output: str = "logprobs"
) -> tuple[float, Tensor, Mapping[str, float]]:
    """(loss, gradient, metrics) of these terms by the engine's own reduction: its masks, its sum of weight x value."""
    made = weights.term_weights(columns, terms)
    scaled = {n: w * scale if n.startswith("w/") else w for n, w in made.items()}
    stored = {n: c for n, c in columns.token.items() if n != output}
    batch = _batch(replace(columns, token={**stored, **scaled}))
    loss, found = evaluate_terms(terms, batch, {output: leaf})
    (grad,) = torch.autograd.grad(loss, leaf)
    return float(loss.detach()), grad, {n: m.value for n, m in found.items()}


INPUTS = {
    "old_logprobs": ("in_old_log_prob", "in_proximal_log_prob"),
    "ref_logprobs": ("in_ref_log_prob",),
    "rollout_logprobs": ("in_rollout_log_prob", "in_behave_log_prob"),
    "is_weights": ("in_rollout_is_weights",),
}


def _policy_columns(case: Case) -> tuple[Columns, Tensor]:
    mask = case["in_response_mask"]
    if "in_sample_mask" in case:
        mask = mask * case["in_sample_mask"][:, None]
    token = {ours: case[name] for ours, names in INPUTS.items() for name in names if name in case}
    if "in_advantages" in case:
        a = case["in_advantages"]
        token["advantages"] = np.broadcast_to(a[:, None], mask.shape) if a.ndim == 1 else a
    columns = columns_of(mask, token)
    if "in_log_prob" not in case:
        return columns, torch.zeros(0)
    leaf = torch.from_numpy(np.asarray(case["in_log_prob"], np.float64).reshape(-1)).requires_grad_()
    return columns.with_token({"logprobs": leaf}), leaf


METRICS = {"actor/pg_clipfrac": "pg_clipfrac", "actor/pg_clipfrac_lower": "pg_clipfrac_lower", "actor/ppo_kl": "ppo_kl"}


def _total(
    case: Case, columns: Columns, leaf: Tensor, parts: tuple[Term, ...], scale: Tensor | float = 1.0
) -> dict[str, Any]:
    """Loss, gradient and metrics of these terms, weighted as a role weighs them."""
    loss, grad, measured = _evaluated(columns, parts, leaf, scale)
    out = {"out_loss": np.array(loss), "grad_log_prob": grad.numpy().reshape(case["in_log_prob"].shape)}
    theirs = case_metrics(case)
    out |= {f"metric:{name}": measured[ours] for name, ours in METRICS.items() if name in theirs and ours in measured}
    return out


def case_metrics(case: Case) -> Mapping[str, float]:
    return json.loads(str(case["out_metrics_json"])) if "out_metrics_json" in case else {}


def _clip(hp: Mapping[str, Any]) -> dict[str, float]:
    return {"clip_low": hp["clip_ratio_low"], "clip_high": hp["clip_ratio_high"]}


def _cov(hp: Mapping[str, Any]) -> Mapping[str, float]:
    return hp["policy_loss"]


LOSSES: Mapping[str, Callable[[Mapping[str, Any]], Callable[[Columns], TermValue]]] = {
    "vanilla": lambda hp: partial(losses.ppo_clip, clip_dual=hp["clip_ratio_c"], **_clip(hp)),
    "gspo": lambda hp: partial(losses.gspo_token, **_clip(hp)),
    "sapo": lambda hp: partial(losses.sapo, tau_positive=hp["tau_pos"], tau_negative=hp["tau_neg"]),
    "cispo": lambda hp: partial(losses.cispo, ratio_min=1 - hp["clip_ratio_low"], ratio_max=1 + hp["clip_ratio_high"]),
    "gpg": lambda hp: losses.reinforce,
    "geo_mean": lambda hp: partial(losses.gmpo, **_clip(hp)),
    "kl_cov": lambda hp: partial(losses.kl_cov, cov_ratio=_cov(hp)["kl_cov_ratio"], cov_coef=_cov(hp)["ppo_kl_coef"]),
    "clip_cov": lambda hp: partial(
        losses.clip_cov,
        cov_ratio=_cov(hp)["clip_cov_ratio"],
        cov_low=_cov(hp)["clip_cov_lb"],
        cov_high=_cov(hp)["clip_cov_ub"],
        **_clip(hp),
    ),
    "dppo_tv": lambda hp: partial(losses.dppo_tv, ratio_max=hp["clip_ratio_c"], **_clip(hp)),
    "dppo_kl": lambda hp: partial(losses.dppo_kl, ratio_max=hp["clip_ratio_c"], **_clip(hp)),
    "dro": lambda hp: partial(losses.dro, dro_beta=hp["policy_loss"]["dro_beta"]),
}


def policy_loss(case: Case, hp: Mapping[str, Any]) -> dict[str, Any]:
    """verl's registered losses. Its mean over rows in GMPO is seq-mean-token-mean here, and so is SAPO's aggregation,
    whatever is set."""
    columns, leaf = _policy_columns(case)
    mode, info = hp["loss_mode"], dict(hp.get("global_batch_info", {}))
    aggregate = hp.get("loss_agg_mode")
    if mode in ("geo_mean", "sapo"):
        aggregate = "seq-mean-token-mean"
    term = Term(
        name="pg",
        aggregate=aggregate,
        horizon_tokens=info.get("loss_scale_factor") or case["in_response_mask"].shape[1],
        corrected="geometric" if mode == "geo_mean" else "token",
        fn=LOSSES[mode](hp),
    )
    if mode == "geo_mean":  # the mean over all rows of the case, empty ones too, whatever the sizes of the batch
        scale = int((columns.counts() > 0).sum()) / columns.num_sequences
    else:
        scale = _share(columns, {**info, "loss_agg_mode": aggregate}) * info.get("dp_size", 1)
    out = _total(case, columns, leaf, (term,), scale)
    # GMPO: verl counts tokens outside the band, we those that the clip changed; KL-Cov: its ppo_kl is the mean of |d|
    return {n: x for n, x in out.items() if not (n.startswith("metric:") and hp["loss_mode"] in ("geo_mean", "kl_cov"))}


TRL_AGGREGATIONS = {
    "grpo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "luspo": "seq-mean-token-sum",
    "dr_grpo": "seq-mean-token-sum-norm",
    **dict.fromkeys(("dapo", "bnpo", "cispo", "vespo"), "token-mean"),
}
ABOVE = {"truncate": "truncate", "mask": "icepop"}
"""The treatment of importance weights above the cap: they are the cap, or 0, as tokens that stay in the
denominators."""


def trl_loss(case: Case, hp: Mapping[str, Any]) -> dict[str, Any]:
    kind, mode, level = hp["loss_type"], TRL_AGGREGATIONS[hp["loss_type"]], hp["importance_sampling_level"]
    columns, leaf = _policy_columns(case)
    weighed = None
    if hp["vllm_is_cap"] is not None:
        weighed, above = hp.get("vllm_importance_sampling_mode", "token_truncate").split("_")
        capped = Correction(form=ABOVE[above], high=hp["vllm_is_cap"], level=weighed)  # type: ignore[arg-type]
        columns = columns.with_token({"is_weights": correct(columns, capped)["is_weights"]})
    clip = {"clip_low": hp["epsilon_low"], "clip_high": hp["epsilon_high"]}
    tau = dict(zip(("tau_positive", "tau_negative"), hp["sapo_tau"], strict=True))
    fn: Callable[[Columns], TermValue]
    if kind == "vespo":
        sides = {"k_pos": "k_positive", "lambda_pos": "lambda_positive", "k_neg": "k_negative"}
        sides |= {"lambda_neg": "lambda_negative"}
        given = {ours: hp[f"vespo_{theirs}"] for theirs, ours in sides.items() if f"vespo_{theirs}" in hp}
        fn = partial(losses.vespo, weighed=weighed, **given)
    elif kind == "cispo":
        fn = partial(losses.cispo, ratio_max=hp["epsilon_high"])
    elif kind == "sapo":
        fn = partial(losses.sapo, **tau)
    elif level == "sequence":
        assert hp["delta"] is None
        fn = partial(losses.gspo, **clip)
    else:
        assert level == "token" and kind != "luspo"
        fn = partial(losses.ppo_clip, ratio_max=hp["delta"], **clip)
    if hp["off_policy_mask_threshold"] is not None:
        fn = partial(losses.off_policy_sequence_mask, inner=fn, delta=hp["off_policy_mask_threshold"])
    if (share := hp.get("top_entropy_quantile", 1.0)) < 1:
        entropy = case["in_entropies"] if "in_entropies" in case else case["in_entropy"]
        columns = columns.with_token({"entropy": torch.from_numpy(np.asarray(entropy, np.float64).reshape(-1))})
        fn = partial(losses.high_entropy, inner=fn, share=share)
    common: dict[str, Any] = {"aggregate": mode, "horizon_tokens": hp["max_completion_length"]}
    parts = [Term(name="pg", fn=fn, corrected="no" if kind == "vespo" else "token", **common)]
    if hp["beta"]:
        kl_term = partial(losses.kl_loss, form="k3", ratio_corrected=hp["use_bias_correction_kl"])
        parts.append(Term(name="kl", fn=kl_term, coef=hp["beta"], **common))
    return _total(case, columns, leaf, tuple(parts))


def nemo_kl(columns: Columns, *, behind: str, bound: float | None, form: str) -> TermValue:
    """The estimate with its value clamped, times pi / pi of `behind`: the sampler, or the detached policy itself."""
    value = losses.kl_estimate(columns["logprobs"], columns["ref_logprobs"], form)
    if bound is not None:
        value = value.clamp(-bound, bound)
    return TermValue(value * losses.log_ratio(columns["logprobs"], columns[behind].detach()).exp())


def nemo_loss(case: Case, hp: Mapping[str, Any]) -> dict[str, Any]:
    columns, leaf = _policy_columns(case)
    clip = {"clip_low": hp["ratio_clip_min"], "clip_high": hp["ratio_clip_max"]}
    fn: Callable[[Columns], TermValue]
    if hp.get("force_on_policy_ratio", False):
        columns = columns.with_token({"old_logprobs": columns["logprobs"].detach()})
    if hp.get("disable_ppo_ratio", False):
        fn = losses.reinforce
    elif hp.get("use_cispo", False):
        assert not hp["sequence_level_importance_ratios"]
        fn = partial(losses.cispo, ratio_min=1 - clip["clip_low"], ratio_max=1 + clip["clip_high"])
    elif hp["sequence_level_importance_ratios"]:
        fn = partial(losses.gspo, **clip)
    else:
        fn = partial(losses.ppo_clip, clip_dual=hp["ratio_clip_c"], **clip)
    mode = "token-mean" if hp["token_level_loss"] else "seq-mean-token-mean"
    parts = [Term(name="pg", fn=fn, aggregate=mode, corrected="token")]
    if hp["use_importance_sampling_correction"]:
        spec = Correction(
            form={"icepop": "icepop", "tis": "truncate"}[hp["truncated_importance_sampling_type"]],
            low=hp["truncated_importance_sampling_ratio_min"],
            high=hp["truncated_importance_sampling_ratio"],
        )
        columns = columns.with_token({"is_weights": correct(columns, spec)["is_weights"]})
    if hp["reference_policy_kl_penalty"]:
        behind = "rollout_logprobs" if hp["use_on_policy_kl_approximation"] else "logprobs"
        form = hp.get("reference_policy_kl_type", "k3")
        kl_term = partial(nemo_kl, behind=behind, bound=hp["kl_output_clamp_value"], form=form)
        parts.append(Term(name="kl", fn=kl_term, coef=hp["reference_policy_kl_penalty"], aggregate=mode))
    positive = torch.from_numpy(case["in_rewards"] > 0)
    if hp["positive_example_nll_weight"]:
        columns = replace(columns, sequence={**columns.sequence, "positive": positive})
        parts.append(Term(name="nll", fn=losses.nll, coef=hp["positive_example_nll_weight"], over="positive"))
    return _total(case, columns, leaf, tuple(parts))


def openrlhf_loss(case: Case, hp: Mapping[str, Any]) -> dict[str, Any]:
    """Its TIS clamps on both sides; icepop is 0 outside; seq-mask-tis drops sequences by the geometric mean, and its
    weights have no bound. What is dropped stays in the denominators."""
    columns, leaf = _policy_columns(case)
    clip = {"clip_low": hp.get("clip_eps_low", 0.2), "clip_high": hp.get("clip_eps_high", 0.2)}
    if hp.get("enable_vllm_is_correction", True):
        (low, high), kind = hp["vllm_is_truncated_threshold"], hp["vllm_is_correction_type"]
        spec = {
            "tis": Correction(form="clamp", low=low, high=high),
            "icepop": Correction(form="icepop", low=low, high=high),
            "seq-mask-tis": Correction(form="truncate", high=1e30, reject=(f"seq_mean_k1:{low!r}:{high!r}",)),
        }[kind]
        found = correct(columns, spec)
        columns = columns.with_token({n: found[n] for n in ("is_weights", *(("keep",) if spec.reject else ()))})
    loss = hp.get("policy_loss_type", "ppo")
    fn: Callable[[Columns], TermValue] = {
        "ppo": partial(losses.ppo_clip, clip_dual=hp.get("dual_clip"), **clip),
        "gspo": partial(losses.gspo, **clip),
    }[loss]
    assert loss == "ppo" or not hp.get("enable_vllm_is_correction", True), "its ratio is then against the sampler"
    mode = "token-mean" if hp.get("token_level_loss", True) and loss == "ppo" else "seq-mean-token-mean"
    term = Term(name="pg", fn=fn, corrected="token", aggregate=mode, denominator="before_rejection")
    return _total(case, columns, leaf, (term,))


def areal_loss(case: Case, hp: Mapping[str, Any]) -> dict[str, Any]:
    """Decoupled PPO: weights of the proximal against the behaviour policy, of a token or the geometric mean of its
    sequence; the denominator keeps the dropped tokens."""
    columns, leaf = _policy_columns(case)
    rule = hp["rejection_sampling"]
    assert rule["metric"] == "ratio" and rule["agg"] == "mean"
    level = {"token": "token", "sequence": "geometric"}[rule["level"]]
    form = {"mask": "mask", "clamp": "truncate" if rule["lower"] is None else "clamp"}[rule["action"]]
    bounds = {"low": rule["lower"], "high": rule["upper"]}
    found = correct(columns, Correction(form=form, level=level, **bounds))  # type: ignore[arg-type]
    columns = columns.with_token({"is_weights": found["is_weights"], "keep": found["keep"]})
    fn = partial(
        losses.ppo_clip,
        clip_low=hp["eps_clip"],
        clip_high=hp["eps_clip_higher"] or hp["eps_clip"],
        clip_dual=hp["c_clip"],
    )
    return _total(case, columns, leaf, (Term(name="pg", fn=fn, corrected="token", denominator="before_rejection"),))


def _share(columns: Columns, hp: Mapping[str, Any]) -> float:
    """Return the case's share of the batch with the counts that verl divides by. Sizes that its aggregation does not
    use are read here without effect."""
    tokens, sequences, mode = (
        hp.get("batch_num_tokens"),
        hp.get("global_batch_size"),
        hp.get("loss_agg_mode", "token-mean"),
    )
    if mode == "token-mean" and tokens is not None:
        return float(columns.mask.sum()) / tokens
    if mode.startswith("seq-mean") and sequences is not None:
        return int((columns.counts() > 0).sum()) / sequences
    return 1.0


def value_loss(case: Case, hp: Mapping[str, Any]) -> dict[str, Any]:
    mask = case["in_response_mask"]
    columns = columns_of(mask, {"old_values": case["in_values"], "returns": case["in_returns"]})
    leaf = torch.from_numpy(np.asarray(case["in_vpreds"], np.float64).reshape(-1)).requires_grad_()
    fn = partial(losses.value_clip, clip=hp["cliprange_value"])
    horizon = hp.get("loss_scale_factor") or mask.shape[1]
    term = Term(name="vf", fn=fn, outputs=("values",), aggregate=hp["loss_agg_mode"], horizon_tokens=horizon)
    scale = _share(columns, hp) * hp.get("dp_size", 1)
    loss, grad, found = _evaluated(columns, (term,), leaf, scale, "values")
    return {
        "out_loss": np.array(loss),
        "grad_vpreds": grad.numpy().reshape(mask.shape),
        "metric:vf_clipfrac": found["vf_clipfrac"],
    }


def _rejections(stats: str | None, thresholds: Any) -> tuple[str, ...]:
    """verl's k1 bounds are on pi_rollout / pi_train: inverted they are ours."""
    if not stats:
        return ()
    out = []
    for stat, bound in zip(stats.split(","), str(thresholds).split(","), strict=True):
        bounds = [float(x) for x in bound.split("_")]
        if stat.endswith("k1") and len(bounds) == 2:
            bounds = [1 / bounds[1], 1 / bounds[0]]
        out.append(":".join([stat, *(repr(b) for b in bounds)]))
    return tuple(out)


def _correction(hp: Mapping[str, Any]) -> Correction:
    level, bound = hp.get("rollout_is"), str(hp.get("rollout_is_threshold"))
    low, high = (
        (float(x) for x in bound.split("_")) if "_" in bound else (None, None if bound == "None" else float(bound))
    )
    return Correction(
        level=level or "token",
        form=None if level is None else "icepop" if low is not None else "truncate",
        low=low,
        high=high,
        batch_normalize=hp.get("rollout_is_batch_normalize", False),
        reject=_rejections(hp.get("rollout_rs"), hp.get("rollout_rs_threshold")),
    )


def _rollout_columns(case: Case) -> Columns:
    """The two policies, from their log-ratio where only that is given."""
    if "in_log_ratio" not in case:
        return _policy_columns(case)[0]
    return columns_of(
        case["in_response_mask"], {"old_logprobs": case["in_log_ratio"], "rollout_logprobs": 0 * case["in_log_ratio"]}
    )


# rollout_is_*: at sequence level verl reports the weights before truncation, and rows without a token as ratio 1;
# its std and ESS are of weights raised to 1 / threshold first
TOKEN_METRICS = tuple(
    f"rollout_is_{n}" for n in ("mean", "max", "min", "ratio_fraction_high", "ratio_fraction_low", "oob_ratio")
)
GAP_METRICS = (
    "kl",
    "k3_kl",
    "training_ppl",
    "training_log_ppl",
    "rollout_ppl",
    "rollout_log_ppl",
    "log_ppl_diff",
    "log_ppl_abs_diff",
    "log_ppl_diff_max",
    "log_ppl_diff_min",
    "ppl_ratio",
    "chi2_token",
    "chi2_seq",
)


def _rollout_metrics(case: Case, found: Mapping[str, Any], spec: Correction) -> dict[str, Any]:
    names = [
        *GAP_METRICS,
        *(TOKEN_METRICS if spec.form and spec.level == "token" else ()),
        "rollout_rs_masked_fraction",
    ]
    names += [f"rollout_rs_{rule.stat}_masked_fraction" for rule in spec.rejections()]
    if (case["in_response_mask"].sum(1) > 0).all():
        names += [
            "rollout_rs_seq_masked_fraction",
            *(f"rollout_rs_{r.stat}_seq_masked_fraction" for r in spec.rejections()),
        ]
    theirs = case_metrics(case)
    full = {n.removeprefix("rollout_corr/"): n for n in theirs}
    return {f"metric:{full[n]}": found[f"rollout_corr/{n}"].value for n in names if n in full}


def rollout_correction(case: Case, hp: Mapping[str, Any]) -> dict[str, Any]:
    """Weights on the mask before rejection; ours are also 0 on the rejected tokens, which are in no loss."""
    columns, spec = _rollout_columns(case), _correction(hp)
    found = correct(columns, spec)
    shape = case["in_response_mask"].shape
    out = _rollout_metrics(case, found, spec)
    if "out_response_mask" in case:
        out["out_response_mask"] = found["keep"].double().numpy().reshape(shape)
    if "out_rollout_is_weights" in case:
        plain = correct(columns, replace(spec, reject=()))["is_weights"].numpy().reshape(shape)
        kept = found["keep"].numpy().reshape(shape)
        np.testing.assert_array_equal(found["is_weights"].numpy().reshape(shape), np.where(kept, plain, 0.0))
        out["out_rollout_is_weights"] = plain
    return out


def offpolicy_metrics(case: Case, hp: Mapping[str, Any]) -> dict[str, Any]:
    columns, spec = _rollout_columns(case), Correction()
    return _rollout_metrics(case, correct(columns, spec), spec)


def bypass(case: Case, hp: Mapping[str, Any]) -> dict[str, Any]:
    """old := rollout. Weights and rejections are of the current policy, so they are made from its log-probs here."""
    columns, leaf = _policy_columns(case)
    settings = hp["policy_loss"]["rollout_correction"]
    spec = replace(_correction(settings), bypass=True)
    found = correct(columns.with_token({"old_logprobs": leaf.detach()}), spec)
    columns = columns.with_token({"old_logprobs": columns["rollout_logprobs"], "keep": found["keep"]})
    reinforce = settings["loss_type"] == "reinforce"
    fn: Callable[[Columns], TermValue] = partial(losses.bypass_reinforce, correction=spec)
    fn = fn if reinforce else LOSSES["vanilla"](hp)
    term = Term(name="pg", fn=fn, aggregate=hp["loss_agg_mode"], sees_rejected=reinforce)
    out = _total(case, columns, leaf, (term,))
    return {**out, **_rollout_metrics(case, found, spec)}


def agg_loss(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    mask = case["in_mask"]
    horizon = hp.get("loss_scale_factor") or mask.shape[1]
    leaf = torch.from_numpy(np.asarray(case["in_loss_mat"], np.float64).reshape(-1)).requires_grad_()
    columns = columns_of(mask, {})
    fn = lambda c: TermValue(c["logprobs"])  # noqa: E731
    term = Term(name="x", fn=fn, aggregate=hp["loss_agg_mode"], horizon_tokens=horizon)
    loss, grad, _ = _evaluated(columns, (term,), leaf, _share(columns, hp) * hp.get("dp_size", 1))
    out = {"out_loss": np.array(loss)}
    if "grad_loss_mat" in case:
        out["grad_loss_mat"] = grad.numpy().reshape(mask.shape)
    return out


def all_masked(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    losses = [float(agg_loss(case, {"loss_agg_mode": mode})["out_loss"]) for mode in hp["modes"]]
    return {"out_loss": np.array(losses)}


KL_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def kl(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    out = {}
    for form in hp["types"]:
        leaf = torch.from_numpy(np.asarray(case["in_log_prob"], np.float64)).requires_grad_()
        base, plus = form.removesuffix("+"), "+" if form.endswith("+") else ""
        ref = torch.from_numpy(np.asarray(case["in_ref_log_prob"], np.float64))
        value = losses.kl_estimate(leaf, ref, KL_ALIASES.get(base, base) + plus)
        if KL_ALIASES.get(base, base) == "k3":  # verl clamps the value; the straight-through gradient stays
            value = value + (value.clamp(-10, 10) - value).detach() if plus else value.clamp(-10, 10)
        (grad,) = torch.autograd.grad(value.sum(), leaf)
        key = form.replace("+", "p")
        out[f"out_kl_{key}"], out[f"grad_{key}"] = value.detach().numpy(), grad.numpy()
    return out


def kl_in_reward(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    coef, out = hp["kl_coef"], {}
    for step in range(hp["steps"]):
        mask = case[f"in_s{step}_response_mask"]
        token = {"old_logprobs": case[f"in_s{step}_old_log_prob"], "ref_logprobs": case[f"in_s{step}_ref_log_prob"]}
        columns = columns_of(mask, token)
        penalty, mean = losses.kl_penalty(columns, coef=coef, form=KL_ALIASES[hp["kl_penalty"]])
        mean *= int((columns.counts() > 0).sum()) / columns.num_sequences  # verl counts empty answers as 0
        scores = np.asarray(case[f"in_s{step}_token_level_scores"], np.float64)
        penalty = torch.where(columns.mask, penalty, 0.0).numpy().reshape(mask.shape)
        out[f"out_s{step}_token_level_rewards"] = scores - penalty
        if hp["adaptive"]:
            coef = losses.adapted_coef(
                coef,
                kl=mean,
                target=hp["adaptive"]["target_kl"],
                horizon=hp["adaptive"]["horizon"],
                num_sequences=len(mask),
            )
    return out


def masked_whiten(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    mask = case["in_mask"] > 0
    values = torch.from_numpy(np.asarray(case["in_values"], np.float64))
    got = adv.whiten(values, torch.from_numpy(mask), shift_mean=hp["shift_mean"])
    return {"out_whitened": np.where(mask, got.numpy(), case["out_whitened"])}


def entropy(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Through the chunked head: hidden = logits, weight = identity."""
    z = torch.from_numpy(np.asarray(case["in_logits"], np.float64))
    b, t, v = z.shape
    leaf = z.reshape(-1, v).requires_grad_()
    target = torch.from_numpy(np.asarray(case["in_labels"], np.int64).reshape(-1))
    lp, h, pi2, _ = linear_logprob(
        leaf,
        torch.eye(v, dtype=torch.float64),
        target,
        torch.ones(b * t, dtype=torch.float64),
        entropy=True,
        sum_pi_squared=True,
    )
    columns = columns_of(case["in_mask"], {})
    loss = (weights.weight_column(columns, hp["loss_agg_mode"]) * torch.where(columns.mask, h, 0.0)).sum()
    (grad,) = torch.autograd.grad(loss, leaf)
    return {
        "out_entropy": h.detach().numpy().reshape(b, t),
        "out_entropy_agg": np.array(float(loss.detach())),
        "grad_logits": grad.numpy().reshape(b, t, v),
        "out_sum_pi_squared": pi2.numpy().reshape(b, t),
        "out_log_prob": lp.detach().numpy().reshape(b, t),
    }


def sft(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    mask, lp = (case["in_mask"], case["in_log_prob"]) if "in_mask" in case else (None, case["in_log_prob"])
    if (
        mask is None
    ):  # packed: log_prob[t] predicts token t+1 and has its mask; the last position of a sequence predicts nothing
        mask = np.zeros(len(lp))
        at = 0
        for length in hp["lengths"]:
            mask[at : at + length - 1] = case["in_loss_mask"][at + 1 : at + length]
            at += length
        mask, lp = mask[None], lp[None]
    leaf = torch.from_numpy(np.asarray(lp, np.float64).reshape(-1)).requires_grad_()
    columns = columns_of(mask, {})
    loss, grad, _ = _evaluated(columns, SFT_TERMS, leaf, _share(columns, hp) * hp["dp_size"])
    return {"out_loss": np.array(loss), "grad_log_prob": grad.numpy().reshape(case["in_log_prob"].shape)}


def dynamic_sampling(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    groups: dict[str, list[int]] = {}
    for i, uid in enumerate(case["in_uid"]):
        groups.setdefault(str(uid), []).append(i)
    kept = [
        i
        for rows in groups.values()
        if reject_flat([float(case["in_metric"][r]) for r in rows]) == "keep"
        for i in rows
    ]
    return {"out_kept_indices": np.array(sorted(kept))}


def overlong(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """verl: not capped. The penalty is added to the score at the last token; `out_reward_index` is its place."""
    lengths = case["in_response_lengths"]
    penalty = shaping.overlong_penalty(
        lengths.astype(np.float64),
        max_response_tokens=hp["max_resp_len"],
        buffer_tokens=hp["overlong_buffer_len"],
        penalty=hp["penalty_factor"],
        cap=False,
    )
    mask = np.arange(lengths.max()) < lengths[:, None]
    score = case["in_scores"].astype(np.float64) + penalty
    sequence = {**_no_groups(len(lengths)), "score": torch.from_numpy(score)}
    rewards = adv.token_rewards(columns_of(mask, {}, sequence)).numpy().reshape(mask.shape)
    return {
        "out_overlong_reward": penalty,
        "out_rewards": rewards.sum(1),
        "out_reward_index": np.abs(rewards).argmax(1),
    }


def overlong_capped(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    penalty = shaping.overlong_penalty(
        case["in_response_lengths"].astype(np.float64),
        max_response_tokens=hp["max_new_tokens"],
        buffer_tokens=hp["overlong_buffer_len"],
        penalty=hp["overlong_penalty_factor"],
    )
    return {"out_rewards": case["in_scores"] + penalty}


def nemo_stop_properly(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """NeMo scales negative scores too, which raises them."""
    scores, coef = case["in_rewards"].astype(np.float64), hp["stop_properly_penalty_coef"]
    got = shaping.stop_properly(scores, case["in_truncated"].astype(bool), coef=coef, positive_only=False)
    return {"out_rewards": got}


CORE = "verl.trainer.ppo.core_algos."
CORR = "verl.trainer.ppo.rollout_corr_helper."
ADAPTERS: Mapping[str, Adapter] = {
    CORE + "compute_grpo_outcome_advantage": grpo,
    CORE + "compute_grpo_vectorized_outcome_advantage": grpo,
    CORE + "compute_rloo_outcome_advantage": rloo,
    CORE + "compute_rloo_vectorized_outcome_advantage": rloo_vectorized,
    CORE + "compute_reinforce_plus_plus_outcome_advantage": rfpp,
    CORE + "compute_reinforce_plus_plus_baseline_outcome_advantage": rfpp_baseline,
    CORE + "compute_gae_advantage_return": gae,
    "GAE with garbage values at mask==0": spec_gae,
    "nemo_rl.algorithms.advantage_estimator.GeneralizedAdvantageEstimator.compute_advantage": nemo_gae,
    CORE + "compute_remax_outcome_advantage": remax,
    CORE + "compute_opo_outcome_advantage": opo,
    CORE + "compute_gpg_outcome_advantage": gpg,
    "GPG advantage (paper)": gpg_paper,
    CORE + "compute_grpo_passk_outcome_advantage": pass_at_k,
    CORE + "compute_gdpo_outcome_advantage": gdpo,
    CORE + "compute_optimal_token_baseline_advantage": otb,
    CORE + "compute_multi_turn_optimal_token_baseline_advantage": otb,
    CORE + "compute_pf_ppo_reweight_data": pf_ppo,
    "nemo_rl.algorithms.advantage_estimator.GRPOAdvantageEstimator.compute_advantage": nemo_grpo_loo,
    "trl.trainer.rloo_trainer.RLOOTrainer._generate_and_score_completions (advantage section)": trl_rloo,
    "trl.trainer.grpo_trainer.GRPOTrainer._generate_and_score_completions (advantage section)": trl_grpo_advantage,
    **{f'verl.trainer.ppo.core_algos policy loss "{name}"': policy_loss for name in LOSSES},
    'verl.trainer.ppo.core_algos policy loss "bypass_mode"': bypass,
    "trl.trainer.grpo_trainer.GRPOTrainer._compute_loss": trl_loss,
    "nemo_rl.algorithms.loss.loss_functions.ClippedPGLossFn.__call__": nemo_loss,
    "openrlhf.models.loss.PolicyLoss.forward": openrlhf_loss,
    "areal.utils.functional.functional.ppo_actor_loss_fn": areal_loss,
    CORE + "compute_value_loss": value_loss,
    CORR + "compute_rollout_correction_weights": rollout_correction,
    CORR + "compute_rollout_rejection_mask": rollout_correction,
    CORR + "compute_rollout_correction_and_rejection_mask": rollout_correction,
    CORR + "compute_offpolicy_metrics": offpolicy_metrics,
    "verl.workers.reward_manager.dapo.DAPORewardManager.__call__": overlong,
    "openrlhf.trainer.ppo_utils.length_penalty.apply_overlong_penalty": overlong_capped,
    "nemo_rl.algorithms.reward_functions.apply_reward_shaping": nemo_stop_properly,
    CORE + "agg_loss": agg_loss,
    "agg_loss with NaN outside the mask": agg_loss,
    "aggregation of an entirely masked batch": all_masked,
    CORE + "kl_penalty": kl,
    "verl.trainer.ppo.ray_trainer.apply_kl_penalty + core_algos.{Fixed,Adaptive}KLController": kl_in_reward,
    "verl.utils.torch_functional.masked_whiten": masked_whiten,
    "verl core_algos.compute_entropy_loss / torch_functional.{entropy_from_logits,calculate_sum_pi_squared_from_logits,logprobs_from_logits_naive}": entropy,
    "verl.workers.utils.losses.sft_loss": sft,
    "verl.workers.utils.losses.sft_loss (packed)": sft,
    "verl-recipe dapo/dapo_ray_trainer.py RayDAPOTrainer.fit (filter section)": dynamic_sampling,
    "dynamic sampling with floating point rewards": dynamic_sampling,
}


def golden_of(
    function: str,
    arrays: Mapping[str, Any],
    expected: Mapping[str, np.ndarray],
    options: Mapping[str, Any] | None = None,
) -> None:
    """Compare what the adapter of a peer's function makes of a handmade case with the expected arrays."""
    read, given = Read({**arrays, **expected}), Read(options or {})
    found = ADAPTERS[function](read, given)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-9, err_msg=name)
    assert not read.unread() and not given.ignored()
