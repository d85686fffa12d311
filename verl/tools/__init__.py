"""The names with which a user writes a tool: verl's classes, and `function_tool`. verl/agent_loop/tools.py calls the
tools."""

from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import ToolBroken, function_tool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

__all__ = ["BaseTool", "OpenAIFunctionToolSchema", "ToolBroken", "ToolResponse", "function_tool"]
