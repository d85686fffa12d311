"""Build the reward of a run from its configuration: a function in its pool, a model, or both."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import chain

from verl.algorithms.filters import Truncation
from verl.algorithms.presets import settled
from verl.config.frozen import thawed
from verl.config.on_base import REWARD_MODEL
from verl.config.schema import BY_DATA_SOURCE, Config
from verl.data.formats import Players
from verl.data.render import RowCounts
from verl.data.source import TaskTable
from verl.data.truths import NOTHING
from verl.errors import Refused
from verl.reward.base import RewardFn
from verl.reward.code import check_tier
from verl.reward.compute import CODE, check_data_source, readable_truth, right_answer
from verl.reward.model import Later, ModelReward, ScoreRows
from verl.reward.pool import RewardPool, grader_spec
from verl.reward.shaping import Shaped
from verl.types import Segment, Task
from verl.workers.model_workers import ModelWorkers

REHEARSED_ROWS, TRUTHS_PER_SOURCE = 512, 4


async def reward_of(
    config: Config, models: Mapping[str, ModelWorkers], truncation: Truncation | None, tasks: Sequence[Task]
) -> tuple[RewardFn, RewardPool | None]:
    """Build the reward: a function, a model, or both, with shaping. Return it and the pool of the function. A model
    with stage=batch is added later, in the experience stage (driver/step.py). models: by role; the
    reward model is started later · tasks: rows on which the function is tried, to find one that always raises, and a
    rule by which even the ground truth gets no reward (`to_rehearse` selects them)."""
    r, kwargs = config.reward, thawed(config.reward.kwargs)
    pool: RewardPool | None = None
    if r.path is not None or r.model is None:
        pool = RewardPool(
            grader_spec(*r.grader(), kwargs),
            num_workers=r.num_workers,
            timeout_s=r.timeout_s,
            memory_limit_mb=r.memory_limit_mb,
        )
        await pool.start()
        await pool.rehearse(tasks[0])
        if by_rules(config) and rewards_count(config):
            await _refuse_unearnable(pool, tasks)
    found: RewardFn
    if r.model is None:
        assert pool is not None
        found = pool
    elif r.stage == "batch":
        found = pool or Later()
    else:
        found = ModelReward(_score_rows(models, config.run.wait_timeout_s), coef=r.model_coef, function=pool)
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


def by_rules(config: Config) -> bool:
    """Return whether rows are scored by the rule of their data_source."""
    return config.reward.grader()[0] == BY_DATA_SOURCE and config.reward.model is None


def rewards_count(config: Config) -> bool:
    return settled(config.algorithm.name, config.algorithm.given()).reads_rewards()


def check_graders(config: Config, first: Sequence[Task], reports: Sequence[RowCounts]) -> None:
    """Raise ValueError for rows that need a judge if none is given, rows of a source without a rule, and rows with a
    missing ground truth or one that the rule cannot read. first: a task of each table."""
    if config.reward.path is None and config.reward.model is None:
        if judged := next((report.judged for report in reports if report.judged), ""):
            fix = "Fix: reward.path=FILE.py or reward.model=FOLDER as the judge of every row; or set style to rule"
            raise Refused(f"{judged}: reward_model.style=model asks for a judge, and none is given. {fix}")
        for source in {task.data_source for task in first}:
            check_data_source(source)
    if not by_rules(config) or not rewards_count(config):
        return
    for source, kinds in chain.from_iterable(report.truths.items() for report in reports):
        for kind, (count, where) in kinds.items():
            try:
                check_data_source(source)
            except Refused as exc:
                raise Refused(f"{where}: {exc}") from exc
            if not readable_truth(source, kind):
                message = "no ground truth" if kind == NOTHING else f"a ground truth that is {kind}, not a text"
                raise Refused(
                    f"{where}: {message} ({count} such row{'s' if count > 1 else ''}), and the rule of {source!r}"
                    " compares answers with it: none would be right. Fix: fill reward_model.ground_truth (or"
                    " ground_truth, answer, label, ...) with the answer as text, or reward.path=FILE.py to score it"
                    " otherwise"
                )


def to_rehearse(tasks: TaskTable, eval_tasks: Sequence[Task], players: Players) -> list[Task]:
    """Return the first task, and some tasks of each data_source with a reward by the reward function."""
    found: dict[str, list[Task]] = {}
    every = [*(tasks[i] for i in range(min(REHEARSED_ROWS, len(tasks)))), *eval_tasks[:REHEARSED_ROWS]]
    for task in every:
        if players.graded(task.agent) and len(of_source := found.setdefault(task.data_source, [])) < TRUTHS_PER_SOURCE:
            of_source.append(task)
    return [tasks[0], *chain.from_iterable(found.values())]


async def _refuse_unearnable(pool: RewardPool, tasks: Sequence[Task]) -> None:
    """Raise ValueError for a data source if its rule never gives the ground truth, in the format that the rule expects,
    a higher score than an empty answer."""
    lowest: dict[str, tuple[Task, str]] = {}
    earned: set[str] = set()
    for task in tasks[1:]:
        answer = right_answer(task.data_source, task.ground_truth)
        if answer is None or task.data_source in earned:
            continue
        best, least = [await pool.rehearsed(task, found) for found in (answer, "")]
        if best is None or least is None or best > least:
            earned.add(task.data_source)
        lowest.setdefault(task.data_source, (task, answer))
    for source, (task, answer) in lowest.items():
        if source not in earned:
            await pool.close()
            raise Refused(
                f"row {task.index}: its own ground truth {str(task.ground_truth)[:60]!r} gets the lowest score of the "
                f"rule of {source!r} (as the answer {answer[:60]!r}): none would be right. Fix: the answer itself as "
                "the truth, as the rule reads it, or reward.path=FILE.py to score it otherwise"
            )


def sandbox_of(config: Config, tasks: Sequence[Task]) -> tuple[str, ...]:
    """Return a line about the isolation of the programs that the built-in rewards run; empty if they run none."""
    if config.reward.path or config.reward.model or not any(task.data_source in CODE for task in tasks):
        return ()
    return (f"code sandbox of rewards: {check_tier(str(config.reward.kwargs.get('tier', 'auto')))}",)


def _score_rows(models: Mapping[str, ModelWorkers], timeout_s: float) -> ScoreRows:
    async def score(rows: Sequence[tuple[Segment, ...]]) -> Sequence[float]:
        found = await asyncio.to_thread(models[REWARD_MODEL].score_rows, rows)  # blocks while the model is being built
        return await asyncio.wait_for(asyncio.wrap_future(found), timeout_s)

    return score
