"""What scores an answer, from the configuration: a function in its pool, a model, or both."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from verl.algorithms.filters import Truncation
from verl.config.schema import Config
from verl.reward.base import RewardFn
from verl.reward.code import check_tier
from verl.reward.compute import CODE
from verl.reward.model import Later, ModelReward, ScoreRows
from verl.reward.pool import RewardPool, grader_spec
from verl.reward.shaping import Shaped
from verl.types import Task
from verl.workers.model_workers import ModelWorkers


async def reward_of(
    config: Config, scorer: ModelWorkers | None, truncation: Truncation | None, task: Task
) -> tuple[RewardFn, RewardPool | None]:
    """Function, model, or both; shaped; and the function's pool. A model of stage=batch is added in the experience
    stage (driver/step.py). task: for one call of the function, so that one that always raises is found here."""
    r = config.reward
    pool: RewardPool | None = None
    if r.path is not None or scorer is None:
        pool = RewardPool(
            grader_spec(r.path, r.name, r.kwargs) if r.path else grader_spec(kwargs=r.kwargs),
            num_workers=r.num_workers,
            timeout_s=r.timeout_s,
            memory_limit_mb=r.memory_limit_mb,
        )
        await pool.start()
        await pool.rehearse(task)
    found: RewardFn
    if scorer is None:
        assert pool is not None
        found = pool
    elif r.stage == "batch":
        found = pool or Later()
    else:
        found = ModelReward(_score_rows(scorer, config.run.wait_timeout_s), coef=r.model_coef, function=pool)
    of_cut = truncation or Truncation()
    if r.overlong_buffer_tokens > 0 or of_cut.shapes:
        found = Shaped(
            found,
            buffer_tokens=r.overlong_buffer_tokens,
            penalty=r.overlong_penalty,
            stop_coef=of_cut.stop_properly_coef,
            longest=of_cut.overlong_tokens,
            cap=of_cut.overlong_cap,
        )
    return found, pool


def sandbox_of(config: Config, tasks: Sequence[Task]) -> tuple[str, ...]:
    """What keeps the programs in that the built-in rewards run, in a line; none, where they run none."""
    if config.reward.path or config.reward.model or not any(task.data_source in CODE for task in tasks):
        return ()
    return (f"code sandbox of rewards: {check_tier(str(config.reward.kwargs.get('tier', 'auto')))}",)


def _score_rows(scorer: ModelWorkers, timeout_s: float) -> ScoreRows:
    async def score(rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> Sequence[float]:
        found = await asyncio.to_thread(scorer.score_rows, rows)  # which waits for a model that is being built
        return await asyncio.wait_for(asyncio.wrap_future(found), timeout_s)

    return score
