"""Choose the agent loops of a run and the process that runs them: user code runs in a process beside the driver, unless
the configuration places it in the driver. Build what plays trajectories with them."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from verl.agent_loop.registry import Loops, load_loops, of_the_user
from verl.agent_loop.runner import LoopRunner, hosted_loops
from verl.algorithms.resolve import Algorithm
from verl.config.model_files import find_model_folder
from verl.config.schema import Config
from verl.config.tree import text_of
from verl.data.formats import SINGLE_TURN, TOOL_AGENT, played_by
from verl.data.source import TaskTable
from verl.driver.banned import policy_banned
from verl.driver.setup import decoder, stop_ids, template_lines, unchecked_tokenizer
from verl.driver.task_media import ToolImages
from verl.driver.trajectories import TrajectoryRunner
from verl.driver.worker_setup import set_up_process
from verl.errors import Refused
from verl.reward.base import RewardFn
from verl.rollout.base import RolloutEngine
from verl.track.events import next_attempt
from verl.types import Task, derive_seed
from verl.workers.host import free_bytes
from verl.workers.waits import Waits


async def loops_of(config: Config, tokenizer: Any) -> Loops:
    """Build the agent loops, in a process of their own if they contain user code. Their lines for the user begin with
    the tokens that end an answer."""
    loops = await _loops_of(config, tokenizer)
    return replace(loops, notes=(*template_lines(config, tokenizer), *loops.notes))


async def _loops_of(config: Config, tokenizer: Any) -> Loops:
    if not of_the_user(config.agent):
        return load_loops(config, tokenizer, stop_ids(config, tokenizer), find_model_folder(config.model.path))
    attempt = next_attempt(Path(config.run.root_dir) / config.run.name)
    memory_mb = free_bytes() / 2 / 2**20
    runner = LoopRunner(loops_there, (config, attempt), silent_s=config.agent.tool_timeout_s, memory_mb=memory_mb)
    return await hosted_loops(runner, config, tokenizer)


def all_played(config: Config, tasks: TaskTable, eval_tasks: list[Task]) -> tuple[TaskTable, list[Task]]:
    """Return the tasks. Raise ValueError if tools are configured that no row uses."""
    default, _ = played_by(config.agent.loop, config.agent.tools)
    every = (tasks[i] for i in range(len(tasks)))
    built_in = default in (SINGLE_TURN, TOOL_AGENT)  # a custom loop may read agent.tools
    if config.agent.tools and built_in and not any(t.agent == TOOL_AGENT for t in chain(every, eval_tasks)):
        why = f"agent.loop is {default}, and no row's agent_name is {TOOL_AGENT}"
        fix = f"set agent.loop={TOOL_AGENT} or the rows' agent_name, or leave agent.tools out"
        raise Refused(f"agent.tools={text_of(config.agent.tools)}: no row plays with them: {why}; {fix}")
    return tasks, eval_tasks


def loops_there(given: tuple[Config, int], start: int) -> Loops:
    """Build the loops in the runner's process, with random numbers that differ in every start of the run. given: the
    configuration and the attempt of the run."""
    config, attempt = given
    seed = derive_seed(config.run.seed, "loops", attempt, start)
    set_up_process(replace(config, run=replace(config.run, seed=seed)))
    tokenizer = unchecked_tokenizer(config)
    return load_loops(config, tokenizer, stop_ids(config, tokenizer), find_model_folder(config.model.path))


def trajectories_of(
    config: Config,
    tokenizer: Any,
    loops: Loops,
    rollout: RolloutEngine,
    reward: RewardFn,
    waits: Waits,
    algorithm: Algorithm,
    images: ToolImages,
) -> TrajectoryRunner:
    """Build the runner of trajectories."""
    return TrajectoryRunner(
        engine=rollout,
        loop=loops.make,
        reward=reward,
        decode=decoder(tokenizer),
        waits=waits,
        seed=config.run.seed,
        max_attempts=config.pipeline.max_attempts,
        max_turns=config.agent.max_turns,
        credits_turns=algorithm.credits_turns(),
        stored_share=algorithm.stored_share(),
        banned=policy_banned(config, tokenizer),
        images=images,
        timeout_s=config.run.wait_timeout_s,
        # the pool limits each call to reward.timeout_s from its start; this limit is for a pool that is stuck
        reward_timeout_s=config.run.wait_timeout_s + 2 * config.reward.timeout_s,
    )


async def closed(loops: Loops, images: ToolImages) -> None:
    """Close the loops of a run, then remove the files of their tools' images."""
    await loops.close()
    images.clear()
