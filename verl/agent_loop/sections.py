"""The section `agent` of the configuration: the loops, their tools and their limits."""

from __future__ import annotations

from dataclasses import dataclass, field

from verl.bounds import Positive, PositiveInt, adjustable


@dataclass(frozen=True)
class AgentConfig:
    loop: str = "auto"
    """auto: tool_agent if there are tools, else single_turn · single_turn · tool_agent · `FILE.py:Class` or
    `module:Class`, a loop of your own. A row's `agent_name` may name another one of these, or another class of your
    file. `NAME@driver`: loops and tools of yours run in the driver's process, not beside it."""
    tools: list[str] = field(default_factory=list)
    """`FILE.py` or `module` (its functions under @function_tool), one of them as `FILE.py:name`, verl's tool YAML, MCP
    servers as `FILE.json` (`mcpServers`)."""
    format: str = "auto"  # How calls are written: a name of chat/parsing.py, or renderers:NAME. auto: by the template.
    max_turns: PositiveInt | None = None  # Calls of the model in one trajectory. Null: as many as its tokens allow.
    max_tool_calls: PositiveInt | None = None  # Of one trajectory.
    max_parallel_calls: PositiveInt = 4  # Of one turn, run together; further ones are answered with an error.
    max_tool_result_tokens: PositiveInt = 512  # Of one call; a longer result loses its middle, with a note.
    tool_timeout_s: Positive = adjustable(30.0)  # Of one call, unless the tool has its own.
