"""The engine of one replica: its start, its loss, and the start of a new one in its place."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from verl.parameter_set import POLICY_SET
from verl.rollout.base import Capabilities, ReplicaLost, RolloutEngine

CLOSE_S = 20.0  # for closing an engine that is given up
START_S = 600.0  # for a new engine: its process, its libraries, its model

Start = Callable[[Callable[[BaseException], None]], RolloutEngine]
"""Makes a new engine. Its argument is called, in any thread, when that engine dies on its own."""


@dataclass(slots=True, eq=False)
class EngineRun:
    """One engine of a replica, from its start until it is lost."""

    engine: RolloutEngine = field(init=False)
    in_publish: bool = False
    """True if it took part in the last publish, or was started with the replica."""
    loaded: bool = False
    """True if it has loaded the weights of the last publish."""
    able: Capabilities | None = None
    """Its capabilities with these weights."""
    verified: int = -1
    """The latest version that was verified on it."""
    judged: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared while loaded weights are neither verified nor refused."""
    sets: dict[str, int] = field(default_factory=dict)
    """The verified versions of its LoRA sets, by id."""
    base: str = ""
    """The identity of its full set (`RolloutEngine.base`)."""
    judging: tuple[str, int] | None = None
    """The id and version of the LoRA set that was loaded last, while it is neither verified nor refused."""

    def __post_init__(self) -> None:
        self.judged.set()

    def verified_of(self, parameters: str) -> int:
        """Return the latest verified version of a parameter set, or -1."""
        return self.verified if parameters == POLICY_SET.id else self.sets.get(parameters, -1)


class EngineSupervisor:
    """Keeps one engine running.

    `starts` is the number of new engines that may be started in all. With `at_url` all of them are connections to one
    server that this run did not start: after a failed update no new connection is made, because it would accept
    answers of that server again. `on_lost` is called with the reason once for each lost engine, and for each new one
    that could not be started.
    """

    def __init__(
        self, number: int, start: Start, *, on_lost: Callable[[BaseException], None], starts: int, at_url: bool
    ) -> None:
        self.number, self.start, self._on_lost, self._starts, self._at_url = number, start, on_lost, starts, at_url
        self._loop: asyncio.AbstractEventLoop | None = None  # of the calls
        self._deaths: deque[tuple[EngineRun, BaseException]] = deque()  # reported and not yet handled
        self._why: BaseException | None = None
        self._restart: asyncio.Task[None] | None = None
        self._making = asyncio.Lock()
        self.left = False
        self.asleep = 0  # the sleep level, also for the next engine
        self.woken = asyncio.Event()  # set while the KV cache is allocated
        self.woken.set()
        self.current = self._new()
        self.current.in_publish = True

    @property
    def serves(self) -> bool:
        """True if the present engine is not lost."""
        return self._why is None

    @property
    def over(self) -> bool:
        """True if no new engine will be started when this one is lost."""
        return self._starts <= 0 or (self._at_url and self.current.in_publish and not self.current.loaded)

    def live(self) -> EngineRun:
        """Return the present engine. Raise ReplicaLost if it is lost."""
        self._loop = asyncio.get_running_loop()
        self._handle_deaths()
        if self._why is not None:
            raise ReplicaLost(f"rollout replica {self.number} has no engine: {self._why}")
        return self.current

    def check(self, of: EngineRun, cause: BaseException | None = None) -> None:
        """Raise ReplicaLost if this engine was given up."""
        if of is not self.current or self._why is not None:
            raise ReplicaLost(f"rollout replica {self.number} was given up") from cause

    def lose(self, of: EngineRun, why: BaseException) -> None:
        """Give up this engine, unless that was done before, and start another one."""
        if of is not self.current or self._why is not None:
            return
        self._why = why
        of.judged.set()
        self._on_lost(why)
        self._restart = asyncio.create_task(self._replace(), name=f"restart replica {self.number}")

    def leave(self) -> None:
        """Give up the engine and start no other one."""
        self.left, self._starts = True, 0
        if self._why is None:
            return self.lose(self.current, ReplicaLost("it left the run"))
        if self._restart is not None:
            self._restart.cancel()
        self._restart = asyncio.create_task(self._replace(), name=f"end replica {self.number}")

    @contextlib.asynccontextmanager
    async def falling_asleep(self, level: int) -> AsyncIterator[None]:
        """Wait until a starting engine is up, and start none during the block and until `awake`: the trainer uses the
        device meanwhile."""
        self.asleep = level
        self.woken.clear()
        async with self._making:
            yield

    def awake(self) -> None:
        """Record that the KV cache is allocated again, so that new engines may start."""
        self.asleep = 0
        self.woken.set()

    async def close(self) -> None:
        if self._restart is not None:
            self._restart.cancel()
        await self.current.engine.close()

    def _new(self) -> EngineRun:
        of = EngineRun()

        def died(why: BaseException) -> None:
            self._deaths.append((of, why))
            if self._loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self._handle_deaths)

        of.engine = self.start(died)
        return of

    def _handle_deaths(self) -> None:
        while self._deaths:
            self.lose(*self._deaths.popleft())

    async def _replace(self) -> None:
        while self._why is not None:
            with contextlib.suppress(Exception):  # the engine may be dead
                async with asyncio.timeout(CLOSE_S):
                    await self.current.engine.close()  # also one that did not start: it occupies a device
            if self.over:
                return
            await self.woken.wait()
            async with self._making:
                if not self.woken.is_set():  # put to sleep meanwhile
                    continue
                self._starts -= 1
                try:
                    self.current = self._new()
                    async with asyncio.timeout(START_S):
                        await self.current.engine.capabilities()
                    self._why = None
                except Exception as e:
                    self._on_lost(e if str(e) else ReplicaLost(f"no new engine within {START_S:g} s"))
