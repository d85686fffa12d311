"""One of the rollout engines behind a router, and its replacement after it died or failed an update."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from verl.rollout.base import (
    Capabilities,
    Completion,
    GenerateRequest,
    PauseMode,
    ReplicaLost,
    RolloutEngine,
    WeightReader,
)
from verl.rollout.wrapper import EngineWrapper

CLOSE_S = 20.0  # for closing an engine that is given up
JUDGED_S = 3600.0  # for the verification of new weights; a publish has its own deadline
START_S = 600.0  # for a new engine: its process, its libraries, its model

FOLLOWED = frozenset(("pause", "resume", "abort", "sleep", "wake"))
"""Methods that are called on all replicas together, so that they are in the same state."""

Start = Callable[[Callable[[BaseException], None]], RolloutEngine]
"""Makes a new engine. Its argument is called, in any thread, when that engine dies on its own."""


class Replica(EngineWrapper):
    """A `RolloutEngine` with a replaceable engine.

    All requests of a lost engine end with `ReplicaLost`, the running ones too. For a lost engine sleep, wake, pause,
    resume and abort do nothing. A replica serves again only with a new engine that took a publish.

    `lost` is called with the reason once for each lost engine. `starts` is the number of new engines that it may have
    in all. With `at_url` all of them are connections to one server that this run did not start: after a failed update
    no new connection is made, because it would accept answers of that server again. `adapters` maps names to folders;
    an engine loads an adapter before its first request for it.
    """

    replaceable = True

    def __init__(
        self,
        number: int,
        start: Start,
        *,
        lost: Callable[[int, BaseException], None],
        starts: int,
        at_url: bool = False,
        adapters: Mapping[str, str],
    ) -> None:
        self.number, self._start, self._on_lost, self._starts, self._at_url = number, start, lost, starts, at_url
        self._loop: asyncio.AbstractEventLoop | None = None  # of the calls
        self._deaths: deque[tuple[RolloutEngine, BaseException]] = deque()  # reported and not yet handled
        self._why: BaseException | None = None
        self._restart: asyncio.Task[None] | None = None
        self.left = False
        self._adapters, self._loading = adapters, asyncio.Lock()
        self.asleep = 0  # the sleep level, also for the next engine
        self._woken, self._making = asyncio.Event(), asyncio.Lock()
        self._woken.set()
        self._has: tuple[RolloutEngine | None, dict[str, str]] = (None, {})
        self._able: Capabilities | None = None  # of the engine that has loaded weights
        self.engine = self._asked = self._new()  # _asked: the engine that took part in the last publish
        self._loaded: RolloutEngine | None = None
        self._verified = -1  # the latest verified version
        self._judged = asyncio.Event()
        self._judged.set()  # cleared while loaded weights are not verified yet

    @property
    def ready(self) -> bool:
        """There is an engine, and it has loaded weights."""
        return self._why is None and self._loaded is self.engine

    @property
    def lost(self) -> bool:
        """There is no engine, and no new one will be started."""
        return self._why is not None and self.over

    @property
    def over(self) -> bool:
        """No new engine will be started if this one is lost."""
        return self._starts <= 0 or (self._at_url and self._loaded is None and self._asked is self.engine)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return the whole answer. An engine that cannot continue `begun` samples from the beginning."""
        begun = request.begun
        try:
            engine = await self._with_adapter(request.parameters)
            if begun is not None and not (self._able is not None and self._able.continues):
                request = replace(request, begun=None)
            try:
                found = await engine.generate(request)
            except ReplicaLost as e:
                self._lose(engine, e)
                raise
            except Exception as e:
                self._check(engine, e)  # requests also fail because their engine was closed
                raise
            if any(version > self._verified for version, _, _ in found.spans):
                await self._wait_verified(engine)
            self._check(engine)  # an answer of a lost engine does not count
        except ReplicaLost:
            if begun is not None:  # tokens that were not verified here are dropped
                begun.keep(0, self._verified)
            raise
        return found

    async def _wait_verified(self, engine: RolloutEngine) -> None:
        try:
            await asyncio.wait_for(self._judged.wait(), JUDGED_S)
        except TimeoutError:
            self._lose(engine, why := ReplicaLost(f"nobody verified its weights in {JUDGED_S:g} s"))
            raise why from None

    async def score(
        self, ids: np.ndarray, *, temperature: float = 1.0, parameters: str | None = None, media: Sequence[str] = ()
    ) -> np.ndarray:
        await self._with_adapter(parameters)
        return await super().score(ids, temperature=temperature, parameters=parameters, media=media)

    async def forward(self, method: str, *args: Any, **named: Any) -> Any:
        """Call the engine. If it is lost, nothing is done for a method that all replicas follow."""
        if method not in FOLLOWED:
            return await getattr(self._live(), method)(*args, **named)
        engine = self.engine
        if self._why is None:
            try:
                return await getattr(engine, method)(*args, **named)
            except ReplicaLost as e:
                self._lose(engine, e)
        return None

    async def load_weights(self, source: WeightReader, *, on_inflight: PauseMode = "wait") -> int:
        engine = self._asked = self._live()
        self._loaded = None
        self._judged.clear()
        self._verified = min(self._verified, source.version - 1)
        version = await engine.load_weights(source, on_inflight=on_inflight)
        for name in list(self._adapters):
            await self._with_adapter(name)
        for name in self._held(engine).keys() - self._adapters.keys():  # dropped while this replica did not serve
            await self.drop_adapter(name)
        self._able = await engine.capabilities()
        self._loaded = engine
        return version

    async def _with_adapter(self, adapter: str | None) -> RolloutEngine:
        """Return the engine, after loading the adapter if the router has one of that name."""
        engine, folder = self._live(), None if adapter is None else self._adapters.get(adapter)
        if adapter is not None and folder is not None and self._held(engine).get(adapter) != folder:
            async with self._loading:
                if self._held(engine).get(adapter) != folder:
                    await self.load_adapter(adapter, folder)
        return engine

    def mark_verified(self) -> None:
        if self.ready and not self._judged.is_set():
            self._verified = self.engine.version
            self.engine.mark_verified()
            self._judged.set()

    async def load_adapter(self, name: str, folder: str) -> None:
        engine = self._live()
        await engine.load_adapter(name, folder)
        self._held(engine)[name] = folder

    async def drop_adapter(self, name: str) -> None:
        engine = self._live()
        await engine.drop_adapter(name)
        self._held(engine).pop(name, None)

    def _held(self, engine: RolloutEngine) -> dict[str, str]:
        """Return the folders of the adapters that this engine has, by name."""
        if self._has[0] is not engine:
            self._has = (engine, {})
        return self._has[1]

    async def sleep(self, level: int = 1) -> int:
        """Put the engine to sleep, after a starting engine is up. No engine is started until the KV is awake, because
        the trainer uses the device meanwhile."""
        self.asleep = level
        self._woken.clear()
        async with self._making:
            return await super().sleep(level)

    async def wake(self, tags: Sequence[str] = ("weights", "kv")) -> None:
        try:
            await super().wake(tags)
        finally:
            if "kv" in tags:
                self.asleep = 0
                self._woken.set()

    async def woken(self) -> None:
        """Wait until the KV cache is allocated again."""
        await self._woken.wait()

    async def close(self) -> None:
        if self._restart is not None:
            self._restart.cancel()
        await self.engine.close()

    @property
    def version(self) -> int:
        return self.engine.version

    def leave(self) -> None:
        """Leave the run for good. Running requests continue at other replicas, and no new engine is started."""
        self.left, self._starts = True, 0
        if self._why is None:
            return self._lose(self.engine, ReplicaLost("it left the run"))
        if self._restart is not None:
            self._restart.cancel()
        self._restart = asyncio.create_task(self._replace(self.engine), name=f"end replica {self.number}")

    def lose(self, why: BaseException) -> None:
        """Give up the engine that took part in the last publish, unless it was replaced already. Its process ends, and
        its requests continue at other replicas."""
        self._loaded = None
        self._lose(self._asked, why)

    def _check(self, engine: RolloutEngine, cause: BaseException | None = None) -> None:
        if engine is not self.engine or self._why is not None:
            raise ReplicaLost(f"rollout replica {self.number} was given up") from cause

    def _live(self) -> RolloutEngine:
        self._loop = asyncio.get_running_loop()
        self._handle_deaths()
        if self._why is not None:
            raise ReplicaLost(f"rollout replica {self.number} has no engine: {self._why}")
        return self.engine

    def _new(self) -> RolloutEngine:
        def died(why: BaseException) -> None:
            self._deaths.append((made, why))
            if self._loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self._handle_deaths)

        made = self._start(died)
        return made

    def _handle_deaths(self) -> None:
        while self._deaths:
            self._lose(*self._deaths.popleft())

    def _lose(self, engine: RolloutEngine, why: BaseException) -> None:
        if engine is not self.engine or self._why is not None:
            return
        self._why = why
        self._judged.set()
        self._on_lost(self.number, why)
        self._restart = asyncio.create_task(self._replace(engine), name=f"restart replica {self.number}")

    async def _replace(self, engine: RolloutEngine) -> None:
        while self._why is not None:
            with contextlib.suppress(Exception):  # the engine may be dead
                async with asyncio.timeout(CLOSE_S):
                    await engine.close()  # also one that did not start: it occupies a device
            if self.over:
                return
            await self._woken.wait()
            async with self._making:
                if not self._woken.is_set():  # put to sleep meanwhile
                    continue
                self._starts -= 1
                try:
                    self.engine = engine = self._new()
                    async with asyncio.timeout(START_S):
                        await engine.capabilities()
                    self._why, self._verified = None, -1
                except Exception as e:
                    self._on_lost(self.number, e if str(e) else ReplicaLost(f"no new engine within {START_S:g} s"))
