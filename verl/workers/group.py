"""Worker groups: the single controller's hand on SPMD workers (HybridFlow)."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Literal, Protocol

Split = Literal["dp", "all", "first"]


class WorkerGroup(Protocol):
    """`submit` enqueues NOW and returns a future; the calls of one worker run in the order of their submission.

    split: dp = the first argument (Refs, or a list of Refs) is divided over data-parallel ranks · all = every rank gets
    the same call, results are a list · first = rank 0 only.
    """

    @property
    def name(self) -> str: ...

    @property
    def world_size(self) -> int: ...

    def submit(self, method: str, *args: Any, split: Split = "dp") -> Future[Any]: ...

    def close(self, timeout_s: float = 10.0) -> None: ...
