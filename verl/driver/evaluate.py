"""Evaluation: a rollout of its own with the present weights, which uses no slot of the scheduler."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Protocol

import numpy as np

from verl.agent_loop.base import together
from verl.config.schema import Config
from verl.driver.reporter import Reporter
from verl.driver.rollouts import RolloutManager
from verl.driver.task_media import owner_of_group
from verl.driver.trajectories import TrajectoryRunner, TrajectorySpec
from verl.types import Metric, Metrics, Sampling, Score, Task, Trajectory


class EvaluatedRun(Protocol):
    """The parts of a run that an evaluation uses."""

    @property
    def config(self) -> Config: ...
    @property
    def trajectories(self) -> TrajectoryRunner: ...
    @property
    def groups(self) -> RolloutManager: ...
    @property
    def eval_tasks(self) -> Sequence[Task]: ...
    @property
    def reporter(self) -> Reporter: ...


def eval_sampling(config: Config) -> dict[str, Sampling]:
    """Return the sampling parameters of each evaluation mode, "greedy" or "sampled"."""
    rollout, ev = config.rollout, config.eval
    common = {
        "max_tokens": ev.max_response_tokens or rollout.max_response_tokens,
        "stop": tuple(rollout.stop),
        "stop_token_ids": tuple(rollout.stop_token_ids),
        "ignore_eos": rollout.ignore_eos,
    }
    first = Sampling(temperature=ev.temperature, top_p=ev.top_p, top_k=ev.top_k, **common)  # type: ignore[arg-type]
    modes = {"greedy" if ev.temperature == 0 else "sampled": first}
    if ev.also_sampled and "sampled" not in modes:
        modes["sampled"] = Sampling(temperature=rollout.temperature, **common)  # type: ignore[arg-type]
    return modes


async def evaluate(run: EvaluatedRun, number: int) -> Metrics:
    """Run every evaluation task. Return the score per source and mode, lengths and the share of invalid answers; the
    samples are written to samples/."""
    out: Metrics = {}
    every: list[Trajectory] = []
    rollout = run.config.rollout
    held = asyncio.Semaphore(rollout.max_concurrent_sequences * rollout.replicas)
    for mode, sampling in eval_sampling(run.config).items():
        repeats = run.config.eval.samples_per_prompt if sampling.temperature > 0 else 1
        runs = [
            _answers(run, task, f"eval{number}/{mode}/{i}", sampling, repeats, held)
            for i, task in enumerate(run.eval_tasks)
        ]
        found = [answer for answers in await together(runs) for answer in answers]
        run.groups.check()  # a custom loop may have hidden the death of an engine
        sources = [task.data_source or "unknown" for task in run.eval_tasks for _ in range(repeats)]
        out |= eval_metrics(mode, found, sources, repeats)
        if run.reporter.verl_names and not every:  # only for the first mode: verl has one mode
            out |= verl_validation(found, sources, repeats)
        every += found
    truths = {task.task_id: task.ground_truth for task in run.eval_tasks}
    await run.reporter.record_eval(number, every, truths)
    return out


async def _answers(
    run: EvaluatedRun, task: Task, group_id: str, sampling: Sampling, repeats: int, held: asyncio.Semaphore
) -> list[Trajectory]:
    """Return the answers to one task. held: limits the tasks whose images are in the store to as many as the rollout
    can answer at a time."""
    async with held if task.images else nullcontext(), run.groups.media.held(task, owner_of_group(group_id)) as seen:
        specs = [TrajectorySpec(group_id=group_id, index=k, purpose="eval") for k in range(repeats)]
        return await together(run.trajectories.run(seen, spec, sampling) for spec in specs)


def eval_metrics(mode: str, found: list[Trajectory], sources: list[str], repeats: int) -> Metrics:
    """Compute the metrics of the trajectories that have a valid reward. If none has one, the result has a share of
    invalid answers and no accuracy, never a zero. graded_share is the share of scores that are neither 0 nor 1: with
    such scores the mean is no accuracy."""
    by_source: dict[str, list[float]] = defaultdict(list)
    lengths: list[int] = []
    for t, source in zip(found, sources, strict=True):
        if isinstance(t.reward, Score):
            components = t.reward.components
            by_source[source].append(components.get("acc", components.get("score", t.reward.value)))
            lengths.append(len(t.response_ids))
    invalid = len(found) - len(lengths)
    out: Metrics = {f"eval/invalid_share/{mode}": Metric(invalid, max(1, len(found)), "sequence")}
    if lengths:
        scores = [a for values in by_source.values() for a in values]
        out[f"eval/acc/{mode}"] = Metric(math.fsum(scores), len(scores), "sequence")
        if graded := sum(score not in (0, 1) for score in scores):
            out[f"eval/graded_share/{mode}"] = Metric(graded, len(scores), "sequence")
        out[f"eval/response_length/{mode}"] = Metric(sum(lengths), len(lengths), "sequence")
    for source, values in by_source.items():
        accuracy = Metric(math.fsum(values), len(values), "sequence")
        out[f"eval/{source}/acc/{mode}"] = accuracy
        out[f"val-core/{source}/acc/mean@{repeats}" + ("" if mode == "greedy" else f"/{mode}")] = accuracy
    return out


def verl_validation(found: list[Trajectory], sources: list[str], repeats: int) -> Metrics:
    """Compute verl's val-core and val-aux: each component of the reward by the number of answers to one prompt
    (`repeats` in a row of `found`), as the mean over prompts. best@n and worst@n are exact expectations over n draws
    with replacement, which verl estimates; maj@n is verl's estimate, where every answer has a `pred`. Core is acc where
    the reward has it, else the reward."""
    values: dict[str, dict[str, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for first in range(0, len(found), repeats):
        rewards = [t.reward for t in found[first : first + repeats] if isinstance(t.reward, Score)]
        elected = _elected([r.pred for r in rewards])
        for name in ("reward", *{name: None for r in rewards for name in r.components}):
            answers = [r.value if name == "reward" else r.components.get(name, math.nan) for r in rewards]
            if answers and not any(map(math.isnan, answers)):
                values[sources[first]][name].append(_of_prompt(answers, elected))
    out: Metrics = {}
    for source, by_name in values.items():
        core = "acc" if "acc" in by_name else "reward"
        for name, prompts in by_name.items():
            for figure in {figure: None for own in prompts for figure in own}:
                each = [own[figure] for own in prompts if figure in own]
                at_all = f"@{repeats}" in figure and not figure.startswith(("std", "worst"))
                section = "val-core" if name == core and at_all else "val-aux"
                out[f"{section}/{source}/{name}/{figure}"] = Metric(math.fsum(each), len(each), "group")
    return out


def _sizes(n: int) -> list[int]:
    """Return the numbers of draws that verl takes of n answers: the powers of two below n, and n."""
    return sorted({*(2**i for i in range(1, n.bit_length()) if 2**i < n), n})


def _elected(preds: Sequence[str | None]) -> dict[int, np.ndarray]:
    """Return {k: [1000] the answer elected by k draws with replacement}: the first drawn answer among those with the
    most frequent `pred`. verl's generator and seed are used, so that the draws are the same. Empty unless each of
    several answers has a `pred`."""
    if len(preds) < 2 or None in preds:
        return {}
    numbers, out, rows = {pred: i for i, pred in enumerate(preds)}, {}, np.arange(1000)[:, None]
    votes = np.array([numbers[pred] for pred in preds])
    for k in _sizes(len(preds)):
        drawn = np.random.RandomState(42).choice(len(preds), size=(len(rows), k))
        counts = np.zeros((len(rows), len(preds)), np.int64)
        np.add.at(counts, (rows, votes[drawn]), 1)
        first = np.take_along_axis(counts, votes[drawn], 1).argmax(1)
        out[k] = drawn[rows[:, 0], first]
    return out


def _of_prompt(answers: list[float], elected: Mapping[int, np.ndarray]) -> dict[str, float]:
    """Return the figures of one prompt's answers under verl's names."""
    n, mean = len(answers), math.fsum(answers) / len(answers)
    out = {f"mean@{n}": mean}
    if n > 1:
        out[f"std@{n}"] = math.sqrt(math.fsum((a - mean) ** 2 for a in answers) / n)
        ranked = sorted(answers)
        for k in _sizes(n):
            best = [((i + 1) / n) ** k - (i / n) ** k for i in range(n)]
            out[f"best@{k}/mean"] = math.fsum(p * a for p, a in zip(best, ranked))
            out[f"worst@{k}/mean"] = math.fsum(p * a for p, a in zip(reversed(best), ranked))
    for k, winners in elected.items():
        won = np.array(answers)[winners]
        out |= {f"maj@{k}/mean": float(won.mean()), f"maj@{k}/std": float(won.std())}
    return out
