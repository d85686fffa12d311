"""A place of verl's that has no counterpart here: importing it is refused with what to write."""

FIX = "write the exchange as a loop, a class of verl.AgentLoopBase, and name it in agent.loop=FILE.py:Class"

raise ImportError(f"verl.interactions is not in this version: {FIX}")
