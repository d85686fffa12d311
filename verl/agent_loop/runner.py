"""The driver's side of the process in which agent loops and tools are played: they are user code. The engine, the
record of what was sampled, and the check of what is trained stay here; its death costs the attempts that it played."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from verl.agent_loop.base import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, Call, LoopFailed, ServerManager
from verl.agent_loop.hosted import Ask, Drop, Failed, Output, Part, Played, Ready, Refused, host
from verl.agent_loop.registry import Loops
from verl.agent_loop.single_turn import SingleTurnLoop
from verl.data.formats import SINGLE_TURN, Players
from verl.rollout.base import ReplicaLost
from verl.sandbox.companion import Companion
from verl.types import Task

START_S = 600.0
SAID = msgspec.msgpack.Decoder(Ready | Refused | Ask | Drop | Played | Failed)
BROKEN = "ToolBroken: the process of agent loops and tools"


@dataclass(eq=False, slots=True)
class Playing:
    """A trajectory that is played there. record: by the number of the call."""

    manager: ServerManager
    ended: asyncio.Future[list[AgentLoopOutput]]
    known: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    record: dict[int, Call] = field(default_factory=dict)
    asked: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    def end(self, how: list[AgentLoopOutput] | Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(how) if isinstance(how, Exception) else self.ended.set_result(how)


class Runner:
    """One process at a time; one that died is started again for the next trajectory. It belongs to one event loop.
    build: an importable function, which makes the loops there · silent_s: how long its event loop may stand still."""

    def __init__(self, build: Callable[[Any], Loops], given: object, *, silent_s: float) -> None:
        self._build, self._given, self._silent_s = build, given, silent_s
        self._companion: Companion | None = None
        self._starting = asyncio.Lock()
        self._listening: asyncio.Task[None] | None = None
        self._plays: dict[int, Playing] = {}
        self._numbers = itertools.count()

    async def start(self) -> Ready:
        """ValueError for what the user has to mend."""
        companion = await Companion.start(host, (self._build, self._given))
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[Ready] = loop.create_future()
        self._listening = loop.create_task(self._listen(companion, ready))
        try:
            async with asyncio.timeout(START_S):
                found = await ready
        except BaseException as e:
            await loop.run_in_executor(None, companion.kill, "it did not start")
            if isinstance(e, TimeoutError):
                raise LoopFailed(f"{BROKEN} did not start in {START_S:g} s") from None
            raise
        companion.watch(self._silent_s)
        self._companion = companion
        return found

    async def play(self, manager: ServerManager, part: Part) -> list[AgentLoopOutput]:
        """LoopFailed for what the loop raises, and where the process dies."""
        async with self._starting:
            if self._companion is None:
                await self.start()
        companion, play = self._companion, next(self._numbers)
        assert companion is not None
        playing = self._plays[play] = Playing(manager, asyncio.get_running_loop().create_future())
        companion.send(("play", play, part))
        try:
            return await playing.ended
        except (asyncio.CancelledError, ReplicaLost):
            companion.send(("cancel", play))
            raise
        finally:
            del self._plays[play]
            for task in playing.asked.values():
                task.cancel()

    def close(self) -> None:
        """End it, after its tools have been closed."""
        companion, self._companion = self._companion, None
        if companion is not None:
            companion.stop(("close", 0))

    async def _listen(self, companion: Companion, ready: asyncio.Future[Ready]) -> None:
        async for frame in companion.frames():
            try:
                self._hear(companion, SAID.decode(frame), ready)
            except (msgspec.DecodeError, asyncio.InvalidStateError, LookupError, ValueError):
                companion.kill("it said what no process of ours says")
        died = LoopFailed(f"{BROKEN} is gone: {companion.ended}")
        if self._companion is companion:
            self._companion = None
            for playing in self._plays.values():
                playing.end(died)
        if not ready.done():
            ready.set_exception(died)

    def _hear(
        self, companion: Companion, said: Ready | Refused | Ask | Drop | Played | Failed, ready: asyncio.Future[Ready]
    ) -> None:
        if isinstance(said, Ready):
            ready.set_result(said)
        elif isinstance(said, Refused):
            ready.set_exception(ValueError(said.text) if said.for_user else LoopFailed(said.text))
        elif (playing := self._plays.get(said.play)) is None:
            return  # it was given up
        elif isinstance(said, Ask):
            ids = np.concatenate([playing.known[: said.keep], np.frombuffer(said.ids, np.int64)])
            playing.known = ids
            playing.asked[said.call] = asyncio.create_task(self._answer(companion, playing, said, ids))
        elif isinstance(said, Drop):
            playing.asked[said.call].cancel()
        elif isinstance(said, Failed):
            playing.end(LoopFailed(said.text))
        else:
            playing.manager.take_over([playing.record[call] for call in said.recorded], said.told)
            playing.end([_output(one) for one in said.outputs])

    async def _answer(self, companion: Companion, playing: Playing, said: Ask, ids: np.ndarray) -> None:
        manager = playing.manager
        key, adapter, media = manager.prefix_key, manager.adapter, manager.media
        try:
            completion = await manager.engine.generate(
                said.request_id, ids, said.sampling, prefix_key=key, adapter=adapter, media=media
            )
        except ReplicaLost as e:
            return playing.end(e)
        except Exception as e:  # the loop there may know what to do
            same = ValueError(str(e)) if isinstance(e, ValueError) else RuntimeError(f"{type(e).__name__}: {e}")
            return companion.send(("failed", said.play, said.call, same))
        playing.record[said.call] = Call(ids, completion, completion.ids.tolist())
        companion.send(("sampled", said.play, said.call, completion))


def _output(said: Output) -> AgentLoopOutput:
    prompt, response = (np.frombuffer(ids, np.int64) for ids in (said.prompt_ids, said.response_ids))
    return AgentLoopOutput(
        *(prompt, response, np.frombuffer(said.mask, np.bool_)),  # type: ignore[arg-type]
        reward_score=said.reward_score,
        num_turns=said.num_turns,
        metrics=AgentLoopMetrics(generate_sequences=said.generate_s, tool_calls=said.tool_s),
        extra_fields=said.extra_fields,
    )


class HostedLoop(AgentLoopBase):
    """A loop that is played there."""

    ends_when_cancelled = True

    def __init__(self, manager: ServerManager, task: Task, runner: Runner) -> None:
        super().__init__(None, manager, None)
        self._task, self._runner = task, runner

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        part = Part(task=self._task, manager=self.server_manager.made_of(), params=sampling_params, row=kwargs)
        return await self._runner.play(self.server_manager, part)


async def hosted_loops(runner: Runner, config: Any, tokenizer: Any) -> Loops:
    """See `load_loops`; answers of one turn are made here, as nothing in them is the user's."""
    ready = await runner.start()

    def make(manager: ServerManager, task: Task) -> AgentLoopBase:
        if (task.agent or ready.default) == SINGLE_TURN:
            return SingleTurnLoop(config, manager, tokenizer)
        return HostedLoop(manager, task, runner)

    players = Players(ready.default, tuple(ready.names), tuple(ready.tools))
    contents: Mapping[str, str] = MappingProxyType(ready.contents)
    return Loops(players=players, make=make, notes=tuple(ready.notes), contents=contents, close=runner.close)
