"""verl's `distillation.*`: a teacher, and what is learned from it."""

from __future__ import annotations

import re

from verl.config.compat.given import ACTOR, Given, Result

_LOSS = "distillation.distillation_loss."
_CLAMPS = (f"{_LOSS}loss_max_clamp", f"{_LOSS}log_prob_min_clamp")
_NAMED = tuple(f"distillation.teacher_models.{name}." for name in ("teacher_model", "gsm8k"))
_PATHS, _ROWS = (tuple(named + key for named in _NAMED) for key in ("model_path", "key"))
_SETTINGS = tuple(_LOSS + name for name in ("loss_mode", "topk", "use_policy_gradient", "use_task_rewards"))
_COEF = f"{_LOSS}distillation_loss_coef"
KEYS = (*_CLAMPS, *_PATHS, *_ROWS, *_SETTINGS, _COEF)
"""What counts with distillation.enabled=True only."""


def distilled(given: Given) -> Result:
    """The policy gradient of k1 is opd, the forward KL over the teacher's likeliest tokens gkd_topk, with rewards a
    term beside GRPO's loss; nothing else of verl's is here, and what its versions have different defaults for must be
    given."""
    mode, k, by_gradient, rewarded = (given.said(key) for key in _SETTINGS)
    for key in (_SETTINGS[0], *_SETTINGS[2:]):
        if given.said(key) is None:
            raise ValueError(f"distillation.enabled=True: give {key}, whose default is not the same in verl's versions")
    for key in _CLAMPS:
        if given.said(key) is not None:
            raise ValueError(f"{key}={given.said(key)}: nothing is clamped here; leave it out")
    out = _teachers(given)
    estimator, loss = given.get("algorithm.adv_estimator"), given.get(f"{ACTOR}policy_loss.loss_mode") or "vanilla"
    if loss != "vanilla":
        raise ValueError(f"{ACTOR}policy_loss.loss_mode={loss} with distillation.enabled=True: leave one of them out")
    if mode == "k1" and by_gradient:
        if rewarded and estimator not in (None, "grpo"):
            raise ValueError(
                f"algorithm.adv_estimator={estimator} with use_task_rewards: its part is GRPO's here; set grpo"
            )
        given.ignore("only read by loss_mode=forward_kl_topk", f"{_LOSS}topk")
        coefs = {"teacher_coef": given.said(_COEF, 1.0), "reward_coef": 1.0 if rewarded else 0.0}
        return out | {"algorithm.name": "opd", **{f"algorithm.options.{name}": value for name, value in coefs.items()}}
    if mode == "forward_kl_topk" and not by_gradient:
        given.remarks[_SETTINGS[0]] = "all other tokens are one more outcome here; verl leaves them out"
        if rewarded and estimator not in (None, "grpo"):
            raise ValueError(f"algorithm.adv_estimator={estimator} with use_task_rewards: not mapped; set grpo")
        if rewarded:
            coef = given.said(_COEF, 1.0)
            out |= {"algorithm.options.divergence_coef": coef, "algorithm.options.divergence_beta": 0.0}
            out["algorithm.name"] = "grpo"
        else:
            given.ignore("the divergence is the whole loss: its factor is the learning rate's", _COEF, _SETTINGS[3])
            out |= {"algorithm.name": "gkd_topk", "algorithm.options.beta": 0.0}
        return out if k is None else out | {"teacher.top_k": k}
    fix = "there are k1 with use_policy_gradient=True (algorithm.name=opd) and forward_kl_topk with False (gkd_topk)"
    raise ValueError(f"{_SETTINGS[0]}={mode} with use_policy_gradient={by_gradient}: {fix}")


def _teachers(given: Given) -> Result:
    """One teaches every row; several are named by what their `key` is in the rows."""
    paths = {row: path for row, key in zip(_ROWS, _PATHS) if (path := given.said(key)) is not None}
    if len(paths) < 2:
        given.ignore("one teacher teaches every row", *_ROWS)
        return dict(zip(["teacher.path"], paths.values()))
    for row in paths:
        if not re.fullmatch(r"\w+", str(named := given.said(row) or "")):
            why = "here a teacher is named by letters, digits and _, as the rows' column `teacher` or data_source is"
            fix = "name it so in a column `teacher`, and write teacher.paths={NAME: FOLDER, OTHER: FOLDER}"
            raise ValueError(f"{row}={named or 'null'} with {' and '.join(_PATHS)}: {why}; {fix}")
    if len({given.said(row) for row in paths}) < len(paths):
        fix = "give each a key of its own, which the rows name"
        raise ValueError(
            f"{' and '.join(paths)} are equal ({given.said(_ROWS[0])}): one teacher would be left out; {fix}"
        )
    return {"teacher.paths": {str(given.said(row)): path for row, path in paths.items()}}
