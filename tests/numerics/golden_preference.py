"""The preference and reward-model cases of the golden set, by the manifest's function names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms import preference as pref
from verl.algorithms.preference import Pairs

Case = Mapping[str, Any]


def leaf(x: Any) -> Tensor:
    return torch.from_numpy(np.asarray(x, np.float64)).clone().requires_grad_()


def fixed(x: Any) -> Tensor:
    return torch.from_numpy(np.asarray(x, np.float64))


def _token_logprobs(logits: Tensor, ids: np.ndarray) -> Tensor:
    """[B, T-1]: of each token after the first."""
    lp = torch.log_softmax(logits[:, :-1], -1)
    return lp.gather(-1, fixed(ids).long()[:, 1:, None])[..., 0]


def _trl_pairs(case: Case, logits: Tensor, ld_alpha: float | None) -> Pairs:
    mask = fixed(case["in_completion_mask"])[:, 1:] > 0
    lp, ref = (
        _token_logprobs(logits, case["in_input_ids"]),
        _token_logprobs(fixed(case["in_ref_logits"]), case["in_input_ids"]),
    )
    n = len(mask) // 2
    counts = mask.sum(1).double()

    def total(x: Tensor) -> Tensor:
        if ld_alpha is None:
            return torch.where(mask, x, 0.0).sum(1)
        shared = torch.minimum(counts[:n], counts[n:]).repeat(2)
        front = torch.cumsum(mask.double(), 1) <= shared[:, None]
        return torch.where(mask, torch.where(front, x, ld_alpha * x), 0.0).sum(1)

    policy, reference = total(lp), total(ref)
    return Pairs(
        chosen=policy[:n],
        rejected=policy[n:],
        ref_chosen=reference[:n],
        ref_rejected=reference[n:],
        chosen_tokens=counts[:n],
        rejected_tokens=counts[n:],
    )


def trl_dpo(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    logits = leaf(case["in_logits"])
    pairs = _trl_pairs(case, logits, hp["ld_alpha"])
    beta, smoothing = hp["beta"], hp["label_smoothing"]
    forms = {
        "sigmoid": lambda: pref.dpo(pairs, beta=beta, label_smoothing=smoothing),
        "sigmoid_norm": lambda: pref.dpo(pairs, beta=beta, average=True),
        "ipo": lambda: pref.ipo(pairs, beta=beta),
        "hinge": lambda: pref.hinge(pairs, beta=beta),
        "robust": lambda: pref.robust(pairs, beta=beta, label_smoothing=smoothing),
        "apo_zero": lambda: pref.apo_zero(pairs, beta=beta),
        "sft": lambda: pref.rpo(pairs, beta=beta, alpha=1.0, normalization="token") - pref.dpo(pairs, beta=beta),
    }
    loss = sum(w * forms[t]().mean() for t, w in zip(hp["loss_types"], hp["loss_weights"], strict=True))
    assert isinstance(loss, Tensor)
    (grad,) = torch.autograd.grad(loss, logits)
    return {"out_loss": loss.detach().numpy(), "grad_logits": grad.numpy()}


def _sums(case: Case, gap: bool = False, keep: np.ndarray | None = None) -> tuple[Pairs, Tensor, Tensor]:
    """Rows alternate chosen, rejected."""
    lp, mask = leaf(case["in_log_prob"]), fixed(case["in_mask"]) > 0
    total = lambda x: torch.where(mask, x, 0.0).sum(1)  # noqa: E731
    p, q, n = total(lp), total(fixed(case["in_ref_log_prob"])), mask.sum(1).double()
    w, l = (slice(0, None, 2), slice(1, None, 2)) if gap is False else _halves(len(p))  # noqa: E741
    r = fixed(case["in_gt_rewards"]) if gap else None
    return (
        Pairs(
            chosen=p[w],
            rejected=p[l],
            ref_chosen=q[w],
            ref_rejected=q[l],
            chosen_tokens=n[w],
            rejected_tokens=n[l],
            gap=None if r is None else r[w] - r[l],
        ),
        lp,
        mask,
    )


def _halves(rows: int) -> tuple[slice, slice]:
    return slice(0, rows // 2), slice(rows // 2, rows)


def aligner(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    pairs, lp, _ = _sums(case, gap=True)
    loss = pref.rpo_gap(
        pairs, beta=hp["beta"], eta=hp["gt_reward_scale"], distance=hp["preference_loss"].removeprefix("rpo_")
    ).mean()
    (grad,) = torch.autograd.grad(loss, lp)
    return {"out_loss": loss.detach().numpy(), "grad_log_prob": grad.numpy()}


def nemo_dpo(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    pairs, lp, _ = _sums(case)
    beta = hp["reference_policy_kl_penalty"]
    losses = hp["preference_loss_weight"] * pref.dpo(pairs, beta=beta)
    losses = losses + hp["sft_loss_weight"] * (-pairs.chosen / pairs.chosen_tokens)
    keep = fixed(case["in_sample_mask"])[::2]
    loss = (losses * keep).sum() / keep.sum()
    (grad,) = torch.autograd.grad(loss, lp)
    return {"out_loss": loss.detach().numpy(), "grad_log_prob": grad.numpy()}


def openrlhf_dpo(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    w, l = leaf(case["in_chosen_logps"]), leaf(case["in_rejected_logps"])  # noqa: E741
    one = torch.ones_like(w)
    pairs = Pairs(
        chosen=w,
        rejected=l,
        ref_chosen=fixed(case["in_ref_chosen_logps"]),
        ref_rejected=fixed(case["in_ref_rejected_logps"]),
        chosen_tokens=one,
        rejected_tokens=one,
    )
    form = (
        pref.ipo(pairs, beta=hp["beta"], average=False)
        if hp["ipo"]
        else pref.dpo(pairs, beta=hp["beta"], label_smoothing=hp["label_smoothing"])
    )
    loss = form.mean()
    gw, gl = torch.autograd.grad(loss, (w, l))
    chosen, rejected = (hp["beta"] * x.detach().numpy() for x in pairs.log_ratios)
    return {
        "out_loss": loss.detach().numpy(),
        "grad_chosen_logps": gw.numpy(),
        "grad_rejected_logps": gl.numpy(),
        "out_chosen_rewards": chosen,
        "out_rejected_rewards": rejected,
    }


def orpo(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    w, l = leaf(case["in_chosen_avg_logps"]), leaf(case["in_rejected_avg_logps"])  # noqa: E741
    loss = pref.odds_ratio(w, l, beta=hp["beta"]).mean()
    gw, gl = torch.autograd.grad(loss, (w, l))
    return {"out_or_loss": loss.detach().numpy(), "grad_chosen": gw.numpy(), "grad_rejected": gl.numpy()}


def cpo(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    w, l = leaf(case["in_chosen_logps"]), leaf(case["in_rejected_logps"])  # noqa: E741
    zero, one = torch.zeros_like(w), torch.ones_like(w)
    pairs = Pairs(chosen=w, rejected=l, ref_chosen=zero, ref_rejected=zero, chosen_tokens=one, rejected_tokens=one)
    losses = (
        pref.simpo(pairs, beta=hp["beta"], gamma=hp["simpo_gamma"])
        if hp["loss_type"] == "simpo"
        else pref.cpo(pairs, beta=hp["beta"], alpha=hp["alpha"])
    )
    gw, gl = torch.autograd.grad(losses.mean(), (w, l))
    return {
        "out_loss": losses.mean().detach().numpy(),
        "out_losses": losses.detach().numpy(),
        "grad_chosen": gw.numpy(),
        "grad_rejected": gl.numpy(),
    }


def kto(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    logits = leaf(case["in_logits"])
    mask = fixed(case["in_completion_mask"])[:, 1:] > 0
    policy = torch.where(mask, _token_logprobs(logits, case["in_input_ids"]), 0.0).sum(1)
    losses = pref.kto(
        policy - fixed(case["in_ref_logps"]),
        torch.from_numpy(np.asarray(case["in_label"]).astype(bool)),
        fixed(case["in_kl_logps"]) - fixed(case["in_ref_kl_logps"]),
        beta=hp["beta"],
        desirable_weight=hp["desirable_weight"],
        undesirable_weight=hp["undesirable_weight"],
    )
    (grad,) = torch.autograd.grad(losses.mean(), logits)
    return {"out_loss": losses.mean().detach().numpy(), "grad_logits": grad.numpy()}


def reward_model(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    w, l = leaf(case["in_chosen_reward"]), leaf(case["in_rejected_reward"])  # noqa: E741
    margin = fixed(case["in_margin"]) if hp["margin"] else None
    loss = pref.bradley_terry(w, l, margin=margin, center_coef=hp.get("center_rewards_coefficient") or 0.0).mean()
    gw, gl = torch.autograd.grad(loss, (w, l))
    return {"out_loss": loss.detach().numpy(), "grad_chosen": gw.numpy(), "grad_rejected": gl.numpy()}


ADAPTERS = {
    "trl.trainer.dpo_trainer.DPOTrainer._compute_loss": trl_dpo,
    "openrlhf.models.loss.DPOLoss.forward": openrlhf_dpo,
    "nemo_aligner MegatronGPTDPOModel.loss_func": aligner,
    "nemo_rl.algorithms.loss.loss_functions.DPOLossFn.__call__": nemo_dpo,
    "trl.experimental.orpo ORPOTrainer.odds_ratio_loss (loss = nll - mean(losses); only the OR part stored)": orpo,
    "trl.experimental.cpo CPOTrainer.cpo_loss": cpo,
    "trl.trainer.kto_trainer.KTOTrainer._compute_loss": kto,
    "openrlhf.models.loss.PairWiseLoss.forward": reward_model,
    "trl.trainer.reward_trainer.RewardTrainer.compute_loss": reward_model,
}
