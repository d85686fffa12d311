"""Rules that map several of verl's keys together (`@name` in table.tsv): batch sizes, lengths, evaluation, async modes.

Each rule reads the given keys and returns values for our keys. For contradictory keys it raises ValueError with the
fix.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import yaml

from verl.bounds import bounded_yaml
from verl.config.backends import ROLLOUT as ROLLOUT_ENGINES
from verl.config.backends import SYNC, import_object, traits_of
from verl.config.compat import layout, lora, objective, optimizer
from verl.config.compat.given import ACTOR, ROLLOUT, Given, Result
from verl.config.model_files import context_tokens
from verl.errors import Refused

KWARGS, BACKEND = f"{ROLLOUT}engine_kwargs.", f"{ROLLOUT}checkpoint_engine.backend"
BUCKET = f"{ROLLOUT}checkpoint_engine.update_weights_bucket_megabytes"
TURNS = f"{ROLLOUT}multi_turn."


def _rollout_engine(given: Given) -> Result:
    """Map the rollout engine. If it is not installed, a CPU run uses ours, which samples the same policy. On a machine
    with GPUs ours would be much slower, so the user must allow it."""
    key, fallback = f"{ROLLOUT}name", "rollout.fallback"
    name = given.value(key)
    engine, here = layout.engine_of_rollout(given)
    known = {own: f"{ROLLOUT}{of}" for of, own in traits_of(engine).public_keys.items()}
    options = {own: given.value(of) for own, of in known.items()}
    have: dict[str, list[str]] = {}
    for server in ROLLOUT_ENGINES:
        for of in traits_of(server).public_keys:
            have.setdefault(f"{ROLLOUT}{of}", []).append(server)
    for of in (of for of in have if of not in known.values()):
        given.ignore(f"rollout.engine={engine} has no such choice; rollout.engine={' or '.join(have[of])} has", of)
    for kwarg in (key for key in given.values if key.startswith(KWARGS) and given.reads(key, "rollout_engine")):
        owner, _, option = kwarg.removeprefix(KWARGS).partition(".")
        if owner != engine or given.value(kwarg) is None:
            why = f"read by rollout.engine={owner}" if owner != engine else "has no effect at null"
            given.ignore(why, kwarg)
            continue
        own = {field.name for field in fields(import_object(ROLLOUT_ENGINES[engine].options))}
        options[option if option in own else f"args.{option}"] = given.value(kwarg)
    options = {f"rollout.engine_options.{own}": value for own, value in options.items() if value is not None}
    if here:
        given.ignore("only read beside a rollout.name that is not here", fallback)
        return options if name is None else {"rollout.engine": name, **options}
    allowed = given.value(fallback)
    brings = "rollout.python=ENVIRONMENT/bin/python brings it (docs/engines.md); " if name in ROLLOUT_ENGINES else ""
    if allowed == "none":
        raise Refused(f"{key}={name}: it is not here, and rollout.fallback=none refuses the native engine for it")
    if allowed is None and (gpus := layout.local_gpus()):
        fix = "rollout.fallback=native runs the native engine in its place"
        raise Refused(f"{key}={name}: it is not here, and this machine has GPUs ({gpus}): {brings}{fix}")
    given.remarks[key] = (
        f"{name} is not here: the native engine runs in its place; {brings}rollout.fallback=none refuses that"
    )
    return {"rollout.engine": "native"}


def _sync(given: Given) -> Result:
    """Map the transport of weights. All transports deliver the same weights, so one that is not installed is left
    out."""
    ways = {"naive": "local", "nccl": "collective", "nixl": "nixl"}
    backend, bucket, found = str(given.value(BACKEND)), given.value(BUCKET), dict[str, object]()
    if bucket is not None and given.native.get("sync.engine") in ("shm", "tcp"):
        found["sync.engine_options.bucket_mb"] = bucket
    elif bucket is not None:
        given.ignore(
            "whole versions lie where replicas find them; sync.engine=shm or tcp lets them pass through buckets", BUCKET
        )
    if given.value(BACKEND) is None:
        return found
    if backend not in ways:
        given.ignore(f"there is no such transport: sync.engine is one of {', '.join(SYNC)}", BACKEND)
    elif backend != "naive" and not layout.over_ray(given):
        given.ignore("weights stay in one process, or go to a server by the way that it reads", BACKEND)
    else:
        cuda = layout.local_gpus() > 0 and given.native.get("model.device", "auto") != "cpu"
        more = {"sync.engine_options.backend": "nccl"} if backend == "nccl" and cuda else {}
        return {"sync.engine": ways[backend], **more, **found}
    return found


def _batch(given: Given) -> Result:
    """Map the batch sizes. ppo_mini_batch_size counts prompts: updates_per_step = train_batch_size / it."""
    mini_key, publishes_key = f"{ACTOR}ppo_mini_batch_size", "trainer.v1.separate_async.parameter_sync_step"
    prompts = given.value("data.train_batch_size")
    if prompts is None and given.recipe_prompts is None:
        prompts = given.get("data.train_batch_size")
    mini, batches = given.get(mini_key), given.get("async_training.require_batches")
    if prompts == 0 or (prompts is None and batches is not None):  # fully asynchronous scripts
        if mini is None and given.own("step.prompts_per_step") is None:
            raise Refused(f"data.train_batch_size=0: give {mini_key}, or step.prompts_per_step")
        prompts = None if mini is None else mini * (batches or 1)
    out = {} if prompts is None else {"step.prompts_per_step": prompts}
    prompts = given.own("step.prompts_per_step", given.recipe_prompts if prompts is None else prompts)
    if mini is not None:
        if prompts is None:
            beside = "give data.train_batch_size beside it, or step.updates_per_step in its place"
            raise Refused(f"{mini_key}={mini} counts prompts: {beside}")
        if mini < 1 or prompts % mini:
            by_default = "" if mini_key in given.values else " (verl's default)"
            raise Refused(
                f"{mini_key}={mini}{by_default} does not divide the {prompts} prompts of a step "
                "(data.train_batch_size): choose a divisor, or give step.updates_per_step in its place"
            )
        out["step.updates_per_step"] = prompts // mini
    publishes = given.value(publishes_key)
    if publishes is not None and out.get("step.updates_per_step", publishes) != publishes:
        wanted = f"train_batch_size / ppo_mini_batch_size = {out['step.updates_per_step']}"
        raise Refused(f"{publishes_key}={publishes} is not {wanted}, as verl demands: make them agree")
    rollouts = given.value("rollout.total_rollout_steps")
    if rollouts is not None:
        if prompts is None:
            raise Refused(f"rollout.total_rollout_steps={rollouts} counts prompts: give run.total_steps instead")
        out["run.total_steps"] = max(1, rollouts // prompts)
    steps, steps_key = given.value("trainer.total_training_steps"), "trainer.total_training_steps"
    if steps is not None:  # the run ends with the first of the two, as in verl
        out["run.total_steps"] = min(steps, out.get("run.total_steps", steps))
        if rollouts is not None:
            given.remarks[steps_key] = given.remarks["rollout.total_rollout_steps"] = "the smaller of the two ends it"
    elif steps_key in given.values and rollouts is None:
        out["run.total_steps"] = None
    return out


def _tokens(given: Given) -> Result:
    """Map the tokens of a micro-batch. verl counts them per device of a sequence parallel group; we count whole
    rows."""
    keys = (f"{ACTOR}ppo_max_token_len_per_gpu", "data.max_token_len_per_gpu")
    budget = given.first(*keys)
    groups = [n for key in layout.SEQUENCE if isinstance(n := given.values.get(key), int) and n > 1]
    if budget is None:
        return {}
    prompt, answer = _limits(given)
    rows = (0 if prompt is None or answer is None else prompt + answer, given.own("data.max_tokens_per_row", 0))
    longest = max(*rows, given.value("data.max_length") or 0)
    total = int(budget * max(groups, default=1))
    for key in keys if longest > total else ():
        given.remarks[key] = "the longest row: a sequence is never split here"
    return {"step.max_tokens_per_microbatch": max(total, longest)}


def _eval(given: Given) -> Result:
    sampled, temperature = f"{ROLLOUT}val_kwargs.do_sample", f"{ROLLOUT}val_kwargs.temperature"
    if given.value(sampled) is False:
        if given.value(temperature, 0) != 0:
            other = f"{temperature}={given.value(temperature)}"
            raise Refused(f"{sampled}=False is greedy, {other} is not: leave one of them out")
        return {"eval.temperature": 0.0}
    if temperature not in given.values:
        given.ignore(f"verl evaluates at temperature 0 unless {temperature} is given", sampled)
    return {"eval.temperature": given.need(temperature)}


def _eval_steps(given: Given) -> Result:
    key, publishes = "trainer.test_freq", given.value("rollout.test_freq")
    every = given.get(key)
    if publishes is not None:
        given.ignore("rollout.test_freq is given", key)
        every = publishes * (given.value("async_training.trigger_parameter_sync_step") or 1)
    elif every == "after_each_epoch":
        given.remarks[key] = "at the end of the run only: run.eval_every_steps=N for more"
        return {"run.eval_every_steps": 0, "run.eval_after": True}
    elif every is True or isinstance(every, str):
        raise Refused(f"{key}={every}: expected a number, or after_each_epoch")
    on = every is not None and every > 0
    return {"run.eval_every_steps": every if on else 0, "run.eval_after": on}


_OLD_BUFFERS = ("reward_model.overlong_buffer.", "custom_reward_function.overlong_buffer.")
"""The sections in which older DAPO scripts have the settings of the overlong buffer."""


def _overlong(given: Given) -> Result:
    prefixes = (*(f"{of}.reward_kwargs.overlong_buffer_cfg." for of in ("reward", "reward_model")), *_OLD_BUFFERS)
    names, limits = (
        ("len", "penalty_factor"),
        tuple(f"{of}.reward_kwargs.max_resp_len" for of in ("reward", "reward_model")),
    )
    if not given.first(*(f"{p}enable" for p in prefixes)):
        given.ignore("only read with overlong_buffer_cfg.enable", *(p + n for p in prefixes for n in names), *limits)
        return {"reward.overlong_buffer_tokens": 0}
    tokens, factor = (given.first(*(p + name for p in prefixes)) for name in names)
    budget = given.first(*limits)
    if tokens is None:
        on = next(p for p in prefixes if f"{p}enable" in given.values)
        raise Refused(f"{on}enable=True: give {on}len, or reward.overlong_buffer_tokens")
    limit = _limits(given)[1]
    out: Result = {
        "reward.overlong_buffer_tokens": tokens,
        "reward.overlong_penalty": 1.0 if factor is None else factor,
    }
    if budget is not None and limit is not None and budget != limit:  # verl's penalty grows beyond that length
        out |= {"algorithm.options.overlong_tokens": budget, "algorithm.options.overlong_cap": False}
    return out


def _limits(given: Given) -> tuple[int | None, int | None]:
    """Return the limits of prompt and response on this command line."""
    prompt = given.own("data.max_prompt_tokens", given.first("data.max_prompt_length", f"{ROLLOUT}prompt_length"))
    answer = given.first("data.max_response_length", f"{ROLLOUT}response_length")
    return prompt, given.own("rollout.max_response_tokens", answer)


def _context(given: Given) -> Result:
    room = given.value(f"{ROLLOUT}max_model_len")
    prompt, answer = _limits(given)
    if room is not None and prompt is not None and answer is not None and room < prompt + answer:
        raise Refused(
            f"{ROLLOUT}max_model_len={room} holds no prompt of {prompt} with a response of {answer} tokens: "
            "lower data.max_response_length"
        )
    given.ignore("the limits of prompt and response say it", f"{ROLLOUT}max_model_len")
    return {}


def _positions(given: Given) -> Result:
    """Refuse more positions than the model has. Fewer positions do not change what the model computes."""
    prefix = "actor_rollout_ref.model.override_config."
    path = given.native.get("model.path", given.get("actor_rollout_ref.model.path"))
    has = context_tokens(str(path))
    for key in (f"{prefix}max_position_embeddings", f"{prefix}model_config.max_position_embeddings"):
        wanted = given.value(key)
        if wanted is not None and has is not None and wanted > has:
            raise Refused(f"{key}={wanted}: {path} has {has}; edit config.json in a copy of the model folder")
        given.ignore("config.json of the model says it", key)
    return {}


def _freeze(given: Given) -> Result:
    """Map freeze_vision_tower. What verl freezes contains the projector."""
    return {"model.freeze": ["vision", "projector"]} if given.value(f"{ACTOR}freeze_vision_tower") else {}


def _resume(given: Given) -> Result:
    mode, path = given.need("trainer.resume_mode"), given.value("trainer.resume_from_path")
    if mode == "path":
        if not path:
            raise Refused("trainer.resume_mode=resume_path: give trainer.resume_from_path, or run.resume=PATH")
        return {"run.resume": path}
    given.ignore("counts with resume_mode=resume_path only, as in verl", "trainer.resume_from_path")
    return {"run.resume": mode}


def _directory(given: Given) -> Result:
    name = given.native.get("run.name", given.get("trainer.experiment_name"))
    folder = given.value("trainer.default_local_dir")
    if not folder:
        return {} if name is None else {"run.name": name}
    above, last = os.path.split(str(folder).rstrip("/"))
    if name is None or last == str(name):
        return {"run.root_dir": above or ".", "run.name": last}
    return {"run.root_dir": folder, "run.name": name}


def _logger(given: Given) -> Result:
    sinks = {"console": "console", "wandb": "wandb", "tensorboard": "tensorboard", "file": "jsonl"}
    found = given.value("trainer.logger")
    names = [str(n) for n in found] if isinstance(found, list) else [str(found)]
    absent = {n: "is not installed" for n in names if n in ("wandb", "tensorboard") and find_spec(n) is None}
    absent |= {n: "is not in this version" for n in names if n not in sinks}
    kept = [sinks[n] for n in names if n not in absent] or ["jsonl"]
    if absent:
        found = ", ".join(f"{name} {why}" for name, why in absent.items())
        given.remarks["trainer.logger"] = f"{found}: metrics go to {', '.join(kept)}"
    return {"track.sinks": kept}


def _reward_model(given: Given) -> Result:
    """Map the reward model. Without a custom function it is the reward. With one it is refused, since verl gives the
    function the address of a server with the model."""
    forms = {"reward.reward_model.": ("model_path",), "reward_model.": ("model.path", "model_path")}
    on = [
        (prefix, [prefix + path for path in paths]) for prefix, paths in forms.items() if given.value(f"{prefix}enable")
    ]
    if not on:
        given.ignore("only read with reward_model.enable", *(p + path for p, paths in forms.items() for path in paths))
        return {}
    switch, keys = f"{on[0][0]}enable", on[0][1]
    folders = {key: folder for key in keys if (folder := given.value(key)) is not None}
    if not folders:
        raise Refused(f"{switch}=True: give {keys[0]}, or reward.model=FOLDER")
    if len(set(folders.values())) > 1:
        both = " and ".join(f"{key}={folder}" for key, folder in folders.items())
        raise Refused(f"{both} contradict each other: leave one of them out")
    functions = [f"{p}custom_reward_function.path" for p in ("reward.", "")]
    if given.first(*functions) is not None:
        message = "verl's function calls the model at an address, and there is none here"
        raise Refused(f"{switch}=True with custom_reward_function.path: {message}; leave one of them out")
    return {"reward.model": next(iter(folders.values()))}


def _async(given: Given) -> Result:
    """Map the asynchronous modes. Legacy keys map one to one; V1 modes generate num_warmup_batches batches in advance,
    with partial rollout."""
    v1, partial_key = "trainer.v1.", "async_training.partial_rollout"
    bound_key = f"{v1}sampler.max_off_policy_threshold"
    staleness, partial = given.value("async_training.staleness_threshold"), given.value(partial_key)
    mode, bound = given.value(f"{v1}trainer_mode"), given.value(bound_key)
    if mode in ("colocate_async", "separate_async"):
        ahead = given.value(f"{v1}{mode}.num_warmup_batches", 1)
        if staleness not in (None, ahead):
            both = f"async_training.staleness_threshold={staleness} and {v1}trainer_mode={mode}"
            raise Refused(f"{both} contradict each other")
        staleness, partial = ahead, True
    elif mode == "sync":
        staleness = staleness or 0
    if bound is not None and staleness is not None and bound < staleness:
        raise Refused(f"{bound_key}={bound} is below the staleness {staleness}: lower num_warmup_batches")
    given.ignore("a bound that the staleness keeps", bound_key)
    out: Result = {} if staleness is None else {"pipeline.staleness": staleness}
    lag = given.own("pipeline.staleness", staleness)
    if partial is not None:
        out["pipeline.partial_rollout"] = bool(partial and lag)
        if partial and not lag:
            given.ignore("counts with staleness > 0 only, as in verl", partial_key)
    every = given.value("async_training.trigger_parameter_sync_step")
    return out if every is None else out | {"pipeline.sync_every": every}


def _tools(given: Given) -> Result:
    """Map the files of tools, under any of verl's keys for them."""
    given.ignore("rows with tools are played in turns, the others are one answer", f"{TURNS}enable")
    owners = (TURNS, "data.")
    found = [given.value(owner + key) for owner in owners for key in ("tool_config_path", "function_tool_path")]
    tools = list(dict.fromkeys(str(path) for path in found if path is not None))
    if tools and given.value(f"{TURNS}enable") is False:
        raise Refused(f"{TURNS}enable=False with tools ({', '.join(tools)}): set it to True, or leave the tools out")
    return {"agent.tools": tools} if tools else {}


def _turns(given: Given) -> Result:
    """Map the limit on turns of the model. A limit on turns of the user (the tools) allows one more turn of the
    model."""
    assistant, user, turns = (given.value(f"{TURNS}max_{of}turns") for of in ("assistant_", "user_", ""))
    most = [n for n in (assistant, turns, None if user is None else user + 1) if n is not None]
    return {"agent.max_turns": min(most)} if most else {}


def _dataset(given: Given) -> Result:
    """Map a user's dataset class, given as a file or module and the name of the class."""
    path, name = (given.value(f"data.custom_cls.{key}") for key in ("path", "name"))
    if path is None:
        given.ignore("only read with data.custom_cls.path", "data.custom_cls.path", "data.custom_cls.name")
        return {}
    if name is None:
        raise Refused(f"data.custom_cls.path={path}: give data.custom_cls.name=CLASS beside it")
    return {"data.dataset_class": f"{str(path).removeprefix('pkg://')}:{name}"}


def _reward_function(given: Given) -> Result:
    """Map a user's reward function, given as a file or module and its name."""
    prefixes = [f"{of}custom_reward_function." for of in ("reward.", "")]
    path, name = (given.first(*(prefix + key for prefix in prefixes)) for key in ("path", "name"))
    if path is None:
        given.ignore("only read with custom_reward_function.path", *(p + k for p in prefixes for k in ("path", "name")))
        return {}
    return {"reward.path": str(path) if name is None else f"{path}:{name}"}


def _loop(given: Given) -> Result:
    """Map the agent loop: one of ours by verl's name, or the class of a name in a file of agent loops."""
    key, file_key = f"{ROLLOUT}agent.default_agent_loop", f"{ROLLOUT}agent.agent_loop_config_path"
    name, file = given.value(key), given.value(file_key)
    ours = {"single_turn_agent": "single_turn", "tool_agent": "tool_agent"}
    fix = "a loop of your own is agent.loop=FILE.py:Class"
    if file is not None and name is None:
        raise Refused(f"{file_key}={file}: give {key}=NAME beside it, an entry of that file; {fix}")
    if name is None or name in ours:
        given.ignore(f"{key} names another loop", file_key)
        return {} if name is None else {"agent.loop": ours[name]}
    entries = {} if file is None else _loops_of(file_key, Path(str(file)).expanduser())
    if name not in entries:
        known = ", ".join((*ours, *entries))
        raise Refused(f"{key}={name}: there are {known}; {fix}")
    return {"agent.loop": entries[name]}


def _loops_of(key: str, file: Path) -> dict[str, str]:
    """Return name -> class of verl's file of agent loops: `- {name: NAME, _target_: module.Class}`."""
    if not file.is_file():
        raise Refused(f"{key}={file}: no such file")
    try:
        entries = yaml.safe_load(bounded_yaml(file.read_text(encoding="utf-8")))
    except (ValueError, yaml.YAMLError) as exc:
        raise Refused(f"{key}={file}: {' '.join(str(exc).split())}") from None
    found: dict[str, str] = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        if not isinstance(entry, dict) or not {"name", "_target_"} <= entry.keys():
            raise Refused(f"{file}: expected a list of {{name: NAME, _target_: module.Class}}")
        if more := [str(k) for k in entry if k not in ("name", "_target_")]:
            raise Refused(f"{file}: {', '.join(more)} of {entry['name']}: a loop has no arguments here; leave it out")
        found[str(entry["name"])] = str(entry["_target_"])
    return found


_OF_RUN = (
    _rollout_engine,
    _sync,
    _tokens,
    _batch,
    optimizer.schedule,
    optimizer.optimizer,
    lora.lora,
    _eval,
    _eval_steps,
    _overlong,
    _context,
    _positions,
    _freeze,
    _resume,
)
_RULES = (
    *_OF_RUN,
    _directory,
    _logger,
    _async,
    _reward_model,
    _tools,
    _turns,
    _dataset,
    _reward_function,
    _loop,
    *objective.RULES,
    *layout.RULES,
)
JOINT: Mapping[str, Callable[[Given], Result]] = MappingProxyType({rule.__name__.lstrip("_"): rule for rule in _RULES})
"""The rules by name, as the table has it after the @."""
