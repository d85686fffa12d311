"""Python functions as tools: what their author says of them. What runs them is verl/agent_loop/tools.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from verl.errors import Refused

F = TypeVar("F", bound=Callable[..., Any])
MARK = "__verl_tool__"


class ToolBroken(RuntimeError):
    """What a tool needs is gone: raise it, and the attempt is invalid and played again, never an answer of reward 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimits:
    """timeout_s: None: agent.tool_timeout_s · concurrency: calls at once, over all trajectories; None: 32, of an async
    function, which takes no thread, 1,024 · retries: after an exception or a timeout, for a tool that says it may be
    called again · stop: a call of it ends the episode · max_result_tokens: None: agent.max_tool_result_tokens ·
    processes: a function runs in so many of its own, each of which
    is ended with a call that is late, crashes or wants too much memory; 0: in a thread of the run."""

    timeout_s: float | None = None
    concurrency: int | None = None
    retries: int = 0
    stop: bool = False
    processes: int = 0
    max_result_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise Refused(f"timeout_s={self.timeout_s}: a call of a tool needs some time; give seconds above 0")
        least = {"concurrency": 1, "max_result_tokens": 1, "retries": 0, "processes": 0}
        for name, at_least in least.items():
            if (value := getattr(self, name)) is not None and value < at_least:
                raise Refused(f"{name}={value} of a tool: give at least {at_least}")


def function_tool(
    function: F | None = None,
    *,
    timeout_s: float | None = None,
    concurrency: int | None = None,
    retries: int = 0,
    stop: bool = False,
    processes: int = 0,
    max_result_tokens: int | None = None,
) -> Any:
    """Mark a function as a tool. Its hints and its docstring (with an `Args:` section) are its schema. It returns text,
    a dict (written as JSON), a ToolResponse, or (answer, reward, metrics). See ToolLimits for the arguments."""

    def mark(found: F) -> F:
        limits = ToolLimits(
            timeout_s=timeout_s,
            concurrency=concurrency,
            retries=retries,
            stop=stop,
            processes=processes,
            max_result_tokens=max_result_tokens,
        )
        setattr(found, MARK, limits)
        return found

    return mark if function is None else mark(function)
