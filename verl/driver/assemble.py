"""Config -> parts. The only importer of concrete backends; everything above the protocols is the same code everywhere."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from verl.agent_loop.base import AgentLoopBase, AgentLoopFactory, ServerManager
from verl.agent_loop.single_turn import SingleTurnLoop
from verl.algorithms.preference import loss_row, preference_terms, reward_terms
from verl.algorithms.table import Algorithm, resolve
from verl.chat import load_tokenizer, require_chat_template
from verl.checkpoint.hf import export_hf
from verl.checkpoint.score import classifier_config, classifier_tensors, read_score
from verl.checkpoint.store import CheckpointStore
from verl.config.backends import options_of
from verl.config.load import Resolved, dump_config
from verl.config.plan import warmup_steps
from verl.config.schema import AlgorithmConfig, Config
from verl.data.preference import load_pairs
from verl.data.source import Cursor, TaskTable, load_conversations, load_tasks
from verl.driver import state as train_state
from verl.driver.play import Player, Trajectories
from verl.driver.record import SampleRecorder
from verl.driver.run import Run
from verl.driver.scheduler import Scheduler
from verl.driver.stages import PreferenceStage, RewardStage, SftStage, Stage, reference_logprobs
from verl.driver.supervised import SupervisedRun
from verl.driver.supervised import resume as resume_supervised
from verl.model_engine.optim import OptimSpec
from verl.model_engine.reward_model import load_reward_model
from verl.model_engine.torch_engine import DTYPES, TorchEngine, load_causal_lm
from verl.nn.heads import Head
from verl.reward.base import RewardFn
from verl.reward.compute import check_data_source
from verl.reward.model import Later, ModelReward, ScoreRows
from verl.reward.pool import RewardPool
from verl.reward.process import Target
from verl.reward.shaping import Shaped
from verl.rollout.base import RolloutEngine
from verl.rollout.hf import HfEngine
from verl.rollout.native.engine import NativeEngine
from verl.track.console import LiveProgress
from verl.track.events import EventLog, next_attempt
from verl.track.sinks import open_sinks
from verl.transfer_queue.memory import MemoryQueue
from verl.types import Sampling, Task
from verl.weight_sync.local import LocalCheckpointEngine
from verl.workers.inproc import InprocGroup
from verl.workers.placement import Placement, ResourcePool
from verl.workers.role import Role
from verl.workers.waits import Waits

OnStep = Callable[[int, Mapping[str, float]], None]


def algorithm_of(config: AlgorithmConfig) -> Algorithm:
    given = asdict(config)
    return resolve(given.pop("name"), {**given.pop("options"), **given})


async def assemble(resolved: Resolved, *, progress: LiveProgress | None = None, on_step: OnStep | None = None) -> Run:
    """Every part of an RL run. What can be wrong with the user's input is found here, cheapest first."""
    config = resolved.config
    set_up_process(config)
    algorithm = algorithm_of(config.algorithm)
    tokenizer = load_tokenizer_of(config)
    tasks = load_tasks(
        config.data.train_files,
        tokenizer,
        config.data,
        template_kwargs=config.model.template_kwargs,
        max_rows=config.data.max_rows,
    )
    eval_tasks = _eval_tasks(config, tokenizer)
    if config.reward.path is None and config.reward.model is None:
        for source in {t.data_source for t in (tasks[0], *eval_tasks[:1])}:
            check_data_source(source)
    claimed = open_run_dir(resolved)
    run_dir = claimed.path
    attempt = next_attempt(run_dir)
    queue, waits = MemoryQueue(), Waits(run_dir / "waits.json")
    device = device_of(config)
    scorer = reward_role(config, queue, device)
    reward = await _reward(config, scorer)
    total_steps = total_steps_of(config, len(tasks), config.step.prompts_per_step)
    engine = policy_engine(config, device, run_dir, updates=updates_of_run(config, total_steps))
    share = options_of(config, "model").share_prefix
    engine.check_packing(share_prefix=share)
    scheduler, cursor = (
        _scheduler(config, algorithm, total_steps),
        Cursor(len(tasks), _data_seed(config), config.data.shuffle),
    )
    replica = rollout_engine(config, tokenizer, device)
    decode = decoder(tokenizer)
    events = EventLog(run_dir, attempt)
    progress = progress or LiveProgress()
    progress.message(f"data: {tasks.report.summary()}")
    if isinstance(replica, NativeEngine) and replica.without_kernels:
        progress.message(f"rollout: slower without compiled kernels ({replica.without_kernels})")
    trajectories = Trajectories(
        engine=replica,
        loop=_loop_factory(config, tokenizer),
        reward=reward,
        decode=decode,
        waits=waits,
        seed=config.run.seed,
        max_attempts=config.pipeline.max_attempts,
        timeout_s=config.run.wait_timeout_s,
    )
    player = Player(
        scheduler=scheduler,
        cursor=cursor,
        tasks=tasks,
        trajectories=trajectories,
        algorithm=algorithm,
        sampling=train_sampling(config),
        samples_per_prompt=config.step.samples_per_prompt,
        queue=queue,
        events=events,
        waits=waits,
        timeout_s=config.run.wait_timeout_s,
        eager=config.pipeline.staleness > 0,
        max_invalid_share=config.pipeline.max_invalid_share,
    )
    actor = InprocGroup("actor", Role("actor", queue, engine, share_prefix=share))
    run = Run(
        config=config,
        dir=run_dir,
        algorithm=algorithm,
        total_steps=total_steps,
        player=player,
        trajectories=trajectories,
        eval_tasks=eval_tasks,
        actor=actor,
        ref=reference_role(config, algorithm, queue, device),
        compute=InprocGroup("compute", Role("compute", queue)),
        critic=critic_role(config, algorithm, queue, device, run_dir, updates=updates_of_run(config, total_steps)),
        reward=scorer,
        recorder=InprocGroup(
            "recorder", SampleRecorder(queue, run_dir, decode, groups_per_step=config.track.samples_per_step)
        ),
        rollout=replica,
        replicas=(replica,),
        checkpoint_engine=LocalCheckpointEngine(
            probes=_probes(tasks) if config.sync.canary else (),
            tolerance=canary_tolerance(config),
            verify_first=config.sync.verify_first,
        ),
        placement=Placement(
            ResourcePool("global"),
            (replica,),
            colocated=config.pipeline.staleness == 0,
            waits=waits,
            timeout_s=config.run.wait_timeout_s,
        ),
        store=claimed.store,
        lock=claimed.lock,
        events=events,
        waits=waits,
        progress=progress,
        close_parts=reward.close,
        on_step=on_step,
        sinks=open_sinks(
            config.track.sinks,
            run_dir,
            config.track.project,
            config.run.name,
            asdict(config),
            attempt=attempt,
            progress=progress,
        ),
        export_hf=exporter(engine, config),
        checkpoint_bytes=checkpoint_bytes(engine),
        kl_coef=algorithm.kl_reward.coef if algorithm.kl_reward else 0.0,
    )
    if claimed.resumed is not None:
        run.resume_from(train_state.read(claimed.resumed))
    return run


def assemble_supervised(
    resolved: Resolved,
    command: Literal["sft", "rm", "dpo"],
    *,
    progress: LiveProgress | None = None,
    on_step: OnStep | None = None,
) -> SupervisedRun:
    """Every part of an SFT, reward-model or preference run. The rows are read and checked before a model is loaded."""
    config = resolved.config
    set_up_process(config)
    tokenizer = load_tokenizer_of(config)
    if command == "rm":
        classifier_config(Path(config.model.path).expanduser(), None)  # refuses what could not be saved
    stage, eval_stage, summary = _stages(config, command, tokenizer)
    claimed = open_run_dir(resolved)
    run_dir = claimed.path
    total_steps = total_steps_of(config, len(stage), config.supervised.rows_per_step)
    device, share = device_of(config), command != "sft" and options_of(config, "model").share_prefix
    engine = policy_engine(config, device, run_dir, updates=total_steps, head="score" if command == "rm" else "lm")
    engine.check_packing(share_prefix=share)
    progress = progress or LiveProgress()
    progress.message(f"data: {summary}")
    trainer = InprocGroup("trainer", Role("trainer", MemoryQueue(), engine, share_prefix=share))
    for one in (stage, eval_stage):
        if (
            isinstance(one, PreferenceStage) and "ref_logprobs" in one.terms[0].inputs
        ):  # the engine still has the start weights
            one.reference = reference_logprobs(
                one,
                lambda samples: trainer.submit("logprobs", samples, split="first").result(
                    timeout=config.run.wait_timeout_s
                ),
                model_dir=Path(config.model.path),
                dtype=config.model.dtype,
                cache_dir=config.data.cache_dir,
                note=progress.message,
            )
    run = SupervisedRun(
        config=config,
        dir=run_dir,
        total_steps=total_steps,
        stage=stage,
        eval_stage=eval_stage,
        cursor=Cursor(len(stage), _data_seed(config), config.data.shuffle),
        trainer=trainer,
        store=claimed.store,
        lock=claimed.lock,
        sinks=open_sinks(
            config.track.sinks,
            run_dir,
            config.track.project,
            config.run.name,
            asdict(config),
            attempt=next_attempt(run_dir),
            progress=progress,
        ),
        progress=progress,
        export_hf=exporter(engine, config, pad_token_id=pad_id(tokenizer)),
        checkpoint_bytes=checkpoint_bytes(engine),
        on_step=on_step,
    )
    if claimed.resumed is not None:
        resume_supervised(run, train_state.read(claimed.resumed))
    return run


def _stages(config: Config, command: str, tokenizer: Any) -> tuple[Stage, Stage | None, str]:
    """The training stage, the evaluation stage if there are such files, and a line about the rows."""
    kwargs, p = config.model.template_kwargs, config.preference
    files = ((config.data.train_files, config.data.max_rows), (config.data.eval_files, config.data.max_eval_rows))
    if command == "sft":
        tables = [
            load_conversations(f, tokenizer, config.data, template_kwargs=kwargs, max_rows=n) if f else None
            for f, n in files
        ]
        assert tables[0] is not None, "validated"
        return SftStage(tables[0]), SftStage(tables[1]) if tables[1] else None, tables[0].report.summary()
    terms = (
        reward_terms(center_coef=p.center_coef, margin=p.use_margin)
        if command == "rm"
        else preference_terms(p.loss, beta=p.beta, options=p.options)
    )
    row = loss_row(p.loss)
    paired, needs_gap = command == "rm" or row.paired, p.use_margin if command == "rm" else row.needs_gap
    if not paired and config.supervised.rows_per_step < 2:
        raise ValueError(
            "supervised.rows_per_step=1: kto compares rows with the other rows of a step; set at least 2 (64 is usual)"
        )
    pairs = [
        load_pairs(f, tokenizer, config.data, paired=paired, needs_gap=needs_gap, template_kwargs=kwargs, max_rows=n)
        if f
        else None
        for f, n in files
    ]
    assert pairs[0] is not None, "validated"
    make = (lambda t: RewardStage(t, terms)) if command == "rm" else (lambda t: PreferenceStage(t, terms, paired))
    return make(pairs[0]), make(pairs[1]) if pairs[1] else None, pairs[0].summary()


def pad_id(tokenizer: Any) -> int | None:
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id


# -- parts -------------------------------------------------------------------------------------------------------------


def set_up_process(config: Config) -> None:
    """Threads, precision and seeds. Nothing samples from these generators in a step; user code may."""
    torch.set_num_threads(config.run.threads or os.cpu_count() or 1)
    transformers_logging.disable_progress_bar()
    if config.model.dtype == "auto":
        config.model.dtype = native_dtype(device_of(config))
    random.seed(config.run.seed)
    np.random.seed(config.run.seed % 2**32)
    torch.manual_seed(config.run.seed)
    if config.run.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)


def device_of(config: Config) -> str:
    if config.model.device != "auto":
        if config.model.device == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                "model.device=cuda, but torch sees no CUDA device; use model.device=cpu or install a CUDA torch"
            )
        return config.model.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def native_dtype(device: str) -> str:
    """bfloat16 where the device multiplies it in hardware, else float32."""
    if device == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    found = torch.cpu.get_capabilities()
    return "bfloat16" if found.get("avx512_bf16") or found.get("amx_bf16") or found.get("bf16") else "float32"


def load_tokenizer_of(config: Config) -> Any:
    path = config.model.tokenizer_path or config.model.path
    tokenizer = load_tokenizer(
        path, trust_remote_code=config.model.trust_remote_code, chat_template_file=config.model.chat_template
    )
    require_chat_template(tokenizer, path)
    return tokenizer


def decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Ids -> text without special tokens, as reward functions and readers expect it."""
    own, fast = type(tokenizer), PreTrainedTokenizerFast
    plain = isinstance(tokenizer, fast) and (own.decode, own._decode) == (fast.decode, fast._decode)
    if plain and not tokenizer.clean_up_tokenization_spaces:  # whose Python layers only hand on, at four times its cost
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
    return partial(tokenizer.decode, skip_special_tokens=True)


@dataclass(frozen=True, slots=True)
class RunDir:
    """A claimed run directory: nobody else writes here while `lock` is open. resumed: checkpoint to continue from."""

    path: Path
    store: CheckpointStore
    resumed: Path | None
    lock: IO[str]


def open_run_dir(resolved: Resolved) -> RunDir:
    """Claim the run directory and find what to resume from. Refuses a directory that another process uses."""
    config = resolved.config
    run_dir = Path(config.run.root_dir) / config.run.name
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = _claim(run_dir)
    store = CheckpointStore(
        run_dir / "checkpoints",
        keep_last=config.run.keep_last_checkpoints,
        keep_every_steps=config.run.keep_every_steps,
        keep_best="metric" if config.run.keep_best else None,
    )
    resumed = _resume_path(config, store, run_dir)
    (run_dir / "config.yaml").write_text(dump_config(resolved))
    return RunDir(run_dir, store, resumed, lock)


def _resume_path(config: Config, store: CheckpointStore, run_dir: Path) -> Path | None:
    if config.run.resume == "auto":
        found = store.latest_valid()
        return found.path if found else None
    if config.run.resume == "never":
        if store.latest_valid() is not None or (run_dir / "metrics.jsonl").exists():
            raise ValueError(
                f"run.resume=never, but {run_dir} holds an earlier run; choose another run.name or remove it"
            )
        return None
    path = Path(config.run.resume)
    if not (path / "manifest.json").is_file():
        raise ValueError(
            f"run.resume={config.run.resume}: not a checkpoint (no manifest.json); give a checkpoints/step_N folder"
        )
    return path


def _claim(run_dir: Path) -> IO[str]:
    """One process per run directory: a lock that dies with its holder."""
    handle = open(run_dir / ".lock", "a+")  # noqa: SIM115 - held for the life of the run
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        handle.seek(0)
        holder = handle.read().strip() or "unknown"
        handle.close()
        raise ValueError(f"{run_dir} is in use by process {holder}; stop it, or choose another run.name") from e
    handle.truncate(0)
    handle.write(str(os.getpid()))
    handle.flush()
    return handle


def policy_engine(config: Config, device: str, run_dir: Path, *, updates: int, head: Head = "lm") -> TorchEngine:
    """The trained model. updates: optimizer steps of the whole run (schedules, warm-up share)."""
    o = config.optim
    spec = OptimSpec(
        lr=o.lr,
        weight_decay=o.weight_decay,
        betas=(o.betas[0], o.betas[1]),
        eps=o.eps,
        clip_grad_norm=o.clip_grad_norm,
        schedule=o.schedule,
        warmup_steps=warmup_steps(config, updates),
        total_steps=updates,
        decay_ratio=o.decay_ratio,
        min_lr_ratio=o.min_lr_ratio,
        max_skipped_updates=o.max_skipped_updates,
    )
    return _engine(config, device, optim=spec, dump_dir=run_dir / "crash", head=head)


def updates_of_run(config: Config, total_steps: int) -> int:
    return total_steps * config.step.updates_per_step * config.step.epochs_per_step


def _engine(
    config: Config,
    device: str,
    *,
    optim: OptimSpec | None,
    dump_dir: Path | None = None,
    head: Head = "lm",
    path: str | None = None,
) -> TorchEngine:
    folder = Path(path or config.model.path).expanduser()
    trust, checkpointing = config.model.trust_remote_code, config.model.gradient_checkpointing and optim is not None
    if head == "score":
        return load_reward_model(
            folder,
            fresh_head=optim is not None,
            optim=optim,
            dtype=config.model.dtype,
            device=device,
            trust_remote_code=trust,
            max_tokens_per_microbatch=config.step.max_tokens_per_microbatch,
            attention_mode=options_of(config, "model").attention,
            gradient_checkpointing=checkpointing,
            dump_dir=dump_dir,
        )
    engine = TorchEngine(
        load_causal_lm(folder, trust_remote_code=trust, needs_lm_head=head == "lm"),
        head=head,
        optim=optim,
        dtype=config.model.dtype,
        device=device,
        max_tokens_per_microbatch=config.step.max_tokens_per_microbatch,
        attention_mode=options_of(config, "model").attention,
        gradient_checkpointing=checkpointing,
        source_dir=folder,
        dump_dir=dump_dir,
    )
    score = read_score(folder) if engine.value_head is not None else None
    if score is not None:
        assert engine.value_head is not None
        engine.value_head.weight.data.copy_(score)
    return engine


def reward_role(config: Config, queue: MemoryQueue, device: str) -> InprocGroup | None:
    """The trained reward model of `reward.model`, frozen. It must read the policy's tokens."""
    if config.reward.model is None:
        return None
    folder = Path(config.reward.model).expanduser()
    ours, theirs = (
        load_tokenizer(str(p), trust_remote_code=False)
        for p in (config.model.tokenizer_path or config.model.path, folder)
    )
    if ours.get_vocab() != theirs.get_vocab():
        raise ValueError(
            f"reward.model={folder} has another vocabulary than the policy ({config.model.path}): it would read other words; "
            "train it from a model with the policy's tokenizer"
        )
    engine = _engine(config, device, optim=None, head="score", path=str(folder))
    engine.check_packing(share_prefix=options_of(config, "model").share_prefix)
    return InprocGroup(
        "reward_model", Role("reward_model", queue, engine, share_prefix=options_of(config, "model").share_prefix)
    )


def reference_role(config: Config, algorithm: Algorithm, queue: MemoryQueue, device: str) -> InprocGroup | None:
    """A frozen copy of the start weights, if the algorithm looks at it."""
    if "ref_logprobs" not in algorithm.needs(1):  # the number of updates does not matter here
        return None
    engine = _engine(config, device, optim=None)
    return InprocGroup(
        "reference", Role("reference", queue, engine, share_prefix=options_of(config, "model").share_prefix)
    )


def critic_role(
    config: Config, algorithm: Algorithm, queue: MemoryQueue, device: str, run_dir: Path, *, updates: int
) -> InprocGroup | None:
    """The value model with its own optimizer, if the algorithm has one: the policy's engine with another head."""
    if not algorithm.critic:
        return None
    o, c = config.optim, config.critic
    spec = OptimSpec(
        lr=c.lr,
        weight_decay=c.weight_decay,
        betas=(o.betas[0], o.betas[1]),
        eps=o.eps,
        clip_grad_norm=c.clip_grad_norm,
        schedule="constant",
        warmup_steps=c.warmup_steps,
        total_steps=updates,
        max_skipped_updates=o.max_skipped_updates,
    )
    engine = _engine(config, device, optim=spec, dump_dir=run_dir / "crash", head="value", path=c.path)
    return InprocGroup("critic", Role("critic", queue, engine, share_prefix=options_of(config, "model").share_prefix))


def rollout_engine(config: Config, tokenizer: Any, device: str) -> RolloutEngine:
    """The configured engine, built from the model folder's own config.json (the trainer's has its attention switched)."""
    from transformers import AutoConfig

    r = config.rollout
    hf_config = AutoConfig.from_pretrained(
        config.model.path, trust_remote_code=config.model.trust_remote_code, local_files_only=True
    )
    dtype = config.model.dtype if r.dtype == "auto" else r.dtype
    context = max_context_tokens(config, hf_config)
    ends, decode, torch_dtype = eos_ids(config, tokenizer), decoder(tokenizer), DTYPES[dtype]
    options = options_of(config, "rollout")
    if r.engine == "native":
        return NativeEngine(
            hf_config,
            max_context_tokens=context,
            eos_token_ids=ends,
            decode=decode,
            dtype=torch_dtype,
            device=device,
            max_concurrent_sequences=r.max_concurrent_sequences,
            max_prefill_tokens=options.max_prefill_tokens,
            prefix_cache_tokens=options.prefix_cache_tokens,
            deterministic=config.run.deterministic,
            num_speculative_tokens=options.num_speculative_tokens,
            max_kv_tokens=options.max_kv_tokens,
        )
    if r.engine == "hf":
        return HfEngine(
            hf_config,
            max_context_tokens=context,
            eos_token_ids=ends,
            decode=decode,
            dtype=torch_dtype,
            device=device,
            max_concurrent_sequences=r.max_concurrent_sequences,
        )
    raise ValueError(f"rollout.engine={r.engine!r} is not in this version; use native or hf")


def max_context_tokens(config: Config, hf_config: Any) -> int:
    wanted = config.data.max_prompt_tokens + max(
        config.rollout.max_response_tokens, config.eval.max_response_tokens or 0
    )
    limit = hf_config.get_text_config().max_position_embeddings
    if wanted > limit:
        raise ValueError(
            f"data.max_prompt_tokens + rollout.max_response_tokens = {wanted} tokens, but the model was made for {limit} "
            "(max_position_embeddings); lower one of them"
        )
    return wanted


def eos_ids(config: Config, tokenizer: Any) -> tuple[int, ...]:
    """The tokenizer's end token and those of generation_config.json."""
    found = [tokenizer.eos_token_id]
    path = Path(config.model.path) / "generation_config.json"
    if path.is_file():
        extra = json.loads(path.read_text()).get("eos_token_id")
        found += extra if isinstance(extra, list) else [extra]
    return tuple(dict.fromkeys(int(i) for i in found if i is not None))


def train_sampling(config: Config) -> Sampling:
    r = config.rollout
    if r.temperature <= 0:
        raise ValueError(
            f"rollout.temperature={r.temperature}: training samples from the policy; use a temperature > 0"
        )
    sampling = Sampling(
        max_tokens=r.max_response_tokens,
        temperature=r.temperature,
        top_p=r.top_p,
        top_k=r.top_k,
        min_p=r.min_p,
        stop=tuple(r.stop),
        stop_token_ids=tuple(r.stop_token_ids),
        ignore_eos=r.ignore_eos,
    )
    if sampling.truncates:
        raise ValueError(
            f"rollout.top_p={r.top_p}, top_k={r.top_k}, min_p={r.min_p}: training cannot use a truncated distribution, since "
            "the trainer would compute other log-probs than the sampler; set top_p=1, top_k=0, min_p=0 (eval may truncate)"
        )
    return sampling


def total_steps_of(config: Config, num_rows: int, rows_per_step: int) -> int:
    if config.run.total_steps is not None:
        return config.run.total_steps
    steps = config.run.total_epochs * num_rows // rows_per_step
    if steps < 1:
        raise ValueError(
            f"{num_rows} rows x run.total_epochs={config.run.total_epochs} make no full step of {rows_per_step}; "
            "set run.total_steps or a smaller step"
        )
    return steps


def canary_tolerance(config: Config) -> float:
    if config.sync.canary_tolerance is not None:
        return config.sync.canary_tolerance
    exact = config.model.dtype == "float32" and config.rollout.dtype in ("auto", "float32")
    return 1e-4 if exact else 0.25


def checkpoint_bytes(engine: TorchEngine) -> int:
    """Master, two moments and the exported folder, float32."""
    return 4 * 4 * sum(p.numel() for p in engine.model.parameters()) + (8 << 20)


def exporter(engine: TorchEngine, config: Config, *, pad_token_id: int | None = None) -> Callable[[Path], None]:
    template = Path(config.model.chat_template).read_text() if config.model.chat_template else None
    source = Path(config.model.path).expanduser()
    overrides = classifier_config(source, pad_token_id) if engine.value_head is not None else None

    def export(path: Path) -> None:
        tensors = engine.weights()
        if engine.value_head is not None:
            tensors = classifier_tensors(engine.model.base_model_prefix, tensors, engine.value_head.weight)
        export_hf(
            path,
            tensors=tensors,
            source_dir=source,
            tokenizer_dir=config.model.tokenizer_path,
            chat_template=template,
            config_overrides=overrides,
        )

    return export


def _scheduler(config: Config, algorithm: Algorithm, total_steps: int) -> Scheduler:
    p = config.pipeline
    return Scheduler(
        prompts_per_step=config.step.prompts_per_step,
        sync_every=p.sync_every,
        staleness=p.staleness,
        oversample=p.oversample,
        total_steps=total_steps,
        max_draws_per_group=algorithm.max_draws_per_group,
        on_exhausted=algorithm.on_exhausted,
    )


def _data_seed(config: Config) -> int:
    return config.run.seed if config.data.seed is None else config.data.seed


def _eval_tasks(config: Config, tokenizer: Any) -> list[Task]:
    if not config.data.eval_files:
        return []
    table = load_tasks(
        config.data.eval_files,
        tokenizer,
        config.data,
        template_kwargs=config.model.template_kwargs,
        max_rows=config.data.max_eval_rows,
    )
    return [table[i] for i in range(len(table))]


def _probes(tasks: TaskTable) -> list[np.ndarray]:
    """Two prompts as the canary's fixed sequences."""
    return [ids for i in range(min(2, len(tasks))) if len(ids := tasks[i].prompt_ids[:128]) > 1]


async def _reward(config: Config, scorer: InprocGroup | None) -> RewardFn:
    """Function, model, or both; shaped. A model of stage=batch is added in the experience stage (driver/step.py)."""
    r = config.reward
    pool: RewardFn | None = None
    if r.path is not None or scorer is None:
        target = Target(path=r.path, name=r.name, kwargs=r.kwargs) if r.path else Target(kwargs=r.kwargs)
        pool = RewardPool(
            target,
            num_workers=r.num_workers,
            timeout_s=r.timeout_s,
            memory_limit_mb=r.memory_limit_mb,
            max_calls_per_worker=r.max_calls_per_worker,
        )
        await pool.start()
    found: RewardFn
    if scorer is None:
        assert pool is not None
        found = pool
    elif r.stage == "batch":
        found = pool or Later()
    else:
        found = ModelReward(_score_rows(scorer, config.run.wait_timeout_s), coef=r.model_coef, function=pool)
    if r.overlong_buffer_tokens > 0:
        return Shaped(found, buffer_tokens=r.overlong_buffer_tokens, penalty=r.overlong_penalty)
    return found


def _score_rows(scorer: InprocGroup, timeout_s: float) -> ScoreRows:
    async def score(rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> Sequence[float]:
        return await asyncio.wait_for(asyncio.wrap_future(scorer.submit("score_rows", rows, split="first")), timeout_s)

    return score


def _loop_factory(config: Config, tokenizer: Any) -> AgentLoopFactory:
    def make(server_manager: ServerManager) -> AgentLoopBase:
        return SingleTurnLoop(config, server_manager, tokenizer)

    return make
