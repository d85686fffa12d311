"""User reward functions in the sandbox: what is sent to a grader, and its answers as Score or Invalid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.errors import Refused
from verl.reward.base import RewardRequest
from verl.reward.result import Scored, score_and_components
from verl.sandbox.messages import CallableSpec, Failure, Finite
from verl.sandbox.pool import PoolStats, WorkerPool
from verl.types import Invalid, Score, Task

CALL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
LIST_NAMES = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
"""Parameters of a function in the form that verl's batch manager calls."""
ID_NAMES = ("prompt_ids", "response_ids")


def grader_spec(
    path: str = "verl.reward.compute",
    name: str = "compute_score",
    kwargs: Mapping[str, Any] | None = None,
    *,
    factory: bool = False,
    with_ids: bool = False,
) -> CallableSpec:
    """A reward function of a file or module. `with_ids`: it also takes `prompt_ids` and `response_ids`."""
    return CallableSpec(
        path=path,
        name=name,
        kwargs=kwargs or {},
        factory=factory,
        parameters=CALL_NAMES + (ID_NAMES if with_ids else ()),
        plural=() if with_ids else LIST_NAMES,
        convert=score_and_components,
        returns=tuple[Finite, dict[str, Finite], str | None, tuple[Finite, ...] | None, str],
        section="reward",
        called="grader",
        given="row",
    )


class RewardPool(WorkerPool[Scored]):
    """A RewardFn over the workers of a sandbox, each with the user's function (`grader_spec`)."""

    async def score(self, request: RewardRequest) -> Score | Invalid:
        """Score one request, waiting for a free worker first (that is the back-pressure). Never raises for a grader."""
        arguments = {name: getattr(request, name) for name in self.spec.parameters}
        arguments["extra_info"] = dict(request.extra_info)
        got = await self.call(arguments)
        return Invalid(got.reason, got.detail) if isinstance(got, Failure) else Score(*got)

    async def rehearse(self, task: Task) -> None:
        """Call once before anything expensive starts: with the ground truth as answer, else with none, else with a
        word. ValueError if the function raises on all, or returns no score; the pool is closed then. The score is not
        used."""
        prefix = ""
        for answer in dict.fromkeys((task.ground_truth if isinstance(task.ground_truth, str) else "", "", "answer")):
            found = await self.score(_rehearsal(task, answer))
            if isinstance(found, Score) or found.reason not in ("exception", "bad_result"):
                self.stats = PoolStats()
                self.take_load()
                return
            prefix = prefix or f"{answer[:60]!r} gave: {' '.join(found.detail.split())[-400:]}"
        await self.close()
        raise Refused(
            f"{self.spec}: no score for row {task.index}, neither for its own ground truth nor an empty answer: "
            f"{prefix}. Fix: return a number for any answer, 0.0 for one that cannot be read"
        )

    async def rehearsed(self, task: Task, answer: str) -> float | None:
        """Return the score of one answer before the run starts, None where there is none; it leaves no trace."""
        found = await self.score(_rehearsal(task, answer))
        self.stats = PoolStats()
        self.take_load()
        return found.value if isinstance(found, Score) else None


def _rehearsal(task: Task, answer: str) -> RewardRequest:
    return RewardRequest(
        request_id="rehearsal",
        data_source=task.data_source,
        solution_str=answer,
        ground_truth=task.ground_truth,
        extra_info={**task.extra_info, "num_turns": 1, "turn_texts": [answer]},
    )
