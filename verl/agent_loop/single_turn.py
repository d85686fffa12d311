"""The agent loop with one prompt and one answer."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.agent_loop.base import AgentLoopBase, AgentLoopOutput


class SingleTurnLoop(AgentLoopBase):
    ends_when_cancelled = True

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt_ids = kwargs["prompt_ids"]
        out = await self.server_manager.generate(
            kwargs.get("request_id") or uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        return AgentLoopOutput(
            prompt_ids=prompt_ids, response_ids=out.token_ids, response_mask=[1] * len(out.token_ids), num_turns=2
        )
