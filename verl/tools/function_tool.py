"""Mark Python functions as tools, with their limits. verl/agent_loop/tools.py calls them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from verl.errors import Refused

F = TypeVar("F", bound=Callable[..., Any])
MARK = "__verl_tool__"


class ToolBroken(RuntimeError):
    """Raised by a tool if something that it needs no longer works. The attempt is then invalid and is repeated, instead
    of getting the reward of a failed answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimits:
    """The limits of a tool."""

    timeout_s: float | None = None
    """Time of a call; None: agent.tool_timeout_s."""
    concurrency: int | None = None
    """Calls at the same time, over all trajectories; None: 32, or 1,024 for an async function, which needs no thread.
    """
    retries: int = 0
    """Repetitions of a call after an exception or a timeout."""
    stop: bool = False
    """True if a call of the tool ends the trajectory."""
    processes: int = 0
    """Number of processes that run the function; a call that is late, crashes or uses too much memory is ended with its
    process. 0: the function runs in a thread of the run."""
    max_result_tokens: int | None = None
    """Longest result; None: agent.max_tool_result_tokens."""

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
    """Mark a function as a tool, with the limits of ToolLimits. Its hints and its docstring (with an `Args:` section)
    are its schema. It returns text, a dict (written as JSON), a ToolResponse, or (answer, reward, metrics)."""

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
