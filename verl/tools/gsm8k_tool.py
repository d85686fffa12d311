"""verl's example of a tool: the model submits an answer to a word problem, and receives its reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.reward.math import gsm8k_score
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import ToolBroken
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

NOT_BETTER = -0.05  # the reward of a call with an answer that is no better than the one before


@dataclass(slots=True)
class Handed:
    """The latest submitted answer of a trajectory."""

    truth: str
    """The right answer."""
    answer: str = ""
    """The latest answer, as `#### ANSWER`."""
    score: float = 0.0
    """The score of that answer: 1 or 0."""


class Gsm8kTool(BaseTool):
    """Compares submitted answers with the row's `create_kwargs: {ground_truth}`."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema)
        self._handed: dict[str, Handed] = {}

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        instance_id, response = await super().create(instance_id)
        if ground_truth is None:
            ground_truth = (kwargs.get("create_kwargs") or {}).get("ground_truth")
        if ground_truth is None:
            raise ToolBroken(f"the row's tools_kwargs give {self.name} no create_kwargs: {{ground_truth: ...}}")
        self._handed[instance_id] = Handed(str(ground_truth))
        return instance_id, response

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        handed, answer = self._handed[instance_id], str(parameters.get("answer", ""))
        handed.answer = answer if answer.startswith("#### ") else f"#### {answer}"
        score = await self.calc_reward(instance_id)
        reward = 0.0 if score > handed.score else NOT_BETTER
        handed.score = score
        return ToolResponse(text=f"Current parsed answer={answer!r} reward={score}"), reward, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return 1 if the latest answer is right, otherwise 0."""
        handed = self._handed[instance_id]
        return gsm8k_score(handed.answer, handed.truth, "flexible")

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._handed.pop(instance_id, None)
