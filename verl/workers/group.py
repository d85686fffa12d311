"""Worker groups, through which the single controller calls SPMD workers (HybridFlow), and the cluster that starts
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from verl.model_engine.layout import Layout
from verl.rollout.base import ReplicaLost

if TYPE_CHECKING:
    from verl.rollout.base import RolloutEngine

T = TypeVar("T")


class WorkerDied(RuntimeError):
    """A process with a worker has ended: killed, out of memory, crashed, or its node is lost."""


def first_cause(error: BaseException) -> BaseException:
    """Return the root of the exception chain, or the death of a process in it: an error behind a death (a closed
    connection) explains less. The chain ends where it would repeat itself."""
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

    def beside(self, method: Callable[..., T], args: tuple[Any, ...] = ()) -> Future[list[T]]:
        """As `submit`, the same for every rank, but now, whatever call is under way: for a method that returns at once
        and does not meet the other ranks."""
        ...

    def close(self, timeout_s: float = 10.0) -> None:
        """Finish what was submitted; what has not begun after `timeout_s` is cancelled. A later submit is refused."""
        ...


Build = Callable[..., Sequence[object]]
"""A function of a module, called where the workers live as `build(*args, ranks=...)`. It returns the workers of the
given ranks: all ranks in this process, or one rank in a process of its own."""


class Drivers(Protocol):
    """Processes that all run this driver, without a controller. All of them must make the same decisions."""

    number: int

    @property
    def broken(self) -> bool:
        """One of the processes has ended too early or is late. All of them end, and torchrun handles the rest."""
        ...

    def gather(self, value: T) -> Future[list[T]]:
        """Return the values of all processes, by rank. Each of them calls it at the same place."""
        ...

    def meet(self, value: T, timeout_s: float) -> list[T]:
        """Return the values of all processes, as `gather` does, but in the calling thread and beside all calls. The
        deadline is the longer one of `timeout_s` and that of a call. Meetings follow each other in the same order on
        all processes. RankLate names the missing ranks."""
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
    drivers: Drivers | None = None  # The processes of a run without a controller.


class Cluster(Protocol):
    """The place where workers and rollout replicas live. Their build arguments can be pickled, unless all is one
    process."""

    @property
    def layout(self) -> Layout:
        """The layout of the ranks of a model."""
        ...

    @property
    def apart(self) -> bool:
        """Workers have their own processes, so work beside the calls does not slow down other workers."""
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
