"""Build the parts of an RL run from its configuration. This is the only importer of concrete backends; the code above
the protocols is the same everywhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from verl.agent_loop.registry import Loops
from verl.algorithms.presets import settled
from verl.algorithms.resolve import Algorithm, resolve
from verl.algorithms.specs import GKDTopK, function
from verl.checkpoint.latest import beyond
from verl.config.backends import CLUSTER, backend_of, import_object, layout_of, longest_sequence, options_of, traits_of
from verl.config.cluster import placed_roles
from verl.config.devices import base_format, colocated, drops_rollout_weights
from verl.config.load import Resolved
from verl.config.lora_layers import served_factors, trained_factors
from verl.config.model_files import describe_model, find_model_folder
from verl.config.noise import noise_of
from verl.config.schema import AlgorithmConfig, Config
from verl.config.tree import changed
from verl.data.cursor import Curriculum
from verl.data.feedback import feedback_of
from verl.data.formats import FEEDBACK, ONE_ANSWER, Players
from verl.data.source import Cursor, TaskTable, load_tasks
from verl.driver.assemble_fleet import fleet_of, rollout_engine
from verl.driver.assemble_images import media_of_run, refuse_images, tool_images
from verl.driver.assemble_loops import all_played, closed, loops_of, trajectories_of
from verl.driver.assemble_rewards import check_graders, reward_of, sandbox_of, to_rehearse
from verl.driver.checkpointer import Checkpointer
from verl.driver.driver_host import driver_host, logs_folder
from verl.driver.lora_publisher import LoraPublisher
from verl.driver.measure import pool_metrics
from verl.driver.models import ModelContext, early_models, hf_export, models_of, scorers_of, trained, workers_of
from verl.driver.publisher import Publisher
from verl.driver.queue_rows import QueueRows
from verl.driver.record import build_recorder
from verl.driver.reporter import OnStep, Reporter
from verl.driver.roles import Controllers, Learner
from verl.driver.rollouts import RolloutManager
from verl.driver.run import Run
from verl.driver.run_dir import RunDir, open_run_dir, write_config
from verl.driver.scheduler import Scheduler
from verl.driver.setup import (
    check_able,
    data_seed,
    device_of,
    free_bytes_of,
    from_threads,
    load_tokenizer_of,
    refuse_unembedded,
    refuse_untrained,
    require_an_end,
    stop_ids,
    unread_ids,
    with_native_dtype,
)
from verl.driver.stretched import stretched
from verl.driver.trajectories import TrajectoryRunner
from verl.driver.worker_setup import set_up_process, set_up_worker
from verl.errors import Refused
from verl.planner import disk, plan, sizes
from verl.rollout.base import RolloutEngine
from verl.rollout.router import Router
from verl.rollout.wrapper import AfterPublish
from verl.track.console import LiveProgress
from verl.track.events import EventLog
from verl.track.sinks import open_sinks
from verl.types import Sampling, Task
from verl.weight_sync.base import CheckpointEngine, SyncContext
from verl.weight_sync.canary import probes_of
from verl.workers.compute import build_compute
from verl.workers.group import ClusterContext, Drivers, WorkerGroup
from verl.workers.model_workers import START_TIMEOUT_S, ComputeWorker, ModelWorkers
from verl.workers.placement import Placement
from verl.workers.pools import pools_of
from verl.workers.waits import Waits


def algorithm_of(config: AlgorithmConfig) -> Algorithm:
    return resolve(config.name, config.given())


async def assemble(
    resolved: Resolved, command: str = "train", *, progress: LiveProgress | None = None, on_step: OnStep | None = None
) -> Run:
    """Build every part of an RL run. The user's input is checked here, the cheapest checks first."""
    resolved = replace(resolved, config=with_native_dtype(resolved.config))
    config = resolved.config
    set_up_process(config)
    algorithm = algorithm_of(config.algorithm)
    tokenizer = load_tokenizer_of(config)
    require_an_end(config, tokenizer)
    loops = await loops_of(config, tokenizer)
    async with contextlib.AsyncExitStack() as refused:  # a refused start may be tried again in this process
        refused.push_async_callback(loops.close)
        tasks, eval_tasks = all_played(config, *tasks_of(config, tokenizer, loops.players))
        refuse_untrained(config, command, tasks)
        claimed = open_run_dir(resolved, command, {**loops.contents, **tasks.report.contents})
        refused.callback(claimed.lock.close)
        data, progress = (tokenizer, loops, tasks, eval_tasks), progress or LiveProgress()
        run = await _run_of(resolved, claimed, algorithm, data, progress, on_step, refused)
        refused.pop_all()  # the run closes them
        return run


async def _run_of(
    resolved: Resolved,
    claimed: RunDir,
    algorithm: Algorithm,
    data: tuple[Any, Loops, TaskTable, list[Task]],
    progress: LiveProgress,
    on_step: OnStep | None,
    refused: contextlib.AsyncExitStack,
) -> Run:
    """Build the rest of a run whose directory is claimed. refused: closes its entries if the start is refused."""
    config, (tokenizer, loops, tasks, eval_tasks) = resolved.config, data
    warned = (f"warning: {found}" for found in plan.algorithm_warnings(config))
    claimed = replace(claimed, setup_lines=(*loops.notes, *sandbox_of(config, [tasks[0], *eval_tasks[:1]])))
    progress.message("\n".join([f"data: {tasks.report.summary()}", *claimed.setup_lines, *warned]))
    waits, cursor = Waits(claimed.path / "waits.json"), _cursor(config, algorithm, len(tasks))
    num_steps = total_steps_of(config, len(tasks), config.step.prompts_per_step)
    updates = sizes.policy_updates(config, num_steps)
    for line in _critic_alone(algorithm, updates, num_steps):
        progress.message(line)
    shared = {"crash_dir": claimed.path / "crash", "say": progress.message, "tokenizer": tokenizer}
    context = context_of(config, placed_roles(config), updates=updates_of_run(config, num_steps), **shared)
    refused.callback(context.cluster.close)
    refuse_images(config, tasks, eval_tasks, context.queue.media)
    models: dict[str, ModelWorkers] = {}
    reward, pool = await reward_of(config, models, algorithm.truncation, to_rehearse(tasks, eval_tasks, loops.players))
    refused.push_async_callback(reward.close)
    prompts, vocab = (tasks[i].prompt_ids for i in range(min(64, len(tasks)))), describe_model(config.model.path).vocab
    sync = checkpoint_engine(config, probes := probes_of(prompts, longest_sequence(config), vocab))
    policy = trained(context, "actor", updates=updates, hf_export=hf_export(config), outlet=sync.outlet())
    actor = workers_of(context, policy)
    models |= models_of(context, algorithm, actor) | scorers_of(context, actor)
    learner = learner_of(context, algorithm, models, waits)
    rollout, replicas = await _started(config, tokenizer, context, waits, progress, refused)
    recording = _recording(context, claimed.path, tokenizer, learner)
    reporter = reporter_of(claimed, resolved, progress, waits, num_steps, recording=recording, on_step=on_step)
    images = tool_images(config, claimed.path, context.queue.media)
    trajectories = trajectories_of(config, tokenizer, loops, rollout, reward, waits, algorithm, images)
    groups = _groups(config, learner, tasks, cursor, trajectories, reporter, num_steps, tokenizer)
    checkpointer = Checkpointer(claimed, learner, trained_roles(learner), disk.checkpoint_bytes(config), reporter)
    say_notes(learner, progress.message)
    publisher = _publisher(config, sync, probes, actor, replicas, rollout, waits, progress)
    context.cluster.watch(from_threads(groups.fail))
    if isinstance(rollout, Router):
        rollout.watch(groups.fail)
    return Run(
        config=config,
        dir=claimed.path,
        total_steps=num_steps,
        learner=learner,
        groups=groups,
        trajectories=trajectories,
        eval_tasks=eval_tasks,
        rollout=rollout,
        placement=_placement(config, replicas, waits, progress.message),
        publisher=publisher,
        fleet=fleet_of(config, tokenizer, context, rollout, publisher, groups, reporter, claimed.path),
        checkpointer=checkpointer,
        reporter=reporter,
        stop=checkpointer.stop,
        lock=claimed.lock,
        close_reward=reward.close,
        close_tools=partial(closed, loops, images),
        reward_metrics=lambda: pool_metrics(pool.take_load()) if pool else {},
        first_index=claimed.state.step if claimed.state else 0,
    )


def _critic_alone(algorithm: Algorithm, updates: int, num_steps: int) -> Iterator[str]:
    """Yield a warning if the policy has no update in the whole run."""
    if algorithm.critic is not None and updates == 0:
        warm = f"algorithm.critic_warmup_steps={algorithm.critic.critic_warmup_steps}"
        yield f"warning: {warm}: in {num_steps} steps the critic learns alone and the policy stays as it is"


async def _started(
    config: Config,
    tokenizer: Any,
    context: ModelContext,
    waits: Waits,
    progress: LiveProgress,
    refused: contextlib.AsyncExitStack,
) -> tuple[RolloutEngine, Sequence[RolloutEngine]]:
    """Start the rollout engines. Return the engine that receives all requests, and the engines that it passes them to:
    itself, or the replicas of a router. A single engine that may be lost gets a router too."""
    parts, peers, count = (config, tokenizer, context.devices["rollout"]), context.peers, config.rollout.replicas
    media = context.queue.media
    starts = [partial(context.cluster.replica, i, rollout_engine, (*parts, i, peers, media)) for i in range(count)]
    rollout: RolloutEngine
    if count == 1 and not traits_of(config.rollout.engine).server:
        rollout = starts[0]()
        replicas: Sequence[RolloutEngine] = (rollout,)
    else:
        restarts, mixes, at_urls = config.cluster.max_restarts, config.pipeline.partial_rollout, config.rollout.url
        rollout = Router(starts, restarts=restarts, at_urls=bool(at_urls), mixes=mixes, note=progress.message)
        replicas = rollout.replicas
    refused.push_async_callback(rollout.close)
    wanted = replicas[0].capabilities()
    able = await waits.wait(wanted, waiter="driver", what="the rollout engines to start", timeout_s=START_TIMEOUT_S)
    check_able(able, config)
    for note in able.notes:
        progress.message(note)
    return rollout, replicas


def _recording(context: ModelContext, run_dir: Path, tokenizer: Any, learner: Learner) -> tuple[WorkerGroup, QueueRows]:
    args = (context.queue, run_dir, tokenizer, context.config.track.samples_per_step, media_of_run(run_dir))
    return context.cluster.start("recorder", build_recorder, args), learner.rows


def _publisher(
    config: Config,
    sync: CheckpointEngine,
    probes: Sequence[np.ndarray],
    actor: ModelWorkers,
    replicas: Sequence[RolloutEngine],
    rollout: RolloutEngine,
    waits: Waits,
    progress: LiveProgress,
) -> Publisher:
    whole = {key: value for key, value in config.sync.engine_options.items() if key != "bucket_mb"}
    engine = backend_of(config, "sync").for_sets or config.sync.engine
    of_sets = changed(config, {"sync.engine": engine, "sync.engine_options": whole})
    lora = LoraPublisher(
        trainer=actor,
        base=Path(config.model.path).expanduser(),
        new_engine=partial(checkpoint_engine, of_sets, probes),
        after=AfterPublish,
        waits=waits,
        timeout_s=config.run.wait_timeout_s,
        note=progress.message,
        published=rollout.set_published if isinstance(rollout, Router) else lambda name: None,
        drop=rollout.drop_set,
    )
    factors = trained_factors(config)
    return Publisher(
        engine=sync,
        trainer=actor,
        replicas=replicas,
        waits=waits,
        timeout_s=config.run.wait_timeout_s,
        exclusive=_in_step(config),
        partial_rollout=config.pipeline.partial_rollout,
        note=progress.message,
        published=rollout.published if isinstance(rollout, Router) else None,
        lora=lora,
        trained_rank=factors.rank if factors else 0,
        trained_experts=factors is not None and factors.of_experts > 0,
        trained_whole=factors is not None and bool(factors.saved),
        quantised_base=base_format(config) != "none",
        sends_factors=served_factors(config) is not None,
    )


def _placement(
    config: Config, replicas: Sequence[RolloutEngine], waits: Waits, note: Callable[[str], None]
) -> Placement:
    drops, free, limit_s = drops_rollout_weights(config), free_bytes_of(config), config.run.wait_timeout_s
    return Placement(replicas, colocated(config), drops, waits, limit_s, note, free)


def _in_step(config: Config) -> bool:
    """Return whether publishes happen inside a step: nothing is in flight and no optimizer step runs meanwhile."""
    return config.pipeline.staleness == 0


def _cursor(config: Config, algorithm: Algorithm, num_tasks: int) -> Cursor:
    seed, name = data_seed(config), algorithm.group_filter.curriculum
    if name is None:
        return Cursor(num_tasks, seed, config.data.shuffle)
    weigh = function(name, "algorithm.options.curriculum")
    return Cursor(num_tasks, seed, config.data.shuffle, curriculum=Curriculum(num_tasks, seed, weigh))


def _groups(
    config: Config,
    learner: Learner,
    tasks: TaskTable,
    cursor: Cursor,
    trajectories: TrajectoryRunner,
    reporter: Reporter,
    total_steps: int,
    tokenizer: Any,
) -> RolloutManager:
    assert learner.algorithm is not None
    ahead = early_models(config, learner.algorithm, learner.models)
    learner.models |= ahead
    inform = feedback_of(tokenizer, config.model.template_kwargs, config.data.max_prompt_tokens)
    return RolloutManager(
        scheduler=_scheduler(config, learner.algorithm, total_steps),
        cursor=cursor,
        tasks=tasks,
        trajectories=trajectories,
        algorithm=learner.algorithm,
        sampling=replace(sampling_of(config), noise=noise_of(config) is not None),
        samples_per_prompt=config.step.samples_per_prompt,
        rows=learner.rows,
        events=reporter.events,
        waits=learner.waits,
        timeout_s=config.run.wait_timeout_s,
        eager=not _in_step(config),
        unread=unread_ids(config, tokenizer),
        max_invalid_share=config.pipeline.max_invalid_share,
        inform=inform if config.teacher.hint_key == FEEDBACK else None,
        ahead=tuple(ahead.values()),
    )


def learner_of(
    context: ModelContext, algorithm: Algorithm | None, models: dict[str, ModelWorkers], waits: Waits | None = None
) -> Learner:
    """Join an algorithm (None in a supervised run) with the workers of its roles."""
    return Learner(
        config=context.config,
        cluster=context.cluster,
        algorithm=algorithm,
        models=models,
        compute=ComputeWorker(context.cluster.start("compute", build_compute, (context.queue,))),
        queue=context.queue,
        waits=waits or Waits(),
        controllers=Controllers(algorithm.kl_reward.coef if algorithm and algorithm.kl_reward else 0.0),
    )


def offline_learner(config: Config, total_steps: int, crash_dir: Path) -> Learner:
    """Build the algorithm and the models of a configuration, for samples that are made elsewhere."""
    context = context_of(config, placed_roles(config), updates=updates_of_run(config, total_steps), crash_dir=crash_dir)
    algorithm = algorithm_of(config.algorithm)
    actor = workers_of(context, trained(context, "actor", updates=sizes.policy_updates(config, total_steps)))
    return learner_of(context, algorithm, models_of(context, algorithm, actor))


def context_of(
    config: Config,
    roles: Sequence[str] = ("actor",),
    *,
    updates: int = 1,
    crash_dir: Path | None = None,
    drivers: Drivers | None = None,
    say: Callable[[str], None] = print,
    longest: int | None = None,
    tokenizer: Any = None,
) -> ModelContext:
    """Build the settings that the models of these roles share, and the cluster in which they run."""
    device, layout = device_of(config), layout_of(config)
    pools, lives = pools_of(config.cluster, roles, device=device)
    apart = config.cluster.backend != "inproc" and drivers is None
    python, folder = config.model.python, crash_dir.parent if crash_dir else None
    home = driver_host(folder) if apart else None
    made = ClusterContext(
        layout=layout,
        roles=tuple(roles),
        replicas=config.rollout.replicas,
        set_up=partial(set_up_worker, config, home),
        device=device,
        wait_timeout_s=config.run.wait_timeout_s,
        say=say,
        drivers=drivers,
        python=python,
        logs=logs_folder(config),
    )
    cluster = import_object(CLUSTER[config.cluster.backend].build)(config.cluster, made)
    queue = import_object(backend_of(config, "queue").build)(options_of(config, "queue"))
    devices = {role: pools[at].computes_on for role, at in lives.items()}
    facts = (config, queue, device, updates, crash_dir, cluster, say, devices)
    return ModelContext(*facts, longest=longest, tokenizer=tokenizer)


def checkpoint_engine(config: Config, probes: Sequence[np.ndarray] = ()) -> CheckpointEngine:
    wanted, tolerance = probes if config.sync.canary else (), config.sync.canary_tolerance
    context = SyncContext(probes=wanted, tolerance=tolerance, model=config.model.path)
    return import_object(backend_of(config, "sync").build)(options_of(config, "sync"), context)


def trained_roles(learner: Learner) -> tuple[str, ...]:
    """Return the roles that have an optimizer, the policy first."""
    return tuple(role for role, workers in learner.models.items() if workers.trains)


def say_notes(learner: Learner, say: Callable[[str], None]) -> None:
    """Print the notes of the trained models' engines, each line once."""
    every = (workers.capabilities.notes for workers in learner.models.values() if workers.trains)
    for note in dict.fromkeys(note for notes in every for note in notes):
        say(note)


def reporter_of(
    claimed: RunDir,
    resolved: Resolved,
    progress: LiveProgress,
    waits: Waits,
    total_steps: int,
    *,
    recording: tuple[WorkerGroup, QueueRows] | None = None,
    on_step: OnStep | None = None,
) -> Reporter:
    """Open the records of the run: the first write into its directory, after all checks that can refuse a start."""
    config, attempt, done = resolved.config, claimed.attempt, claimed.state.step if claimed.state else 0
    records = claimed.records or claimed.path
    lines = (*beyond(claimed.path, done, total_steps), *stretched(config, records, done, total_steps))
    for note in (*claimed.notes, *lines):
        progress.message(note)
    write_config(records, attempt, resolved)
    events = EventLog(records, attempt, report=progress.message, hide=resolved.hide)
    events.append("resumed", done + 1, claimed.begun(total_steps))
    return Reporter(
        config=config,
        run_dir=records,
        sinks=open_sinks(records, config, attempt=attempt, progress=progress),
        events=events,
        progress=progress,
        waits=waits,
        recorder=recording[0] if recording else None,
        rows=recording[1] if recording else None,
        on_step=on_step,
        verl_names=resolved.verl_names,
    )


def tasks_of(config: Config, tokenizer: Any, players: Players = ONE_ANSWER) -> tuple[TaskTable, list[Task]]:
    """Load training rows and evaluation tasks. Raise ValueError for a task that no reward can score."""
    data, kwargs, stops = config.data, config.model.template_kwargs, stop_ids(config, tokenizer)
    read = partial(load_tasks, tokenizer=tokenizer, cfg=data, template_kwargs=kwargs, players=players, stops=stops)
    read = partial(read, model=find_model_folder(config.model.path))
    teachers = tuple(config.teacher.paths) if config.teacher.pick == "task" else ()
    learners = players._replace(teachers=teachers, hint_key=config.teacher.hint_key)
    loss = settled(config.algorithm.name, config.algorithm.given()).loss
    if isinstance(loss, GKDTopK):
        learners = learners._replace(answer_key=loss.stored_key, answer_tokens=config.rollout.max_response_tokens)
    tasks = read(data.train_files, max_rows=data.max_rows, players=learners)
    refuse_unembedded(config, tokenizer, tasks.report)
    eval_tasks, reports = list[Task](), [tasks.report]
    if data.eval_files:
        table = read(data.eval_files, max_rows=data.max_eval_rows)
        refuse_unembedded(config, tokenizer, table.report)
        eval_tasks, reports = [table[i] for i in range(len(table))], [*reports, table.report]
    check_graders(config, (tasks[0], *eval_tasks[:1]), reports)
    return tasks, eval_tasks


def updates_of_run(config: Config, total_steps: int) -> int:
    return total_steps * config.step.updates_per_step * config.step.epochs_per_step


def sampling_of(config: Config) -> Sampling:
    r = config.rollout
    return Sampling(
        max_tokens=r.max_response_tokens,
        temperature=r.temperature,
        top_p=r.top_p,
        top_k=r.top_k,
        min_p=r.min_p,
        stop=tuple(r.stop),
        stop_token_ids=tuple(r.stop_token_ids),
        ignore_eos=r.ignore_eos,
    )


def total_steps_of(config: Config, num_rows: int, rows_per_step: int) -> int:
    steps = sizes.total_steps(config, num_rows, rows_per_step)
    if steps < 1:
        rows = f"{num_rows} rows x run.total_epochs={config.run.total_epochs}"
        raise Refused(f"{rows} make no full step of {rows_per_step}; set run.total_steps or a smaller step")
    return steps


def _scheduler(config: Config, algorithm: Algorithm, total_steps: int) -> Scheduler:
    p = config.pipeline
    return Scheduler(
        prompts_per_step=config.step.prompts_per_step,
        sync_every=p.sync_every,
        staleness=p.staleness,
        oversample=p.oversample,
        total_steps=total_steps,
        max_draws_per_group=algorithm.group_filter.max_draws_per_group,
        on_exhausted=algorithm.group_filter.on_exhausted,
    )
