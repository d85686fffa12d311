"""Rollout engines in processes of their own: one actor each, which serves many calls at a time."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from verl.parameter_set import POLICY_SET
from verl.processes.memory import return_device_memory
from verl.rollout.base import Capabilities, Completion, GenerateRequest, PauseMode, ReplicaLost
from verl.rollout.wrapper import EngineWrapper
from verl.workers.answers import RankAnswer, failed_answer, raised
from verl.workers.group import DevicePlace, Died
from verl.workers.ray.group import Live
from verl.workers.ray.life import Where, this_process


class ReplicaActor:
    """The actor of one rollout engine. Its event loop serves many calls at a time. `ask` calls the engine's methods."""

    def __init__(self, env: Mapping[str, str]) -> None:
        os.environ.update(env)
        self._engine: Any = None
        self._broken: RankAnswer | None = None
        self._built = asyncio.Event()

    async def build(self, place: DevicePlace, made: bytes) -> None:
        try:
            build, (set_up, args) = pickle.loads(made)
            set_up(place)
            self._engine = build(*args)
        except BaseException as e:
            self._broken = failed_answer(e)
        self._built.set()

    async def where(self) -> Where:
        return this_process()

    async def ask(self, method: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> RankAnswer:
        await self._built.wait()
        if self._broken is not None:
            return self._broken
        try:
            called = self._load_weights if method == "load_weights" else getattr(self._engine, method)
            found = await called(*args, **named)
            if method == "sleep":
                return_device_memory()  # the trainer is another process
            return RankAnswer(found)
        except (asyncio.CancelledError, Exception) as e:
            return failed_answer(e)

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def _load_weights(self, source: Any, on_inflight: PauseMode) -> tuple[int, set[str], dict[str, float]]:
        from verl.weight_sync.base import CheckedReader

        reader = CheckedReader(source)
        return await self._engine.load_weights(reader, on_inflight=on_inflight), reader.delivered, reader.seconds


class RayReplica(EngineWrapper):
    """A `RolloutEngine` in another process."""

    def __init__(self, name: str, actor: Any, built: Any, live: Live, on_death: Died) -> None:
        self._name, self._actor, self._on_death = name, actor, on_death
        self._version, self._base = -1, ""
        self._dead: ReplicaLost | None = None
        self._life = live(name, actor, actor.watch.remote(), built, died=self._died)

    async def generate(self, request: GenerateRequest) -> Completion:
        try:
            return await self._ask(
                "generate", replace(request, begun=None, on_tokens=None)
            )  # they stay in this process
        except asyncio.CancelledError:
            self._actor.ask.remote("abort", ([request.id],), {})  # the caller has given up, so its row is released
            raise

    async def load_weights(self, source: Any, *, on_inflight: PauseMode = "wait") -> int:
        """Load weights in the other process and return the version. `source` is a `CheckedReader`; the other process
        reads and checks the tensors with a reader of its own, and its results are copied into `source`."""
        base, policy = source.identity, source.parameters.id == POLICY_SET.id
        with_base = policy and (bool(base) or source.parameters.whole)  # else it has factors on the present one alone
        self._base = "" if with_base else self._base
        version, delivered, source.seconds = await self._ask("load_weights", source.source, on_inflight)
        source.delivered |= delivered
        if policy:
            self._version = version
        self._base = base if with_base else self._base
        return int(version)

    async def sleep(self, level: int = 1) -> int:
        freed = await super().sleep(level)
        self._base = self._base if level == 1 else ""  # it has no weights
        return freed

    async def capabilities(self) -> Capabilities:
        """Return the engine's capabilities, without those that need callbacks into this process or access to its
        files."""
        able = await super().capabilities()
        return replace(able, continues=False, reports_tokens=False, prepares_weights=False)

    @property
    def version(self) -> int:
        """The version that was loaded last."""
        return self._version

    @property
    def base(self) -> str:
        return self._base

    async def forward(self, method: str, *args: Any, **named: Any) -> Any:
        return await self._ask(method, *args, **named)

    async def close(self) -> None:
        self._life.over = True
        self._kill()

    async def _ask(self, method: str, *args: Any, **named: Any) -> Any:
        import ray

        if self._dead is not None:
            raise self._dead
        try:
            answer = await self._actor.ask.remote(method, args, named)
        except ray.exceptions.RayActorError as e:
            self._life.died(e)
            raise self._dead or ReplicaLost(f"{self._name} was closed") from None
        if answer.error is not None:
            raise raised(answer, f"{self._name}: {method}")
        return answer.value

    def _died(self, what: str) -> None:
        self._dead = ReplicaLost(what)
        threading.Thread(target=self._kill, daemon=True).start()  # a stopped process would not end by itself
        self._on_death(self._dead)

    def _kill(self) -> None:
        import ray

        ray.kill(self._actor, no_restart=True)
