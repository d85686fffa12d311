"""One of the rollout engines behind a router: its requests, and its updates up to their verification.

If its engine dies or fails an update, `supervisor.py` starts another one in its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from verl.parameter_set import POLICY_SET
from verl.rollout.base import Completion, GenerateRequest, PauseMode, ReplicaLost, RolloutEngine, WeightReader
from verl.rollout.supervisor import EngineRun, EngineSupervisor, Start
from verl.rollout.wrapper import FOLLOWED, EngineWrapper

JUDGED_S = 3600.0  # for the verification of new weights; a publish has its own deadline


class Replica(EngineWrapper):
    """A `RolloutEngine` with a replaceable engine.

    All requests of a lost engine end with `ReplicaLost`, the running ones too. For a lost engine sleep, wake, pause,
    resume and abort do nothing. A replica serves again only with a new engine that took a publish.

    `lost` is called with the number and the reason once for each lost engine. `starts` and `at_url` are those of
    `EngineSupervisor`. `adapters` maps names to folders; an engine loads an adapter before its first request for it.
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
        self.number, on_lost = number, partial(lost, number)
        self.supervisor = EngineSupervisor(number, start, on_lost=on_lost, starts=starts, at_url=at_url)
        self._adapters, self._loading = adapters, asyncio.Lock()

    @property
    def engine(self) -> RolloutEngine:
        return self.supervisor.current.engine

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def ready(self) -> bool:
        """There is an engine, and it has loaded weights."""
        return self.supervisor.serves and self.supervisor.current.loaded

    # -- requests ------------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return the whole answer. An engine that cannot continue `begun` samples from the beginning."""
        begun, of = request.begun, self.supervisor.current
        try:
            of = await self._with_adapter(request.parameters)
            if begun is not None and not (of.able is not None and of.able.continues):
                request = replace(request, begun=None)
            try:
                found = await of.engine.generate(request)
            except ReplicaLost as e:
                self.supervisor.lose(of, e)
                raise
            except Exception as e:
                self.supervisor.check(of, e)  # requests also fail because their engine was closed
                raise
            if any(version > of.verified for version, _, _ in found.spans):
                await self._wait_verified(of)
            self.supervisor.check(of)  # an answer of a lost engine does not count
        except ReplicaLost:
            if begun is not None:  # tokens that were not verified here are dropped
                begun.keep(0, of.verified)
            raise
        return found

    async def score(
        self, ids: np.ndarray, *, temperature: float = 1.0, parameters: str = POLICY_SET.id, media: Sequence[str] = ()
    ) -> np.ndarray:
        await self._with_adapter(parameters)
        return await super().score(ids, temperature=temperature, parameters=parameters, media=media)

    async def forward(self, method: str, *args: Any, **named: Any) -> Any:
        """Call the engine. If it is lost, nothing is done for a method that all replicas follow."""
        if method not in FOLLOWED:
            return await getattr(self.supervisor.live().engine, method)(*args, **named)
        of = self.supervisor.current
        if self.supervisor.serves:
            try:
                return await getattr(of.engine, method)(*args, **named)
            except ReplicaLost as e:
                self.supervisor.lose(of, e)
        return None

    # -- updates -------------------------------------------------------------------------------------------------------

    async def load_weights(self, source: WeightReader, *, on_inflight: PauseMode = "wait") -> int:
        """Load weights and the adapters of the router. Answers that they sample are held back until `mark_verified`."""
        of = self.supervisor.live()
        of.in_publish, of.loaded = True, False
        of.judged.clear()
        of.verified = min(of.verified, source.version - 1)
        version = await of.engine.load_weights(source, on_inflight=on_inflight)
        for name in list(self._adapters):
            await self._with_adapter(name)
        for name in of.adapters.keys() - self._adapters.keys():  # dropped while this replica did not serve
            await self.drop_adapter(name)
        of.able = await of.engine.capabilities()
        of.loaded = True
        return version

    def mark_verified(self) -> None:
        of = self.supervisor.current
        if self.ready and not of.judged.is_set():
            of.verified = of.engine.version
            of.engine.mark_verified()
            of.judged.set()

    def lose(self, why: BaseException) -> None:
        """Give up the engine that took part in the last publish, unless it was replaced already. Its process ends, and
        its requests continue at other replicas."""
        of = self.supervisor.current
        if of.in_publish:
            of.loaded = False
            self.supervisor.lose(of, why)

    async def _wait_verified(self, of: EngineRun) -> None:
        try:
            await asyncio.wait_for(of.judged.wait(), JUDGED_S)
        except TimeoutError:
            self.supervisor.lose(of, why := ReplicaLost(f"nobody verified its weights in {JUDGED_S:g} s"))
            raise why from None

    # -- adapters ------------------------------------------------------------------------------------------------------

    async def load_adapter(self, name: str, folder: str) -> None:
        of = self.supervisor.live()
        await of.engine.load_adapter(name, folder)
        of.adapters[name] = folder

    async def drop_adapter(self, name: str) -> None:
        of = self.supervisor.live()
        await of.engine.drop_adapter(name)
        of.adapters.pop(name, None)

    async def _with_adapter(self, adapter: str) -> EngineRun:
        """Return the engine, after loading the adapter if the router has one of that name."""
        of, folder = self.supervisor.live(), None if adapter == POLICY_SET.id else self._adapters.get(adapter)
        if folder is not None and of.adapters.get(adapter) != folder:
            async with self._loading:
                if of.adapters.get(adapter) != folder:
                    await self.load_adapter(adapter, folder)
        return of

    # -- sleep and end -------------------------------------------------------------------------------------------------

    async def sleep(self, level: int = 1) -> int:
        async with self.supervisor.falling_asleep(level):
            return await super().sleep(level)

    async def wake(self, tags: Sequence[str] = ("weights", "kv")) -> None:
        try:
            await super().wake(tags)
        finally:
            if "kv" in tags:
                self.supervisor.awake()

    async def close(self) -> None:
        await self.supervisor.close()
