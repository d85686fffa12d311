"""One of the replicas behind a router: its requests, and its updates up to their verification.

If its engine dies or fails an update, `supervisor.py` starts another one in its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from verl.parameter_set import POLICY_SET, set_of
from verl.rollout.base import Completion, GenerateRequest, PauseMode, ReplicaLost, RolloutEngine, WeightReader
from verl.rollout.supervisor import EngineRun, EngineSupervisor, Start
from verl.rollout.wrapper import FOLLOWED, EngineWrapper

JUDGED_S = 3600.0  # for the verification of new weights; a publish has its own deadline

NO_MORE = "no more weights"
"""The base of a replica that gets no weights any more."""


class Replica(EngineWrapper):
    """A `RolloutEngine` with a replaceable engine.

    All requests of a lost engine end with `ReplicaLost`, the running ones too. For a lost engine sleep, wake, pause,
    resume and abort do nothing. A replica serves again only with a new engine that took a publish.

    `lost` is called with the number and the reason once for each lost engine. `starts` and `at_url` are those of
    `EngineSupervisor`.
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
    ) -> None:
        self.number, on_lost = number, partial(lost, number)
        self.supervisor = EngineSupervisor(number, start, on_lost=on_lost, starts=starts, at_url=at_url)

    @property
    def engine(self) -> RolloutEngine:
        return self.supervisor.current.engine

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def base(self) -> str:
        if self.supervisor.serves:
            return self.engine.base
        return NO_MORE if self.supervisor.over else ""

    @property
    def ready(self) -> bool:
        """True if the engine is not lost and has loaded the weights of the last publish."""
        return self.supervisor.serves and self.supervisor.current.loaded

    @property
    def sets(self) -> Mapping[str, int]:
        """The verified versions of the LoRA sets on its present weights, by id."""
        return self.supervisor.current.sets if self.ready else {}

    # -- requests ------------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return the whole answer. An engine that cannot continue `begun` samples from the beginning."""
        begun, of = request.begun, self.supervisor.current
        try:
            of = self.supervisor.live()
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
            latest = max((version for version, _, _ in found.spans), default=-1)
            if latest > of.verified_of(request.parameters):
                await self._wait_verified(of)
            self.supervisor.check(of)  # an answer of a lost engine is not valid
            if request.parameters != POLICY_SET.id and latest > of.verified_of(request.parameters):
                raise ValueError(f"{request.id}: LoRA set {request.parameters!r} was refused as it failed its canary")
        except ReplicaLost:
            if begun is not None:  # tokens that were not verified here are dropped
                begun.keep(0, of.verified)
            raise
        return found

    async def forward(self, method: str, *args: Any, **named: Any) -> Any:
        """Call the method of the engine. For a lost engine a method of `FOLLOWED` does nothing and returns None; others
        raise ReplicaLost."""
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
        """Load weights. Answers that they sample are held back until `mark_verified`."""
        of, parameters = self.supervisor.live(), set_of(source)
        if parameters.id != POLICY_SET.id:
            while not of.judged.is_set():  # one at a time: a verification names no set
                await of.judged.wait()
            self.supervisor.check(of)
            of.judging = parameters.id, source.version
            of.judged.clear()
            return await of.engine.load_weights(source, on_inflight=on_inflight)
        of.in_publish, of.loaded = True, False
        of.judging = None
        of.judged.clear()
        of.verified = min(of.verified, source.version - 1)
        version = await of.engine.load_weights(source, on_inflight=on_inflight)
        if not of.engine.base or of.engine.base != of.base:  # sets of another base were dropped
            of.sets.clear()
        of.base = of.engine.base
        of.able = await of.engine.capabilities()
        of.loaded = True
        return version

    def mark_verified(self) -> None:
        of = self.supervisor.current
        if self.ready and not of.judged.is_set():
            if of.judging is not None:
                of.sets[of.judging[0]], of.judging = of.judging[1], None
            else:
                of.verified = of.engine.version
            of.engine.mark_verified()
            of.judged.set()

    async def drop_set(self, name: str) -> None:
        """Drop a LoRA set. Unverified answers of it do not count."""
        of = self.supervisor.live()
        of.sets.pop(name, None)
        try:
            await of.engine.drop_set(name)
        finally:
            if of.judging is not None and of.judging[0] == name:
                of.judging = None
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
