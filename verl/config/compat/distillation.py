"""Rules of verl's `distillation.*`: the teachers and the distillation loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.config.compat.given import ACTOR, Given, Result
from verl.data.formats import teacher_name
from verl.errors import Refused

_LOSS, _TEACHERS = "distillation.distillation_loss.", "distillation.teacher_models."
_CLAMPS = {f"{_LOSS}loss_max_clamp": "clamp", f"{_LOSS}log_prob_min_clamp": "floor"}
"""verl's key -> the end of our key, after teacher_ or divergence_."""
_SETTINGS = tuple(_LOSS + name for name in ("loss_mode", "topk", "use_policy_gradient", "use_task_rewards"))
_COEF = f"{_LOSS}distillation_loss_coef"
_BUCKET = "all other tokens are one more outcome here; verl leaves them out"
_BETAS = {
    "forward_kl_topk": (0.0, _BUCKET),
    "reverse_kl_topk": (1.0, f"the likeliest tokens are the teacher's here, the policy's in verl; {_BUCKET}"),
}
"""Loss mode -> (beta of the divergence, the difference from verl's loss)."""


def keys_of(given: Given) -> list[str]:
    """Return the keys that have an effect only with distillation.enabled=True."""
    named = [key for key in given.values if key.startswith(_TEACHERS)]
    return [*_CLAMPS, *(key for key in named if key.endswith((".model_path", ".key"))), *_SETTINGS, _COEF]


def distilled(given: Given) -> Result:
    """Return the settings of our keys for verl's distillation.

    The policy gradient of k1 becomes opd, the forward and the reverse KL over the likeliest tokens gkd_topk; with
    rewards they are a term in addition to GRPO's loss. Other losses of verl are refused, and so is a missing key with
    different defaults in verl's versions.
    """
    mode, k, by_gradient, rewarded = (given.value(key) for key in _SETTINGS)
    for key in (_SETTINGS[0], *_SETTINGS[2:]):
        if given.value(key) is None:
            raise Refused(f"distillation.enabled=True: give {key}, whose default is not the same in verl's versions")
    clamps = {name: value for key, name in _CLAMPS.items() if (value := given.value(key)) is not None}
    out = _teachers(given)
    estimator, loss = given.get("algorithm.adv_estimator"), given.get(f"{ACTOR}policy_loss.loss_mode") or "vanilla"
    if loss != "vanilla":
        raise Refused(f"{ACTOR}policy_loss.loss_mode={loss} with distillation.enabled=True: leave one of them out")
    if mode == "k1" and by_gradient:
        if rewarded and estimator not in (None, "grpo"):
            raise Refused(
                f"algorithm.adv_estimator={estimator} with use_task_rewards: its part is GRPO's here; set grpo"
            )
        given.ignore("only read by the modes of likeliest tokens", f"{_LOSS}topk")
        coefs = {"teacher_coef": given.value(_COEF, 1.0), "reward_coef": 1.0 if rewarded else 0.0}
        return out | {"algorithm.name": "opd"} | _options({**coefs, **_named("teacher_", clamps)})
    if mode in _BETAS and not by_gradient:
        beta, given.remarks[_SETTINGS[0]] = _BETAS[mode]
        if rewarded and estimator not in (None, "grpo"):
            raise Refused(f"algorithm.adv_estimator={estimator} with use_task_rewards: not mapped; set grpo")
        if rewarded:
            coef = given.value(_COEF, 1.0)
            own = {"divergence_coef": coef, "divergence_beta": beta, **_named("divergence_", clamps)}
            out |= {"algorithm.name": "grpo"} | _options(own)
        else:
            given.ignore("the divergence is the whole loss: its factor is the learning rate's", _COEF, _SETTINGS[3])
            out |= {"algorithm.name": "gkd_topk"} | _options({"beta": beta, **_named("teacher_", clamps)})
        return out if k is None else out | {"teacher.top_k": k}
    fix = "there are k1 with use_policy_gradient=True (algorithm.name=opd), and with False forward_ and reverse_kl_topk"
    raise Refused(f"{_SETTINGS[0]}={mode} with use_policy_gradient={by_gradient}: {fix}")


def _named(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}{name}": value for name, value in values.items()}


def _options(values: Mapping[str, Any]) -> Result:
    return _named("algorithm.options.", values)


def _teachers(given: Given) -> Result:
    """Return the settings of the teachers. A single teacher serves every row; of several, the value of `teacher_key` in
    the row selects one. As in verl, the default entry teacher_model is left out if others are named."""
    paths = {key: given.value(key) for key in given.values if key.startswith(_TEACHERS) and key.endswith(".model_path")}
    paths = {key.removesuffix("model_path") + "key": path for key, path in paths.items() if path is not None}
    if len(paths) < 2:
        rows = (key for key in given.values if key.startswith(_TEACHERS) and key.endswith(".key"))
        given.ignore("one teacher teaches every row", *rows)
        return dict(zip(["teacher.path"], paths.values()))
    names = {row: teacher_name(str(given.value(row) or "")) for row in paths}
    for row, name in names.items():
        if not name:
            fix = "give what the rows of its task have as data_source (or in the column `teacher`)"
            raise Refused(f"{row}=null beside other teachers: {fix}")
    if len({*names.values()}) < len(names):
        message = " and ".join(f"{row}={given.value(row)}" for row in names)
        raise Refused(f"{message}: one teacher would be left out; give each a key of its own, which the rows name")
    return {"teacher.paths": {names[row]: path for row, path in paths.items()}}
