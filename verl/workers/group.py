"""Protocols of worker groups, through which the single controller calls SPMD workers (HybridFlow), and of the cluster
that starts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from verl.model_engine.layout import Layout
from verl.rollout.base import ReplicaLost

if TYPE_CHECKING:
    from verl.rollout.base import RolloutEngine

T = TypeVar("T")


class WorkerDied(RuntimeError):
    """A process with a worker has ended: killed, out of memory, crashed, or its node is lost."""


def first_cause(error: BaseException) -> BaseException:
    """Return the root of the exception chain, or the last death of a process in it, since an error behind a death (a
    closed connection) explains less. The chain ends where it would repeat itself."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and not any(one is cause for one in chain):
        chain.append(cause)
    return ([one for one in chain if isinstance(one, WorkerDied | ReplicaLost)] or chain)[-1]


Died = Callable[[BaseException], None]


@dataclass(frozen=True, slots=True)
class Broadcast:
    """The same arguments for every rank."""

    args: tuple[Any, ...] = ()


Arguments = Broadcast | Sequence[tuple[Any, ...]]
"""The arguments of a call: the same for all ranks, or one tuple for each."""


class WorkerGroup(Protocol):
    """The workers of one role, by rank. `submit` enqueues a call at once and returns a future; the calls of one worker
    run in the order of their submission.

    `method` is a function of the worker's class (`Role.infer`), so that a reader and a type checker can follow the
    call; method and arguments can be pickled. The future has the results in rank order. If a worker raises, the future
    has that exception (the first cause, if several raise), and the group can serve the next call."""

    @property
    def name(self) -> str: ...

    @property
    def world_size(self) -> int: ...

    def submit(self, method: Callable[..., T], args: Arguments) -> Future[list[T]]: ...

    def call_at_once(self, method: Callable[..., T], args: tuple[Any, ...] = ()) -> Future[list[T]]:
        """Call the method with the same arguments on every rank at once, even during another call: for a method that
        returns quickly and exchanges nothing with the other ranks."""
        ...

    def close(self, timeout_s: float = 10.0) -> None:
        """Finish the submitted calls and close the group. A call that has not begun after `timeout_s` is cancelled, and
        a later `submit` raises an error."""
        ...


Build = Callable[..., Sequence[object]]
"""A function of a module, called in the process of the workers as `build(*args, ranks=...)`. It returns the workers of
the given ranks: all ranks in this process, or the one rank of another process."""


class Drivers(Protocol):
    """The processes of a run without a controller: all of them run this driver and must make the same decisions."""

    number: int

    @property
    def broken(self) -> bool:
        """True if one of the processes has ended too early or is late. Then all of them end, and torchrun handles the
        failure."""
        ...

    def gather(self, value: T) -> Future[list[T]]:
        """Return the values of all processes, by rank. All of them must make this call at the same place of the
        program."""
        ...

    def meet(self, value: T, timeout_s: float) -> list[T]:
        """Return the values of all processes, as `gather` does, but in the calling thread and independently of the
        queued calls. All processes must hold their meetings in the same order. The deadline is the longer one of
        `timeout_s` and that of a call; then raise RankLate with the missing ranks."""
        ...

    def finish(self) -> Future[list[None]]:
        """Make the last call: afterwards the other processes may end."""
        ...


@dataclass(frozen=True, slots=True)
class DevicePlace:
    """The place of a process in its pool."""

    device: str = "cpu"  # The device of the model in it.
    number: int = 0  # The number of its device on the node.
    neighbours: int = 1  # The number of ranks on the node, including this one.
    another_python: bool = False  # Its interpreter is `model.python`, with versions of its own.


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterContext:
    """The arguments of every cluster, besides its section of the configuration."""

    layout: Layout  # The ranks of a model.
    roles: tuple[str, ...]  # The roles that will be started.
    replicas: int  # The number of rollout engines.
    set_up: Callable[[DevicePlace], None]  # Called once in every other process.
    device: str  # The device of the models, unless a pool names one.
    wait_timeout_s: float = 600.0
    """The deadline of one process for the others. A process that answers nothing for half of it counts as dead."""
    say: Callable[[str], None] = print  # Prints a message for the user.
    python: str | None = None  # The interpreter of the workers of models; None: this one.
    logs: Path = Path("logs")  # The folder for the output of processes.
    drivers: Drivers | None = None  # The processes of a run without a controller.


class Cluster(Protocol):
    """Starts workers and rollout replicas, in this process or in others. Build arguments that are sent to other
    processes must be picklable."""

    @property
    def layout(self) -> Layout:
        """The layout of the ranks of a model."""
        ...

    @property
    def own_processes(self) -> bool:
        """True if workers have their own processes, so that work beside the calls does not slow down other workers."""
        ...

    @property
    def drivers(self) -> Drivers | None:
        """The processes that run this driver together, or None if this process alone drives the run."""
        ...

    def start(
        self, name: str, build: Build, args: tuple[Any, ...], *, world_size: int = 1, died: Died | None = None
    ) -> WorkerGroup:
        """Start the workers of a role. In other processes they are built in the background, and a failure is raised by
        the first call. `died` is called as for a replica."""
        ...

    def place(self, name: str) -> str:
        """Return the name of the place of a role's workers. Workers in one place share its devices and take turns."""
        ...

    def replica(
        self, number: int, build: Callable[..., RolloutEngine], args: tuple[Any, ...], died: Died | None = None
    ) -> RolloutEngine:
        """Start a rollout engine with `build(*args)`. `died` is called in any thread when its process ends; without it,
        the callbacks of `watch` are called."""
        ...

    def watch(self, on_failure: Callable[[BaseException], None]) -> None:
        """Call `on_failure`, in any thread, when a worker dies, also between two calls."""
        ...

    def close(self) -> None: ...
