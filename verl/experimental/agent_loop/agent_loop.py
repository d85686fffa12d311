"""As `verl.experimental.agent_loop`."""

from verl.agent_loop.base import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register

__all__ = ["AgentLoopBase", "AgentLoopMetrics", "AgentLoopOutput", "register"]
