"""Worker groups: the single controller's hand on SPMD workers (HybridFlow), and the cluster that starts them."""

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
    """A process that holds a worker is gone: killed, out of memory, crashed, or its node is lost."""


def first_cause(error: BaseException) -> BaseException:
    """The exception that started the chain, or the death of a process in it: what is behind that one (the end of a
    connection) says less. Of a chain that bites its tail the last one of it."""
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

    def beside(self, method: Callable[..., T], args: tuple[Any, ...] = ()) -> Future[list[T]]:
        """As `submit`, the same for every rank, but now, whatever call is under way: for a method that returns at once
        and does not meet the other ranks."""
        ...

    def close(self, timeout_s: float = 10.0) -> None:
        """Finish what was submitted; what has not begun after `timeout_s` is cancelled. A later submit is refused."""
        ...


Build = Callable[..., Sequence[object]]
"""A function of a module, called where the workers live as `build(*args, ranks=...)`: the workers of the given ranks,
in this process of all of them, elsewhere of one."""


class Drivers(Protocol):
    """Processes that all run this driver, without a controller: what one of them decides, all must decide."""

    number: int

    @property
    def broken(self) -> bool:
        """One of them has ended before its time, or does not come: all end, and torchrun sees to it."""
        ...

    def gather(self, value: T) -> Future[list[T]]:
        """The values of all of them, by rank; each calls it at the same place."""
        ...

    def meet(self, value: T, timeout_s: float) -> list[T]:
        """As `gather`, in the thread that asks and beside all calls, within the longer of this deadline and that of a
        call: one after the other, in the same order on all of them. RankLate says who did not come."""
        ...

    def finish(self) -> Future[list[None]]:
        """The last call: from now on the others may end."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """Of a process in its pool. device: of the model in it · number: of its device on the node · neighbours: ranks
    there, this one too."""

    device: str = "cpu"
    number: int = 0
    neighbours: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterContext:
    """What every cluster is made from, besides its section. layout: of the ranks of a model · roles: that will be
    started · replicas: rollout engines · set_up: run once in every other process · device: of the models, where a pool
    does not say · wait_timeout_s: of one process for others; one that answers nothing for half of it is given up ·
    say: tells the user · drivers: those of a run without a controller."""

    layout: Layout
    roles: tuple[str, ...]
    replicas: int
    set_up: Callable[[Place], None]
    device: str
    wait_timeout_s: float = 600.0
    say: Callable[[str], None] = print
    drivers: Drivers | None = None


class Cluster(Protocol):
    """Where workers and rollout replicas live. What they are built from can be pickled, unless all is one process."""

    @property
    def layout(self) -> Layout:
        """Of the ranks of a model."""
        ...

    @property
    def apart(self) -> bool:
        """Workers have processes of their own: what one of them does beside its calls does not hold up the others."""
        ...

    @property
    def drivers(self) -> Drivers | None:
        """None: this process alone drives the run."""
        ...

    def start(
        self, name: str, build: Build, args: tuple[Any, ...], *, world_size: int = 1, died: Died | None = None
    ) -> WorkerGroup:
        """The workers of a name. Elsewhere they are built meanwhile: a failure comes with the first call. died: as of a
        replica."""
        ...

    def place(self, name: str) -> str:
        """Where the workers of a name are: those of one place take turns at its devices."""
        ...

    def replica(
        self, number: int, build: Callable[..., RolloutEngine], args: tuple[Any, ...], died: Died | None = None
    ) -> RolloutEngine:
        """A rollout engine, `build(*args)`. died: hears, in any thread, of its end (None: those who watch do)."""
        ...

    def watch(self, on_failure: Callable[[BaseException], None]) -> None:
        """`on_failure` hears, in any thread, of a worker that died, also between two calls."""
        ...

    def close(self) -> None: ...
