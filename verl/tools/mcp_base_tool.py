"""A module of verl that is not in this version: importing it raises an error with the fix."""

FIX = "the tools of MCP servers are named in agent.tools=[FILE.json], without a class"

raise ImportError(f"verl.tools.mcp_base_tool is not in this version: {FIX}")
