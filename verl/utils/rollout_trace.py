"""verl's decorator of what is traced. Here every call of a tool is counted and timed without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def rollout_trace_op(function: F) -> F:
    return function
