"""What several of verl's keys say together (`@name` in table.tsv): batch sizes, KL, clipping, schedules, async modes.

Each rule reads the given keys and returns values for our keys; a contradiction is a ValueError with the fix.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from verl.config.compat.table import find_row

ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
Result = dict[str, Any]


@dataclass(frozen=True)
class Given:
    """What one command line says. `values`: verl's keys; `native`: ours; `recipe_prompts`: the recipe's batch size.
    Null stands for a key that is not given; a value that no rule could compute with is refused when it is read."""

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    use_defaults: bool
    native: Mapping[str, Any]
    recipe_prompts: int | None
    ignored: dict[str, str] = field(default_factory=dict)
    """Keys that turned out to have no effect, with the reason."""

    def said(self, key: str, default: Any = None) -> Any:
        """As given."""
        row, value = find_row(key), self.values.get(key, default)
        return value if row is None else row.check(value)

    def get(self, key: str) -> Any:
        """As given, else verl's default where those were asked for, else None."""
        return self.said(key, self.defaults.get(key) if self.use_defaults else None)

    def need(self, key: str) -> Any:
        """As given, else verl's default in any case: what the key means beside the given ones."""
        return self.said(key, self.defaults.get(key))

    def first(self, *keys: str) -> Any:
        """The first of several spellings that is given (or has a default that was asked for)."""
        found = [k for k in keys if k in self.values] or [k for k in keys if self.get(k) is not None]
        return self.get(found[0]) if found else None

    def own(self, key: str, default: Any = None) -> Any:
        """The number that one of our keys is given, else `default`."""
        value = self.native.get(key)
        return value if isinstance(value, int | float) else default

    def ignore(self, reason: str, *keys: str) -> None:
        self.ignored.update({k: reason for k in keys if k in self.values})


def _batch(given: Given) -> Result:
    """ppo_mini_batch_size counts prompts: updates_per_step = train_batch_size / ppo_mini_batch_size."""
    mini_key, publishes_key = f"{ACTOR}ppo_mini_batch_size", "trainer.v1.separate_async.parameter_sync_step"
    prompts = given.said("data.train_batch_size")
    if prompts is None and given.recipe_prompts is None:
        prompts = given.get("data.train_batch_size")
    mini, batches = given.get(mini_key), given.get("async_training.require_batches")
    if prompts == 0 or (prompts is None and batches is not None):  # fully asynchronous scripts
        if mini is None:
            raise ValueError(f"data.train_batch_size=0: give {mini_key}, or step.prompts_per_step")
        prompts = mini * (batches or 1)
    out = {} if prompts is None else {"step.prompts_per_step": prompts, "supervised.rows_per_step": prompts}
    prompts = given.own("step.prompts_per_step", given.recipe_prompts if prompts is None else prompts)
    if mini is not None:
        if prompts is None:
            beside = "give data.train_batch_size beside it, or step.updates_per_step in its place"
            raise ValueError(f"{mini_key}={mini} counts prompts: {beside}")
        if mini < 1 or prompts % mini:
            by_default = "" if mini_key in given.values else " (verl's default)"
            raise ValueError(
                f"{mini_key}={mini}{by_default} does not divide the {prompts} prompts of a step "
                "(data.train_batch_size): choose a divisor, or give step.updates_per_step in its place"
            )
        out["step.updates_per_step"] = prompts // mini
    publishes = given.said(publishes_key)
    if publishes is not None and out.get("step.updates_per_step", publishes) != publishes:
        wanted = f"train_batch_size / ppo_mini_batch_size = {out['step.updates_per_step']}"
        raise ValueError(f"{publishes_key}={publishes} is not {wanted}, as verl demands: make them agree")
    rollouts = given.said("rollout.total_rollout_steps")
    if rollouts is not None:
        if prompts is None:
            raise ValueError(f"rollout.total_rollout_steps={rollouts} counts prompts: give run.total_steps instead")
        out["run.total_steps"] = max(1, rollouts // prompts)
    return out


def critic_without_estimator(values: Mapping[str, Any], native: Mapping[str, Any]) -> list[str]:
    """Keys of a critic and no estimator are PPO, verl's default; to ignore them would train something else."""
    if "algorithm.adv_estimator" in values or "algorithm.name" in native:
        return []
    said = (
        "critic.* without algorithm.adv_estimator is PPO in verl: give algorithm.adv_estimator=gae (or grpo) beside it"
    )
    return [said] if any(k.startswith("critic.") for k in values) else []


def _objective(given: Given) -> Result:
    """adv_estimator and loss_mode are one choice here: the preset, or the preset with another loss."""
    loss_key, by_std_key = f"{ACTOR}policy_loss.loss_mode", "algorithm.norm_adv_by_std_in_grpo"
    preset, loss = given.get("algorithm.adv_estimator"), given.get(loss_key) or "vanilla"
    if preset is None and loss != "vanilla" and "algorithm.name" not in given.native:
        raise ValueError(f"{loss_key}={loss}: give algorithm.adv_estimator=grpo beside it, or algorithm.name={loss}")
    out: Result = {}
    if preset is not None:
        out["algorithm.name"] = preset
        if loss == "vanilla":
            if preset in ("rloo", "remax", "gpg"):  # the presets are the papers' REINFORCE; verl clips
                out["algorithm.loss"] = "ppo_clip"
        elif preset == "grpo" and loss != "reinforce":
            out["algorithm.name"] = loss
        else:
            out["algorithm.loss"] = loss
        if loss == "cispo":  # verl's cap is 1 + clip_ratio_high, its floor 1 - clip_ratio_low
            single = given.said(f"{ACTOR}clip_ratio")
            sides = (given.need(f"{ACTOR}clip_ratio_{side}") if single is None else single for side in ("low", "high"))
            low, high = (0.2 if side is None else side for side in sides)
            out |= {"algorithm.options.ratio_max": 1 + high, "algorithm.options.ratio_min": max(0.0, 1 - low)}
    elif loss == "vanilla":
        given.ignore("the preset's own loss", loss_key)
    by_std = given.get(by_std_key)
    if by_std is not None and (preset or "grpo") in ("grpo", "pass_at_k"):
        out["algorithm.normalize_by_std"] = by_std
    else:
        given.ignore("only GRPO reads it", by_std_key)
    return out


def _correction(given: Given) -> Result:
    """algorithm.rollout_correction. verl bounds its k1 statistics on sampler/trainer, ours are on trainer/sampler."""
    key, option = "algorithm.rollout_correction.", "algorithm.options.correction_"
    level, normalize = given.said(f"{key}rollout_is"), f"{key}rollout_is_batch_normalize"
    out: Result = {}
    if level is not None:
        bounds = _bounds(f"{key}rollout_is_threshold", given.said(f"{key}rollout_is_threshold", 2.0))
        out = {
            "algorithm.correction": "icepop" if len(bounds) == 2 else "truncate",
            f"{option}level": level,
            f"{option}high": bounds[-1],
            f"{option}batch_normalize": bool(given.said(normalize, False)),
        }
        if len(bounds) == 2:
            out[f"{option}low"] = bounds[0]
    else:
        given.ignore("only read with rollout_correction.rollout_is", f"{key}rollout_is_threshold", normalize)
    stats, limits = given.said(f"{key}rollout_rs"), given.said(f"{key}rollout_rs_threshold")
    if stats is not None:
        names, texts = str(stats).split(","), str(limits).split(",")
        if limits is None or len(texts) not in (1, len(names)):
            raise ValueError(f"{key}rollout_rs={stats}: give rollout_rs_threshold, one value or one for each")
        pairs = zip(names, texts * len(names) if len(texts) == 1 else texts)
        out[f"{option}reject"] = [_rejected(f"{key}rollout_rs_threshold", n.strip(), t) for n, t in pairs]
    else:
        given.ignore("only read with rollout_correction.rollout_rs", f"{key}rollout_rs_threshold")
    if given.said(f"{key}bypass_mode"):
        loss = given.said(f"{key}loss_type", "ppo_clip")
        out |= {"algorithm.bypass": True, "algorithm.loss": loss}
        if loss == "ppo_clip":  # as verl: the ratio holds the sampler's log-probs already, no weights beside it
            out = {k: v for k, v in out.items() if "correction" not in k or k.endswith("correction_reject")}
    else:
        given.ignore("only read with rollout_correction.bypass_mode", f"{key}loss_type")
    return out


def _bounds(key: str, value: Any) -> list[float]:
    try:
        found = [float(v) for v in str(value).split("_")]
    except ValueError:
        raise ValueError(f"{key}={value}: expected a number, or LOW_HIGH") from None
    if len(found) > 2 or min(found) <= 0:
        raise ValueError(f"{key}={value}: expected a positive number, or LOW_HIGH")
    return found


def _rejected(key: str, stat: str, text: str) -> str:
    found = _bounds(key, text.strip())
    if not stat.endswith("k1"):
        return f"{stat}:{found[-1]:g}"
    low, high = found if len(found) == 2 else (1 / found[0], found[0])
    return f"{stat}:{1 / high:.12g}:{1 / low:.12g}"


def _clip(given: Given) -> Result:
    """clip_ratio sets both sides; verl itself reads clip_ratio_low and _high only."""
    single = given.said(f"{ACTOR}clip_ratio")
    if single is None:
        sides = {side: given.get(f"{ACTOR}clip_ratio_{side}") for side in ("low", "high")}
        return {f"algorithm.clip_{side}": value for side, value in sides.items() if value is not None}
    for side in ("low", "high"):
        value = given.said(f"{ACTOR}clip_ratio_{side}", single)
        if value not in (None, single):
            both = f"{ACTOR}clip_ratio={single} and clip_ratio_{side}={value}"
            raise ValueError(f"{both} contradict each other: leave clip_ratio out")
    return {"algorithm.clip_low": single, "algorithm.clip_high": single}


def _kl_loss(given: Given) -> Result:
    coef, form = f"{ACTOR}kl_loss_coef", f"{ACTOR}kl_loss_type"
    if not given.need(f"{ACTOR}use_kl_loss"):
        given.ignore("counts with use_kl_loss=True only, as in verl", coef, form)
        return {"algorithm.kl_loss_coef": 0.0}
    return {"algorithm.kl_loss_coef": given.need(coef), "algorithm.kl_loss_form": given.need(form)}


def _kl_reward(given: Given) -> Result:
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


def _filter(given: Given) -> Result:
    """DAPO's dynamic sampling. verl: max_num_gen_batches batches of gen_batch_size per step, 0 without limit."""
    name = "algorithm.filter_groups."
    if not given.need(f"{name}enable"):
        given.ignore("only read with filter_groups.enable", f"{name}metric", f"{name}max_num_gen_batches")
        return {"algorithm.filter_groups": False}
    metric = given.said(f"{name}metric")
    component = None if metric in ("score", "reward", "seq_reward", "seq_final_reward") else metric
    out: Result = {"algorithm.filter_groups": True, "algorithm.on_exhausted": "stop"}
    out["algorithm.filter_metric"] = component
    batches = given.said(f"{name}max_num_gen_batches")
    if not batches or batches < 0:
        without = "0 is without limit in verl; algorithm.max_draws_per_group bounds it here"
        given.ignore(without, f"{name}max_num_gen_batches")
        return out
    train, drawn = given.get("data.train_batch_size"), given.said("data.gen_batch_size")
    return out | {"algorithm.max_draws_per_group": float(batches * (drawn / train if drawn and train else 1))}


def _schedule(given: Given) -> Result:
    names = (f"{ACTOR}optim.", "optim.")
    steps_keys, ratio_keys = ([f"{n}lr_warmup_steps{end}" for n in names] for end in ("", "_ratio"))
    out: Result = {}
    lr = given.own("optim.lr", given.get(f"{ACTOR}optim.lr"))
    if lr is not None and "optim.lr" not in given.native:
        out["optim.lr"] = lr
    steps, ratio = given.first(*steps_keys), given.first(*ratio_keys)
    if steps is not None and steps > 0:
        given.ignore("lr_warmup_steps is given", *ratio_keys)
        out |= {"optim.warmup_steps": steps, "optim.warmup_ratio": 0.0}
    elif steps is not None or ratio is not None:
        out |= {"optim.warmup_steps": 0, "optim.warmup_ratio": ratio or 0.0}
    styles = ("lr_decay_style", "lr_scheduler_type", "lr_scheduler", "warmup_style")
    style = given.first(*(n + s for s in styles for n in names))
    if style is not None:
        out["optim.schedule"] = style
    floor, ratio_floor = given.first(*(f"{n}min_lr" for n in names)), given.first(f"{ACTOR}optim.min_lr_ratio")
    if floor is not None and not lr:
        raise ValueError(f"optim.min_lr={floor}: give optim.lr beside it, or optim.min_lr_ratio in its place")
    if floor is not None or ratio_floor is not None:
        out["optim.min_lr_ratio"] = ratio_floor if floor is None else floor / lr
    return out


def _eval(given: Given) -> Result:
    sampled, temperature = f"{ROLLOUT}val_kwargs.do_sample", f"{ROLLOUT}val_kwargs.temperature"
    if given.said(sampled) is False:
        if given.said(temperature, 0) != 0:
            other = f"{temperature}={given.said(temperature)}"
            raise ValueError(f"{sampled}=False is greedy, {other} is not: leave one of them out")
        return {"eval.temperature": 0.0}
    if temperature not in given.values:
        given.ignore(f"verl evaluates at temperature 0 unless {temperature} is given", sampled)
    return {"eval.temperature": given.need(temperature)}


def _eval_steps(given: Given) -> Result:
    every, publishes = given.get("trainer.test_freq"), given.said("rollout.test_freq")
    if publishes is not None:
        given.ignore("rollout.test_freq is given", "trainer.test_freq")
        every = publishes * (given.said("async_training.trigger_parameter_sync_step") or 1)
    on = every is not None and every > 0
    return {"run.eval_every_steps": every if on else 0, "run.eval_after": on}


def _overlong(given: Given) -> Result:
    prefixes = ("reward.reward_kwargs.", "reward_model.reward_kwargs.")
    names = ("overlong_buffer_cfg.len", "overlong_buffer_cfg.penalty_factor", "max_resp_len")
    if not given.first(*(f"{p}overlong_buffer_cfg.enable" for p in prefixes)):
        given.ignore("only read with overlong_buffer_cfg.enable", *(p + n for p in prefixes for n in names))
        return {"reward.overlong_buffer_tokens": 0}
    tokens, factor, budget = (given.first(*(p + name for p in prefixes)) for name in names)
    if tokens is None:
        fix = "give overlong_buffer_cfg.len, or reward.overlong_buffer_tokens"
        raise ValueError(f"overlong_buffer_cfg.enable=True: {fix}")
    limit = _limits(given)[1]
    if budget is not None and limit is not None and budget != limit:
        raise ValueError(f"reward_kwargs.max_resp_len={budget} is not the response limit {limit}: make them agree")
    return {"reward.overlong_buffer_tokens": tokens, "reward.overlong_penalty": 1.0 if factor is None else factor}


def _limits(given: Given) -> tuple[int | None, int | None]:
    """The limits of prompt and response, where this command line gives them."""
    prompt = given.own("data.max_prompt_tokens", given.first("data.max_prompt_length", f"{ROLLOUT}prompt_length"))
    answer = given.first("data.max_response_length", f"{ROLLOUT}response_length")
    return prompt, given.own("rollout.max_response_tokens", answer)


def _context(given: Given) -> Result:
    room = given.said(f"{ROLLOUT}max_model_len")
    prompt, answer = _limits(given)
    if room is not None and prompt is not None and answer is not None and room < prompt + answer:
        raise ValueError(
            f"{ROLLOUT}max_model_len={room} holds no prompt of {prompt} with a response of {answer} tokens: "
            "lower data.max_response_length"
        )
    given.ignore("the limits of prompt and response say it", f"{ROLLOUT}max_model_len")
    return {}


def _resume(given: Given) -> Result:
    mode, path = given.need("trainer.resume_mode"), given.said("trainer.resume_from_path")
    if mode == "path":
        if not path:
            raise ValueError("trainer.resume_mode=resume_path: give trainer.resume_from_path, or run.resume=PATH")
        return {"run.resume": path}
    given.ignore("counts with resume_mode=resume_path only, as in verl", "trainer.resume_from_path")
    return {"run.resume": mode}


def _directory(given: Given) -> Result:
    name = given.native.get("run.name", given.get("trainer.experiment_name"))
    folder = given.said("trainer.default_local_dir")
    if not folder:
        return {} if name is None else {"run.name": name}
    above, last = os.path.split(str(folder).rstrip("/"))
    if name is None or last == str(name):
        return {"run.root_dir": above or ".", "run.name": last}
    return {"run.root_dir": folder, "run.name": name}


def _logger(given: Given) -> Result:
    sinks = {"console": "console", "wandb": "wandb", "tensorboard": "tensorboard", "file": "jsonl"}
    said = given.said("trainer.logger")
    names = [str(n) for n in said] if isinstance(said, list) else [str(said)]
    missing = ", ".join(n for n in names if n not in sinks)
    kept = [sinks[n] for n in names if n in sinks] or ["jsonl"]
    if missing:
        given.ignore(f"{missing} not in this version; metrics go to {', '.join(kept)}", "trainer.logger")
    return {"track.sinks": kept}


def _async(given: Given) -> Result:
    """Legacy keys map one to one; V1 modes generate num_warmup_batches ahead, with partial rollout."""
    v1, partial_key = "trainer.v1.", "async_training.partial_rollout"
    bound_key = f"{v1}sampler.max_off_policy_threshold"
    staleness, partial = given.said("async_training.staleness_threshold"), given.said(partial_key)
    mode, bound = given.said(f"{v1}trainer_mode"), given.said(bound_key)
    if mode in ("colocate_async", "separate_async"):
        ahead = given.said(f"{v1}{mode}.num_warmup_batches", 1)
        if staleness not in (None, ahead):
            both = f"async_training.staleness_threshold={staleness} and {v1}trainer_mode={mode}"
            raise ValueError(f"{both} contradict each other")
        staleness, partial = ahead, True
    elif mode == "sync":
        staleness = staleness or 0
    if bound is not None and staleness is not None and bound < staleness:
        raise ValueError(f"{bound_key}={bound} is below the staleness {staleness}: lower num_warmup_batches")
    given.ignore("a bound that the staleness keeps", bound_key)
    out: Result = {} if staleness is None else {"pipeline.staleness": staleness}
    lag = given.own("pipeline.staleness", staleness)
    if partial is not None:
        out["pipeline.partial_rollout"] = bool(partial and lag)
        if partial and not lag:
            given.ignore("counts with staleness > 0 only, as in verl", partial_key)
    every = given.said("async_training.trigger_parameter_sync_step")
    return out if every is None else out | {"pipeline.sync_every": every}


_RULES = (
    *(_batch, _objective, _correction, _clip, _kl_loss, _kl_reward, _filter, _schedule),
    *(_eval, _eval_steps, _overlong, _context, _resume, _directory, _logger, _async),
)
JOINT: Mapping[str, Callable[[Given], Result]] = MappingProxyType({rule.__name__[1:]: rule for rule in _RULES})
"""By the name that the table has after its @."""
