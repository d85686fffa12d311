"""Agent loops under verl's name; what they are is verl/agent_loop/base.py."""

from verl.agent_loop.base import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register

__all__ = ["AgentLoopBase", "AgentLoopMetrics", "AgentLoopOutput", "register"]
