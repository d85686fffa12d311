"""The preference and reward-model cases of the golden set, by the manifest's function names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms import preference as pref
from verl.batch import Columns
from verl.objective import Term

Case = Mapping[str, Any]


def leaf(x: Any) -> Tensor:
    return torch.from_numpy(np.asarray(x, np.float64)).clone().requires_grad_()


def fixed(x: Any) -> Tensor:
    return torch.from_numpy(np.asarray(x, np.float64))


def _token_logprobs(logits: Tensor, ids: np.ndarray) -> Tensor:
    """[B, T-1]: of each token after the first."""
    lp = torch.log_softmax(logits[:, :-1], -1)
    return lp.gather(-1, fixed(ids).long()[:, 1:, None])[..., 0]


def _columns(mask: np.ndarray, side: np.ndarray, pair: np.ndarray, **token: Any) -> Columns:
    """All places of [rows, T] arrays as tokens of one sequence per row; side and pair are one number per row."""
    rows, width = mask.shape
    spread = {"side": np.repeat(side, width), "pair": np.repeat(pair, width)}
    flat = {n: x.reshape(-1) if isinstance(x, Tensor) else fixed(x).reshape(-1) for n, x in {**token, **spread}.items()}
    row = torch.arange(rows).repeat_interleave(width)
    keep = torch.from_numpy(np.asarray(mask).reshape(-1) > 0)
    return Columns(token=flat, sequence={}, sequence_of=row, num_sequences=rows, mask=keep)


def _loss(columns: Columns, name: str, beta: float, **options: Any) -> Tensor:
    """Return the loss of verl for `preference.loss=name`: the mean over the present sequences of the term's values."""
    [term] = pref.preference_terms(name, beta=beta, options=options)
    assert {*term.inputs, *term.outputs} <= set(columns.token), (name, term.inputs)
    needed = {n: c for n, c in columns.token.items() if n in (*term.inputs, *term.outputs)}
    return _mean(replace(columns, token=needed), term)


def _mean(columns: Columns, term: Term) -> Tensor:
    return term.fn(columns.cleaned()).values.sum() / (columns.counts() > 0).sum()


def _sides(rows: int, *, alternate: bool) -> tuple[np.ndarray, np.ndarray]:
    """(side, pair) of rows that alternate chosen, rejected, or come as two halves."""
    at, n = np.arange(rows), rows // 2
    first, pair = (at % 2 == 0, at // 2) if alternate else (at < n, at % n)
    return np.where(first, pref.CHOSEN, pref.REJECTED), pair


TRL = {
    "sigmoid": ("dpo", {}),
    "sigmoid_norm": ("dpo", {"average": True}),
    "ipo": ("ipo", {}),
    "hinge": ("hinge", {}),
    "robust": ("robust", {}),
    "apo_zero": ("apo_zero", {}),
    "sppo_hard": ("sppo", {}),
    "nca_pair": ("nca", {}),
}


def trl_dpo(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    logits, ids, beta = leaf(case["in_logits"]), case["in_input_ids"], hp["beta"]
    mask = case["in_completion_mask"][:, 1:]
    columns = _columns(
        mask,
        *_sides(len(mask), alternate=False),
        logprobs=_token_logprobs(logits, ids),
        ref_logprobs=_token_logprobs(fixed(case["in_ref_logits"]), ids),
        sum_pi_squared=(torch.softmax(logits.detach()[:, :-1], -1) ** 2).sum(-1),
    )
    shared = {"ld_alpha": hp["ld_alpha"], "wpo": hp["use_weighting"]}
    assert hp["f_divergence_type"] == "reverse_kl"

    def one(kind: str) -> Tensor:
        if kind == "sft":  # the NLL alone: RPO without its DPO
            both = _loss(columns, "rpo", beta, alpha=1.0, normalization="token", **shared)
            return both - _loss(columns, "dpo", beta, **shared)
        name, options = TRL[kind]
        smoothed = {"label_smoothing": hp["label_smoothing"]} if kind in ("sigmoid", "robust") else {}
        return _loss(columns, name, beta, **options, **smoothed, **shared)

    loss = sum(w * one(kind) for kind, w in zip(hp["loss_types"], hp["loss_weights"], strict=True))
    assert isinstance(loss, Tensor)
    (grad,) = torch.autograd.grad(loss, logits)
    return {"out_loss": loss.detach().numpy(), "grad_logits": grad.numpy()}


def aligner(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    lp, mask, r = leaf(case["in_log_prob"]), case["in_mask"], case["in_gt_rewards"]
    side, pair = _sides(len(mask), alternate=False)
    gap = np.tile(r[side > 0] - r[side < 0], 2)[:, None] + 0 * mask
    columns = _columns(mask, side, pair, logprobs=lp, ref_logprobs=case["in_ref_log_prob"], gap=gap)
    options = {"eta": hp["gt_reward_scale"], "average": hp["average_log_probs"]}
    loss = _loss(columns, hp["preference_loss"], hp["beta"], **options)
    (grad,) = torch.autograd.grad(loss, lp)
    return {"out_loss": loss.detach().numpy(), "grad_log_prob": grad.numpy()}


def nemo_dpo(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    lp, mask = leaf(case["in_log_prob"]), case["in_mask"] * case["in_sample_mask"][:, None]
    columns = _columns(mask, *_sides(len(mask), alternate=True), logprobs=lp, ref_logprobs=case["in_ref_log_prob"])
    weight = hp["preference_loss_weight"]
    options = {
        "alpha": hp["sft_loss_weight"] / weight,
        "normalization": "sequence" if hp["sft_average_log_probs"] else "sum",
        "average": hp["preference_average_log_probs"],
    }
    loss = weight * _loss(columns, "rpo", hp["reference_policy_kl_penalty"], **options)
    (grad,) = torch.autograd.grad(loss, lp)
    return {"out_loss": loss.detach().numpy(), "grad_log_prob": grad.numpy()}


def _of_sums(w: Tensor, l: Tensor, **token: Any) -> Columns:  # noqa: E741
    """Answers of one token each, which carries the sum; chosen before rejected."""
    rows = 2 * len(w)
    return _columns(np.ones((rows, 1)), *_sides(rows, alternate=False), logprobs=torch.cat([w, l]), **token)


def openrlhf_dpo(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    w, l = leaf(case["in_chosen_logps"]), leaf(case["in_rejected_logps"])  # noqa: E741
    ref = [fixed(case[f"in_ref_{side}_logps"]) for side in ("chosen", "rejected")]
    columns = _of_sums(w, l, ref_logprobs=torch.cat(ref))
    assert not (hp["ipo"] and hp["label_smoothing"])
    options = {"average": False} if hp["ipo"] else {"label_smoothing": hp["label_smoothing"]}
    loss = _loss(columns, "ipo" if hp["ipo"] else "dpo", hp["beta"], **options)
    gw, gl = torch.autograd.grad(loss, (w, l))
    return {
        "out_loss": loss.detach().numpy(),
        "grad_chosen_logps": gw.numpy(),
        "grad_rejected_logps": gl.numpy(),
        "out_chosen_rewards": (hp["beta"] * (w - ref[0])).detach().numpy(),
        "out_rejected_rewards": (hp["beta"] * (l - ref[1])).detach().numpy(),
    }


def orpo(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    w, l = leaf(case["in_chosen_avg_logps"]), leaf(case["in_rejected_avg_logps"])  # noqa: E741
    loss = pref.odds_ratio(w, l, beta=hp["beta"]).mean()
    gw, gl = torch.autograd.grad(loss, (w, l))
    return {"out_or_loss": loss.detach().numpy(), "grad_chosen": gw.numpy(), "grad_rejected": gl.numpy()}


def cpo(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    w, l = leaf(case["in_chosen_logps"]), leaf(case["in_rejected_logps"])  # noqa: E741
    options = {"label_smoothing": hp["label_smoothing"]}
    name = {"simpo": "simpo", "sigmoid": "cpo"}[hp["loss_type"]]
    assert not hp["alpha"], "TRL adds its NLL outside of this function"
    more = {"gamma": hp["simpo_gamma"]} if name == "simpo" else {"alpha": 0.0}
    loss = _loss(_of_sums(w, l), name, hp["beta"], **options, **more)
    each = [_loss(_of_sums(x[None], y[None]), name, hp["beta"], **options, **more) for x, y in zip(w, l)]
    gw, gl = torch.autograd.grad(loss, (w, l))
    return {
        "out_loss": loss.detach().numpy(),
        "out_losses": torch.stack(each).detach().numpy(),
        "grad_chosen": gw.numpy(),
        "grad_rejected": gl.numpy(),
    }


def kto(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return its rows, then one of one token for each mismatched answer, with the given sums of policy and
    reference."""
    logits, mask = leaf(case["in_logits"]), case["in_completion_mask"][:, 1:]
    rows, width = mask.shape
    first = np.arange(width) == 0
    mask = np.concatenate([mask, np.repeat(first[None], rows, 0)])
    at = np.argmax(mask, 1)[:, None] == np.arange(width)  # the place of a row's sum
    ref = np.concatenate([case["in_ref_logps"], case["in_ref_kl_logps"]])[:, None] * at
    lp = torch.cat([_token_logprobs(logits, case["in_input_ids"]), fixed(case["in_kl_logps"][:, None] * at[rows:])])
    label = np.where(np.asarray(case["in_label"]).astype(bool), pref.CHOSEN, pref.REJECTED)
    side = np.concatenate([label, np.full(rows, pref.MISMATCHED)])
    columns = _columns(mask, side, np.tile(np.arange(rows), 2), logprobs=lp, ref_logprobs=ref)
    options = {n: hp[n] for n in ("desirable_weight", "undesirable_weight")}
    loss = _loss(columns, "kto", hp["beta"], **options)
    (grad,) = torch.autograd.grad(loss, logits)
    return {"out_loss": loss.detach().numpy(), "grad_logits": grad.numpy()}


def reward_model(case: Case, hp: Mapping[str, Any]) -> dict[str, np.ndarray]:
    w, l = leaf(case["in_chosen_reward"]), leaf(case["in_rejected_reward"])  # noqa: E741
    margin = fixed(case["in_margin"]) if hp["margin"] else torch.zeros_like(w)
    [term] = pref.reward_terms(center_coef=hp.get("center_rewards_coefficient") or 0.0, margin=hp["margin"])
    rows = 2 * len(w)
    values = {"values": torch.cat([w, l]), "gap": margin.repeat(2)}
    loss = _mean(_columns(np.ones((rows, 1)), *_sides(rows, alternate=False), **values), term)
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
