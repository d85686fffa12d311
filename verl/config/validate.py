"""Everything that can be known to be wrong before anything expensive starts. Each fault is one line with the fix."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from verl.algorithms.presets import PREFERENCES, knobs, settled, unknown_option
from verl.config.model_files import check_tokenizer, find_model_folder, read_model_config, read_weight_headers
from verl.config.schema import Config
from verl.config.tree import nearest, values_of
from verl.data.files import expand_files

Command = Literal["train", "sft", "rm", "dpo", "eval", "generate"]
RL: Collection[str] = ("train",)
TRAINS: Collection[str] = ("train", "sft", "rm", "dpo")
SAMPLES: Collection[str] = ("train", "eval", "generate")


CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "model.dtype": ("auto", "bfloat16", "float32"),
        "model.device": ("auto", "cpu", "cuda"),
        "model.attention": ("auto", "padded"),
        "data.truncation": ("error", "left", "right", "middle"),
        "reward.stage": ("stream", "batch"),
        "preference.loss": tuple(PREFERENCES),
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
        "critic.warmup_steps": (0, math.inf),
        "preference.center_coef": (0, math.inf),
        "critic.weight_decay": (0, math.inf),
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
    "optim.eps",
    "optim.clip_grad_norm",
    "rollout.top_p",
    "eval.top_p",
    "reward.timeout_s",
    "sync.canary_tolerance",
)


ENGINE_OPTIONS: Mapping[str, tuple[str, ...]] = {"native": (), "hf": ()}


def validate(config: Config, command: Command = "train") -> None:
    """Refuse a configuration that cannot run: one ValueError with a line per fault."""
    found = [*_values(config), *_settings(config)]
    if not found:
        found += _sizes(config, command)
        if command in RL:
            found += [*_algorithm(config), *_pipeline(config), *_sampling(config)]
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


def _settings(config: Config) -> Iterator[str]:
    """algorithm.*: what the specs of the preset say of it."""
    a, known = config.algorithm, knobs()
    unknown = [name for name in a.options if not known.get(name)]
    yield from map(unknown_option, unknown)
    if not unknown:
        try:
            settled(a.name, a.given(), longest=config.rollout.max_response_tokens)
        except ValueError as exc:
            yield from str(exc).splitlines()


def _algorithm(config: Config) -> Iterator[str]:
    a = config.algorithm
    preset = settled(a.name, a.given())
    yield from preset.idle(a.given())
    if preset.group.least > 1 and a.advantage is None and config.step.samples_per_prompt == 1:
        yield f"step.samples_per_prompt=1: {a.name} compares the answers to one prompt; set at least 2 (8 is usual)"
    selects = preset.group_filter.filter_groups or preset.sample_filter is not None
    if config.reward.stage == "batch" and config.reward.model is not None and selects:
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
