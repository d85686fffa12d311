"""The Python interface: the classes of verl's public introductions, over the same roles, step and loop as `verl
train`."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from verl.algorithms.presets import PRESETS
from verl.algorithms.resolve import resolve
from verl.config.backends import ROLLOUT, traits_of
from verl.config.compat.peft import lora_arguments, lora_spec
from verl.config.devices import local_gpus
from verl.config.load import load_config
from verl.config.moved import present_value
from verl.config.schema import Config
from verl.config.served import reachable
from verl.config.tree import changed
from verl.driver.assemble import checkpoint_engine, context_of, learner_of, rollout_engine
from verl.driver.banned import policy_banned
from verl.driver.launch import Finished, run_rl
from verl.driver.models import hf_export, role_spec, workers_around
from verl.driver.setup import decoder
from verl.driver.step import Step, experience_and_update, reads_sampler
from verl.errors import Refused
from verl.given_models import AutoModelForCausalLMWithValueHead, wrapped
from verl.given_rewards import importable
from verl.leftovers import OwnFolder
from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.names import did_you_mean, spelled
from verl.rollout.base import Completion, GenerateRequest
from verl.track.metrics import reduce
from verl.types import Purpose, Sample, Sampling, Segment, as_ids, derive_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlConfig:
    """The settings of a `VerlTrainer`."""

    algorithm: str = "GRPO"  # A name of the table, in any case.
    batch_size: int = 1  # Queries per step.
    rollout_backend: str = "native"  # If it is not installed, a CPU run uses the embedded engine, with a warning.
    rollout_fallback: str | None = None  # "native": the embedded engine may replace it on GPUs too.
    max_length: int = 128  # The tokens of prompt and answer together.
    samples_per_prompt: int = 1
    learning_rate: float = 1e-6
    temperature: float = 1.0
    dtype: str = "float32"
    gradient_checkpointing: bool | str = False
    seed: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The algorithm's settings (clip_high, kl_loss_coef, ...; `verl show algorithm=NAME`)."""


class VerlTrainer:
    """Train a model from Python by repeated `generate_rollout`, your reward and `step`, which also publishes the
    weights. If an algorithm compares with another answer (ReMax: the greedy one), it is the last in each query's
    list."""

    def __init__(
        self,
        *,
        config: VerlConfig,
        model: AutoModelForCausalLMWithValueHead | nn.Module,
        tokenizer: Any,
        ref_model: AutoModelForCausalLMWithValueHead | nn.Module | None = None,
        peft_config: Any = None,
    ) -> None:
        """peft_config: a LoraConfig of PEFT, or a dict of its fields: its factors are trained, and not the model's
        weights."""
        self.config = config
        self.tokenizer = tokenizer
        lora = lora_spec(peft_config, config.seed)
        name = _algorithm_name(config.algorithm)
        if name not in PRESETS:
            raise Refused(f"algorithm={config.algorithm!r} is not in the table: {', '.join(PRESETS)}")
        _refuse_runs_only(name)
        model, ref_model = wrapped(model), None if ref_model is None else wrapped(ref_model)
        self.algorithm = resolve(name, _facade_settings(name, config, ref_model is not None))
        if config.samples_per_prompt < self.algorithm.group.least:
            warnings.warn(
                f"{config.algorithm} compares the answers to one query, and {config.samples_per_prompt} per query "
                f"carries no signal; set VerlConfig(samples_per_prompt={max(4, self.algorithm.group.least)})",
                stacklevel=2,
            )
        if lora is not None and self.algorithm.critic:
            fix = "PPOTrainer(peft_config=...) has both on one"
            raise Refused(
                f"peft_config with algorithm={config.algorithm!r}: its critic would hold a second base; {fix}"
            )
        inner = _inner_config(config, model.path)
        context, self._checkpoint_engine = context_of(inner, tokenizer=tokenizer), checkpoint_engine(inner)
        self._banned = policy_banned(inner, tokenizer)
        settings = EngineSettings(dtype=config.dtype, device=context.device, banned=self._banned)
        trained = replace(
            settings,
            optim=OptimSpec(lr=config.learning_rate),
            gradient_checkpointing=present_value("model.gradient_checkpointing", config.gradient_checkpointing),
            lora=lora,
            base=model.path,
        )
        self._engine = TorchEngine(model.pretrained_model, trained)
        policy = replace(
            role_spec(context, "actor"), hf_export=hf_export(inner), outlet=self._checkpoint_engine.outlet()
        )
        models = {"actor": workers_around(context, self._engine, policy)}
        if ref_model is not None and "ref" in self.algorithm.roles():
            frozen = TorchEngine(ref_model.pretrained_model, settings)
            models["ref"] = workers_around(context, frozen, role_spec(context, "ref"))
        if self.algorithm.critic:
            critic = _critic(model, config, context.device)
            models["critic"] = workers_around(context, critic, role_spec(context, "critic"))
        self._learner = learner_of(context, self.algorithm, models)
        self._loop = asyncio.new_event_loop()
        self._rollout = rollout_engine(inner, tokenizer, context.device)
        self._decode = decoder(tokenizer)
        self._last: dict[tuple[str, str], list[Completion]] = {}
        self._steps, self._version, self._calls = 0, -1, 0
        self._sync()

    def generate_rollout(self, queries: Sequence[str]) -> list[str] | list[list[str]]:
        """Return one answer per query, or a list per query: `samples_per_prompt` answers, then those they are compared
        with."""
        group, wanted = self.algorithm.group, self.config.samples_per_prompt
        n = wanted + group.baselines
        plays, self._last = [], {}
        for q, query in enumerate(queries):
            ids = self._ids(query)
            room = (most := self.config.max_length) - len(ids)
            if room < 1:
                raise Refused(f"query {q} has {len(ids)} tokens and VerlConfig.max_length={most}: no room to answer")
            for i in range(n):
                seed = derive_seed(self.config.seed, "facade", self._calls, q, i)
                sampling = Sampling(
                    max_tokens=room, temperature=self.config.temperature, seed=seed, banned=self._banned
                )
                if i >= wanted and group.baseline_sampling is not None:
                    sampling = group.baseline_sampling(sampling)
                requested = GenerateRequest(f"{self._calls}/{q}/{i}", ids, sampling, prefix_key=f"{self._calls}/{q}")
                plays.append(self._rollout.generate(requested))
        self._calls += 1
        found = self._loop.run_until_complete(_gather(plays))
        texts = [self._decode(c.ids.tolist()) for c in found]
        for k, (text, completion) in enumerate(zip(texts, found, strict=True)):
            self._last.setdefault((queries[k // n], text), []).append(completion)
        return texts if n == 1 else [texts[i * n : (i + 1) * n] for i in range(len(queries))]

    def step(
        self,
        queries: Sequence[str],
        responses: Sequence[str] | Sequence[Sequence[str]],
        rewards: Sequence[float] | Sequence[Sequence[float]],
    ) -> dict[str, float]:
        """Make one step of the algorithm on these answers and return its metrics. Several answers per query are lists
        of equal shape."""
        if not len(queries) == len(responses) == len(rewards):
            raise Refused(
                f"{len(queries)} queries, {len(responses)} responses and {len(rewards)} rewards: must be as many"
            )
        samples = []
        for q, (query, answers, scores) in enumerate(zip(queries, responses, rewards, strict=True)):
            answers_of = [answers] if isinstance(answers, str) else list(answers)
            scores_of = [float(x) for x in np.atleast_1d(np.asarray(scores, float))]
            if len(answers_of) != len(scores_of):
                raise Refused(f"query {q} has {len(answers_of)} responses and {len(scores_of)} rewards")
            trained = len(answers_of) - self.algorithm.group.baselines
            if trained < 1:
                message = "the answer that the others are compared with comes last, and has a reward"
                raise Refused(f"query {q} has {len(answers_of)} responses: with {self.config.algorithm}, {message}")
            samples += [
                self._sample(q, i, query, text, score, "train" if i < trained else "baseline")
                for i, (text, score) in enumerate(zip(answers_of, scores_of))
            ]
        record = Step(self._steps)
        self._loop.run_until_complete(self._learn(record, [s for s in samples if s.loss_tokens]))
        self._steps += 1
        self._sync()
        return {
            **reduce(record.metrics),
            "critic/rewards/mean": float(np.mean([s.reward for s in samples if s.purpose == "train"])),
        }

    def save_pretrained(self, path: str | Path) -> None:
        """Write a Hugging Face folder of the present policy; of an adapter if it was given a peft_config."""
        self._learner.models["actor"].export(Path(path)).result()

    def close(self) -> None:
        self._loop.run_until_complete(self._rollout.close())
        self._learner.close()
        self._loop.close()

    async def _publish(self) -> None:
        actor, timeout_s = self._learner.models["actor"], self._learner.config.run.wait_timeout_s
        await self._checkpoint_engine.publish(
            actor, [self._rollout], version=self._version, exclusive=True, on_inflight=["wait"], timeout_s=timeout_s
        )

    async def _learn(self, step: Step, samples: Sequence[Sample]) -> None:
        refs = await self._learner.rows.put(samples)
        await experience_and_update(self._learner, step, refs)
        self._learner.rows.drop(refs)

    def _ids(self, query: str) -> np.ndarray:
        return as_ids(self.tokenizer(query)["input_ids"])

    def _sample(self, q: int, i: int, query: str, text: str, reward: float, purpose: Purpose) -> Sample:
        """Return the sample with the sampled ids if the answer was generated here. Other texts are tokenised and
        stored: no policy sampled them, so they have no log-probs of a sampler."""
        name = f"s{self._steps}/{q}/{i}"
        if known := self._last.get((query, text)):
            done = known.pop(0)
            answer = Segment(ids=done.ids, source="sampled", logprobs=done.logprobs, version=self._version)
        elif reads_sampler(self.algorithm):
            fix = "give the texts of generate_rollout as they are, or another algorithm"
            raise Refused(
                f"query {q}: response {text[:60]!r} was not sampled by generate_rollout, and {self.config.algorithm} "
                f"reads the sampler's log-probs: {fix}"
            )
        else:
            ids = as_ids(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            answer = Segment(ids=ids, source="stored")
        return Sample(
            sample_id=name,
            trajectory_id=name,
            group_id=f"s{self._steps}/{q}",
            purpose=purpose,
            segments=(Segment(ids=self._ids(query), source="prompt"), answer),
            temperature=self.config.temperature,
            banned=bool(self._banned) and answer.source == "sampled",
            reward=reward,
        )

    def _sync(self) -> None:
        self._version += 1
        self._loop.run_until_complete(self._publish())


async def _gather(plays: Sequence[Any]) -> list[Completion]:
    return list(await asyncio.gather(*plays))


def _algorithm_name(text: str) -> str:
    """Return the table's name of an algorithm in another spelling (Dr.GRPO, Reinforce++); `text` itself if there is
    none."""
    return {spelled(name): name for name in PRESETS}.get(spelled(text), text)


def _refuse_runs_only(name: str) -> None:
    """Raise ValueError for an algorithm that needs a teacher or rewards of turns, which `VerlTrainer` has no arguments
    for."""
    lacks = [f"the role {role}" for role in sorted(PRESETS[name].roles() - {"ref", "critic"})]
    if lacks := [*lacks, *(["rewards of turns"] if PRESETS[name].credits_turns() else [])]:
        run = f"verl.GRPOTrainer(MODEL, train_data=ROWS, overrides=['algorithm.name={name}', ...])"
        raise Refused(f"algorithm={name!r} reads {' and '.join(lacks)}, which VerlTrainer has not: {run} runs it")


def _facade_settings(name: str, config: VerlConfig, has_reference: bool) -> dict[str, Any]:
    """Return the preset, with its KL terms only if a reference model was given, and lengths from max_length."""
    out = dict(config.settings)
    if not has_reference:
        out = {"kl_loss_coef": 0.0, "kl_reward_coef": 0.0, **out}
    if PRESETS[name].loss.aggregation == "seq-mean-token-sum-norm":
        out.setdefault("horizon_tokens", config.max_length)
    return out


def _inner_config(config: VerlConfig, path: Path) -> Config:
    values = {
        "model.path": str(path),
        "model.dtype": config.dtype,
        "data.max_prompt_tokens": config.max_length - 1,
        "rollout.max_response_tokens": 1,  # max_length counts prompt and answer together
        "rollout.engine": _backend(config.rollout_backend, config.rollout_fallback),
        "step.prompts_per_step": config.batch_size,
        "step.samples_per_prompt": config.samples_per_prompt,
        "run.seed": config.seed,
    }
    return changed(Config(), values)


def _backend(name: str, fallback: str | None) -> str:
    """Return the rollout engine `name` if it is installed; else, if a fallback is allowed, "native". Raise ValueError
    otherwise."""
    if fallback not in (None, "native"):
        raise Refused(f"rollout_fallback={fallback!r}: 'native', or None")
    if reachable(name, None, None):
        return name
    package = traits_of(name).package
    if not package:
        startable = [each for each in ROLLOUT if (traits := traits_of(each)).package or not traits.server]
        raise Refused(f"rollout_backend={name!r}: there are {', '.join(startable)}")
    why = "is not installed" if importlib.util.find_spec(package) is None else "has no adapter in this version"
    if fallback is None and (gpus := local_gpus()):
        fix = 'install it, or allow the embedded engine with rollout_fallback="native"'
        raise Refused(f"rollout_backend={name!r} {why}, and this machine has GPUs ({gpus}): {fix}")
    warnings.warn(f"rollout_backend={name!r} {why}; using the embedded engine", stacklevel=4)
    return "native"


def _critic(model: AutoModelForCausalLMWithValueHead, config: VerlConfig, device: str) -> TorchEngine:
    """Return the value model: a copy of the policy's body with a value head, and an optimizer of its own."""
    return TorchEngine(
        copy.deepcopy(model.pretrained_model),
        EngineSettings(
            head="value",
            optim=OptimSpec(lr=10 * config.learning_rate),
            dtype=config.dtype,
            device=device,
            gradient_checkpointing=present_value("model.gradient_checkpointing", config.gradient_checkpointing),
        ),
    )


class GRPOTrainer:
    """`verl train algorithm=grpo` from Python: the same loop, checkpoints and report.

    model: a Hugging Face folder
    train_data: rows (dicts in verl's format) or a file
    reward: a function of a module or file, with compute_score's signature (it runs in killable workers); None: by
    data_source
    overrides: any keys of `verl show config` as "key=value"
    peft_config: a LoraConfig of PEFT, or a dict of its fields; None: all weights are trained
    """

    algorithm_name = "grpo"

    def __init__(
        self,
        model: str | Path,
        *,
        train_data: str | Path | Sequence[Mapping[str, Any]],
        reward: Callable[..., Any] | None = None,
        eval_data: str | Path | Sequence[Mapping[str, Any]] | None = None,
        overrides: Sequence[str] = (),
        peft_config: Any = None,
    ) -> None:
        if not isinstance(model, str | Path):
            fix = "a run loads its weights itself: give the folder (model.save_pretrained(FOLDER) writes one)"
            raise Refused(f"model is a {type(model).__name__}: {fix}")
        self._folder = OwnFolder("verl-given-")
        self.args = [
            f"algorithm.name={self.algorithm_name}",
            f"model.path={model}",
            f"data.train_files=[{self._file(train_data, 'train')}]",
        ]
        if eval_data is not None:
            self.args.append(f"data.eval_files=[{self._file(eval_data, 'eval')}]")
        if reward is not None:
            path, name = importable(reward)
            self.args += [f"reward.path={path}:{name}"]
        if peft_config is not None:
            self.args += lora_arguments(peft_config)
        self.args += list(overrides)

    def train(self, steps: int | None = None) -> Finished:
        """Run to the end. Raise ValueError if the configuration refuses a setting."""
        return run_rl(load_config([*self.args, *([f"run.total_steps={steps}"] if steps is not None else [])]))

    def _file(self, data: str | Path | Sequence[Mapping[str, Any]], name: str) -> str:
        if isinstance(data, str | Path):
            return str(data)
        path = self._folder.path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(dict(row)) + "\n" for row in data))
        return str(path)


class DAPOTrainer(GRPOTrainer):
    """`verl train algorithm=dapo` from Python."""

    algorithm_name = "dapo"


class PPOTrainer(GRPOTrainer):
    """`verl train algorithm=ppo` from Python, with its own critic and GAE."""

    algorithm_name = "ppo"


@dataclass(frozen=True, slots=True)
class Policy:
    """The model that is trained: a Hugging Face folder."""

    path: str | Path
    learning_rate: float | None = None
    gradient_checkpointing: bool | str = False
    peft_config: Any = None
    """A LoraConfig of PEFT, or a dict of its fields; None: all weights are trained."""


@dataclass(frozen=True, slots=True)
class RewardModel:
    """A trained reward model (`verl rm`) as the reward."""

    path: str | Path
    coef: float = 1.0


class Trainer:
    """The whole run from one dictionary:

        Trainer({"algorithm": "ppo", "actor": Policy(DIR), "reward": RewardModel(DIR), "data": ROWS_OR_FILE,
                 "rollout": {"name": "native", "batch_size": 16, "max_length": 512}}).train(steps=1000)

    algorithm: a row of the table · actor: Policy or a folder · reward: RewardModel, a function (compute_score's
    signature) or None (by data_source) · data, eval_data: rows in verl's format or a file · rollout: name, fallback
    ("native", which allows our engine in its place on GPUs), batch_size (prompts per step), max_length (prompt and
    answer, half each unless max_prompt_length is given), samples_per_prompt, temperature · async_rollout: one step of
    staleness · gradient_checkpointing · critic: a folder · overrides: {"any.key": value}.
    """

    _KEYS = (
        *("algorithm", "actor", "reward", "data", "eval_data", "rollout", "async_rollout", "gradient_checkpointing"),
        *("critic", "overrides"),
    )
    _ROLLOUT = (
        *("name", "fallback", "batch_size", "max_length", "max_prompt_length", "samples_per_prompt", "temperature"),
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        _known(config, self._KEYS, "Trainer")
        _known(config.get("rollout", {}), self._ROLLOUT, 'Trainer, "rollout"')
        if "actor" not in config:
            raise Refused('Trainer needs "actor": Policy(DIR), the model to train')
        self._config = dict(config)

    def train(self, steps: int | None = None) -> Finished:
        """Run to the end. Raise ValueError for a missing or wrong setting, before anything is loaded."""
        config = self._config
        if config.get("data") is None:
            raise Refused(
                'Trainer has no "data": give rows ({"prompt": [...], "data_source": ...}) or a JSONL or Parquet file'
            )
        actor = config["actor"] if isinstance(config["actor"], Policy) else Policy(config["actor"])
        name = _algorithm_name(str(config.get("algorithm", "grpo")))
        reward = config.get("reward")
        inner = GRPOTrainer(
            actor.path,
            train_data=config["data"],
            eval_data=config.get("eval_data"),
            overrides=[],
            reward=None if isinstance(reward, RewardModel) else reward,
            peft_config=actor.peft_config,
        )
        inner.args[0] = f"algorithm.name={name}"
        if isinstance(reward, RewardModel):
            inner.args += [f"reward.model={reward.path}", f"reward.model_coef={reward.coef}"]
        inner.args += self._overrides(actor, name)
        return inner.train(steps)

    def _overrides(self, actor: Policy, name: str) -> list[str]:
        config, rollout = self._config, self._config.get("rollout", {})
        alone = name in PRESETS and PRESETS[name].group.least == 1
        out: dict[str, Any] = {
            "rollout.engine": _backend(rollout.get("name", "native"), rollout.get("fallback")),
            "step.samples_per_prompt": rollout.get("samples_per_prompt", 1 if alone else 8),
        }
        if "max_length" in rollout:
            prompt = rollout.get("max_prompt_length", rollout["max_length"] // 2)
            out |= {"data.max_prompt_tokens": prompt, "rollout.max_response_tokens": rollout["max_length"] - prompt}
        same = {"batch_size": "step.prompts_per_step", "temperature": "rollout.temperature"}
        out |= {ours: rollout[key] for key, ours in same.items() if key in rollout}
        if how := actor.gradient_checkpointing or config.get("gradient_checkpointing"):
            out["model.gradient_checkpointing"] = how
        if config.get("async_rollout"):
            out |= {"pipeline.staleness": 1, "pipeline.partial_rollout": True}
        some = {"optim.lr": actor.learning_rate, "critic.path": config.get("critic")}
        out |= {key: value for key, value in some.items() if value is not None}
        return [f"{k}={v}" for k, v in {**out, **config.get("overrides", {})}.items()]


class SingleController(Trainer):
    """A Trainer with alternating rollout and update."""


class MultiController(Trainer):
    """A Trainer with a rollout that is ahead of the update, by one step of staleness."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__({"async_rollout": True, **config})


def _known(given: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    for key in given:
        if key not in keys:
            hint = did_you_mean(key, keys, form="did you mean {!r}?") or f"known: {', '.join(keys)}"
            raise Refused(f"{where}: unknown key {key!r}; {hint}")
