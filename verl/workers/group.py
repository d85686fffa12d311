"""Worker groups: the single controller's hand on SPMD workers (HybridFlow)."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Literal, Protocol

Split = Literal["dp", "all", "first"]


class WorkerGroup(Protocol):
    """`submit` enqueues NOW and returns a future; the calls of one worker run in the order of their submission.

    split: dp = the first argument (Refs, or a list of Refs) is divided over data-parallel ranks and the results are
    merged (metrics; with one rank: its result) · all = every rank gets the same call, results are a list, one per rank ·
    first = rank 0 only. An exception of the worker is the future's; the worker serves the next call.
    """

    @property
    def name(self) -> str: ...

    @property
    def world_size(self) -> int: ...

    def submit(self, method: str, *args: Any, split: Split = "dp") -> Future[Any]: ...

    def close(self, timeout_s: float = 10.0) -> None:
        """Finish what was submitted; what has not begun after `timeout_s` is cancelled. A later submit is refused."""
        ...
