"""Run user reward functions in the sandbox: the arguments of their calls, and the conversion of their results to Score
or Invalid."""

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
"""Parameters of a reward function that takes lists, as verl's batch manager calls it."""
ID_NAMES = ("prompt_ids", "response_ids")


def grader_spec(
    path: str = "verl.reward.compute",
    name: str = "compute_score",
    kwargs: Mapping[str, Any] | None = None,
    *,
    factory: bool = False,
    with_ids: bool = False,
) -> CallableSpec:
    """Return the spec of a reward function of a file or module. with_ids: it also takes `prompt_ids` and
    `response_ids`."""
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
    """A RewardFn that calls a user's function (`grader_spec`) in the workers of a sandbox."""

    async def score(self, request: RewardRequest) -> Score | Invalid:
        """Wait for a free worker, which limits the rate of requests, and score one request. Failures of the function
        are returned as Invalid and never raised."""
        arguments = {name: getattr(request, name) for name in self.spec.parameters}
        arguments["extra_info"] = dict(request.extra_info)
        got = await self.call(arguments)
        return Invalid(got.reason, got.detail) if isinstance(got, Failure) else Score(*got)

    async def rehearse(self, task: Task) -> None:
        """Test the function before anything expensive starts, with the ground truth, an empty text and a word as
        answers, until a call neither raises nor returns a bad result. If there is none, close the pool and raise
        ValueError. The score is not used."""
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
        """Return the score of one answer before the run starts; None without one. The call is removed from the
        statistics."""
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
