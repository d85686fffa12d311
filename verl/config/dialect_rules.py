"""What several of verl's keys say together (`@name` in dialect.tsv): batch sizes, KL, clipping, schedules, async modes.

Each rule reads the given keys and returns values for our keys; a contradiction is a ValueError with the fix.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."


def same_value(value: Any, text: str) -> bool:
    """True if a parsed value is what `text` in the table stands for (0 and 0.0, None and null, True and true)."""
    if value is None or isinstance(value, bool):
        return text.lower() == {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        try:
            return float(text) == value
        except ValueError:
            return False
    return str(value).lower() == text.lower()


_NUMBERS = frozenset(
    {
        "train_batch_size",
        "gen_batch_size",
        "ppo_mini_batch_size",
        "require_batches",
        "total_rollout_steps",
        "len",
        "parameter_sync_step",
        "num_warmup_batches",
        "max_off_policy_threshold",
        "staleness_threshold",
        "test_freq",
        "lr",
        "trigger_parameter_sync_step",
        "max_model_len",
        "prompt_length",
        "response_length",
        "max_prompt_length",
        "min_lr",
        "max_response_length",
        "max_resp_len",
        "lr_warmup_steps",
        "lr_warmup_steps_ratio",
        "max_num_gen_batches",
    }
)
_SWITCHES = frozenset({"use_kl_loss", "use_kl_in_reward", "enable", "do_sample", "partial_rollout"})
"""Last components of the keys that the rules below compute with."""


def wrong_types(values: Mapping[str, Any]) -> list[str]:
    """A line for every value that a rule could not compute with. Null stands for a key that is not given."""
    found = []
    for key, value in values.items():
        name = key.rsplit(".", 1)[-1]
        if name in _SWITCHES and not isinstance(value, bool | None):
            found.append(f"{key}={value}: expected True or False")
        elif name in _NUMBERS and (isinstance(value, bool) or not isinstance(value, int | float | None)):
            found.append(f"{key}={value}: expected a number")
    return found


@dataclass(frozen=True)
class Given:
    """What one command line says. `values`: verl's keys; `native`: ours; `recipe_prompts`: the recipe's batch size."""

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    use_defaults: bool
    native: Mapping[str, Any]
    recipe_prompts: int | None
    ignored: dict[str, str] = field(default_factory=dict)
    """Keys that turned out to have no effect, with the reason."""

    def get(self, key: str) -> Any:
        """As given, else verl's default where those were asked for, else None."""
        return self.values[key] if key in self.values else self.defaults.get(key) if self.use_defaults else None

    def need(self, key: str) -> Any:
        """As given, else verl's default in any case: what the key means beside the given ones."""
        return self.values.get(key, self.defaults.get(key))

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


def _batch(given: Given) -> dict[str, Any]:
    """ppo_mini_batch_size counts prompts: updates_per_step = train_batch_size / ppo_mini_batch_size."""
    prompts = given.values.get("data.train_batch_size")
    if prompts is None and given.recipe_prompts is None:
        prompts = given.get("data.train_batch_size")
    mini = given.get(f"{ACTOR}ppo_mini_batch_size")
    batches = given.get("async_training.require_batches")
    out: dict[str, Any] = {}
    if prompts == 0 or (prompts is None and batches is not None):  # fully asynchronous scripts
        if mini is None:
            raise ValueError(
                "data.train_batch_size=0: give actor_rollout_ref.actor.ppo_mini_batch_size, or step.prompts_per_step"
            )
        prompts = mini * (batches or 1)
    if prompts is not None:
        out = {"step.prompts_per_step": prompts, "supervised.rows_per_step": prompts}
    prompts = given.own("step.prompts_per_step", given.recipe_prompts if prompts is None else prompts)
    if mini is not None:
        if prompts is None:
            raise ValueError(
                f"{ACTOR}ppo_mini_batch_size={mini} counts prompts: give data.train_batch_size beside it, "
                "or step.updates_per_step in its place"
            )
        if mini < 1 or prompts % mini:
            by_default = "" if f"{ACTOR}ppo_mini_batch_size" in given.values else " (verl's default)"
            raise ValueError(
                f"{ACTOR}ppo_mini_batch_size={mini}{by_default} does not divide the {prompts} prompts of a step "
                "(data.train_batch_size): choose a divisor, or give step.updates_per_step in its place"
            )
        out["step.updates_per_step"] = prompts // mini
    publishes = given.values.get("trainer.v1.separate_async.parameter_sync_step")
    if publishes is not None and out.get("step.updates_per_step", publishes) != publishes:
        raise ValueError(
            f"trainer.v1.separate_async.parameter_sync_step={publishes} is not train_batch_size / ppo_mini_batch_size"
            f" = {out['step.updates_per_step']}, as verl demands: make them agree"
        )
    rollouts = given.values.get("rollout.total_rollout_steps")
    if rollouts is not None:
        if prompts is None:
            raise ValueError(
                f"rollout.total_rollout_steps={rollouts} counts prompts: give run.total_steps in its place"
            )
        out["run.total_steps"] = max(1, rollouts // prompts)
    return out


_PRESETS: Mapping[str, str] = MappingProxyType(
    {
        "gae": "ppo",
        "grpo": "grpo",
        "grpo_vectorized": "grpo",
        "rloo": "rloo",
        "rloo_vectorized": "rloo",
        "remax": "remax",
        "opo": "opo",
        "gpg": "gpg",
        "grpo_passk": "pass_at_k",
        "gdpo": "gdpo",
        "optimal_token_baseline": "otb",
        "tir_optimal_token_baseline": "otb",
        "reinforce_plus_plus": "reinforce_plus_plus",
        "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    }
)
"""verl's adv_estimator with the vanilla loss -> our preset."""

_LOSSES: Mapping[str, str] = MappingProxyType(
    {
        "gspo": "gspo",
        "cispo": "cispo",
        "sapo": "sapo",
        "geo_mean": "gmpo",
        "clip_cov": "clip_cov",
        "kl_cov": "kl_cov",
        "gpg": "reinforce",
    }
)
"""verl's loss_mode -> our loss; but for gpg it is also the name of the preset that has GRPO's estimator."""


def critic_without_estimator(values: Mapping[str, Any], native: Mapping[str, Any]) -> list[str]:
    """Keys of a critic and no estimator are PPO, verl's default; to ignore them would train something else."""
    if (
        "algorithm.adv_estimator" in values
        or "algorithm.name" in native
        or not any(k.startswith("critic.") for k in values)
    ):
        return []
    return [
        "critic.* without algorithm.adv_estimator is PPO in verl: give algorithm.adv_estimator=gae (or grpo) beside it"
    ]


def _objective(given: Given) -> dict[str, Any]:
    """adv_estimator and loss_mode are one choice here: the preset, or the preset with another loss."""
    adv, loss = given.get("algorithm.adv_estimator"), given.get(f"{ACTOR}policy_loss.loss_mode")
    if adv is None and loss not in (None, "vanilla") and "algorithm.name" not in given.native:
        raise ValueError(
            f"{ACTOR}policy_loss.loss_mode={loss}: give algorithm.adv_estimator=grpo beside it, or algorithm.name={loss}"
        )
    out: dict[str, Any] = {}
    if adv is not None:
        if adv not in _PRESETS:
            raise ValueError(f"algorithm.adv_estimator={adv}: not in this version; there are {', '.join(_PRESETS)}")
        if loss not in (None, "vanilla", *_LOSSES):
            raise ValueError(
                f"{ACTOR}policy_loss.loss_mode={loss}: not in this version; there are vanilla, {', '.join(_LOSSES)} "
                "(your own: algorithm.loss=module:function)"
            )
        out["algorithm.name"] = preset = _PRESETS[adv]
        if loss in (None, "vanilla"):
            if preset in ("rloo", "remax", "gpg"):  # the presets are the papers' REINFORCE; verl clips
                out["algorithm.loss"] = "ppo_clip"
        elif preset == "grpo" and loss != "gpg":
            out["algorithm.name"] = _LOSSES[loss]
        else:
            out["algorithm.loss"] = _LOSSES[loss]
        if loss == "cispo":  # verl's cap is 1 + clip_ratio_high, its floor 1 - clip_ratio_low
            single = given.values.get(f"{ACTOR}clip_ratio")
            low, high = (
                given.need(f"{ACTOR}clip_ratio_{side}") if single is None else single for side in ("low", "high")
            )
            out |= {
                "algorithm.options.ratio_max": 1 + (0.2 if high is None else high),
                "algorithm.options.ratio_min": max(0.0, 1 - (0.2 if low is None else low)),
            }
    elif loss == "vanilla":
        given.ignore("the preset's own loss", f"{ACTOR}policy_loss.loss_mode")
    by_std = given.get("algorithm.norm_adv_by_std_in_grpo")
    if by_std is not None and _PRESETS.get(adv or "grpo") in ("grpo", "pass_at_k"):
        out["algorithm.normalize_by_std"] = by_std
    else:
        given.ignore("only GRPO reads it", "algorithm.norm_adv_by_std_in_grpo")
    return out


def _correction(given: Given) -> dict[str, Any]:
    """algorithm.rollout_correction. verl bounds its k1 statistics on sampler/trainer, ours are on trainer/sampler."""
    key = "algorithm.rollout_correction."
    level, threshold = given.values.get(f"{key}rollout_is"), given.values.get(f"{key}rollout_is_threshold", 2.0)
    out: dict[str, Any] = {}
    if level is not None:
        if level not in ("token", "sequence"):
            raise ValueError(f"{key}rollout_is={level}: must be token or sequence")
        bounds = _bounds(f"{key}rollout_is_threshold", threshold)
        out = {
            "algorithm.correction": "icepop" if len(bounds) == 2 else "truncate",
            "algorithm.options.correction_level": level,
            "algorithm.options.correction_high": bounds[-1],
            "algorithm.options.correction_batch_normalize": bool(
                given.values.get(f"{key}rollout_is_batch_normalize", False)
            ),
        }
        if len(bounds) == 2:
            out["algorithm.options.correction_low"] = bounds[0]
    else:
        given.ignore(
            "only read with rollout_correction.rollout_is",
            f"{key}rollout_is_threshold",
            f"{key}rollout_is_batch_normalize",
        )
    stats, limits = given.values.get(f"{key}rollout_rs"), given.values.get(f"{key}rollout_rs_threshold")
    if stats is not None:
        names, texts = str(stats).split(","), str(limits).split(",")
        if limits is None or len(texts) not in (1, len(names)):
            raise ValueError(f"{key}rollout_rs={stats}: give rollout_rs_threshold, one value or one for each")
        pairs = zip(names, texts * len(names) if len(texts) == 1 else texts)
        out["algorithm.options.correction_reject"] = [
            _rejected(f"{key}rollout_rs_threshold", n.strip(), t) for n, t in pairs
        ]
    else:
        given.ignore("only read with rollout_correction.rollout_rs", f"{key}rollout_rs_threshold")
    if given.values.get(f"{key}bypass_mode"):
        loss = given.values.get(f"{key}loss_type", "ppo_clip")
        if loss not in ("ppo_clip", "reinforce"):
            raise ValueError(f"{key}loss_type={loss}: must be ppo_clip or reinforce")
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


def _clip(given: Given) -> dict[str, Any]:
    """clip_ratio sets both sides; verl itself reads clip_ratio_low and _high only."""
    single = given.values.get(f"{ACTOR}clip_ratio")
    sides = {side: given.values.get(f"{ACTOR}clip_ratio_{side}") for side in ("low", "high")}
    for side, value in sides.items():
        if single is not None and value is not None and value != single:
            raise ValueError(
                f"{ACTOR}clip_ratio={single} and clip_ratio_{side}={value} contradict each other: leave clip_ratio out"
            )
    if single is None:
        return {
            f"algorithm.clip_{side}": v for side in sides if (v := given.get(f"{ACTOR}clip_ratio_{side}")) is not None
        }
    return {"algorithm.clip_low": single, "algorithm.clip_high": single}


_KL_FORMS: Mapping[str, str] = MappingProxyType(
    {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
)


def _kl_form(key: str, value: Any) -> str:
    name = str(value)
    if name.rstrip("+") not in _KL_FORMS:
        raise ValueError(f"{key}={value}: not in this version; there are {', '.join(_KL_FORMS)}, each also with +")
    return _KL_FORMS[name.rstrip("+")] + ("+" if name.endswith("+") else "")


def _kl_loss(given: Given) -> dict[str, Any]:
    if not given.need(f"{ACTOR}use_kl_loss"):
        given.ignore("counts with use_kl_loss=True only, as in verl", f"{ACTOR}kl_loss_coef", f"{ACTOR}kl_loss_type")
        return {"algorithm.kl_loss_coef": 0.0}
    form = _kl_form(f"{ACTOR}kl_loss_type", given.need(f"{ACTOR}kl_loss_type"))
    return {"algorithm.kl_loss_coef": given.need(f"{ACTOR}kl_loss_coef"), "algorithm.kl_loss_form": form}


def _kl_reward(given: Given) -> dict[str, Any]:
    ctrl = "algorithm.kl_ctrl."
    if not given.need("algorithm.use_kl_in_reward"):
        keys = ("algorithm.kl_penalty", *(ctrl + k for k in ("type", "kl_coef", "target_kl", "horizon")))
        given.ignore("counts with use_kl_in_reward=True only, as in verl", *keys)
        return {"algorithm.kl_reward_coef": 0.0}
    form = _kl_form("algorithm.kl_penalty", given.need("algorithm.kl_penalty")).rstrip("+")  # a reward has no gradient
    out: dict[str, Any] = {"algorithm.kl_reward_coef": given.need(f"{ctrl}kl_coef"), "algorithm.kl_reward_form": form}
    kind = given.need(f"{ctrl}type")
    if kind not in ("fixed", "adaptive"):
        raise ValueError(f"{ctrl}type={kind}: must be fixed or adaptive")
    if kind == "adaptive":
        return out | {
            "algorithm.kl_reward_target": given.need(f"{ctrl}target_kl"),
            "algorithm.kl_reward_horizon": given.need(f"{ctrl}horizon"),
        }
    given.ignore("counts with kl_ctrl.type=adaptive only, as in verl", f"{ctrl}target_kl", f"{ctrl}horizon")
    return out | {"algorithm.kl_reward_target": None, "algorithm.kl_reward_horizon": None}


def _filter(given: Given) -> dict[str, Any]:
    """DAPO's dynamic sampling. verl: max_num_gen_batches batches of gen_batch_size per step, 0 without limit."""
    name = "algorithm.filter_groups."
    if not given.need(f"{name}enable"):
        given.ignore("only read with filter_groups.enable", f"{name}metric", f"{name}max_num_gen_batches")
        return {"algorithm.filter_groups": False}
    metric = given.values.get(f"{name}metric")
    is_score = metric in ("score", "reward", "seq_reward", "seq_final_reward", None)
    out: dict[str, Any] = {"algorithm.filter_groups": True, "algorithm.on_exhausted": "stop"}
    out["algorithm.filter_metric"] = None if is_score else metric
    batches = given.values.get(f"{name}max_num_gen_batches")
    if not batches or batches < 0:
        given.ignore(
            "0 is without limit in verl; algorithm.max_draws_per_group bounds it here", f"{name}max_num_gen_batches"
        )
        return out
    train, drawn = given.get("data.train_batch_size"), given.values.get("data.gen_batch_size")
    return out | {"algorithm.max_draws_per_group": float(batches * (drawn / train if drawn and train else 1))}


def _schedule(given: Given) -> dict[str, Any]:
    names = (f"{ACTOR}optim.", "optim.")
    out: dict[str, Any] = {}
    lr = given.own("optim.lr", given.get(f"{ACTOR}optim.lr"))
    if lr is not None and "optim.lr" not in given.native:
        out["optim.lr"] = lr
    steps = given.first(*(f"{n}lr_warmup_steps" for n in names))
    ratio = given.first(*(f"{n}lr_warmup_steps_ratio" for n in names))
    if steps is not None and steps > 0:
        given.ignore("lr_warmup_steps is given", *(f"{n}lr_warmup_steps_ratio" for n in names))
        out |= {"optim.warmup_steps": steps, "optim.warmup_ratio": 0.0}
    elif steps is not None or ratio is not None:
        out |= {"optim.warmup_steps": 0, "optim.warmup_ratio": ratio or 0.0}
    styles = ("lr_decay_style", "lr_scheduler_type", "lr_scheduler", "warmup_style")
    style = given.first(*(n + s for s in styles for n in names))
    if style is not None:
        if style not in ("constant", "linear", "cosine"):
            raise ValueError(f"learning-rate schedule {style!r}: not in this version; constant, linear or cosine")
        out["optim.schedule"] = style
    floor = given.first(*(f"{n}min_lr" for n in names))
    ratio_floor = given.first(f"{ACTOR}optim.min_lr_ratio")
    if floor is not None and not lr:
        raise ValueError(f"optim.min_lr={floor}: give optim.lr beside it, or optim.min_lr_ratio in its place")
    if floor is not None or ratio_floor is not None:
        out["optim.min_lr_ratio"] = ratio_floor if floor is None else floor / lr
    return out


def _eval(given: Given) -> dict[str, Any]:
    greedy, temperature = f"{ROLLOUT}val_kwargs.do_sample", f"{ROLLOUT}val_kwargs.temperature"
    if given.values.get(greedy) is False and given.values.get(temperature, 0) != 0:
        raise ValueError(
            f"{greedy}=False is greedy, {temperature}={given.values[temperature]} is not: leave one of them out"
        )
    if temperature not in given.values and given.values.get(greedy) is True:
        given.ignore(f"verl evaluates at temperature 0 unless {temperature} is given", greedy)
    value = given.need(temperature)
    return {"eval.temperature": 0.0 if given.values.get(greedy) is False else value}


def _eval_steps(given: Given) -> dict[str, Any]:
    every = given.get("trainer.test_freq")
    publishes = given.values.get("rollout.test_freq")
    if publishes is not None:
        given.ignore("rollout.test_freq is given", "trainer.test_freq")
        every = publishes * (given.values.get("async_training.trigger_parameter_sync_step") or 1)
    if every is None or every <= 0:
        return {"run.eval_every_steps": 0, "run.eval_after": False}
    return {"run.eval_every_steps": every, "run.eval_after": True}


def _overlong(given: Given) -> dict[str, Any]:
    def pick(name: str) -> Any:
        return given.first(f"reward.reward_kwargs.{name}", f"reward_model.reward_kwargs.{name}")

    tokens, factor, budget = (
        pick("overlong_buffer_cfg.len"),
        pick("overlong_buffer_cfg.penalty_factor"),
        pick("max_resp_len"),
    )
    if not pick("overlong_buffer_cfg.enable"):
        for prefix in ("reward.reward_kwargs.", "reward_model.reward_kwargs."):
            names = ("overlong_buffer_cfg.len", "overlong_buffer_cfg.penalty_factor", "max_resp_len")
            given.ignore("only read with overlong_buffer_cfg.enable", *(prefix + n for n in names))
        return {"reward.overlong_buffer_tokens": 0}
    if tokens is None:
        raise ValueError(
            "overlong_buffer_cfg.enable=True: give overlong_buffer_cfg.len, or reward.overlong_buffer_tokens"
        )
    limit = _limits(given)[1]
    if budget is not None and limit is not None and budget != limit:
        raise ValueError(f"reward_kwargs.max_resp_len={budget} is not the response limit {limit}: make them agree")
    return {"reward.overlong_buffer_tokens": tokens, "reward.overlong_penalty": 1.0 if factor is None else factor}


def _limits(given: Given) -> tuple[int | None, int | None]:
    """The limits of prompt and response, where this command line gives them."""
    prompt = given.own("data.max_prompt_tokens", given.first("data.max_prompt_length", f"{ROLLOUT}prompt_length"))
    answer = given.first("data.max_response_length", f"{ROLLOUT}response_length")
    return prompt, given.own("rollout.max_response_tokens", answer)


def _context(given: Given) -> dict[str, Any]:
    room = given.values.get(f"{ROLLOUT}max_model_len")
    prompt, answer = _limits(given)
    if room is not None and prompt is not None and answer is not None and room < prompt + answer:
        raise ValueError(
            f"{ROLLOUT}max_model_len={room} holds no prompt of {prompt} with a response of {answer} tokens: "
            "lower data.max_response_length"
        )
    given.ignore("the limits of prompt and response say it", f"{ROLLOUT}max_model_len")
    return {}


def _resume(given: Given) -> dict[str, Any]:
    mode, path = given.need("trainer.resume_mode"), given.values.get("trainer.resume_from_path")
    if mode == "resume_path":
        if not path:
            raise ValueError("trainer.resume_mode=resume_path: give trainer.resume_from_path, or run.resume=PATH")
        return {"run.resume": path}
    given.ignore("counts with resume_mode=resume_path only, as in verl", "trainer.resume_from_path")
    if mode not in ("auto", "disable"):
        raise ValueError(f"trainer.resume_mode={mode}: must be auto, disable or resume_path")
    return {"run.resume": "auto" if mode == "auto" else "never"}


def _directory(given: Given) -> dict[str, Any]:
    name = given.native.get("run.name", given.get("trainer.experiment_name"))
    folder = given.values.get("trainer.default_local_dir")
    out: dict[str, Any] = {} if name is None else {"run.name": name}
    if not folder:
        return out
    above, last = os.path.split(str(folder).rstrip("/"))
    if name is None or last == str(name):
        return {"run.root_dir": above or ".", "run.name": last}
    return out | {"run.root_dir": folder}


def _logger(given: Given) -> dict[str, Any]:
    sinks = {"console": "console", "wandb": "wandb", "tensorboard": "tensorboard", "file": "jsonl"}
    said = given.values["trainer.logger"]
    names = [str(n) for n in said] if isinstance(said, list) else [str(said)]
    missing = [n for n in names if n not in sinks]
    kept = [sinks[n] for n in names if n in sinks]
    if missing:
        given.ignore(
            f"{', '.join(missing)} not in this version; metrics go to {', '.join(kept or ['jsonl'])}", "trainer.logger"
        )
    return {"track.sinks": kept or ["jsonl"]}


def _async(given: Given) -> dict[str, Any]:
    """Legacy keys map one to one; V1 modes generate num_warmup_batches ahead, with partial rollout."""
    v1, out = "trainer.v1.", dict[str, Any]()
    staleness = given.values.get("async_training.staleness_threshold")
    partial = given.values.get("async_training.partial_rollout")
    mode = given.values.get(f"{v1}trainer_mode")
    if mode not in (None, "sync", "colocate_async", "separate_async"):
        raise ValueError(f"{v1}trainer_mode={mode}: must be sync, colocate_async or separate_async")
    if mode in ("colocate_async", "separate_async"):
        ahead = given.values.get(f"{v1}{mode}.num_warmup_batches", 1)
        if staleness not in (None, ahead):
            raise ValueError(
                f"async_training.staleness_threshold={staleness} and {v1}trainer_mode={mode} contradict each other"
            )
        staleness, partial = ahead, True
    elif mode == "sync":
        staleness = staleness or 0
    if staleness is not None:
        out["pipeline.staleness"] = staleness
    bound = given.values.get(f"{v1}sampler.max_off_policy_threshold")
    if bound is not None and staleness is not None and bound < staleness:
        raise ValueError(
            f"{v1}sampler.max_off_policy_threshold={bound} is below the staleness {staleness}: lower num_warmup_batches"
        )
    given.ignore("a bound that the staleness keeps", f"{v1}sampler.max_off_policy_threshold")
    lag = given.own("pipeline.staleness", staleness)
    if partial is not None:
        out["pipeline.partial_rollout"] = bool(partial and lag)
        if partial and not lag:
            given.ignore("counts with staleness > 0 only, as in verl", "async_training.partial_rollout")
    every = given.values.get("async_training.trigger_parameter_sync_step")
    return out if every is None else out | {"pipeline.sync_every": every}


JOINT: Mapping[str, Callable[[Given], dict[str, Any]]] = MappingProxyType(
    {
        "batch": _batch,
        "objective": _objective,
        "correction": _correction,
        "clip": _clip,
        "kl_loss": _kl_loss,
        "kl_reward": _kl_reward,
        "filter": _filter,
        "schedule": _schedule,
        "eval": _eval,
        "eval_steps": _eval_steps,
        "overlong": _overlong,
        "context": _context,
        "resume": _resume,
        "directory": _directory,
        "logger": _logger,
        "async": _async,
    }
)
