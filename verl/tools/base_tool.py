"""The base class of verl's tools: one instance per run, with a state per trajectory that is identified by an
`instance_id`."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.errors import Refused
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


class BaseTool:
    """A tool with a state per trajectory. For each trajectory that calls it, these methods are called: create, then
    execute any number of times, then calc_reward, then release."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        self.config = config
        schema = tool_schema or self.get_openai_tool_schema()
        if schema is None:
            raise Refused(f"{type(self).__name__} has no schema: give tool_schema in its YAML")
        self.tool_schema = schema
        self.name = schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        return getattr(self, "tool_schema", None)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        pass

    def content(self) -> str:
        """Return a text that identifies the data behind the tool's answers. A run cannot be resumed with another
        one."""
        return ""

    def note(self) -> str:
        """Return a line about the tool for the start of a run, as `what: how`, or ""."""
        return ""

    def end_run(self) -> None:
        """Close the tool's threads and files at the end of the run."""
