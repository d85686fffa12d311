"""A rollout engine that is a server, over HTTP (`RolloutEngine`). The differences between kinds of servers are in its
`Api`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from verl.parameter_set import POLICY_SET, set_of
from verl.rollout.adapters import ServerAdapters, check_adaptable
from verl.rollout.answers import ServerAnswers
from verl.rollout.api import Api, Deadlines, Expected
from verl.rollout.base import (
    BaseEngine,
    Capabilities,
    Completion,
    GenerateRequest,
    Media,
    PauseMode,
    RolloutContext,
    Traits,
    WeightReader,
    check_inputs,
)
from verl.rollout.calls import RunningCalls
from verl.rollout.connection import ServerConnection
from verl.rollout.gate import ServerGate
from verl.rollout.launching import Launch
from verl.rollout.liveness import LivenessWatch
from verl.rollout.starting import ServerStart
from verl.rollout.updates import ServerUpdates
from verl.rollout.weight_format import format_of_server


class ServedEngine(BaseEngine):
    """A `RolloutEngine` that is a server at the URL `at`, or one that `at` starts and that ends with this engine.
    `router` is the URL of an external router in front of the servers of all replicas; requests are sent through it.

    Each part has its own state: the connection, the start, the running calls, the gate (pauses and sleep), the watch
    of its liveness, the answers, the updates of weights and the adapters. The methods here pass calls to them.
    """

    def __init__(
        self,
        context: RolloutContext,
        expected: Expected,
        api: Api,
        at: str | Launch,
        able: Capabilities,
        deadlines: Deadlines | None = None,
        api_key: str | None = None,
        router: str | None = None,
    ) -> None:
        check_adaptable(context, able)
        limits = deadlines or Deadlines()
        self.connection = ServerConnection(context, expected, api, at, able, limits, api_key, router)
        self.calls = RunningCalls(self.connection)
        self.adapters = ServerAdapters(self.connection, self.calls)
        self.start = ServerStart(self.connection, self.adapters.load_zeros)
        self.gate = ServerGate(self.connection, self.calls, self.start)
        self.watch = LivenessWatch(self.connection, self.calls, self.gate)
        self.answers = ServerAnswers(self.connection, self.calls, self.gate, self.watch, self.adapters)
        self.updates = ServerUpdates(self.connection, self.start, self.calls, self.gate, self.adapters)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return the whole answer. `prefix_key` is not used: a server finds equal prompts by their ids."""
        self._check_inputs(request.id, request.parameters, request.media, request.sampling.noise)
        return await self.answers.generate(request)

    async def score(
        self, ids: np.ndarray, *, temperature: float = 1.0, parameters: str = POLICY_SET.id, media: Media = ()
    ) -> np.ndarray:
        self._check_inputs("score", parameters, media)
        if media:
            raise ValueError(f"score: {len(media)} media, and a server scores text alone; remove them")
        return await self.answers.score(ids, temperature, parameters)

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        self.connection.check_alive()
        return await self.calls.abort(request_ids)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Pause: running requests stop where they are (keep), finish first (wait) or return (abort). New ones wait."""
        await self._up()
        await self.gate.pause(mode)

    async def resume(self) -> None:
        await self._up()
        await self.gate.resume()

    async def load_weights(self, source: WeightReader, *, on_inflight: PauseMode = "wait") -> int:
        self.connection.check_alive()
        if set_of(source).id == POLICY_SET.id:
            return await self.updates.load(source, on_inflight)
        await self.start.up()
        self.connection.check_weights("load_weights")
        return await self.adapters.load(source, on_inflight)

    def mark_verified(self) -> None:
        if self.connection.router is not None and self.connection.fenced is None:
            self.connection.router.mark_verified(self.version)

    async def drop_set(self, name: str) -> None:
        await self._up()
        await self.adapters.drop(name)

    async def sleep(self, level: int = 1) -> int:
        return await self.gate.sleep(level)

    async def wake(self, tags: Sequence[str] = ("weights", "kv")) -> None:
        await self.gate.wake(tags)

    async def capabilities(self) -> Capabilities:
        """Wait until the server has started, and return its abilities."""
        connection = self.connection
        await self.start.up()
        stops = connection.context.decode is not None  # stop strings are searched here
        confirmed = {f.name: getattr(connection.api.traits, f.name) for f in fields(Traits)}
        wide = await connection.api.float32_tensors(connection.call)
        context = connection.context
        form = await asyncio.to_thread(format_of_server, context.hf_config, context.dtype, wide, fp8=context.fp8)
        return replace(connection.able, **confirmed | {"stop_strings": stops, "weights": form})

    async def close(self) -> None:
        if self.connection.closed:
            return
        self.connection.closed = True
        self.watch.close()
        self.start.close()
        try:
            await self.gate.close()
        finally:  # the rest ends with the connection
            try:
                await self.adapters.close()
            finally:
                await self.connection.disconnect()
        await self.connection.stop()

    @property
    def version(self) -> int:
        return self.connection.version

    @property
    def base(self) -> str:
        """The identity of the weights under the policy's LoRA factors; "" for a policy without factors."""
        lost = self.connection.fenced is not None or self.connection.exited
        return self.connection.identity if self.adapters.has_policy and not lost else ""

    async def _up(self) -> None:
        self.connection.check_alive()
        await self.start.up()

    def _check_inputs(self, what: str, parameters: str, media: Media, noise: bool = False) -> None:
        self.connection.check_alive()
        check_inputs(self.connection.able, what, parameters, media, noise)
