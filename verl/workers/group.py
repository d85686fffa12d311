"""Worker groups: the single controller's hand on SPMD workers (HybridFlow)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Broadcast:
    """The same arguments for every rank."""

    args: tuple[Any, ...] = ()


Arguments = Broadcast | Sequence[tuple[Any, ...]]
"""What the ranks of a call are given: the same, or one tuple each."""


class WorkerGroup(Protocol):
    """`submit` enqueues NOW and returns a future; the calls of one worker run in the order of their submission.

    `method` is a function of the worker's class (`Role.infer`), so that a reader and a type checker can follow the
    call; method and arguments can be pickled. The future holds the results in rank order. When a worker raises, the
    future has that exception (the first cause, where several raise), and the group serves the next call.
    """

    @property
    def name(self) -> str: ...

    @property
    def world_size(self) -> int: ...

    def submit(self, method: Callable[..., T], args: Arguments) -> Future[list[T]]: ...

    def close(self, timeout_s: float = 10.0) -> None:
        """Finish what was submitted; what has not begun after `timeout_s` is cancelled. A later submit is refused."""
        ...
