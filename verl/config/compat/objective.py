"""Rules of the objective: estimator and loss, corrections, clipping, KL, filters, the critic (see rules.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.algorithms.presets import LOSSES, PRESETS
from verl.algorithms.specs import BY_HORIZON
from verl.config.compat.distillation import distilled, keys_of
from verl.config.compat.given import ACTOR, Given, Result
from verl.errors import Refused

_COVARIANCE = {
    "clip_cov": {"clip_cov_ratio": "cov_ratio", "clip_cov_lb": "cov_low", "clip_cov_ub": "cov_high"},
    "kl_cov": {"kl_cov_ratio": "cov_ratio", "ppo_kl_coef": "cov_coef"},
}

_BY_SEQUENCE = ("gspo", "gspo_token", "geo_mean", "gmpo", "sapo")


def objective(given: Given) -> Result:
    """Map adv_estimator and loss_mode to one choice: a preset, or a preset with another loss."""
    if given.value("distillation.enabled"):
        found = distilled(given)
        if found["algorithm.name"] == "grpo" and (std := given.get("algorithm.norm_adv_by_std_in_grpo")) is not None:
            return {**found, "algorithm.normalize_by_std": std}
        given.ignore("a teacher's presets normalise as the paper does", "algorithm.norm_adv_by_std_in_grpo")
        return found
    given.ignore("only read with distillation.enabled", "distillation.enabled", *keys_of(given))
    loss_key, by_std_key = f"{ACTOR}policy_loss.loss_mode", "algorithm.norm_adv_by_std_in_grpo"
    preset, loss = given.get("algorithm.adv_estimator"), given.get(loss_key) or "vanilla"
    if loss not in ("vanilla", *PRESETS, *LOSSES):
        raise Refused(f"{loss_key}={loss}: this loss is not in this version; algorithm.loss=module:function is yours")
    bypass = given.value("algorithm.rollout_correction.bypass_mode")
    if bypass and loss != "vanilla":
        message = "some of verl's trainers then take rollout_correction.loss_type for the loss, others the loss_mode"
        raise Refused(f"{loss_key}={loss} with rollout_correction.bypass_mode: {message}; leave one of them out")
    if preset is None and loss != "vanilla" and "algorithm.name" not in given.native:
        raise Refused(f"{loss_key}={loss}: give algorithm.adv_estimator=grpo beside it, or algorithm.name={loss}")
    if preset == "ppo":
        _critic_is_like_ours(given)
    out: Result = {}
    if preset is not None:
        out["algorithm.name"] = preset
        if loss == "vanilla":
            if preset in ("rloo", "remax", "gpg") and not bypass:  # the presets are the papers' REINFORCE; verl clips
                out["algorithm.loss"] = "ppo_clip"
        elif preset == "grpo" and loss in PRESETS and loss != "reinforce":
            out["algorithm.name"] = loss
        else:
            out["algorithm.loss"] = loss
        if loss in ("kl_cov", "clip_cov"):
            keys = {f"{ACTOR}policy_loss.{k}": option for k, option in _COVARIANCE[loss].items()}
            values = {option: given.need(key) for key, option in keys.items()}
            out |= {f"algorithm.options.{option}": value for option, value in values.items() if value is not None}
        if loss in ("dppo_tv", "dppo_kl"):  # verl's cap on the ratio of these
            out["algorithm.options.ratio_max"] = given.need(f"{ACTOR}clip_ratio_c")
        if loss == "cispo":  # verl's cap is 1 + clip_ratio_high, its floor 1 - clip_ratio_low
            single = given.value(f"{ACTOR}clip_ratio")
            sides = (given.need(f"{ACTOR}clip_ratio_{side}") if single is None else single for side in ("low", "high"))
            low, high = (0.2 if side is None else side for side in sides)
            out |= {"algorithm.options.ratio_max": 1 + high, "algorithm.options.ratio_min": max(0.0, 1 - low)}
    elif loss == "vanilla":
        given.ignore("the preset's own loss", loss_key)
    unread = (k for name, keys in _COVARIANCE.items() for k in keys if name != loss)
    given.ignore("only read by loss_mode=clip_cov and kl_cov", *(f"{ACTOR}policy_loss.{k}" for k in unread))
    by_std = given.get(by_std_key)
    if by_std is not None and (preset or "grpo") in ("grpo", "pass_at_k"):
        out["algorithm.normalize_by_std"] = by_std
    else:
        given.ignore("only GRPO reads it", by_std_key)
    return out


def _critic_is_like_ours(given: Given) -> None:
    """Refuse settings of verl's critic that ours does not have: an aggregation other than the mean over tokens (verl's
    default is the actor's), and a schedule that is not constant (the default of some of verl's model engines)."""
    mode, style = "critic.loss_agg_mode", "critic.optim.lr_scheduler_type"
    how = given.value(mode, given.need(f"{ACTOR}loss_agg_mode"))
    if how != "token-mean":
        raise Refused(f"{mode}={how}: the critic's loss is a mean over tokens here; give {mode}=token-mean")
    if given.use_defaults and given.schedule and style not in given.values:
        message = f"{style}={given.schedule} is the default of this model engine"
        raise Refused(f"{message}: the critic's rate is constant after its warm-up here; give {style}=constant")


def correction(given: Given) -> Result:
    """Map algorithm.rollout_correction. verl bounds its k1 statistics of sampler/trainer; ours are of
    trainer/sampler."""
    key, option = "algorithm.rollout_correction.", "algorithm.options.correction_"
    level, normalize = given.value(f"{key}rollout_is"), f"{key}rollout_is_batch_normalize"
    out: Result = {}
    if level is not None:
        bounds = _bounds(f"{key}rollout_is_threshold", given.value(f"{key}rollout_is_threshold", 2.0))
        out = {
            "algorithm.correction": "icepop" if len(bounds) == 2 else "truncate",
            f"{option}level": level,
            f"{option}high": bounds[-1],
            f"{option}batch_normalize": bool(given.value(normalize, False)),
        }
        if len(bounds) == 2:
            out[f"{option}low"] = bounds[0]
    else:
        given.ignore("only read with rollout_correction.rollout_is", f"{key}rollout_is_threshold", normalize)
    stats, limits = given.value(f"{key}rollout_rs"), given.value(f"{key}rollout_rs_threshold")
    if stats is not None:
        names, texts = str(stats).split(","), str(limits).split(",")
        if limits is None or len(texts) not in (1, len(names)):
            raise Refused(f"{key}rollout_rs={stats}: give rollout_rs_threshold, one value or one for each")
        pairs = zip(names, texts * len(names) if len(texts) == 1 else texts)
        out[f"{option}reject"] = [_rejected(f"{key}rollout_rs_threshold", n.strip(), t) for n, t in pairs]
    else:
        given.ignore("only read with rollout_correction.rollout_rs", f"{key}rollout_rs_threshold")
    if given.value(f"{key}bypass_mode"):
        loss = given.value(f"{key}loss_type", "ppo_clip")
        out |= {"algorithm.bypass": True, "algorithm.loss": loss}
        if loss == "ppo_clip":  # as verl: the ratio holds the sampler's log-probs already, no weights beside it
            out = {k: v for k, v in out.items() if "correction" not in k or k.endswith("correction_reject")}
    else:
        given.ignore("only read with rollout_correction.bypass_mode", f"{key}loss_type")
        if given.value(f"{ACTOR}use_rollout_log_probs"):  # the sampler's log-probs are the old ones, the loss stays
            out["algorithm.bypass"] = True
    return out


def _bounds(key: str, value: Any) -> list[float]:
    try:
        found = [float(v) for v in str(value).split("_")]
    except ValueError:
        raise Refused(f"{key}={value}: expected a number, or LOW_HIGH") from None
    if len(found) > 2 or min(found) <= 0:
        raise Refused(f"{key}={value}: expected a positive number, or LOW_HIGH")
    return found


def _rejected(key: str, stat: str, text: str) -> str:
    found = _bounds(key, text.strip())
    if not stat.endswith("k1"):
        return f"{stat}:{found[-1]:g}"
    low, high = found if len(found) == 2 else (1 / found[0], found[0])
    return f"{stat}:{1 / high:.12g}:{1 / low:.12g}"


def aggregation(given: Given) -> Result:
    """Map the aggregation. verl's constant is the width of the responses; if it is not given, that is the response
    limit."""
    mode, factor = given.get(f"{ACTOR}loss_agg_mode"), f"{ACTOR}loss_scale_factor"
    by_token = given.value(f"{ACTOR}use_token_level_loss")
    if by_token is not None:  # of an older verl, which had these two
        older = "token-mean" if by_token else "seq-mean-token-mean"
        if given.value(f"{ACTOR}loss_agg_mode", older) != older:
            both = f"{ACTOR}use_token_level_loss={by_token} and {ACTOR}loss_agg_mode={mode}"
            raise Refused(f"{both} contradict each other: leave one of them out")
        return {"algorithm.aggregation": older}
    if f"{ACTOR}loss_agg_mode" not in given.values and given.value(f"{ACTOR}policy_loss.loss_mode") in _BY_SEQUENCE:
        mode = None  # the preset's: its ratio is of a sequence, and verl's newer trainers fix the mode too
    out: Result = {} if mode is None else {"algorithm.aggregation": mode}
    horizon = given.value(factor)
    if horizon is None and mode == BY_HORIZON:
        horizon = given.first("data.max_response_length", "actor_rollout_ref.rollout.response_length")
    if horizon is None or mode != BY_HORIZON:
        given.ignore(f"only read with loss_agg_mode={BY_HORIZON}", factor)
        return out
    return out | {"algorithm.horizon_tokens": horizon}


def _clip(given: Given) -> Result:
    """Map the clip ratios. clip_ratio sets both sides, although verl itself reads only clip_ratio_low and
    clip_ratio_high."""
    single = given.value(f"{ACTOR}clip_ratio")
    if single is None:
        sides = {side: given.get(f"{ACTOR}clip_ratio_{side}") for side in ("low", "high")}
        return {f"algorithm.clip_{side}": value for side, value in sides.items() if value is not None}
    for side in ("low", "high"):
        value = given.value(f"{ACTOR}clip_ratio_{side}", single)
        if value not in (None, single):
            both = f"{ACTOR}clip_ratio={single} and clip_ratio_{side}={value}"
            raise Refused(f"{both} contradict each other: leave clip_ratio out")
    return {"algorithm.clip_low": single, "algorithm.clip_high": single}


def _kl_loss(given: Given) -> Result:
    coef, form = f"{ACTOR}kl_loss_coef", f"{ACTOR}kl_loss_type"
    if not given.need(f"{ACTOR}use_kl_loss"):
        given.ignore("counts with use_kl_loss=True only, as in verl", coef, form)
        return {"algorithm.kl_loss_coef": 0.0}
    return {"algorithm.kl_loss_coef": given.need(coef), "algorithm.kl_loss_form": given.need(form)}


def kl_reward(given: Given) -> Result:
    ctrl, ours = "algorithm.kl_ctrl.", "algorithm.kl_reward_"
    adaptive = (f"{ctrl}target_kl", f"{ctrl}horizon")
    if not given.need("algorithm.use_kl_in_reward"):
        keys = ("algorithm.kl_penalty", f"{ctrl}type", f"{ctrl}kl_coef", *adaptive)
        given.ignore("counts with use_kl_in_reward=True only, as in verl", *keys)
        return {f"{ours}coef": 0.0}
    target, horizon = (given.need(key) for key in adaptive)
    if given.need(f"{ctrl}type") == "fixed":
        given.ignore("counts with kl_ctrl.type=adaptive only, as in verl", *adaptive)
        target = horizon = None
    coef, form = given.need(f"{ctrl}kl_coef"), given.need("algorithm.kl_penalty")
    return {f"{ours}coef": coef, f"{ours}form": form, f"{ours}target": target, f"{ours}horizon": horizon}


def filter(given: Given) -> Result:
    """Map DAPO's dynamic sampling. In verl it generates at most max_num_gen_batches batches of gen_batch_size per step;
    0 is no limit."""
    name = "algorithm.filter_groups."
    if not given.need(f"{name}enable"):
        given.ignore("only read with filter_groups.enable", f"{name}metric", f"{name}max_num_gen_batches")
        return {"algorithm.filter_groups": False}
    metric = given.value(f"{name}metric")
    component = None if metric in ("score", "reward", "seq_reward", "seq_final_reward") else metric
    out: Result = {"algorithm.filter_groups": True, "algorithm.on_exhausted": "stop"}
    out["algorithm.filter_metric"] = component
    batches = given.value(f"{name}max_num_gen_batches")
    if not batches or batches < 0:
        without = "0 is without limit in verl; algorithm.max_draws_per_group bounds it here"
        given.ignore(without, f"{name}max_num_gen_batches")
        return out
    train, drawn = given.get("data.train_batch_size"), given.value("data.gen_batch_size")
    return out | {"algorithm.max_draws_per_group": float(batches * (drawn / train if drawn and train else 1))}


def _critic(given: Given) -> Result:
    """Map the critic. Ours is updated together with the policy, so verl's keys for the critic's epochs, mini-batch and
    Adam settings must have the actor's values."""
    trains = given.value("critic.enable")
    estimator = given.get("algorithm.adv_estimator") or given.native.get("algorithm.name")
    own, mode = ("ppo_epochs", "ppo_mini_batch_size", "optim.betas", "optim.eps"), "critic.loss_agg_mode"
    keys = [f"critic.{name}" for name in own]
    if estimator not in ("ppo", "vapo", "pf_ppo"):
        warm = ("critic.optim.lr_warmup_steps", "critic.optim.lr_warmup_steps_ratio")
        given.ignore("no critic in this estimator", "critic.enable", *keys, mode, *warm)
        return {}
    if trains is False:
        raise Refused("critic.enable=False with adv_estimator=gae, which reads its values: leave it out")
    for key, name in zip(keys, own):
        actors = given.need(f"{ACTOR}{name}")
        if given.value(key) not in (None, actors):
            message = f"the critic follows the actor here ({name}={actors})"
            raise Refused(f"{key}={given.value(key)}: {message}; leave it out")
    given.ignore("the critic is updated with the actor", "critic.enable", *keys, mode)
    steps, ratio = (given.value(f"critic.optim.lr_warmup_steps{end}") for end in ("", "_ratio"))
    if steps is not None and steps > 0:
        out: Result = {"critic.warmup_steps": steps}
        return out if ratio is None else out | {"critic.warmup_ratio": 0.0}
    share = {} if ratio is None else {"critic.warmup_ratio": ratio}
    return share if steps is None and ratio is None else {"critic.warmup_steps": 0, **share}


def pf_ppo(given: Given) -> Result:
    """Map verl's PF-PPO, which resamples the whole step with these weights after the advantages."""
    how, power = (f"algorithm.pf_ppo.{name}" for name in ("reweight_method", "weight_pow"))
    if not given.value("algorithm.use_pf_ppo"):
        given.ignore("only read with algorithm.use_pf_ppo", how, power)
        return {}
    return {
        "algorithm.options.selection": given.value(how) or "pow",
        "algorithm.options.weight_pow": 2.0 if given.value(power) is None else given.value(power),
    }


def critic_without_estimator(values: Mapping[str, Any], native: Mapping[str, Any]) -> list[str]:
    """Return a fault for keys of a critic without an estimator: verl would train PPO, and this run another
    objective."""
    if "algorithm.adv_estimator" in values or "algorithm.name" in native:
        return []
    message = (
        "critic.* without algorithm.adv_estimator is PPO in verl: give algorithm.adv_estimator=gae (or grpo) beside it"
    )
    return [message] if any(k.startswith("critic.") for k in values) else []


RULES = (objective, aggregation, correction, _clip, _kl_loss, kl_reward, filter, _critic, pf_ppo)
