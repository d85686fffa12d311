"""From a golden case (padded [B, T] arrays of a peer's function) to ours (packed columns), by the manifest's function name.

Each adapter runs the product on the case's inputs and returns {output name: array} to compare. A case whose function is
not here is skipped by name in the report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms import advantages as adv
from verl.algorithms import kl_reward, selection, terms, weights
from verl.algorithms.table import reject_flat
from verl.batch import Columns
from verl.nn.linear_logprob import linear_logprob

Case = Mapping[str, Any]
Adapter = Callable[[Case, Mapping[str, Any]], dict[str, np.ndarray]]


def columns_of(mask: np.ndarray, token: Mapping[str, np.ndarray], sequence: Mapping[str, Tensor] | None = None) -> Columns:
    """All B*T positions become tokens of B sequences; `mask` decides. Garbage outside must not matter."""
    b, t = mask.shape
    return Columns(
        token={n: torch.from_numpy(np.asarray(x, np.float64).reshape(-1)) for n, x in token.items()},
        sequence=dict(sequence or {}), sequence_of=torch.arange(b).repeat_interleave(t), num_sequences=b,
        mask=torch.from_numpy(mask.reshape(-1) > 0),
    )  # fmt: skip


def labels(index: np.ndarray) -> Tensor:
    names: dict[str, int] = {}
    return torch.tensor([names.setdefault(str(i), len(names)) for i in index])


def _rewarded(case: Case) -> Columns:
    mask = case["in_response_mask"]
    rewards = np.asarray(case["in_token_level_rewards"], np.float64)
    index = case["in_index"] if "in_index" in case else np.arange(len(mask))
    sequence = {"score": torch.from_numpy(rewards.sum(1)), "group": labels(index), "valid": torch.ones(len(mask), dtype=torch.bool)}
    columns = columns_of(mask, {}, sequence)
    if ((rewards != 0) & (mask > 0)).sum() == (rewards != 0).sum():
        return columns.with_token({"rewards": torch.from_numpy(rewards.reshape(-1))})
    return columns.with_token({"rewards": adv.token_rewards(columns)})


def _advantage(fn: Callable[[Columns], Mapping[str, Tensor]], returns: bool = False) -> Callable[[Case], dict[str, np.ndarray]]:
    def run(case: Case) -> dict[str, np.ndarray]:
        got = fn(_rewarded(case))
        shape = case["in_response_mask"].shape
        out = {"out_advantages": got["advantages"].numpy().reshape(shape)}
        if returns:
            out["out_returns"] = got["returns"].numpy().reshape(shape)
        return out

    return run


def grpo(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    by_std = hp.get("norm_adv_by_std_in_grpo", True)
    return _advantage(lambda c: adv.grpo(c, normalize_by_std=by_std, eps=hp.get("epsilon", 1e-6), singleton="raw"))(case)


def rloo(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return _advantage(lambda c: adv.rloo(c, singleton="raw"))(case)


def rloo_vectorized(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return _advantage(adv.rloo)(case)


def rfpp(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return _advantage(lambda c: adv.reinforce_plus_plus(c, gamma=hp.get("gamma", 1.0)), returns=True)(case)


def rfpp_baseline(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return _advantage(lambda c: adv.reinforce_plus_plus_baseline(c, singleton="raw"))(case)


def gae(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """verl leaves garbage outside the mask; ours is 0 there and compared only where the case has numbers of its own."""
    mask = case["in_response_mask"]
    columns = columns_of(mask, {"rewards": case["in_token_level_rewards"], "old_values": case["in_values"]}, _no_groups(len(mask)))
    return _inside(case, adv.gae(columns, gamma=hp["gamma"], lam=hp["lam"]), mask)


def spec_gae(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    mask = case["in_response_mask"]
    columns = columns_of(mask, {"rewards": case["in_token_level_rewards"], "old_values": case["in_values"]}, _no_groups(len(mask)))
    got = adv.gae(columns, gamma=hp["gamma"], lam=hp["lam"])
    return {f"out_{n}": x.numpy().reshape(mask.shape) for n, x in got.items()}


def nemo_gae(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    mask = case["in_response_mask"]
    sequence = {**_no_groups(len(mask)), "score": torch.from_numpy(np.asarray(case["in_rewards"], np.float64))}
    columns = columns_of(mask, {"old_values": case["in_values"]}, sequence)
    columns = columns.with_token({"rewards": adv.token_rewards(columns)})
    got = adv.gae(
        columns, gamma=hp["gamma"], lam=hp["lam_policy"] or 1.0, lam_critic=hp["lam_value"], whitened=hp["whiten"],
        length_adaptive_alpha=hp["length_adaptive_alpha"] or None,
    )  # fmt: skip
    return _inside(case, got, mask)


def _no_groups(n: int) -> dict[str, Tensor]:
    return {"group": torch.arange(n), "valid": torch.ones(n, dtype=torch.bool)}


def _inside(case: Case, got: Mapping[str, Tensor], mask: np.ndarray) -> dict[str, np.ndarray]:
    for x in got.values():
        assert not x.numpy().reshape(mask.shape)[mask == 0].any(), "exactly 0 outside the mask"
    return {f"out_{n}": np.where(mask > 0, x.numpy().reshape(mask.shape), case[f"out_{n}"]) for n, x in got.items()}


def remax(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    baseline = torch.from_numpy(np.asarray(case["in_reward_baselines"], np.float64))
    return _advantage(lambda c: adv.remax(replace(c, sequence={**c.sequence, "baseline": baseline})), returns=True)(case)


def opo(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return _advantage(lambda c: adv.opo(c, singleton="raw"))(case)


def gpg(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return _advantage(lambda c: adv.gpg(c, f_norm=hp["f_norm"], alpha="verl"))(case)


def gpg_paper(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return _advantage(lambda c: adv.gpg(c, f_norm=hp["f_norm"]))(case)


def pass_at_k(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    by_std = hp["norm_adv_by_std_in_grpo"]
    return _advantage(lambda c: adv.pass_at_k(c, normalize_by_std=by_std, eps=hp["epsilon"]))(case)


def gdpo(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    mask = case["in_response_mask"]
    components = torch.from_numpy(np.asarray(case["in_component_rewards"], np.float64))
    sequence = {**_no_groups(len(mask)), "group": labels(case["in_index"]), "components": components}
    got = adv.gdpo(
        columns_of(mask, {}, sequence), weights=hp["weights"], whiten_over="token", eps=hp["epsilon"],
        normalize_by_std=hp["norm_adv_by_std_in_grpo"],
    )  # fmt: skip
    return {"out_advantages": got["advantages"].numpy().reshape(mask.shape)}


def otb(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Both of verl's variants: with a mask without holes they are one, and with holes ours is the TIR variant."""
    token = {
        "old_logprobs": torch.from_numpy(np.asarray(case["in_old_log_probs"], np.float64).reshape(-1)),
        "sum_pi_squared": torch.from_numpy(np.asarray(case["in_sum_pi_squared"], np.float64).reshape(-1)),
    }
    assert hp["handle_zero_tail"]
    return _advantage(lambda c: adv.otb(c.with_token(token), singleton="raw", eps=hp["epsilon"]), returns=True)(case)


def nemo_grpo_loo(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    assert hp["use_leave_one_out_baseline"]
    columns = _outcomes(case["in_rewards"], labels(case["in_index"]))
    got = adv.grpo(columns, leave_one_out=True, normalize_by_std=hp["normalize_rewards"], eps=hp["epsilon"])
    return {"out_advantages": got["advantages"].numpy()}


def trl_rloo(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    assert not hp["normalize_advantages"] and hp["reward_clip_range"] is None
    mask = case["in_response_mask"]
    score = torch.from_numpy(np.asarray(case["in_rewards"], np.float64))
    sequence = {**_no_groups(len(mask)), "group": torch.arange(len(mask)) // hp["num_generations"], "score": score}
    columns = columns_of(mask, {"old_logprobs": case["in_old_log_prob"], "ref_logprobs": case["in_ref_log_prob"]}, sequence)
    penalty, _ = kl_reward.kl_penalty(columns, coef=hp["beta"], form="k1")
    columns = columns.with_token({"rewards": adv.token_rewards(columns, penalty)})
    return {"out_advantages": columns.mean(adv.rloo(columns)["advantages"]).numpy()}


def pf_ppo(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    scores = torch.from_numpy(np.asarray(case["in_scores"], np.float64))
    weight = selection.batch_weights(scores, how=hp["reweight_method"], power=hp["weight_pow"])
    return {"out_weights": weight.numpy(), "out_probabilities": (weight / weight.sum()).numpy()}


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
    return {"out_advantages": adv.grpo(columns, eps=hp["eps"], scale=hp["scale_rewards"])["advantages"].numpy()}


def _loss(columns: Columns, fn: Callable[[Columns], terms.TermValue], weight: Tensor, leaf: Tensor) -> tuple[float, Tensor]:
    value = fn(columns.cleaned())
    loss = (weight * torch.where(columns.mask, value.values, 0.0)).sum()
    (grad,) = torch.autograd.grad(loss, leaf)
    return float(loss.detach()), grad


def _policy_columns(case: Case) -> tuple[Columns, Tensor]:
    mask = case["in_response_mask"]
    if "in_sample_mask" in case:
        mask = mask * case["in_sample_mask"][:, None]
    a = case["in_advantages"]
    a = np.broadcast_to(a[:, None], mask.shape) if a.ndim == 1 else a
    token = {"old_logprobs": case["in_old_log_prob"], "advantages": a}
    for ours, theirs in (("ref_logprobs", "in_ref_log_prob"), ("is_weights", "in_rollout_is_weights")):
        if theirs in case:
            token[ours] = case[theirs]
    columns = columns_of(mask, token)
    leaf = torch.from_numpy(np.asarray(case["in_log_prob"], np.float64).reshape(-1)).requires_grad_()
    return columns.with_token({"logprobs": leaf}), leaf


def vanilla(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    columns, leaf = _policy_columns(case)
    info = hp.get("global_batch_info", {})
    term = terms.Term(
        name="pg", aggregate=hp["loss_agg_mode"], horizon_tokens=info.get("loss_scale_factor"), corrected=True,
        fn=lambda c: terms.ppo_clip(c, clip_low=hp["clip_ratio_low"], clip_high=hp["clip_ratio_high"], clip_dual=hp["clip_ratio_c"]),
    )  # fmt: skip
    weight = weights.term_weights(columns, (term,))["w/pg"]
    if "batch_num_tokens" in info:
        weight = weights.weight_column(columns, hp["loss_agg_mode"], num_tokens=info["batch_num_tokens"])
    loss, grad = _loss(columns, term.fn, weight * info.get("dp_size", 1), leaf)
    return {"out_loss": np.array(loss), "grad_log_prob": grad.numpy().reshape(case["in_log_prob"].shape)}


def trl_loss(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray] | None:
    mode = {"grpo": "seq-mean-token-mean", "dapo": "token-mean", "dr_grpo": "seq-mean-token-sum-norm"}.get(hp["loss_type"])
    if mode is None or hp["delta"] is not None or hp["off_policy_mask_threshold"] is not None:
        return None
    columns, leaf = _policy_columns(case)
    beta = hp["beta"]

    def fn(c: Columns) -> terms.TermValue:
        value = terms.ppo_clip(c, clip_low=hp["epsilon_low"], clip_high=hp["epsilon_high"]).values
        if beta:
            value = value + beta * terms.kl_loss(c, form="k3").values
        return terms.TermValue(value)

    weight = weights.weight_column(columns, mode, horizon_tokens=hp["max_completion_length"])
    loss, grad = _loss(columns, fn, weight, leaf)
    return {"out_loss": np.array(loss), "grad_log_prob": grad.numpy().reshape(case["in_log_prob"].shape)}


def agg_loss(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    mask = case["in_mask"]
    horizon = hp.get("loss_scale_factor") or mask.shape[1]
    leaf = torch.from_numpy(np.asarray(case["in_loss_mat"], np.float64).reshape(-1)).requires_grad_()
    columns = columns_of(mask, {}).with_token({"logprobs": leaf})
    weight = weights.weight_column(
        columns, hp["loss_agg_mode"], horizon_tokens=horizon,
        num_tokens=hp.get("batch_num_tokens"), num_sequences=hp.get("global_batch_size"),
    )  # fmt: skip
    loss, grad = _loss(columns, lambda c: terms.TermValue(c["logprobs"]), weight * hp.get("dp_size", 1), leaf)
    out = {"out_loss": np.array(loss)}
    if "grad_loss_mat" in case:
        out["grad_loss_mat"] = grad.numpy().reshape(mask.shape)
    return out


def all_masked(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    losses = [float(agg_loss(case, {"loss_agg_mode": mode})["out_loss"]) for mode in hp["modes"]]
    return {"out_loss": np.array(losses)}


def kl(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    out = {}
    for form in hp["types"]:
        leaf = torch.from_numpy(np.asarray(case["in_log_prob"], np.float64)).requires_grad_()
        value = terms.kl_estimate(leaf, torch.from_numpy(np.asarray(case["in_ref_log_prob"], np.float64)), form, value_bound=10.0)
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
        penalty, mean = kl_reward.kl_penalty(columns, coef=coef, form=hp["kl_penalty"], count_empty=True)
        scores = np.asarray(case[f"in_s{step}_token_level_scores"], np.float64)
        penalty = torch.where(columns.mask, penalty, 0.0).numpy().reshape(mask.shape)
        out[f"out_s{step}_token_level_rewards"] = scores - penalty
        if hp["adaptive"]:
            coef = kl_reward.adapted_coef(
                coef, kl=mean, target=hp["adaptive"]["target_kl"], horizon=hp["adaptive"]["horizon"], num_sequences=len(mask)
            )
    return out


def masked_whiten(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    mask = case["in_mask"] > 0
    got = adv.whiten(torch.from_numpy(np.asarray(case["in_values"], np.float64)), torch.from_numpy(mask), shift_mean=hp["shift_mean"])
    return {"out_whitened": np.where(mask, got.numpy(), case["out_whitened"])}


def entropy(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Through the chunked head: hidden = logits, weight = identity."""
    z = torch.from_numpy(np.asarray(case["in_logits"], np.float64))
    b, t, v = z.shape
    leaf = z.reshape(-1, v).requires_grad_()
    target = torch.from_numpy(np.asarray(case["in_labels"], np.int64).reshape(-1))
    lp, h, pi2 = linear_logprob(leaf, torch.eye(v, dtype=torch.float64), target, torch.ones(b * t, dtype=torch.float64), entropy=True, sum_pi_squared=True)
    columns = columns_of(case["in_mask"], {})
    loss = (weights.weight_column(columns, hp["loss_agg_mode"]) * torch.where(columns.mask, h, 0.0)).sum()
    (grad,) = torch.autograd.grad(loss, leaf)
    return {
        "out_entropy": h.detach().numpy().reshape(b, t), "out_entropy_agg": np.array(float(loss.detach())),
        "grad_logits": grad.numpy().reshape(b, t, v), "out_sum_pi_squared": pi2.numpy().reshape(b, t),
        "out_log_prob": lp.detach().numpy().reshape(b, t),
    }  # fmt: skip


def sft(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    mask, lp = (case["in_mask"], case["in_log_prob"]) if "in_mask" in case else (None, case["in_log_prob"])
    if mask is None:  # packed: log_prob[t] predicts token t+1, whose mask counts; the last position of a sequence predicts nothing
        mask = np.zeros(len(lp))
        at = 0
        for length in hp["lengths"]:
            mask[at : at + length - 1] = case["in_loss_mask"][at + 1 : at + length]
            at += length
        mask, lp = mask[None], lp[None]
    leaf = torch.from_numpy(np.asarray(lp, np.float64).reshape(-1)).requires_grad_()
    columns = columns_of(mask, {}).with_token({"logprobs": leaf})
    weight = weights.weight_column(columns, "token-mean", num_tokens=hp["batch_num_tokens"]) * hp["dp_size"]
    loss, grad = _loss(columns, terms.nll, weight, leaf)
    return {"out_loss": np.array(loss), "grad_log_prob": grad.numpy().reshape(case["in_log_prob"].shape)}


def dynamic_sampling(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    groups: dict[str, list[int]] = {}
    for i, uid in enumerate(case["in_uid"]):
        groups.setdefault(str(uid), []).append(i)
    kept = [i for rows in groups.values() if reject_flat([float(case["in_metric"][r]) for r in rows]) == "keep" for i in rows]
    return {"out_kept_indices": np.array(sorted(kept))}


CORE = "verl.trainer.ppo.core_algos."
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
    'verl.trainer.ppo.core_algos policy loss "vanilla"': vanilla,
    "trl.trainer.grpo_trainer.GRPOTrainer._compute_loss": trl_loss,  # type: ignore[dict-item]
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
