"""Find all faults of a configuration that can be known before anything expensive starts. Each fault is one line with
its fix."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from verl.algorithms.presets import knobs, settled, unknown_option
from verl.algorithms.sections import POLICY, is_url, split_key
from verl.algorithms.specs import function
from verl.config.adapter import base_of, factors_alone, is_adapter, read_adapter
from verl.config.agent import agent_faults
from verl.config.backends import complete_options, longest_sequence
from verl.config.cluster import TRAINS, cluster_faults, roles_of_policy
from verl.config.image_models import image_model_faults
from verl.config.lora_layers import frozen_base_faults, lora_layer_faults, untrained, unused_lora
from verl.config.model_files import check_tokenizer, context_tokens, describe_model, find_model_folder
from verl.config.on_base import REWARD_MODEL
from verl.config.schema import Config
from verl.config.served import rollout_faults
from verl.config.tree import convert, leaves, text_of, values_of
from verl.data.files import expand_files
from verl.data.formats import FEEDBACK
from verl.data.user_dataset import parts_of
from verl.errors import Refused
from verl.model_engine.optimizer_table import faults as optimizer_faults
from verl.names import did_you_mean

Command = Literal["train", "sft", "rm", "dpo", "eval", "generate"]
RL: Collection[str] = ("train",)
SAMPLES: Collection[str] = ("train", "eval", "generate")


def validate(config: Config, command: Command = "train") -> None:
    """Raise one ValueError with a line per fault if the configuration cannot run."""
    found = [*_values(config), *_settings(config)]
    if not found:
        if command not in TRAINS:
            found, config = [*unused_lora(config, command)], untrained(config)
        found += _sizes(config, command)
        rules = (_algorithm, _teacher, _pipeline, _sampling)
        found += [line for rule in rules for line in rule(config)] if command in RL else []
        found += [*_optimizer(config), *_reward(config), *_evaluation(config, command), *_names(config)]
        found += [*_files(config, command), *cluster_faults(config, command)]
        found += rollout_faults(config, command) if command in SAMPLES else []
        found += agent_faults(config) if command in ("train", "eval") else []
    if found:
        raise Refused("\n".join(found))


def _values(config: Config) -> Iterator[str]:
    """Yield the faults of single keys. `load_config` checks them too, but the tree may have been changed since."""
    values = values_of(config)
    for key, value in values.items():
        try:
            convert(value, leaves()[key].hint)
        except ValueError as exc:
            yield f"{key}={value}: {exc}"
    yield from complete_options(values)


def _sizes(config: Config, command: Command) -> Iterator[str]:
    step, budget = config.step, config.step.max_tokens_per_microbatch
    if command in RL:
        prompt, answer = config.data.max_prompt_tokens, config.rollout.max_response_tokens
        if prompt + answer > budget:
            yield (
                f"step.max_tokens_per_microbatch={budget} is below the longest row, {prompt} prompt + {answer} "
                f"response tokens: set it to at least {prompt + answer}, or lower rollout.max_response_tokens"
            )
        prompts, updates, ranks = step.prompts_per_step, step.updates_per_step, config.cluster.virtual_ranks
        if prompts % updates:
            fix = f"every update takes the same number of groups; use {_divisors(prompts)}"
            yield f"step.prompts_per_step={prompts} is not divisible by step.updates_per_step={updates}: {fix}"
        if (groups := prompts // updates) % ranks:
            yield (
                f"cluster.virtual_ranks={ranks} does not divide the {groups} groups of an optimizer step "
                f"(step.prompts_per_step / step.updates_per_step): every rank takes as many; use {_divisors(groups)}"
            )
    elif command in TRAINS and config.data.max_tokens_per_row > budget:
        yield (
            f"step.max_tokens_per_microbatch={budget} is below the longest row, data.max_tokens_per_row="
            f"{config.data.max_tokens_per_row}: raise the first or lower the second"
        )
    if config.track.cluster_file is not None and command not in RL:
        yield f"track.cluster_file={config.track.cluster_file}: `verl {command}` is not predicted; leave it out"
    if config.cluster.backend == "torchrun" and command in SAMPLES:
        why = "nothing that samples runs without a controller"
        yield f"cluster.backend=torchrun: {why}; use ray (processes) or inproc for `verl {command}`"


def _divisors(number: int) -> str:
    return ", ".join([str(d) for d in range(1, number + 1) if number % d == 0][:8])


def _settings(config: Config) -> Iterator[str]:
    """Yield the faults of algorithm.* by the specs of the preset."""
    unknown = [name for name in config.algorithm.options if name not in knobs()]
    try:
        if not unknown:
            settled(config.algorithm.name, config.algorithm.given(), longest=config.rollout.max_response_tokens)
    except ValueError as exc:
        yield from str(exc).splitlines()
    yield from (unknown_option(name, text_of(config.algorithm.options[name])) for name in unknown)


def _algorithm(config: Config) -> Iterator[str]:
    a, given = config.algorithm, config.algorithm.given()
    preset = settled(a.name, given)
    yield from preset.idle(given)
    for key, path in (("algorithm.loss", a.loss), ("algorithm.advantage", a.advantage)):
        if path is not None and ":" in path:
            yield from _user_function(key, path)
    if preset.group.least > 1 and a.advantage is None and config.step.samples_per_prompt == 1:
        yield f"step.samples_per_prompt=1: {a.name} compares the answers to one prompt; set at least 2 (8 is usual)"
    if preset.group_filter.curriculum is not None and not config.data.shuffle:
        prefix = f"data.shuffle=false with algorithm.options.curriculum={preset.group_filter.curriculum}"
        yield f"{prefix}: the curriculum says which rows come, not their order; leave one of them out"
    if preset.stored_share() and config.pipeline.oversample:
        why = "the slowest groups are dropped, and stored answers never are: their share would grow; set 0"
        yield f"pipeline.oversample={config.pipeline.oversample:g} with algorithm.options.on_policy_share: {why}"
    if preset.truncation is not None and preset.truncation.measures and not config.reward.overlong_buffer_tokens:
        for key in sorted(given.keys() & {"overlong_tokens", "overlong_cap"}):
            prefix = f"algorithm.options.{key}={given[key]} does nothing without an overlong penalty"
            yield f"{prefix}: set reward.overlong_buffer_tokens"
    shapes = preset.truncation is not None and preset.truncation.shapes
    if config.reward.stage == "batch" and config.reward.model is not None and shapes:
        why = "it scales a score that the reward model has not given yet: reward.stage=stream"
        yield f"algorithm.options.stop_properly_coef with reward.stage=batch: {why}"
    selects = preset.group_filter.filter_groups or preset.group_filter.curriculum or preset.sample_filter is not None
    if config.reward.stage == "batch" and config.reward.model is not None and selects:
        yield f"reward.stage=batch scores after groups are selected, but {a.name} selects by score: reward.stage=stream"


def _user_function(key: str, path: str) -> Iterator[str]:
    try:
        if not callable(found := function(path, key)):
            yield f"{key}={path} is a {type(found).__name__}: give a function of columns"
    except ValueError as exc:
        yield str(exc)


def _teacher(config: Config) -> Iterator[str]:
    preset, t = settled(config.algorithm.name, config.algorithm.given()), config.teacher
    columns = {need.column for need in preset.needs(1) if need.role == "teacher"}
    named = {name: split_key(path)[0] for name, path in t.paths.items()}
    prefix = f"teacher.paths={text_of(named)}" if t.paths else f"teacher.path={split_key(t.path or 'null')[0]}"
    if not columns:
        prefix = f"teacher.hint_key={t.hint_key}" if t.hint_key is not None else prefix
        if t.path is not None or t.paths or t.hint_key is not None:
            fix = "set algorithm.name=opd, gkd or gkd_topk (or algorithm.options.divergence_coef), or leave it out"
            yield f"{prefix} does nothing with algorithm.name={config.algorithm.name}: {fix}"
        return
    if t.path is None and not t.paths:
        fix = "set teacher.path=FOLDER, a Hugging Face model with the policy's tokenizer"
        yield f"teacher.path is missing: {config.algorithm.name} learns from a teacher; {fix}"
        return
    yield from _together(config, columns)
    for path in t.folders().values():
        yield from _folder(config, columns, path)
    wanted = config.rollout.temperature if t.temperature is None else t.temperature
    for path in (split_key(path)[0] for path in t.roles().values() if is_url(path)):
        if "teacher_hidden" in columns:
            yield f"teacher.path={path}: a server gives no hidden states; set algorithm.name=gkd_topk or opd"
        if wanted != 1:
            why = f"servers score at temperature 1, and {wanted:g} is asked for"
            yield f"teacher.path={path}: {why}; set teacher.temperature=1"
    if t.path == POLICY and t.hint_key is None and t.temperature is None and not t.ema:
        fix = "it says what the policy says; give teacher.hint_key=COLUMN, which it reads and the policy does not"
        yield f"teacher.path={POLICY} without a hint: {fix}"
    if t.hint_key == FEEDBACK and preset.stored_share():
        why = "nobody says anything of a stored answer: leave algorithm.options.on_policy_share at 1"
        yield f"teacher.hint_key={FEEDBACK}: {why}"
    if config.parallel.tensor > 1 and "teacher_hidden" in columns:
        why = "compares whole rows of two heads, of which a rank would have a slice"
        fix = "use gkd_topk or opd, or parallel.tensor=1"
        yield f"parallel.tensor={config.parallel.tensor}: {config.algorithm.name} {why}; {fix}"


def _together(config: Config, columns: Collection[str]) -> Iterator[str]:
    """Yield the faults of several teachers, or of a policy that is its own teacher."""
    t, name = config.teacher, config.algorithm.name
    if t.path is not None and t.paths:
        yield f"teacher.path={t.path} beside teacher.paths: name it there, or leave one of them out"
    if strange := [n for n in t.paths if not re.fullmatch(r"\w+", n)]:
        yield f"teacher.paths.{strange[0]}: a name has letters, digits and _"
    if "teacher_hidden" in columns and (t.paths or t.path == POLICY):
        why = "compares with the head of one frozen model; set algorithm.name=gkd_topk or opd"
        yield f"teacher.{'paths' if t.paths else f'path={POLICY}'}: {name} {why}"
    if t.path == POLICY and "teacher_topk" in columns and t.top_k > (most := describe_model(config.model.path).vocab):
        yield f"teacher.top_k={t.top_k} is above the {most} tokens of {config.model.path}: lower it"
    if t.ema >= 1 and (t.ema == 1 or t.ema % 1):
        fix = "below 1 it is a decay, from 2 on a whole number of publishes after which the copy is taken anew"
        yield f"teacher.ema={t.ema:g}: {fix}"
    if t.ema and t.path != POLICY:
        yield f"teacher.ema={t.ema:g} is of the policy's weights: set teacher.path={POLICY}, or leave it out"
    if t.pick != "task" and not t.paths:
        yield f"teacher.pick={t.pick} does nothing with one teacher: give teacher.paths, or leave it out"
    if t.pick == "mix" and "teacher_topk" in columns:
        why = "each names other tokens, and of what it does not name there is no share to mix"
        yield f"teacher.pick=mix: {name} reads their likeliest tokens: {why}; set pick=task or best, or opd"
    if t.weights and t.pick != "mix":
        yield f"teacher.weights={text_of(t.weights)} does nothing with teacher.pick={t.pick}: set pick=mix"
    elif t.weights and ({*t.weights} != {*t.paths} or not all(0 < w < math.inf for w in t.weights.values())):
        yield f"teacher.weights={text_of(t.weights)}: give a number above 0 for each of {', '.join(t.paths)}"


def _folder(config: Config, columns: Collection[str], path: str) -> Iterator[str]:
    """Yield the reasons why the teacher in this folder cannot be used."""
    t, key = config.teacher, "teacher.path" if not config.teacher.paths else "teacher.paths"
    try:
        base = base_of(path, config.model.path)
        ours, theirs = describe_model(config.model.path).vocab, describe_model(base).vocab
        if base != path:
            read_adapter(Path(path), Path(base))
    except ValueError as exc:
        yield str(exc).replace("model.path=", f"{key}=") if path in str(exc) else str(exc)
        return
    prefix = f"{key}={path}"
    if columns == {"teacher_logprobs"}:
        if theirs < ours:
            yield f"{prefix}: its head has {theirs} tokens, the policy's {ours}: it has no log-prob of the last ones"
    elif theirs != ours:
        why = f"its head has {theirs} tokens, the policy's {ours}: ids of padding would count on one side alone"
        yield f"{prefix}: {why}; take one of the same size, or algorithm.name=opd, which reads the drawn tokens"
    if "teacher_topk" in columns and t.top_k > theirs:
        yield f"teacher.top_k={t.top_k} is above the {theirs} tokens of {path}: lower it, or algorithm.name=gkd"
    if (room := context_tokens(base)) is not None and room < longest_sequence(config):
        fix = "lower data.max_prompt_tokens or rollout.max_response_tokens"
        yield f"{prefix} was made for {room} tokens, and rows have up to {longest_sequence(config)}: {fix}"


def _pipeline(config: Config) -> Iterator[str]:
    p = config.pipeline
    if p.partial_rollout and p.staleness == 0:
        yield (
            "pipeline.partial_rollout=true at staleness 0: nothing is in flight when the weights are published; "
            "set pipeline.staleness (1 is one step off), or partial_rollout=false"
        )
    if p.placement == "colocated" and p.staleness > 0:
        yield (
            f"pipeline.placement=colocated with staleness={p.staleness:g}: rollout would sleep with requests in "
            "flight, and no engine here keeps them; set pipeline.placement=split, or staleness=0"
        )
    if Fraction(str(p.staleness)) * config.step.prompts_per_step * p.sync_every < 1 and p.staleness > 0:
        yield (
            f"pipeline.staleness={p.staleness:g} of {config.step.prompts_per_step} prompts is less than one group "
            "ahead: raise it, or set 0 for synchronous training"
        )


def _sampling(config: Config) -> Iterator[str]:
    r = config.rollout
    if r.temperature == 0:
        yield "rollout.temperature=0: greedy samples of a prompt are all equal: there is nothing to learn from; use 1.0"
    for name, value, off in (("top_p", r.top_p, 1), ("top_k", r.top_k, 0), ("min_p", r.min_p, 0)):
        if value != off:
            yield (
                f"rollout.{name}={value} truncates what is sampled, which the trainer cannot reproduce from its "
                f"logits: set rollout.{name}={off} (eval.* may truncate)"
            )
    if "" in r.stop:
        yield "rollout.stop holds an empty string, which ends every answer at once: leave it out"


def _optimizer(config: Config) -> Iterator[str]:
    o, h = config.optim, config.health
    yield from optimizer_faults(o.name, o.options, config.parallel.tensor)
    for name, of in (("optim", o), ("critic", config.critic)):
        if of.warmup_steps and of.warmup_ratio:
            both = f"{name}.warmup_steps={of.warmup_steps} and {name}.warmup_ratio={of.warmup_ratio:g}"
            yield f"{both} both say it: leave one out"
    if h.mismatch_warn > h.mismatch_stop:
        fix = "the run would stop before it warns"
        yield f"health.mismatch_warn={h.mismatch_warn:g} is above health.mismatch_stop={h.mismatch_stop:g}: {fix}"


def _reward(config: Config) -> Iterator[str]:
    r, answer = config.reward, config.rollout.max_response_tokens
    longest = config.algorithm.given().get("overlong_tokens")
    whole, key = (
        (answer, "rollout.max_response_tokens") if longest is None else (longest, "algorithm.options.overlong_tokens")
    )
    if isinstance(whole, int) and r.overlong_buffer_tokens > whole:
        prefix = f"reward.overlong_buffer_tokens={r.overlong_buffer_tokens} is above {key}={whole}"
        yield f"{prefix}: it is the last part of that length"
    file, name = r.grader()
    if ("/" in file or file.endswith(".py")) and not Path(file).is_file():
        signature = f"def {name}(data_source, solution_str, ground_truth, extra_info=None)"
        yield f"reward.path={r.path}: no such file; a Python file with `{signature}`"
    elif _is_no_module(file):
        yield f"reward.path={r.path}: no such file or module; FILE.py, or a module in the current folder or PYTHONPATH"
    if r.model is not None and not (Path(r.model).expanduser() / "config.json").is_file():
        yield from _no_reward_model(config, r.model)
    if r.stage == "batch" and r.model is None:
        yield "reward.stage=batch needs reward.model: function rewards are always scored as answers end"
    elif r.stage == "batch" and r.path is None and config.data.eval_files:
        yield "reward.stage=batch has no score for evaluations: reward.stage=stream, or reward.path for what they do"
    if not name.isidentifier():
        yield f"reward.path={r.path}: {name!r} is no name of a function; give FILE.py:function"


def _is_no_module(path: str) -> bool:
    """Return True if `path` is neither a file nor a module, as far as that is known without importing one."""
    top = path.removeprefix("pkg://").partition(".")[0]
    return not Path(path).is_file() and (not top.isidentifier() or find_spec(top) is None)


def _no_reward_model(config: Config, path: str) -> Iterator[str]:
    """Yield the reason why a folder without config.json is no reward model, if it is not an adapter on the policy's
    base."""
    try:
        if is_adapter(folder := find_model_folder(path, "reward.model")):
            factors_alone(folder, Path(base_of(path, config.model.path)), head=True)
    except ValueError as exc:
        yield str(exc).replace("model.path=", "reward.model=", 1)
        return
    if not is_adapter(folder):
        fix = "give a folder that `verl rm` made (RUN/checkpoints/step_N/hf)"
        yield f"reward.model={path}: no config.json there; {fix}"
    elif REWARD_MODEL not in roles_of_policy(config):
        why = "an adapter is read on the frozen base of a policy that trains LoRA on the same model, not offloaded"
        yield f"reward.model={path}: {why}; set model.lora.rank, or merge it: verl export {path} FOLDER --merge"


def _evaluation(config: Config, command: Command) -> Iterator[str]:
    run, best = config.run, f"run.keep_best={config.run.keep_best}"
    if command not in TRAINS:
        return
    if run.eval_every_steps and not config.data.eval_files:
        also = "" if run.keep_best is None else " and run.keep_best=null"
        yield f"run.eval_every_steps={run.eval_every_steps}: data.eval_files is empty; name a file, or set 0{also}"
    elif run.keep_best is not None and not run.eval_every_steps:
        yield f"{best}: nothing is evaluated during the run; set run.eval_every_steps, or keep_best=null"
    elif run.keep_best is not None and not run.save_every_steps:
        yield f"{best}: nothing is saved during the run; set run.save_every_steps"


def _names(config: Config) -> Iterator[str]:
    name, resume = config.run.name, config.run.resume
    for sink in ("wandb", "tensorboard"):
        if sink in config.track.sinks and find_spec(sink) is None:
            fix = f"pip install '.[{sink}]' in verl's folder, or leave it out"
            yield f"track.sinks has {sink}, which is not installed: {fix}"
    if not name.strip() or Path(name).is_absolute() or ".." in Path(name).parts:
        yield f"run.name={name!r}: must be a folder name below run.root_dir"
    if resume not in ("auto", "never") and not Path(resume).exists():
        near = did_you_mean(resume, ("auto", "never"))
        yield f"run.resume={resume}: no such checkpoint; {near}It is auto, never or the path of a checkpoint"


def _dataset_class(config: Config, command: Command) -> Iterator[str]:
    named = config.data.dataset_class
    if named is None:
        return
    path, *_ = (*parts_of(named), "")
    if not path:
        yield f"data.dataset_class={named}: give FILE.py:Class or module:Class"
    elif path.endswith(".py") and not Path(path).expanduser().is_file():
        yield f"data.dataset_class={named}: no such file; give FILE.py:Class"
    if command in ("dpo", "rm"):
        yield f"data.dataset_class={named}: `verl {command}` reads pairs of files alone; leave it out"


def _files(config: Config, command: Command) -> Iterator[str]:
    files = {"train_files": config.data.train_files, "eval_files": config.data.eval_files}
    needed = "eval_files" if command == "eval" else "train_files"
    if command != "generate" and not files[needed]:
        yield f"data.{needed} is empty: data.{needed}=[FILE.jsonl] (JSONL or Parquet, paths or URLs)"
    for key, names in files.items():
        for name in (n for n in names if "://" not in n):
            try:
                expand_files([name])
            except ValueError as exc:
                yield f"data.{key}: {exc} (from the recipe, unless it was given; data.{key}=[FILE, ...] is another)"
    yield from _dataset_class(config, command)
    model = config.model
    if model.chat_template is not None and not Path(model.chat_template).is_file():
        what = "it is a Jinja file that replaces the tokenizer's template"
        yield f"model.chat_template={model.chat_template}: no such file; {what}"
    try:
        room = describe_model(model.path, model.tokenizer_path).max_context_tokens
        check_tokenizer(find_model_folder(model.path), model.tokenizer_path)
    except ValueError as exc:
        yield str(exc)
        return
    if config.critic.path is not None and command in RL:
        try:
            find_model_folder(config.critic.path, "critic.path")
        except ValueError as exc:
            yield str(exc)
    what, longest = "data.max_tokens_per_row", config.data.max_tokens_per_row
    if command in SAMPLES:
        what, longest = "data.max_prompt_tokens + rollout.max_response_tokens", longest_sequence(config)
    if room is not None and longest > room:
        yield f"{what} = {longest} is above the {room} positions of the model ({model.path}): lower it"
    yield from image_model_faults(config, command, samples=command in SAMPLES)
    yield from frozen_base_faults(config, command)
    if command in TRAINS:
        yield from lora_layer_faults(config)
