"""Everything that can be known to be wrong before anything expensive starts. Each fault is one line with the fix."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from verl.config.model_files import check_tokenizer, find_model_folder, read_model_config, read_weight_headers
from verl.config.schema import Config
from verl.config.tree import nearest, values_of
from verl.data.files import expand_files

Command = Literal["train", "sft", "rm", "dpo", "eval", "generate"]
RL: Collection[str] = ("train",)
TRAINS: Collection[str] = ("train", "sft", "rm", "dpo")
SAMPLES: Collection[str] = ("train", "eval", "generate")


@dataclasses.dataclass(frozen=True, slots=True)
class AlgorithmFacts:
    """What sizes depend on, of a row of algorithms/table.py (which imports torch). A test holds the two together."""

    needs_group: bool
    kl_loss: bool = False
    kl_reward: bool = False
    needs_horizon: bool = False
    filters_groups: bool = False
    critic: bool = False
    baselines: int = 0


ALGORITHMS: Mapping[str, AlgorithmFacts] = MappingProxyType(
    {
        "grpo": AlgorithmFacts(True, kl_loss=True),
        "drgrpo": AlgorithmFacts(True, needs_horizon=True),
        "dapo": AlgorithmFacts(True, filters_groups=True),
        "rloo": AlgorithmFacts(True, kl_reward=True),
        "grpo_loo": AlgorithmFacts(True),
        "gspo": AlgorithmFacts(True),
        "gspo_token": AlgorithmFacts(True),
        "cispo": AlgorithmFacts(True),
        "sapo": AlgorithmFacts(True),
        "gmpo": AlgorithmFacts(True),
        "kl_cov": AlgorithmFacts(True),
        "clip_cov": AlgorithmFacts(True),
        "gdpo": AlgorithmFacts(True),
        "gpg": AlgorithmFacts(True),
        "opo": AlgorithmFacts(True),
        "pass_at_k": AlgorithmFacts(True),
        "otb": AlgorithmFacts(True),
        "remax": AlgorithmFacts(False, kl_reward=True, baselines=1),
        "reinforce_plus_plus": AlgorithmFacts(False, kl_reward=True),
        "reinforce_plus_plus_baseline": AlgorithmFacts(True, kl_loss=True),
        "reinforce": AlgorithmFacts(False),
        "ppo": AlgorithmFacts(False, kl_reward=True, critic=True),
        "vapo": AlgorithmFacts(False, critic=True),
        "pf_ppo": AlgorithmFacts(True, kl_reward=True, critic=True),
        "decoupled_ppo": AlgorithmFacts(True),
    }
)

ALGORITHM_OPTIONS: Collection[str] = (
    "ratio_max",
    "ratio_min",
    "tau_positive",
    "tau_negative",
    "cov_ratio",
    "cov_low",
    "cov_high",
    "cov_coef",
    "off_policy_delta",
    "leave_one_out",
    "scale_rewards",
    "reward_components",
    "reward_weights",
    "lam_critic",
    "length_adaptive_alpha",
    "positive_nll_coef",
    "selection",
    "kl_loss_ratio_corrected",
    "correction_level",
    "correction_low",
    "correction_high",
    "correction_batch_normalize",
    "correction_reject",
    "correction_denominator",
)
"""Fields of a row of algorithms/table.py that `algorithm.options` may set."""

CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "model.dtype": ("auto", "bfloat16", "float32"),
        "model.device": ("auto", "cpu", "cuda"),
        "model.attention": ("auto", "padded"),
        "data.truncation": ("error", "left", "right", "middle"),
        "algorithm.name": tuple(ALGORITHMS),
        "algorithm.aggregation": (
            "token-mean",
            "token-sum",
            "seq-mean-token-sum",
            "seq-mean-token-mean",
            "seq-mean-token-sum-norm",
        ),
        "algorithm.kl_loss_form": ("k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"),
        "algorithm.kl_reward_form": ("k1", "abs", "k2", "k3"),
        "algorithm.on_exhausted": ("stop", "smaller"),
        "algorithm.correction": ("truncate", "clamp", "icepop", "mask"),
        "reward.stage": ("stream", "batch"),
        "preference.loss": (
            "dpo",
            "cdpo",
            "dpo_norm",
            "ld_dpo",
            "robust",
            "hinge",
            "ipo",
            "apo_zero",
            "rpo",
            "rpo_sq",
            "rpo_bwd_kl",
            "rpo_fwd_kl",
            "orpo",
            "simpo",
            "cpo",
            "kto",
        ),
        "optim.schedule": ("constant", "linear", "cosine", "wsd"),
        "rollout.engine": ("native", "hf"),
        "rollout.dtype": ("auto", "float32", "bfloat16"),
        "sync.engine": ("local",),
        "track.sinks": ("console", "jsonl", "tensorboard", "wandb"),
    }
)

BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "run.total_steps": (1, math.inf),
        "run.total_epochs": (1, math.inf),
        "run.save_every_steps": (0, math.inf),
        "run.keep_last_checkpoints": (1, math.inf),
        "run.keep_every_steps": (0, math.inf),
        "run.eval_every_steps": (0, math.inf),
        "run.threads": (1, math.inf),
        "run.virtual_ranks": (1, math.inf),
        "rollout.replicas": (1, math.inf),
        "data.max_prompt_tokens": (1, math.inf),
        "data.max_rows": (1, math.inf),
        "data.max_eval_rows": (1, math.inf),
        "data.num_workers": (0, math.inf),
        "data.max_tokens_per_row": (2, math.inf),
        "algorithm.clip_low": (0, math.inf),
        "algorithm.clip_high": (0, math.inf),
        "algorithm.horizon_tokens": (1, math.inf),
        "algorithm.gamma": (0, 1),
        "algorithm.lam": (0, 1),
        "algorithm.critic_warmup_until": (0, 1),
        "algorithm.critic_warmup_steps": (0, math.inf),
        "critic.warmup_steps": (0, math.inf),
        "preference.center_coef": (0, math.inf),
        "critic.weight_decay": (0, math.inf),
        "algorithm.kl_loss_coef": (0, math.inf),
        "algorithm.kl_reward_coef": (0, math.inf),
        "algorithm.max_draws_per_group": (1, math.inf),
        "step.prompts_per_step": (1, math.inf),
        "step.samples_per_prompt": (1, math.inf),
        "step.updates_per_step": (1, math.inf),
        "step.epochs_per_step": (1, math.inf),
        "step.max_tokens_per_microbatch": (1, math.inf),
        "optim.weight_decay": (0, math.inf),
        "optim.warmup_steps": (0, math.inf),
        "optim.warmup_ratio": (0, 1),
        "optim.min_lr_ratio": (0, 1),
        "optim.max_skipped_updates": (0, math.inf),
        "rollout.temperature": (0, math.inf),
        "rollout.top_p": (0, 1),
        "rollout.top_k": (0, math.inf),
        "rollout.min_p": (0, 1),
        "rollout.max_response_tokens": (1, math.inf),
        "rollout.max_concurrent_sequences": (1, math.inf),
        "rollout.max_kv_tokens": (1, math.inf),
        "rollout.prefix_cache_tokens": (0, math.inf),
        "rollout.max_prefill_tokens": (1, math.inf),
        "pipeline.staleness": (0, math.inf),
        "pipeline.sync_every": (1, math.inf),
        "pipeline.oversample": (0, math.inf),
        "pipeline.max_attempts": (1, math.inf),
        "pipeline.max_invalid_share": (0, 1),
        "reward.memory_limit_mb": (1, math.inf),
        "reward.num_workers": (1, math.inf),
        "reward.max_calls_per_worker": (1, math.inf),
        "reward.overlong_buffer_tokens": (0, math.inf),
        "reward.overlong_penalty": (0, math.inf),
        "eval.samples_per_prompt": (1, math.inf),
        "eval.temperature": (0, math.inf),
        "eval.top_k": (0, math.inf),
        "eval.top_p": (0, 1),
        "eval.max_response_tokens": (1, math.inf),
        "sync.verify_first": (0, math.inf),
        "health.mismatch_stop": (0, math.inf),
        "health.mismatch_warn": (0, math.inf),
        "health.zero_variance_warn": (0, 1),
        "health.truncated_warn": (0, 1),
        "track.samples_per_step": (0, math.inf),
        "track.report_every_steps": (0, math.inf),
        "supervised.rows_per_step": (1, math.inf),
        "supervised.eval_rows": (0, math.inf),
    }
)
"""key -> (least, most), both allowed."""

POSITIVE = (
    "run.wait_timeout_s",
    "optim.lr",
    "critic.lr",
    "preference.beta",
    "critic.clip_grad_norm",
    "algorithm.value_clip",
    "optim.eps",
    "optim.clip_grad_norm",
    "rollout.top_p",
    "eval.top_p",
    "reward.timeout_s",
    "sync.canary_tolerance",
    "algorithm.kl_reward_target",
    "algorithm.kl_reward_horizon",
)


ENGINE_OPTIONS: Mapping[str, tuple[str, ...]] = {"native": ("num_speculative_tokens",), "hf": ()}


def validate(config: Config, command: Command = "train", *, needs_group: Callable[[str], bool] | None = None) -> None:
    """Refuse a configuration that cannot run: one ValueError with a line per fault.

    `needs_group`: whether an algorithm compares the samples of a prompt (default: as ALGORITHMS says).
    """
    found = [*_values(config)]
    if not found:
        found += _sizes(config, command)
        if command in RL:
            found += [*_algorithm(config, needs_group), *_pipeline(config), *_sampling(config)]
        found += [*_optimizer(config), *_reward(config), *_evaluation(config, command), *_names(config)]
        found += [*_files(config, command)]
    if found:
        raise ValueError("\n".join(found))


def _values(config: Config) -> Iterator[str]:
    """Each key by itself: known words, numbers within bounds."""
    for key, value in values_of(config).items():
        for word in value if isinstance(value, list) else [value]:
            if key in CHOICES and word is not None and word not in CHOICES[key]:
                yield _unknown_word(key, str(word))
        if value is None or not isinstance(value, int | float):
            continue
        least, most = BOUNDS.get(key, (-math.inf, math.inf))
        if key in POSITIVE and not 0 < value < math.inf:
            yield f"{key}={value}: must be > 0" + (" and finite" if value > 0 else "")
        elif not least <= value <= most:
            off = " (0 is off)" if least == 0 and value == -1 else ""
            yield f"{key}={value}: must be " + (
                f">= {least:g}{off}" if most == math.inf else f"from {least:g} to {most:g}"
            )
        elif isinstance(value, float) and not math.isfinite(value) and not key.startswith("health."):
            yield f"{key}={value}: must be finite"


def _unknown_word(key: str, word: str) -> str:
    if key == "rollout.engine" and word in ("vllm", "sglang", "trtllm"):
        return f"{key}={word}: not in this version; set {key}=native (in this process, on CPU or GPU) or hf"
    near = nearest(word, CHOICES[key], 1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{key}={word}: unknown; {hint}There are: {', '.join(CHOICES[key])}"


def _sizes(config: Config, command: Command) -> Iterator[str]:
    step, budget = config.step, config.step.max_tokens_per_microbatch
    if command in RL:
        prompt, answer = config.data.max_prompt_tokens, config.rollout.max_response_tokens
        if prompt + answer > budget:
            yield (
                f"step.max_tokens_per_microbatch={budget} is below the longest row, {prompt} prompt + {answer} response "
                f"tokens: set it to at least {prompt + answer}, or lower rollout.max_response_tokens"
            )
        if step.prompts_per_step % step.updates_per_step:
            yield (
                f"step.prompts_per_step={step.prompts_per_step} is not divisible by step.updates_per_step="
                f"{step.updates_per_step}: every update takes the same number of groups; use {_divisors(step.prompts_per_step)}"
            )
    elif command in TRAINS and config.data.max_tokens_per_row > budget:
        yield (
            f"step.max_tokens_per_microbatch={budget} is below the longest row, data.max_tokens_per_row="
            f"{config.data.max_tokens_per_row}: raise the first or lower the second"
        )
    kv = config.rollout.max_kv_tokens
    answer = max(config.rollout.max_response_tokens, config.eval.max_response_tokens or 0)
    longest = config.data.max_prompt_tokens + answer
    if command in SAMPLES and kv is not None and kv < longest:
        yield f"rollout.max_kv_tokens={kv} holds no sequence of {longest} tokens (prompt + response): raise it, or set null"


def _divisors(number: int) -> str:
    found = [d for d in range(1, number + 1) if number % d == 0][:8]
    return ", ".join(map(str, found))


def _algorithm(config: Config, needs_group: Callable[[str], bool] | None) -> Iterator[str]:
    a, facts = config.algorithm, ALGORITHMS[config.algorithm.name]
    group = facts.needs_group if needs_group is None else needs_group(a.name)
    if group and a.advantage is None and config.step.samples_per_prompt == 1:
        yield f"step.samples_per_prompt=1: {a.name} compares the answers to one prompt; set at least 2 (8 is usual)"
    if a.clip_dual is not None and a.clip_dual <= 1:
        yield f"algorithm.clip_dual={a.clip_dual}: dual clip needs a bound above 1 (verl: 3.0), or null for none"
    if a.clip_low is not None and a.clip_low >= 1 and a.name != "cispo":
        yield f"algorithm.clip_low={a.clip_low}: the ratio would be clipped at {1 - a.clip_low:g}; use a value below 1 (0.2 is usual)"
    by_horizon = a.aggregation == "seq-mean-token-sum-norm" or (a.aggregation is None and facts.needs_horizon)
    if by_horizon and a.horizon_tokens is None:
        yield (
            f"algorithm.horizon_tokens is missing: {a.aggregation or a.name} divides by a constant; set it to the longest "
            f"response, {config.rollout.max_response_tokens}"
        )
    if a.horizon_tokens is not None and not by_horizon:
        yield f"algorithm.horizon_tokens={a.horizon_tokens} does nothing here: it belongs to aggregation=seq-mean-token-sum-norm"
    kl = facts.kl_reward if a.kl_reward_coef is None else a.kl_reward_coef > 0
    if a.kl_reward_target is not None and not kl:
        yield "algorithm.kl_reward_target needs a start for its controller: set algorithm.kl_reward_coef (verl: 0.001)"
    if a.kl_reward_horizon is not None and a.kl_reward_target is None:
        yield "algorithm.kl_reward_horizon belongs to the adaptive controller: set algorithm.kl_reward_target, or leave it out"
    filters = facts.filters_groups if a.filter_groups is None else a.filter_groups
    for name in ("filter_metric", "max_draws_per_group"):
        if vars(a)[name] is not None and not filters:
            yield f"algorithm.{name}={vars(a)[name]} does nothing without algorithm.filter_groups=true: leave it out"
    if a.advantage is not None and not re.fullmatch(r"[\w.]+:\w+", a.advantage):
        yield f"algorithm.advantage={a.advantage}: write it as module:function"
    if a.loss is not None and not re.fullmatch(r"([\w.]+:)?\w+", a.loss):
        yield f"algorithm.loss={a.loss}: write it as module:function"
    for name in a.options:
        if name not in ALGORITHM_OPTIONS:
            near = nearest(name, ALGORITHM_OPTIONS)
            yield f"algorithm.options.{name}: unknown" + (
                f"; did you mean {' or '.join(near)}?" if near else f"; known: {', '.join(ALGORITHM_OPTIONS)}"
            )
    if a.name == "gdpo" and len(a.options.get("reward_components") or ()) < 2:
        yield "gdpo normalises reward components one by one: set algorithm.options.reward_components=[a,b] to keys of the reward's dict"
    if not facts.critic:
        for name in ("critic_warmup_steps", "critic_warmup_until"):
            if vars(a)[name]:
                yield f"algorithm.{name}={vars(a)[name]} does nothing: {a.name} has no critic (ppo, vapo and pf_ppo have)"
    if a.correction is not None and a.options.get("correction_high") is None:
        yield f"algorithm.correction={a.correction}: set algorithm.options.correction_high (truncate 2, icepop 5, mask 3)"
    if (
        config.reward.stage == "batch"
        and config.reward.model is not None
        and (filters or a.options.get("selection") or a.name == "pf_ppo")
    ):
        yield f"reward.stage=batch scores after groups are selected, but {a.name} selects by the score: reward.stage=stream"


def _pipeline(config: Config) -> Iterator[str]:
    p = config.pipeline
    if p.partial_rollout and p.staleness == 0:
        yield (
            "pipeline.partial_rollout=true at staleness 0: nothing is in flight when the weights are published; "
            "set pipeline.staleness (1 is one step off), or partial_rollout=false"
        )
    if Fraction(str(p.staleness)) * config.step.prompts_per_step * p.sync_every < 1 and p.staleness > 0:
        yield (
            f"pipeline.staleness={p.staleness:g} of {config.step.prompts_per_step} prompts is less than one group ahead: "
            "raise it, or set 0 for synchronous training"
        )


def _sampling(config: Config) -> Iterator[str]:
    r = config.rollout
    if r.temperature == 0:
        yield "rollout.temperature=0: greedy samples of a prompt are all equal, so there is nothing to learn from; use 1.0"
    for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if vars(r)[name] != off:
            yield (
                f"rollout.{name}={vars(r)[name]} truncates what is sampled, which the trainer cannot reproduce from its "
                f"logits: set rollout.{name}={off:g} (eval.* may truncate)"
            )
    if any(not word for word in r.stop):
        yield "rollout.stop holds an empty string, which ends every answer at once: leave it out"
    for name, value in r.engine_options.items():
        known = ENGINE_OPTIONS.get(r.engine, ())
        if name not in known:
            yield f"rollout.engine_options.{name}={value!r}: the {r.engine} engine's options are {', '.join(known) or 'none'}"
        elif type(value) is not int or not 0 <= value <= 64:
            yield f"rollout.engine_options.{name}={value!r}: a whole number from 0 to 64"


def _optimizer(config: Config) -> Iterator[str]:
    o = config.optim
    if len(o.betas) != 2 or not all(0 <= b < 1 for b in o.betas):
        yield f"optim.betas={o.betas}: two numbers from 0 to below 1, [0.9,0.999]"
    if not 0 < o.decay_ratio <= 1:
        yield f"optim.decay_ratio={o.decay_ratio:g}: the share of the run in which wsd decays, above 0 and at most 1"
    if o.warmup_steps and o.warmup_ratio:
        yield f"optim.warmup_steps={o.warmup_steps} and optim.warmup_ratio={o.warmup_ratio:g} both say it: leave one out"
    if config.health.mismatch_warn > config.health.mismatch_stop:
        yield (
            f"health.mismatch_warn={config.health.mismatch_warn:g} is above health.mismatch_stop="
            f"{config.health.mismatch_stop:g}: the run would stop before it warns"
        )


def _reward(config: Config) -> Iterator[str]:
    r = config.reward
    if r.overlong_buffer_tokens > config.rollout.max_response_tokens:
        yield (
            f"reward.overlong_buffer_tokens={r.overlong_buffer_tokens} is above rollout.max_response_tokens="
            f"{config.rollout.max_response_tokens}: it is the last part of that budget"
        )
    if r.path is not None and ("/" in r.path or r.path.endswith(".py")) and not Path(r.path).is_file():
        yield f"reward.path={r.path}: no such file; a Python file with `def {r.name}(data_source, solution_str, ground_truth, extra_info=None)`"
    if r.model is not None and not (Path(r.model).expanduser() / "config.json").is_file():
        yield f"reward.model={r.model}: no config.json there; give a folder that `verl rm` made (RUN/checkpoints/step_N/hf)"
    if r.stage == "batch" and r.model is not None and r.path is None and config.data.eval_files:
        yield "reward.stage=batch has no score for evaluations: reward.stage=stream, or reward.path for what they measure"
    if r.model is None and r.stage == "batch":
        yield "reward.stage=batch needs reward.model: function rewards are always scored as answers end"
    if not r.name.isidentifier():
        yield f"reward.name={r.name!r}: must be the name of a function in reward.path"


def _evaluation(config: Config, command: Command) -> Iterator[str]:
    run, files = config.run, config.data.eval_files
    if command not in TRAINS:
        return
    if run.eval_every_steps and not files:
        also = "" if run.keep_best is None else " and run.keep_best=null"
        yield f"run.eval_every_steps={run.eval_every_steps}: data.eval_files is empty; name a file, or set 0{also}"
    elif run.keep_best is not None and not run.eval_every_steps:
        yield f"run.keep_best={run.keep_best}: nothing is evaluated during the run; set run.eval_every_steps, or keep_best=null"
    elif run.keep_best is not None and not run.save_every_steps:
        yield f"run.keep_best={run.keep_best}: nothing is saved during the run; set run.save_every_steps"


def _names(config: Config) -> Iterator[str]:
    name = config.run.name
    if not name.strip() or Path(name).is_absolute() or ".." in Path(name).parts:
        yield f"run.name={name!r}: must be a folder name below run.root_dir"
    resume = config.run.resume
    if resume not in ("auto", "never") and not Path(resume).exists():
        near = nearest(resume, ("auto", "never"), 1)
        hint = f"did you mean {near[0]}? " if near else ""
        yield f"run.resume={resume}: no such checkpoint; {hint}It is auto, never or the path of a checkpoint"


def _files(config: Config, command: Command) -> Iterator[str]:
    needed = "eval_files" if command == "eval" else "train_files"
    if command != "generate" and not vars(config.data)[needed]:
        yield f"data.{needed} is empty: data.{needed}=[FILE.jsonl] (JSONL or Parquet, paths or URLs)"
    for key in ("train_files", "eval_files"):
        for file in vars(config.data)[key]:
            if "://" not in file:
                try:
                    expand_files([file])
                except ValueError as exc:
                    yield f"data.{key}: {exc}"
    template = config.model.chat_template
    if template is not None and not Path(template).is_file():
        yield f"model.chat_template={template}: no such file; it is a Jinja file that replaces the tokenizer's template"
    try:
        folder = find_model_folder(config.model.path)
        model = read_model_config(folder)
        read_weight_headers(folder)
        check_tokenizer(Path(config.model.tokenizer_path).expanduser() if config.model.tokenizer_path else folder)
    except ValueError as exc:
        yield str(exc)
        return
    text = model.get("text_config")
    room = (text if isinstance(text, dict) else model).get("max_position_embeddings")
    answer = max(config.rollout.max_response_tokens, config.eval.max_response_tokens or 0)
    longest = config.data.max_prompt_tokens + answer if command in SAMPLES else config.data.max_tokens_per_row
    if isinstance(room, int) and longest > room:
        what = (
            "data.max_prompt_tokens + rollout.max_response_tokens" if command in SAMPLES else "data.max_tokens_per_row"
        )
        yield f"{what} = {longest} is above the {room} positions of the model ({config.model.path}): lower it"
