"""A place of verl's that has no counterpart here: importing it is refused with what to write."""

FIX = "the tools of MCP servers are named in agent.tools=[FILE.json], without a class"

raise ImportError(f"verl.tools.mcp_base_tool is not in this version: {FIX}")
