"""What a tool is written with: verl's names, and functions. What plays them is verl/agent_loop/tools.py."""

from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import ToolBroken, function_tool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

__all__ = ["BaseTool", "OpenAIFunctionToolSchema", "ToolBroken", "ToolResponse", "function_tool"]
