"""Single trajectories: an agent loop, then its reward, then retries. A failure is an outcome of the trajectory."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from verl.agent_loop.base import (
    AgentLoopFactory,
    AgentLoopOutput,
    LoopFailed,
    ServerManager,
    outputs_of,
    sampling_params_of,
)
from verl.data.media_items import IMAGE
from verl.driver.checked import CheckedOutput, check_output
from verl.driver.task_media import ImageStoringEngine, ToolImages, owner_of_group
from verl.reward.base import MAX_FEEDBACK_CHARS, RewardFn, RewardRequest, parse_result
from verl.rollout.base import DecodeFn, Generates, ReplicaLost, RolloutEngine
from verl.types import (
    CUT,
    Group,
    Invalid,
    Medium,
    Outcome,
    Purpose,
    Sampling,
    Score,
    Segment,
    Task,
    Trajectory,
    derive_seed,
    response_ids_of,
)
from verl.workers.waits import DeadlineExpired, Limit, Waits

WALL_SHARE = 0.75  # share of an attempt's time after which no further turn begins and the attempt ends as truncated
TOOL_FIELDS = ("tool_rewards", "rollout_reward_scores", "malformed_calls")
"""The entries of a loop's `extra_fields` that the reward function gets in `extra_info` (verl's names)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectorySpec:
    """The ids and the purpose of a trajectory, and the parts of its seed."""

    group_id: str
    index: int
    purpose: Purpose
    epoch: int = 0
    draw: int = 0


@dataclass(eq=False, kw_only=True)
class TrajectoryRunner:
    """Runs single trajectories: agent loop, then reward, then retries. Outcomes are values; the death of a rollout
    engine is an exception."""

    engine: RolloutEngine
    loop: AgentLoopFactory
    reward: RewardFn
    decode: DecodeFn
    waits: Waits
    seed: int
    max_attempts: int
    """Attempts until a valid reward."""
    timeout_s: float
    """Limit of the agent loop of one attempt."""
    reward_timeout_s: float
    """Limit of its reward, counted from the last reward of any answer: when many answers wait for few graders, a long
    wait is no fault of an answer."""
    max_turns: int | None = None
    """Turns of an agent loop; None: no limit."""
    credits_turns: bool = False
    """Each turn may get a reward of its own."""
    stored_share: float = 0.0
    """Share of the groups that use a stored answer."""
    banned: tuple[int, ...] = ()
    """Ids that the policy must not sample."""
    images: ToolImages | None = None
    """The images that tools return."""
    moved_s: float = field(default=-math.inf, init=False)
    """Time of the last reward of any trajectory."""

    def __post_init__(self) -> None:
        assert self.max_attempts >= 1, f"max_attempts={self.max_attempts}: a trajectory is tried at least once"
        self._budget: dict[str, Any] = {"max_turns": self.max_turns, "credits_turns": self.credits_turns}
        self._budget["wall_s"] = WALL_SHARE * self.timeout_s

    @property
    def longest_s(self) -> float:
        """The longest time, in seconds, that a trajectory can take while no other gets a reward, whatever user code
        does."""
        return self.max_attempts * (self.timeout_s + self.reward_timeout_s)

    def stored(self, group: Group, sampling: Sampling) -> Trajectory | None:
        """Return the stored answer of the group's row as a trajectory if its draw uses it; else None."""
        if group.task.lost or not takes_stored(self.stored_share, self.seed, group.epoch, group.draw):
            return None
        assert group.task.answer_ids is not None, "rows without one are refused when they are read"
        prompt = Segment(ids=group.task.prompt_ids, source="prompt", media=group.task.media)
        return Trajectory(
            trajectory_id=f"{group.group_id}/stored",
            group_id=group.group_id,
            task_id=group.task.task_id,
            index=0,
            purpose="train",
            attempt=0,
            sampling=sampling,
            segments=(prompt, Segment(ids=group.task.answer_ids, source="stored")),
            stop_reason="eos",
        )

    async def run(self, task: Task, spec: TrajectorySpec, sampling: Sampling) -> Trajectory:
        """Return the first attempt that ends with a valid reward, or the last one."""
        if self.banned:
            sampling = replace(sampling, banned=self.banned)
        trained = spec.purpose == "train"
        for attempt in range(self.max_attempts):
            name = f"{spec.group_id}/{spec.purpose}{spec.index}.{attempt}"
            seed_parts = (self.seed, spec.purpose, spec.epoch, spec.draw, task.task_id, spec.index, attempt)
            given = {"prefix_key": spec.group_id, "media": task.media, "routes": trained, **self._budget}
            engine = self._engine(task, spec.group_id)
            with nullcontext() if self.images is None else self.images.of_attempt(name) as returned:
                manager = ServerManager(engine, sampling, seed_parts, returned=returned, **given)
                trajectory = await self._attempt(task, spec, sampling, attempt, name, manager)
            if trajectory.outcome == "ok":
                break
        return trajectory

    def _engine(self, task: Task, group_id: str) -> Generates:
        if self.images is None:
            return self.engine
        known = {m.reference for m in task.media}
        return ImageStoringEngine(self.engine, self.images, owner_of_group(group_id), known)

    async def _attempt(
        self, task: Task, spec: TrajectorySpec, sampling: Sampling, attempt: int, name: str, manager: ServerManager
    ) -> Trajectory:
        started = time.monotonic()
        row = _arguments(task, name)
        outcome: Outcome = "failed"
        reward: Score | Invalid | None = None
        error = ""
        try:
            if task.lost:
                raise LoopFailed(f"media: {task.lost}")
            loop = self.loop(manager, task)
            run, waiter, what = loop.run(sampling_params_of(sampling), **row), f"trajectory {name}", "its agent loop"
            if loop.ends_when_cancelled:
                with Limit(self.waits, waiter, what, self.timeout_s):
                    returned = await run
            else:
                returned = await self.waits.wait(run, waiter=waiter, what=what, timeout_s=self.timeout_s)
            made, output = check_output(returned, manager, sampling.max_tokens), outputs_of(returned)[-1]
            _check_images(task, manager, made)
            if isinstance(manager.engine, ImageStoringEngine):  # images that no request had
                await manager.engine.store(m for row in (made.segments, *made.branches) for s in row for m in s.media)
            turns = int(output.num_turns) or max(1, len(manager.record))
            if made.discarded or manager.counts:
                manager.counts["discarded_tokens"] = made.discarded
        except ReplicaLost:  # the engine's fault: the run ends or starts again
            raise
        except Exception as e:  # an agent loop is user code: its failure is an outcome and is retried
            late = f"timeout: the agent loop did not end in {self.timeout_s:g} s"
            error = late if isinstance(e, DeadlineExpired) else _error_text(e)
            made, turns = CheckedOutput((Segment(ids=task.prompt_ids, source="prompt"),), "error"), 1
            outcome = "invalid" if task.lost else outcome
            error = _with_files(error, task)
        else:
            if made.stop_reason == "abort":
                outcome, error = "cancelled", "abort: the rollout engine gave the request up"
            elif not any(s.source == "sampled" for row in (made.segments, *made.branches) for s in row):
                error = "empty: the agent loop returned no token of the model"
            else:
                sampled = [call.token_ids for call in manager.record]
                score = await self._score(name, task, sampling, made, output, turns, sampled)
                reward = _with_turn_rewards(made, _with_feedback(score, output))
                outcome = "ok" if isinstance(reward, Score) else "invalid"
                error = "" if isinstance(reward, Score) else f"{reward.reason}: {reward.detail}"
        return Trajectory(
            trajectory_id=name,
            group_id=spec.group_id,
            task_id=task.task_id,
            index=spec.index,
            purpose=spec.purpose,
            attempt=attempt,
            sampling=sampling,
            segments=made.segments,
            stop_reason=made.stop_reason,
            outcome=outcome,
            reward=reward,
            turns=turns,
            wall_s=time.monotonic() - started,
            error=error,
            branches=made.branches,
            agent=manager.counts,
            timeline=tuple(manager.timeline) if len(manager.timeline) > 1 else (),
        )

    async def _score(
        self,
        name: str,
        task: Task,
        sampling: Sampling,
        made: CheckedOutput,
        output: AgentLoopOutput,
        turns: int,
        turn_ids: Sequence[list[int]],
    ) -> Score | Invalid:
        """Score an attempt. turn_ids: the tokens that the model sampled in each of its turns."""
        row = made.branches[-1] if made.branches else made.segments
        response = response_ids_of(row)
        try:
            if output.reward_score is not None:
                return parse_result(output.reward_score)
            text = self.decode(response.tolist())
            whole = len(turn_ids) == 1 and len(made.segments) == 2 and not made.branches
            turn_texts = [text] if whole else [self.decode(ids) for ids in turn_ids]
        except Exception as e:  # the loop returned an object of its own, or ids that do not exist
            return Invalid("exception", f"{type(e).__name__}: {e}")
        passed = {key: output.extra_fields[key] for key in TOOL_FIELDS if key in output.extra_fields}
        if self.images is not None and (returned := _without_own([m for s in row for m in s.media], task.media)):
            passed["tool_images"] = self.images.paths(returned)
        request = RewardRequest(
            request_id=name,
            data_source=task.data_source,
            solution_str=text,
            ground_truth=task.ground_truth,
            extra_info={**task.extra_info, **passed, "num_turns": turns, "turn_texts": turn_texts},
            response_tokens=len(response),
            max_response_tokens=sampling.max_tokens,
            truncated=made.stop_reason in CUT,
            prompt_ids=row[0].ids,
            response_ids=response,
            row=row,
        )
        try:
            limit_s = self.reward_timeout_s
            sender, what = f"trajectory {name}", "its reward"
            with Limit(self.waits, sender, what, limit_s, lambda: self.moved_s):
                found = await self.reward.score(request)
        except DeadlineExpired:
            return Invalid("timeout", f"no reward in {limit_s:g} s")
        self.moved_s = asyncio.get_running_loop().time()
        return found


def _without_own(media: Sequence[Medium], own: Sequence[Medium]) -> list[Medium]:
    """Return the media of a row without those of its task, which a loop may have moved or left out."""
    left, found = Counter(m.reference for m in own), list[Medium]()
    for medium in media:
        if left[medium.reference]:
            left[medium.reference] -= 1
        else:
            found.append(medium)
    return found


def _arguments(task: Task, name: str) -> dict[str, Any]:
    """Return the arguments of an agent loop's `run`: the columns of the row, and the fields of its task."""
    return {
        **task.row,
        "raw_prompt": _with_paths(task),
        "prompt_ids": task.prompt_ids,
        "index": task.index,
        "tools": task.tools,
        "request_id": name,
    }


def _with_paths(task: Task) -> list[Mapping[str, Any]]:
    """Return the messages of a task, with the path of each image in its part, as verl's `raw_prompt` has them."""
    images = iter(task.images)

    def filled(part: Mapping[str, Any]) -> Mapping[str, Any]:
        if part["type"] == "text":
            return part
        file = next(images)
        return {**part, IMAGE.name: file.path} if part == IMAGE.part else part

    return [
        {**m, "content": [*map(filled, m["content"])]} if task.images and isinstance(m["content"], list) else m
        for m in task.messages
    ]


def _check_images(task: Task, manager: ServerManager, made: CheckedOutput) -> None:
    """Raise ValueError if a prompt of a call or a branch has other tokens at the place of one of the task's images. If
    it has only them, at the places of the task, all tokens up to the last one are compared: its loop may have assumed
    these places."""
    rows = (made.segments, *made.branches)
    if not task.media and not any(call.media for call in manager.record) and not any(row[0].media for row in rows):
        return
    end = max((m.end for m in task.media), default=0)
    tokens = {m.reference: task.prompt_ids[m.start : m.end] for m in task.media}
    prompts = [(call.prompt_ids, call.media) for call in manager.record]
    prompts += [(row[0].ids, row[0].media) for row in rows]
    if any(
        not np.array_equal(ids[:end], task.prompt_ids[:end])
        if media == task.media
        else not all(np.array_equal(ids[m.start : m.end], tokens.get(m.reference, ids[m.start : m.end])) for m in media)
        for ids, media in prompts
    ):
        raise ValueError(
            "the agent loop changed the prompt in front of an image, whose place is not known then; begin each prompt "
            "with `prompt_ids`"
        )


def _with_files(error: str, task: Task) -> str:
    """Return the text of an error with the files of images in the place of their hashes."""
    for medium, image in zip(task.media, task.images):
        error = error.replace(medium.reference, image.path)
    return error


def _error_text(error: Exception) -> str:
    """Return the name and the text of an error."""
    return str(error) if isinstance(error, LoopFailed) else f"{type(error).__name__}: {error}"


def _with_feedback(reward: Score | Invalid, output: AgentLoopOutput) -> Score | Invalid:
    """Return the reward with the environment's text about the attempt, if the reward has no feedback of its own."""
    text = output.extra_fields.get("feedback")
    if isinstance(reward, Invalid) or reward.feedback or not isinstance(text, str):
        return reward
    return replace(reward, feedback=text[:MAX_FEEDBACK_CHARS])


def takes_stored(share: float, seed: int, epoch: int, draw: int) -> bool:
    """Select draws by systematic sampling: any range of draws in an epoch contains this share, to less than one, and
    every row is equally likely."""
    start = derive_seed(seed, "stored", epoch) / 2**63
    return math.floor((draw + 1) * share + start) > math.floor(draw * share + start)


def _with_turn_rewards(made: CheckedOutput, reward: Score | Invalid) -> Score | Invalid:
    """Return the reward with the rewards of turns; Invalid if there is not one for each turn."""
    if isinstance(reward, Invalid) or reward.turn_rewards is None:
        return reward
    wrong = made.pay(reward.turn_rewards)
    return Invalid("bad_result", wrong) if wrong else reward
