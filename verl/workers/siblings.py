"""The workers of a second role in the workers of another one: both roles have the same frozen base."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from verl.workers.group import Arguments, Broadcast, WorkerGroup
from verl.workers.role import Role

T = TypeVar("T")


class SiblingGroup:
    """A `WorkerGroup` that calls the workers of another role, in turn with the calls of that role. name: the
    name of the second role, which `Role.open_sibling` has opened there"""

    def __init__(self, group: WorkerGroup, name: str) -> None:
        self._group, self.name = group, name

    @property
    def world_size(self) -> int:
        return self._group.world_size

    def submit(self, method: Callable[..., T], args: Arguments) -> Future[list[T]]:
        if isinstance(args, Broadcast):
            return self._group.submit(Role.as_sibling, Broadcast((self.name, method, args.args)))
        return self._group.submit(Role.as_sibling, [(self.name, method, one) for one in args])

    def call_at_once(self, method: Callable[..., T], args: tuple[Any, ...] = ()) -> Future[list[T]]:
        return self._group.call_at_once(Role.as_sibling, (self.name, method, args))

    def close(self, timeout_s: float = 10.0) -> None:
        """Do nothing: the workers end with the group that they are in."""
