"""One of the rollout engines behind a router, and what becomes of it when it dies or must not speak any more."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from verl.rollout.base import (
    NO_ADAPTERS,
    Adapting,
    Capabilities,
    Completion,
    PauseMode,
    ReplicaLost,
    Resuming,
    RolloutEngine,
    SoFar,
    Vouched,
    WeightReader,
)
from verl.types import Sampling

T = TypeVar("T")

CLOSE_S = 20.0  # for an engine that is given up
JUDGED_S = 3600.0  # for new weights to be verified; a publish has a deadline of its own
START_S = 600.0  # for a new one: its process, its libraries, its model

Start = Callable[[Callable[[BaseException], None]], RolloutEngine]
"""A new engine. What it is given hears, in any thread, of an engine that died on its own."""


class Replica:
    """See `RolloutEngine`. A lost engine's requests end with `ReplicaLost`, also those that run; what keeps it in step
    with the others (sleep, wake, pause, resume, abort) is nothing to it. There is no way from lost to serving but a new
    engine and a publish that it took.

    lost: told why, once for each engine · starts: new engines that it may have, in all · at_url: they are one server,
    which others started: where it failed an update, a new connection to it would let it speak again · adapters: that
    every engine has before it is asked for them, their folders by name."""

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
        self.number, self._start, self._tell, self._starts, self._at_url = number, start, lost, starts, at_url
        self._loop: asyncio.AbstractEventLoop | None = None  # of the calls
        self._deaths: deque[tuple[RolloutEngine, BaseException]] = deque()  # that were told of
        self._why: BaseException | None = None
        self._restart: asyncio.Task[None] | None = None
        self.left = False
        self._adapters, self._loading = adapters, asyncio.Lock()
        self.asleep = 0  # the level, also of the engine to come
        self._woken, self._making = asyncio.Event(), asyncio.Lock()
        self._woken.set()
        self._has: tuple[RolloutEngine | None, dict[str, str]] = (None, {})
        self.engine = self._asked = self._new()  # asked: by the last publish
        self._loaded: RolloutEngine | None = None
        self._verified = -1  # the latest version that was
        self._judged = asyncio.Event()
        self._judged.set()  # unless weights came that nobody has verified yet

    @property
    def ready(self) -> bool:
        """There is an engine, and it has taken weights."""
        return self._why is None and self._loaded is self.engine

    @property
    def lost(self) -> bool:
        """There is none, and none follows."""
        return self._why is not None and self.over

    @property
    def over(self) -> bool:
        """No engine follows when this one is lost."""
        return self._starts <= 0 or (self._at_url and self._loaded is None and self._asked is self.engine)

    async def generate(
        self,
        request_id: str,
        prompt_ids: np.ndarray,
        sampling: Sampling,
        *,
        prefix_key: str | None = None,
        adapter: str | None = None,
        media: Sequence[str] = (),
        so_far: SoFar | None = None,
    ) -> Completion:
        """so_far: see `Resuming`; an engine that cannot go on with it begins anew."""
        try:
            engine = await self._having(adapter)
            ask = engine.generate
            if so_far is not None and isinstance(engine, Resuming):
                ask = partial(engine.generate, so_far=so_far)
            try:
                found = await ask(request_id, prompt_ids, sampling, prefix_key=prefix_key, adapter=adapter, media=media)
            except ReplicaLost as e:
                self._lose(engine, e)
                raise
            except Exception as e:
                self._check(engine, e)  # whose requests fail because it was closed
                raise
            if any(version > self._verified for version, _, _ in found.spans):
                await self._judgement(engine)
            self._check(engine)  # whatever it still said
        except ReplicaLost:
            if so_far is not None:  # others may have that version verified: here it was not
                so_far.keep(0, self._verified)
            raise
        return found

    async def _judgement(self, engine: RolloutEngine) -> None:
        try:
            await asyncio.wait_for(self._judged.wait(), JUDGED_S)
        except TimeoutError:
            self._lose(engine, why := ReplicaLost(f"nobody verified its weights in {JUDGED_S:g} s"))
            raise why from None

    async def score(
        self, ids: np.ndarray, *, temperature: float = 1.0, adapter: str | None = None, media: Sequence[str] = ()
    ) -> np.ndarray:
        engine = await self._having(adapter)
        return await engine.score(ids, temperature=temperature, adapter=adapter, media=media)

    async def load_weights(self, source: WeightReader, *, on_inflight: PauseMode = "wait") -> int:
        engine = self._asked = self._live()
        self._loaded = None
        self._judged.clear()
        self._verified = min(self._verified, source.version - 1)
        version = await engine.load_weights(source, on_inflight=on_inflight)
        for name in list(self._adapters):
            await self._having(name)
        for name in self._held(engine).keys() - self._adapters.keys():  # dropped while it was no replica
            await self.drop_adapter(name)
        self._loaded = engine
        return version

    async def _having(self, adapter: str | None) -> RolloutEngine:
        """The engine, with this adapter as all replicas have it, if they do."""
        engine, folder = self._live(), None if adapter is None else self._adapters.get(adapter)
        if adapter is not None and folder is not None and self._held(engine).get(adapter) != folder:
            async with self._loading:
                if self._held(engine).get(adapter) != folder:
                    await self.load_adapter(adapter, folder)
        return engine

    def vouch(self) -> None:
        if self.ready and not self._judged.is_set():
            self._verified = self.engine.version
            if isinstance(self.engine, Vouched):
                self.engine.vouch()
            self._judged.set()

    async def load_adapter(self, name: str, folder: str) -> None:
        engine = self._live()
        if not isinstance(engine, Adapting):
            raise ValueError(f"load_adapter: {NO_ADAPTERS}")
        await engine.load_adapter(name, folder)
        self._held(engine)[name] = folder

    async def drop_adapter(self, name: str) -> None:
        engine = self._live()
        if not isinstance(engine, Adapting):
            raise ValueError(f"drop_adapter: {NO_ADAPTERS}")
        await engine.drop_adapter(name)
        self._held(engine).pop(name, None)

    def _held(self, engine: RolloutEngine) -> dict[str, str]:
        """The adapters that this engine was given, by name."""
        if self._has[0] is not engine:
            self._has = (engine, {})
        return self._has[1]

    async def pause(self, mode: PauseMode = "keep") -> None:
        await self._along(lambda engine: engine.pause(mode))

    async def resume(self) -> None:
        await self._along(lambda engine: engine.resume())

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        return await self._along(lambda engine: engine.abort(request_ids)) or 0

    async def sleep(self, level: int = 1) -> int:
        """No engine is started from here on until the KV is awake: others have the device. One that starts is waited
        for."""
        self.asleep = level
        self._woken.clear()
        async with self._making:
            return await self._along(lambda engine: engine.sleep(level)) or 0

    async def wake(self, tags: Sequence[str] = ("weights", "kv")) -> None:
        try:
            await self._along(lambda engine: engine.wake(tags))
        finally:
            if "kv" in tags:
                self.asleep = 0
                self._woken.set()

    async def woken(self) -> None:
        """Until it is."""
        await self._woken.wait()

    async def capabilities(self) -> Capabilities:
        return await self._live().capabilities()

    async def close(self) -> None:
        if self._restart is not None:
            self._restart.cancel()
        await self.engine.close()

    @property
    def version(self) -> int:
        return self.engine.version

    def leave(self) -> None:
        """For good: its requests go on elsewhere, and no engine follows."""
        self.left, self._starts = True, 0
        if self._why is None:
            return self._lose(self.engine, ReplicaLost("it left the run"))
        if self._restart is not None:
            self._restart.cancel()
        self._restart = asyncio.create_task(self._again(self.engine), name=f"end replica {self.number}")

    def lose(self, why: BaseException) -> None:
        """Give up the engine that the last publish asked, unless a new one is there: its process ends, its requests go
        on elsewhere."""
        self._loaded = None
        self._lose(self._asked, why)

    def _check(self, engine: RolloutEngine, cause: BaseException | None = None) -> None:
        if engine is not self.engine or self._why is not None:
            raise ReplicaLost(f"rollout replica {self.number} was given up") from cause

    def _live(self) -> RolloutEngine:
        self._loop = asyncio.get_running_loop()
        self._hear()
        if self._why is not None:
            raise ReplicaLost(f"rollout replica {self.number} has no engine: {self._why}")
        return self.engine

    async def _along(self, call: Callable[[RolloutEngine], Coroutine[Any, Any, T]]) -> T | None:
        engine = self.engine
        if self._why is None:
            try:
                return await call(engine)
            except ReplicaLost as e:
                self._lose(engine, e)
        return None

    def _new(self) -> RolloutEngine:
        def died(why: BaseException) -> None:
            self._deaths.append((made, why))
            if self._loop is not None:
                with contextlib.suppress(RuntimeError):  # it has ended
                    self._loop.call_soon_threadsafe(self._hear)

        made = self._start(died)
        return made

    def _hear(self) -> None:
        while self._deaths:
            self._lose(*self._deaths.popleft())

    def _lose(self, engine: RolloutEngine, why: BaseException) -> None:
        if engine is not self.engine or self._why is not None:
            return
        self._why = why
        self._judged.set()
        self._tell(self.number, why)
        self._restart = asyncio.create_task(self._again(engine), name=f"restart replica {self.number}")

    async def _again(self, engine: RolloutEngine) -> None:
        while self._why is not None:
            with contextlib.suppress(Exception):  # it may be gone: nothing of it counts any more
                async with asyncio.timeout(CLOSE_S):
                    await engine.close()  # also of one that did not start: it holds a device and its place
            if self.over:
                return
            await self._woken.wait()
            async with self._making:
                if not self._woken.is_set():  # it was put to sleep by then
                    continue
                self._starts -= 1
                try:
                    self.engine = engine = self._new()
                    async with asyncio.timeout(START_S):
                        await engine.capabilities()
                    self._why, self._verified = None, -1
                except Exception as e:
                    self._tell(self.number, e if str(e) else ReplicaLost(f"no new engine within {START_S:g} s"))
